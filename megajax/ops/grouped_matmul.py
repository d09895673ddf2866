"""Matmuls of groups of rows, each with a matrix of its own."""

from typing import Literal

import jax
import jax.numpy as jnp

GroupedImplementation = Literal["reference"]


def grouped_matmul(
    x: jax.Array, w: jax.Array, group_sizes: jax.Array, *, implementation: GroupedImplementation = "reference"
) -> jax.Array:
    """`x [T, D]`, `w [E, D, F]` → `[T, F]`: the first `group_sizes[0]` rows times `w[0]`, and so on.

    `group_sizes [E]` int32 are known at run time only; rows past their sum give zeros.
    """
    assert implementation == "reference"
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(x.shape[0])[None, :, None]
    mine = (rows >= (ends - group_sizes)[:, None, None]) & (rows < ends[:, None, None])
    return jnp.einsum("etd,edf->tf", jnp.where(mine, x, 0), w)
