"""RMSNorm and LayerNorm over the last axis, computed in float32 (float64 for float64 inputs)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.numerics import keep_inputs_only, wide


def rms_norm(
    x: jax.Array,
    weight: jax.Array,
    epsilon: float,
    zero_centred: bool = False,
    mean_over_devices: Callable[[jax.Array], jax.Array] = lambda mean: mean,
) -> jax.Array:
    """x / sqrt(mean(x²) + epsilon) · weight: x [..., D], weight [D] -> [..., D] in x.dtype.

    With `zero_centred` the factor is 1 + weight (Gemma). `mean_over_devices` averages the mean [..., 1] over devices
    that hold equal shares of the last axis.
    """

    def compute(x: jax.Array, weight: jax.Array) -> jax.Array:
        values = x.astype(wide(x.dtype))
        mean = mean_over_devices(jnp.mean(jnp.square(values), axis=-1, keepdims=True))
        return (values * lax.rsqrt(mean + epsilon) * _factor(weight, values.dtype, zero_centred)).astype(x.dtype)

    return keep_inputs_only(compute)(x, weight)


def layer_norm(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, epsilon: float, zero_centred: bool = False
) -> jax.Array:
    """(x - mean) / sqrt(variance + epsilon) · weight + bias: x [..., D], weight and bias [D] -> as x.

    With `zero_centred` the factor is 1 + weight (Nemotron).
    """

    def compute(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        values = x.astype(wide(x.dtype))
        # Two passes: mean(x²) - mean(x)² cancels where the mean is large beside the spread.
        centred = values - jnp.mean(values, axis=-1, keepdims=True)
        scale = lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + epsilon)
        out = centred * scale * _factor(weight, values.dtype, zero_centred)
        if bias is not None:
            out = out + bias.astype(values.dtype)
        return out.astype(x.dtype)

    return keep_inputs_only(compute)(x, weight, bias)


def _factor(weight: jax.Array, dtype, zero_centred: bool) -> jax.Array:
    return weight.astype(dtype) + 1 if zero_centred else weight.astype(dtype)
