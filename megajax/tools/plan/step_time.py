"""The time of a train step on GPUs, estimated without compiling it.

The step adds up the work of its layers (`plan.work`), the collectives of weights, the update, and a pipeline's idle
times, which are those of its schedule. dev/time_table.py compares the estimate with measured steps.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache

from megajax.estimate.costs import flops_per_token
from megajax.layout.kinds import LayerKind, extra_kind, extra_layers
from megajax.options.registered import replaces_head, taken_together
from megajax.options.remat import ATTENTION, RematPolicy
from megajax.step.pipeline.buffers import schedule_of
from megajax.step.pipeline.schedules import Flags, Schedule
from megajax.step_plan import StepPlan
from megajax.tools.plan.rates import Rates
from megajax.tools.plan.work import Device, Passes, PassSeconds, Traffic, added

UPDATE_BYTES = 31.5  # per stored parameter: gradient, its norm, both moments and the weight, read and written
WHOLE_BYTES = 16.0  # per gathered parameter: casts of the weight and of its gradient
# Bytes of moments on the host that an update moves to the device and back in a second: 22.1 GB took 674 ms on an H200.
HOST_BYTES = 33e9
# The same of moments in files: a disk that reads 2.0 and writes 2.6 GB/s, one after the other, beside no computation.
DISK_BYTES = 1.1e9
HIDING = 0.9  # part of the computation that hides collectives of weights and gradients
PACE = 0.0108  # the slowest of several GPUs sets the pace: slower for each doubling, up to those of a host
# Collectives of weights take multiprocessors, memory and power from the computation that hides them: this part of their
# time at the bandwidth within a host.
INTERFERENCE = 0.47
# A pipeline's buffers, and the stacked arrays of a loop: reads and writes of saved activations that unrolled layers do
# not have.
COPIES = 1.9
CAST_BYTES = 6  # of a weight that is cast: of a frozen one once a step, in a loop in each pass
FP8_BYTES = 4.8  # of a weight that is quantised in place of cast, once a step: its largest magnitude, both layouts
TICK_SECONDS = 150e-6  # of the loop and the launches of a tick


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device; the parts add up to the total."""

    matmuls: float
    attention: float
    head: float
    elementwise: float
    recomputed: PassSeconds
    loops: float  # copies of saved activations in loops and pipelines, casts in loops
    optimizer: float
    conversions: float  # casts of weights and gradients, sums of gradients over microbatches
    activations: Mapping[str, Traffic]  # of layers, their collectives by axis
    around: Mapping[str, Traffic]  # the same of embedding and head
    weights: Mapping[str, Traffic]  # collectives of weights and their gradients
    bubble: float
    ticks: float  # of a pipeline: sends to the next stage, and the loop
    sends: Traffic
    waiting: float  # for the slowest GPU
    forward: float  # share of the forward pass in `layers`
    matrices: float  # the same of gradients of matrices
    between_hosts: frozenset[str] = frozenset()  # axes whose groups are on several hosts

    @property
    def communication(self) -> dict[str, float]:
        """Exposed seconds, by axis, without those that are recomputed."""
        found = added(added(self.activations, self.around), self.weights)
        return {axis: each.exposed for axis, each in found.items() if each.exposed}

    @property
    def traffic(self) -> dict[str, Traffic]:
        """All collectives, and the sends of a pipeline, by axis."""
        found = dict[str, Traffic]()
        for part in (self.activations, self.around, self.weights, self.recomputed.traffic, {"pipeline": self.sends}):
            found = added(found, part)
        return {axis: each for axis, each in found.items() if each.sent}

    @property
    def layers(self) -> float:
        """Seconds of all layers, without recomputation: their computation, and the exposed part of its collectives."""
        return self.computation + sum(each.exposed for each in self.activations.values())

    @property
    def computation(self) -> float:
        """Seconds of computation in all layers, without recomputation."""
        return self.matmuls + self.attention + self.elementwise

    @property
    def total(self) -> float:
        apart = ("recomputed", "activations", "around", "weights", "sends", "forward", "matrices", "between_hosts")
        seconds = (getattr(self, f.name) for f in fields(self) if f.name not in apart)
        return sum(seconds) + self.recomputed.total + sum(self.communication.values())

    def link(self, axis: str) -> str:
        """An axis, and whether its groups are on several hosts."""
        return f"{axis} between hosts" if axis in self.between_hosts else axis

    @property
    def losses(self) -> dict[str, float]:
        """Seconds that are no useful matmuls or attention, by reason, the largest first."""
        named = {
            "bubble": self.bubble + self.ticks,
            "recomputation": self.recomputed.total,
            "elementwise": self.elementwise,
            "copies of saved activations": self.loops,
            "optimizer": self.optimizer,
            "casts and sums of gradients": self.conversions,
            "waiting for the slowest GPU": self.waiting,
            **{f"communication over {self.link(axis)}": seconds for axis, seconds in self.communication.items()},
        }
        return dict(sorted(((k, v) for k, v in named.items() if v > 0), key=lambda item: -item[1]))


