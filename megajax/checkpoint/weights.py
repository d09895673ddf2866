"""Parameters of a checkpoint as NumPy arrays, independent of the devices that wrote them and of those here."""

from pathlib import Path

import numpy as np
import tensorstore

from megajax.checkpoint.manager import SUBDIRECTORY, find_checkpoint
from megajax.errors import InputError

PREFIX, HEADER = "params.", "/.zarray"  # in orbax's key of an array's header


def load_weights(run_or_checkpoint: str | Path) -> dict[str, np.ndarray]:
    """The parameters of a run's newest checkpoint, or of one `RUN/checkpoints/STEP`, by their canonical names.

    Layers of one kind are stacked: `blocks.dense.attention.query` is [layers, D, N, H]. The vocabulary is padded to a
    multiple of `model.vocab_multiple`. Reads only parameters (float32 in megajax's checkpoints) and does not start jax.
    Raises InputError if there is no such checkpoint or it is damaged.
    """
    run_dir, step = find_checkpoint(run_or_checkpoint, "run_or_checkpoint")
    item = (run_dir / SUBDIRECTORY / str(step) / "state").resolve()
    # Without orbax, because it starts jax, which reserves GPU memory.
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}
    try:
        keys = tensorstore.KvStore.open(store).result().list().result()
        paths = [key.decode().removesuffix(HEADER) for key in keys if key.endswith(HEADER.encode())]
        opened = {
            path.removeprefix(PREFIX): tensorstore.open({"driver": "zarr", "kvstore": store | {"path": f"{path}/"}})
            for path in paths
            if path.startswith(PREFIX)
        }
        reads = {name: array.result().read() for name, array in opened.items()}
        weights = {name: read.result() for name, read in reads.items()}
    except ValueError as error:  # tensorstore raises it for all failures
        raise InputError(
            f"{item.parent} is damaged ({str(error).splitlines()[0][:200]}): give another checkpoint."
        ) from None
    if not weights:
        raise InputError(f"{item.parent} is damaged (it has no parameters): give another checkpoint.")
    return weights
