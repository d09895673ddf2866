"""Memory of one device's train step, estimated without compiling it.

The peak is one of a few: in the head, with all saved activations; in the backward pass of a layer, which
frees activations and adds gradients; or at the end, with all gradients. The estimate is the largest sum of the live
arrays at these peaks. XLA's figure differs by a few per cent (dev/memory_table.py compares).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megajax.estimate.activations import Activations
from megajax.estimate.optimizer_memory import StateBytes, state_bytes
from megajax.estimate.weight_elements import Elements, StepWeights
from megajax.layout.kinds import extra_of
from megajax.layout.segments import LayerSegment
from megajax.optim.slots import OptimizerSlots
from megajax.step.embedding import TOKENS
from megajax.step.pipeline.buffers import choose_buffer_slots, schedule_of
from megajax.step_plan import ExtraPlan, StepPlan

FP32 = 4  # bytes
HEAD = "head"  # name of the head's weight
# The gradients of the last layer's weights are not tied to that layer. XLA's scheduler computes them during the layer
# below and keeps their operands, if these fit into the scheduler's memory limit: these bytes for an H200, from XLA's
# own message. Seen on GPT-3 over `tensor` and Qwen3 235B.
SCHEDULED = 114_541_026_649


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device at the peak; the parts add up to the total."""

    parameters: int  # master weights and frozen weights, as stored
    optimizer: int  # and the other 16 bits of split master weights
    gradients: int = 0  # of the layers whose backward pass is done, and sums over microbatches
    weights: int = 0  # in the compute dtype: gathered once a step, or for the current layers
    activations: int = 0  # saved for the backward pass: of a microbatch, or of those in the pipeline
    working: int = 0  # temporary arrays of a layer or the head

    @property
    def total(self) -> int:
        return self.parameters + self.optimizer + self.gradients + self.weights + self.activations + self.working


def estimate_memory(plan: StepPlan) -> MemoryEstimate:
    """Bytes per device for a train step with this plan, as in XLA's programs for GPUs."""
    return max(peaks(plan), key=lambda peak: peak.total)


def peaks(plan: StepPlan) -> Iterator[MemoryEstimate]:
    """The peaks of a step, one of which is the largest."""
    if in_pairs := plan.microbatches_at_once > 1:
        plan = plan.with_large_microbatches
    step = _Pipelined(plan) if plan.is_pipelined else _Step(plan, in_pairs)
    teacher = plan.config.teacher_model
    if plan.second_stack is not None:
        held, microbatch = second_activations(plan, plan.second_stack)
        found = [*step.peaks()]
        if plan.is_pipelined and plan.num_microbatches > plan.sizes["pipeline"]:
            # A loop over the stage's microbatches, before the ticks, copies what each keeps when its layers have run.
            found.append(replace(step.in_head(), working=microbatch))
        return (replace(each, activations=each.activations + held) for each in found)
    if teacher is None:
        return step.peaks()
    # A teacher's output: of one microbatch, in a pipeline of all
    local_tokens, held = plan.tokens // plan.sizes["tensor"], plan.batch_shape[0] if plan.is_pipelined else 1
    stream = step.compute * held * local_tokens * teacher.hidden_size
    return (
        replace(each, weights=each.weights + step.weights.teacher, activations=each.activations + stream)
        for each in step.peaks()
    )


