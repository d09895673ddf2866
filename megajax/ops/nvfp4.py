"""NVFP4 as in "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

E2M1 in blocks of 16 along the summed dimension, weights in blocks of 16 x 16; an E4M3 scale for each block, and an FP32
factor for the tensor, of which the largest magnitude over all devices is needed. Gradients are rounded up or down at
random. Both operands of the weight's gradient go through a random Hadamard transform over each 16 tokens, which does
not change their product.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.ops.block_formats import E2M1, E4M3, BlockOperand, BlockRecipe, amax_of_blocks, rounded, spread

BLOCK = 16
LEAST = 2.0**-100  # a tensor without a larger magnitude is zero
# One random vector for all layers and steps, as in the paper
SIGNS = (1, 1, -1, 1, -1, -1, -1, 1, 1, -1, 1, -1, -1, 1, 1, -1)


@dataclass(frozen=True)
class NvFp4(BlockRecipe):
    has_factor = True
    is_stochastic = True

    def transformed(self, x: jax.Array) -> jax.Array:
        return hadamard(x)

    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        assert amax is not None
        block = (BLOCK if tensor == "weight" else 1, BLOCK)
        usable, largest = amax > LEAST, jnp.where(jnp.isfinite(amax), amax, jnp.nan)
        factor = jnp.where(usable, largest * (1 / (E2M1.largest * E4M3.largest)), 0 * largest)
        # amax of the block / 6, in units of the factor
        scales = rounded(amax_of_blocks(x, block) * jnp.where(usable, E4M3.largest / largest, 0), E4M3)
        inverses = jnp.where(scales > 0, 1 / (scales * factor), 0 * scales)
        values = rounded(x * spread(inverses, block, x.shape), E2M1, bits)
        return BlockOperand(values, scales, factor, block, E2M1, jnp.float8_e4m3fn)


def hadamard(x: jax.Array) -> jax.Array:
    """`[rows, K]` → each 16 numbers of K with random signs times the orthonormal Hadamard matrix; sums in FP32."""
    rows, K = x.shape
    y = x.reshape(rows, K // BLOCK, BLOCK) * jnp.array(SIGNS, x.dtype)
    size = 1
    while size < BLOCK:  # butterflies: the same sums in the same order on every device
        pairs = y.reshape(rows, K // BLOCK, BLOCK // (2 * size), 2, size)
        first, second = pairs[:, :, :, 0], pairs[:, :, :, 1]
        y = jnp.stack([first + second, first - second], axis=3).reshape(y.shape)
        size *= 2
    return (y * BLOCK**-0.5).reshape(x.shape)
