"""The time of a train step on GPUs, estimated without compiling it.

The work of a layer is its matmuls, its attention and the bytes of everything else, each at a measured rate
(`plan.rates`). A collective costs the part of its time that no computation hides. A pipeline's time is the sum over the
ticks of its schedule. scripts/time_table.py compares the estimate with measured steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from megajax.config.fields import AXES, cached
from megajax.config.kinds import LayerKind, prediction_kind, prediction_layers
from megajax.config.segments import Segment
from megajax.mesh import axes_across
from megajax.model.block import blocks_of
from megajax.model.parts import Part
from megajax.parallel.pipeline.schedules import make_schedule
from megajax.plan.costs import attended_keys, flops_per_token
from megajax.plan.rates import Rates
from megajax.step_plan import StepPlan

FP32 = 4  # bytes
# Bytes of elementwise work, norms and conversions, forward and backward, fitted to the rows of tests/data/time_rows.txt
# that are marked so: passes over the residual stream for each part of a layer, and over the outputs of its matmuls.
STREAM_PASSES, WIDTH_PASSES = 6.2, 1.04
ROUTED_PASSES = 17.0  # over the rows of the residual stream that are sorted by expert
UPDATE_BYTES = 38  # per parameter: gradient, its norm, both moments and the weight, read and written; casts
# Bytes of moments on the host that an update moves to the device and back in a second: 22.1 GB took 674 ms on an H200.
HOST_BYTES = 33e9
FORWARD = 1 / 3  # share of the forward pass in a layer's time
HIDING = 0.9  # part of the computation that hides collectives of weights and gradients
TENSOR_EXPOSED = 0.38  # part of the time of collectives over `tensor` that their matmuls do not hide
CONTEXT_EXPOSED = 0.3
TENSOR_COLLECTIVES = 10  # of a layer's residual stream, forward and backward
PART_OF_KEYS = {"ring": 0.88, "all_gather": 0.93, "all_to_all": 1.0}  # rate of attention to parts of the keys
IMBALANCE = 0.15  # work of the most loaded device's experts above the mean, for each doubling of the devices
PACE = 0.0127  # the slowest of several GPUs sets the pace: slower for each doubling, up to those of a host
# Collectives of weights take multiprocessors, memory and power from the computation that hides them: this part of their
# time at the bandwidth within a host.
INTERFERENCE = 0.62
LOOP_COST = {"none": 0.06, "full": 0.02}  # slower than unrolled layers
TICK_SECONDS = 150e-6  # of a tick's sends and loop


_blocks_of = cached(blocks_of)  # all candidates of a search have the same


@dataclass
class Work:
    """Seconds of one layer's or head's forward and backward pass on one device."""

    matmuls: float = 0
    attention: float = 0
    elementwise: float = 0
    exchange: dict[str, float] = field(default_factory=dict)  # exposed collectives of activations, by axis

    @property
    def total(self) -> float:
        return self.matmuls + self.attention + self.elementwise + sum(self.exchange.values())

    def __add__(self, other: "Work") -> "Work":
        exchange = {a: self.exchange.get(a, 0) + other.exchange.get(a, 0) for a in (*self.exchange, *other.exchange)}
        return Work(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            exchange,
        )

    def __mul__(self, factor: float) -> "Work":
        exchange = {axis: factor * seconds for axis, seconds in self.exchange.items()}
        return Work(factor * self.matmuls, factor * self.attention, factor * self.elementwise, exchange)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on one device; the parts add up to the total."""

    matmuls: float
    attention: float
    head: float
    elementwise: float
    recomputed: Work
    loops: float  # slower than unrolled layers
    optimizer: float
    communication: Mapping[str, float]  # exposed, by axis
    bubble: float
    sends: float  # of a pipeline's ticks
    waiting: float  # for the slowest GPU
    between_hosts: frozenset[str] = frozenset()  # axes whose groups are on several hosts

    @property
    def total(self) -> float:
        others = ("recomputed", "communication", "between_hosts")
        own = (getattr(self, f.name) for f in fields(self) if f.name not in others)
        return sum(own) + self.recomputed.total + sum(self.communication.values())

    def link(self, axis: str) -> str:
        """An axis, and whether its groups are on several hosts."""
        return f"{axis} between hosts" if axis in self.between_hosts else axis

    @property
    def losses(self) -> dict[str, float]:
        """Seconds that are no useful matmuls or attention, by reason, the largest first."""
        named = {
            "bubble": self.bubble + self.sends,
            "recomputation": self.recomputed.total,
            "elementwise": self.elementwise,
            "loops": self.loops,
            "optimizer": self.optimizer,
            "waiting for the slowest GPU": self.waiting,
            **{f"communication over {self.link(axis)}": seconds for axis, seconds in self.communication.items()},
        }
        return dict(sorted(((k, v) for k, v in named.items() if v > 0), key=lambda item: -item[1]))


