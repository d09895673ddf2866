"""Layouts of groups of rows: rounds, tiles of rows for the grouped matmuls, and steps of the sum over rows.

The transposes [F, P] of FP8 rows [R, F] are aligned to steps: each group starts at a multiple of STEP columns, with
zeros before the next group. So kernels read whole steps, although a group may start at any row.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

ALIGNMENT = 8  # a tile's first row is a multiple of this, the height of a swizzled tile in shared memory
STEP = 128  # FP8 numbers: the width of a swizzled tile


class Rounds(NamedTuple):
    """The rounds in which a number of rows that only a step knows is computed, each with a known number of rows."""

    most: int  # rows at the most, of all rounds
    first: int  # rows of the first round
    rows: int  # of each later round

    @classmethod
    def of(cls, share: float, most: int, room: float, later_room: float) -> "Rounds":
        """With room for multiples of an even `share` of the rows in the first round and in each later one."""
        return cls(most, *(math.ceil(min(most, factor * share)) for factor in (room, later_room)))

    def number(self, rows: jax.Array) -> jax.Array | None:
        """How many rounds `rows` rows need; None if any number fits into the first."""
        return None if self.most <= self.first else 1 - jnp.minimum(self.first - rows, 0) // self.rows

    def start(self, round: jax.Array) -> jax.Array:
        """The first row of a later round."""
        return self.first + (round - 1) * self.rows


def row_tiles(group_sizes_e: jax.Array, T: int, height: int, alignment: int = ALIGNMENT) -> jax.Array:
    """The tiles of T rows, each with rows of one group: int32 [tiles, 5].

    The fields are the tile's first row, a multiple of `alignment`; its group; the start and the end of the group's rows
    in the tile; and the number of tiles in use. The rows after the last group are group E.
    """
    E, sizes = group_sizes_e.shape[0], group_sizes_e.astype(jnp.int32)
    ends = running_sum(sizes)
    # Enough tiles for any first row of a group; the last tile may have no rows.
    last_tiles = running_sum(jnp.where(sizes > 0, pl.cdiv(sizes + (alignment - 1), height), 0))
    starts, ends = jnp.append(0, ends), jnp.append(ends, T)
    first_tiles = jnp.append(0, last_tiles)
    count = last_tiles[-1:] + pl.cdiv(T - starts[-1:] + (alignment - 1), height)
    tile = jnp.arange(T // height + (2 if alignment > 1 else 1) * (E + 1), dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= last_tiles[None, :], axis=1, dtype=jnp.int32)
    start = starts[group] // alignment * alignment + (tile - first_tiles[group]) * height
    first, last = (jnp.clip(bound[group] - start, 0, height) for bound in (starts, ends))
    return jnp.stack([start, group, first, last, jnp.broadcast_to(count, tile.shape)], axis=1)


def padded_rows(R: int, E: int) -> int:
    """P: enough columns for R rows in E groups of any sizes, aligned to steps."""
    return (R // STEP + E) * STEP


def step_bounds(group_sizes_e: jax.Array) -> jax.Array:
    """The first and the end column of each group aligned to steps: int32 [E, 2]."""
    sizes = group_sizes_e.astype(jnp.int32)
    starts = (running_sum(pl.cdiv(sizes, STEP)) - pl.cdiv(sizes, STEP)) * STEP
    return jnp.stack([starts, starts + sizes], axis=1)


def steps(group_sizes_e: jax.Array, P: int) -> jax.Array:
    """For each step of P columns, the row in its first column and its number of rows: int32 [P / STEP, 2].

    Steps without rows are last.
    """
    sizes = group_sizes_e.astype(jnp.int32)
    counts = pl.cdiv(sizes, STEP)
    ends, last_steps = running_sum(sizes), running_sum(counts)
    step = jnp.arange(P // STEP, dtype=jnp.int32)
    group = jnp.sum(step[:, None] >= last_steps[None, :], axis=1, dtype=jnp.int32)
    starts, first_steps, ends = (jnp.append(a, 0) for a in (ends - sizes, last_steps - counts, ends))
    start = starts[group] + (step - first_steps[group]) * STEP
    return jnp.stack([start, jnp.clip(ends[group] - start, 0, STEP)], axis=1)


def running_sum(sizes: jax.Array) -> jax.Array:
    """The cumulative sum of a few integers [E], in int32, as a masked sum, which XLA fuses; it does not fuse cumsum."""
    index = jnp.arange(sizes.shape[0])
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], sizes[None, :], 0), axis=1, dtype=jnp.int32)


def group_of_rows(group_sizes_e: jax.Array, R: int) -> jax.Array:
    """The group of each of R rows: int32 [R], E after the last group."""
    return jnp.sum(jnp.arange(R)[:, None] >= running_sum(group_sizes_e), axis=1, dtype=jnp.int32)


def bias_of_rows(bias_en: jax.Array, rows_rn: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """The bias of each row's group, `[R, N]` in the rows' dtype; zeros after the last group."""
    group = group_of_rows(group_sizes_e, len(rows_rn))
    return bias_en.astype(rows_rn.dtype).at[group].get(mode="fill", fill_value=0)
