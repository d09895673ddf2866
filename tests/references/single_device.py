"""Runs of a config on a mesh, their references, and the difference of two runs.

A reference is megajax/reference.py (`expected`), or the same config on one device (`train` of `reference_config`). Runs
are in FP32 on virtual CPU devices; the caller starts the mesh's number of them. dev/mesh_table.py makes tables of
these comparisons; the tests of parallelism make them too.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mesh_models import MODELS

from megajax.config import Config, ModelConfig
from megajax.config.checks import check, check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, parameters
from megajax.model.lora import A, B, adapters
from megajax.model.moe import MoE
from megajax.optim import make_schedule
from megajax.reference import Reference, adamw
from megajax.schema.fields import BATCH_AXES
from megajax.sharding import Placement
from megajax.tools.verify.runs import batches, canonical, first_gradients, has_first_moments
from megajax.training.batches import to_global
from megajax.training.step import INITIAL_LOSS_SCALE, TrainProgram, TrainState

SCALAR_TOLERANCE = 1e-5  # loss and gradient norm of every step, relative
GRADIENT_TOLERANCE = 1e-4  # each first-step gradient, ‖Δ‖ / ‖g‖, layer by layer
COUNTS, ROUTER_METRICS = ("expert_counts", "dropped_tokens"), set(MoE.METRICS)
# Sums of FP32 numbers in another order than in a plain model; the loss of pairs is of differences of such sums.
PLAIN_VALUE, PLAIN_GRADIENT = 5e-6, 2e-5
ZERO_TOLERANCE = 1e-6  # gradients whose true value is zero, over the norm of the whole gradient

# No two steps have the same rate.
SCHEDULE = {"kind": "linear", "decay_steps": 40}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": {"kind": "adamw"}, "schedule": {**SCHEDULE, "learning_rate": 1e-3}},
    "muon": {"optimizer": {"kind": "muon"}, "schedule": {**SCHEDULE, "learning_rate": 1e-3}},
    "sgd": {"optimizer": {"kind": "sgd", "clip_norm": 0.0}, "schedule": {**SCHEDULE, "learning_rate": 2e-2}},
}


@dataclass(frozen=True)
class Trace:
    """What a run did; weights and gradients by name in their canonical shapes."""

    config: Config
    losses: np.ndarray  # [steps]
    norms: np.ndarray  # [steps]
    initial: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]  # of the first step, before clipping
    router: dict[str, np.ndarray] = field(default_factory=dict)  # metrics of experts, [steps, ...]
    mtp_losses: np.ndarray = field(default_factory=lambda: np.zeros(0))  # of the prediction modules, [steps]


@dataclass(frozen=True)
class Difference:
    """How far a run is from its reference."""

    loss: float  # worst relative difference over the steps, that of prediction modules included
    norm: float  # the same of the gradient norm
    gradients: dict[str, float]  # ‖Δ‖ / ‖g‖ by name, of the worst layer
    zeros: dict[str, float]  # gradients whose true value is zero: the larger norm, over the whole gradient's
    changed: tuple[str, ...]  # weights whose first value is not the same bit for bit
    router: float = 0.0  # worst relative difference of the routers' losses and entropy; infinite: other counts

    @property
    def worst(self) -> tuple[str, float]:
        return max(self.gradients.items(), key=lambda item: item[1])

    def problems(self, scalar: float = SCALAR_TOLERANCE, gradient: float = GRADIENT_TOLERANCE) -> list[str]:
        """What is outside the tolerances, in words; a NaN is."""
        out = [f"initial {name} differs" for name in self.changed]
        out += [f"loss {self.loss:.1e}"] if not self.loss <= scalar else []
        out += [f"gradient norm {self.norm:.1e}"] if not self.norm <= scalar else []
        out += [f"router {self.router:.1e}"] if not self.router <= scalar else []
        out += [f"gradient of {n} {d:.1e}" for n, d in self.gradients.items() if not d <= gradient]
        limit = ZERO_TOLERANCE * gradient / GRADIENT_TOLERANCE
        out += [f"gradient of {n} is not zero: {d:.1e}" for n, d in self.zeros.items() if not d <= limit]
        return out


def make_config(
    model: str | Mapping[str, Any],
    mesh: Mapping[str, int] | None = None,
    *,
    microbatches: int = 1,
    steps: int = 20,
    optimizer: str | Mapping[str, Any] = "adamw",
    **sections: Mapping[str, Any],
) -> Config:
    """A checked config of one of MODELS, or of other `model` settings; `sections` add to or replace single keys."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"steps": steps},
        "model": dict(MODELS[model] if isinstance(model, str) else model),
        "mesh": dict(mesh or {}),
        "precision": {"compute": "float32"},
        "batch": {"global_size": 32, "sequence_length": 16, "num_microbatches": microbatches},
        "data": {"kind": "synthetic"},
        **({"optimizer": dict(optimizer)} if isinstance(optimizer, Mapping) else OPTIMIZERS[optimizer]),
    }
    for name, section in sections.items():
        settings[name] = {**settings.get(name, {}), **section}
    config = Config.model_validate(settings)
    check(config)
    return config