@dataclass(frozen=True)
class StoredState:
    """The state of a device.

    parameters: their number, by the axes that shard them in storage only; trained: of those that have gradients.
    in_layers: the number of those in layers. matrices: operations of the optimizer's matmuls, by their smallest
    dimension and dtype. on_host: bytes of moments on the host, or in files.
    """

    parameters: Counter[tuple[str, ...]]
    trained: Counter[tuple[str, ...]]
    in_layers: int
    matrices: Mapping[tuple[int, str], float]
    on_host: float


def estimate_time(plan: StepPlan, rates: Rates, stored: StoredState, recomputes: bool = True) -> StepTime:
    """The time of a step with this plan; without `recomputes` a lower limit for all remat policies."""
    return _Step(plan, rates, stored).time(recomputes)


def tokens_per_second(plan: StepPlan, seconds: float) -> float:
    """Tokens per second and GPU."""
    batch, devices = plan.config.batch, 1
    for size in plan.sizes.values():
        devices *= size
    return batch.global_size * batch.sequence_length / seconds / devices


def utilization(plan: StepPlan, rates: Rates, seconds: float) -> float:
    """Model FLOPs utilization: counted operations against the data sheet's dense BF16 peak."""
    return flops_per_token(plan.config) * tokens_per_second(plan, seconds) / rates.peak_flops


