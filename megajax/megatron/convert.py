"""Weights from a checkpoint of Megatron-Core onto the devices of a mesh."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from megajax.config import ModelConfig
from megajax.hf.reader import Reader, check_tensors
from megajax.megatron.distributed import MegatronTensors
from megajax.megatron.gpt import entries
from megajax.model.block import state_by_name


def load(
    folder: str | Path,
    params: Mapping[str, jax.ShapeDtypeStruct],
    layer_state: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    model: ModelConfig,
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """The parameters of a checkpoint in the canonical shapes, and the layer state, as `checkpoint.restore_model`.

    They have the dtypes and the shardings of `params` and `layer_state`. Each process reads only the blocks that its
    devices hold. The checkpoint may have prediction modules that `model` does not have. Raises InputError for a
    checkpoint that is damaged or of another model.
    """
    shapes = {name: array.shape for name, array in {**params, **state_by_name(layer_state)}.items()}
    with open_readers(folder, shapes, model) as readers:

        def on_devices(name: str, array: jax.ShapeDtypeStruct) -> jax.Array:
            return readers[name].on_devices(array.sharding, array.dtype)

        kept = {
            kind: {name: on_devices(f"blocks.{kind}.{name}", array) for name, array in own.items()}
            for kind, own in layer_state.items()
        }
        return {name: on_devices(name, array) for name, array in params.items()}, kept


@contextlib.contextmanager
def open_readers(
    folder: str | Path, shapes: Mapping[str, Sequence[int]], model: ModelConfig
) -> Iterator[dict[str, Reader]]:
    """A reader of each parameter of these canonical shapes, and of the layers' state, by name. Errors as in `load`."""
    with MegatronTensors(folder, model) as weights:
        found = {entry.ours: entry for entry in entries(model)}
        assert found.keys() >= shapes.keys(), shapes.keys() - found.keys()
        readers = {name: Reader(weights, found[name], model, shape) for name, shape in shapes.items()}
        check_tensors(weights, [*readers.values()], () if model.mtp_layers else ("mtp.",))
        yield readers