def second_activations(step: StepPlan, plan: StepPlan) -> tuple[int, int]:
    """(bytes that layers of an encoder or a tower keep until their backward pass, with their stream; of a microbatch).

    In a pipeline a stage keeps those of its share of the microbatches, and the streams of all.
    """
    numbers, microbatches, stages = Activations(plan), step.num_microbatches, step.sizes["pipeline"]
    vision, given = step.model.vision, numbers.stream
    if vision is not None:  # image embeddings, and with DeepStack features beside them
        tokens = plan.tokens // vision.block // step.sizes["tensor"]
        given = numbers.compute * tokens * vision.stream_parts * step.model.hidden_size
    kept = numbers.stream * (1 + len(plan.edges))  # before the norm or the projectors
    if not plan.trains_layers:
        return kept + (microbatches if step.is_pipelined else 1) * given, 0
    slots = [(s, s.start + i) for s in plan.segments for i in range(s.count)]
    saved = sum(numbers.saved(plan.layer_slots[slot].block, s, s.iterations > 1) for s, slot in slots)
    if not step.is_pipelined:
        return saved + kept + given, saved
    return -(-microbatches // stages) * (saved + kept) + microbatches * given, saved


class _Step:
    """The live arrays of a step without a pipeline."""

    def __init__(self, plan: StepPlan, in_pairs: bool = False):
        """`in_pairs`: a microbatch of the plan is two, whose gradients of a layer are added when both are there."""
        self.plan, self.config, self.sizes, self.in_pairs = plan, plan.config, plan.sizes, in_pairs
        self.slots, self.segments, self.activations = plan.layer_slots, plan.segments, Activations(plan)
        self.compute = self.activations.compute
        self.rounds = plan.layer_table.shape[1]  # each with layers in all slots
        self.weights = StepWeights(plan, self.activations.blocks, self.compute)
        self.repeats = self.weights.repeats

    def peaks(self) -> Iterator[MemoryEstimate]:
        """The possible peaks, in the order of the step."""
        yield from (self.in_forward(segment) for segment in self.segments if segment.iterations > 1)
        yield self.in_head()
        yield from self.in_extra_layers()
        gradients = self.weights.extra_layers
        for segment in reversed(self.segments):
            groups = self.parts(segment) if segment.iterations == 1 else [self.slots_of(segment)]
            for slots in reversed(groups):
                yield self.in_backward(segment, slots, gradients)
                gradients += self.weights.layers(slots if segment.iterations == 1 else (), trained=True)
        if self.late_head:
            yield self.in_late_head()
        yield self.at_end()
        if self.config.optimizer.offload:
            # All gradients, and moments from the host: of the largest parameter before and after its update
            yield replace(self.at_end(), working=2 * self.state.largest_moved)

    # The peaks

    def in_forward(self, segment: LayerSegment) -> MemoryEstimate:
        """The forward pass of a loop: its body's activations are copied to the loop's stacks when the body ends.

        The arrays for gradients depend on nothing, so they exist already.
        """
        slots = self.slots_of(segment)
        body = slots[: segment.layers_per_iteration]
        return replace(
            self.always,
            gradients=self.gradients_in_head,
            weights=self.cast(slots.stop)
            + self.compute * (self.weights.layers(body[:1]).whole + self.non_block_in_head),
            activations=self.saved(slots.stop),
            working=sum(self.activations.saved(self.slots[slot].block, segment, False) for slot in body),
        )

    def in_head(self) -> MemoryEstimate:
        """All saved activations, and a chunk's logits with their gradient; the last layer keeps its weights."""
        turn = self.segments[-1]
        held = self.weights.layers(self.parts(turn)[-1]) if turn.iterations == 1 else Elements()
        return replace(
            self.always,
            gradients=self.gradients_in_head,
            weights=self.cast(len(self.slots)) + self.compute * self.non_block_in_head + held.gathered_bytes,
            activations=self.saved(len(self.slots)),
            working=self.head_working + (self.of_microbatch(self.head_name) if self.head_name else 0),
        )

    def in_extra_layers(self) -> Iterator[MemoryEstimate]:
        """The backward pass of the last layer after the model's, with the values of all; stages share tokens."""
        extra = extra_of(self.config.model)
        if extra is None:
            return
        head, layer, kind = self.in_head(), self.weights.extra_layer, extra.name
        segments, numbers, stages = ExtraPlan.after(self.plan).segments, self.activations, self.sizes["pipeline"]
        saved = sum(numbers.saved(kind, segment, False) + numbers.stream for segment in segments)  # with their outputs
        yield replace(
            head,
            gradients=head.gradients + (0 if self.repeats else FP32 * self.weights.extra_layers.stored),
            weights=head.weights + self.weights.extra_layers.per_step_bytes + layer.gathered_bytes,
            activations=head.activations + (saved + numbers.recomputed(kind, segments[-1], False)) // stages,
            working=max(head.working, numbers.working(kind, segments[-1].policy, self.compute * layer.whole) // stages),
        )

    def in_backward(self, segment: LayerSegment, slots: Sequence[int], done: Elements) -> MemoryEstimate:
        """The backward pass of a remat group, or of a loop over groups, with gradients of the layers above, `done`."""
        group, looped = slots[: segment.group_size], segment.iterations > 1
        layers, after = self.weights.layers(group), slots[-1] + 1
        later = range(after, self.backward_pass(slots).stop)
        above = later[: segment.group_size]
        # A loop casts its own weights.
        weights = self.compute * layers.whole if looped else layers.gathered_bytes + self.weights.fused(layers)
        weights += self.compute * self.weights.non_block.whole if self.repeats else 0
        # The head's gradient is reduced at the end.
        head = self.weights.non_block_by_name[HEAD] if self.has_head and not self.late_head else Elements()
        non_block = self.weights.non_block_as_stored.stored - self.last_gradients + head.whole - head.stored
        gradients = self.accumulated(FP32 * non_block, done) + self.gradient_stacks
        gradients += self.compute * layers.whole if self.in_pairs else 0
        peak = replace(
            self.always,
            gradients=gradients,
            weights=self.cast(after) + weights,
            activations=self.saved(after) + self.recomputed(segment, group),
            working=self.layer_working(segment, slots) + (self.head_operands if self.head_waits else 0),
        )
        if looped:
            return peak
        if self.defers:
            operands = sum(self.activations.deferred(self.slots[slot].block) for slot in later)
            working = peak.working + max(operands - self.uncopied, 0)  # not at the same time
            return replace(peak, gradients=self.accumulated(FP32 * non_block), working=working)
        if self.sizes["fsdp"] > 1 and not self.repeats:
            return self.while_reducing(peak, slots, above)
        return self.with_layer_above(peak, segment, slots, above)

    def while_reducing(self, peak: MemoryEstimate, slots: Sequence[int], above: range) -> MemoryEstimate:
        """A group's backward pass: the larger of its start and its end, which reduces the gradients of the group above.

        At its start these gradients are in the compute dtype, or the operands of the last layer's are kept; adapters'
        do not wait.
        """
        waiting = self.compute * self.weights.layers(above, trained=True).reduced
        if above.stop == self.backward_pass(slots).stop and self.plan.trains_layers:
            waiting = max(waiting, sum(self.activations.operands(self.slots[slot].block) for slot in above))
        start = replace(peak, working=peak.working + waiting)
        block = self.slots[slots[0]].block
        largest = self.compute * self.weights.largest[block]
        end = replace(
            peak,
            weights=self.cast(slots[-1] + 1),
            activations=self.saved(slots[-1] + 1),
            working=self.activations.operands(block) + largest + FP32 * self.weights.reduced_in_backward(above),
        )
        return max(start, end, key=lambda each: each.total)

    def with_layer_above(
        self, peak: MemoryEstimate, segment: LayerSegment, slots: Sequence[int], above: range
    ) -> MemoryEstimate:
        """A group's backward pass with the gradients of the group above, which are reduced, or added to the sums.

        The last layer's weight gradients may wait for it, with their operands; adapters' do not.
        """
        gradients, reduced = self.weights.layers(above, trained=True), FP32 * self.weights.reduced_in_backward(above)
        together = self.backward_pass(slots)
        before = self.weights.layers(range(max(slots[0] - segment.group_size, together.start), slots[0]))
        more = self.layer_working(segment, slots, reduced) - self.layer_working(segment, slots)
        peak = replace(
            peak,
            weights=peak.weights + before.gathered_bytes,  # gathered at the same time
            working=peak.working + more + self.pending(gradients),
        )
        is_last = above.stop == together.stop and self.sizes["fsdp"] == 1 and self.plan.trains_layers
        exchanges = not self.plan.collectives.dispatch.gathers_tokens  # the operands would be in its pool
        late = sum(self.activations.operands(self.slots[slot].block) for slot in above if is_last and not exchanges)
        return replace(peak, working=peak.working + (late if peak.total + late < SCHEDULED else 0))

    def at_end(self) -> MemoryEstimate:
        """All gradients, those outside the blocks before they are reduced.

        Tokens' gradients are added to zeros that XLA does not reuse, while the first layer's last gradient is reduced.
        """
        everything = self.weights.layers(range(len(self.slots)), trained=True) + self.weights.extra_layers
        embedding = self.weights.non_block_by_name[TOKENS] if self.plan.is_trained(TOKENS) else Elements()
        stored, table = embedding.stored, embedding.stored if self.plan.embedding_axes else embedding.whole
        non_block = self.weights.non_block_as_stored.stored - stored + table
        gradients = self.accumulated(FP32 * non_block, everything)
        reduced = 0 if self.repeats else self.weights.reduced_in_backward(self.parts(self.segments[0])[0])
        zeros = stored if table > stored or not self.repeats else 0
        return replace(self.always, gradients=gradients, working=FP32 * (zeros + reduced) + self.of_microbatch(TOKENS))

    def in_late_head(self) -> MemoryEstimate:
        """A late head's gradient before and between its reductions, and the first group's before they are reduced."""
        first, head = self.parts(self.segments[0])[0], self.weights.non_block_by_name[HEAD]
        per_step = head.whole // self.sizes["fsdp"]
        late = head.whole + (per_step if head.stored < per_step < head.whole else 0)
        other_weights = self.weights.non_block_as_stored.stored - self.last_gradients
        everything = self.weights.layers(range(len(self.slots)), trained=True) + self.weights.extra_layers
        return replace(
            self.always,
            gradients=self.accumulated(FP32 * (other_weights + late), everything),
            weights=self.cast(first.stop) + self.weights.layers(first).gathered_bytes,
            working=FP32 * self.weights.reduced_in_backward(first),
        )

    # The live arrays at these peaks

    @property
    def last_gradients(self) -> int:
        """Elements of the gradients, as stored, that are made at the end of the backward pass only, not in the head."""
        names = [TOKENS] if self.plan.is_trained(TOKENS) and self.head_name != TOKENS else []
        names += [HEAD] if self.late_head else []
        return sum(self.weights.non_block_by_name[name].stored for name in names)

    @property
    def head_name(self) -> str:
        """The weight that gives the logits; empty if the objective has parameters in place of it."""
        if self.plan.transformer.objective:
            return ""
        return TOKENS if self.config.model.tie_embeddings else HEAD

    @property
    def has_head(self) -> bool:
        """Whether there is a head with a gradient, besides the embedding."""
        return HEAD in self.plan.placements and self.plan.is_trained(HEAD)

    @property
    def late_head(self) -> bool:
        """Whether the head's gradient is made last; with several microbatches it is added to a sum, which exists."""
        return self.head_waits and not self.repeats

    @property
    def head_waits(self) -> bool:
        """Whether the head's gradient is computed last: a single chunk is no loop, so nothing waits for it."""
        return self.has_head and self.plan.loss_chunks == 1 and not self.plan.is_pipelined

    @property
    def head_operands(self) -> int:
        """Bytes of the operands of the head's gradient: the logits' gradient, and the rows."""
        width = self.config.model.padded_vocab_size // self.sizes["tensor"] + self.config.model.hidden_size
        return self.compute * self.plan.head_tokens * width

    @property
    def defers(self) -> bool:
        """Whether XLA computes the gradients of all layers' weights at the end, and keeps their operands until then.

        It does where nothing ties them to their layers and they are added to sums over microbatches; in a pipeline,
        whose layers add to the sums themselves, where they can hide the exchanges of `context`.
        """
        if self.plan.ends_reductions_per_layer(complete=not self.repeats):
            return False
        return self.sizes["context"] > 1 if self.plan.is_pipelined else self.repeats

    def pending(self, above: Elements) -> int:
        """Bytes of the layer above's gradients that are not reduced and not yet added to the sums."""
        return self.compute * (above.whole - above.reduced) if self.repeats else 0

    @cached_property
    def always(self) -> MemoryEstimate:
        """Parameters and the optimizer's moments."""
        return MemoryEstimate(self.state.weights, self.state.optimizer)

    @cached_property
    def state(self) -> StateBytes:
        return state_bytes(self.plan, OptimizerSlots.of(self.plan, self.plan.trained, self.plan.placements))

    def accumulated(self, non_block: int, done: Elements | None = None) -> int:
        """Bytes of gradients so far: `non_block` and those of the layers `done`; with sums over microbatches all."""
        if self.repeats:
            layers, number = self.weights.layers(range(len(self.slots)), trained=True), self.plan.accumulation.itemsize
            return number * (
                self.weights.non_block_whole.whole + self.rounds * layers.per_step + self.weights.extra_layers.per_step
            )
        done = done or Elements()
        return non_block + FP32 * (done.stored - done.left) + self.compute * done.left

    def of_microbatch(self, name: str) -> int:
        """Bytes of the FP32 gradient of a table outside the blocks, in addition to a sum that is not FP32."""
        in_place = self.plan.accumulation.itemsize == FP32 or not self.plan.is_trained(name)
        table, rows = self.weights.non_block_by_name[name], name == TOKENS and self.plan.embedding_axes
        return 0 if in_place else FP32 * (table.stored if rows else table.whole)

    @cached_property
    def gradient_stacks(self) -> int:
        """Bytes of the arrays in which the loops stack the gradients of a single microbatch; several are added to sums.

        They depend on nothing, so XLA allocates those of all loops but the last before the first one runs.
        """
        if self.repeats:
            return 0
        loops = [segment for segment in self.segments if segment.iterations > 1]
        slots = [j for segment in loops[len(loops) > 1 :] for j in self.slots_of(segment)]
        return self.weights.layers(slots, trained=True).stack_bytes

    @property
    def gradients_in_head(self) -> int:
        """Bytes; XLA makes the zeros of the table's gradient at the same time if both are whole."""
        head = 0 if self.late_head else self.weights.gathered_outside(trained=True).whole
        return self.accumulated(FP32 * head) + self.gradient_stacks

    @property
    def non_block_in_head(self) -> int:
        """Elements of the weights outside the blocks that are whole in the head: with the embedding if it is reused."""
        table = self.weights.non_block.whole - sum(
            e.whole for name, e in self.weights.non_block_by_name.items() if name != TOKENS
        )
        return self.weights.non_block.whole - (0 if self.repeats or self.head_name == TOKENS else table)

    @property
    def head_working(self) -> int:
        """Bytes of a chunk's logits and their gradient, its rows before and after the norm, and all rows' gradient.

        Without logits all rows are computed at once, in FP32 too.
        """
        tokens, tensor = self.plan.head_tokens, self.sizes["tensor"]
        if not self.head_name:
            return int(tokens * self.config.model.hidden_size / tensor * (3 * self.compute + 2 * FP32))
        chunk = math.ceil(tokens / self.plan.loss_chunks)
        logits, D = self.config.model.padded_vocab_size // tensor, self.config.model.hidden_size
        return int(self.compute * (chunk * (2 * logits + 4 * D) + tokens * D / tensor))

    def saved(self, slots: int) -> int:
        """Bytes that the forward pass of the first `slots` layers saves; a loop keeps all until it ends."""
        layers = ((slot, segment) for segment in self.segments for slot in self.slots_of(segment) if slot < slots)
        return sum(self.saved_by(slot, segment) for slot, segment in layers)

    @property
    def uncopied(self) -> int:
        """Bytes of saved activations besides their buffers."""
        return 0

    def saved_by(self, slot: int, segment: LayerSegment) -> int:
        """Bytes that one layer of a segment saves."""
        return self.activations.saved(self.slots[slot].block, segment, self.is_stacked(segment))

    def backward_pass(self, slots: Sequence[int]) -> range:
        """The slots whose backward passes run in one operation with that of `slots`."""
        whole = range(len(self.slots))
        return next((part for part in self.plan.backward_parts.slots if slots[0] in part), whole)

    def recomputed(self, segment: LayerSegment, group: Sequence[int]) -> int:
        """Bytes that the backward pass of a remat group recomputes; they are live at the same time."""
        blocks = [self.slots[slot].block for slot in group]
        return sum(self.activations.recomputed(block, segment, self.is_stacked(segment)) for block in blocks)

    def layer_working(self, segment: LayerSegment, slots: Sequence[int], reduced: int = 0) -> int:
        """Bytes of the gradients of activations, of a loop's copies, and of the layer above's gradients (`reduced`)."""
        blocks = {self.slots[slot].block for slot in slots}
        # In FP8 each piece that arrives over `tensor` has its own product, and they are added at the end.
        more = self.sizes["tensor"] - 1 if segment.fp8 else 0
        sizes = {kind: self.weights.layer(kind, True).whole + more * self.weights.linear_of[kind] for kind in blocks}
        working = max(
            self.activations.working(kind, segment.policy, self.compute * n, reduced) for kind, n in sizes.items()
        )
        if segment.iterations > 1:  # which copies a layer's saved activations out of its stacks
            working += max(self.saved_by(slot, segment) for slot in self.slots_of(segment))
        return working

    def is_stacked(self, segment: LayerSegment) -> bool:
        """Whether residuals are copied into arrays of several iterations or microbatches."""
        return segment.iterations > 1

    # Layers

    def parts(self, segment: LayerSegment) -> list[range]:
        """The slots of each remat group of one loop."""
        slots = self.slots_of(segment)
        return [slots[u : u + segment.group_size] for u in range(0, segment.layers_per_iteration, segment.group_size)]

    def slots_of(self, segment: LayerSegment) -> range:
        return range(segment.start, segment.start + segment.count)

    def cast(self, slots: int) -> int:
        """Bytes of the first `slots` layers' shards in the compute dtype.

        Loops cast their weights when they run, but those that are gathered once a step and those in FP8.
        """
        if self.weights.fuses_in_turn and self.config.optimizer.master == "split":
            return 0  # all are stored in the compute dtype
        looped = {j for s in self.segments if s.iterations > 1 for j in self.slots_of(s) if not self.plan.is_pipelined}
        cast_slots = range(len(self.slots) if self.repeats else slots)
        in_loops = self.weights.layers([j for j in cast_slots if j in looped]).before_loops_bytes
        outside = self.weights.unrolled_bytes([j for j in cast_slots if j not in looped])
        return self.rounds * (outside + in_loops)


class _Pipelined(_Step):
    """The live arrays of a pipeline: buffers of several microbatches, and sums of gradients."""

    def __init__(self, plan: StepPlan):
        super().__init__(plan)
        # All but gpipe need no more buffers for more microbatches.
        most = None if plan.pipeline.schedule == "gpipe" else 4 * plan.sizes["pipeline"]
        self.kept, self.banks = choose_buffer_slots(plan, schedule_of(plan, most))

    def peaks(self) -> Iterator[MemoryEstimate]:
        """A tick's head, and its layers' backward passes; sums and buffers are always live."""
        yield self.in_head()
        yield from self.in_extra_layers()
        for segment in self.segments:
            for slots in self.parts(segment):
                yield self.in_backward(segment, slots, Elements())

    def saved(self, slots: int) -> int:
        """Bytes of the buffers, independent of `slots`."""
        saved = super().saved(len(self.slots)) * self.kept.activation_slots
        saved += 0 if self.plan.backward_parts.slots else self.uncopied  # no backward pass beside a forward operation
        deferred = sum(self.activations.deferred(slot.block) for slot in self.slots) * self.kept.deferred_slots
        # The carry between ticks, or the only stream and its copy, and pending head gradients
        streams = 2 + (self.kept.pending_head_slots if self.kept.pending_head_slots > 1 else 0)
        return saved + deferred + streams * self.activations.stream

    @property
    def uncopied(self) -> int:
        """Bytes of a forward operation's results before the copy to its slot; a loop copies those of each body.

        If each slot has its own program, matmuls write into it, and at most one layer's results are beside it.
        """
        bodies = [(slot, s) for s in self.segments for slot in self.slots_of(s)[: s.layers_per_iteration]]
        return (max if self.banks > 1 else sum)(self.saved_by(slot, segment) for slot, segment in bodies)

    def is_stacked(self, segment: LayerSegment) -> bool:
        return True
