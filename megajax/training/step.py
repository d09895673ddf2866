"""The train step: gradients from the mesh, then norms and bookkeeping; `optim/update.py` clips and updates."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.config import Config, ModelConfig
from megajax.config.sentences import fail, require_config
from megajax.errors import ConfigError
from megajax.layout.kinds import extra_of, layer_kinds
from megajax.mesh import require_mesh
from megajax.model import Transformer, init_parameters
from megajax.model.block import Block, layer_state
from megajax.model.lora import targets
from megajax.model.sublayer import is_maximum
from megajax.model.trained import is_master
from megajax.optim.forms import StateArray
from megajax.optim.groups import clip, clipped_norms
from megajax.optim.offload import on_device
from megajax.optim.optimizer import Updated
from megajax.optim.schedule import check_schedule
from megajax.optim.streamed import StreamedUpdate
from megajax.optim.update import Given, Update
from megajax.parallel.context.token_order import layout_metrics
from megajax.sharding import (
    BATCH_SPEC,
    BLOCKS,
    TEACHER,
    Placement,
    in_stored_rows,
    pad_storage,
)
from megajax.step.gradients import StepGradients, gradient_function, loss_function
from megajax.step.graph import Graph
from megajax.step_plan import StepPlan, TeacherPlan
from megajax.training.batch_fields import check_fields, check_microbatches
from megajax.weights.masters import join_all
from megajax.weights.scaling import FP8, Scaling

INITIAL_LOSS_SCALE = 2.0**16
LOSS_SCALE_GROWTH_STEPS = 2000  # as in NVIDIA's and Megatron's dynamic loss scaling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All state of a step, donated to it; parameters in their stored shapes, by name. Frozen ones pass through it."""

    params: dict[str, jax.Array]
    optimizer: Any  # `OptimizerState`: the slots of the optimizer
    # Layer state that is not a parameter, by kind of block and name [L, ...], such as the routers' expert_bias [L, E]
    # FP32; under "fp8" the amax histories of delayed scaling, [L, length] FP32.
    layer_state: dict[str, dict[str, jax.Array]]
    step: jax.Array  # int32, optimizer steps taken or skipped
    loss_scale: jax.Array  # FP32; 1 unless the compute dtype is float16
    scale_age: jax.Array  # int32, steps since the loss scale changed
    skipped: jax.Array  # int32, updates skipped because of a non-finite loss or gradient
    skipped_in_row: jax.Array  # int32, the same since the last good step
    # With `lora` the weights without gradients, in the dtype that the step computes with; `params` has the adapters.
    frozen: dict[str, jax.Array] = field(default_factory=dict)
    # With `optimizer.ema_decay` the moving averages of `params`.
    ema: dict[str, jax.Array] = field(default_factory=dict)
    # With `optimizer.master: split` the lower 16 bits of the master weights, whose BF16 halves are then in `params`.
    master_low_bits: dict[str, jax.Array] = field(default_factory=dict)

    @property
    def weights(self) -> dict[str, jax.Array]:
        """All weights of the model, by name."""
        return self.frozen | self.params

    @property
    def updated(self) -> Updated:
        """What an update changes."""
        return Updated(self.params, self.ema, self.optimizer, self.master_low_bits)

    @property
    def masters(self) -> dict[str, jax.Array]:
        """The FP32 master weights by name, inside a jitted function."""
        return join_all(self.params, on_device(self.master_low_bits))

    def with_updated(self, updated: Updated) -> "TrainState":
        """This state after an update."""
        params, ema, optimizer, low_bits = updated
        return replace(self, params=params, ema=ema, optimizer=optimizer, master_low_bits=low_bits)

    @property
    def averaged(self) -> dict[str, jax.Array]:
        """All weights of the model, averaged where they are trained."""
        return self.frozen | self.params | self.ema


