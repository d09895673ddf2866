"""Quantisation to FP8, plain: the tensor, its transpose and its largest magnitude, for scaled matmuls.

A quantised tensor is q = round(saturate(value · scale)): the value in float32 whatever the inputs' dtype, never
rounded to bfloat16 on the way; the scale a float32 scalar array, () or (1,); rounding to nearest even. What is beyond
the largest finite number of the FP8 dtype becomes that number, infinities too; NaN stays NaN. Hopper's FP8 tensor
cores want the contracted dimension minor on both sides, hence the transpose: q serves the forward matmul and the
gradient of its input, the transpose serves the gradient of the weight.

`amax` is max |value| in float32, before the scale, NaN if any value is: what the next step's scale is made of.
`fp8_kernels` has the same functions in one pass over memory each, for the GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.mlp import activate

Quantised = tuple[jax.Array, jax.Array, jax.Array]
"""q [T, F], its transpose [F, T] and amax, a float32 scalar."""


def saturate(values: jax.Array, dtype: Any) -> jax.Array:
    """`values`, within the finite numbers of `dtype`; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(values, -largest, largest)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x · scale` rounded to an FP8 `dtype`; what is too large becomes the largest number, NaN stays NaN."""
    return saturate(x.astype(jnp.float32) * scale, dtype).astype(dtype)


def cast_transpose(x_tf: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    """x [T, F] quantised: q [T, F] and q_t [F, T] in `dtype`, amax."""
    return _quantise(x_tf.astype(jnp.float32), scale, dtype)


def gated_cast_transpose(kind: str, gate_up_tf: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    """activation(gate) · up quantised: gate_up [T, 2F], the gate first -> q [T, F], q_t [F, T], amax."""
    return _quantise(_gated(kind, gate_up_tf), scale, dtype)


def gated_backward_cast_transpose(
    kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array, scale: jax.Array, dtype: Any
) -> Quantised:
    """The gradient of gate_up [T, 2F] for dact [T, F], quantised -> q [T, 2F], q_t [2F, T], amax."""
    return _quantise(_gated_backward(kind, gate_up_tf, dact_tf), scale, dtype)


def matmul(a_mk: jax.Array, b_nk: jax.Array, inverse_scale: jax.Array, dtype: Any) -> jax.Array:
    """`a @ b.T · inverse_scale` of FP8 operands, both with the summed dimension last: `[M, K]`, `[N, K]` → `[M, N]`.

    Written so that XLA makes it one FP8 matmul of cuBLASLt on GPUs, with the FP32 scale inside and the result in
    `dtype`: from a product in FP32 it would convert in a pass of its own.
    """
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # unscaled sums overflow FP16
    product = lax.dot_general(a_mk, b_nk, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return (product * inverse_scale.astype(wide)).astype(dtype)


def amax(x_tf: jax.Array) -> jax.Array:
    """max |x|: a float32 scalar."""
    return jnp.max(jnp.abs(x_tf.astype(jnp.float32)))


def gated_amax(kind: str, gate_up_tf: jax.Array) -> jax.Array:
    """The amax of `gated_cast_transpose` alone."""
    return amax(_gated(kind, gate_up_tf))


def gated_backward_amax(kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array) -> jax.Array:
    """The amax of `gated_backward_cast_transpose` alone."""
    return amax(_gated_backward(kind, gate_up_tf, dact_tf))


def _gated(kind: str, gate_up_tf: jax.Array) -> jax.Array:
    return activate(kind, gate_up_tf.astype(jnp.float32))


def _gated_backward(kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array) -> jax.Array:
    [gradient] = jax.vjp(lambda gate_up: _gated(kind, gate_up), gate_up_tf.astype(jnp.float32))[1](
        dact_tf.astype(jnp.float32)
    )
    return gradient


def _quantise(values_tf: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    q_tf = quantize(values_tf, scale, dtype)
    return q_tf, q_tf.T, amax(values_tf)
