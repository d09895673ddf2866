"""Bytes of activations on one device: those that a layer saves, recomputes, and needs during its backward pass.

`traces.py` has what a layer's program keeps; here is what XLA's schedule makes of it.
"""

import math
from functools import cache

from megajax.config import LoraConfig
from megajax.estimate.traces import BlockTrace, LayerForm, Shards, SublayerWork, traces
from megajax.layout.segments import LayerSegment
from megajax.model.block import Block
from megajax.ops.linear_recurrence import CHUNK
from megajax.options.remat import ATTENTION, NONE, RematPolicy
from megajax.schema.fields import BATCH_AXES
from megajax.step_plan import StepPlan

# Arrays that are live in the backward pass of a recurrence: as large as what it reads and writes, and as its states
MIXED_ARRAYS, STATES = 5, 3


class Activations:
    """Bytes of one microbatch's activations by kind of block."""

    def __init__(self, plan: StepPlan):
        config, sizes = plan.config, plan.sizes
        self.plan, self.config = plan, config
        self.compute = 4 if config.precision.compute == "float32" else 2
        self.tokens = plan.tokens  # of all devices along `tensor` together
        self.collectives = plan.collectives
        settings = config.batch.sequence_length, config.precision.compute
        self.traces = traces(config.model, config.lora, *settings, not plan.trains_layers)
        self.tensor = sizes["tensor"]
        without = traces(config.model, LoraConfig(), *settings)  # adapters do little work
        self.blocks = without.blocks
        self.shards = {kind: shards_of(plan, block) for kind, block in self.blocks.items()}
        self.parts = {kind: without.of(kind, LayerForm(shards)).parts for kind, shards in self.shards.items()}
        self._values = cache(self.values)

    def trace(self, block: str, fp8: bool = False, recompute: tuple[str, ...] = ()) -> BlockTrace:
        """The trace of a kind of block on a device of this plan."""
        quantised = fp8 and self.plan.kernels.save_fp8
        return self.traces.of(block, LayerForm(self.shards[block], quantised, recompute))

    def saved(self, block: str, segment: LayerSegment, stacked: bool) -> int:
        """Bytes that a layer's forward pass saves under the segment's policy; see `values` for `stacked`."""
        policy = segment.policy
        again = self.shared_by_passes(block) if policy.recomputes_nothing and not stacked else 0
        values = self._values(block, stacked and policy.keeps_all, policy, segment.fp8)
        return int(self.compute * self.tokens * (again + values))

    def recomputed(self, block: str, segment: LayerSegment, stacked: bool) -> int:
        """Bytes that a layer recomputes before its backward pass starts."""
        values = self._values(block, False, NONE, segment.fp8) * self.compute * self.tokens
        already_saved = 0 if segment.policy.keeps_input else self.saved(block, segment, stacked)
        return max(int(values) - already_saved, 0)

    def deferred(self, block: str) -> int:
        """Bytes of the operands of a layer's weight gradients, if a schedule defers these."""
        D, sublayers, in_fp8 = self.config.model.hidden_size, self.blocks[block].names, self.in_fp8
        works = [self.parts[block][name] for name in sublayers]
        operands = 2 * len(sublayers) * D + sum(work.width + work.products + work.rows for work in works)
        operands *= 1 - in_fp8 + in_fp8 / self.compute
        return int(self.compute * self.tokens * operands)

    @property
    def stream(self) -> int:
        """Bytes of a microbatch's residual stream."""
        return self.compute * self.tokens * self.config.model.hidden_size // self.tensor

    def working(self, block: str, policy: RematPolicy, weight_gradients: int, reduced: int = 0) -> int:
        """Peak bytes of temporary arrays in a layer's backward pass, which is in its MLP.

        At first the gradients of the output, of the activation and of its input products are live, and the activation;
        at the end those of the products, of the input and of the weights (`weight_gradients` bytes). By then the
        gradients of another layer (`reduced` bytes), which are live at first, are reduced. The residual stream always
        has a gradient. A later round of experts' rows has gradients of the weights that are added to the first's. Where
        all is recomputed, XLA exchanges the rows of the next layer's experts early: then two layers' rows and their
        gradients are live.
        """
        mlp, D, number = self.last(block), self.config.model.hidden_size, self.compute * self.tokens
        width = number * mlp.width
        early = 3 * number * mlp.rows if policy.keeps_input and not self.collectives.dispatch.gathers_tokens else 0
        of_mlp = 2 * number * D + early + number * (mlp.rows + mlp.products)
        of_mlp += max(2 * width + reduced, weight_gradients)
        if mlp.rows and self.collectives.dispatch.has_rounds(self.collectives.expert_shards):
            of_mlp = max(of_mlp, 2 * number * D + 2 * weight_gradients)
        of_attention = max(self.scores, self.deterministic_scores)
        return int(max(of_mlp, number * of_attention, number * self.recurrence(block)))

    def shared_by_passes(self, block: str) -> float:
        """Numbers per token that attention over `context` keeps because the backward pass would compute them again."""
        model, strategy, output = self.config.model, self.collectives.context, self._attention_output(block)
        parts = strategy.key_shards(self.plan.sizes["context"])
        if parts == 1 or not output or model.is_latent:
            return 0
        keys = model.num_kv_heads * (model.head_dim + model.value_dim) / self.tensor
        return strategy.kept(parts, output, keys, self.plan.kernels.attention == "cudnn")

    def _attention_output(self, block: str) -> float:
        """Numbers per token in the output of a block's attention; 0 without any."""
        return sum(part.attended for part in self.parts[block].values())

    def last(self, block: str) -> SublayerWork:
        """The work of a block's last sublayer."""
        return self.parts[block][self.blocks[block].names[-1]]

    @property
    def scores(self) -> float:
        """Numbers per token in attention's scores before and after the softmax, in FP32, if no kernel computes it."""
        if self.plan.kernels.attention != "reference" or self.plan.sizes["context"] > 1:  # then in small blocks
            return 0
        return 2 * 4 / self.compute * self.config.model.num_heads / self.tensor * self.plan.batch_shape[2]

    @property
    def deterministic_scores(self) -> float:
        """Numbers per token in the scores that cuDNN's backward pass holds in 16 bits, to add them in a fixed order."""
        if self.plan.kernels.attention != "cudnn" or not self.plan.deterministic:
            return 0
        return self.config.model.num_heads / self.tensor * self.plan.batch_shape[2]

    def recurrence(self, block: str) -> float:
        """Numbers per token in the arrays of a recurrence's backward pass, which computes all but its inputs again."""
        works = self.parts[block].values()
        return max((MIXED_ARRAYS * work.mixed + STATES * work.state / CHUNK for work in works), default=0)

    def operands(self, block: str) -> int:
        """Bytes of the operands of the MLP's weight gradients: inputs and output gradients of its matmuls.

        They include the experts' rows and the residual stream.
        """
        mlp, D = self.last(block), self.config.model.hidden_size
        return int(self.compute * self.tokens * (mlp.width + mlp.products + 2 * mlp.rows + 2 * D))

    def values(self, block: str, stacked: bool, policy: RematPolicy, fp8: bool) -> float:
        """Numbers per token that a block saves under a remat policy, in units of the compute dtype.

        `stacked` residuals, in the buffers of a loop or a pipeline, do not include results of norms, unless `tensor` or
        FP8 makes their recomputation expensive.
        """
        model, stream = self.config.model, self.config.model.hidden_size / self.tensor
        if policy.keeps_input:
            return stream / self.config.remat.group
        if policy.on_host:
            return stream
        norms = ("norms",) if stacked and self.tensor == 1 and not fp8 else ()
        saved = self.trace(block, fp8, (*policy.recomputed_by_blocks, *norms)).saved(policy, stacked)
        if self.plan.sizes["context"] > 1 and self.collectives.context.repeats_output and policy.keeps(ATTENTION):
            saved += self._attention_output(block)
        if policy.keeps_all and ATTENTION not in policy.recomputed_by_blocks:
            saved += self.scores
        if policy.keeps_all and not norms and model.norm == "layernorm":  # inputs minus their means, in FP32
            saved += len(self.blocks[block].names) * 4 / self.compute * stream
        if not self.plan.trains_layers:  # frozen experts need no rows for weight gradients
            saved -= self.last(block).rows
        return saved

    @property
    def in_fp8(self) -> float:
        """The part of the layers whose operands are kept in FP8."""
        layers = self.config.fp8_layers if self.plan.kernels.save_fp8 else ()
        return len(layers) / self.config.model.num_layers


def shards_of(plan: StepPlan, block: Block) -> Shards:
    """The devices of a plan that share a layer."""
    model, tensor = plan.config.model, plan.sizes["tensor"]
    if not block.has_experts:
        return Shards(tensor)
    limited = model.router.capacity_factor is not None
    tokens = math.prod(plan.sizes[axis] for axis in (*BATCH_AXES, "context")) if limited else 1
    own, over_tensor = plan.collectives, "tensor" in plan.config.mesh.experts_over
    return Shards(tensor, own.expert_shards, over_tensor, tokens, own.dispatch)
