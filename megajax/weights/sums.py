"""Sums of gradients over microbatches: how terms are added. Their dtype is `Weight.sum_dtype`.

A BF16 sum is rounded once for each microbatch: terms within a microbatch (chunks of the head, rows of the embedding)
are added in FP32.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from megajax.ops.numerics import added

Arrays = Mapping[str, jax.Array]


def of_microbatch(totals: Arrays) -> dict[str, jax.Array]:
    """FP32 arrays to which a microbatch adds its terms: the totals themselves, or zeros if these are not FP32."""
    return {n: t if t.dtype == jnp.float32 else jnp.zeros(t.shape, jnp.float32) for n, t in totals.items()}


def after_microbatch(totals: Arrays, new: Arrays) -> dict[str, jax.Array]:
    """The new totals from the arrays of `of_microbatch` with all terms of the microbatch."""
    return {n: new[n] if total.dtype == jnp.float32 else added(total, new[n]) for n, total in totals.items()}
