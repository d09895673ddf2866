"""Weights and optimizer state from a checkpoint of Megatron-Core onto the devices of a mesh."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax

from megajax.checkpoint.description import refuse_dense
from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.reader import Reader, check_tensors, on_devices, unread_head
from megajax.layout.kinds import extra_layers
from megajax.megatron import is_distributed, is_legacy
from megajax.megatron.distributed import MegatronTensors, newest
from megajax.megatron.gpt import entries
from megajax.megatron.legacy import LegacyTensors
from megajax.megatron.resume_point import POSITION, without_state
from megajax.model.block import layer_state, state_by_name

MASTERS = ("param", "fp32_param")  # the states that are FP32 weights, of the distributed optimizer and of the other


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
    with open_tensors(folder, model) as weights:
        yield _readers(weights, model, shapes)


@contextlib.contextmanager
def open_training(
    folder: str | Path, model: ModelConfig, shapes: Mapping[str, Sequence[int]], states: Collection[str], optimizer: str
) -> Iterator[dict[str, dict[str, Reader]]]:
    """Readers of the FP32 master weights with the layers' state, under "", and of each of an optimizer's `states`.

    `optimizer` is the setting that chose these. Errors as in `load`, and for a checkpoint without them, or with others.
    """
    with open_tensors(folder, model) as weights:
        found = weights.states - {*MASTERS}
        if states and not found:
            raise InputError(without_state(weights.folder))
        if found != {*states}:
            theirs, ours = (", ".join(sorted(own)) or "nothing" for own in (found, states))
            raise InputError(
                f"{weights.folder} has {theirs} of its optimizer, and {optimizer} keeps {ours}: choose the optimizer of"
                f" the checkpoint, or set {POSITION} to begin without."
            )
        readers = {"": _readers(weights, model, shapes)}
        for state in weights.states & {*MASTERS}:  # of those in FP32 already there are none
            masters = weights.of_state(state)
            held = {n: shape for n, shape in shapes.items() if {*readers[""][n].names.values()} <= _names(masters)}
            readers[""] |= _readers(masters, model, held)
        for name in shapes:
            reader = readers[""][name]
            if narrow := [own for own in reader.names.values() if reader.weights.itemsize(own) < 4]:
                problem = f"{weights.folder} has {narrow[0]} in less than FP32, and no master weight of it"
                raise InputError(f"{problem}: set {POSITION}.")
        yield readers | {state: _readers(weights.of_state(state), model, shapes) for state in states}


def _names(masters: MegatronTensors) -> set[str]:
    """The parameters that have a master weight."""
    return {name.removeprefix(masters.prefix) for name in masters.files}


def _readers(weights: MegatronTensors, model: ModelConfig, shapes: Mapping[str, Sequence[int]]) -> dict[str, Reader]:
    """Of the parameters of these shapes, and, among the weights themselves, of the layers' state."""
    wanted, prefix = dict(shapes), weights.prefix
    if not prefix:
        if model.num_experts is not None and not any(".experts." in name for name in weights.files):
            refuse_dense(str(weights.folder), model, "name another checkpoint")
        wanted |= {name: array.shape for name, array in state_by_name(layer_state(model)).items()}
    found = {entry.ours: replace(entry, theirs=prefix + entry.theirs) for entry in entries(model)}
    if lacking := sorted(wanted.keys() - found.keys()):
        cure = "name a run of megajax, or a Hugging Face folder"
        raise InputError(
            f"{weights.folder}: the model has {lacking[0]}, which Megatron-Core's GPTModel does not have: {cure}."
        )
    readers = {name: Reader(weights, found[name], model, shape) for name, shape in wanted.items()}
    unread = unread_head([entry for name, entry in found.items() if name == "head" and name not in wanted], model)
    check_tensors(weights, [*readers.values()], unread + (() if extra_layers(model) else (f"{prefix}mtp.",)))
    return readers


def open_tensors(folder: str | Path, model: ModelConfig) -> MegatronTensors:
    """The tensors of a checkpoint in either format. Errors as in `load`."""
    found = newest(Path(folder))
    return (LegacyTensors if is_legacy(found) and not is_distributed(found) else MegatronTensors)(found, model)
