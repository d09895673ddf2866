"""The contract of a recipe in blocks: how it quantises an operand of a matmul."""

from dataclasses import dataclass
from typing import ClassVar

import jax

from megajax.ops.block_formats import BlockOperand


@dataclass(frozen=True)
class BlockRecipe:
    """How operands `[rows, K]` are quantised, where K is summed over. Each recipe is one class in one module."""

    has_factor: ClassVar[bool] = False  # one FP32 factor for a tensor, from its amax
    is_stochastic: ClassVar[bool] = False  # gradients are rounded at random

    def transformed(self, x: jax.Array) -> jax.Array:
        """Both operands `[rows, tokens]` of a weight's gradient, before they are quantised; FP32."""
        return x

    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        """FP32 `x` of a layer's "input", "weight" or output "gradient" in blocks.

        `amax` is the tensor's over all devices, with `has_factor`. `bits` are 32 random ones of each number of a
        gradient if the recipe is stochastic; None: to nearest.
        """
        raise NotImplementedError
