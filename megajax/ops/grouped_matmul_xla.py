"""Matmuls of groups of rows by XLA's libraries, batched over the groups, for any GPU: the contract of `grouped_matmul`.

A library's matmul has no groups of different sizes. So a round takes the next rows of each group, the same number of
each, and multiplies them in one batched matmul; there are rounds until no group has rows left. FP8 and numbers with
scales of blocks need no kernel of our own. With uneven groups the rounds also multiply rows that nobody needs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megajax.ops.grouped_rows import STEP, Rounds, group_of_rows, running_sum
from megajax.ops.numerics import wide

# Rows of each group in the first round and in a later one, as parts of an even share: gradients of weights are sums
# over the rounds, so one should do for most routings.
FIRST, LATER = 1.25, 0.5

Operand = tuple[jax.Array, ...]  # numbers, and of numbers in blocks their scales
# [E, M, K] and [E, N, K] → [E, M, N] of each group, summed over K
Dot = Callable[[Operand, Operand], jax.Array]


def matmul(x_tk: jax.Array, w: jax.Array, group_sizes_e: jax.Array, *, transpose_w: bool = False) -> jax.Array:
    """Rows of x [T, K] times the w of their group, [E, K, N] or with `transpose_w` [E, N, K] -> [T, N] in x's dtype."""
    w = w.astype(x_tk.dtype)
    return product(dot_of_groups, (x_tk,), (w if transpose_w else w.swapaxes(1, 2),), group_sizes_e, x_tk.dtype)


def weight_gradient(x_tm: jax.Array, dy_tn: jax.Array, group_sizes_e: jax.Array, dtype: Any) -> jax.Array:
    """x_eᵀ dy_e over the rows of each group: x [T, M] and dy [T, N] -> [E, M, N] in `dtype`."""
    starts = running_sum(group_sizes_e) - group_sizes_e

    def add(first: jax.Array | int, height: int, gradient_emn: jax.Array) -> jax.Array:
        index = first + jnp.arange(height)
        held = (index < group_sizes_e[:, None])[..., None]
        x, dy = (
            jnp.where(held, a.at[starts[:, None] + index].get(mode="clip"), 0).swapaxes(1, 2) for a in (x_tm, dy_tn)
        )
        return gradient_emn + dot_of_groups((x,), (dy,))

    shape = len(group_sizes_e), x_tm.shape[1], dy_tn.shape[1]
    return _in_rounds(add, group_sizes_e, len(x_tm), jnp.zeros(shape, wide(x_tm.dtype))).astype(dtype)


def product(
    dot: Dot,
    x: Operand,
    w: Operand,
    group_sizes_e: jax.Array,
    dtype: Any,
    factor: jax.Array | None = None,
    rows: int | None = None,
) -> jax.Array:
    """Rows of x `[R, K]` times the w `[E, N, K]` of their group, times `factor`: `[rows, N]` in `dtype`.

    Rows after the last group may hold NaN; their results are zeros. `rows`: R if not given.
    """
    (E, N, _), R = w[0].shape, rows or len(x[0])
    starts = running_sum(group_sizes_e) - group_sizes_e
    group = group_of_rows(group_sizes_e, R)
    position = jnp.where(group < E, jnp.arange(R) - starts.at[group].get(mode="clip"), -1)  # in its group

    def add(first: jax.Array | int, height: int, product_rn: jax.Array) -> jax.Array:
        taken = starts[:, None] + first + jnp.arange(height)
        found = dot(jax.tree.map(lambda a: a.at[taken].get(mode="clip"), x), w).reshape(-1, N)
        here = position - first
        found = found.at[group * height + here].get(mode="clip")
        found = (found if factor is None else found * factor).astype(dtype)
        return jnp.where(((here >= 0) & (here < height))[:, None], found, product_rn)

    return _in_rounds(add, group_sizes_e, R, jnp.zeros((R, N), dtype))


def sum_over_steps(dot: Dot, x: Operand, dy: Operand, group_sizes_e: jax.Array, rows: int) -> jax.Array:
    """x_e dy_eᵀ over the columns of each group: x `[M, P]` and dy `[N, P]` -> `[E, M, N]` FP32.

    Groups are aligned to steps (`grouped_rows`), with zeros after each. `rows`: the number of rows in all groups, or
    more.
    """
    counts = pl.cdiv(group_sizes_e, STEP)
    starts = running_sum(counts) - counts
    steps = x[0].shape[1] // STEP
    operands = jax.tree.map(lambda a: a.reshape(len(a), steps, -1), (x, dy))

    def add(first: jax.Array | int, height: int, gradient_emn: jax.Array) -> jax.Array:
        index = first // STEP + jnp.arange(height // STEP)
        held = (index < counts[:, None])[:, None, :, None]

        def operand(of_steps: Operand) -> Operand:
            numbers, *scales = (a.at[:, starts[:, None] + index].get(mode="clip").swapaxes(0, 1) for a in of_steps)
            numbers = jnp.where(held, numbers, 0)  # not the scales: E8M0 has no zero
            return tuple(a.reshape(*a.shape[:2], -1) for a in (numbers, *scales))

        return gradient_emn + dot(*map(operand, operands))

    return _in_rounds(add, group_sizes_e, rows, jnp.zeros((len(counts), len(x[0]), len(dy[0])), jnp.float32))


def dot_of_groups(a: Operand, b: Operand) -> jax.Array:
    """`a @ b.T` of each group; sums are in FP32 (FP64 for FP64)."""
    (x,), (y,) = a, b
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,))), preferred_element_type=dtype)


def _in_rounds(
    add: Callable[[jax.Array | int, int, jax.Array], jax.Array], group_sizes_e: jax.Array, R: int, total: jax.Array
) -> jax.Array:
    """`add(first, height, total)` for the R rows of all groups: `height` of each group, from its row `first` on."""
    rounds = Rounds.of(R / (len(group_sizes_e) * STEP), pl.cdiv(R, STEP), FIRST, LATER)  # of steps
    total = add(0, rounds.first * STEP, total)
    if (number := rounds.number(pl.cdiv(jnp.max(group_sizes_e).astype(jnp.int32), STEP))) is None:
        return total
    return lax.fori_loop(1, number, lambda r, total: add(rounds.start(r) * STEP, rounds.rows * STEP, total), total)
