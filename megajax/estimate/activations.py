"""Bytes of activations on one device: those that a layer saves, recomputes, and needs during its backward pass."""

import math
from functools import cache

from megajax.estimate.costs import planned_blocks, unsaved
from megajax.layout.segments import LayerSegment
from megajax.model.lora import adapted_inputs
from megajax.model.sublayer import Shares, SublayerSizes
from megajax.options.remat import ATTENTION, NONE, RematPolicy
from megajax.schema.fields import BATCH_AXES
from megajax.step_plan import StepPlan


class Activations:
    """Bytes of one microbatch's activations by kind of block."""

    def __init__(self, plan: StepPlan):
        config, sizes = plan.config, plan.sizes
        self.plan, self.config = plan, config
        self.compute = 4 if config.precision.compute == "float32" else 2
        self.tokens = plan.tokens  # of all devices along `tensor` together
        self._values = cache(self.values_of_block)
        other_axes = [axis for axis in (*BATCH_AXES, "context") if axis not in config.mesh.experts_over]
        over_tensor = "tensor" in config.mesh.experts_over
        experts = plan.collectives.expert_shards if config.model.num_experts else 1
        divided = math.prod(sizes[axis] for axis in other_axes)
        self.shares = Shares(sizes["tensor"], divided, experts, over_tensor, self.compute)
        self.blocks = planned_blocks(config.model)
        self.parts = {
            kind: [part.sizes(self.shares) for part in block.parts.values()] for kind, block in self.blocks.items()
        }
        self.adapted = {kind: adapted_inputs(config, block) for kind, block in self.blocks.items()}

    def saved(self, block: str, segment: LayerSegment, stacked: bool) -> int:
        """Bytes that a layer's forward pass saves under the segment's policy; see `values_of_block` for `stacked`."""
        policy = segment.policy
        again = self.shared_by_passes(block) if policy.recomputes_nothing and not stacked else 0
        return int(self.compute * self.tokens * (again + self._values(block, stacked and policy.keeps_all, policy)))

    def recomputed(self, block: str, segment: LayerSegment, stacked: bool) -> int:
        """Bytes that a layer recomputes before its backward pass starts."""
        values = self._values(block, False, NONE) * self.compute * self.tokens
        own = 0 if segment.policy.keeps_input else self.saved(block, segment, stacked)
        return max(int(values) - own, 0)

    def deferred(self, block: str) -> int:
        """Bytes of the operands of a layer's weight gradients, if a schedule defers these."""
        return int(self.compute * self.tokens * self.deferred_of_block(block))

    @property
    def stream(self) -> int:
        """Bytes of a microbatch's residual stream."""
        return self.compute * self.tokens * self.config.model.hidden_size // self.shares.tensor

    def working(self, block: str, policy: RematPolicy, weight_gradients: int, reduced: int = 0) -> int:
        """Peak bytes of temporary arrays in a layer's backward pass, which is in its MLP.

        At first the gradients of the output, of the activation and of its input products are live, and the activation;
        at the end those of the products, of the input and of the weights (`weight_gradients` bytes). By then the
        gradients of another layer (`reduced` bytes), which are live at first, are reduced. The residual stream always
        has a gradient. Where all is recomputed, XLA exchanges the rows of the next layer's experts early: then two
        layers' rows and their gradients are live.
        """
        mlp, D, number = self.parts[block][-1], self.config.model.hidden_size, self.compute * self.tokens
        width, row = number * mlp.width / self.shares.tensor, number * self._row(mlp)
        early = 3 * row if policy.keeps_input and not self.plan.collectives.dispatch.gathers_tokens else 0
        of_mlp = 2 * number * D + early + row + mlp.products * width + max(2 * width + reduced, weight_gradients)
        return int(max(of_mlp, number * self.scores))

    def shared_by_passes(self, block: str) -> float:
        """Numbers per token that attention over `context` keeps because the backward pass would compute them again."""
        model, context, output = self.config.model, self.plan.sizes["context"], self._attention_output(block)
        if context == 1 or not output or model.is_latent:
            return 0
        keys = model.num_kv_heads * (model.head_dim + model.value_dim) / self.shares.tensor
        return self.plan.collectives.context.kept(context, output, keys, self.plan.kernels.attention == "cudnn")

    def _attention_output(self, block: str) -> float:
        """Numbers per token in the output of a block's attention; 0 without any."""
        return sum(part.kept_width for part in self.parts[block])

    @property
    def scores(self) -> float:
        """Numbers per token in attention's scores before and after the softmax, in FP32, if no kernel computes it."""
        if self.plan.kernels.attention != "reference" or self.plan.sizes["context"] > 1:  # then in small blocks
            return 0
        return 2 * 4 / self.compute * self.config.model.num_heads / self.shares.tensor * self.plan.batch_shape[2]

    def at_weight_gradients(self, block: str, weight_gradient: int) -> int:
        """Bytes of temporary arrays when an MLP's weight gradients are computed: their operands and one of them."""
        return self.operands(block) + weight_gradient

    def operands(self, block: str) -> int:
        """Bytes of the operands of the MLP's weight gradients: inputs and output gradients of its matmuls.

        They include the experts' rows and the residual stream.
        """
        mlp, D = self.parts[block][-1], self.config.model.hidden_size
        width = (1 + mlp.products) * mlp.width / self.shares.tensor
        return int(self.compute * self.tokens * (width + 2 * self._row(mlp) + 2 * D))

    def _row(self, part: SublayerSizes) -> float:
        """Numbers per token in the rows that this device's experts receive."""
        tensor = self.shares.tensor if self.shares.experts_over_tensor else 1
        return part.rows * self.config.model.hidden_size / tensor

    def values_of_block(self, block: str, stacked: bool, policy: RematPolicy) -> float:
        """Numbers per token that a block saves under a remat policy, in units of the compute dtype.

        `stacked` residuals, in the buffers of a loop or a pipeline, do not include results of norms, unless `tensor` or
        FP8 makes their recomputation expensive.
        """
        stream, parts = self.config.model.hidden_size / self.shares.tensor, self.parts[block]
        if policy.keeps_input:
            return stream / self.config.remat.group
        if policy.on_host:
            return stream
        exchanged = self.plan.sizes["context"] > 1 and self.plan.collectives.context.repeats_output
        twice = self._attention_output(block) if exchanged and policy.keeps(ATTENTION) else 0
        # Only a norm after the last part needs its output, which is the next layer's input otherwise.
        last = 0.0 if self.config.model.norm_placement == "before" else stream
        outputs = [*[stream] * (len(parts) - 1), last]
        of_parts = zip(self.blocks[block].parts.values(), parts, outputs, strict=True)
        without = sum(unsaved(part, sizes, policy, output) for part, sizes, output in of_parts)
        if not policy.keeps_all:
            return self._kept(block) + sum(outputs) + stream + twice - without
        scores = self.scores if ATTENTION in policy.recomputed_by_blocks else 0
        return self._residuals(block, stacked) + twice - scores - without

    def _kept(self, block: str) -> float:
        """Numbers per token in the outputs of matmuls and routing; frozen experts need no rows for weight gradients."""
        frozen = self.config.lora.rank is not None
        return sum(part.kept - ((part.arrived or 0) if frozen else 0) for part in self.parts[block])

    def _residuals(self, block: str, stacked: bool) -> float:
        """Numbers per token in all residuals of a block; `stacked` as in `values_of_block`."""
        model, tensor, compute, parts = self.config.model, self.shares.tensor, self.compute, self.parts[block]
        D, stream = model.hidden_size, model.hidden_size / tensor
        kept = self._kept(block)
        into_stream = len(parts) * stream  # the parts' outputs, added to the residual stream
        after = into_stream if model.norm_placement == "both" else 0  # inputs of the norms after the parts
        in_fp8 = self.in_fp8
        recomputed = stacked and tensor == 1 and not in_fp8
        norms = 0 if recomputed else len(parts) * D
        activations = (1 - in_fp8) * sum(part.activation for part in parts)
        if self.config.lora.rank is not None:  # only own tokens, for adapters; activations are recomputed for theirs
            norms, activations = 0 if recomputed else self.adapted[block] * stream, 0
        everything = kept + norms + into_stream + after + activations  # with the norms' results and inputs
        if norms and model.norm == "layernorm":  # and the inputs minus their means, in FP32
            everything += len(parts) * 4 / compute * stream
        everything += self.scores
        if in_fp8:  # the linear layers' inputs are kept in FP8 only
            arrived = sum(D if part.arrived is None else part.arrived for part in parts)
            inputs = arrived + sum(part.width for part in parts) / tensor
            everything += in_fp8 * (inputs / compute - arrived)
        return everything

    def deferred_of_block(self, block: str) -> float:
        """Numbers per token in the operands of a block's weight gradients, in units of the compute dtype."""
        D, parts, in_fp8 = self.config.model.hidden_size, self.parts[block], self.in_fp8
        inputs = len(parts) * D + sum(part.width for part in parts) / self.shares.tensor
        outputs = sum(part.kept for part in parts) - sum(part.kept_width for part in parts) + len(parts) * D
        return (inputs + outputs) * (1 - in_fp8 + in_fp8 / self.compute)

    @property
    def in_fp8(self) -> float:
        """The part of the layers that is in FP8."""
        return len(self.config.fp8_layers) / self.config.model.num_layers
