"""The pipeline: a schedule's ticks, run by all stages in one program inside the step's shard_map.

At a tick every stage does the operations of its row of the schedule (schedules.py): forward of one microbatch, backward
of another, perhaps the weights' gradients of a third. Stages that idle compute all the same, on numbers that nobody
uses. What a forward operation saves lies in buffers of a few slots until the backward operation reads it, so memory
does not grow with the number of microbatches. While that does not make too large a program, each slot has operations of
its own, whose matmuls write and read it in place; else the slots are one bank, and what is saved is copied into a slot
and out of it. The head and the loss of the microbatch that leaves the last stage are computed by all stages together,
each on its share of the tokens.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config.segments import Segment
from megajax.model.parts import BlockInputs
from megajax.parallel.local import Batch, LocalModel, Params
from megajax.parallel.pipeline.buffers import (
    Buffers,
    Carry,
    Weights,
    choose_slots,
    combine,
    loop_over,
    pick,
    position,
    read,
    replaced,
    switch,
    write,
)
from megajax.parallel.pipeline.schedules import Flags, Schedule, Table, check, make_schedule
from megajax.parallel.stack.residuals import Saved
from megajax.parallel.stack.split import SplitBackward
from megajax.parallel.stack.weights import GroupWeights


class Pipeline:
    """Runs the microbatches of a batch through the stages."""

    def __init__(self, local: LocalModel):
        self.local, self.layers = local, local.layers
        self.stages = local.sizes["pipeline"]
        settings, microbatches = local.config.pipeline, local.config.batch.num_microbatches
        self.schedule = make_schedule(settings.schedule, self.stages, microbatches, settings.rounds)
        check(self.schedule)
        ticks = self.schedule.ticks_of
        # Otherwise the last virtual stage goes backward in the tick in which the head gave it its gradient.
        self.heads_wait = bool((ticks["backward"][:, -1] > ticks["forward"][:, -1]).any())

    def gradients(self, non_block: Params, layers: Any, batch: Batch, key: jax.Array | None, scale, layer_loss_scale):
        """(gradients outside the blocks, of the layers, (sums, metrics), amaxes) of all microbatches.

        Those of layers are as `LayerStack` has them. `batch` is `[M, B, S]`, `scale` the factor of the loss that is
        differentiated, `layer_loss_scale` that of the routers' losses.
        """
        run = _Run(self, self.schedule, non_block, layers, batch, key, scale, layer_loss_scale)
        carry = run.loop(run.first_carry(), lambda flags: True)
        layer_gradients, metrics, amax = map(run.join_rounds, (carry.layer_gradients, carry.metrics, carry.amax))
        return carry.non_block_gradients, layer_gradients, (carry.sums, metrics), amax

    def loss(self, non_block: Params, layers: Any, batch: Batch) -> jax.Array:
        """This device's share of the summed loss, forward operations only, without dropout."""
        P, M, R = self.stages, batch["tokens"].shape[0], self.schedule.rounds
        run = _Run(self, make_schedule("gpipe", P, M, R), non_block, layers, batch, None, None, None)
        x = run.empty_stream()
        loss = jnp.zeros((), jnp.float32)
        carry = Carry(x, x, x[None][:0], [], None, {}, None, None, {"loss": loss}, None)
        return run.loop(carry, lambda flags: flags.forward).sums["loss"]


