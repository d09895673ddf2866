"""Matmuls of groups of rows, each group with its own weights, on any GPU since Ampere (Pallas on Triton).

The contract of `grouped_matmul`, whose other kernels are for Hopper alone; jax 0.11 calls Pallas's Triton backend
deprecated. A program of `matmul` has a tile of rows of one group, and is one dense product with the weights of that
group. A program of `weight_gradient` has a tile of one group's weights, and sums over the group's rows. Rows of other
groups in a tile are computed or masked, never stored. Widths of any size are allowed; multiples of 64 need no masks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.grouped_rows import row_tiles, running_sum


class GroupedTiling(NamedTuple):
    """The division of a kernel's work: a tile of the result, a step of the sum, warps of a program, copies in flight.

    Programs visit panels of `panel` tiles of rows, each down its rows first, so that both operands stay in the L2
    cache.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    panel: int = 8

    @property
    def shared_memory(self) -> int:
        """Bytes of the operands in flight, of 16-bit numbers."""
        return 2 * self.stages * self.depth * (self.rows + self.columns)


# The first that fits is the fastest on an H100: 620 to 640, 540 to 580 and 490 to 515 TFLOP/s at Mixtral's widths.
TILINGS = GroupedTiling(128, 256, 64, 8, 4), GroupedTiling(128, 256, 64, 8, 3), GroupedTiling(128, 128, 64, 8, 3)


# KiB that a block of threads can have, by compute capability without the point (CUDA C++ Programming Guide)
LEAST, BLOCKS = 99, {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}


def shared_memory() -> int:
    """Bytes that a block can have on the GPU that is traced for; those of the smallest since Ampere if not known."""
    from megajax.jax_internals import gpu_info

    try:
        capability = gpu_info.get_gpu_info().compute_capability
    except ValueError:  # no GPU, as for kernels that are interpreted
        capability = 0
    return BLOCKS.get(capability, LEAST) * 1024


def chosen_tiling() -> GroupedTiling:
    return next(tiling for tiling in TILINGS if tiling.shared_memory <= shared_memory())