class _Step:
    """The time of a step, from the times of its layers."""

    def __init__(self, plan: StepPlan, rates: Rates, stored: StoredState):
        self.stored, self.device, self.given = stored, Device(plan, rates), rates
        self.rates = self.device.rates  # of the compute dtype
        self.plan, self.config, self.sizes = plan, plan.config, plan.sizes
        self.parameters = sum(stored.parameters.values())
        # After all gathers
        self.whole, self.trained = (
            sum(math.prod(self.sizes[axis] for axis in axes) * number for axes, number in held.items())
            for held in (stored.parameters, stored.trained)
        )

    @cached_property
    def teacher(self) -> "_Step | None":
        """A frozen teacher as a step of its own, of which the forward pass counts."""
        return None if self.plan.teacher is None else _Step(self.plan.teacher, self.given, self.stored)

    @cached_property
    def weight_bytes(self) -> tuple[float, float]:
        """(bytes of a weight that are gathered, of its gradient that are reduced), per parameter."""
        number, fp8_layers = self.device.number, len(self.config.fp8_layers)
        if self.config.precision.fp8.chosen.has_kernels:  # layers' matrices are gathered in FP8
            in_fp8 = self.stored.in_layers / self.parameters * fp8_layers / self.config.model.num_layers
            number -= (number - 1) * in_fp8
        return number, 4 if self.config.precision.gradients == "float32" else 2

    def weights(self, computation: float, share: float) -> dict[str, Traffic]:
        """Gathers and reductions of weights; `computation`: seconds of a microbatch's layers, `share` of it forward."""
        gather, reduce = self.weight_bytes
        found, gathered, reduced = {}, self.gathered(self.stored.parameters), self.gathered(self.stored.trained)
        free = HIDING * computation * self.config.batch.num_microbatches  # of computation that hides nothing yet
        for axis in ("fsdp", "data", "expert", "context", "pipeline"):
            if self.sizes[axis] == 1 or not gathered[axis]:
                continue
            layer_by_layer = axis == "fsdp" and not self.plan.is_pipelined
            times = self.plan.passes if layer_by_layer else 1
            hidden = free if layer_by_layer else min(free, HIDING * computation)
            number = self.device.number if axis == "pipeline" else gather
            before = self.device.collective(axis, times * number * gathered[axis])
            again = gather * gathered[axis] if layer_by_layer else 0.0
            after = self.device.collective(axis, times * (reduce * reduced[axis] + again))
            forward, backward = before.seconds, after.seconds
            first = (forward + backward) / max(len(self.plan.layer_slots), 1) / times
            late = max(0.0, forward - hidden * share) + max(0.0, backward - hidden * (1 - share))
            speed = self.device.bandwidth(axis) / self.rates.link_bytes
            # The first layer's gathers and the last reductions have no computation beside them; embedding and head,
            # which all stages have, are gathered before the first tick and reduced after the last one.
            exposed = max(late, first + INTERFERENCE * speed * (forward + backward - first))
            exposed = forward + backward if axis == "pipeline" else exposed
            found[axis] = Traffic(before.sent + after.sent, forward + backward, exposed)
            free = max(0.0, free - (forward + backward - late))
        return found

    def gathered(self, stored: Mapping[tuple[str, ...], int]) -> dict[str, int]:
        """The number of parameters of this device after a gather over each axis."""
        held, found = dict(stored), {}
        # From the storage shards outwards: the other axes gather once a step what `fsdp` gathers layer by layer.
        for axis in ("pipeline", "data", "expert", "context", "fsdp"):
            # Weights of experts that an axis divides stay on their devices.
            held = {axes: number * (self.sizes[axis] if axis in axes else 1) for axes, number in held.items()}
            found[axis] = sum(number for axes, number in held.items() if axis in axes)
        return found

    # The step

    def slots(self) -> tuple[Passes, PassSeconds, float]:
        """Of the layers of a virtual stage, for one microbatch: (their work, what is recomputed, seconds of copies).

        With those of a second stack and a teacher, which each stage runs for its share of the microbatches. The base of
        adapters as a teacher passes through the stages, which have its layers.
        """
        layers, remat, copies = self.own_slots()
        share = 1 / (self.sizes["pipeline"] * self.plan.layer_table.shape[1])
        if self.teacher is not None:
            forward = self.teacher.own_slots()[0].forward
            layers += Passes(forward if self.config.teacher.base else forward * share)
        if (second := self.plan.second_stack) is not None:
            own = _Step(second, self.given, self.stored).own_slots()
            if second.trains_layers:
                layers, remat, copies = layers + own[0] * share, remat + own[1] * share, copies + own[2] * share
            else:
                layers += Passes(own[0].forward * share)
            layers += self.device.around_tower() * share
        return layers, remat, copies

    def own_slots(self) -> tuple[Passes, PassSeconds, float]:
        """Those of this plan's layers alone."""
        equal = Counter[tuple[LayerKind, bool, RematPolicy, bool, bool]]()
        for segment in self.plan.segments:
            for i in range(segment.count):
                kind, last = self.plan.layer_slots[segment.start + i], (i + 1) % segment.group_size == 0
                equal[kind, segment.fp8, segment.policy, last, self.plan.is_pipelined or segment.iterations > 1] += 1
        layers, remat, copies = Passes(), PassSeconds(), 0.0
        for (kind, fp8, policy, last, copied), count in equal.items():
            layers += self.device.layer(kind, fp8) * count
            remat += self.recomputed(kind, fp8, policy, last) * count
            copies += count * self.device.saved(kind, policy) if copied else 0.0
        return layers, remat, COPIES * copies / self.rates.memory_bytes

    def recomputed(self, kind: LayerKind, fp8: bool, policy: RematPolicy, last: bool) -> PassSeconds:
        """A layer's forward pass, or the part that its remat policy computes again; `last` of its remat group or not.

        Collectives and matmuls run again unless the results of all of them are kept.
        """
        work = self.device.layer(kind, fp8).forward
        if policy.keeps_input:
            return work + self.device.unused(kind, fp8) * -1 if last else work
        attention = 0.0 if policy.keeps(ATTENTION) else work.attention
        if policy.keeps_all:
            return PassSeconds(attention=attention)
        names = set(self.device.blocks[kind.block].saved_names) - {ATTENTION}
        if all(map(policy.keeps, names)):
            return PassSeconds(attention=attention, elementwise=work.elementwise)
        return replace(work, attention=attention)

    def casts(self) -> float:
        """Seconds of a microbatch's casts of weights: in loops, which do it in both passes."""
        loops = any(segment.iterations > 1 for segment in self.plan.segments) and not self.plan.is_pipelined
        return 2 * CAST_BYTES * self.stored.in_layers / self.rates.memory_bytes if loops else 0.0

    def time(self, recomputes: bool) -> StepTime:
        """The parts of the step; without `recomputes` no recomputation, and no copies of what is saved."""
        config, (layers, remat, copies) = self.config, self.slots()
        remat, loops = (remat, copies + self.casts()) if recomputes else (PassSeconds(), 0.0)
        M, R = config.batch.num_microbatches, config.pipeline.virtual_stages if self.plan.is_pipelined else 1
        if extra := len(extra_layers(config.model)):  # each stage runs them for its share of the tokens, once
            kind, last, share = extra_kind(config.model), self.plan.segments[-1], extra / (self.sizes["pipeline"] * R)
            layers += self.device.layer(kind, last.fp8) * share
            remat += self.recomputed(kind, last.fp8, last.policy, last=True) * share if recomputes else PassSeconds()
        again, whole = remat.total, layers.total
        head = self.device.head() + self.forward_heads()
        stage, shares = whole * (M * R), [each.total / whole.total for each in (layers.forward, layers.matrices)]
        useful = M * R * (whole.total + again + loops) + M * head.total
        busy, ticks, sends = useful, 0.0, Traffic()
        if self.plan.is_pipelined:
            busy, ticks, sends = self.pipelined(layers, again + loops, head.total)
        gpus = min(math.prod(self.sizes.values()), self.rates.hosts_of)
        return StepTime(
            waiting=PACE * math.log2(gpus) * (busy + ticks),
            matmuls=stage.matmuls,
            attention=stage.attention,
            head=M * (head.matmuls + head.elementwise),
            elementwise=stage.elementwise,
            recomputed=remat * (M * R),
            loops=M * R * loops,
            optimizer=self.update(),
            conversions=self.conversions(),
            activations={axis: each for axis, each in stage.traffic.items() if each.sent},
            around=(head * M).traffic,
            weights=self.weights(R * (whole.total + again) + head.total, shares[0]),
            bubble=busy - useful,
            ticks=ticks,
            sends=sends,
            forward=shares[0],
            matrices=shares[1],
            between_hosts=self.device.between_hosts,
        )

    def forward_heads(self) -> PassSeconds:
        """Of a microbatch the teacher's head, and the first pass of an objective of segments, which has two."""
        kind, found = self.config.objective.kind, PassSeconds()
        if self.teacher is not None:
            found += self.teacher.device.predictions(self.plan.head_tokens)
        if taken_together(kind) is not None and not replaces_head(kind):
            found += self.device.predictions(self.plan.head_tokens)
        return found

    def conversions(self) -> float:
        """Seconds of casts of weights and gradients, and of the sums of microbatches' gradients."""
        again = self.plan.passes - 1
        summed = 2 + 2 * self.plan.accumulation.itemsize  # a gradient is read, its sum is read and written
        moved = (WHOLE_BYTES + again * summed) * self.trained
        if self.config.lora.rank is None:  # else frozen weights are stored in the compute dtype
            moved += CAST_BYTES * (self.whole - self.trained)
        if self.config.precision.fp8.chosen.has_kernels:
            moved += FP8_BYTES * self.stored.in_layers
        return moved / self.rates.memory_bytes

    def update(self) -> float:
        """Seconds of the optimizer."""
        rates = {"float32": self.given.in_fp32}
        matmuls = sum(
            flops / rates.get(dtype, self.given).matmul_flops(size, False)
            for (size, dtype), flops in self.stored.matrices.items()
        )
        moved = self.stored.on_host / (DISK_BYTES if self.config.optimizer.offload_dir else HOST_BYTES)
        return UPDATE_BYTES * self.stored.trained.total() / self.rates.memory_bytes + matmuls + moved

    def pipelined(self, layers: Passes, again: float, head: float) -> tuple[float, float, Traffic]:
        """(seconds of all ticks without sends, of their sends and loop, sends).

        `again`: what the backward pass recomputes, and the loops' cost.
        """
        schedule = schedule_of(self.plan)
        matrices, ticks = layers.matrices.total, _ticks(schedule)
        send = self.device.number * self.plan.tokens * self.config.model.hidden_size / self.sizes["tensor"]
        seconds, total, count = send / self.device.bandwidth("pipeline"), 0.0, ticks.total()
        for flags, number in ticks.items():
            forward = layers.forward.total * flags.forward
            backward = (layers.backward.total + again + (0 if flags.split else matrices)) * flags.backward
            if schedule.parts_per_backward:  # on a stage one or the other
                layers_of_tick = max(forward, self.largest_part * backward)
            else:
                layers_of_tick = forward + backward + matrices * flags.weight
            total += number * (layers_of_tick + head * flags.head)
        if schedule.parts_per_backward:
            sends = transfers = count * 2 / schedule.period
        else:
            sends, transfers = count, sum(number * (flags.forward + flags.backward) for flags, number in ticks.items())
        traffic = Traffic(send * transfers, seconds * sends, seconds * sends)
        return total, TICK_SECONDS * count + seconds * sends, traffic

    @property
    def largest_part(self) -> float:
        """The largest part of a stage's backward pass, as a share of it."""
        return max(map(len, self.plan.backward_parts.slots)) / len(self.plan.layer_slots)


@lru_cache(maxsize=256)
def _ticks(schedule: Schedule) -> Counter[Flags]:
    """The number of ticks with the same operations."""
    return Counter(schedule.flags)
