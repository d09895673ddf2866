"""The train step: gradients from the mesh, then clip, update and bookkeeping on the stored shards."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax import ops
from megajax.config import Config
from megajax.config.kinds import layer_windows
from megajax.mesh import mesh_sizes
from megajax.model import Transformer, init_parameters, parameters
from megajax.model.transformer import COUNTS, ROUTER_LOSSES, layer_state
from megajax.optim import make_optimizer, make_schedule
from megajax.parallel.gradients import gradient_function, loss_function
from megajax.parallel.local import Kernels, LocalModel
from megajax.parallel.weights.scaling import Scaling
from megajax.sharding import BATCH_SPEC, Placement, pad_storage, place_all, shardings, stored_rows

BATCH_DTYPES = {
    "tokens": jnp.int32,
    "targets": jnp.int32,
    "loss_mask": jnp.float32,
    "positions": jnp.int32,
    "segment_ids": jnp.int32,  # with `data.reset_attention` only
    "order": jnp.int32,  # the index of each token in its sequence, if `TrainProgram.deals_out_tokens`
}
INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_STEPS = 2000  # as NVIDIA's and Megatron's dynamic loss scaling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a step reads and writes, donated to it; parameters as stored, by name."""

    params: dict[str, jax.Array]
    optimizer: Any
    fp8: dict[str, jax.Array]  # amax histories of delayed scaling, [L, length] FP32; else empty
    experts: dict[str, jax.Array]  # `expert_bias` [L, E] FP32, L MoE layers, if the routers have one; else empty
    step: jax.Array  # int32, optimizer steps taken or skipped
    loss_scale: jax.Array  # FP32; 1 unless the compute dtype is float16
    scale_age: jax.Array  # int32, steps since the loss scale changed
    skipped: jax.Array  # int32, updates skipped because of a non-finite loss or gradient
    skipped_in_row: jax.Array  # int32, the same since the last good step


