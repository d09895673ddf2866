"""Matmuls of groups of rows by XLA's libraries, batched over the groups, for any GPU: the contract of `grouped_matmul`.

A library's matmul has no groups of different sizes. So a first round multiplies as many rows of each group in one
batched matmul. The rows that are left then are cut into tiles, each of one group; a later round multiplies the next
tiles, each with a copy of its group's weights. FP8 and numbers with scales of blocks need no kernel of our own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megajax.ops.barriers import not_repeated
from megajax.ops.grouped_rows import STEP, group_of_rows, running_sum
from megajax.ops.numerics import wide

# Rows of each group in the first round, and of a tile, as parts of an even share. A tile of a gradient is taller,
# because each adds to an FP32 gradient. docs/experts.md has the costs that they follow from.
FIRST, TILE, GRADIENT_TILE = 1.125, 0.5, 1.0
GROUPS_PER_TILE = 8  # a later round has a tile for this many groups

Operand = tuple[jax.Array, ...]  # numbers, and of numbers in blocks their scales
Dot = Callable[[Operand, Operand], jax.Array]  # of some groups or tiles [B, M, K] and their weights → [B, M, N]


class Tiles(NamedTuple):
    """`height` rows of each of B groups."""

    group: jax.Array  # [B] int32; E: the tile is after the last row of the last group
    start: jax.Array  # [B] int32: its first row, counted from the group's first
    height: int


class TileRounds(NamedTuple):
    """The rows of the first round and of the later ones."""

    first: int  # of each group
    height: int  # of a tile of a later round; 0: there is no later round
    tiles: int  # of a later round

    @classmethod
    def of(cls, rows: int, groups: int, height: float) -> "TileRounds":
        """For `rows` of all groups, with this height of a tile as a part of an even share; in whole steps."""
        most = pl.cdiv(rows, STEP)
        first, height = (min(most, max(1, round(part * most / groups))) for part in (FIRST, height))
        return cls(first * STEP, min(height, most - first) * STEP, max(1, groups // GROUPS_PER_TILE))

    def later(self, group_sizes_e: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], Tiles]]:
        """The number of later rounds, and the tiles of each, in the order of groups and rows."""
        counts = pl.cdiv(jnp.maximum(group_sizes_e.astype(jnp.int32) - self.first, 0), self.height)
        ends = running_sum(counts)

        def tiles(round: jax.Array) -> Tiles:
            tile = round * self.tiles + jnp.arange(self.tiles)
            group = jnp.sum(tile[:, None] >= ends, axis=1, dtype=jnp.int32)
            index = tile - _taken(ends - counts, group)
            return Tiles(group, self.first + index * self.height, self.height)

        return pl.cdiv(ends[-1], self.tiles), tiles


def matmul(x_tk: jax.Array, w: jax.Array, group_sizes_e: jax.Array, *, transpose_w: bool = False) -> jax.Array:
    """Rows of x [T, K] times the w of their group, [E, K, N] or with `transpose_w` [E, N, K] -> [T, N] in x's dtype."""

    def dot(a: Operand, b: Operand) -> jax.Array:
        return dot_of_groups(a, b if transpose_w else (b[0].swapaxes(1, 2),), x_tk.dtype)

    return product(dot, (x_tk,), (w.astype(x_tk.dtype),), group_sizes_e)


def weight_gradient(x_tm: jax.Array, dy_tn: jax.Array, group_sizes_e: jax.Array, dtype: Any) -> jax.Array:
    """x_eᵀ dy_e over the rows of each group: x [T, M] and dy [T, N] -> [E, M, N] in `dtype`."""

    def of_tiles(tiles: Tiles) -> jax.Array:
        places = _indices(tiles, group_sizes_e)
        ((x,), (dy,)) = (_rows_of(operand, *places) for operand in ((x_tm,), (dy_tn,)))
        return dot_of_groups((x.swapaxes(1, 2),), (dy.swapaxes(1, 2),), wide(x.dtype))

    return _sum_over_tiles(of_tiles, group_sizes_e, len(x_tm)).astype(dtype)


