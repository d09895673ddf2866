"""Ranges of visible keys, one per query, as the kernels of attention read them: padded, and seen from the keys."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
Ranges = tuple[jax.Array, jax.Array]  # [B, Sq] int32 each: a query sees the keys [first, end); never decreasing


@dataclass(frozen=True)
class Options:
    """The static settings of the kernels."""

    scale: float
    softcap: float | None = None
    interpret: bool = False  # runs them on any device, slowly

    @property
    def factor(self) -> float:
        """The factor to exponents of exp2 from the products of queries and keys, with a soft-cap from its tanh."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)


def padded_ranges(multiple: int, ranges: Ranges, queries: int, keys: int) -> Ranges:
    """Ranges clipped to the keys, and padded to a multiple of queries with queries that see no key."""
    B = ranges[0].shape[0]
    first, end = (jnp.broadcast_to(jnp.clip(a.astype(jnp.int32), 0, keys), (B, queries)) for a in ranges)
    if missing := -queries % multiple:
        last = jnp.maximum(first[:, -1:], end[:, -1:])
        first, end = (jnp.concatenate([a, jnp.repeat(last, missing, axis=1)], axis=1) for a in (first, end))
    return first, end


def seen_by(first: jax.Array, end: jax.Array, keys: int, rows: int) -> jax.Array:
    """The queries that see each tile of `rows` keys: `[B, tiles, 4]` int32.

    Bounds never decrease, so the queries that see some of the keys are a range, and so are those that see all: the
    fields are the bounds of both.
    """
    start = jnp.arange(0, keys, rows, dtype=jnp.int32)[:, None]
    first, end = first[:, None, :], end[:, None, :]

    def count(queries: jax.Array) -> jax.Array:
        return jnp.sum(queries, axis=-1, dtype=jnp.int32)

    any_from, any_to = count(end <= start), count(first < start + rows)
    all_from, all_to = count(end < start + rows), count(first <= start)
    return jnp.stack([any_from, any_to, all_from, all_to], axis=-1)


def of_queries(whole: tuple[jax.Array, jax.Array], dout: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a backward pass needs of each query, `[B, N, Sq]` FP32: Σ out · dout, and the log-sum-exp in units of exp2.

    A query without keys has p = exp2(s - inf) = 0.
    """
    out, lse = whole
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    return delta, jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
