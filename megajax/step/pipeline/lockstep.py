"""Lockstep: at a tick every stage does the operations of its row of the schedule (schedules.py).

They are forward of one microbatch, backward of another, perhaps the weight gradients of a third. Idle stages compute
too; their results are not used. Except with `gpipe`, the number of buffer slots does not grow with the number of
microbatches.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.parallel import collectives
from megajax.step.graph import Graph
from megajax.step.microbatches import run_backward_nodes
from megajax.step.nodes import HIDDEN, Arrays, Results, StepArrays, Streams, plus
from megajax.step.pipeline.buffers import (
    BackwardOperation,
    Buffers,
    Carry,
    add_to_microbatch,
    position,
    read,
    replaced,
    switch,
)
from megajax.step.pipeline.runner import StageRunner
from megajax.step.pipeline.schedules import Flags, Schedule, ScheduleTable
from megajax.step.stack.layers import loop_over_layers
from megajax.step.stack.stack_weights import ByGroup, GroupWeights
from megajax.step.stack.stores import accumulate


class LockstepRunner(StageRunner):
    """One pass of a batch through a schedule in lockstep, during tracing."""

    def __init__(self, graph: Graph, schedule: Schedule, arrays: StepArrays, batch: Arrays, given: Streams):
        super().__init__(graph, schedule, arrays, batch, given)
        ticks = schedule.ticks_of
        # If not, the last virtual stage uses the head's gradient in the same tick.
        self.has_pending_heads = bool((ticks["backward"][:, -1] > ticks["forward"][:, -1]).any())

    def train(self) -> Carry:
        """The carry after the last tick."""
        pending_heads = self.buffer_slots.pending_head_slots if self.has_pending_heads else 0
        return self.loop(self.first_carry(pending_heads), lambda flags: True)

    def evaluate(self) -> dict[str, jax.Array]:
        """This device's shares of the summed losses: forward operations alone."""
        x = self.empty_stream()
        carry = Carry(x, x, x[None][:0], [], [], {}, [], [], Results(losses=self.graph.zero_losses()), [], {})
        return self.loop(carry, lambda flags: flags.forward).results.losses

    # The loop over ticks

    def loop(self, carry: Carry, wanted: Callable[[Flags], bool]) -> Carry:
        """Run all ticks of the phases whose flags are `wanted`."""
        for phase in self.schedule.phases:
            if not wanted(phase.runs[0].flags):
                continue

            def repeat(index, carry, phase=phase):
                tick = phase.start + index * phase.period
                for flags, length in phase.runs:
                    carry = lax.fori_loop(tick, tick + length, partial(self.tick, flags), carry)
                    tick += length
                return carry

            carry = lax.fori_loop(0, phase.repeats, repeat, carry) if phase.repeats > 1 else repeat(0, carry)
        return carry

    def tick(self, flags: Flags, tick: jax.Array, carry: Carry) -> Carry:
        """All operations of one tick. Stages exchange gradients before the forward operation, activations after it."""
        received = None
        if flags.backward:
            # The last tick's gradient is sent now, so that the forward operation hides the transfer.
            received = self.send(carry.dx, -1)
        dhead = None
        if flags.forward:
            carry, y = self.forward(tick, carry)
            if flags.head:
                carry, dhead = self.head(tick, carry, y)
        if flags.backward:
            carry = self.backward(tick, carry, received, dhead, flags.split)
        if flags.weight:
            carry = self.weight(tick, carry)
        return carry

    def operation_at(self, table: ScheduleTable, tick: jax.Array):
        """(whether this stage is active, its microbatch, its virtual stage)."""
        index = self.of_stage(table.microbatch, tick)
        batch = self.microbatch(jnp.maximum(index, 0))
        return index >= 0, batch, self.of_stage(table.virtual_stage, tick)

    def send(self, x: jax.Array, step: int) -> jax.Array:
        """Send `x` to the next (`step` 1) or previous (-1) stage; last and first only with virtual stages."""
        P = self.schedule.stages
        pairs = [(s, (s + step) % P) for s in range(P)]
        if self.schedule.virtual_stages == 1:
            pairs = [(a, b) for a, b in pairs if b == a + step]
        return collectives.ppermute(x, "pipeline", pairs)

    # Operations

    def forward(self, tick: jax.Array, carry: Carry) -> tuple[Carry, jax.Array]:
        """Run the blocks of a virtual stage on the previous one's output; the first one embeds."""
        active, batch, r = self.operation_at(self.schedule.forward, tick)
        first = (self.stage == 0) & (r == 0)
        x, inputs = (first, self.first_stream(batch), carry.x), batch.inputs
        slot = self.of_stage(self.buffer_slots.forward, tick) if self.training else jnp.int32(0)
        buffers = (carry.activations, carry.metrics)
        active = active if self.arrays.layer_loss_scale is not None else None  # None: no metrics
        x, activations, metrics = self.in_program(r, slot, self.stage_forward, x, buffers, inputs, active)
        return carry._replace(x=self.send(x, 1), activations=activations, metrics=metrics), x

    def head(self, tick: jax.Array, carry: Carry, y: jax.Array) -> tuple[Carry, jax.Array | None]:
        """Head and loss of the microbatch that leaves the last virtual stage; each stage computes 1/P of its tokens.

        Returns the gradient of `y` on every stage.
        """
        index = jnp.asarray(self.schedule.forward.microbatch)[tick, self.schedule.stages - 1]
        if not self.training:
            streams = self.streams_of_head(index, jnp.where(self.last_stage, y, 0))
            losses = self.graph.evaluate(self.arrays, streams, self.shared(self.microbatch(index)))
            return carry._replace(results=carry.results.plus(Results(losses=losses))), None
        dy, table, results = self.turn(index, y, carry.table, carry.results)
        carry = carry._replace(table=table, results=results)
        if self.has_pending_heads:
            slot = jnp.asarray(self.buffer_slots.head)[tick]
            carry = carry._replace(pending_heads=lax.dynamic_update_index_in_dim(carry.pending_heads, dy, slot, 0))
        return carry, dy

    def backward(self, tick: jax.Array, carry: Carry, received, dhead: jax.Array | None, split: bool) -> Carry:
        """Run the backward pass of a virtual stage, from the gradient of the next stage or of the head.

        If `split`, gradients of weight matrices are deferred, and their operands are stored.
        """
        active, batch, r = self.operation_at(self.schedule.backward, tick)
        inputs = batch.inputs
        last = self.last_stage & (r == self.schedule.virtual_stages - 1)
        if self.has_pending_heads:
            slot = jnp.asarray(self.buffer_slots.backward_head)[tick]
            dhead = lax.dynamic_index_in_dim(carry.pending_heads, slot, keepdims=False)
        dx = received if dhead is None else jnp.where(last, dhead, received)
        # An idle stage reads residuals of an earlier operation: with this zero all its gradients are zero.
        dx = jnp.where(active, dx, 0)
        if inputs.layer_loss_scale is not None:
            inputs = replace(inputs, layer_loss_scale=jnp.where(active, inputs.layer_loss_scale, 0))
        buffers = (carry.layer_gradients, carry.deferred, carry.amax, carry.activations)
        slot, to = (self.of_stage(t, tick) for t in (self.buffer_slots.backward, self.buffer_slots.deferred))
        operation = BackwardOperation(self.stack.groups, inputs, None, active, to, split)
        program = partial(self.stage_backward, operation)
        dy, layer_gradients, deferred, amax = self.in_program(r, slot, program, dx, buffers)
        dx, index = dy[HIDDEN], jnp.maximum(self.of_stage(self.schedule.backward.microbatch, tick), 0)
        first = {HIDDEN: jnp.where(active & (self.stage == 0) & (r == 0), dx, 0)}
        batch, nothing = batch._replace(inputs=inputs), [None] * len(self.first)
        of_first, table, _ = run_backward_nodes(self.first, self.arrays, nothing, first, batch, carry.table)
        streams = add_to_microbatch(carry.streams, plus(dy, of_first), index)
        carry = carry._replace(dx=dx, table=table, layer_gradients=layer_gradients, deferred=deferred, amax=amax)
        return carry._replace(streams=streams)

    def weight(self, tick: jax.Array, carry: Carry) -> Carry:
        """Add the weight gradients that a backward operation has deferred."""
        r = self.of_stage(self.schedule.weight.virtual_stage, tick)  # type: ignore[union-attr]
        slot = self.of_stage(self.buffer_slots.weight, tick)
        programs = [partial(self.stage_weight, k) for k in range(self.schedule.virtual_stages)]
        gradients = switch(r, programs, carry.layer_gradients, carry.deferred, slot)
        return carry._replace(layer_gradients=gradients)

    def stage_weight(self, r: int, layer_gradients: list[ByGroup[GroupWeights]], deferred: Buffers, slot: jax.Array):
        """The gradients of the layers plus the deferred gradients of one backward operation of virtual stage `r`."""
        gradients = []
        for s, segment in enumerate(self.stack.segments):

            def body(totals, loop, s=s, segment=segment):
                (index,), totals = loop, list(totals)
                for u in reversed(range(len(totals))):
                    operands = read(deferred[s][u], position(segment, slot, index))
                    weights = self.stack.weights.select_group(self.weights[r][s][u], segment, index)
                    split = self.splits[s][u]
                    assert split is not None
                    gradient = self.stack.weights.reduce_group(split.weights(weights, operands), segment, u)
                    totals[u] = accumulate(totals[u], gradient, segment, index)
                return totals, ()

            totals, _ = loop_over_layers(body, list(layer_gradients[r][s]), (), segment)
            gradients.append(totals)
        return replaced(layer_gradients, r, gradients)

    def in_program(self, r: jax.Array, slot: jax.Array, operation: Callable, *arguments: Any) -> Any:
        """Call `operation(virtual stage, bank, slot in the bank, ...)`: a program per bank, or per virtual stage."""
        if self.banks > 1:
            programs = [partial(operation, k, bank) for bank, k in enumerate(self.buffer_slots.virtual_stages)]
            return switch(slot, programs, 0, *arguments)
        return switch(r, [partial(operation, k, 0) for k in range(self.schedule.virtual_stages)], slot, *arguments)
