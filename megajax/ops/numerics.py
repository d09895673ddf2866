"""What the ops share: the accumulation type, and gradients that keep only the inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The type to compute in: float64 for float64 inputs, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def keep_inputs_only(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function`, whose backward pass computes it again from its inputs.

    Left to itself, differentiating a float32 computation on bfloat16 inputs keeps float32 intermediates
    from the forward pass: several times the memory of the inputs for work that a fused kernel redoes free.
    """
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda *inputs: (function(*inputs), inputs),
        lambda inputs, cotangent: jax.vjp(function, *inputs)[1](cotangent),
    )
    return wrapped
