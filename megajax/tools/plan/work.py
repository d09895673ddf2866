"""The time of one layer, of the head, and of one collective on GPUs; `plan.step_time` adds them up to a step.

A matmul, attention and the bytes of everything else each have a measured rate (`plan.rates`). A collective costs the
part of its time that no computation hides. The constants are fitted to the rows of tests/data/time_rows.txt that are
marked so.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from megajax.config import LoraConfig
from megajax.estimate.activations import shards_of
from megajax.estimate.costs import attention_flops, head_parameter_count
from megajax.estimate.traces import OTHERS, BlockTrace, LayerForm, Shards, SublayerWork, traces
from megajax.layout.kinds import LayerKind, extra_layers
from megajax.mesh import axes_across
from megajax.model.lora import is_adapter
from megajax.model.parameters import parameters
from megajax.model.vision import VisionTower
from megajax.ops.grouped_matmul_xla import FIRST
from megajax.ops.linear_recurrence import CHUNK
from megajax.options.remat import RematPolicy
from megajax.schema.fields import AXES
from megajax.sharding import BLOCKS, VISION
from megajax.step_plan import StepPlan
from megajax.tools.plan.rates import Rates

FP32 = 4  # bytes
FORWARD = 1 / 3  # share of the forward pass in the time of attention and of elementwise work
# Elementwise work forward and backward, as reads or writes of an array:
STREAM_PASSES = 11.0  # of the residual stream for a part of a layer: its norm and the addition of its output
KEPT_PASSES = 3.3  # of the outputs of its matmuls and the input of its last one: activations, rotary positions
ADAPTER_PASSES = 4  # of the inputs and outputs of linear layers with adapters
ROUTED_PASSES = 8.7  # of the rows that experts receive: permutations and the sum over a token's experts
ARRIVED_PASSES = 2  # of the buffers of arrived rows, which are written whole
QUANTISE_PASSES = 1.6  # in FP8, of the inputs and outputs of its matmuls
MIXED_PASSES = 13.8  # of what a recurrence and its convolution read and write, which the backward pass computes again
DECAY_PASSES = 76  # of its decays, one for each head or each channel of its keys: kernels compute with them
STATE_PASSES = 3.83  # of a recurrence's states in FP32, one of each chunk of tokens
OVER_CONTEXT = 1.67  # in units of its time on one device: the map of the state over the tokens comes first
IN_CHUNKS = 11.1  # the time of a recurrence without kernels, in units of that with them; from earlier code
TILE = 128  # rows of a grouped matmul's tile: half of an expert's last one is empty
LOGIT_BYTES = 3.5  # of elementwise work for a logit in 16 bits
# Reads and writes of the scores of all pairs by attention without a kernel, counted in its program and not fitted:
# forward 6 by the first matmul, the maximum, the sum, the weights (2) and the second matmul; backward 9.
SCORE_PASSES = 15
TF32 = 1 / 2  # the rate of matmuls of FP32 numbers that are rounded to TF32, in units of BF16's, by data sheets
TENSOR_EXPOSED = 0.44  # part of the time of collectives over `tensor` that their matmuls in BF16 do not hide
CONTEXT_EXPOSED = 0.29
IMBALANCE = 0.124  # work of the most loaded device's experts above the mean, for each doubling of the devices


@dataclass(frozen=True)
class Traffic:
    """Collectives over one axis: bytes that a GPU sends, seconds, and the seconds that no computation hides."""

    sent: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.sent + other.sent, self.seconds + other.seconds, self.exposed + other.exposed)

    def __mul__(self, factor: float) -> "Traffic":
        return Traffic(factor * self.sent, factor * self.seconds, factor * self.exposed)


def added(one: Mapping[str, Traffic], other: Mapping[str, Traffic]) -> dict[str, Traffic]:
    """The traffic of both, by axis."""
    return {axis: one.get(axis, Traffic()) + other.get(axis, Traffic()) for axis in (*one, *other)}


@dataclass
class PassSeconds:
    """Seconds of a pass on one device."""

    matmuls: float = 0
    attention: float = 0
    elementwise: float = 0
    traffic: dict[str, Traffic] = field(default_factory=dict)  # of activations, by axis

    @property
    def total(self) -> float:
        return self.matmuls + self.attention + self.elementwise + sum(each.exposed for each in self.traffic.values())

    def __add__(self, other: "PassSeconds") -> "PassSeconds":
        return PassSeconds(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            added(self.traffic, other.traffic),
        )

    def __mul__(self, factor: float) -> "PassSeconds":
        traffic = {axis: each * factor for axis, each in self.traffic.items()}
        return PassSeconds(factor * self.matmuls, factor * self.attention, factor * self.elementwise, traffic)

    @property
    def in_thirds(self) -> "Passes":
        """Forward and backward pass of work whose backward pass takes twice the time of the forward pass."""
        return Passes(self * FORWARD, self * (1 - FORWARD))


@dataclass
class Passes:
    """The passes of layers on one device."""

    forward: PassSeconds = field(default_factory=PassSeconds)
    backward: PassSeconds = field(default_factory=PassSeconds)  # without the gradients of matrices
    matrices: PassSeconds = field(default_factory=PassSeconds)  # their gradients, which a schedule may defer

    @property
    def total(self) -> PassSeconds:
        return self.forward + self.backward + self.matrices

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward, self.matrices + other.matrices)

    def __mul__(self, factor: float) -> "Passes":
        return Passes(self.forward * factor, self.backward * factor, self.matrices * factor)


class Device:
    """The work of one device of a plan."""

    def __init__(self, plan: StepPlan, rates: Rates):
        self.plan, self.config, self.sizes = plan, plan.config, plan.sizes
        self.frozen, self.is_fp32 = not plan.trains_layers, plan.config.precision.compute == "float32"
        self.rates, self.number = (rates.in_fp32, 4) if self.is_fp32 else (rates, 2)  # bytes
        self.faster = self.rates.bf16_flops / rates.bf16_flops  # than in BF16
        self.whole_experts = "tensor" in self.config.mesh.experts_over
        self.traces = traces(self.config.model, LoraConfig(), self.config.batch.sequence_length, "bfloat16")
        self.blocks = self.traces.blocks
        self._layers: dict[tuple[LayerKind, bool], Passes] = {}

    # One layer

    def layer(self, kind: LayerKind, fp8: bool) -> Passes:
        """The passes of a layer for one microbatch."""
        fp8 = fp8 and self.plan.kernels.fp8 != "emulated"
        if (kind, fp8) not in self._layers:
            parts = [self.part(kind, name, fp8) for name in self.blocks[kind.block].names]
            others = self.traces.of(kind.block).parts[OTHERS]  # of a prediction module the projection
            self._layers[kind, fp8] = sum(parts, self.products(self.matmuls(others, False)) + self.adapters(kind))
        return self._layers[kind, fp8]

    def products(self, seconds: float) -> Passes:
        """Matmuls that take `seconds` forward: the gradient of the input does too, and that of a trained weight."""
        once, none = PassSeconds(seconds), PassSeconds()
        return Passes(once, once, none if self.frozen else once)

    def adapters(self, kind: LayerKind) -> Passes:
        """A layer's adapters."""
        if (rank := self.plan.lora.rank) is None:
            return Passes()
        own = [p for n, p in self.plan.declared.items() if n.startswith(f"{BLOCKS}{kind.block}.") and is_adapter(n)]
        products = self.plan.tokens / self.sizes["tensor"] * sum(math.prod(p.shape[1:]) for p in own)
        once = PassSeconds(2 * products / self.rates.matmul_flops(rank, False))
        moved = ADAPTER_PASSES * self.number * products / rank
        return Passes(once, once, once) + PassSeconds(elementwise=moved / self.rates.memory_bytes).in_thirds

    def trace_of(self, block: str) -> BlockTrace:
        """The trace on a device of `tensor` whose experts receive as many rows as a token has experts."""
        return self.traces.of(block, LayerForm(Shards(self.sizes["tensor"])))

    def part(self, kind: LayerKind, name: str, fp8: bool) -> Passes:
        """The passes of a part of a layer."""
        tokens, work = self.plan.tokens, self.traces.of(kind.block).parts[name]
        bytes_moved = tokens * self.passes(kind.block, name, fp8)
        products = self.matmuls(work, fp8)
        found = PassSeconds(elementwise=bytes_moved / self.rates.memory_bytes).in_thirds
        seconds = self.attention_seconds(work, kind)
        if work.state:
            found += self.recurrence(work).in_thirds
        elif seconds:
            found += self.attention(seconds, fp8)
        if self.sizes["tensor"] > 1:
            gather, total, *backward = self.over_tensor(work, bool(seconds), fp8)
            over_tensor = (
                PassSeconds(traffic={"tensor": each}) for each in (gather + total, backward[0] + backward[1])
            )
            found += Passes(*over_tensor)
        if work.has_experts and self.plan.collectives.expert_shards > 1:
            products *= 1 + IMBALANCE * math.log2(self.plan.collectives.expert_shards)
            found += PassSeconds(traffic={"expert": self.dispatch(fp8)}).in_thirds
        return found + self.products(products)

    def matmuls(self, work: SublayerWork, fp8: bool) -> float:
        """Seconds of a part's matmuls in one pass."""
        model, tokens, tensor = self.config.model, self.plan.tokens, self.sizes["tensor"]
        whole = work.has_experts and self.whole_experts
        smallest, waste = min(model.hidden_size, tokens, work.depth / (1 if whole else tensor)), 1.0
        if work.has_experts:
            rows = tokens * self.plan.collectives.expert_shards / (tensor if whole else 1)  # of all experts together
            rows *= model.experts_per_token / (model.num_experts or 1)
            batched = self.plan.kernels.grouped_matmul == "xla"
            smallest, waste = min(smallest, rows), FIRST if batched else 1 + TILE / 2 / rows
        flops = 2 * tokens * work.multiplications / tensor
        return waste * flops / self.matmul_flops(smallest, fp8)

    def matmul_flops(self, smallest: float, fp8: bool) -> float:
        """Operations a second of a layer's matmuls whose smallest dimension is this."""
        return self.rates.matmul_flops(smallest, fp8) * (self.plan.fp8.chosen.matmul_speed if fp8 else 1)

    def unused(self, kind: LayerKind, fp8: bool) -> PassSeconds:
        """The matmul of a layer whose output no backward pass needs, so that recomputation leaves it out: the last."""
        last = self.traces.of(kind.block).parts[self.blocks[kind.block].names[-1]]
        share = last.width * self.config.model.hidden_size / last.multiplications
        work = PassSeconds(self.matmuls(last, fp8) * share)
        if self.sizes["tensor"] > 1:  # nor its sum over `tensor`
            work.traffic["tensor"] = self.over_tensor(last, False, fp8)[1]
        return work

    def saved(self, kind: LayerKind, policy: RematPolicy) -> float:
        """Bytes of a layer that are kept for the backward pass, with one remat policy."""
        if policy.keeps_input:
            return self.number * self.plan.tokens * self.config.model.hidden_size / self.sizes["tensor"]
        return self.number * self.plan.tokens * self.trace_of(kind.block).saved(policy, copied=True)

    def passes(self, block: str, name: str, fp8: bool) -> float:
        """Bytes of a part's elementwise work for a token."""
        D, tensor, work = self.config.model.hidden_size, self.sizes["tensor"], self.trace_of(block).parts[name]
        # A device's buffers have room for all assignments of its group. An all-gather permutes the unused rows too.
        rows = work.rows / (tensor if self.whole_experts else 1)
        received = (
            self.traces.of(block, LayerForm(shards_of(self.plan, self.blocks[block]))).parts[name].rows if rows else 0
        )
        saved = work.products + work.attended + work.width
        numbers = STREAM_PASSES * D / tensor + KEPT_PASSES * saved
        if self.plan.collectives.dispatch.gathers_tokens:
            numbers += ROUTED_PASSES * received
        else:
            numbers += ROUTED_PASSES * rows + (ARRIVED_PASSES * received if received > rows else 0)
        if fp8:
            numbers += QUANTISE_PASSES * (saved + (rows or D) + D / tensor)
        return self.number * numbers

    def over_tensor(self, part: SublayerWork, is_attention: bool, fp8: bool) -> list[Traffic]:
        """The collectives of a part of a layer: its input's gather, its output's sum, and those of their gradients.

        The output's gradient is gathered, the input's is summed. With one FP8 scale, FP8 is gathered.
        """
        model, number, out = self.config.model, self.number, self.config.model.hidden_size
        gathered = 1 if fp8 and self.plan.fp8.chosen.has_kernels else number
        into = self.latents if is_attention and self.latents else out
        faster = self.faster
        if fp8:
            faster = self.rates.fp8_flops / self.rates.bf16_flops * self.plan.fp8.chosen.matmul_speed
        hides = (1 - TENSOR_EXPOSED) / faster
        found = []
        for sent, width in ((gathered, into), (number, out), (gathered, out), (number, into)):
            hidden, whole = (
                self.collective("tensor", self.plan.tokens * n * width, copied=True) for n in (number, sent)
            )
            found.append(replace(whole, exposed=max(0.0, whole.seconds - hides * hidden.seconds)))
        if not part.has_experts:
            return found
        # Nothing hides those of the experts' tokens, in the compute dtype.
        own = Traffic() if self.whole_experts else self.collective("tensor", self.plan.tokens * number * out)
        return [own + each if model.shared_expert_ffn_hidden_size else own for each in found]

    @cached_property
    def latents(self) -> int:
        """Numbers of a token's latents and rotary key, which latent attention sends instead of the residual stream."""
        model = self.config.model
        if model.kv_lora_rank is None:
            return 0
        return (model.q_lora_rank or model.hidden_size) + model.kv_lora_rank + (model.qk_rope_head_dim or 0)

    def attention_seconds(self, work: SublayerWork, kind: LayerKind) -> float:
        """Seconds of attention of this device's queries, forward and backward, on one device; 0 if there is none."""
        model, S, queries = self.config.model, self.config.attended_length, self.plan.tokens / self.sizes["tensor"]
        flops = attention_flops(work, S, kind.window, model.causal)
        if self.plan.kernels.attention != "reference" or not flops:
            return queries * flops / self.rates.attention(model.head_dim, self.config.batch.sequence_length)
        flops, rate = attention_flops(work, S, None, causal=False), self.rates.bf16_flops  # of all pairs
        rate *= 1 if self.is_fp32 else TF32
        return queries * (flops / rate + SCORE_PASSES * FP32 * S * model.num_heads / self.rates.memory_bytes)

    def attention(self, seconds: float, fp8: bool) -> Passes:
        """Attention of this device's queries, with the collectives of keys and values; `seconds` on one device."""
        model, tokens, shards = self.config.model, self.plan.tokens, self.sizes["context"]
        if shards == 1:
            return PassSeconds(attention=seconds).in_thirds
        width = model.num_kv_heads * (model.head_dim + model.value_dim) / self.sizes["tensor"]
        work, again = PassSeconds(attention=seconds / self.plan.collectives.context.attention_rate), Passes()
        if self.plan.sends_latents:
            assert model.kv_lora_rank and model.qk_nope_head_dim
            # Keys and values of the others' tokens, with their gradients; in the backward pass all of them again.
            heads = model.num_heads * (model.qk_nope_head_dim + model.value_dim) / self.sizes["tensor"]
            own = 2 * tokens * model.kv_lora_rank * heads / self.matmul_flops(model.kv_lora_rank, fp8)
            again = self.products(own * (shards - 1)) + Passes(backward=PassSeconds(own * shards))
            work.elementwise = KEPT_PASSES * self.number * tokens * (shards - 1) * (heads + width)
            work.elementwise /= self.rates.memory_bytes
            width = model.kv_lora_rank + (model.qk_rope_head_dim or 0)
        sent = self.collective("context", 4 * self.number * tokens * width * shards)
        work.traffic["context"] = Traffic(sent.sent, sent.seconds, CONTEXT_EXPOSED * sent.seconds)
        return work.in_thirds + again

    def recurrence(self, work: SublayerWork) -> PassSeconds:
        """A recurrence with its convolution, of this device's heads: their bytes take the time, also with kernels."""
        states = FP32 * work.state / CHUNK
        moved = self.number * (MIXED_PASSES * work.mixed + DECAY_PASSES * work.decays) + STATE_PASSES * states
        seconds = self.plan.tokens / self.sizes["tensor"] * moved / self.rates.memory_bytes
        seconds *= OVER_CONTEXT if self.sizes["context"] > 1 else 1
        return PassSeconds(attention=seconds * (IN_CHUNKS if self.plan.kernels.linear_attention == "reference" else 1))

    def dispatch(self, fp8: bool) -> Traffic:
        """Rows sent to experts and back, forward and backward; nothing hides them.

        With one FP8 scale tokens are sent to their experts as FP8, and gradients unless biases need them whole.
        """
        shards, axes = self.plan.collectives.expert_shards, self.config.mesh.experts_over
        stream = self.number * self.plan.tokens * self.config.model.hidden_size / self.sizes["tensor"]
        between = any(axis in self.between_hosts for axis in axes)
        bandwidth = self.rates.group_bytes(between, min(self.stride(axis) for axis in axes))
        rows = self.plan.collectives.dispatch.rows_per_token(shards, self.config.model.experts_per_token)
        model, as_fp8 = self.config.model, fp8 and self.plan.fp8.chosen.has_kernels
        halved = (1 if model.mlp_bias else 2) if as_fp8 else 0
        sent = (4.5 - halved / 2) * stream * rows * (shards - 1) / shards
        return Traffic(sent, sent / bandwidth, sent / bandwidth)

    def head(self) -> PassSeconds:
        """Head and loss of one microbatch, on the share of a stage, with the collectives of embedding and head."""
        model, tokens = self.config.model, self.plan.head_tokens
        weights = head_parameter_count(self.plan.transformer) / self.sizes["tensor"]
        frozen = self.frozen and not self.plan.transformer.objective
        work = (4 if frozen else 6) * tokens * weights / self.rates.matmul_flops(model.hidden_size, False)
        # A chunk of tokens reads and writes the sum of the weight's gradients.
        sums = 0 if frozen else 2 * FP32 * weights * (self.plan.loss_chunks - 1)
        moved = LOGIT_BYTES * self.number / 2 * tokens * weights / model.hidden_size + sums
        found, stream = PassSeconds(work, elementwise=moved / self.rates.memory_bytes), self.number * model.hidden_size
        # Rows are summed, their gradients and the head's input gathered, and the gradient of that input summed.
        rows = 2 * tokens + (1 if frozen else 2) * self.plan.tokens
        if self.sizes["tensor"] > 1:
            found.traffic["tensor"] = self.collective("tensor", rows * stream)
        found *= 1 + len(extra_layers(model))
        if self.sizes["pipeline"] > 1:  # stages share the tokens
            shared = 2 * self.plan.tokens / self.sizes["tensor"]
            found.traffic["pipeline"] = self.collective("pipeline", shared * stream)
        return found

    def predictions(self, tokens: float) -> PassSeconds:
        """The head on some tokens, forward only."""
        width, weights = self.config.model.hidden_size, head_parameter_count(self.plan.transformer)
        products = tokens * weights / self.sizes["tensor"]
        moved = FORWARD * LOGIT_BYTES * self.number / 2 * products / width
        found = PassSeconds(2 * products / self.rates.matmul_flops(width, False))
        found.elementwise = moved / self.rates.memory_bytes
        if self.sizes["tensor"] > 1:
            found.traffic["tensor"] = self.collective("tensor", tokens * self.number * width)
        return found

    def around_tower(self) -> Passes:
        """The embedding of patches and the projector of a vision tower, for one microbatch."""
        vision, tower, found = self.config.model.vision, self.plan.second_stack, Passes()
        if vision is None or tower is None:
            return found
        for name, p in parameters(VisionTower(self.config.model)).items():
            if p.role != "matrix" or name.startswith(BLOCKS):
                continue
            rows, trained, above = tower.tokens, self.plan.is_trained(VISION + name), False  # `above` trained weights
            if name.startswith("projector."):
                rows, above = rows / vision.block, tower.trains_layers or (trained and name.endswith(".down"))
            size, width = math.prod(p.shape), p.shape[-1]
            rate = self.rates.matmul_flops(min(rows, size / width, width), False)
            once, none = PassSeconds(2 * rows * size / self.sizes["tensor"] / rate), PassSeconds()
            found += Passes(once, once if above else none, once if trained else none)
        return found

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

    def collective(self, axis: str, whole: float, copied: bool = False) -> Traffic:
        """A gather or a reduction of `whole` bytes over an axis by NCCL, or by copies; all of it exposed."""
        size, bandwidth = self.sizes[axis], self.bandwidth(axis)
        bandwidth = bandwidth if copied else min(bandwidth, self.rates.nccl_bytes)
        sent = whole * (size - 1) / size
        return Traffic(sent, sent / bandwidth, sent / bandwidth)
