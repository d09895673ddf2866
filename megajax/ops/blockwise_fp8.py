"""FP8 in blocks as DeepSeek-V3 trains (arXiv 2412.19437, section 3.3): E4M3, with powers of two as scales.

Inputs and gradients have one scale for 128 numbers along the summed dimension, weights one for 128 x 128. The last
blocks may be smaller. Scales are powers of two, which E8M0 and BF16 hold exactly, as in Transformer Engine's recipe.
"""

from dataclasses import dataclass

import jax

from megajax.ops.block_formats import BlockOperand, BlockRecipe, with_powers_of_two

BLOCK = 128


@dataclass(frozen=True)
class Blockwise(BlockRecipe):
    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        return with_powers_of_two(x, (BLOCK if tensor == "weight" else 1, BLOCK))
