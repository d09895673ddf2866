"""An extension for dev/text_losses.py: NVFP4 with weights in blocks of 1 x 16, like inputs and gradients.

So the forward pass and the gradient of the input multiply by different roundings of one weight.
"""

import jax

from megajax.ops import block_recipes
from megajax.ops.block_formats import BlockOperand
from megajax.ops.nvfp4 import NvFp4


class WithoutSquareBlocks(NvFp4):
    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        return super().quantised(x, "input" if tensor == "weight" else tensor, amax, bits)


block_recipes.IMPLEMENTATIONS["nvfp4"] = WithoutSquareBlocks()