@dataclass(frozen=True)
class TrainProgram:
    """The model, its placement on the mesh, and the functions that train it, each compiled at its first call."""

    plan: StepPlan
    mesh: Mesh
    update: Update
    streamed: StreamedUpdate | None  # with slots in files (`optimizer.offload_dir`)

    @classmethod
    def build(cls, config: Config, mesh: Mesh) -> "TrainProgram":
        """The program of a checked config on a mesh.

        Raises ConfigError for a mesh of other sizes than the config's, for a kernel that cannot run, and for
        `lora.targets` that the model does not have.
        """
        require_config(config)
        require_mesh(config, mesh)
        targets(config)
        check_schedule(config.schedule, config.run.steps)
        plan = StepPlan.of(config, mesh)
        if not plan.trained:
            plan.refuse("optimizer.groups gives all parameters the learning rate 0", "train some", "optimizer.groups")
        update = Update.build(plan, plan.trained, plan.placements, mesh)
        return cls(plan, mesh, update, StreamedUpdate(update) if plan.optimizer.offload_dir else None)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def model(self) -> Transformer:
        return self.plan.transformer

    @property
    def placements(self) -> Mapping[str, Placement]:
        """The placement of every parameter."""
        return self.plan.placements

    @cached_property
    def graph(self) -> Graph:
        return Graph.build(self.plan)

    @cached_property
    def stored(self) -> TrainState:
        """A TrainState of `StateArray`: the placement, dtype and memory of each array."""
        self._check_offload()
        params, ema, optimizer, low_bits = self.update.slots.stored
        scalar: Any = StateArray(None, jnp.int32)
        scale: Any = StateArray(None, jnp.float32)
        layer_state = jax.tree.map(lambda leaf: StateArray(None, leaf.dtype), self._layer_state)
        masters, untrained = self._divided(self.placements)
        params: Any = {n: params.get(n) or StateArray(placement, jnp.float32) for n, placement in masters.items()}
        frozen: Any = {name: StateArray(placement, self.frozen_dtype(name)) for name, placement in untrained.items()}
        return TrainState(params, optimizer, layer_state, scalar, scale, scalar, scalar, scalar, frozen, ema, low_bits)

    @cached_property
    def state_shardings(self) -> TrainState:
        """A TrainState of shardings: slots are sharded by their placement, scalars are replicated."""
        return jax.tree.map(lambda array: array.sharding(self.mesh), self.stored)

    def _check_offload(self) -> None:
        """Raise ConfigError if `optimizer.offload` moves nothing."""
        share, slots, key = self.config.optimizer.offload, self.update.slots, "optimizer.offload"
        if share and not slots.offloaded:
            least = min(slots.movable.values(), default=0) / max(sum(slots.movable.values()), 1)
            cure = f"raise it to at least {least:.2g}" if slots.movable else "remove it, or keep moments"
            fail(self.config, f"{key}={share} moves no array to the host", cure, key)

    @cached_property
    def abstract_state(self) -> TrainState:
        """The state as `ShapeDtypeStruct`s with shardings."""

        def abstract(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

        shapes = replace(self.stored, layer_state=self._layer_state)
        return jax.tree.map(abstract, shapes, self.state_shardings)

    @cached_property
    def by_size(self) -> dict[int, "TrainProgram"]:
        """The program of each number of sequences of `batch.schedule`; this one is that of `batch.global_size`.

        They differ in the number of microbatches and have the same state.
        """
        config, plan = self.config, self.plan

        def of_size(size: int) -> TrainProgram:
            changed = {"global_size": size, "num_microbatches": size // plan.batch_shape[1], "schedule": None}
            smaller = config.model_copy(update={"batch": config.batch.model_copy(update=changed)})
            return replace(self, plan=StepPlan.make(smaller, plan.sizes, plan.hardware, plan.kernels))

        *smaller, (_, whole) = config.batch.sizes_by_tokens
        return {size: of_size(size) for _, size in smaller} | {whole: self}

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of fields `[M, B, S]`; `training.batches.to_global` orders S for `context`."""
        return NamedSharding(self.mesh, BATCH_SPEC)

    @property
    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        (M, B, S), sharding = self.plan.batch_shape, self.batch_sharding
        return {
            name: jax.ShapeDtypeStruct((M, B, field.length or S, *field.extra), field.dtype, sharding=sharding)
            for name, field in self.graph.fields.items()
            if not field.optional
        }

    @property
    def first_loss_scale(self) -> jax.Array:
        return jnp.float32(INITIAL_LOSS_SCALE if self.config.precision.compute == "float16" else 1.0)

    def init_state(self) -> TrainState:
        """`random_state()`; ConfigError if the config names weights: `StateSaver.first_state` reads them."""
        named = {"checkpoint.init_from": self.config.checkpoint.init_from, "teacher.model": self.config.teacher.model}
        if keys := [key for key, given in named.items() if given is not None]:
            problem = f"init_state() makes random weights, but the config has {' and '.join(keys)}"
            cure = "take StateSaver(program).first_state() of megajax.training.saving, or random_state()"
            fail(self.config, problem, cure, *keys)
        return self.random_state()

    def random_state(self, params: bool = True, teacher: bool = True) -> TrainState:
        """The state of step 0 with random weights, made in its shards: no device or host ever holds whole arrays.

        Without `params` it lacks those that come from elsewhere: the base of adapters, or else all. Without `teacher`
        it lacks the teacher's. There is room for them. Slots in files (`optimizer.offload_dir`) are zeros there.
        """
        if self.streamed is not None:
            self.streamed.make_files()
            self.streamed.files.clear()
        return self.to_files(self._first(params, teacher)())

    def _first(self, params: bool, teacher: bool) -> Callable[[], TrainState]:
        """The jitted function behind `random_state`."""
        lacking: dict[str, Any] = {}
        if not params:
            lacking |= {"frozen": {}} if self.config.lora.rank else {"params": {}, "ema": {}, "master_low_bits": {}}
        if not teacher and self.config.teacher.model is not None:
            lacking["frozen"] = {}
        if not lacking and self.streamed is None:
            return jax.jit(self._init, out_shardings=self.state_shardings)

        def without(state: TrainState) -> TrainState:
            return replace(state, **{"optimizer": self.without_files(state).optimizer, **lacking})  # others are zeros

        return jax.jit(lambda: without(self._init()), out_shardings=without(self.state_shardings))

    @cached_property
    def train_step(self) -> Callable:
        """(State, batch) → (new state, metrics); the state is donated. Jitted, unless slots are in files."""
        step = self.step_program
        return step if self.streamed is None else lambda state, batch: self.finish(*step(state, batch))

    @cached_property
    def step_program(self) -> Callable:
        """Jitted (state, batch) → what `finish` needs: (new state, metrics), or before the update also a `Given`."""
        gradients_of, everywhere = gradient_function(self.graph, self.mesh), NamedSharding(self.mesh, P())
        target: Any = self.state_shardings, everywhere
        if self.streamed is not None:
            state = self.without_files(self.state_shardings)
            gradients: Any = {name: state.params[name] for name in self.update.slots.placements}
            rest: list[Any] = [everywhere] * (len(Given._fields) - 1)
            target = state, everywhere, Given(gradients, *rest)
        return jax.jit(partial(_train_step, self, gradients_of), donate_argnums=0, out_shardings=target)

    def finish(self, state: TrainState, metrics: dict[str, jax.Array], given: Given | None = None) -> Any:
        """The results of `step_program` → those of `train_step`."""
        if self.streamed is not None:
            assert given is not None
            state = state.with_updated(self.streamed(state.updated, given))
        return state, metrics

    def without_files(self, state: TrainState) -> TrainState:
        """A state, or a tree like it, without the slots in files, as `train_step` gets it."""
        return state.with_updated(self.update.slots.divided(state.updated)[0])

    def to_files(self, state: TrainState) -> TrainState:
        """`without_files` of a state; what it has of the slots in files is written there."""
        if self.streamed is None:
            return state
        updated, in_files = self.update.slots.divided(state.updated)
        if in_files:
            self.streamed.store(in_files)
        return state.with_updated(updated)

    def with_files(self, state: TrainState, slot: str = "") -> TrainState:
        """The inverse of `to_files`: the slots, or one of them, are read from the files to the hosts' memory."""
        if self.streamed is None:
            return state
        return state.with_updated(self.update.slots.merged(state.updated, self.streamed.load(slot)))

    @cached_property
    def eval_step(self) -> Callable:
        """Jitted (`TrainState.weights`, layer state, batch) → (sums by name, what they count): see `loss_function`."""
        sums = loss_function(self.graph, self.mesh)

        def evaluate(weights, state, batch):
            check_fields(self.config, self.graph.fields, batch)
            return sums(on_device(weights), state, batch)

        return jax.jit(evaluate)

    def first_weights(self, names: Collection[str]) -> dict[str, jax.Array]:
        """The FP32 weights of step 0 of some trained parameters, as stored on the devices."""
        shardings = {name: self.state_shardings.params[name] for name in names}
        return jax.jit(
            lambda: {n: w for n, w in self._first_weights().items() if n in names}, out_shardings=shardings
        )()

    def _init(self) -> TrainState:
        return self._first_state(self._first_weights())

    def _first_weights(self) -> dict[str, jax.Array]:
        seed, std = self.config.run.seed, self.config.model.init_std
        weights = init_parameters(self.model, seed, std, {n: p.layers for n, p in self.placements.items()})
        if isinstance(teacher := self.plan.teacher, TeacherPlan):
            drawn = init_parameters(teacher.transformer, seed, teacher.model.init_std)
            weights |= {TEACHER + name: w for name, w in drawn.items()}
        return {name: pad_storage(w, self.placements[name]) for name, w in weights.items()}

    def _first_state(self, stored: dict[str, jax.Array]) -> TrainState:
        """The state of step 0 with the FP32 weights `stored`."""
        masters, frozen = self._divided(stored)
        frozen = {name: w.astype(self.frozen_dtype(name)) for name, w in frozen.items()}
        zero, scale = jnp.zeros((), jnp.int32), self.first_loss_scale
        layer_state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._layer_state)
        params, ema, optimizer, low_bits = self.update.first(masters)
        return TrainState(params, optimizer, layer_state, zero, scale, zero, zero, zero, frozen, ema, low_bits)

    @cached_property
    def _layer_state(self) -> dict[str, Any]:
        """The shapes of the layers' state, which starts as zeros."""
        state, histories = layer_state(self.config.model), Scaling(self.plan).histories
        return state | {FP8: histories} if histories else state

    def frozen_dtype(self, name: str) -> Any:
        """The dtype of a frozen weight: that in which the step computes with it."""
        return self.placements[name].dtype_in_use(self.plan.compute)

    def _divided(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Values by parameter → those of FP32 parameters and those of frozen weights."""
        masters = {name: value for name, value in values.items() if is_master(self.config, name)}
        return masters, {name: value for name, value in values.items() if name not in masters}


def _train_step(program: TrainProgram, gradients_of: Callable, state: TrainState, batch):
    """(New state, metrics); with slots in files `_before_update`'s results: `StreamedUpdate` does the rest."""
    check_fields(program.config, program.graph.fields, batch)
    check_microbatches(batch, [program.plan.num_microbatches])
    results = gradients_of(state.weights, state.layer_state, batch, state.step, state.loss_scale)
    state, metrics, given = _before_update(program, state, results)
    if program.streamed is not None:
        return state, metrics, given
    return state.with_updated(program.update(state.updated, given)), metrics


def _before_update(
    program: TrainProgram, state: TrainState, results: StepGradients
) -> tuple[TrainState, dict[str, Any], Given]:
    """(The state, in which the update changes the rest; metrics; what the update is computed from)."""
    config, losses, layer_metrics = program.config, results.losses, results.layer_metrics
    finite = jnp.isfinite(losses["loss"]) & jnp.isfinite(results.norm)
    norms = clipped_norms(program.plan, results.gradients, results.norm)
    given = Given(results.gradients, norms, rescaling(program, layer_metrics), state.step, finite)
    # A step with non-finite numbers changes no layer state either.
    layer_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), results.layer_state, state.layer_state)
    skipped = (~finite).astype(jnp.int32)
    state = replace(
        state,
        layer_state=layer_state,
        step=state.step + 1,
        skipped=state.skipped + skipped,
        skipped_in_row=(state.skipped_in_row + 1) * skipped,
    )
    metrics = {
        "grad_norm": results.norm,
        "learning_rate": jnp.asarray(program.update.rate(given.step), jnp.float32),
        "skipped": state.skipped,
        "skipped_in_row": state.skipped_in_row,
    }
    of_layers = _layer_metrics(program.model.blocks, with_extra_layers(config.model, layer_metrics))
    of_nodes = program.graph.metrics(losses) | layout_metrics(losses)
    for new in (of_nodes, of_layers):
        if taken := sorted(new.keys() & metrics.keys()):
            raise ConfigError(f"a part has the metric {taken[0]}, which the step has already: give it another name.")
        metrics |= new
    if config.precision.compute == "float16":
        metrics["loss_scale"] = state.loss_scale
        state = _update_loss_scale(state, finite)
    return state, metrics, given


