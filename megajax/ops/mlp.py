"""Activations of the MLP, computed in float32 (float64 for float64 inputs), result in the input's dtype.

GELU is the tanh approximation throughout: GPT-2 and GPT-3 (Hugging Face's `gelu_new`) and Gemma's GeGLU
were trained with it, and it is one fused kernel on GPU. The exact erf form differs by up to 5e-4.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import mlp_kernel
from megajax.ops.numerics import keep_inputs_only, wide

ElementwiseImplementation = Literal["reference", "pallas"]
GATED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": lambda gate: jax.nn.gelu(gate, approximate=True),
}
_PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda up: jax.nn.gelu(up, approximate=True),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}


def activate(kind: str, x: jax.Array) -> jax.Array:
    """The activation `kind` of x: plain ones [..., F] -> [..., F]; gated ones [..., 2F] -> [..., F].

    For "swiglu" and "geglu" the gate is the first half of the last axis: activation(x[..., :F]) · x[..., F:].
    """
    if kind in _PLAIN:
        return keep_inputs_only(lambda x: _PLAIN[kind](x.astype(wide(x.dtype))).astype(x.dtype))(x)
    if kind not in GATED:
        raise ValueError(f'"{kind}" is no activation: use one of {", ".join([*GATED, *_PLAIN])}.')
    return _gated(kind, x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(kind: str, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return (GATED[kind](gate) * up).astype(x.dtype)


def _gated_forward(kind: str, x: jax.Array):
    return _gated(kind, x), x


def _gated_backward(kind: str, x: jax.Array, dy: jax.Array):
    """Both halves side by side in one pass, where differentiating the split would pad and add."""
    gate, up = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    activated, pull = jax.vjp(GATED[kind], gate)
    dy = dy.astype(gate.dtype)
    return (jnp.concatenate([pull(dy * up)[0], dy * activated], axis=-1).astype(x.dtype),)


_gated.defvjp(_gated_forward, _gated_backward)


def activate_weighted(kind: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """The activation `kind` of x `[R, 2F]` or `[R, F]`, each row times its weight `[R]` before it is rounded."""
    values = activate(kind, x.astype(wide(x.dtype)))
    return (values * weights[:, None].astype(values.dtype)).astype(x.dtype)


def activate_weighted_backward(kind: str, x: jax.Array, weights: jax.Array, dy: jax.Array):
    """(the gradient of x, that of the weights) for that of `activate_weighted`."""
    values, pull = jax.vjp(partial(activate, kind), x.astype(wide(x.dtype)))
    dy = dy.astype(values.dtype)
    (dx,) = pull(dy * weights[:, None].astype(values.dtype))
    return dx.astype(x.dtype), jnp.sum(dy * values, axis=-1).astype(weights.dtype)


def activate_and_gradient(
    kind: str, x: jax.Array, dy: jax.Array, implementation: ElementwiseImplementation
) -> tuple[jax.Array, jax.Array]:
    """(activate(kind, x), the gradient of x for that of the activation), computed from x again."""
    if implementation == "pallas" and kind in GATED and mlp_kernel.fits(dy.shape[-1]):
        gradient, act = mlp_kernel.activate_and_gradient(kind, x, dy)
        return act, gradient
    x, dy = lax.optimization_barrier((x, dy))  # or XLA would keep the forward pass's activation
    act, pull = jax.vjp(partial(activate, kind), x)
    return act, pull(dy)[0]
