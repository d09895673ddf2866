"""FP8 tensors: scales, quantisation, matmuls (Micikevicius et al. 2022, "FP8 Formats for Deep Learning").

A tensor is scaled so that its largest magnitude (amax) meets the format's largest number, and rounded to E4M3 (weights,
activations) or E5M2 (gradients). Hopper's FP8 tensor cores read both operands along the dimension that is summed over,
so a tensor is quantised together with its transpose: one for the forward and input-gradient matmuls, one for the
weight gradient.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.numerics import wide

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fp8Weight:
    """A linear layer's weight, quantised, and what its two operands need: what `fp8` linear layers take for `w`.

    `jax.vjp` with respect to it returns the weight's gradient in `gradient` and the largest magnitudes of the layer's
    input and output gradient in `amax`; both hold zeros on the way in.
    """

    values: jax.Array  # [in, out] E4M3
    transposed: jax.Array  # [out, in] E4M3
    inverse_scale: jax.Array  # FP32
    input_scale: jax.Array | None  # FP32; None: from the input itself (current scaling)
    gradient_scale: jax.Array | None
    gradient: jax.Array  # [in, out] in the compute dtype
    amax: jax.Array  # [2] FP32
    gradient_dtype: Any = field(metadata={"static": True})


def scale_for(amax: jax.Array, dtype: Any, margin: float = 0) -> jax.Array:
    """The factor that takes `amax` to the largest FP8 number / 2^margin; 1 where amax is 0 or not finite."""
    scale = float(jnp.finfo(dtype).max) / 2.0**margin / amax
    return jnp.where((amax > 0) & jnp.isfinite(scale), scale, 1.0).astype(jnp.float32)


def largest(x: jax.Array) -> jax.Array:
    """amax: the largest magnitude of a tensor, FP32."""
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x · scale` rounded to an FP8 `dtype`; what is too large becomes the largest number, NaN stays NaN."""
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(wide(x.dtype)) * scale, -limit, limit).astype(dtype)


def cast_transpose(x_tf: jax.Array, scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`[T, F]` → (quantised `[T, F]`, its transpose `[F, T]`, amax of x)."""
    q = quantize(x_tf, scale, dtype)
    return q, q.T, largest(x_tf)


def matmul(a_mk: jax.Array, b_nk: jax.Array, inverse_scale: jax.Array, out_dtype: Any) -> jax.Array:
    """`a @ b.T · inverse_scale` of FP8 operands, both with the summed dimension last: `[M, K]`, `[N, K]` → `[M, N]`.

    Written so that XLA hands it to cuBLASLt's FP8 matmul on GPUs, the scale included.
    """
    product = lax.dot_general(a_mk, b_nk, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (product * inverse_scale).astype(out_dtype)