def product(dot: Dot, x: Operand, w: Operand, group_sizes_e: jax.Array, rows: int | None = None) -> jax.Array:
    """`dot` of rows of x `[R, K]` and the w `[E, ...]` of their group: `[rows, N]`.

    Rows after the last group may hold NaN; their results are zeros. `rows`: R if not given.
    """
    E, R = len(w[0]), rows or len(x[0])
    rounds = TileRounds.of(R, E, TILE)
    first = dot(_rows_of(x, *_indices(_first_tiles(rounds, E), group_sizes_e)), w)
    starts, group = running_sum(group_sizes_e) - group_sizes_e, group_of_rows(group_sizes_e, R)
    position = jnp.arange(R) - _taken(starts, group)  # in its group
    index, held = not_repeated((group * rounds.first + position, (group < E) & (position < rounds.first)))
    found = jnp.where(held[:, None], _taken(first.reshape(E * rounds.first, -1), index), 0)
    if not rounds.height:
        return found
    number, tiles_of = rounds.later(group_sizes_e)

    def add(round: jax.Array, found: jax.Array) -> jax.Array:
        tiles = tiles_of(round)
        weights = jax.tree.map(lambda a: _taken(a, tiles.group), w)
        index, held = _indices(tiles, group_sizes_e)
        new = dot(_rows_of(x, index, held), weights)
        unused = R + jnp.arange(index.size).reshape(index.shape)  # dropped; all indices are different
        index = not_repeated(jnp.where(held, index, unused))
        return found.at[index].set(new, mode="drop", unique_indices=True, wrap_negative_indices=False)

    return lax.fori_loop(0, number, add, found)


def sum_over_steps(dot: Dot, x: Operand, dy: Operand, group_sizes_e: jax.Array, rows: int) -> jax.Array:
    """x_e dy_eᵀ over the columns of each group: x `[M, P]` and dy `[N, P]` -> `[E, M, N]` FP32.

    Groups are aligned to steps (`grouped_rows`), with zeros after each. `rows`: the number of rows in all groups, or
    more.
    """
    counts = pl.cdiv(group_sizes_e, STEP)
    steps = x[0].shape[1] // STEP
    operands = jax.tree.map(lambda a: a.reshape(len(a), steps, -1), (x, dy))

    def of_tiles(tiles: Tiles) -> jax.Array:
        index, held = _indices(Tiles(tiles.group, tiles.start // STEP, tiles.height // STEP), counts)

        def operand(of_steps: Operand) -> Operand:
            numbers, *scales = (_taken(a, index, 1).swapaxes(0, 1) for a in of_steps)
            numbers = jnp.where(held[:, None, :, None], numbers, 0)  # not the scales: E8M0 has no zero
            return tuple(a.reshape(*a.shape[:2], -1) for a in (numbers, *scales))

        return dot(*map(operand, operands))

    return _sum_over_tiles(of_tiles, group_sizes_e, rows)


def dot_of_groups(a: Operand, b: Operand, dtype: Any) -> jax.Array:
    """`a @ b.T` of each group, in `dtype`; sums are in FP32 (FP64 for FP64).

    On GPUs the library writes `dtype`; XLA would convert an FP32 product in a separate pass.
    """
    (x,), (y,) = a, b
    return lax.dot_general(x, y, (((2,), (2,)), ((0,), (0,))), preferred_element_type=dtype)


def _sum_over_tiles(of_tiles: Callable[[Tiles], jax.Array], group_sizes_e: jax.Array, rows: int) -> jax.Array:
    """The sum of `of_tiles(tiles)` `[B, M, N]` over the tiles of each group, `[E, M, N]`."""
    E = len(group_sizes_e)
    rounds = TileRounds.of(rows, E, GRADIENT_TILE)
    total = of_tiles(_first_tiles(rounds, E))
    if not rounds.height:
        return total
    number, tiles_of = rounds.later(group_sizes_e)

    def add(round: jax.Array, total: jax.Array) -> jax.Array:
        tiles = tiles_of(round)
        new = of_tiles(tiles)
        # One after another: several may be of one group, and XLA's scatter would add those in any order.
        return lax.fori_loop(0, rounds.tiles, lambda i, total: total.at[tiles.group[i]].add(new[i], mode="clip"), total)

    return lax.fori_loop(0, number, add, total)


def _first_tiles(rounds: TileRounds, E: int) -> Tiles:
    return Tiles(jnp.arange(E), jnp.zeros(E, jnp.int32), rounds.first)


def _rows_of(operand: Operand, index: jax.Array, held: jax.Array) -> Operand:
    """The rows `[B, height, K]` at the `_indices` of tiles; numbers after a group's last row are zeros."""
    numbers, *scales = (_taken(a, index) for a in operand)
    return jnp.where(held[..., None], numbers, 0), *scales


def _indices(tiles: Tiles, group_sizes_e: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the rows of tiles their indices and whether their group has them, `[B, height]`.

    The barrier keeps XLA from computing them for every number that it gathers.
    """
    sizes = group_sizes_e.astype(jnp.int32)
    starts = running_sum(sizes) - sizes
    start, size = (_taken(a, tiles.group)[:, None] for a in (starts, sizes))
    row = tiles.start[:, None] + jnp.arange(tiles.height)
    return not_repeated((start + row, row < size))


def _taken(a: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """The parts of `a` at these indices of an axis, which are not negative; the last for those after it."""
    return a.at[(slice(None),) * axis + (index,)].get(mode="clip", wrap_negative_indices=False)
