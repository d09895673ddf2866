"""RMSNorm and LayerNorm over the last axis, computed in float32 (float64 for float64 inputs)."""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.numerics import keep_inputs_only, wide


def rms_norm(x: jax.Array, weight: jax.Array, epsilon: float) -> jax.Array:
    """x / sqrt(mean(x²) + epsilon) · weight: x [..., D], weight [D] -> [..., D] in x.dtype."""

    def compute(x: jax.Array, weight: jax.Array) -> jax.Array:
        values = x.astype(wide(x.dtype))
        scale = lax.rsqrt(jnp.mean(jnp.square(values), axis=-1, keepdims=True) + epsilon)
        return (values * scale * weight.astype(values.dtype)).astype(x.dtype)

    return keep_inputs_only(compute)(x, weight)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, epsilon: float) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) · weight + bias: x [..., D], weight and bias [D] -> as x."""

    def compute(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        values = x.astype(wide(x.dtype))
        # Two passes: mean(x²) - mean(x)² cancels where the mean is large beside the spread.
        centred = values - jnp.mean(values, axis=-1, keepdims=True)
        scale = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
        out = centred * scale * weight.astype(values.dtype)
        if bias is not None:
            out = out + bias.astype(values.dtype)
        return out.astype(x.dtype)

    return keep_inputs_only(compute)(x, weight, bias)
