"""Shared by the ops: the dtype of computations, gradients that keep only the inputs, a hash for random bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def wide(dtype: Any) -> Any:
    """The dtype to compute in: float64 for float64 inputs, else float32."""
    return jnp.promote_types(dtype, jnp.float32)


def added(total: jax.Array, new: jax.Array) -> jax.Array:
    """`total + new`, added in FP32 and rounded to the dtype of `total`."""
    return (total.astype(wide(total.dtype)) + new.astype(wide(new.dtype))).astype(total.dtype)


def keep_inputs_only(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` with a backward pass that recomputes it from its inputs.

    By default the derivative of a float32 computation on bfloat16 inputs keeps float32 intermediates from the forward
    pass: several times the memory of the inputs, for values that a fused kernel recomputes at no cost.
    """
    wrapped = jax.custom_vjp(function)
    wrapped.defvjp(
        lambda *inputs: (function(*inputs), inputs),
        lambda inputs, cotangent: jax.vjp(function, *inputs)[1](cotangent),
    )
    return wrapped


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 whose output bits look random (the finaliser of MurmurHash3)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
