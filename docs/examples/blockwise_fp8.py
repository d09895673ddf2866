"""FP8 in blocks (DeepSeek-V3's recipe) in reference arithmetic: inputs and gradients 1 x 128, weights 128 x 128.

    megajax train my.yaml run.extensions=[docs/examples/blockwise_fp8.py] precision.fp8.recipe=blockwise

Each block is scaled to FP8's largest number by a power of two, rounded to E4M3, and scaled back.
"""

import jax.numpy as jnp

from megajax.config import Fp8Recipe, register_fp8

BLOCK, LARGEST = 128, 448.0


def blockwise(x, axis, tensor):
    """Numbers `[.., ..]` of an operand whose `axis` is summed over, as E4M3 with a scale for each block has them."""
    sizes = [min(BLOCK, x.shape[i]) if i == axis or tensor == "weight" else 1 for i in range(2)]
    padded = jnp.pad(x.astype(jnp.float32), [(0, -x.shape[i] % sizes[i]) for i in range(2)])
    blocks = padded.reshape(padded.shape[0] // sizes[0], sizes[0], padded.shape[1] // sizes[1], sizes[1])
    amax = jnp.abs(blocks).max((1, 3), keepdims=True)
    scale = jnp.exp2(jnp.floor(jnp.log2(LARGEST / jnp.where(amax > 0, amax, 1))))
    rounded = (blocks * scale).astype(jnp.float8_e4m3fn).astype(jnp.float32) / scale
    return rounded.reshape(padded.shape)[: x.shape[0], : x.shape[1]].astype(x.dtype)


register_fp8(Fp8Recipe("blockwise", rounded=blockwise))
