"""A short causal convolution over tokens, of each channel alone, as it comes before linear recurrences."""

from functools import partial

import jax
import jax.numpy as jnp

from megajax.ops import short_convolution_kernel as kernel
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.numerics import keep_inputs_only, wide


def short_convolution(
    x: jax.Array,
    weight: jax.Array,
    position: jax.Array,
    before: jax.Array | None = None,
    bias: jax.Array | None = None,
    first: int = 0,
    implementation: ElementwiseImplementation = "reference",
) -> jax.Array:
    """silu(Σ_j weight[j] · x_{t − W + 1 + j} + bias) of channels of x `[B, S, X]`: `[B, S, F]` in x.dtype.

    Weight `[W, F]`, bias `[F]`; the channels are `first` and the F − 1 that follow. `position [B, S]` is that of each
    token in its document, and no token sees another document. `before [B, W - 1, F]` are the tokens before x; None:
    there are none.
    """
    if implementation == "pallas" and kernel.fits(weight.shape[1]):
        if bias is None:
            bias = jnp.zeros(weight.shape[1], jnp.float32)
        return _in_kernel(x, weight, position, before, bias, first)
    x = x[..., first : first + weight.shape[1]]
    return keep_inputs_only(_compute)(x, weight, position, before, bias)


def _compute(x: jax.Array, weight: jax.Array, position: jax.Array, before: jax.Array | None, bias: jax.Array | None):
    S, W = x.shape[1], len(weight)
    if before is None:
        before = jnp.zeros((len(x), W - 1, x.shape[-1]), x.dtype)
    tokens, weight = (a.astype(wide(x.dtype)) for a in (jnp.concatenate([before, x], axis=1), weight))
    y = tokens[:, W - 1 :] * weight[W - 1]
    for back in range(1, W):
        same = (position >= back)[..., None]
        y = y + jnp.where(same, tokens[:, W - 1 - back : W - 1 - back + S] * weight[W - 1 - back], 0)
    return jax.nn.silu(y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _in_kernel(x, weight, position, before, bias, first: int) -> jax.Array:
    weight, bias = weight.astype(jnp.float32), bias.astype(jnp.float32)
    return kernel.convolve(kernel.ConvolutionOperands(x, weight, bias, position, before, first))


def _forward(x, weight, position, before, bias, first: int):
    return _in_kernel(x, weight, position, before, bias, first), (x, weight, position, before, bias)


def _backward(first: int, inputs, dy: jax.Array):
    x, weight, position, before, bias = inputs
    W, F = weight.shape
    operands = kernel.ConvolutionOperands(
        x, weight.astype(jnp.float32), bias.astype(jnp.float32), position, before, first
    )
    dx, dweight, dbias = kernel.gradients(operands, dy)
    dx = jnp.pad(dx, ((0, 0), (0, 0), (first, x.shape[-1] - first - F)))
    if before is not None:  # only the first W - 1 tokens see it
        start = x[:, : W - 1, first : first + F]
        _, pull = jax.vjp(lambda earlier: _compute(start, weight, position[:, : W - 1], earlier, bias), before)
        [before] = pull(dy[:, : W - 1])
    return dx, dweight.astype(weight.dtype), None, before, dbias.astype(bias.dtype)


_in_kernel.defvjp(_forward, _backward)
