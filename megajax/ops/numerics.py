"""Shared by the ops: the dtype of computations, sums of rows, gradients that keep inputs only, a hash for bits."""

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


def add_rows(table: jax.Array, rows: jax.Array, updates: jax.Array, in_order: bool = False) -> jax.Array:
    """`table [V, D]` plus `updates [..., D]` at `rows [...]`, several of which may be equal.

    `in_order`: updates of equal rows are summed in an order that depends on `rows` only, and then added once, so
    that repeated calls on a GPU give the same bits. XLA's own way (`xla_gpu_exclude_nondeterministic_ops`) sorts single
    numbers, which takes 125 ms with 32,768 updates of 4,096 on an H200, and has no order with tied embeddings.
    """
    if not in_order:
        return table.at[rows].add(updates)
    order = jnp.argsort(rows.reshape(-1), stable=True)
    rows, sums = rows.reshape(-1)[order], updates.reshape(-1, updates.shape[-1])[order]
    distance = 1
    while distance < len(rows):  # a sum of the last 1, 2, 4, ... updates of a row, if it has so many
        same = jnp.pad(rows[distance:] == rows[:-distance], (distance, 0))
        sums = sums + jnp.where(same[:, None], jnp.pad(sums[:-distance], ((distance, 0), (0, 0))), 0)
        distance *= 2
    is_last = jnp.pad(rows[1:] != rows[:-1], (0, 1), constant_values=True)
    return table.at[jnp.where(is_last, rows, len(table))].add(sums, mode="drop", unique_indices=True)


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
