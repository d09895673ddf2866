"""The small config's first steps on a mesh of virtual CPU devices, saved and continued on request."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import Checkpoints
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.data.loader import make_loader
from megajax.data.prefixes import Prefixes
from megajax.layout.kinds import EXTRA
from megajax.mesh import build_mesh
from megajax.options.registered import MASKED_TOKENS
from megajax.sharding import to_canonical
from megajax.step.gradients import gradient_function
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram, TrainState
from megajax.weights.scaling import FP8

Arrays = dict[str, np.ndarray]  # by name, in canonical shapes, in the model's order


@dataclass(frozen=True)
class RunTrace:
    """The steps of a run: numbers and layer state of each, weights before and after all of them."""

    first: int  # number of the first step, from 1; later steps than 1 follow a checkpoint
    losses: np.ndarray
    norms: np.ndarray
    states: tuple[Arrays, ...]  # layer state after each step
    gradients: Arrays  # of step 1, before clipping; empty for a continued run
    weights: tuple[Arrays, Arrays]
    problems: tuple[str, ...]  # sentences on arrays that are not equal bit for bit, where they must be
    update_tolerance: float = 1e-2  # relative difference of an update that rounding of gradients explains


class Run:
    """A small config on the first devices, from its seed."""

    def __init__(self, config: Config, sizes: Mapping[str, int]):
        """Raises ConfigError if the config is refused on a mesh of these sizes."""
        count = math.prod(sizes.values())
        config = config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(sizes))})
        if sizes["pipeline"] == 1:
            one_stage = {"schedule": "1f1b", "virtual_stages": 1, "layout": None}
            config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=one_stage)})
        if sizes["pipeline"] > 1 or config.expert_shards(sizes) == 1:
            config = config.model_copy(update={"communication": config.communication.one_by_one})
        self.program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
        self.saver = StateSaver(self.program, {})  # the config's data are not read: `batches`
        self.saved: Arrays = {}  # the state in the checkpoint

    @property
    def saved_step(self) -> int:
        """The step after which a checkpoint is saved."""
        return self.program.config.run.steps // 2

    def train(self, directory: Path | None = None) -> RunTrace:
        """All steps; with `directory` a checkpoint in the middle."""
        return self._steps(self.program.random_state(), 1, directory)

    def resume(self, directory: Path, saved: Arrays) -> RunTrace:
        """The steps after a checkpoint, whose state was `saved`."""
        checkpoints = Checkpoints(directory, keep=1, keep_every=None)
        state = self.saver.restore(checkpoints, self.saved_step)
        checkpoints.close()
        if self.program.abstract_state.frozen:  # frozen weights are not part of a checkpoint
            state = replace(state, frozen=self.program.random_state().frozen)
        restored = canonical_state(self.program, state)
        assert restored.keys() == saved.keys(), restored.keys() ^ saved.keys()
        changed = [name for name, x in restored.items() if x.tobytes() != saved[name].tobytes()]
        trace = self._steps(state, self.saved_step + 1)
        return replace(trace, problems=(*(f"{n} is restored with other values" for n in changed), *trace.problems))

    def _steps(self, state: TrainState, first: int, directory: Path | None = None) -> RunTrace:
        program, config = self.program, self.program.config
        before, gradients, losses, norms, states = canonical(program, state.params), {}, [], [], []
        for step, fields in enumerate(batches(config, config.run.seed), 1):
            if step < first:
                continue
            batch = to_global(program, fields)
            if step == 1 and not has_first_moments(program):
                gradients = computed_gradients(program, state, batch)
            state, metrics = program.train_step(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            states.append({name: np.asarray(x) for name, x in _layer_state(state).items()})
            if step == 1 and not gradients:
                gradients = first_gradients(program, state, norms[0])
            if directory and step == self.saved_step:
                self._save(directory, step, state)
        arrays = state.params | _layer_state(state)
        unequal = [name for name in sorted(arrays, key=position_in_model) if not _copies_agree(arrays[name])]
        problems = tuple(f"{name} differs between devices that hold copies of it" for name in unequal)
        weights = before, canonical(program, state.params)
        tolerance = max(member.optimizer.update_tolerance for member in program.update.slots.members)
        numbers = np.array(losses), np.array(norms)
        return RunTrace(first, *numbers, tuple(states), gradients, weights, problems, tolerance)

    def _save(self, directory: Path, step: int, state: TrainState) -> None:
        self.saved = canonical_state(self.program, state)
        checkpoints = Checkpoints(directory, keep=1, keep_every=None)
        self.saver.save(checkpoints, step, state)
        outcome = checkpoints.outcome(wait=True)
        checkpoints.close()
        if outcome is None or outcome.error:
            raise OSError(outcome.error if outcome else "nothing was saved")


def canonical_state(program: TrainProgram, state: TrainState) -> Arrays:
    """Everything that a checkpoint holds, in canonical shapes, by its name in the train state."""
    state = replace(state, frozen={})
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    stored = jax.tree.leaves(replace(program.stored, frozen={}))
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), x) for path, x in leaves]
    return {
        name: np.asarray(x if array.placement is None else to_canonical(np.asarray(x), array.placement))  # type: ignore[arg-type]
        for (name, x), array in zip(named, stored, strict=True)
    }


def batches(config: Config, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Fields `[global_size, S]` of each step; each sequence masks another share of its tokens, the first all.

    So a mean over devices or microbatches in place of one over tokens gives another loss. With `data.reset_attention`
    sequences hold up to four documents. If the config's data may be padded, the first sequence is whole and of the
    others up to seven eighths are padding. Corrupted spans, pictures and hidden tokens are the loader's, of synthetic
    data.
    """
    rows, length = config.batch.global_size, config.batch.sequence_length
    rng, shares = np.random.default_rng(seed), np.linspace(0, 1, rows)[:, None]
    if config.span_lengths or config.model.vision or config.objective.kind == MASKED_TOKENS:
        for fields in islice(make_loader(config, split="train", rows=np.arange(rows)), config.run.steps):
            yield fields | {"loss_mask": fields["loss_mask"] * (rng.random((rows, length)) < shares)}
        return
    for _ in range(config.run.steps):
        tokens = rng.integers(0, config.model.vocab_size, (rows, length + 1))
        fields = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": rng.random((rows, length)) < shares,
            "positions": np.broadcast_to(np.arange(length), (rows, length)),
        }
        if config.pads_samples("train"):
            lengths = rng.integers(-(-length // 8), length + 1, rows)
            lengths[0] = length
            fields["is_real"] = np.arange(length) < lengths[:, None]
            fields["loss_mask"] &= fields["is_real"]
        if config.data.reset_attention:
            documents = np.sort(rng.integers(0, 4, (rows, length)), axis=1)
            fields["segment_ids"] = documents
        if (prefixes := Prefixes.of(config)) is not None:
            ids = fields.get("segment_ids", np.zeros((rows, length), int))
            lengths = [np.unique(own, return_counts=True)[1] for own in ids]
            fields["is_prefix"] = np.stack([prefixes(own, fields["loss_mask"][i], i) for i, own in enumerate(lengths)])
        if config.data.reset_attention and config.data.reset_positions:
            fields["positions"] = np.arange(length) - [np.searchsorted(row, row) for row in fields["segment_ids"]]
        yield fields


def has_first_moments(program: TrainProgram) -> bool:
    """Whether the first step's gradients are in the moments that it leaves."""
    return all(member.optimizer.first_moment for member in program.update.slots.members)


def first_gradients(program: TrainProgram, state: TrainState, norm: float) -> Arrays:
    """The first step's gradients in FP64, from the slots that it left: so no second function is compiled.

    Rounded moments have none.
    """
    held, limit = state.optimizer, program.config.optimizer.clip_norm
    clip = min(1.0, limit / (norm + 1e-6)) if limit else 1.0
    gradients: Arrays = {}
    for member in program.update.slots.members if held.rounded is None else ():
        assert member.optimizer.first_moment is not None
        slot, share = member.optimizer.first_moment
        own = canonical(program, held.slots[member.kind][slot])
        gradients |= {name: moment.astype(np.float64) / (share * clip) for name, moment in own.items()}
    return gradients


def computed_gradients(program: TrainProgram, state: TrainState, batch: Mapping[str, jax.Array]) -> Arrays:
    """The first step's gradients in FP64, for an optimizer whose moments are not known: compiles a second function."""
    compute = jax.jit(gradient_function(program.graph, program.mesh))
    _, gradients, *_ = compute(state.weights, state.layer_state, batch, state.step, state.loss_scale)
    return {name: g.astype(np.float64) for name, g in canonical(program, gradients).items()}


def canonical(program: TrainProgram, arrays: Mapping[str, jax.Array]) -> Arrays:
    """Stored arrays by name → whole arrays on the host, without padding."""
    whole: dict[str, Any] = {name: np.asarray(arrays[name]) for name in sorted(arrays, key=position_in_model)}
    return {name: np.asarray(to_canonical(x, program.placements[name])) for name, x in whole.items()}


def position_in_model(name: str) -> tuple[int, str]:
    """The position of a parameter in the forward pass, within a block by name; FP8's histories come last."""
    order = ("embedding", "blocks", "final_norm", *(f"blocks.{each.name}" for each in EXTRA), "head", FP8)
    return max(range(len(order)), key=lambda i: len(order[i]) if name.startswith(order[i]) else 0), name


def _layer_state(state: TrainState) -> dict[str, jax.Array]:
    """Layer state by name, as parameters are named: `blocks.moe.moe.expert_bias`, `fp8.attention.query.input`."""
    named = {
        f"{kind}.{name}" if kind == FP8 else f"blocks.{kind}.{name}": x
        for kind, own in state.layer_state.items()
        for name, x in own.items()
    }
    return {name: named[name] for name in sorted(named, key=position_in_model)}


def _copies_agree(x: jax.Array) -> bool:
    """Whether the devices that hold the same part of an array hold the same bits."""
    parts: dict[str, bytes] = {}
    return all(
        parts.setdefault(str(s.index), (data := np.asarray(s.data).tobytes())) == data for s in x.addressable_shards
    )
