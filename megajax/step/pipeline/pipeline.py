"""The pipeline: all stages run a schedule's ticks in one program inside the step's shard_map.

At a tick every stage does the operations of its row of the schedule (schedules.py): forward of one microbatch, backward
of another, perhaps the weight gradients of a third. Idle stages compute too; their results are not used. Residuals of a
forward operation stay in a buffer slot until the backward operation reads them. Except with `gpipe`, the number of
slots does not grow with the number of microbatches. Each slot has its own program, in which matmuls write and read the
slot in place. If these programs would be too large, all slots share one bank and one program per virtual stage, which
copies residuals into and out of the slots. All stages together compute head and loss of the microbatch that leaves the
last stage, each for its share of the tokens.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.model.sublayer import BlockInputs
from megajax.parallel import collectives
from megajax.step.embedding import Embedding
from megajax.step.graph import Graph
from megajax.step.microbatches import run_backward_nodes, run_forward_nodes
from megajax.step.nodes import HIDDEN, Arrays, Microbatch, Results, StepArrays, plus
from megajax.step.pipeline.buffers import (
    BackwardBuffers,
    BackwardOperation,
    Buffers,
    Carry,
    ForwardBuffers,
    choose_buffer_slots,
    position,
    read,
    replaced,
    switch,
)
from megajax.step.pipeline.schedules import Flags, Schedule, ScheduleTable, check, make_schedule
from megajax.step.pipeline.shared_tokens import TokenShares
from megajax.step.pipeline.streams import SharedStreams
from megajax.step.stack.layers import layers_of, loop_over_layers
from megajax.step.stack.stack_weights import Amax, ByGroup, GroupMetrics, GroupWeights
from megajax.step.stack.stores import ForwardValues, Stores, accumulate
from megajax.step.stack.vjp import SplitBackward


class Pipeline:
    """Runs the microbatches of a batch through the stages."""

    def __init__(self, graph: Graph):
        self.graph, self.layers = graph, graph.layers
        self.stages = graph.sizes["pipeline"]
        settings, microbatches = graph.plan.pipeline, graph.plan.num_microbatches
        self.schedule = make_schedule(settings.schedule, self.stages, microbatches, settings.virtual_stages)
        check(self.schedule)
        ticks = self.schedule.ticks_of
        # If not, the last virtual stage uses the head's gradient in the same tick.
        self.has_pending_heads = bool((ticks["backward"][:, -1] > ticks["forward"][:, -1]).any())

    def gradients(self, arrays: StepArrays, batch: Arrays) -> tuple[dict[str, jax.Array], Results]:
        """(gradients of the table, other results) of the batch `[M, B, S]`, summed over its microbatches."""
        run = ScheduleRunner(self, self.schedule, arrays, batch)
        carry, name = run.loop(run.first_carry(), lambda flags: True), self.layers.NAME
        gradients, metrics, amax = map(run.join_virtual_stages, (carry.layer_gradients, carry.metrics, carry.amax))
        table, found = run.shared_streams.backward(run.saved_streams, carry.streams, carry.table)
        own = Results({name: gradients}, {}, {name: metrics}, {name: amax})
        return table, carry.results.joined(own).joined(found)

    def evaluate(self, arrays: StepArrays, batch: Arrays) -> dict[str, jax.Array]:
        """This device's shares of the summed losses that evaluation reports: forward operations, without dropout."""
        P, M, R = self.stages, batch["tokens"].shape[0], self.schedule.virtual_stages
        run = ScheduleRunner(self, make_schedule("gpipe", P, M, R), arrays, batch)
        x = run.empty_stream()
        carry = Carry(x, x, x[None][:0], [], [], {}, [], [], Results(losses=self.graph.zero_losses()), [], {})
        return run.loop(carry, lambda flags: flags.forward).results.losses


