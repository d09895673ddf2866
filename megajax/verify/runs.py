"""A config's first steps on a mesh of virtual CPU devices, compared with one device."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.sharding import to_canonical
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

SCALAR_TOLERANCE = 1e-5  # loss and gradient norm of every step, relative
GRADIENT_TOLERANCE = 1e-4  # each parameter's first gradient, ‖a − b‖ / ‖b‖
UPDATE_TOLERANCE = 1e-2  # AdamW divides by a gradient's size, and so enlarges the rounding of small gradients
NEGLIGIBLE = 1e-6  # of the whole norm: a smaller gradient is rounding, such as that of GPT-2's key biases


@dataclass(frozen=True)
class Trace:
    """A run: numbers per step, and gradients and updates by parameter, in the model's order."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: dict[str, np.ndarray]  # of the first step, before clipping
    updates: dict[str, np.ndarray]  # of all steps together
    unequal: tuple[str, ...]  # parameters and layer state whose copies on the devices differ


@dataclass(frozen=True)
class Difference:
    """How far a mesh's run is from one device's: relative differences, in the model's order."""

    loss: float
    norm: float
    gradients: dict[str, float]
    updates: dict[str, float]
    unequal: tuple[str, ...]

    @property
    def first(self) -> str | None:
        """The sentence on the first difference above rounding; None: both trained the same model. A NaN differs."""
        for name in self.unequal:
            return f"{name} differs between devices that hold copies of it"
        for kind, values, limit in (
            ("gradient", self.gradients, GRADIENT_TOLERANCE),
            ("update", self.updates, UPDATE_TOLERANCE),
        ):
            wrong = {name: value for name, value in values.items() if not value <= limit}
            if wrong:
                name = next(iter(wrong))
                worst = max(wrong, key=lambda name: math.inf if math.isnan(wrong[name]) else wrong[name])
                return (
                    f"the {kind} of {name} differs by {wrong[name]:.1e} where rounding explains {limit:.0e}; "
                    f"{len(wrong)} of {len(values)} {kind}s differ, most that of {worst}, by {wrong[worst]:.1e}"
                )
        for kind, value in (("loss", self.loss), ("gradient norm", self.norm)):
            if not value <= SCALAR_TOLERANCE:
                return f"the {kind} differs by {value:.1e}; rounding explains {SCALAR_TOLERANCE:.0e}"
        return None


def compare(found: Trace, expected: Trace) -> Difference:
    """A mesh's run against one device's."""
    return Difference(
        float(np.max(np.abs(found.losses / expected.losses - 1))),
        float(np.max(np.abs(found.norms / expected.norms - 1))),
        _relative(found.gradients, expected.gradients),
        _relative(
            {n: w for n, w in found.updates.items() if _counts(expected.gradients, n)},
            {n: w for n, w in expected.updates.items() if _counts(expected.gradients, n)},
        ),
        found.unequal,
    )


def train(config: Config, sizes: Mapping[str, int]) -> Trace:
    """The first `run.steps` steps of a config on the first devices, from its seed. Raises ConfigError."""
    count = math.prod(sizes.values())
    config = config.model_copy(update={"mesh": config.mesh.model_copy(update=dict(sizes))})
    if sizes["pipeline"] == 1:
        one_stage = {"schedule": "1f1b", "rounds": 1, "layout": None}
        config = config.model_copy(update={"pipeline": config.pipeline.model_copy(update=one_stage)})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state = program.init_state()
    initial, gradients, losses, norms = _canonical(program, state.params), {}, [], []
    for fields in _batches(config):
        state, metrics = program.train_step(state, to_global(program, fields))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        gradients = gradients or _first_gradients(program, state.optimizer, norms[0])
    last = _canonical(program, state.params)
    updates = {name: last[name] - weight for name, weight in initial.items()}
    kept = {f"blocks.{kind}.{name}": x for kind, own in state.layer_state.items() for name, x in own.items()}
    names = sorted(arrays := state.params | kept, key=position_in_model)
    unequal = tuple(name for name in names if not _copies_agree(arrays[name]))
    return Trace(np.array(losses), np.array(norms), gradients, updates, unequal)


def _batches(config: Config) -> Iterator[dict[str, np.ndarray]]:
    """Fields `[global_size, S]` of each step; each sequence masks another share of its tokens, the first all.

    So a mean over devices or microbatches in place of one over tokens gives another loss.
    """
    rows, length = config.batch.global_size, config.batch.sequence_length
    rng = np.random.default_rng(config.run.seed)
    for _ in range(config.run.steps):
        tokens = rng.integers(0, config.model.vocab_size, (rows, length + 1))
        fields = {
            "tokens": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": rng.random((rows, length)) < np.linspace(0, 1, rows)[:, None],
            "positions": np.broadcast_to(np.arange(length), (rows, length)),
        }
        if config.data.reset_attention:
            documents = np.sort(rng.integers(0, 4, (rows, length)), axis=1)
            fields["segment_ids"] = documents
        if config.data.reset_attention and config.data.reset_positions:
            fields["positions"] = np.arange(length) - [np.searchsorted(row, row) for row in fields["segment_ids"]]
        yield fields


def _first_gradients(program: TrainProgram, optimizer: Any, norm: float) -> dict[str, np.ndarray]:
    """The first step's gradients, from the moments that it left: so no second function is compiled."""
    settings = program.config.optimizer
    field, share = {"adamw": ("mu", 1 - settings.beta1), "lion": ("mu", 1 - settings.beta2), "sgd": ("trace", 1.0)}[
        settings.kind
    ]
    clip = min(1.0, settings.clip_norm / (norm + 1e-6)) if settings.clip_norm else 1.0
    moments = _canonical(program, optax.tree_utils.tree_get(optimizer, field))
    return {name: moment / (share * clip) for name, moment in moments.items()}


def _canonical(program: TrainProgram, arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    """Stored arrays by name → whole arrays on the host in FP64, without padding, in the model's order."""
    whole: dict[str, Any] = {
        name: np.asarray(arrays[name], np.float64) for name in sorted(arrays, key=position_in_model)
    }
    return {name: np.asarray(to_canonical(x, program.placements[name])) for name, x in whole.items()}


def position_in_model(name: str) -> tuple[int, str]:
    """The place of a parameter in the forward pass; within a block by name."""
    order = ("embedding", "blocks", "final_norm", "blocks.mtp", "head")
    return max(range(len(order)), key=lambda i: len(order[i]) if name.startswith(order[i]) else 0), name


def _copies_agree(x: jax.Array) -> bool:
    """Whether the devices that hold the same part of an array hold the same bits."""
    parts: dict[str, bytes] = {}
    return all(
        parts.setdefault(str(s.index), (data := np.asarray(s.data).tobytes())) == data for s in x.addressable_shards
    )


def _whole_norm(arrays: Mapping[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(x * x)) for x in arrays.values()))


def _counts(gradients: Mapping[str, np.ndarray], name: str) -> bool:
    """Whether a gradient is larger than the rounding of the others."""
    return float(np.linalg.norm(gradients[name])) > NEGLIGIBLE * _whole_norm(gradients)


def _relative(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> dict[str, float]:
    """‖a − b‖ / ‖b‖ by name; of a negligible b over NEGLIGIBLE of the whole norm."""
    least = NEGLIGIBLE * _whole_norm(expected) / GRADIENT_TOLERANCE
    out = {}
    for name, b in expected.items():
        size = float(np.linalg.norm(b))
        scale = size if size > NEGLIGIBLE * _whole_norm(expected) else least
        out[name] = float(np.linalg.norm(found[name] - b)) / scale if scale else 0.0
    return out