def matmul(
    x_tk: jax.Array,
    w: jax.Array,
    group_sizes_e: jax.Array,
    *,
    transpose_w: bool = False,
    tiling: GroupedTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Rows of x [T, K] times the w of their group, [E, K, N] or with `transpose_w` [E, N, K] -> [T, N] in x's dtype.

    Rows after the last group are zeros, even if x has NaN there.
    """
    tiling = tiling or chosen_tiling()
    (T, K), E, N = x_tk.shape, w.shape[0], w.shape[1 if transpose_w else 2]
    rows, columns, depth = tiling.rows, tiling.columns, tiling.depth
    tiles = row_tiles(group_sizes_e, T, rows, alignment=1)

    def grouped_matmul(tiles_ref, x_ref, w_ref, out_ref) -> None:
        row_tile, column_tile = _panels(pl.program_id(0), tiles.shape[0], pl.cdiv(N, columns), tiling.panel)
        start, group, first, last = (tiles_ref[row_tile, field] for field in range(4))
        # A tile that passes the last row starts before its group instead, so that no load needs a mask of rows.
        earlier = jnp.maximum(start + rows - x_ref.shape[0], 0)
        start, first, last = start - earlier, first + earlier, last + earlier
        column = column_tile * columns
        owner = jnp.minimum(group, E - 1)  # that of no rows is not read

        def step(index, acc, masked=False):
            at = index * depth
            x_mask = _before(at, depth, K, 1, rows) if masked else None
            w_mask = _both(
                _before(at, depth, K, int(transpose_w), columns) if masked else None,
                None if N % columns == 0 else _before(column, columns, N, int(not transpose_w), depth),
            )
            x = _load(x_ref.at[pl.ds(start, rows), pl.ds(at, depth)], x_mask)
            down, across = pl.ds(at, depth), pl.ds(column, columns)
            w_tile = _load(w_ref.at[owner, across, down] if transpose_w else w_ref.at[owner, down, across], w_mask)
            return acc + _dot(x, w_tile, 1, int(transpose_w))

        @pl.when(first < last)
        def _some_rows():
            acc = jnp.zeros((rows, columns), jnp.float32)
            acc = lax.fori_loop(jnp.int32(0), jnp.where(group < E, jnp.int32(K // depth), jnp.int32(0)), step, acc)
            if K % depth:
                acc = jnp.where(group < E, step(jnp.int32(K // depth), acc, masked=True), acc)
            index = lax.iota(jnp.int32, rows)
            mask = jnp.broadcast_to(((index >= first) & (index < last))[:, None], (rows, columns))
            mask = _both(mask, None if N % columns == 0 else _before(column, columns, N, 1, rows))
            plgpu.store(out_ref.at[pl.ds(start, rows), pl.ds(column, columns)], acc.astype(out_ref.dtype), mask=mask)

    out = jax.ShapeDtypeStruct((T, N), x_tk.dtype)
    call = _launch(grouped_matmul, tiles.shape[0] * pl.cdiv(N, columns), out, tiling, interpret)
    x_tk = x_tk if T >= rows else jnp.pad(x_tk, ((0, rows - T), (0, 0)))
    return call(tiles, x_tk, w.astype(x_tk.dtype))


def weight_gradient(
    x_tm: jax.Array,
    dy_tn: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: GroupedTiling | None = None,
    interpret: bool = False,
) -> jax.Array:
    """x_eᵀ dy_e over the rows of each group: x [T, M] and dy [T, N] -> [E, M, N] in `dtype`; zeros for empty groups.

    Rows after the last group may hold anything.
    """
    tiling = tiling or chosen_tiling()
    E, M, N = group_sizes_e.shape[0], x_tm.shape[1], dy_tn.shape[1]
    rows, columns, depth = tiling.rows, tiling.columns, tiling.depth
    sizes = group_sizes_e.astype(jnp.int32)
    ends = running_sum(sizes)
    down, across = pl.cdiv(M, rows), pl.cdiv(N, columns)

    def grouped_weight_gradient(bounds_ref, x_ref, dy_ref, out_ref) -> None:
        group = lax.div(pl.program_id(0), jnp.int32(down * across))
        row_tile, column_tile = _panels(lax.rem(pl.program_id(0), jnp.int32(down * across)), down, across, tiling.panel)
        start, end = bounds_ref[group, 0], bounds_ref[group, 1]
        row, column = row_tile * rows, column_tile * columns
        x_inside = None if M % rows == 0 else _before(row, rows, M, 1, depth)
        dy_inside = None if N % columns == 0 else _before(column, columns, N, 1, depth)

        def step(index, acc, masked=False):
            at = start + index * depth
            x_mask = _both(_before(at, depth, end, 0, rows) if masked else None, x_inside)
            dy_mask = _both(_before(at, depth, end, 0, columns) if masked else None, dy_inside)
            x = _load(x_ref.at[pl.ds(at, depth), pl.ds(row, rows)], x_mask)
            return acc + _dot(x, _load(dy_ref.at[pl.ds(at, depth), pl.ds(column, columns)], dy_mask), 0, 0)

        whole = lax.div(end - start, jnp.int32(depth))
        acc = lax.fori_loop(jnp.int32(0), whole, step, jnp.zeros((rows, columns), jnp.float32))
        acc = step(whole, acc, masked=True)
        mask = _both(
            None if M % rows == 0 else _before(row, rows, M, 0, columns),
            None if N % columns == 0 else _before(column, columns, N, 1, rows),
        )
        plgpu.store(out_ref.at[group, pl.ds(row, rows), pl.ds(column, columns)], acc.astype(dtype), mask=mask)

    out = jax.ShapeDtypeStruct((E, M, N), dtype)
    call = _launch(grouped_weight_gradient, E * down * across, out, tiling, interpret)
    return call(jnp.stack([ends - sizes, ends], axis=1), x_tm, dy_tn)


def _launch(
    kernel: Callable, programs: int, out: jax.ShapeDtypeStruct, tiling: GroupedTiling, interpret: bool
) -> Callable:
    return pl.pallas_call(
        kernel,
        grid=(programs,),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
        interpret=interpret,
        name=kernel.__name__,
    )


def _panels(index: jax.Array, down: int, across: int, panel: int) -> tuple[jax.Array, jax.Array]:
    """The (row, column) of a tile: panels of `panel` rows, each down its rows first."""
    size = jnp.int32(panel * across)
    first = lax.div(index, size) * panel
    height = jnp.minimum(down - first, panel)
    inside = lax.rem(index, size)
    return first + lax.rem(inside, height), lax.div(inside, height)


def _dot(a: jax.Array, b: jax.Array, axis_of_a: int, axis_of_b: int) -> jax.Array:
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0)


def _before(start: Any, count: int, end: Any, axis: int, others: int) -> jax.Array:
    """Whether `start` and the following indices along `axis` are before `end`, for each of `others`."""
    shape = (count, others) if axis == 0 else (others, count)
    return start + lax.broadcasted_iota(jnp.int32, shape, axis) < end


def _both(one: jax.Array | None, other: jax.Array | None) -> jax.Array | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other