@dataclass(frozen=True)
class TrainProgram:
    """The model, how it lies on the mesh, and the functions that train it. Nothing is compiled until it is called."""

    config: Config
    mesh: Mesh
    model: Transformer
    placements: dict[str, Placement]
    optimizer: optax.GradientTransformation
    kernels: Kernels

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> "TrainProgram":
        """The program of a checked config on a mesh. Raises ConfigError for a kernel that cannot run."""
        model = Transformer(config.model)
        declared = parameters(model)
        optimizer = make_optimizer(config.optimizer, {name: p.role for name, p in declared.items()})
        sizes = mesh_sizes(mesh)
        rows = stored_rows(config, sizes["pipeline"])
        placements = place_all(declared, sizes, rows, config.mesh.experts_over)
        return cls(config, mesh, model, placements, optimizer, Kernels.choose(config, mesh))

    @cached_property
    def local(self) -> LocalModel:
        return LocalModel.build(self.config, self.model, self.placements, self.mesh, self.kernels)

    @cached_property
    def state_shardings(self) -> TrainState:
        """A TrainState of shardings: moments lie as their parameters do, scalars everywhere."""
        return self.per_parameter(shardings(self.placements, self.mesh), NamedSharding(self.mesh, P()))

    @cached_property
    def abstract_state(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings."""
        shapes = jax.eval_shape(self._init)
        return jax.tree.map(
            lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
            shapes,
            self.state_shardings,
        )

    @property
    def batch_sharding(self) -> NamedSharding:
        """Of fields `[M, B, S]`, whose S is in the order that `context` wants: `training.batches.to_global`."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def batch_shape(self) -> tuple[int, int, int]:
        """`[M, B, S]` of a global batch."""
        batch = self.config.batch
        return batch.num_microbatches, batch.global_size // batch.num_microbatches, batch.sequence_length

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape, sharding = self.batch_shape, self.batch_sharding
        fields = {n: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for n, dtype in BATCH_DTYPES.items()}
        if not self.config.data.reset_attention:
            del fields["segment_ids"]
        if not self.deals_out_tokens:
            del fields["order"]
        return fields

    @property
    def deals_out_tokens(self) -> bool:
        """Whether the tokens of a sequence are dealt out over `context` by the work of its documents.

        Not where the devices share the heads instead, nor where windows make the work of all tokens alike and the ring
        skips devices.
        """
        whole = any(window is None for window in layer_windows(self.config.model))
        shared = mesh_sizes(self.mesh)["context"] > 1 and self.config.kernels.context != "all_to_all"
        return self.config.data.reset_attention and shared and whole

    @property
    def first_loss_scale(self) -> jax.Array:
        return jnp.float32(INITIAL_LOSS_SCALE if self.config.precision.compute == "float16" else 1.0)

    def init_state(self) -> TrainState:
        """The first state, made on the devices in its shards: no device and no host ever holds it whole."""
        return jax.jit(self._init, out_shardings=self.state_shardings)()

    @cached_property
    def train_step(self) -> Callable:
        """Jitted (state, batch) → (new state, metrics); the state is donated."""
        return jax.jit(
            partial(_train_step, self, gradient_function(self.local, self.mesh)),
            donate_argnums=0,
            out_shardings=(self.state_shardings, NamedSharding(self.mesh, P())),
        )

    @cached_property
    def eval_step(self) -> Callable:
        """Jitted (parameters, FP8 history, batch, state=layer state) → (summed loss, valid tokens)."""
        return jax.jit(loss_function(self.local, self.mesh))

    def _init(self) -> TrainState:
        seed, std = self.config.run.seed, self.config.model.init_std
        weights = init_parameters(self.model, seed, std, {n: p.layers for n, p in self.placements.items()})
        params = {name: pad_storage(w, self.placements[name]) for name, w in weights.items()}
        zero = jnp.zeros((), jnp.int32)
        history = Scaling(self.config).first_history()
        experts = {name: jnp.zeros(a.shape, a.dtype) for name, a in layer_state(self.config.model).items()}
        optimizer = self.optimizer.init(params)
        return TrainState(params, optimizer, history, experts, zero, self.first_loss_scale, zero, zero, zero)

    def per_parameter(self, values: dict[str, Any], scalar: Any) -> TrainState:
        """A state-shaped tree with each parameter's value at the parameter and its moments, `scalar` elsewhere."""
        shapes = jax.eval_shape(self._init)
        optimizer = optax.tree_map_params(
            self.optimizer,
            lambda _, value: value,
            shapes.optimizer,
            values,
            transform_non_params=lambda _: scalar,
        )
        history, experts = ({name: scalar for name in state} for state in (shapes.fp8, shapes.experts))
        return TrainState(values, optimizer, history, experts, scalar, scalar, scalar, scalar, scalar)


def _train_step(program: TrainProgram, gradients_of: Callable, state: TrainState, batch):
    config = program.config
    sums, gradients, norm, history, layers = gradients_of(
        state.params, state.fp8, batch, state.step, state.loss_scale, state=state.experts
    )
    experts = {
        name: ops.router.updated_bias(bias, layers["expert_counts"], config.model.router.bias_update_rate)
        for name, bias in state.experts.items()
    }
    finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)
    if config.optimizer.clip_norm > 0:
        clip = jnp.minimum(1.0, config.optimizer.clip_norm / (norm + 1e-6))
        gradients = jax.tree.map(lambda g: g * clip, gradients)
    with jax.named_scope("optimizer"):
        learning_rate = make_schedule(config.schedule)(state.step + 1)
        directions, optimizer = program.optimizer.update(gradients, state.optimizer, state.params)
        params = jax.tree.map(lambda p, d: p - learning_rate * d, state.params, directions)

        # A step that went bad changes no weight, no moment and no scale.
        before = state.params, state.optimizer, state.fp8, state.experts
        params, optimizer, history, experts = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (params, optimizer, history, experts), before
        )
    skipped = (~finite).astype(jnp.int32)
    state = replace(
        state,
        params=params,
        optimizer=optimizer,
        fp8=history,
        experts=experts,
        step=state.step + 1,
        skipped=state.skipped + skipped,
        skipped_in_row=(state.skipped_in_row + 1) * skipped,
    )
    metrics = {
        "loss": sums["loss"],
        "grad_norm": norm,
        "learning_rate": jnp.asarray(learning_rate, jnp.float32),
        "skipped": state.skipped,
        "skipped_in_row": state.skipped_in_row,
    }
    if config.model.z_loss > 0:
        metrics["z_loss"] = sums["z_loss"]
    if "attention_imbalance" in sums:
        metrics["attention_imbalance"] = sums["attention_imbalance"]
    metrics |= _router_metrics(layers)
    if config.precision.compute == "float16":
        metrics["loss_scale"] = state.loss_scale
        state = _update_loss_scale(state, finite)
    return state, metrics


def _router_metrics(layers: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What is logged of the MoE layers' metrics `[L, ...]`: summed losses, mean entropy, the COUNTS of each layer."""
    metrics = {name: layers[name].sum() for name in ROUTER_LOSSES if name in layers}
    if layers:
        metrics["router_entropy"] = layers["router_entropy"].mean()
    return metrics | {name: layers[name] for name in COUNTS if name in layers}


def _update_loss_scale(state: TrainState, finite: jax.Array) -> TrainState:
    """Halve on overflow, double after a long run of good steps (Micikevicius et al. 2018)."""
    age = jnp.where(finite, state.scale_age + 1, 0)
    grow = age >= LOSS_SCALE_GROWTH_STEPS
    factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
    return replace(state, loss_scale=jnp.maximum(state.loss_scale * factor, 1.0), scale_age=jnp.where(grow, 0, age))