def estimate_time(
    plan: StepPlan, rates: Rates, parameters: Mapping[tuple[str, ...], int], muon: Mapping[int, float], host: float
) -> StepTime:
    """The time of a step with this plan.

    `parameters`: number of those that a device stores, by the axes that shard them in storage only. `muon`: operations
    of the optimizer's matmuls on a device, by their smallest dimension. `host`: bytes of its moments on the host.
    """
    return _Step(plan, rates, parameters, muon, host).time()


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

    def __init__(
        self,
        plan: StepPlan,
        rates: Rates,
        parameters: Mapping[tuple[str, ...], int],
        muon: Mapping[int, float],
        host: float,
    ):
        self.muon, self.host = muon, host
        self.plan, self.config, self.sizes, self.rates = plan, plan.config, plan.sizes, rates
        self.stored, self.parameters = parameters, sum(parameters.values())
        self.number = 4 if self.config.precision.compute == "float32" else 2
        self.blocks = _blocks_of(self.config.model)
        self._layers: dict[tuple[LayerKind, bool], Work] = {}

    # One layer

    def layer(self, kind: LayerKind, fp8: bool) -> Work:
        """The forward and backward pass of a layer for one microbatch."""
        if (kind, fp8) not in self._layers:
            parts = [self.part(part, kind, fp8) for part in self.blocks[kind.block].parts.values()]
            self._layers[kind, fp8] = sum(parts, Work())
        return self._layers[kind, fp8]

    def part(self, part: Part, kind: LayerKind, fp8: bool) -> Work:
        """The forward and backward pass of a part of a layer."""
        config, plan, tensor = self.config, self.plan, self.sizes["tensor"]
        D, T, S = config.model.hidden_size, plan.tokens, config.batch.sequence_length
        weights = part.matmul_parameters() / tensor
        whole = part.HAS_EXPERTS and "tensor" in config.mesh.experts_over
        smallest = min(D, T, part.width() / (1 if whole else tensor))
        matmuls = 6 * T * weights / self.rates.matmul_flops(smallest, fp8)
        keys = attended_keys(S, kind.window)
        rate = self.rates.attention(config.model.head_dim, S)
        if self.sizes["context"] > 1:
            rate *= PART_OF_KEYS[config.kernels.context]
        attention = part.attention_flops(keys) * T / tensor / rate
        passes = STREAM_PASSES * D / tensor + WIDTH_PASSES * weights / D
        if part.HAS_EXPERTS:
            passes += ROUTED_PASSES * config.model.experts_per_token * D / tensor
        elementwise = self.number * T * passes / self.rates.memory_bytes
        exchange = {"tensor": TENSOR_EXPOSED * TENSOR_COLLECTIVES / 2 * self.sent("tensor", self.number * T * D)}
        if attention:
            model = config.model
            width = model.num_kv_heads * (model.head_dim + model.value_dim) / tensor
            width = (model.kv_lora_rank or 0) + (model.qk_rope_head_dim or 0) if plan.sends_latents else width
            keys_of_all = self.number * T * width * self.sizes["context"]
            exchange["context"] = CONTEXT_EXPOSED * 4 * self.sent("context", keys_of_all)
        if part.HAS_EXPERTS and plan.collectives.expert_shards > 1:
            matmuls *= 1 + IMBALANCE * math.log2(plan.collectives.expert_shards)
            exchange["expert"] = self.dispatch(self.number * T * D / tensor)
        return Work(matmuls, attention, elementwise, exchange)

    def dispatch(self, stream: float) -> float:
        """Seconds to send rows of `stream` bytes to experts and back, forward and backward; nothing hides them."""
        shards, axes = self.plan.collectives.expert_shards, self.config.mesh.experts_over
        axis = max((axis for axis in axes if self.sizes[axis] > 1), key=self.stride, default="expert")
        between = any(a in self.between_hosts for a in axes)
        bandwidth = self.rates.group_bytes(between, min(self.stride(a) for a in axes))
        rows = shards if self.plan.collectives.dispatch == "all_gather" else self.config.model.experts_per_token
        return 4.5 * stream * rows * (shards - 1) / shards / bandwidth if axis else 0

    def head(self) -> Work:
        """Head and loss of one microbatch, on the share of a stage."""
        model, tensor = self.config.model, self.sizes["tensor"]
        work = 6 * self.plan.head_tokens * model.hidden_size * model.padded_vocab_size / tensor
        return Work(work / self.rates.matmul_flops(model.hidden_size, False)) * (1 + model.mtp_layers)

    # Collectives

    def stride(self, axis: str) -> int:
        """The distance of neighbours along an axis: `tensor` is innermost."""
        stride = 1
        for inner in reversed(AXES):
            if inner == axis:
                return stride
            stride *= self.sizes[inner]
        raise AssertionError(axis)

    @cached_property
    def between_hosts(self) -> frozenset[str]:
        """The axes whose groups are on several hosts."""
        return frozenset(axes_across(self.sizes, np.arange(math.prod(self.sizes.values())) // self.rates.hosts_of))

    def bandwidth(self, axis: str) -> float:
        """The bandwidth of a GPU in a collective over an axis."""
        return self.rates.group_bytes(axis in self.between_hosts, self.stride(axis))

    def sent(self, axis: str, whole: float) -> float:
        """Seconds of a gather or a reduction of `whole` bytes over an axis."""
        size = self.sizes[axis]
        bandwidth = self.bandwidth(axis)
        # Transfers over `tensor` are copies, the others are NCCL's.
        bandwidth = bandwidth if axis == "tensor" else min(bandwidth, self.rates.nccl_bytes)
        return whole * (size - 1) / size / bandwidth if size > 1 else 0

    @cached_property
    def weight_bytes(self) -> tuple[float, float]:
        """(bytes of a weight that are gathered, of its gradient that are reduced), per parameter."""
        return self.number, 4 if self.config.precision.gradients == "float32" else 2

    def weights(self, computation: float) -> dict[str, float]:
        """Exposed seconds of gathers and reductions of weights; `computation`: seconds of a microbatch's layers."""
        gather, reduce = self.weight_bytes
        exposed, held = {}, dict(self.stored)
        # From the storage shards outwards: fsdp layer by layer, the other axes once a step.
        microbatches = self.config.batch.num_microbatches
        free = HIDING * computation * microbatches  # of computation that hides nothing yet
        for axis in ("fsdp", "data", "expert", "context"):
            # Weights of experts that an axis divides stay on their devices.
            held = {axes: number * (self.sizes[axis] if axis in axes else 1) for axes, number in held.items()}
            gathered = sum(number for axes, number in held.items() if axis in axes)
            if self.sizes[axis] == 1 or not gathered:
                continue
            layer_by_layer = axis == "fsdp" and not self.plan.is_pipelined
            times = microbatches if layer_by_layer else 1
            hidden = free if layer_by_layer else min(free, HIDING * computation)
            forward = times * self.sent(axis, gather * gathered)
            backward = times * self.sent(axis, (reduce + (gather if layer_by_layer else 0)) * gathered)
            first = (forward + backward) / max(len(self.plan.layer_slots), 1) / times
            late = max(0.0, forward - hidden * FORWARD) + max(0.0, backward - hidden * (1 - FORWARD))
            share = self.bandwidth(axis) / self.rates.link_bytes
            # The first layer's gathers and the last reductions have no computation beside them.
            exposed[axis] = max(late, first + INTERFERENCE * share * (forward + backward - first))
            free = max(0.0, free - (forward + backward - late))
        return exposed

    # The step

    def slots(self) -> list[tuple[Work, Segment]]:
        """The layers of a virtual stage, one microbatch, with the segment of each."""
        found = []
        for segment in self.plan.segments:
            for slot in range(segment.start, segment.start + segment.count):
                found.append((self.layer(self.plan.layer_slots[slot], segment.fp8), segment))
        return found

    def recomputed(self, work: Work, policy: str) -> Work:
        """A layer's recomputation."""
        forward = {"none": Work(), "full": work, "selective": Work(attention=work.attention)}
        return forward.get(policy, Work(elementwise=work.elementwise)) * FORWARD

    def time(self) -> StepTime:
        """The parts of the step."""
        config, slots = self.config, self.slots()
        layers = sum((work for work, _ in slots), Work())
        remat = sum((self.recomputed(work, segment.policy) for work, segment in slots), Work())
        again = remat.total
        loops = sum(LOOP_COST.get(s.policy, 0.04) * work.total for work, s in slots if s.loops > 1)
        modules = len(prediction_layers(config.model))
        if modules:
            kind = prediction_kind(config.model)
            layers += self.layer(kind, slots[-1][1].fp8) * (modules / self.sizes["pipeline"])
        M, R = config.batch.num_microbatches, config.pipeline.rounds if self.plan.is_pipelined else 1
        head = self.head()
        stage = layers * (M * R)
        useful = M * R * (layers.total + again + loops) + M * head.total
        ticks, sends = self.pipelined(layers, again + loops, head) if self.plan.is_pipelined else (useful, 0.0)
        communication = dict(stage.exchange)
        for axis, seconds in self.weights(R * (layers.total + again) + head.total).items():
            communication[axis] = communication.get(axis, 0) + seconds
        update = UPDATE_BYTES * self.parameters / self.rates.memory_bytes
        update += sum(flops / self.rates.matmul_flops(size, False) for size, flops in self.muon.items())
        update += self.host / HOST_BYTES
        if M > 1:
            shards = self.sizes["fsdp"] * self.sizes["data"]
            moved = 2 + 2 * self.plan.accumulation.itemsize  # a gradient is read, its sum is read and written
            update += (M - 1) * moved * self.parameters * shards / self.rates.memory_bytes
        gpus = min(math.prod(self.sizes.values()), self.rates.hosts_of)
        return StepTime(
            waiting=PACE * math.log2(gpus) * (ticks + sends),
            matmuls=stage.matmuls,
            attention=stage.attention,
            head=M * head.total,
            elementwise=stage.elementwise,
            recomputed=remat * (M * R),
            loops=M * R * loops,
            optimizer=update,
            communication={axis: seconds for axis, seconds in communication.items() if seconds},
            bubble=ticks - useful,
            sends=sends,
            between_hosts=self.between_hosts,
        )

    def pipelined(self, layers: Work, again: float, head: Work) -> tuple[float, float]:
        """Seconds of all ticks, and of their sends; `again`: what the backward pass recomputes, and the loops' cost."""
        settings, stages = self.config.pipeline, self.sizes["pipeline"]
        schedule = make_schedule(settings.schedule, stages, self.config.batch.num_microbatches, settings.rounds)
        third = FORWARD * layers.total
        send = self.number * self.plan.tokens * self.config.model.hidden_size / self.sizes["tensor"]
        tick = TICK_SECONDS + send / self.bandwidth("pipeline")
        total = 0.0
        for flags in schedule.flags:
            total += third * flags.forward + head.total * flags.head
            total += (third * (1 if flags.split else 2) + again) * flags.backward + third * flags.weight
        return total, tick * len(schedule.flags)