def reference_config(config: Config) -> Config:
    """The same mathematics on one device: one microbatch, nothing recomputed, the plain layer loop, FP32 sums.

    With experts the reference has the same number of microbatches, since their losses are nonlinear in a microbatch.
    For the mean of the microbatches' means it has one for each microbatch of the devices that share sequences.
    """
    settings = config.model_dump(exclude={"mesh", "pipeline", "remat", "kernels", "communication"})
    settings["precision"]["accumulation"] = "float32"
    if config.objective.average == "microbatches":
        settings["batch"]["num_microbatches"] *= math.prod(getattr(config.mesh, axis) for axis in BATCH_AXES)
    elif config.model.num_experts is None:
        settings["batch"]["num_microbatches"] = 1
    return Config.model_validate(settings)


def make_batches(config: Config) -> Iterator[dict[str, np.ndarray]]:
    """The same batches for every seed of the weights; with an encoder, pictures or hidden tokens the loader's."""
    return batches(config, seed=7)


def train(config: Config, weights: Mapping[str, np.ndarray] | None = None) -> Trace:
    """Run a config on the first virtual devices, from its seed or from `weights`."""
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    sizes = check_mesh(config, count)
    program = TrainProgram.build(config, build_mesh(sizes, jax.devices()[:count]))
    state = program.random_state() if weights is None else first_state(program, weights)
    initial, gradients = canonical(program, state.weights), {}
    losses, norms, router, mtp_losses = [], [], {}, []
    for fields in make_batches(config):
        batch = to_global(program, fields)
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        assert 1 <= metrics.get("attention_imbalance", 1) <= max(config.mesh.context, 1)
        shares = [value for name, value in metrics.items() if name.startswith("context_groups/")]
        np.testing.assert_allclose(sum(shares), bool(shares), rtol=1e-6)
        mtp_losses += [float(metrics["mtp_loss"])] if "mtp_loss" in metrics else []
        for name in ROUTER_METRICS & metrics.keys():
            router.setdefault(name, []).append(np.asarray(metrics[name]))
        if not gradients:
            gradients = first_gradients(program, state, norms[0]) if has_first_moments(program) else {}
    router = {name: np.array(values) for name, values in router.items()}
    return Trace(config, np.array(losses), np.array(norms), initial, gradients, router, np.array(mtp_losses))


def expected(config: Config, weights: Mapping[str, np.ndarray]) -> Trace:
    """What `train` of a config must do, by megajax/reference.py: AdamW or SGD, in FP32."""
    schedule = make_schedule(config.schedule)
    reference = Reference(config, OPTAX[config.optimizer.kind](config, lambda count: schedule(count + 1)))
    differentiate, update = jax.jit(reference.losses_and_gradients), jax.jit(reference.updated)
    # Compiled too: operation by operation they would be dozens of programs, of each shape one.
    state, first, steps = jax.jit(reference.first_state)(weights), {}, []
    for fields in make_batches(config):
        losses, gradients, metrics = differentiate(state, fields)
        state = update(state, gradients, metrics)
        own = {name: np.asarray(g) for name, g in gradients.items()}
        norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in own.values()))
        steps.append(losses | {"grad_norm": norm} | router_metrics(metrics))
        assert first or not [name for name, gradient in own.items() if not gradient.any()]  # as in expected_gradients
        first = first or own
    values = {name: np.array([step[name] for step in steps]) for name in steps[0]}
    modules = values.pop("mtp_loss/module").mean(1) if "mtp_loss/module" in values else np.zeros(0)
    router = {name: values[name] for name in ROUTER_METRICS & values.keys()}
    return Trace(config, values["loss"], values["grad_norm"], dict(weights), first, router, modules)


