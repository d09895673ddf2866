"""`1f1b` with one operation a tick: each stage does a forward operation, or one part of a backward operation.

In a period of k + 1 ticks (k parts) every stage does one forward and one whole backward operation, each stage a tick
after the stage before it. So a microbatch goes from stage to stage without waiting, and stage s keeps P - s of them.

A stage has one residual stream: what its next operation reads, and then that operation's result. Before each tick
stages exchange it with their neighbours, and head and embedding run. What they do then depends on the tick's place in
its period alone, so all stages run the same collectives. A stage's operation is a program of its own for each buffer
slot; an idle stage runs none. Its collectives are among the devices of the stage, which all run this program.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.model.sublayer import BlockInputs
from megajax.parallel import collectives
from megajax.step.microbatches import run_backward_nodes
from megajax.step.nodes import HIDDEN, Results, Table
from megajax.step.pipeline.buffers import BackwardOperation, Buffers, Carry, add_to_microbatch, switch
from megajax.step.pipeline.runner import StageRunner
from megajax.step.stack.stack_weights import Amax, ByGroup, GroupMetrics, GroupWeights


class Together(NamedTuple):
    """The part of the carry that stages change together, as in `Carry`."""

    x: jax.Array
    table: Table
    results: Results
    streams: dict[str, jax.Array]


class ForwardState(NamedTuple):
    """The part of the carry that a forward operation changes, as in `Carry`."""

    x: jax.Array
    activations: list[Buffers]
    metrics: list[ByGroup[GroupMetrics]]


class BackwardState(NamedTuple):
    """The part of the carry that a backward operation changes, as in `Carry`."""

    x: jax.Array
    layer_gradients: list[ByGroup[GroupWeights]]
    deferred: Buffers  # no arrays
    amax: list[ByGroup[tuple[Amax, ...]]]
    streams: dict[str, jax.Array]


class OneOperationRunner(StageRunner):
    """One pass of a batch through a schedule with one operation a tick, during tracing."""

    def train(self) -> Carry:
        """The carry after the last tick."""
        first = self.first_carry()
        carry = lax.fori_loop(0, self.schedule.ticks, self.tick, first._replace(dx=first.x[:0]))
        last = Together(carry.x, carry.table, carry.results, carry.streams)
        return carry._replace(**self.embed_backward(jnp.int32(self.schedule.ticks), last)._asdict())

    def tick(self, tick: jax.Array, carry: Carry) -> Carry:
        """What stages do together before a tick, then the operation of each."""
        P, M, period = self.schedule.stages, self.schedule.microbatches, self.schedule.period
        place, finished = tick % period, (tick - P) // period  # the microbatch that has left the last stage
        has_head = (place == P % period) & (finished >= 0) & (finished < M)
        programs = [partial(self.exchange, each, False) for each in range(period)]
        programs.append(partial(self.exchange, P % period, True))
        together = Together(carry.x, carry.table, carry.results, carry.streams)
        together = switch(jnp.where(has_head, period, place), programs, tick, together)
        return self.operate(tick, carry._replace(**together._asdict()))

    # Together

    def exchange(self, place: int, has_head: bool, tick: jax.Array, carry: Together) -> Together:
        """Sends, head and embedding before a tick at this `place` of its period.

        At the tick before, the stages s with s = place - 1 (modulo the period) did a forward operation, and those with
        s = place the last part of a backward operation.
        """
        P, period, x = self.schedule.stages, self.schedule.period, carry.x
        pairs = [(s, s + 1) for s in range(P - 1) if (s + 1 - place) % period == 0]
        pairs += [(s, s - 1) for s in range(1, P) if (s - place) % period == 0]
        if pairs:
            receives = jnp.asarray(np.isin(np.arange(P), [to for _, to in pairs]))[self.stage]
            x = jnp.where(receives, collectives.ppermute(x, "pipeline", pairs), x)
        if has_head:  # for the last stage's own result, which `pairs` sends nowhere
            dy, table, results = self.turn((tick - P) // period, carry.x, carry.table, carry.results)
            x, carry = jnp.where(self.last_stage, dy, x), carry._replace(table=table, results=results)
        if place == 0:
            carry = self.embed_backward(tick, carry)
            entering = self.microbatch(jnp.minimum(tick // period, self.schedule.microbatches - 1))
            x = jnp.where(self.stage == 0, self.first_stream(entering), x)
        return carry._replace(x=x)

    def embed_backward(self, tick: jax.Array, carry: Together) -> Together:
        """The backward pass of the nodes before the layers, for the microbatch that left the first stage before `tick`.

        All stages run it, because it may have collectives; on the others, and while the pipeline fills, with zeros.
        """
        index = (tick - self.schedule.period * self.schedule.stages) // self.schedule.period
        batch, nothing = self.microbatch(jnp.maximum(index, 0)), [None] * len(self.first)
        gradients = {HIDDEN: jnp.where((index >= 0) & (self.stage == 0), carry.x, 0)}
        found, table, _ = run_backward_nodes(self.first, self.arrays, nothing, gradients, batch, carry.table)
        return carry._replace(table=table, streams=add_to_microbatch(carry.streams, found, jnp.maximum(index, 0)))

    # Each stage

    def operate(self, tick: jax.Array, carry: Carry) -> Carry:
        """A stage's operation of a tick; `carry.x` is the stream that it reads, then its result.

        Backward operations, which read the buffers, and forward operations, which write them, have a switch each: XLA
        may copy all buffers at each tick if one branch of a switch writes what another one reads.
        """
        schedule, slots = self.schedule, self.buffer_slots
        forward, backward, part, write, read = (
            self.of_stage(table, tick)
            for table in (
                schedule.forward.microbatch,
                schedule.backward.microbatch,
                schedule.backward_part,
                slots.forward,
                slots.backward,
            )
        )
        index = jnp.maximum(jnp.maximum(forward, backward), 0)
        inputs, parts = self.microbatch(index).inputs, self.stack.plan.segments_of_parts

        bank, slot = self.of_bank(read)
        programs = [partial(self.backward, *each) for each in itertools.product(parts, range(self.banks))]
        state = BackwardState(carry.x, carry.layer_gradients, carry.deferred, carry.amax, carry.streams)
        chosen = jnp.where(backward >= 0, 1 + part * self.banks + bank, 0)
        state = switch(chosen, [idle, *programs], state, slot, index, inputs, carry.activations)
        carry = carry._replace(**state._asdict())

        bank, slot = self.of_bank(write)
        programs = [partial(self.forward, each) for each in range(self.banks)]
        state = ForwardState(carry.x, carry.activations, carry.metrics)
        state = switch(jnp.where(forward >= 0, 1 + bank, 0), [idle, *programs], state, slot, inputs)
        return carry._replace(**state._asdict())

    def of_bank(self, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the bank of a buffer slot, the slot in the bank)."""
        zero = jnp.zeros_like(slot)
        return (slot, zero) if self.banks > 1 else (zero, slot)

    def forward(self, bank: int, state: ForwardState, slot: jax.Array, inputs: BlockInputs) -> ForwardState:
        """The blocks of a stage; the residuals go to `slot` of `bank`."""
        x, *buffers = state
        return ForwardState(*self.stage_forward(0, bank, slot, x, buffers, inputs, None))

    def backward(
        self,
        segments: Sequence[int],
        bank: int,
        state: BackwardState,
        slot: jax.Array,
        index: jax.Array,
        inputs: BlockInputs,
        activations: list[Buffers],
    ) -> BackwardState:
        """One part of a stage's backward pass, that of these `segments`."""
        buffers = state.layer_gradients, state.deferred, state.amax, activations
        operation = BackwardOperation(self.stack.groups, inputs, segments)
        dy, gradients, deferred, amax = self.stage_backward(operation, 0, bank, slot, state.x, buffers)
        return BackwardState(dy[HIDDEN], gradients, deferred, amax, add_to_microbatch(state.streams, dy, index))


def idle[State](state: State, *_: Any) -> State:
    """The program of a stage without an operation."""
    return state
