"""The norm and the gate at the end of linear recurrences."""

from functools import partial

import jax
import jax.numpy as jnp

from megajax.ops import gated_norm_kernel as kernel
from megajax.ops.gated_norm_kernel import GatedNorm
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.norms import rms_norm
from megajax.ops.numerics import keep_inputs_only, wide


def gated_norm(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array,
    norm: GatedNorm,
    first: int = 0,
    implementation: ElementwiseImplementation = "reference",
) -> jax.Array:
    """RMSNorm of each group of channels of x `[T, G · w]`, with a gate: `[T, G · w]` in x.dtype.

    rms(x · silu(gate)) · weight with `norm.gate_first`, else rms(x) · weight · silu(gate). The weight is `[G, w]`,
    or `[1, w]` of all groups. The gates are the channels of `gate [T, X]` from `first` on.
    """
    width = weight.shape[1]
    if implementation == "pallas" and kernel.fits(width) and first % width == 0:
        return _in_kernel(x, gate, weight, norm, first)
    return keep_inputs_only(partial(_compute, norm))(x, gate[:, first : first + x.shape[1]], weight)


def _compute(norm: GatedNorm, x: jax.Array, gate: jax.Array, weight: jax.Array) -> jax.Array:
    opened = jax.nn.silu(gate.astype(wide(x.dtype)))
    values = x.astype(opened.dtype)
    values = values * opened if norm.gate_first else values
    y = rms_norm(values.reshape(len(x), -1, weight.shape[1]), weight, norm.epsilon).reshape(x.shape)
    return (y if norm.gate_first else y * opened).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _in_kernel(x, gate, weight, norm: GatedNorm, first: int) -> jax.Array:
    return kernel.normalise(kernel.GatedNormOperands(x, gate, weight, first), norm)


def _forward(x, gate, weight, norm: GatedNorm, first: int):
    return _in_kernel(x, gate, weight, norm, first), (x, gate, weight)


def _backward(norm: GatedNorm, first: int, inputs, dy: jax.Array):
    x, gate, weight = inputs
    dx, dgate, dweight = kernel.gradients(kernel.GatedNormOperands(x, gate, weight, first), norm, dy)
    dgate = jnp.pad(dgate, ((0, 0), (first, gate.shape[1] - first - x.shape[1])))
    return dx, dgate, dweight.astype(weight.dtype)


_in_kernel.defvjp(_forward, _backward)
