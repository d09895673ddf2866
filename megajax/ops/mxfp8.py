"""MXFP8: E4M3 in blocks of 32 along the summed dimension, with E8M0 scales (OCP Microscaling Formats, 2023).

Both orientations of a tensor are quantised from its BF16 numbers. A scale is rounded up, as by Transformer Engine, so
that no number is clipped; OCP's example of a conversion rounds it down and clips.
"""

from dataclasses import dataclass

import jax

from megajax.ops.block_formats import BlockOperand, BlockRecipe, with_powers_of_two

BLOCK = 32


@dataclass(frozen=True)
class MxFp8(BlockRecipe):
    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        return with_powers_of_two(x, (1, BLOCK))
