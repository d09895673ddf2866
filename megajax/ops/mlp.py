"""Activations of the MLP, computed in float32 (float64 for float64 inputs), result in the input's dtype.

GELU is the tanh approximation throughout: GPT-2 and GPT-3 (Hugging Face's `gelu_new`) and Gemma's GeGLU
were trained with it, and it is one fused kernel on GPU. The exact erf form differs by up to 5e-4.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from megajax.ops.numerics import keep_inputs_only, wide

_GATES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": lambda gate: jax.nn.gelu(gate, approximate=True),
}
_PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda up: jax.nn.gelu(up, approximate=True),
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}


def gated(kind: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The function (gate [..., F], up [..., F]) -> activation(gate) · up, for "swiglu" or "geglu"."""
    if kind not in _GATES:
        raise ValueError(f'"{kind}" is no gated activation: use one of {", ".join(_GATES)}.')
    activation = _GATES[kind]

    def compute(gate: jax.Array, up: jax.Array) -> jax.Array:
        dtype = wide(up.dtype)
        return (activation(gate.astype(dtype)) * up.astype(dtype)).astype(up.dtype)

    return keep_inputs_only(compute)


def activate(kind: str, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """The activation `kind` of up [..., F], with a gate [..., F] for swiglu and geglu -> as up."""
    if gate is not None:
        return gated(kind)(gate, up)
    if kind not in _PLAIN:
        raise ValueError(f'"{kind}" is no activation without a gate: use one of {", ".join(_PLAIN)}.')
    activation = _PLAIN[kind]

    def compute(up: jax.Array) -> jax.Array:
        return activation(up.astype(wide(up.dtype))).astype(up.dtype)

    return keep_inputs_only(compute)(up)
