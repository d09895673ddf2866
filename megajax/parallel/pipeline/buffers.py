"""A pipeline's weights, sums and buffers, by round, segment and group, stacked over loops; and what a tick hands on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from megajax.config.segments import Segment
from megajax.parallel.pipeline.schedules import Schedule, Slots, assign_slots
from megajax.parallel.stack.weights import GroupWeights
from megajax.step_plan import StepPlan

# Each slot has operations of its own up to so many programs with so many layers in all: they are compiled one by one.
MOST_PROGRAMS, MOST_LAYERS = 16, 64

Buffers = Any  # by segment, by group: a list of arrays [slots·loops, ...]
Weights = Any  # by round, by segment, by group: arrays [loops, ...], without a loop [...]


def choose_slots(plan: StepPlan, schedule: Schedule) -> tuple[Slots, int]:
    """(slots, banks): every slot is a bank with operations of its own, or all are one where that is too many."""
    apart = assign_slots(schedule, apart=True)
    count = apart.activations
    if plan.is_unrolled and count <= MOST_PROGRAMS and count * len(plan.slots) <= MOST_LAYERS:
        return apart, count
    return assign_slots(schedule), 1


class Carry(NamedTuple):
    """What a tick hands to the next."""

    x: jax.Array  # [T / tensor, D]: from the stage before, for the next forward operation
    dx: jax.Array  # the same: the last backward operation's gradient, not handed over yet
    heads: jax.Array  # [slots, T / tensor, D]: gradients of the head that wait; no slots if none waits
    activations: list[Buffers]  # what forward operations saved, by bank
    deferred: Buffers  # what weight operations need of backward operations
    non_block_gradients: dict[str, jax.Array]  # of the weights outside the blocks, FP32
    layer_gradients: Weights  # FP32
    amax: Weights  # FP8's largest magnitudes
    sums: dict[str, jax.Array]  # this device's shares of the losses, not divided by the tokens
    metrics: Weights  # the layers', summed over the microbatches


def loop_over(segment: Segment, body: Callable, state: Any) -> Any:
    """`body` over a segment's loops; a single one is no loop."""
    return body(0, state) if segment.loops == 1 else lax.fori_loop(0, segment.loops, body, state)


def switch(index: jax.Array, programs: list[Callable], *arguments: Any) -> Any:
    """`programs[index]`, which is known at run time only if there are several."""
    return programs[0](*arguments) if len(programs) == 1 else lax.switch(index, programs, *arguments)


def position(segment: Segment, slot: jax.Array, loop: jax.Array | int) -> jax.Array:
    """Where a loop's layers lie in a buffer of slots."""
    return slot * segment.loops + loop


def pick(weights: Any, segment: Segment, loop: jax.Array | int) -> Any:
    """The weights of one loop; where there is a single one they have no leading dimension."""
    if segment.loops == 1:
        return weights
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, loop, keepdims=False), weights)


def replaced(rounds: Weights, r: int, new: Any) -> Weights:
    """`rounds` with one replaced."""
    return [new if k == r else old for k, old in enumerate(rounds)]


def read(buffers: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    return [lax.dynamic_index_in_dim(buffer, at, keepdims=False) for buffer in buffers]


def write(buffers: list[jax.Array], values: list[jax.Array], at: jax.Array) -> list[jax.Array]:
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, value, at, 0) for buffer, value in pairs]


def combine(
    operation: Callable, totals: GroupWeights, values: GroupWeights, segment: Segment, loop: jax.Array | int
) -> GroupWeights:
    """`operation` of totals, in the place of their loop, and values; of some there may be none."""

    def one(total: jax.Array, value: jax.Array) -> jax.Array:
        if segment.loops == 1:
            return operation(total, value)
        here = operation(lax.dynamic_index_in_dim(total, loop, keepdims=False), value)
        return lax.dynamic_update_index_in_dim(total, here, loop, 0)

    return tuple(
        {name: one(total, value[name]) if name in value else total for name, total in layer.items()}
        for layer, value in zip(totals, values, strict=True)
    )
