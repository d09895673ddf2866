"""The recipes in blocks by the names of their declarations, and those of extensions."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.ops.block_formats import E4M3, BlockOperand, BlockRecipe
from megajax.ops.blockwise_fp8 import Blockwise
from megajax.ops.mxfp8 import MxFp8
from megajax.ops.nvfp4 import NvFp4
from megajax.options.fp8_recipes import BLOCKWISE, MXFP8, NVFP4, Fp8Recipe, Rounding

# By the name of the declaration in `options/fp8_recipes.py`
IMPLEMENTATIONS: dict[str, BlockRecipe] = {BLOCKWISE.name: Blockwise(), MXFP8.name: MxFp8(), NVFP4.name: NvFp4()}


@dataclass(frozen=True)
class OfExtension(BlockRecipe):
    """A recipe whose function gives the numbers themselves."""

    rounding: Rounding

    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        values = self.rounding(x, tensor).astype(jnp.float32)
        return BlockOperand(values, jnp.ones((1, 1), jnp.float32), None, (x.shape[0], x.shape[1]), E4M3, None)


def block_recipe(declared: Fp8Recipe) -> BlockRecipe | None:
    """What a recipe does with operands; None for those with one scale a tensor."""
    if declared.rounded is not None:
        return OfExtension(declared.rounded)
    return IMPLEMENTATIONS.get(declared.name)