def expected_gradients(
    config: Config, weights: Mapping[str, np.ndarray], fields: Mapping[str, np.ndarray]
) -> tuple[Mapping[str, jax.Array], Mapping[str, np.ndarray]]:
    """(losses, gradients) of the first step with these fields, by megajax/reference.py.

    It shares the layers with the step, so a weight that both do not read shows here alone: it has no gradient.
    """
    reference = Reference(config, optax.identity())
    losses, gradients = jax.jit(reference.losses_and_gradients)(jax.jit(reference.first_state)(weights), fields)[:2]
    gradients = jax.device_get(gradients)
    assert not [name for name, gradient in gradients.items() if not gradient.any()]
    return losses, gradients


def expected_evaluation(config: Config, weights: Mapping[str, np.ndarray], fields: Mapping[str, np.ndarray]) -> float:
    """The loss of an evaluation of one batch, by megajax/reference.py."""
    return float(jax.jit(Reference(config, optax.identity()).loss)(weights, {}, fields)[1][0]["loss"])


def router_metrics(metrics: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, np.ndarray]:
    """Metrics by kind of block, `[L, ...]` → as a step logs them: counts by layer, sums of losses, other means."""
    names = ROUTER_METRICS & {name for own in metrics.values() for name in own}
    of_all = {name: np.concatenate([own[name] for own in metrics.values() if name in own]) for name in names}
    logged = {name: a.sum() if name in MoE.LOSSES else a.mean() for name, a in of_all.items() if name not in COUNTS}
    return {name: np.asarray(logged.get(name, a)) for name, a in of_all.items()}


