"""Activations of the MLP, computed in float32 (float64 for float64 inputs), with results in the input's dtype.

"gelu" and "geglu" are the tanh approximation: GPT-2 and GPT-3 (Hugging Face's `gelu_new`) and Gemma were trained with
it. "gelu_exact" and "geglu_exact" have erf (Hugging Face's `gelu`, and Megatron-LM's without biases); the two differ by
up to 5e-4.
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from megajax.errors import ConfigError, accepts
from megajax.ops import expert_activation_kernel, mlp_kernel
from megajax.ops.barriers import not_merged
from megajax.ops.grouped_rows import bias_of_rows
from megajax.ops.mlp_kernel import CLAMP_LIMIT, CLAMP_SLOPE
from megajax.ops.numerics import keep_inputs_only, wide
from megajax.options.activations import ACTIVATIONS, Activation

ElementwiseImplementation = Literal["reference", "pallas"]


class Gated(NamedTuple):
    """A gated activation, gate(first half) · up(second half)."""

    gate: Callable[[jax.Array], jax.Array]
    up: Callable[[jax.Array], jax.Array] = lambda up: up


def _clamped_gate(gate: jax.Array) -> jax.Array:
    gate = jnp.where(gate > CLAMP_LIMIT, CLAMP_LIMIT, gate)
    return gate * jax.nn.sigmoid(CLAMP_SLOPE * gate)


def _clamped_up(up: jax.Array) -> jax.Array:
    up = jnp.where(up > CLAMP_LIMIT, CLAMP_LIMIT, up)
    return jnp.where(up < -CLAMP_LIMIT, -CLAMP_LIMIT, up) + 1.0


# By the names of `options.activations`; a plain one maps [..., F] to [..., F]
FUNCTIONS: dict[str, Gated | Callable[[jax.Array], jax.Array]] = {
    "swiglu": Gated(jax.nn.silu),
    "geglu": Gated(lambda gate: jax.nn.gelu(gate, approximate=True)),
    "geglu_exact": Gated(lambda gate: jax.nn.gelu(gate, approximate=False)),
    "clamped_swiglu": Gated(_clamped_gate, _clamped_up),
    "gelu": lambda up: jax.nn.gelu(up, approximate=True),
    "gelu_exact": lambda up: jax.nn.gelu(up, approximate=False),
    "quick_gelu": lambda up: up * jax.nn.sigmoid(1.702 * up),  # CLIP's
    "relu": jax.nn.relu,
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}


def register_activation(name: str, function: Gated | Callable[[jax.Array], jax.Array]) -> None:
    """Register an activation for `model.activation`, before the config is loaded.

    A plain function maps the first matrix's output, in FP32, to an array of the same shape; `Gated` has the functions
    of both its halves. jax differentiates them; GPUs compute them without kernels of megajax's own, in FP8 too. Raises
    ConfigError for a name that is taken, and for functions of other arguments.
    """
    if not all(accepts(each, None) for each in (function if isinstance(function, Gated) else [function])):
        problem = f"the activation {name} has a function that does not take one array"
        raise ConfigError(f"{problem}: give a function of the first matrix's output, or Gated(gate, up) of its halves.")
    ACTIVATIONS.add(Activation(name, isinstance(function, Gated), in_transformer_engine=False), function)
    FUNCTIONS[name] = function


def activate(kind: str, x: jax.Array) -> jax.Array:
    """The activation `kind` of x: plain ones [..., F] -> [..., F]; gated ones [..., 2F] -> [..., F].

    For "swiglu" and "geglu" the gate is the first half of the last axis: activation(x[..., :F]) · x[..., F:].
    "clamped_swiglu" is GPT-OSS's: gate · sigmoid(1.702 · gate) · (up + 1), with gate ≤ 7 and -7 ≤ up ≤ 7.
    """
    if kind not in FUNCTIONS:
        raise ValueError(f'"{kind}" is not an activation: use one of {", ".join(FUNCTIONS)}.')
    function = FUNCTIONS[kind]
    if isinstance(function, Gated):
        return _gated(function, x)
    return keep_inputs_only(lambda x: function(x.astype(wide(x.dtype))).astype(x.dtype))(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(function: Gated, x: jax.Array) -> jax.Array:
    gate, up = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    return (function.gate(gate) * function.up(up)).astype(x.dtype)


def _gated_forward(function: Gated, x: jax.Array):
    return _gated(function, x), x


def _gated_backward(function: Gated, x: jax.Array, dy: jax.Array):
    """The gradients of both halves in one concatenation; the derivative of the split would pad and add."""
    gate, up = jnp.split(x.astype(wide(x.dtype)), 2, axis=-1)
    activated, pull = jax.vjp(function.gate, gate)
    up, pull_up = jax.vjp(function.up, up)
    dy = dy.astype(gate.dtype)
    return (jnp.concatenate([pull(dy * up)[0], pull_up(dy * activated)[0]], axis=-1).astype(x.dtype),)


_gated.defvjp(_gated_forward, _gated_backward)


def activate_weighted(
    kind: str,
    x: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    implementation: ElementwiseImplementation,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The activation `kind` of x `[R, 2F]` or `[R, F]`, each row times its weight `[R]` before it is rounded.

    The bias `[E, 2F]` or `[E, F]` of a row's group is added to x. Only rows of groups, whose sizes are known at run
    time, and some zeros after them are defined.
    """
    if _in_kernel(kind, implementation, x.shape[-1] // 2):
        return expert_activation_kernel.activate(kind, x, weights, group_sizes, bias)
    x = x if bias is None else x + bias_of_rows(bias, x, group_sizes)
    values = activate(kind, x.astype(wide(x.dtype)))
    return (values * weights[:, None].astype(values.dtype)).astype(x.dtype)


def activate_weighted_and_gradient(
    kind: str,
    x: jax.Array,
    weights: jax.Array,
    dy: jax.Array,
    group_sizes: jax.Array,
    implementation: ElementwiseImplementation,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the result of `activate_weighted`, the gradients of x and of the weights), recomputed from x."""
    if _in_kernel(kind, implementation, dy.shape[-1]):
        return expert_activation_kernel.activate_and_gradient(kind, x, weights, dy, group_sizes, bias)
    x = x if bias is None else x + bias_of_rows(bias, x, group_sizes)
    x, dy = not_merged((x, dy))  # else XLA keeps the forward pass's activation
    values, pull = jax.vjp(partial(activate, kind), x.astype(wide(x.dtype)))
    scale, dy = weights[:, None].astype(values.dtype), dy.astype(values.dtype)
    (dx,) = pull(dy * scale)
    dweights = jnp.sum(dy * values, axis=-1).astype(weights.dtype)
    return (values * scale).astype(x.dtype), dx.astype(x.dtype), dweights


def _in_kernel(kind: str, implementation: ElementwiseImplementation, width: int) -> bool:
    return implementation == "pallas" and kind in mlp_kernel.KINDS and mlp_kernel.fits(width)


def activate_and_gradient(
    kind: str, x: jax.Array, dy: jax.Array, implementation: ElementwiseImplementation
) -> tuple[jax.Array, jax.Array]:
    """(activate(kind, x), the gradient of x for dy, the gradient of the activation), recomputed from x."""
    if _in_kernel(kind, implementation, dy.shape[-1]):
        gradient, act = mlp_kernel.activate_and_gradient(kind, x, dy)
        return act, gradient
    x, dy = not_merged((x, dy))  # else XLA keeps the forward pass's activation
    act, pull = jax.vjp(partial(activate, kind), x)
    return act, pull(dy)[0]
