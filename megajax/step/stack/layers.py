"""The forward and backward pass of a stage's blocks; the remat policy selects the residuals.

The backward pass is written by hand. The forward pass of a remat group (one layer, or `remat.group` of them) keeps the
residuals of its `jax.vjp` without the weights, and the backward pass gathers the weights again. So gathered weights
live no longer than a group (without loops, those of the last group until its backward pass), and a pipeline can run the
two passes at different ticks. The loops over groups are here; stores (`stores.py`) store residuals and gradients.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layout.kinds import IMAGES
from megajax.layout.segments import LayerSegment
from megajax.model.block import Block
from megajax.model.sublayer import BlockInputs, is_maximum
from megajax.ops.barriers import not_before
from megajax.parallel.context.token_order import GROUP_SIZE, ROW_INDEX
from megajax.parallel.mesh_comm import MeshComm
from megajax.step.nodes import HIDDEN, Field, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.stack.remat_groups import RematGroups, StreamGradients
from megajax.step.stack.stack_weights import (
    Amax,
    ByGroup,
    GroupMetrics,
    GroupWeights,
    LayerState,
    StackWeights,
)
from megajax.step.stack.stores import BackwardSums, BackwardValues, ForwardValues, Stores
from megajax.step.stack.vjp import replayed
from megajax.step_plan import StepPlan
from megajax.weights.weight import Weight


class LayerStack:
    """All layers of one device's pipeline stage: R virtual stages of the same segments.

    A layer slot holds a layer of one kind. An empty slot holds zeros, and a block of zeros adds nothing to the residual
    stream.
    """

    PLACE = "stage"

    def __init__(
        self,
        name: str,
        plan: StepPlan,
        comm: MeshComm,
        blocks: Mapping[str, Block],
        weights: Mapping[str, Mapping[str, Weight]],
        can_reduce_in_backward: bool,
        prefix: str = "",
    ):
        """`weights`, `can_reduce_in_backward` and `prefix` as in `StackWeights`."""
        self.NAME, self.plan, self.comm, self.blocks, self.segments = name, plan, comm, dict(blocks), plan.segments
        # By segment the stream that others read after it, besides that after the last layer.
        ends = [segment.start + segment.count for segment in self.segments]
        self.between = {s: f"{HIDDEN}.{s}" for s, end in enumerate(ends) if end in plan.edges}
        own = (IMAGES,) if plan.image_slots else ()
        self.reads = tuple(dict.fromkeys((*(name for b in self.blocks.values() for name in b.streams), *own)))
        self.weights = StackWeights(plan, comm, self.blocks, weights, can_reduce_in_backward, prefix)
        self.groups = RematGroups(plan, comm, self.blocks, self.weights)

    def collect_amax(self, amaxes: Sequence[tuple[tuple[Amax, ...], ...]]) -> dict[str, jax.Array]:
        """Amaxes from `backward`, over all microbatches → by linear layer `[R·slots, 2]`, over all devices."""
        out: dict[str, list[jax.Array]] = {}
        for segment, groups in zip(self.segments, amaxes, strict=True):
            layers, copies = [layer for group in groups for layer in group], self.weights.all.copies(segment)
            zeros = jnp.zeros((copies, 2) if copies > 1 else 2, jnp.float32)
            for name in self.weights.scaling.layers:
                out.setdefault(name, []).append(self.weights.all.stack([a.get(name, zeros) for a in layers], segment))
        return self.comm.max_over_devices({name: self.weights.all.join(parts) for name, parts in out.items()})

    def collect_metrics(self, metrics: Sequence[tuple[GroupMetrics, ...]]) -> dict[str, dict[str, jax.Array]]:
        """Metrics from `forward`, of all microbatches → by kind and name `[L, ...]`, over all devices."""
        out: dict[str, dict[str, list[jax.Array]]] = {}
        rows = self.weights.kinds
        for segment, groups in zip(self.segments, metrics, strict=True):
            for kind, layers in self.weights.by_kind(segment, groups):
                for name in layers[0]:
                    stacked = rows[kind].stack([layer[name] for layer in layers], segment)
                    out.setdefault(kind, {}).setdefault(name, []).append(stacked)
        joined = {
            kind: {n: self.weights.kinds[kind].join(parts) for n, parts in own.items()} for kind, own in out.items()
        }
        if not joined:
            return {}
        maxima = {kind: {n: a for n, a in own.items() if is_maximum(n)} for kind, own in joined.items()}
        sums = {kind: {n: a for n, a in own.items() if not is_maximum(n)} for kind, own in joined.items()}
        sums, maxima = self.comm.sum_over_tokens(sums), self.comm.max_over_devices(maxima)
        return {kind: rows[kind].of_all_layers(sums[kind] | maxima[kind]) for kind in joined}

    def updated_state(self, state: LayerState, metrics: LayerState) -> dict[str, dict[str, jax.Array]]:
        """The layers' state after a step with these metrics, both `[L, ...]`."""
        blocks = self.blocks
        return {
            kind: blocks[kind].updated_state(own, metrics.get(kind, {})) if kind in blocks else dict(own)
            for kind, own in state.items()
        }

    def fields(self) -> dict[str, Field]:
        key, sections = "data.reset_attention", "model.rope_sections"
        of_groups = (GROUP_SIZE, ROW_INDEX) if self.plan.context_groups is not None else ()
        return {
            "positions": Field(jnp.int32),
            **({"rope_positions": Field(jnp.int32, sections, (3,))} if self.plan.model.rope_sections else {}),
            **({"segment_ids": Field(jnp.int32, key)} if self.plan.is_packed else {}),
            **({"is_prefix": Field(jnp.bool_, "model.prefix_lm")} if self.plan.model.prefix_lm else {}),
            # False for padding
            "is_real": Field(jnp.bool_, "data.kind", optional=not self.plan.pads_samples),
            # The index of each token in its sequence
            **({"order": Field(jnp.int32, key, derived=True)} if self.plan.balances_context else {}),
            **({name: Field(jnp.int32, key, derived=True) for name in of_groups}),
        }

    def forward(
        self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool, stores: Stores | None = None
    ) -> tuple[Streams, Any]:
        """All layers once. Gives the residual stream, and those of `between`.

        `backward` needs the inputs, and by segment (residuals, metrics) of its groups; residuals are None if not
        `save`. The `stores` of a pipeline keep them themselves.
        """
        stores = stores or Stores(lambda s, *_: ForwardValues(self.segments[s]), [()] * len(self.segments))
        inputs, x, given, values = self.with_streams(batch, streams), streams[HIDDEN], Streams(), []
        for s, (segment, groups) in enumerate(zip(self.segments, arrays.stacks[self.NAME], strict=True)):

            def body(carry, loop, s=s, segment=segment, groups=groups):
                (x, state), (index,) = carry, loop
                store = stores.open(s, index, state)
                layers = layers_of(stores.first_layer, segment, index)
                for u, group in enumerate(groups):
                    group, at = self.weights.select_group(group, segment, index), self.groups.at(segment, u, layers)
                    x, saved, metrics = self.groups.forward(at, group, x, inputs, save)
                    store.save(u, saved, metrics)
                state, out = store.close()
                return (x, state), out

            (x, stores.states[s]), out = loop_over_layers(body, (x, stores.states[s]), (), segment)
            values.append(out)
            if s in self.between:
                given[self.between[s]] = x
        return {HIDDEN: x, **given}, (inputs, values)

    def backward(
        self,
        arrays: StepArrays,
        saved: Any,
        gradients: Streams,
        batch: Microbatch,
        table: Table,
        stores: Stores | None = None,
    ) -> tuple[Streams, Table, Results]:
        """Gradients are added to `arrays.sums`, if there are any, layer by layer; a pipeline's only to its `stores`.

        `stores.segments` may name the segments of one part of the pass; `gradients` are then those after the part.

        Collectives are tied to the layer that hides them: beside the backward pass of group u, the weights of group
        u - 1 are gathered and the gradients of group u + 1 are reduced. An untied gather is merged with the forward
        pass's by XLA, which then keeps the weights; untied reductions of distant layers are merged and run last.
        """
        (inputs, values), found, name = saved, list[Any](), self.NAME
        stores, dx = stores or self._stores_of_gradients(arrays), self.first_gradients(gradients, inputs)
        for s, (segment, groups) in reversed([*enumerate(zip(self.segments, arrays.stacks[name], strict=True))]):
            if stores.segments is not None and s not in stores.segments:
                continue  # of another part of the backward pass
            if s in self.between:
                dx = dx._replace(x=jax.tree.map(jnp.add, dx.x, gradients[self.between[s]]))

            def body(carry, loop, s=s, segment=segment, groups=groups):
                (dx, state), (index, residuals) = carry, loop
                store = stores.open(s, index, state, residuals)
                layers = layers_of(stores.first_layer, segment, index)
                dx_into_above, pending = dx, None  # of group u + 1: where it began, and its weights' gradients
                for u in reversed(range(len(groups))):
                    after = None if self.stays_gathered_until_backward(s, u) else dx_into_above
                    group = self.weights.select_group(groups[u], segment, index, after)
                    at, dx_into_above = self.groups.at(segment, u, layers), dx
                    dx, gradient = store.backward(u, at, group, dx, inputs)
                    if pending is not None:
                        reduced = store.add(u + 1, self.weights.reduce_group(pending, segment, u + 1))
                        dx, gradient, reduced = self._tie_reduction(s, u, (dx, gradient, reduced))
                        store.put(u + 1, reduced)
                    pending = gradient
                assert pending is not None
                store.put(0, store.add(0, self.weights.reduce_group(pending, segment, 0)))
                state, out = store.close()
                return (dx, state), out

            carry, residuals = (dx, stores.states[s]), values[s][0]
            (dx, stores.states[s]), out = loop_over_layers(body, carry, (residuals,), segment, reverse=True)
            found.insert(0, out)
        of_weights, amax = zip(*found, strict=True)
        # Sums over microbatches are the stores' state, changed in place; other gradients are outputs of the loops.
        gradients_of_weights = stores.states if name in arrays.sums else [*of_weights]
        metrics = [own for _, own in values]
        results = Results({name: gradients_of_weights}, {}, {name: metrics}, {name: [*amax]})
        return {HIDDEN: dx.x, **dx.streams}, table, results

    def zero_sums(self, weights: ByGroup[GroupWeights]) -> list[tuple[GroupWeights, ...]]:
        """Zeros for `StepArrays.sums`; `weights` are those of `StackWeights.gather_per_step`."""

        def gradient(groups: Sequence[GroupWeights], s: int) -> list[GroupWeights]:
            segment, found = self.segments[s], list[GroupWeights]()
            for u, stored in enumerate(groups):
                group, program = self.weights.select_group(stored, segment, 0), self.groups.at(segment, u, 0).program
                used = self.weights.gather_per_layer(group, program, backward=True)
                found.append(self.weights.reduce_group(self.groups.like_gradients(used, program), segment, u))
            return found

        sums = []
        for s, segment in enumerate(self.segments):
            shapes = jax.eval_shape(partial(gradient, s=s), weights[s])
            lead = (segment.iterations,) if segment.iterations > 1 else ()
            sums.append(tuple(self.weights.zeros_of(group, segment, u, lead) for u, group in enumerate(shapes)))
        return sums

    def with_streams(self, batch: Microbatch, streams: Streams) -> BlockInputs:
        """The inputs of the layers with the streams that they read besides the residual stream, if they read any."""
        if not self.reads:
            return batch.inputs
        return replace(batch.inputs, streams={name: streams[name] for name in self.reads}, fields=batch.fields)

    def first_gradients(self, gradients: Streams, inputs: BlockInputs) -> StreamGradients:
        """The gradients before the last layer's backward pass; those of streams that no one else reads are zero."""
        zeros = {name: jnp.zeros(x.shape, jnp.float32) for name, x in inputs.streams.items()}
        return StreamGradients(gradients[HIDDEN], {name: gradients.get(name, zero) for name, zero in zeros.items()})

    def _stores_of_gradients(self, arrays: StepArrays) -> Stores:
        """Without a pipeline: values, or sums over the microbatches."""
        if self.NAME not in arrays.sums:
            return Stores(lambda s, index, state, saved: BackwardValues(self.groups, saved), [()] * len(self.segments))

        def open_sums(s: int, index: Any, state: Any, saved: Any) -> BackwardSums:
            return BackwardSums(self.groups, saved, self.segments[s], index, state)

        return Stores(open_sums, [*arrays.sums[self.NAME]])

    def stays_gathered_until_backward(self, s: int, u: int) -> bool:
        """Whether a group's gathered weights are kept for its backward pass, which else gathers them again.

        Without loops and pipeline those of the last group are, because nothing would hide their gather; not if the
        backward pass starts with the forward pass.
        """
        segment, count = self.segments[s], self.segments[s].layers_per_iteration // self.segments[s].group_size
        is_last = (s, u) == (len(self.segments) - 1, count - 1)
        keeps = is_last and segment.iterations == 1 and not self.plan.is_pipelined and not segment.policy.keeps_input
        return keeps or all(self.weights.stay_gathered(segment, u))

    def _tie_reduction(self, s: int, u: int, values: tuple[StreamGradients, Any, Any]):
        """(dx, gradients) of a group and the reduced gradients of the group above; none is available before all are.

        Without loops and pipeline, dx of the first group waits for no weight gradient.
        """
        if not self.plan.ends_reductions_per_layer(self.weights.reduces_in_backward(self.segments[s])):
            return values
        if (s, u) == (0, 0) and self.segments[0].iterations == 1 and not self.plan.is_pipelined:
            return values[0], *not_before(values[1:])
        return not_before(values)