class _Run:
    """One pass of a batch through a schedule, while it is traced."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, non_block, layers, batch, key, scale, layer_loss_scale):
        self.pipeline, self.local, self.schedule = pipeline, pipeline.local, schedule
        self.stack, self.training = pipeline.layers, scale is not None
        self.non_block, self.weights, self.batch, self.key, self.scale = (
            non_block,
            self.by_round(layers),
            batch,
            key,
            scale,
        )
        self.layer_loss_scale = layer_loss_scale
        self.banks = 1  # all slots are one, or each is
        if self.training:
            self.slots, self.banks = choose_slots(self.stack.plan, schedule)
        self.stage = lax.axis_index("pipeline")
        self.last_stage = self.stage == schedule.stages - 1
        # Of each round the first slot's layer, [R], or where others do not follow from it every slot's, [R, slots].
        layers = self.stack.first_layers if self.stack.in_order else self.stack.table
        self.layers_of_rounds = jnp.asarray(layers)[self.stage]
        self.splits: dict[tuple[int, int], SplitBackward] = {}

    # The loop over ticks

    def loop(self, carry: Carry, wanted: Callable[[Flags], bool]) -> Carry:
        """Every tick of the phases whose flags are `wanted`."""
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
        """All operations of one tick; only what is received at its start and sent at its end crosses stages."""
        received = None
        if flags.backward:
            # Sent at the start of the tick after, it travels beside the forward operation.
            received = self.hand_over(carry.dx, -1)
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

    def own(self, table: np.ndarray, tick: jax.Array) -> jax.Array:
        """This stage's entry of a table `[ticks, P]`."""
        return jnp.asarray(table)[tick, self.stage]

    def work(self, table: Table, tick: jax.Array):
        """(whether this stage has work, the fields and inputs of its microbatch, its round)."""
        microbatch = self.own(table.microbatch, tick)
        fields, inputs = self.microbatch(jnp.maximum(microbatch, 0))
        return microbatch >= 0, fields, inputs, self.own(table.round, tick)

    def microbatch(self, index: jax.Array) -> tuple[dict[str, jax.Array], BlockInputs]:
        fields = {n: lax.dynamic_index_in_dim(f, index, keepdims=False) for n, f in self.batch.items()}
        return fields, self.local.inputs(fields, index, self.key, self.layer_loss_scale)

    def hand_over(self, x: jax.Array, step: int) -> jax.Array:
        """`x` of the stage before (`step` 1) or after (-1); between last and first stage only if there are rounds."""
        P = self.schedule.stages
        pairs = [(s, (s + step) % P) for s in range(P)]
        if self.schedule.rounds == 1:
            pairs = [(a, b) for a, b in pairs if b == a + step]
        return lax.ppermute(x, "pipeline", pairs)

    # Operations

    def forward(self, tick: jax.Array, carry: Carry) -> tuple[Carry, jax.Array]:
        """The blocks of this stage's round, on what the stage before sent; the first virtual stage embeds tokens."""
        active, fields, inputs, r = self.work(self.schedule.forward, tick)
        first = (self.stage == 0) & (r == 0)
        x = (first, self.local.embedding.forward(self.non_block, fields, inputs), carry.x)
        slot = self.own(self.slots.forward, tick) if self.training else jnp.int32(0)
        buffers = (carry.activations, carry.metrics)
        active = active if self.layer_loss_scale is not None else None  # no experts, no metrics
        x, activations, metrics = self.in_program(r, slot, self.stage_forward, x, buffers, inputs, active)
        return carry._replace(x=self.hand_over(x, 1), activations=activations, metrics=metrics), x

    def stage_forward(self, r: int, bank: int, slot: jax.Array, x: Any, buffers: Any, inputs, active):
        """(y, activations with this microbatch's in their slot of a bank, metrics with this one's) of round `r`.

        `x` is (whether this is the first virtual stage, its embedded tokens, what the stage before sent).
        """
        x, (activations, metrics) = jnp.where(*x), buffers
        new, measured = [], []
        for i, segment in enumerate(self.stack.segments):

            def body(loop, state, i=i, segment=segment):
                x, buffers, totals = state[0], *map(list, state[1:])
                first = self.first_layer(segment, r, loop)
                for u, group in enumerate(self.weights[r][i]):
                    group = pick(group, segment, loop)
                    x, saved, values = self.stack.group_forward(group, x, inputs, segment, first, u, self.training)
                    if self.training:
                        kept = self.saved(i, u, group, x, inputs, first).values(saved)
                        buffers[u] = write(buffers[u], kept, position(segment, slot, loop))
                        values = jax.tree.map(lambda a: jnp.where(active, a, 0), values)
                        totals[u] = combine(jnp.add, totals[u], values, segment, loop)
                return x, buffers, totals

            start = (activations[bank][i], metrics[r][i]) if self.training else ([], [])
            x, buffers, totals = loop_over(segment, body, (x, *start))
            new.append(buffers)
            measured.append(totals)
        return x, replaced(activations, bank, new), replaced(metrics, r, measured) if self.training else metrics

    def head(self, tick: jax.Array, carry: Carry, y: jax.Array) -> tuple[Carry, jax.Array | None]:
        """Head and loss of the microbatch that leaves the last virtual stage: each stage has 1/P of its tokens.

        Returns the gradient of `y` on every stage.
        """
        index = jnp.asarray(self.schedule.forward.microbatch)[tick, self.schedule.stages - 1]
        fields, _ = self.microbatch(index)
        own, P, tensor = y.shape[0], self.schedule.stages, self.local.sizes["tensor"]
        padding = -own % P
        y = jnp.pad(jnp.where(self.last_stage, y, 0), ((0, padding), (0, 0)))
        y = lax.psum_scatter(y, "pipeline", scatter_dimension=0, tiled=True)

        def share(field: jax.Array) -> jax.Array:
            field = jnp.pad(field.reshape(tensor, own), ((0, 0), (0, padding)))
            return lax.dynamic_slice_in_dim(field, self.stage * len(y), len(y), 1).reshape(-1)

        targets, mask = share(fields["targets"]), share(fields["loss_mask"])
        if not self.training:
            loss = self.local.head.losses(self.non_block, y, targets, mask)
            return carry._replace(sums={"loss": carry.sums["loss"] + loss}), None
        loss, z_loss, dy, non_block_gradients = self.local.head.losses_and_gradients(
            self.non_block, y, targets, mask, self.scale, carry.non_block_gradients
        )
        sums = {"loss": carry.sums["loss"] + loss, "z_loss": carry.sums["z_loss"] + z_loss}
        dy = lax.all_gather(dy, "pipeline", axis=0, tiled=True)[:own]
        carry = carry._replace(non_block_gradients=non_block_gradients, sums=sums)
        if self.pipeline.heads_wait:
            slot = jnp.asarray(self.slots.head)[tick]
            carry = carry._replace(heads=lax.dynamic_update_index_in_dim(carry.heads, dy, slot, 0))
        return carry, dy

    def backward(self, tick: jax.Array, carry: Carry, received, dhead: jax.Array | None, split: bool) -> Carry:
        """The gradients of this stage's round, from what the stage after sent or the head gave.

        Those of weight matrices only if not `split`; then what they need is deferred.
        """
        active, fields, inputs, r = self.work(self.schedule.backward, tick)
        last = self.last_stage & (r == self.schedule.rounds - 1)
        if self.pipeline.heads_wait:
            slot = jnp.asarray(self.slots.backward_head)[tick]
            dhead = lax.dynamic_index_in_dim(carry.heads, slot, keepdims=False)
        dx = received if dhead is None else jnp.where(last, dhead, received)
        # A stage that idles reads what an earlier operation has saved: with this zero all its gradients are zero.
        dx = jnp.where(active, dx, 0)
        if inputs.layer_loss_scale is not None:
            inputs = replace(inputs, layer_loss_scale=jnp.where(active, inputs.layer_loss_scale, 0))
        buffers = (carry.layer_gradients, carry.deferred, carry.amax, carry.activations)
        slot, keep = self.own(self.slots.backward, tick), self.own(self.slots.deferred, tick)
        operation = partial(self.stage_backward, split=split)
        dx, layer_gradients, deferred, amax = self.in_program(r, slot, operation, dx, buffers, inputs, keep, active)
        first = jnp.where(active & (self.stage == 0) & (r == 0), dx, 0)
        non_block_gradients = self.local.embedding.backward(
            carry.non_block_gradients, self.non_block, fields, inputs, first
        )
        return carry._replace(
            dx=dx,
            non_block_gradients=non_block_gradients,
            layer_gradients=layer_gradients,
            deferred=deferred,
            amax=amax,
        )

    def stage_backward(self, r: int, bank: int, slot, dx: jax.Array, buffers, inputs, keep, active, *, split: bool):
        """(dx, gradients, what is deferred, amaxes) of round `r`, this microbatch's included."""
        layer_gradients, deferred, amax, activations = buffers
        results = []
        for i in reversed(range(len(self.stack.segments))):
            state = (dx, layer_gradients[r][i], deferred[i], amax[r][i])
            dx, *result = self.segment_backward(r, i, state, activations[bank][i], inputs, (slot, keep), active, split)
            results.insert(0, result)
        gradients, deferred, largest = ([result[part] for result in results] for part in range(3))
        return dx, replaced(layer_gradients, r, gradients), deferred, replaced(amax, r, largest)

    def segment_backward(self, r: int, i: int, state, activations, inputs, slots, active, split: bool):
        """The same of segment `i`, whose parts of the state these are."""
        segment, exchange = self.stack.segments[i], self.stack.weights.exchange
        slot, keep = slots

        def body(loop, state):
            dx, totals, deferred, amax = state[0], *map(list, state[1:])
            loop = segment.loops - 1 - loop
            first = self.first_layer(segment, r, loop)
            entered, above = dx, {}
            for u in reversed(range(len(totals))):
                group = pick(self.weights[r][i][u], segment, loop)
                if not self.stack.weights.is_gathered(segment, u):
                    group, _ = exchange.tie_gather((group, entered))
                entered = dx
                saved = read(activations[u], position(segment, slot, loop))
                if split:
                    parts = self.split(i, u, group, saved, dx, inputs, first)
                    dx, gradient, largest, later = parts.inputs(group, saved, dx, inputs, first)
                    deferred[u] = write(deferred[u], later, position(segment, keep, loop))
                else:
                    residuals = self.saved(i, u, group, dx, inputs, first).residuals(saved)
                    dx, gradient, largest = self.stack.group_backward(group, residuals, dx, inputs, segment, first, u)
                largest = jax.tree.map(lambda a: jnp.where(active, a, 0), largest)
                amax[u] = combine(jnp.maximum, amax[u], largest, segment, loop)
                # A group's gradients are reduced while the group below goes backward, and then added in place.
                for v, pending in above.items():
                    added = self.add(totals[v], pending, segment, v, loop)
                    dx, gradient, totals[v] = exchange.tie_reduction((dx, gradient, added), False)
                above = {u: gradient}
            for v, pending in above.items():
                totals[v] = self.add(totals[v], pending, segment, v, loop)
            return dx, totals, deferred, amax

        return loop_over(segment, body, state)

    def weight(self, tick: jax.Array, carry: Carry) -> Carry:
        """Gradients of weights that a backward operation has deferred."""
        r = self.own(self.schedule.weight.round, tick)  # type: ignore[union-attr]
        slot = self.own(self.slots.weight, tick)
        programs = [partial(self.stage_weight, k) for k in range(self.schedule.rounds)]
        gradients = switch(r, programs, carry.layer_gradients, carry.deferred, slot)
        return carry._replace(layer_gradients=gradients)

    def stage_weight(self, r: int, layer_gradients: Weights, deferred: Buffers, slot: jax.Array) -> Weights:
        """The gradients with those that one backward operation of round `r` has deferred."""
        gradients = []
        for i, segment in enumerate(self.stack.segments):

            def body(loop, totals, i=i, segment=segment):
                totals = list(totals)
                for u in reversed(range(len(totals))):
                    later = read(deferred[i][u], position(segment, slot, loop))
                    gradient = self.splits[i, u].weights(pick(self.weights[r][i][u], segment, loop), later)
                    totals[u] = self.add(totals[u], gradient, segment, u, loop)
                return totals

            gradients.append(loop_over(segment, body, layer_gradients[r][i]))
        return replaced(layer_gradients, r, gradients)

    # Parts of operations

    def in_program(self, r: jax.Array, slot: jax.Array, operation: Callable, *arguments: Any) -> Any:
        """`operation(round, bank, slot in the bank, ...)`: each bank is a program of its own, or each round."""
        if self.banks > 1:
            programs = [partial(operation, k, bank) for bank, k in enumerate(self.slots.rounds)]
            return switch(slot, programs, 0, *arguments)
        return switch(r, [partial(operation, k, 0) for k in range(self.schedule.rounds)], slot, *arguments)

    def by_round(self, layers: Any) -> Weights:
        """Weights as the layer stack has them, by round."""
        rounds = range(self.schedule.rounds)
        if len(rounds) == 1:
            return [layers]

        def of_round(r: int, n: int, groups: Any) -> Any:
            return jax.tree.map(lambda w: w[r] if n == 1 else w[r * n : (r + 1) * n], groups)

        loops = [segment.loops for segment in self.stack.segments]
        return [[of_round(r, *pair) for pair in zip(loops, layers, strict=True)] for r in rounds]

    def join_rounds(self, weights: Weights) -> Any:
        """The way back."""
        if len(weights) == 1:
            return weights[0]

        def join(segment: Segment, *rounds: Any) -> Any:
            return jax.tree.map(lambda *w: jnp.stack(w) if segment.loops == 1 else jnp.concatenate(w), *rounds)

        return [join(segment, *groups) for segment, *groups in zip(self.stack.segments, *weights, strict=True)]

    def first_layer(self, segment: Segment, r: int, loop: jax.Array | int) -> jax.Array:
        """The first layer of a loop's body in round `r`; all of them, `[unroll]`, where they are not consecutive."""
        layers = self.layers_of_rounds[r]
        if self.stack.in_order:
            return layers + segment.start + loop * segment.unroll
        return lax.dynamic_slice_in_dim(layers, segment.start + loop * segment.unroll, segment.unroll)

    def add(
        self, totals: GroupWeights, gradient: GroupWeights, segment: Segment, u: int, loop: jax.Array | int
    ) -> GroupWeights:
        """The summed gradients of group `u` and one more microbatch's, reduced over `fsdp`."""
        gradient = jax.tree.map(lambda g: g.astype(jnp.float32), self.stack.weights.reduce(gradient, segment, u))
        return combine(jnp.add, totals, gradient, segment, loop)

    def saved(self, i: int, u: int, group: GroupWeights, dx: jax.Array, inputs: BlockInputs, first) -> Saved:
        """What a group's forward operation saves; `dx` is any residual stream."""
        return self.stack.kept(group, dx, inputs, self.stack.segments[i], first, u)

    def split(self, i: int, u: int, group: GroupWeights, saved, dx, inputs: BlockInputs, first) -> SplitBackward:
        """The backward pass of a group in two parts; traced again at each use, for it may hold values of the trace."""

        def backward(group, saved, dx, inputs, first):
            residuals = self.saved(i, u, group, dx, inputs, first).residuals(saved)
            return self.stack.group_backward(group, residuals, dx, inputs, self.stack.segments[i], first, u)

        self.splits[i, u] = SplitBackward(backward, group, saved, dx, inputs, first)
        return self.splits[i, u]

    # The first tick's carry

    def empty_stream(self) -> jax.Array:
        """Zeros in the place of a microbatch's residual stream."""
        fields, inputs = self.microbatch(jnp.int32(0))
        x = jax.eval_shape(self.local.embedding.forward, self.non_block, fields, inputs)
        return jnp.zeros(x.shape, x.dtype)

    def first_carry(self) -> Carry:
        """Empty buffers and zero gradients."""
        x, (_, inputs) = self.empty_stream(), self.microbatch(jnp.int32(0))
        zero = jnp.zeros((), jnp.float32)
        groups = [
            [self.empty_group(i, u, x, inputs) for u in range(len(segment))]
            for i, segment in enumerate(self.weights[0])
        ]
        saved, deferred, gradients, amax, metrics = (
            [[group[part] for group in segment] for segment in groups] for part in range(5)
        )

        def empty_bank() -> Buffers:
            # Not even zeros: what is read has been written before, by an idle operation at least (`replay`).
            return jax.tree.map(lambda a: lax.empty(a.shape, a.dtype), saved)

        return Carry(
            x=x,
            dx=x,
            heads=jnp.zeros((self.slots.heads if self.pipeline.heads_wait else 0, *x.shape), x.dtype),
            activations=[empty_bank() for _ in range(self.banks)],
            deferred=deferred,
            non_block_gradients=jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), dict(self.non_block)),
            layer_gradients=[gradients] * self.schedule.rounds,
            amax=[amax] * self.schedule.rounds,
            sums={"loss": zero, "z_loss": zero},
            metrics=[metrics] * self.schedule.rounds,
        )

    def empty_group(self, i: int, u: int, x: jax.Array, inputs: BlockInputs):
        """(shapes of a bank's activations; zeros: what is deferred, gradients, amaxes, metrics) of a group."""
        segment = self.stack.segments[i]
        first, group = self.first_layer(segment, 0, 0), pick(self.weights[0][i][u], segment, 0)
        kept = self.saved(i, u, group, x, inputs, first)

        def backward(group, x):
            _, saved, metrics = self.stack.group_forward(group, x, inputs, segment, first, u, True)
            values = kept.values(saved)
            later = []
            if self.slots.deferred_slots:
                later = self.split(i, u, group, values, x, inputs, first).inputs(group, values, x, inputs, first)[3]
            _, gradient, amax = self.stack.group_backward(group, kept.residuals(values), x, inputs, segment, first, u)
            return values, later, self.stack.weights.reduce(gradient, segment, u), amax, metrics

        def zeros(shapes: Any, lead: int | None, dtype: Any = None) -> Any:
            leading = () if lead is None else (lead,)
            return jax.tree.map(lambda a: jnp.zeros((*leading, *a.shape), dtype or a.dtype), shapes)

        saved, later, gradient, amax, metrics = jax.eval_shape(backward, group, x)
        loops = segment.loops if segment.loops > 1 else None
        rows = self.slots.activations // self.banks * segment.loops
        return (
            [jax.ShapeDtypeStruct((rows, *a.shape), a.dtype) for a in saved],
            zeros(later, self.slots.deferred_slots * segment.loops),
            zeros(gradient, loops, jnp.float32),
            zeros(amax, loops),
            zeros(metrics, loops),
        )
