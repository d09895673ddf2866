"""The pipeline's buffers and sums, the operations' access to them, and the carry between ticks."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.model.sublayer import BlockInputs, add_metric
from megajax.step.nodes import Results, Streams
from megajax.step.pipeline.schedules import BufferSlots, Schedule, assign_buffer_slots, make_schedule
from megajax.step.stack.remat_groups import Group, RematGroups, StreamGradients
from megajax.step.stack.stack_weights import Amax, ByGroup, GroupMetrics, GroupWeights
from megajax.step.stack.stores import BackwardSums, combine
from megajax.step_plan import StepPlan

# Largest number of programs, and of layers in all of them, for which each slot gets its own program: XLA compiles each
# program separately.
MOST_PROGRAMS, MOST_LAYERS = 16, 64

Buffers = ByGroup[list[jax.Array]]  # each `[slots·loops, ...]`


def schedule_of(plan: StepPlan, most_microbatches: int | None = None) -> Schedule:
    """The schedule of a plan with a pipeline, of at most so many of its microbatches."""
    pipeline, microbatches = plan.pipeline, min(plan.num_microbatches, most_microbatches or plan.num_microbatches)
    sizes = plan.sizes["pipeline"], microbatches, pipeline.virtual_stages
    return make_schedule(pipeline.schedule, *sizes, parts_per_backward=len(plan.backward_parts.slots))


def choose_buffer_slots(plan: StepPlan, schedule: Schedule) -> tuple[BufferSlots, int]:
    """(buffer slots, number of banks): each slot is a bank with its own program; one bank if there are too many."""
    slots = assign_buffer_slots(schedule, per_virtual_stage=True)
    count = slots.activation_slots
    if plan.is_unrolled and count <= MOST_PROGRAMS and count * len(plan.layer_slots) <= MOST_LAYERS:
        return slots, count
    return assign_buffer_slots(schedule), 1


class Carry(NamedTuple):
    """The values for the next tick."""

    x: jax.Array  # [T / tensor, D]: from the previous stage, for the next forward operation; or a stage's only stream
    dx: jax.Array  # [T / tensor, D]: the last backward operation's gradient, not sent yet; empty with one stream
    pending_heads: jax.Array  # [slots, T / tensor, D]: pending head gradients; 0 slots if none is pending
    activations: list[Buffers]  # residuals of forward operations, by bank
    deferred: Buffers  # arrays from backward operations for weight operations
    table: dict[str, jax.Array]  # gradients of the weights outside the stack: sums over the microbatches
    layer_gradients: list[ByGroup[GroupWeights]]  # by virtual stage: sums, [loops, ...], without a loop [...]
    amax: list[ByGroup[tuple[Amax, ...]]]  # by virtual stage: FP8's largest magnitudes
    results: Results  # of the terminal nodes, summed over the microbatches
    metrics: list[ByGroup[GroupMetrics]]  # by virtual stage: the layers' metrics, summed over the microbatches
    streams: dict[str, jax.Array]  # gradients of the streams that all stages read: sums [M, T / tensor, D] in FP32


class ForwardBuffers:
    """Stores the residuals of a microbatch in its slot of a bank, and its metrics in the sums of the virtual stage."""

    def __init__(
        self, segment: LayerSegment, slot: jax.Array, active: jax.Array | None, loop: Any, state: tuple[Any, Any]
    ):
        """`active` is False for an idle operation, and None if no operation is idle or there are no metrics."""
        self.segment, self.loop, self.active = segment, loop, active
        self.position = position(segment, slot, loop)
        self.buffers, self.metrics = map(list, state)

    def save(self, u: int, saved: Any, metrics: GroupMetrics) -> None:
        self.buffers[u] = write(self.buffers[u], saved, self.position)
        if (active := self.active) is not None:
            metrics = jax.tree.map(lambda a: jnp.where(active, a, 0), metrics)
        self.metrics[u] = combine(add_metric, self.metrics[u], metrics, self.segment, self.loop)

    def close(self):
        return (self.buffers, self.metrics), ((), ())


class BackwardBuffers(BackwardSums):
    """Reads residuals from a slot of a bank, and adds the gradients to those of the virtual stage.

    If `split`, gradients of weight matrices are deferred, and their operands are stored.
    """

    def __init__(
        self,
        operation: "BackwardOperation",
        activations: Sequence[list[jax.Array]],
        slot: jax.Array,
        segment: LayerSegment,
        loop: Any,
        state: Any,
    ):
        """`activations` are those of the segment in a bank, `slot` is the residuals' slot there."""
        gradients, deferred, amax = map(list, state)
        super().__init__(operation.groups, activations, segment, loop, gradients)
        self.operation, self.slot, self.deferred, self.amax = operation, slot, deferred, amax

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: StreamGradients, inputs: BlockInputs):
        """(dx, gradients of the weights; if split, without those of matrices) of group `u`."""
        own, groups = self.operation, self.groups
        saved = read(self.saved[u], position(self.segment, self.slot, self.loop))
        if own.split:
            assert own.deferred_slot is not None
            parts = groups.split(at, weights, saved, dx, inputs)
            dx, gradient, amax, deferred = parts.inputs(weights, saved, dx, inputs, at.layers)
            self.deferred[u] = write(self.deferred[u], deferred, position(self.segment, own.deferred_slot, self.loop))
        else:
            dx, gradient, amax = groups.backward(at, weights, saved, dx, inputs)
        if (active := own.active) is not None:
            amax = jax.tree.map(lambda a: jnp.where(active, a, 0), amax)
        self.amax[u] = combine(lambda _, *two: jnp.maximum(*two), self.amax[u], amax, self.segment, self.loop)
        return dx, gradient

    def close(self):
        return (self.gradients, self.deferred, self.amax), ((), ())


class BackwardOperation(NamedTuple):
    """One backward operation: what does not depend on the virtual stage and the bank."""

    groups: RematGroups
    inputs: BlockInputs
    segments: Sequence[int] | None = None  # of one part of a backward pass; None: all
    active: jax.Array | None = None  # False for an idle operation; None: no operation is idle
    deferred_slot: jax.Array | None = None
    split: bool = False


def switch(index: jax.Array, programs: list[Callable], *arguments: Any) -> Any:
    """Call `programs[index]`; a single program is called directly."""
    return programs[0](*arguments) if len(programs) == 1 else lax.switch(index, programs, *arguments)


def position(segment: LayerSegment, slot: jax.Array, loop: jax.Array | int) -> jax.Array:
    """The index of a loop iteration's layers in a buffer `[slots·loops, ...]`."""
    return slot * segment.iterations + loop


def replaced(virtual_stages: list, r: int, new: Any) -> list:
    """`virtual_stages` with entry `r` replaced."""
    return [new if k == r else old for k, old in enumerate(virtual_stages)]


def add_to_microbatch(sums: dict[str, jax.Array], gradients: Streams, index: jax.Array) -> dict[str, jax.Array]:
    """`sums` `[M, ...]` of streams plus the `gradients` that a microbatch has of them."""
    return {name: own.at[index].add(gradients[name]) if name in gradients else own for name, own in sums.items()}


def read(buffers: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(buffer, at, keepdims=False) for buffer in buffers]


def write(buffers: list[jax.Array], values: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, value, at, 0) for buffer, value in pairs]
