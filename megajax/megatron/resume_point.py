"""The point of a Megatron-LM run at which a checkpoint was saved: its step, its position in the data, its optimizer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megajax.errors import InputError, file_reader, shown
from megajax.megatron.distributed import arguments_in, common_state, newest

MOST = 2**31 - 1  # a step is an int32 on the devices
WEIGHTS, POSITION = "checkpoint.init_state=weights", "checkpoint.init_state=position"


@dataclass(frozen=True)
class SavedTraining:
    """A training at the time of a checkpoint.

    samples: those that its steps have read; updates: those of the optimizer, without skipped steps; rate: the learning
    rate of the next step, if it is known; settings: what decides the order of the data, by section, as in the
    description of a checkpoint.
    """

    folder: Path
    step: int
    samples: int
    updates: int
    rate: float | None
    settings: dict[str, dict[str, Any]]

    def __str__(self) -> str:
        return f"step {self.step} of {self.folder}"


@file_reader("folder")
def saved_training(folder: str | Path) -> SavedTraining:
    """The training of a checkpoint. Raises InputError if the checkpoint does not say where it is."""
    folder = newest(Path(folder))
    common = common_state(folder)
    arguments = arguments_in(common)
    step = _count(folder, "iteration", common.get("iteration"))
    samples = _count(folder, "consumed_train_samples", arguments.get("consumed_train_samples"))
    groups = list(_groups(common.get("optimizer")))
    updates = {_count(folder, "step of the optimizer", group["step"]) for group in groups if group.get("step")}
    if len(updates) > 1:
        found = ", ".join(map(str, sorted(updates)[:4]))
        raise InputError(f"{folder} has parameters with {found} updates, and one number is needed: set {POSITION}.")
    rates = [group["lr"] for group in groups if isinstance(group.get("lr"), float)]
    rate = rates[0] if rates else None
    return SavedTraining(folder, step, samples, next(iter(updates), step), rate, _settings(arguments))


def without_state(folder: Path) -> str:
    """The sentence for a checkpoint without optimizer state that can be read."""
    common = common_state(folder)
    own = common.get("content_metadata")
    kind = own.get("distrib_optim_sharding_type") if isinstance(own, dict) else None
    if kind is None:
        return f"{folder} has no optimizer state that is read: set {POSITION}, or give a checkpoint that has one."
    return (
        f"{folder} has its optimizer state in the format {shown(kind)}, which has the buffers of its own mesh: load it"
        " in Megatron-LM with --dist-ckpt-optim-fully-reshardable, save it again and give that one, or set "
        f"{POSITION} to begin without."
    )


def _count(folder: Path, name: str, value: Any) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < MOST or value != int(value):
        found = "no" if value is None else f"{shown(value)} as"
        raise InputError(f"{folder} has {found} {name}, so the position of its training is unknown: set {WEIGHTS}.")
    return int(value)


def _groups(state: Any) -> Iterator[Mapping[str, Any]]:
    """The groups of parameters of an optimizer, or of several; each with the step that they may have together."""
    if not isinstance(state, dict):
        return
    own = state.get("optimizer", state)
    if not isinstance(own, dict) or "param_groups" not in own:
        for member in (value for key, value in state.items() if isinstance(key, int)):
            yield from _groups(member)
        return
    together = own["state"].get("common_step") if isinstance(own.get("state"), dict) else None
    for group in own["param_groups"] if isinstance(own["param_groups"], list) else ():
        if isinstance(group, dict):
            yield {"step": together} | group


def _settings(arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings that are among the arguments."""
    samples, steps, size = (arguments.get(name) for name in ("train_samples", "train_iters", "global_batch_size"))
    if not samples and isinstance(steps, int) and isinstance(size, int):
        samples = steps * size
    kind = "synthetic" if arguments.get("mock_data") else "indexed"
    found = {
        "run": {"seed": arguments.get("seed")},
        "batch": {"sequence_length": arguments.get("seq_length")},
        "data": {"kind": kind, "order": "megatron", "samples": samples},
    }
    return {section: {key: own for key, own in keys.items() if own is not None} for section, keys in found.items()}