def directions_of(
    program: TrainProgram, state: TrainState, gradients: Mapping[str, jax.Array], norm: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array], Any]:
    """(learning rate, directions, new slots): a step subtracts the rate times the direction from a weight.

    The gradients are not clipped yet; `norm` is the norm of all of them.
    """
    clipped = clip(program.plan, gradients, clipped_norms(program.plan, gradients, norm))
    directions, optimizer = program.update.directions(clipped, on_device(state.optimizer), state.masters)
    return program.update.rate(state.step), directions, optimizer


def rescaling(program: TrainProgram, metrics: Mapping[str, Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
    """Factors, in stored rows, of the parameters that a kind of block rescales after an update, from its metrics."""
    factors = {}
    for kind, of_kind in metrics.items():
        for member, factor in program.model.blocks[kind].rescaled(of_kind).items():
            name = f"{BLOCKS}{kind}.{member}"
            factors[name] = in_stored_rows(factor, program.placements[name])
    return factors


def with_extra_layers(model: ModelConfig, metrics: dict[str, dict[str, jax.Array]]) -> dict[str, dict[str, jax.Array]]:
    """Metrics by kind and name `[L, ...]`, those of the layers after the model's after those of its last one's kind."""
    extra = extra_of(model)
    if extra is None or extra.name not in metrics:
        return metrics
    last = layer_kinds(model)[-1].block
    joined = {name: jnp.concatenate([own, metrics[extra.name][name]]) for name, own in metrics[last].items()}
    return {kind: joined if kind == last else own for kind, own in metrics.items() if kind != extra.name}


def _layer_metrics(blocks: Mapping[str, Block], by_kind: dict[str, dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The logged metrics of layers, by kind and name `[L, ...]`, those of all kinds of blocks together.

    Losses are summed, counts kept per layer, others averaged. Of a metric `max_...` it is the maximum.
    """
    losses = {name for kind in by_kind for name in blocks[kind].losses}
    names = dict.fromkeys(name for metrics in by_kind.values() for name in metrics)

    def logged(name: str, values: jax.Array) -> jax.Array:
        if jnp.issubdtype(values.dtype, jnp.integer):
            return values
        if is_maximum(name):
            return values.max()
        return values.sum() if name in losses else values.mean()

    return {n: logged(n, jnp.concatenate([metrics[n] for metrics in by_kind.values() if n in metrics])) for n in names}


def _update_loss_scale(state: TrainState, finite: jax.Array) -> TrainState:
    """Halve on overflow, double after LOSS_SCALE_GROWTH_STEPS good steps (Micikevicius et al. 2018)."""
    age = jnp.where(finite, state.scale_age + 1, 0)
    grow = age >= LOSS_SCALE_GROWTH_STEPS
    factor = jnp.where(finite, jnp.where(grow, 2.0, 1.0), 0.5)
    return replace(state, loss_scale=jnp.maximum(state.loss_scale * factor, 1.0), scale_age=jnp.where(grow, 0, age))
