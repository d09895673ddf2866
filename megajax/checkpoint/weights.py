"""Parameters of a checkpoint as NumPy arrays, independent of the devices that wrote them and of those here."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megajax.checkpoint import checksums
from megajax.checkpoint.arrays import check_size, open_arrays
from megajax.checkpoint.manager import find_checkpoint, saved_layer_state
from megajax.checkpoint.storage import Folder, checkpoint_folder, store_errors
from megajax.config import Config, ModelConfig, load_config
from megajax.errors import InputError, reported, shown
from megajax.model.block import layer_state

PARAMS, EMA = "params.", "ema."  # beginnings of the names of parameters, and of their moving averages


def load_weights(run_or_checkpoint: str | Path) -> dict[str, np.ndarray]:
    """The parameters of a run's newest checkpoint, or of one `RUN/checkpoints/STEP`, by their canonical names.

    Layers of one kind are stacked: `blocks.dense.attention.query` is [layers, D, N, H]. The vocabulary is padded to a
    multiple of `model.vocab_multiple`. Reads only parameters (float32 in megajax's checkpoints) and does not start jax.
    Raises InputError if there is no such checkpoint or it is damaged.
    """
    with _damage_reported(item := _item(run_or_checkpoint)):
        reads = {name: array.read() for name, array in _open(item).items()}
        return {name: read.result() for name, read in reads.items()}


def open_weights(run_or_checkpoint: str | Path, which: str = PARAMS) -> dict[str, "StoredArray"]:
    """The same parameters, or with `which=EMA` their moving averages, read when they are indexed.

    Raises InputError as `load_weights` does.
    """
    with _damage_reported(item := _item(run_or_checkpoint)):
        return {name: StoredArray(item, array) for name, array in _open(item, which).items()}


def open_model(
    run_or_checkpoint: str | Path, model: ModelConfig, which: str = PARAMS
) -> tuple[dict[str, "StoredArray"], dict[str, "StoredArray"]]:
    """The same parameters, and the layers' state that is none, by names as in `state_by_name`.

    Raises InputError as `load_weights` does.
    """
    declared = layer_state(model)
    saved = saved_layer_state({kind: {name: f"{kind}.{name}" for name in own} for kind, own in declared.items()})
    with _damage_reported(item := _item(run_or_checkpoint)):
        params = {name: StoredArray(item, array) for name, array in _open(item, which).items()}
        stored = _open(item, "") if saved else {}
        state = {
            f"blocks.{name}": StoredArray(item, stored[f"{group}.{own}"])
            for group, names in saved.items()
            for own, name in names.items()
        }
        return params, state


class StoredArray:
    """One array of a checkpoint; an index reads that part of it."""

    def __init__(self, item: Folder, array: Any):
        self._item, self._array, self.shape = item, array, tuple(array.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        with _damage_reported(self._item):
            return self._array[index].read().result()


def run_config(run_dir: Path, setting: str) -> Config:
    """The config of a run, without warnings about its training; InputError, with `setting`, if there is none."""
    path = run_dir / "config.yaml"
    if not path.is_file():
        raise InputError(f"{setting}={run_dir} has no config.yaml: give the directory of a run.")
    with warnings.catch_warnings(action="ignore"):
        return load_config(path, run_dir=run_dir)


def _item(run_or_checkpoint: str | Path) -> Folder:
    run_dir, step = find_checkpoint(run_or_checkpoint, "run_or_checkpoint")
    checkpoint = checkpoint_folder(run_dir) / str(step)
    if problem := checksums.damage(checkpoint):
        raise InputError(f"{checkpoint} is damaged ({problem}): give another checkpoint.")
    return checkpoint / "state"


def array_headers(checkpoint: Folder) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """(shape, dtype) of all arrays of `RUN/checkpoints/STEP`, optimizer state too, by name; no array is read.

    Raises InputError if it is damaged.
    """
    item = checkpoint / "state"
    with _damage_reported(item):
        return {name: (tuple(array.shape), array.dtype.numpy_dtype) for name, array in open_arrays(item).items()}


def _open(item: Folder, prefix: str = PARAMS) -> dict[str, Any]:
    opened = open_arrays(item, prefix)
    check_size(item, opened)
    return opened


@contextlib.contextmanager
def _damage_reported(item: Folder) -> Iterator[None]:
    with reported(problem := f"{item.parent} is damaged", cure := "give another checkpoint"):
        try:
            with store_errors(item):
                yield
        except ValueError as error:  # tensorstore raises it for all failures
            if isinstance(error, InputError):
                raise
            raise InputError(f"{problem} ({shown(str(error).splitlines()[0])}): {cure}.") from None
