"""Bytes of activations on one device: what a layer saves, computes again, and works with in its backward pass."""

import math
from collections.abc import Mapping
from functools import cache

from megajax.config import Config
from megajax.config.segments import Segment


class Activations:
    """Bytes of one microbatch's activations by kind of block."""

    def __init__(self, config: Config, sizes: Mapping[str, int]):
        self.config, self.sizes = config, sizes
        self.compute = 4 if config.precision.compute == "float32" else 2
        batch, shards = config.batch, math.prod(sizes[a] for a in ("data", "fsdp", "expert", "context"))
        # Of a device, and of those that `tensor` divides their work among
        self.tokens = batch.global_size * batch.sequence_length // batch.num_microbatches // shards
        self._values = cache(self.values_of_block)

    def saved(self, block: str, segment: Segment, stacked: bool) -> int:
        """Bytes that a layer's forward pass saves under the segment's policy; see `values_of_block` for `stacked`."""
        number = self.compute * self.tokens
        return int(number * self._values(block, stacked and segment.policy in ("none", "selective"))[segment.policy])

    def recomputed(self, block: str, segment: Segment, stacked: bool) -> int:
        """Bytes that the backward pass of a layer computes again before it starts."""
        values = self._values(block, False)["none"] * self.compute * self.tokens
        own = self.saved(block, segment, stacked) if segment.policy != "full" else 0
        return max(int(values) - own, 0)

    def put_off(self, block: str) -> int:
        """Bytes of what a layer's weight gradients need, where a schedule puts them off."""
        return int(self.compute * self.tokens * self._values(block, True)["put off"])

    @property
    def stream(self) -> int:
        """Bytes of a microbatch's residual stream."""
        return self.compute * self.tokens * self.config.model.hidden_size // self.sizes["tensor"]

    def working(self, block: str, weight_gradients: int) -> int:
        """Bytes of the gradients that a layer's backward pass works with, at most: in its MLP.

        First those of the output, of the activation and of the products that it takes are there, and the activation;
        at the end those of the products, of the input and of the weights (`weight_gradients` bytes). Rows of experts
        that travel arrive in zeros, of which XLA keeps a copy. The residual stream has a gradient all the time.
        """
        (width, rows), D = self.width(block), self.config.model.hidden_size
        products = 2 if self.config.model.activation in ("swiglu", "geglu") else 1
        number = self.compute * self.tokens
        width = number * width / self.sizes["tensor"]
        row = number * rows * D / (self.sizes["tensor"] if self.over_tensor else 1)
        zeros = row if rows and self.config.dispatch(self.sizes) == "all_to_all" else 0
        return int(2 * number * D + zeros + row + products * width + max(2 * width, weight_gradients))

    def operands(self, block: str) -> int:
        """Bytes of what the gradients of the MLP's weights are computed from: its matmuls' inputs and output gradients.

        Of the experts' rows, and of the residual stream.
        """
        (width, rows), D, tensor = self.width(block), self.config.model.hidden_size, self.sizes["tensor"]
        products = 2 if self.config.model.activation in ("swiglu", "geglu") else 1
        row = rows * D / (tensor if self.over_tensor else 1)
        return int(self.compute * self.tokens * ((1 + products) * width / tensor + 2 * row + 2 * D))

    @property
    def over_tensor(self) -> bool:
        """Whether `tensor` divides experts instead of their width."""
        return "tensor" in self.config.mesh.experts_over

    def width(self, block: str) -> tuple[float, float]:
        """(the MLP's width, rows that experts receive), each for a token of the device, before `tensor` divides it.

        Where experts lie over devices there is room for as many rows as could arrive.
        """
        config, model, sizes = self.config, self.config.model, self.sizes
        if block == "dense":
            return model.ffn_hidden_size, 0
        experts, k, shards = model.num_experts, model.experts_per_token, config.expert_shards(sizes)
        assert experts is not None
        rows: float = shards * min(k, experts // shards) if shards > 1 else k
        if model.router.capacity_factor is not None:  # of the microbatch's tokens, on all devices
            apart = [axis for axis in ("data", "fsdp", "expert", "context") if axis not in config.mesh.experts_over]
            rows = min(rows, model.router.capacity_factor * k * math.prod(sizes[axis] for axis in apart))
        return rows * (model.expert_ffn_hidden_size or 0) + model.shared_expert_ffn_hidden_size, rows

    def values_of_block(self, block: str, stacked: bool) -> dict[str, float]:
        """Numbers of a token that a block saves, in the compute dtype's size: by policy, and those put off.

        What is `stacked`, in a loop's or a pipeline's buffers, holds no results of norms, unless `tensor` or FP8 would
        make them expensive.
        """
        model, tensor, compute = self.config.model, self.sizes["tensor"], self.compute
        D, k = model.hidden_size, model.experts_per_token
        heads = model.head_dim * (2 * model.num_heads + 2 * max(model.num_kv_heads, tensor)) / tensor  # q, k, v, output
        gated = 2 if model.activation in ("swiglu", "geglu") else 1
        width, rows = self.width(block)
        routed, arrived = 0.0, D
        if block == "moe":
            arrived = rows * D / (tensor if self.over_tensor else 1)  # each assignment's row
            routed = arrived + 4 / compute * ((model.num_experts or 0) + 4 * k) / tensor  # and the routing in FP32
        mlp = gated * width / tensor + routed
        matmuls = heads + mlp + 2 * D / tensor  # and the two projections into the residual stream
        in_fp8 = len(self.config.fp8_layers) / model.num_layers
        norms = 0 if stacked and tensor == 1 and not in_fp8 else 2 * D
        everything = heads + mlp + norms + 2 * D / tensor  # and the norms' results and inputs
        if norms and model.norm == "layernorm":  # and the inputs in FP32, less their means
            everything += 2 * 4 / compute * D / tensor
        if model.mlp_bias:  # without biases the activation is computed again
            everything += (1 - in_fp8) * model.ffn_hidden_size / tensor
        if in_fp8:  # the four layers' inputs are kept in FP8 alone
            inputs = D + arrived + (model.num_heads * model.head_dim + width) / tensor
            everything += in_fp8 * (inputs / compute - D - arrived)
        inputs = 2 * D + (model.num_heads * model.head_dim + width) / tensor  # of the four linear layers
        outputs = heads - model.num_heads * model.head_dim / tensor + mlp + 2 * D
        return {
            "none": everything,
            "selective": everything,
            "full": D / tensor / self.config.remat.group,
            "save_matmuls": matmuls + D / tensor,
            "offload": D / tensor,
            "put off": inputs + outputs,
        }