def sgd(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Heavy-ball momentum and decoupled decay of matrices and embeddings, as OPTIMIZERS has it: without clipping."""
    own, declared = config.optimizer, parameters(Transformer(config.model))
    assert own.clip_norm == 0
    decayed = {name: p.role in ("matrix", "embedding") for name, p in declared.items()}
    decay = optax.add_decayed_weights(own.weight_decay, decayed)
    return optax.chain(optax.trace(own.beta1), decay, optax.scale_by_learning_rate(learning_rate))


OPTAX = {"adamw": adamw, "sgd": sgd}


def weights_of(config: Config) -> dict[str, np.ndarray]:
    """Numbers for every weight in its canonical shape, biases, norms and adapters included: nothing is compiled."""
    model, rng, out = config.model, np.random.default_rng(3), {}
    for name, declared in parameters(Transformer(model, config.lora)).items():
        around = 1.0 if name.endswith("norm") and not model.norm_zero_centred else 0.0
        out[name] = (around + model.init_std * rng.standard_normal(tuple(declared.shape))).astype(np.float32)
    return out


def weights_with_teacher(config: Config) -> dict[str, np.ndarray]:
    """`weights_of` the model, and of its teacher if it has one."""
    own = {} if (teacher := config.of_teacher) is None else weights_of(teacher)
    return weights_of(config) | {f"teacher.{name}": w for name, w in own.items()}


def merged(weights: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """Stacked weights W + scale · A B, without the adapters."""
    out = {name: w for name, w in weights.items() if not name.endswith((A, B))}
    for name in adapters(weights):
        a, b = weights[name + A], weights[name + B]
        low_rank = jnp.einsum("lir,lro->lio", a.reshape(len(a), -1, a.shape[-1]), b.reshape(*b.shape[:2], -1))
        out[name] += scale * low_rank.reshape(out[name].shape)
    return out


def first_state(program: TrainProgram, weights: Mapping[str, np.ndarray]) -> TrainState:
    """The state of step 0 with given weights; quick, for nothing is compiled."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    state = jax.tree.map(zeros, program.abstract_state)

    def given(name: str, leaf: jax.Array) -> jax.Array:
        return jax.device_put(stored(weights[name], program.placements[name], leaf.dtype), leaf.sharding)

    params, frozen = ({name: given(name, leaf) for name, leaf in own.items()} for own in (state.params, state.frozen))
    scale = INITIAL_LOSS_SCALE if program.config.precision.compute == "float16" else 1.0
    return replace(
        state, params=params, frozen=frozen, loss_scale=jax.device_put(np.float32(scale), state.loss_scale.sharding)
    )


def stored(weight: np.ndarray, placement: Placement, dtype: np.dtype) -> np.ndarray:
    """A whole weight as a device stores it, in NumPy: layers in the order of the stages, zeros elsewhere."""
    out = np.zeros(placement.stored_shape, dtype)
    rows = list(range(len(weight)))
    if placement.reordered:
        assert placement.layers is not None
        rows = [placement.layers.index(layer) for layer in placement.canonical_layers]
    out[(rows, *map(slice, weight.shape[1:]))] = weight
    return out


def zero_gradients(config: Config) -> set[str]:
    """Weights whose gradient is zero in exact arithmetic.

    A key's bias, or that of its LayerNorm, adds the same to all scores of a query, which the softmax cancels, unless
    the keys are turned, their scores squashed, or a sink has a score too. A norm after the bias does not cancel it.
    """
    model, vision = config.model, config.model.vision
    towers = {"vision.blocks.dense.attention.key_bias"} if vision is not None and vision.fixed_grid else set()
    return towers | _zero_gradients_of_layers(model)


def _zero_gradients_of_layers(model: ModelConfig) -> set[str]:
    if model.position == "rope" or model.attention_softcap is not None or model.attention_sinks:
        return set()
    name = {False: "key_bias", "layernorm": "key_norm_bias"}.get(model.qk_norm)
    return {f"blocks.{kind}.attention.{name}" for kind in ("dense", "moe", "mtp")} if name else set()


def compare(trace: Trace, reference: Trace) -> Difference:
    """A run against its reference."""
    zeros = zero_gradients(reference.config) & reference.gradients.keys()
    worst, zero = {}, {}
    for name, expected in reference.gradients.items():
        found = trace.gradients[name]
        assert found.shape == expected.shape, name
        if name in zeros:
            larger = max(np.linalg.norm(found), np.linalg.norm(expected))
            zero[name] = float(larger / reference.norms[0])
            continue
        layers = len(expected) if name.startswith("blocks.") else 1
        found, expected = found.reshape(layers, -1), expected.reshape(layers, -1)
        norms = np.linalg.norm(expected, axis=1)
        assert norms.all(), f"the reference's gradient of {name} is zero: it tests nothing"
        worst[name] = float(np.max(np.linalg.norm(found - expected, axis=1) / norms))
    changed = [n for n, w in reference.initial.items() if w.tobytes() != trace.initial[n].tobytes()]
    losses, expected = (np.concatenate([each.losses, each.mtp_losses]) for each in (trace, reference))
    return Difference(
        loss=float(np.max(np.abs(losses / expected - 1))),
        norm=float(np.max(np.abs(trace.norms / reference.norms - 1))),
        gradients=worst,
        zeros=zero,
        changed=tuple(changed),
        router=_router_difference(trace.router, reference.router),
    )


def _router_difference(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> float:
    assert found.keys() == expected.keys()
    if any(not np.array_equal(found[name], values) for name, values in expected.items() if name in COUNTS):
        return math.inf
    return max((float(np.max(np.abs(found[n] / v - 1))) for n, v in expected.items() if n not in COUNTS), default=0)


def check_first_step(
    program: TrainProgram,
    state: TrainState,
    batch: Mapping[str, Any],
    loss: float,
    gradients: Mapping[str, Any],
    **numbers: float,
) -> TrainState:
    """Assert the loss, other metrics and all gradients of a step against those of plain models; the state after it."""
    state, metrics = program.train_step(state, batch)
    assert abs(float(metrics["loss"]) - loss) <= PLAIN_VALUE * abs(loss), (float(metrics["loss"]), loss)
    for name, value in numbers.items():  # such as differences of losses, which have the rounding of these
        assert abs(float(metrics[name]) - value) <= PLAIN_VALUE * max(abs(value), abs(loss)), (name, value)
    found = first_gradients(program, state, float(metrics["grad_norm"]))
    assert found.keys() == gradients.keys()
    zero = ZERO_TOLERANCE * float(metrics["grad_norm"])  # keys' biases without positions have no gradient
    for name, expected in jax.device_get(dict(gradients)).items():
        size = np.linalg.norm(expected)
        limit = PLAIN_GRADIENT * size if size > zero else zero
        assert np.linalg.norm(found[name] - expected) <= limit, name
    return state