def layers_of(first: Any, segment: LayerSegment, loop: Any) -> Any:
    """The index of a body's first layer; if `first` has the index of every slot, of all its layers `[unroll]`."""
    start = segment.start + segment.layers_per_iteration * loop
    return lax.dynamic_slice_in_dim(first, start, segment.layers_per_iteration) if jnp.ndim(first) else first + start


def loop_over_layers(body: Callable, carry, xs: tuple, segment: LayerSegment, reverse: bool = False):
    """`body(carry, (index, *xs))` over a segment's loops; a single one is no loop, and its outputs are not stacked."""
    if segment.iterations == 1:
        return body(carry, (0, *xs))
    if segment.policy.on_host:  # its residuals are in the host's memory
        return lax.scan(body, carry, (jnp.arange(segment.iterations), *xs), reverse=reverse)

    one = jax.make_jaxpr(body, return_shape=True)(carry, (jnp.int32(0), *jax.tree.map(lambda a: a[0], xs)))
    run, (_, shapes) = replayed(*one), one[1]

    def iteration(i, state):
        carry, stacks = state
        index = segment.iterations - 1 - i if reverse else i
        x = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, False), xs)
        carry, out = run(carry, (index, *x))
        return carry, jax.tree.map(lambda s, a: lax.dynamic_update_index_in_dim(s, a, index, 0), stacks, out)

    # A scan would fill its stacks with zeros, and XLA would fill those of all segments before the first one runs.
    stacks = jax.tree.map(lambda a: lax.empty((segment.iterations, *a.shape), a.dtype), shapes)
    if jax.tree.leaves(stacks):  # without the barrier XLA would allocate them before they are needed
        carry, stacks = not_before((carry, stacks))
    return lax.fori_loop(0, segment.iterations, iteration, (carry, stacks))
