"""A stage's part of a pipelined step: what its operations read, compute and write, whatever their schedule.

Residuals of a forward operation stay in a buffer slot until the backward operation reads them. Each slot has its own
program, in which matmuls write and read the slot in place. If these programs would be too large, all slots share one
bank and one program per virtual stage, which copies residuals into and out of the slots. All stages together compute
head and loss of the microbatch that leaves the last stage, each for its share of the tokens.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.model.sublayer import BlockInputs
from megajax.step.embedding import Embedding
from megajax.step.graph import Graph
from megajax.step.microbatches import run_forward_nodes
from megajax.step.nodes import HIDDEN, Arrays, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.pipeline.buffers import (
    BackwardBuffers,
    BackwardOperation,
    Buffers,
    Carry,
    ForwardBuffers,
    choose_buffer_slots,
    replaced,
)
from megajax.step.pipeline.schedules import Schedule
from megajax.step.pipeline.shared_tokens import TokenShares
from megajax.step.pipeline.streams import SharedStreams
from megajax.step.stack.layers import layers_of
from megajax.step.stack.stack_weights import Amax, ByGroup, GroupMetrics, GroupWeights
from megajax.step.stack.stores import ForwardValues, Stores
from megajax.step.stack.vjp import SplitBackward


class EmptyGroup(NamedTuple):
    """The buffers and sums of a group before the first tick."""

    split: SplitBackward | None  # its split backward pass, if the schedule needs one
    saved: list[jax.ShapeDtypeStruct]  # shapes of the residuals in a bank
    deferred: list[jax.Array]  # this and the following: zeros
    amax: tuple[Amax, ...]
    metrics: GroupMetrics


class StageRunner:
    """The operations of one pass of a batch through the stages, during tracing."""

    def __init__(self, graph: Graph, schedule: Schedule, arrays: StepArrays, batch: Arrays, given: Streams):
        """`given` are the streams `[M, T / tensor, D]` of nodes that have run in ticks of their own."""
        self.graph, self.schedule = graph, schedule
        self.stack, self.training = graph.layers, arrays.is_training
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
        own, self.saved_streams, self.batch = self.shared_streams.forward(self.training, batch)
        self.streams = own | given

    # What the operations read

    def of_stage(self, table: np.ndarray, tick: jax.Array) -> jax.Array:
        """This stage's entry of a table `[ticks, P]`."""
        return jnp.asarray(table)[tick, self.stage]

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

    # Operations

    def first_stream(self, batch: Microbatch) -> jax.Array:
        """The residual stream that enters the first virtual stage."""
        return run_forward_nodes(self.first, self.arrays, batch, save=False, given=batch.streams)[0][HIDDEN]

    def stage_forward(self, r: int, bank: int, slot: jax.Array, x: Any, buffers: Any, inputs, active):
        """(y, updated activations, updated metrics) of virtual stage `r`; the residuals go to `slot` of `bank`.

        `x` is the residual stream, or (whether this is the first virtual stage, its embedded tokens, the previous
        stage's output).
        """
        (activations, metrics), segments = buffers, self.stack.segments
        x = jnp.where(*x) if isinstance(x, tuple) else x
        streams, batch = {HIDDEN: x, **inputs.streams}, Microbatch(inputs.fields, inputs)
        arrays, first_layer = self.arrays_of(r), self.first_layers[r]
        if not self.training:
            stores = Stores(lambda s, *_: ForwardValues(segments[s]), [()] * len(segments), first_layer)
            return self.stack.forward(arrays, streams, batch, False, stores)[0][HIDDEN], activations, metrics
        states = [*zip(activations[bank], metrics[r], strict=True)]
        stores = Stores(lambda s, *own: ForwardBuffers(segments[s], slot, active, *own), states, first_layer)
        streams, _ = self.stack.forward(arrays, streams, batch, True, stores)
        new, sums = zip(*stores.states, strict=True)
        return streams[HIDDEN], replaced(activations, bank, list(new)), replaced(metrics, r, list(sums))

    def stage_backward(self, operation: BackwardOperation, r: int, bank: int, slot, dx: jax.Array, buffers: Any):
        """(gradients of the streams, updated gradients, deferred arrays and amaxes) of virtual stage `r`.

        Of the operation's segments alone: `dx` is the gradient after the last of them.
        """
        layer_gradients, deferred, amax, activations = buffers
        inputs, segments = operation.inputs, self.stack.segments

        def open_store(s: int, loop: Any, state: Any, _: Any) -> BackwardBuffers:
            return BackwardBuffers(operation, activations[bank][s], slot, segments[s], loop, state)

        states = [*zip(layer_gradients[r], deferred, amax[r], strict=True)]
        stores = Stores(open_store, states, self.first_layers[r], operation.segments)
        saved = inputs, [((), ())] * len(states)
        batch = Microbatch(inputs.fields, inputs)
        dy, _, _ = self.stack.backward(self.arrays_of(r), saved, {HIDDEN: dx}, batch, {}, stores)
        gradients, deferred, largest = map(list, zip(*stores.states, strict=True))
        return dy, replaced(layer_gradients, r, gradients), deferred, replaced(amax, r, largest)

    def turn(self, index: jax.Array, y: jax.Array, table: Table, results: Results) -> tuple[jax.Array, Table, Results]:
        """Head and loss of microbatch `index`, which has left the last virtual stage as `y`; each stage has 1/P of it.

        Returns (the gradient of `y` on every stage, `table` and `results` with those of the microbatch).
        """
        batch = self.shared(self.microbatch(index))
        streams = self.streams_of_head(index, jnp.where(self.last_stage, y, 0))
        gradients, table, new = self.graph.turn(self.arrays, streams, batch, table)
        return self.shares.gather(gradients[HIDDEN]), table, results.plus(new)

    # Virtual stages

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

    def empty_stream(self) -> jax.Array:
        """Zeros with the shape of a microbatch's residual stream."""
        x = jax.eval_shape(self.first_stream, self.microbatch(jnp.int32(0)))
        return jnp.zeros(x.shape, x.dtype)

    def first_carry(self, pending_heads: int = 0) -> Carry:
        """Empty buffers, of which `pending_heads` are for pending head gradients, and zero gradients."""
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
            # Not initialised: every slot is written before it is read, if only by an idle operation. In a tick writes
            # come before reads; idle ones read the first slot, which the first forward operation has written.
            return [[[lax.empty(a.shape, a.dtype) for a in group.saved] for group in segment] for segment in groups]

        return Carry(
            x=x,
            dx=x,
            pending_heads=jnp.zeros((pending_heads, *x.shape), x.dtype),
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
        rows = self.buffer_slots.activation_slots // self.banks * segment.iterations
        return EmptyGroup(
            split,
            [jax.ShapeDtypeStruct((rows, *a.shape), a.dtype) for a in saved],
            zeros(deferred, self.buffer_slots.deferred_slots * segment.iterations),
            zeros(amax, loops),
            zeros(metrics, loops),
        )
