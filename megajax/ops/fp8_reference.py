"""Reference quantisation to FP8: the tensor, its transpose and its largest magnitude, for scaled matmuls.

A quantised tensor is q = round(saturate(value · scale)). The value is computed in float32 for inputs of any dtype and
not rounded to bfloat16 before; the scale is a float32 scalar array, () or (1,); rounding is to nearest even. Values
beyond the largest finite number of the FP8 dtype become that number, infinities too; NaN stays NaN. Hopper's FP8 tensor
cores need the contracted dimension last in both operands, hence the transpose: q is for the forward matmul and the
input gradient, the transpose for the weight gradient.

`amax` is max |value| in float32 before scaling, NaN if any value is; delayed scaling computes later scales from it.
`fp8_kernels` has the same functions for the GPU, each in one pass over memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.mlp_activation import activate

Quantised = tuple[jax.Array, jax.Array, jax.Array]
"""q [T, F], its transpose [F, T] and amax, a float32 scalar."""


def saturate(values: jax.Array, dtype: Any) -> jax.Array:
    """`values` clipped to the finite numbers of `dtype`; NaN stays NaN."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(values, -largest, largest)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """`x · scale` rounded to an FP8 `dtype`; larger values become its largest number, NaN stays NaN."""
    return saturate(x.astype(jnp.float32) * scale, dtype).astype(dtype)


def cast_transpose(x_tf: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    """x [T, F] quantised: q [T, F] and q_t [F, T] in `dtype`, amax."""
    return _quantise(x_tf.astype(jnp.float32), scale, dtype)


def gated_cast_transpose(kind: str, gate_up_tf: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    """activation(gate) · up quantised: gate_up [T, 2F], gate first -> q [T, F], q_t [F, T], amax."""
    return _quantise(_gated(kind, gate_up_tf), scale, dtype)


def gated_backward_cast_transpose(
    kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array, scale: jax.Array, dtype: Any
) -> Quantised:
    """The gradient of gate_up [T, 2F] for dact [T, F], quantised -> q [T, 2F], q_t [2F, T], amax."""
    return _quantise(_gated_backward(kind, gate_up_tf, dact_tf), scale, dtype)


def matmul(a_mk: jax.Array, b_nk: jax.Array, inverse_scale: jax.Array, dtype: Any) -> jax.Array:
    """`a @ b.T · inverse_scale` of FP8 operands, both with the summed dimension last: `[M, K]`, `[N, K]` → `[M, N]`.

    On GPUs XLA makes this form one FP8 matmul of cuBLASLt, with the FP32 scale inside and the result in `dtype`. It
    would convert an FP32 product in a separate pass.
    """
    wide = jnp.float32 if dtype == jnp.float16 else dtype  # unscaled sums overflow FP16
    product = lax.dot_general(a_mk, b_nk, (((1,), (1,)), ((), ())), preferred_element_type=wide)
    return (product * inverse_scale.astype(wide)).astype(dtype)


def amax(x_tf: jax.Array) -> jax.Array:
    """max |x|: a float32 scalar."""
    return jnp.max(jnp.abs(x_tf.astype(jnp.float32)))


def gated_amax(kind: str, gate_up_tf: jax.Array) -> jax.Array:
    """Only the amax of `gated_cast_transpose`."""
    return amax(_gated(kind, gate_up_tf))


def gated_backward_amax(kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array) -> jax.Array:
    """Only the amax of `gated_backward_cast_transpose`."""
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