class EmptyGroup(NamedTuple):
    """The buffers and sums of a group before the first tick."""

    split: SplitBackward | None  # its split backward pass, if the schedule needs one
    saved: list[jax.ShapeDtypeStruct]  # shapes of the residuals in a bank
    deferred: list[jax.Array]  # this and the following: zeros
    amax: tuple[Amax, ...]
    metrics: GroupMetrics


class ScheduleRunner:
    """One pass of a batch through a schedule, during tracing."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, arrays: StepArrays, batch: Arrays):
        self.pipeline, self.graph, self.schedule = pipeline, pipeline.graph, schedule
        self.stack, self.training = pipeline.layers, bool(arrays.loss_factors)
        self.arrays, self.batch = arrays, batch
        self.first = [node for node in self.graph.inner if node.PLACE == "first"]
        of_first = (name for node in self.first if isinstance(node, Embedding) for name in node.reads)
        self.reads = tuple(dict.fromkeys((*of_first, *self.stack.reads)))
        self.weights = self.by_virtual_stage(arrays.stacks[self.stack.NAME])
        self.banks = 1  # one for all buffer slots, or one per slot
        if self.training:
            self.buffer_slots, self.banks = choose_buffer_slots(self.stack.plan, schedule)
        self.stage = lax.axis_index("pipeline")
        self.last_stage = self.stage == schedule.stages - 1
        self.first_layers = jnp.asarray(self.stack.plan.first_layers)[self.stage]
        self.shares = TokenShares(self.stack.plan)
        self.shared_streams = SharedStreams(self.graph, arrays, schedule.microbatches, self.fields_of)
        self.streams, self.saved_streams, self.batch = self.shared_streams.forward(self.training, batch)

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

    def of_stage(self, table: np.ndarray, tick: jax.Array) -> jax.Array:
        """This stage's entry of a table `[ticks, P]`."""
        return jnp.asarray(table)[tick, self.stage]

    def operation_at(self, table: ScheduleTable, tick: jax.Array):
        """(whether this stage is active, its microbatch, its virtual stage)."""
        index = self.of_stage(table.microbatch, tick)
        batch = self.microbatch(jnp.maximum(index, 0))
        return index >= 0, batch, self.of_stage(table.virtual_stage, tick)

    def microbatch(self, index: jax.Array) -> Microbatch:
        """A microbatch with the streams that the layers, and the nodes before them, read."""
        batch, streams = self.fields_of(index), self.streams_of(index, self.reads)
        return batch._replace(inputs=self.stack.with_streams(batch, streams), streams=streams)

    def streams_of(self, index: jax.Array, names: Iterable[str]) -> dict[str, jax.Array]:
        return {name: lax.dynamic_index_in_dim(self.streams[name], index, keepdims=False) for name in names}

    def streams_of_head(self, index: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
        """This stage's share of the streams that terminal nodes read; `x` is summed over the stages."""
        read = sorted({name for node in self.graph.terminal for name in node.reads})
        own = {name: self.shares.of_stage(stream) for name, stream in self.streams_of(index, read).items()}
        return own | {HIDDEN: self.shares.scatter(x)}

    def fields_of(self, index: jax.Array) -> Microbatch:
        fields = {n: lax.dynamic_index_in_dim(f, index, keepdims=False) for n, f in self.batch.items()}
        return self.graph.microbatch(fields, index, self.arrays)

    def shared(self, whole: Microbatch) -> Microbatch:
        """This stage's share of a microbatch's tokens, for the terminal nodes: the fields that they read, `[T, ...]`.

        Positions are `[B, S / P]` if a node reads them.
        """
        of_stage, fields, inputs = self.shares.of_stage, whole.fields, whole.inputs
        names = sorted({name for node in self.graph.terminal for name in node.fields()})
        own = {name: of_stage(fields[name].reshape(-1, *fields[name].shape[2:])) for name in names}
        if not any(node.reads_positions for node in self.graph.terminal):
            return whole._replace(fields=own)
        positions = of_stage(inputs.positions.reshape(-1)).reshape(len(inputs.positions), -1)
        real = inputs.real and replace(inputs.real, is_real=of_stage(inputs.real.is_real))
        token_ids = of_stage(inputs.token_ids)
        inputs = replace(inputs, positions=positions, token_ids=token_ids, real=real)
        return whole._replace(fields=own, inputs=inputs)

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

    def stage_forward(self, r: int, bank: int, slot: jax.Array, x: Any, buffers: Any, inputs, active):
        """(y, updated activations, updated metrics) of virtual stage `r`; the residuals go to `slot` of `bank`.

        `x` is (whether this is the first virtual stage, its embedded tokens, the previous stage's output).
        """
        (activations, metrics), segments = buffers, self.stack.segments
        streams, batch = {HIDDEN: jnp.where(*x), **inputs.streams}, Microbatch(inputs.fields, inputs)
        arrays, first_layer = self.arrays_of(r), self.first_layers[r]
        if not self.training:
            stores = Stores(lambda s, *_: ForwardValues(segments[s]), [()] * len(segments), first_layer)
            return self.stack.forward(arrays, streams, batch, False, stores)[0][HIDDEN], activations, metrics
        states = [*zip(activations[bank], metrics[r], strict=True)]
        stores = Stores(lambda s, *own: ForwardBuffers(segments[s], slot, active, *own), states, first_layer)
        streams, _ = self.stack.forward(arrays, streams, batch, True, stores)
        new, sums = zip(*stores.states, strict=True)
        return streams[HIDDEN], replaced(activations, bank, list(new)), replaced(metrics, r, list(sums))

    def head(self, tick: jax.Array, carry: Carry, y: jax.Array) -> tuple[Carry, jax.Array | None]:
        """Head and loss of the microbatch that leaves the last virtual stage; each stage computes 1/P of its tokens.

        Returns the gradient of `y` on every stage.
        """
        index = jnp.asarray(self.schedule.forward.microbatch)[tick, self.schedule.stages - 1]
        batch = self.shared(self.microbatch(index))
        streams = self.streams_of_head(index, jnp.where(self.last_stage, y, 0))
        if not self.training:
            new = Results(losses=self.graph.evaluate(self.arrays, streams, batch))
            return carry._replace(results=carry.results.plus(new)), None
        gradients, table, results = self.graph.turn(self.arrays, streams, batch, carry.table)
        carry = carry._replace(table=table, results=carry.results.plus(results))
        dy = self.shares.gather(gradients[HIDDEN])
        if self.pipeline.has_pending_heads:
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
        if self.pipeline.has_pending_heads:
            slot = jnp.asarray(self.buffer_slots.backward_head)[tick]
            dhead = lax.dynamic_index_in_dim(carry.pending_heads, slot, keepdims=False)
        dx = received if dhead is None else jnp.where(last, dhead, received)
        # An idle stage reads residuals of an earlier operation: with this zero all its gradients are zero.
        dx = jnp.where(active, dx, 0)
        if inputs.layer_loss_scale is not None:
            inputs = replace(inputs, layer_loss_scale=jnp.where(active, inputs.layer_loss_scale, 0))
        buffers = (carry.layer_gradients, carry.deferred, carry.amax, carry.activations)
        slot, to = (self.of_stage(t, tick) for t in (self.buffer_slots.backward, self.buffer_slots.deferred))
        operation = BackwardOperation(self.stack.groups, inputs, to, active, split)
        program = partial(self.stage_backward, operation)
        dy, layer_gradients, deferred, amax = self.in_program(r, slot, program, dx, buffers)
        dx, index = dy[HIDDEN], jnp.maximum(self.of_stage(self.schedule.backward.microbatch, tick), 0)
        first = {HIDDEN: jnp.where(active & (self.stage == 0) & (r == 0), dx, 0)}
        batch, nothing = batch._replace(inputs=inputs), [None] * len(self.first)
        of_first, table, _ = run_backward_nodes(self.first, self.arrays, nothing, first, batch, carry.table)
        gradients = {name: dx for name, dx in plus(dy, of_first).items() if name != HIDDEN}
        streams = {name: carry.streams[name].at[index].add(dx) for name, dx in gradients.items()}
        carry = carry._replace(dx=dx, table=table, layer_gradients=layer_gradients, deferred=deferred, amax=amax)
        return carry._replace(streams=streams)

    def stage_backward(self, operation: BackwardOperation, r: int, bank: int, slot, dx: jax.Array, buffers: Any):
        """(gradients of the streams, updated gradients, deferred arrays and amaxes) of virtual stage `r`."""
        layer_gradients, deferred, amax, activations = buffers
        inputs, segments = operation.inputs, self.stack.segments

        def open_store(s: int, loop: Any, state: Any, _: Any) -> BackwardBuffers:
            return BackwardBuffers(operation, activations[bank][s], slot, segments[s], loop, state)

        states = [*zip(layer_gradients[r], deferred, amax[r], strict=True)]
        stores, saved = Stores(open_store, states, self.first_layers[r]), (inputs, [((), ())] * len(states))
        batch = Microbatch(inputs.fields, inputs)
        dy, _, _ = self.stack.backward(self.arrays_of(r), saved, {HIDDEN: dx}, batch, {}, stores)
        gradients, deferred, largest = map(list, zip(*stores.states, strict=True))
        return dy, replaced(layer_gradients, r, gradients), deferred, replaced(amax, r, largest)

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

    # Parts of operations

    def in_program(self, r: jax.Array, slot: jax.Array, operation: Callable, *arguments: Any) -> Any:
        """Call `operation(virtual stage, bank, slot in the bank, ...)`: a program per bank, or per virtual stage."""
        if self.banks > 1:
            programs = [partial(operation, k, bank) for bank, k in enumerate(self.buffer_slots.virtual_stages)]
            return switch(slot, programs, 0, *arguments)
        return switch(r, [partial(operation, k, 0) for k in range(self.schedule.virtual_stages)], slot, *arguments)

    def arrays_of(self, r: int) -> StepArrays:
        """The step's arrays with the layers of virtual stage `r` alone."""
        return self.arrays._replace(stacks={self.stack.NAME: self.weights[r]})

    def by_virtual_stage(self, layers: ByGroup[GroupWeights]) -> list[ByGroup[GroupWeights]]:
        """Weights in the form of the layer stack → the same by virtual stage."""
        virtual_stages = range(self.schedule.virtual_stages)
        if len(virtual_stages) == 1:
            return [layers]

        def of_virtual_stage(r: int, n: int, groups: Any) -> Any:
            return jax.tree.map(lambda w: w[r] if n == 1 else w[r * n : (r + 1) * n], groups)

        loops = [segment.iterations for segment in self.stack.segments]
        return [[of_virtual_stage(r, *pair) for pair in zip(loops, layers, strict=True)] for r in virtual_stages]

    def join_virtual_stages(self, weights: list[Any]) -> Any:
        """Inverse of `by_virtual_stage`."""
        if len(weights) == 1:
            return weights[0]

        def join(segment: LayerSegment, *parts: Any) -> Any:
            return jax.tree.map(lambda *w: jnp.stack(w) if segment.iterations == 1 else jnp.concatenate(w), *parts)

        return [join(segment, *groups) for segment, *groups in zip(self.stack.segments, *weights, strict=True)]

    # The first tick's carry

    def first_stream(self, batch: Microbatch) -> jax.Array:
        """The residual stream that enters the first virtual stage."""
        return run_forward_nodes(self.first, self.arrays, batch, save=False, given=batch.streams)[0][HIDDEN]

    def empty_stream(self) -> jax.Array:
        """Zeros with the shape of a microbatch's residual stream."""
        x = jax.eval_shape(self.first_stream, self.microbatch(jnp.int32(0)))
        return jnp.zeros(x.shape, x.dtype)

    def first_carry(self) -> Carry:
        """Empty buffers and zero gradients."""
        x, inputs = self.empty_stream(), self.microbatch(jnp.int32(0)).inputs
        groups = [
            [self.empty_group(s, u, x, inputs) for u in range(len(groups))] for s, groups in enumerate(self.weights[0])
        ]
        self.splits = [[group.split for group in segment] for segment in groups]
        amax, metrics = (
            [[getattr(group, name) for group in segment] for segment in groups] for name in ("amax", "metrics")
        )
        gradients = [list(sums) for sums in self.stack.zero_sums(self.weights[0])]

        def empty_bank() -> Buffers:
            # Not initialised: every slot is written before it is read, if only by an idle operation (`replay`).
            return [[[lax.empty(a.shape, a.dtype) for a in group.saved] for group in segment] for segment in groups]

        pending = self.buffer_slots.pending_heads if self.pipeline.has_pending_heads else 0
        return Carry(
            x=x,
            dx=x,
            pending_heads=jnp.zeros((pending, *x.shape), x.dtype),
            activations=[empty_bank() for _ in range(self.banks)],
            deferred=[[group.deferred for group in segment] for segment in groups],
            table=self.graph.table.zero_gradients(self.arrays.table),
            layer_gradients=[gradients] * self.schedule.virtual_stages,
            amax=[amax] * self.schedule.virtual_stages,
            results=self.graph.zero_results(jax.eval_shape(self.turn_of_first, x)),
            metrics=[metrics] * self.schedule.virtual_stages,
            streams={name: jnp.zeros(self.streams[name].shape, jnp.float32) for name in self.reads},
        )

    def turn_of_first(self, x: jax.Array) -> Results:
        """The results of the terminal nodes for the first microbatch, for their shapes; `x` is any residual stream."""
        batch, zeros = self.shared(self.microbatch(jnp.int32(0))), self.graph.table.zero_gradients(self.arrays.table)
        return self.graph.turn(self.arrays, self.streams_of_head(jnp.int32(0), x), batch, zeros)[2]

    def empty_group(self, s: int, u: int, x: jax.Array, inputs: BlockInputs) -> EmptyGroup:
        """Group `u` of segment `s` before the first tick; `x` is any residual stream."""
        segment, stack = self.stack.segments[s], self.stack
        at = stack.groups.at(segment, u, layers_of(self.first_layers[0], segment, 0))
        group = stack.weights.select_group(self.weights[0][s][u], segment, 0)

        def forward(group, x):
            return stack.groups.forward(at, group, x, inputs, True)[1:]

        def backward(group, saved, dy):
            return stack.groups.backward(at, group, saved, dy, inputs)[2]

        def zeros(shapes: Any, lead: int | None) -> Any:
            leading = () if lead is None else (lead,)
            return jax.tree.map(lambda a: jnp.zeros((*leading, *a.shape), a.dtype), shapes)

        saved, metrics = jax.eval_shape(forward, group, x)
        dy = stack.first_gradients({HIDDEN: x}, inputs)
        amax = jax.eval_shape(backward, group, saved, dy)
        split, deferred = None, []
        if self.buffer_slots.deferred_slots:
            split = stack.groups.split(at, group, saved, dy, inputs)
            deferred = jax.eval_shape(split.inputs, group, saved, dy, inputs, at.layers)[3]
        loops = segment.iterations if segment.iterations > 1 else None
        rows = self.buffer_slots.activations // self.banks * segment.iterations
        return EmptyGroup(
            split,
            [jax.ShapeDtypeStruct((rows, *a.shape), a.dtype) for a in saved],
            zeros(deferred, self.buffer_slots.deferred_slots * segment.iterations),
            zeros(amax, loops),
            zeros(metrics, loops),
        )
