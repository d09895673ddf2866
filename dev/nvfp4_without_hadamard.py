"""An extension for dev/text_losses.py: NVFP4 without the random Hadamard transform of weight gradients' operands."""

import jax

from megajax.ops import block_recipes
from megajax.ops.nvfp4 import NvFp4


class WithoutHadamard(NvFp4):
    def transformed(self, x: jax.Array) -> jax.Array:
        return x


block_recipes.IMPLEMENTATIONS["nvfp4"] = WithoutHadamard()
