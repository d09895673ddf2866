"""Weights from a checkpoint of Megatron-Core onto the devices of a mesh."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.reader import Reader, check_tensors, on_devices
from megajax.megatron.distributed import MegatronTensors
from megajax.megatron.gpt import entries
from megajax.model.block import layer_state, state_by_name


def load(
    folder: str | Path,
    params: Mapping[str, jax.ShapeDtypeStruct],
    kept: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    model: ModelConfig,
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """The parameters of a checkpoint in the canonical shapes, and the layers' state, as `checkpoint.restore_model`.

    They have the dtypes and the shardings of `params` and `kept`. Each process reads only the blocks that its
    devices hold. The checkpoint may have prediction modules that `model` does not have. Raises InputError for a
    checkpoint that is damaged or of another model.
    """
    shapes = {name: array.shape for name, array in params.items()}
    with open_readers(folder, model, shapes) as readers:
        return on_devices(readers, params, kept)


@contextlib.contextmanager
def open_readers(
    folder: str | Path, model: ModelConfig, shapes: Mapping[str, Sequence[int]]
) -> Iterator[dict[str, Reader]]:
    """A reader of each parameter of these canonical shapes, and of the layers' state, by name. Errors as in `load`."""
    wanted = {**shapes, **{name: array.shape for name, array in state_by_name(layer_state(model)).items()}}
    found = {entry.ours: entry for entry in entries(model)}
    if lacking := sorted(wanted.keys() - found.keys()):
        cure = "name a run of megajax, or a Hugging Face folder"
        raise InputError(f"{folder}: the model has {lacking[0]}, which Megatron-Core's GPTModel does not have: {cure}.")
    with MegatronTensors(folder, model) as weights:
        readers = {name: Reader(weights, found[name], model, shape) for name, shape in wanted.items()}
        check_tensors(weights, [*readers.values()], () if model.mtp_layers else ("mtp.",))
        yield readers
