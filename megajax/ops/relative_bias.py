"""T5's bias of attention's scores by distance (Raffel et al. 1910.10683): a number for each head and bucket."""

import math
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.ops.numerics import wide


@lru_cache(maxsize=64)
def distance_buckets(length: int, buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """The bucket of each distance from a query to a key, 1 - length … length - 1: `[2 · length - 1]` int32.

    Half of the buckets are one distance each, the others grow with its logarithm up to `max_distance`. Without `causal`
    keys before a query have one half of them, keys after it the other; else all keys after it have bucket 0.
    """
    distance, first = np.arange(1 - length, length), 0
    if causal:
        behind = np.maximum(-distance, 0)
    else:
        buckets //= 2
        behind, first = np.abs(distance), np.where(distance > 0, buckets, 0)
    exact = buckets // 2
    # In FP32 as published: the edges of buckets depend on its rounding.
    logarithm = np.log(np.maximum(behind, 1).astype(np.float32) / np.float32(exact))
    wider = exact + (logarithm / np.float32(math.log(max_distance / exact)) * np.float32(buckets - exact)).astype(int)
    return (first + np.where(behind < exact, behind, np.minimum(wider, buckets - 1))).astype(np.int32)


def relative_bias(table_nb: jax.Array, length: int, max_distance: int, causal: bool) -> jax.Array:
    """The bias of each pair of a query and a key, `[N, length, length]`, of the table `[N, buckets]`, in its dtype."""
    buckets = distance_buckets(length, table_nb.shape[1], max_distance, causal)
    # Its gradient is a matmul and sums over diagonals: a gather's would add numbers one by one.
    chosen = jax.nn.one_hot(buckets, table_nb.shape[1], dtype=table_nb.dtype, axis=0)
    by_distance = jnp.matmul(table_nb, chosen, precision=lax.Precision.HIGHEST)
    return _by_pair(by_distance)


def _by_pair(by_distance: jax.Array) -> jax.Array:
    """`[N, 2S - 1]` → `[N, S, S]`, where entry (i, j) is that of distance j - i: each row is shifted by one more."""
    N, S = by_distance.shape[0], (by_distance.shape[1] + 1) // 2
    rows = jnp.broadcast_to(jnp.pad(by_distance, ((0, 0), (0, 1)))[:, None], (N, S, 2 * S))
    return rows.reshape(N, -1)[:, : S * (2 * S - 1)].reshape(N, S, 2 * S - 1)[:, :, S - 1 :]


def bias_of_pairs(table_nb: jax.Array, query: jax.Array, key: jax.Array, max_distance: int, length: int) -> jax.Array:
    """The bias for queries `[B, S]` and earlier keys `[B, W]` at positions below `length`: `[B, N, S, W]`."""
    buckets = jnp.asarray(distance_buckets(length, table_nb.shape[1], max_distance, causal=True))
    distance = jnp.clip(key[:, None] - query[..., None], 1 - length, 0)
    return jnp.moveaxis(table_nb.astype(wide(table_nb.dtype))[:, buckets[distance + length - 1]], 0, 1)
