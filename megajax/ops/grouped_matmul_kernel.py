"""Matmuls of groups of rows, each group with its own weights, in BF16, FP16 or FP8 on Hopper GPUs (Pallas, Mosaic GPU).

All kernels are loops of `grouped_matmul_block` over tiles. A tile of `matmul` has rows of one group only. A tile of
`weight_gradient` is a part of one group's weights, summed over the group's rows.

TMA reads rows from a multiple of 8 on, the height of a swizzled tile. So a tile may start up to 7 rows before its group
and end after it. `matmul` does not store rows of other groups; `weight_gradient` sets them to zero.

FP8 operands must have the summed dimension last. So `fp8_matmul` takes only weights [E, N, K], and
`fp8_weight_gradient` takes transposes in which each group starts at a step of the sum (`grouped_rows`). E4M3 and E5M2
may be mixed. Sums stay in the tensor cores' accumulator, which keeps fewer bits of FP8 products than FP32 (cuBLASLt's
"fast accumulation"); they are scaled in FP32 before they are rounded.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.grouped_matmul_block import STORE_ROWS, SWIZZLE, MatmulTiling, ThreadBlock, launch
from megajax.ops.grouped_rows import ALIGNMENT, STEP, row_tiles, running_sum, step_bounds

COLUMNS = 64  # the widths of operands and of results are multiples of this
MULTIPROCESSORS = 132  # of H100 SXM, H200 and GH200
TILING = MatmulTiling()


def matmul(
    x_tk: jax.Array,
    w: jax.Array,
    group_sizes_e: jax.Array,
    *,
    transpose_w: bool = False,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """Rows of x [T, K] times the w of their group, [E, K, N] or with `transpose_w` [E, N, K] -> [T, N] in x's dtype.

    Rows after the last group are zeros. `blocks` is the number of multiprocessors to use.
    """

    def kernel(tiles_ref, x_ref, w_ref, out_ref, *memory) -> None:
        ThreadBlock(tiling, *memory).run(GroupedRows(tiling, None, transpose_w, tiles_ref, x_ref, w_ref, out_ref))

    T, N = x_tk.shape[0], w.shape[1 if transpose_w else 2]
    depth, w = _depth(x_tk.dtype), w.astype(x_tk.dtype)
    a = jax.ShapeDtypeStruct((tiling.rows, depth), x_tk.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, depth) if transpose_w else (depth, tiling.block_cols), w.dtype)
    out = jax.ShapeDtypeStruct((T, N), x_tk.dtype)
    call = launch(kernel, "grouped_matmul", tiling, (a, b), out, blocks, interpret)
    return call(row_tiles(group_sizes_e, T, tiling.rows), _padded(x_tk), w)


def fp8_matmul(
    x_tk: jax.Array,
    w_enk: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    rows: int | None = None,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """Rows of x [T, K] times the w [E, N, K] of their group, both in FP8, times a scalar -> [T, N] in `dtype`.

    Rows after the last group are zeros, even if x has NaN there. `rows`: the number of result rows, if fewer than T.
    """

    def kernel(tiles_ref, scale_ref, x_ref, w_ref, out_ref, *memory) -> None:
        ThreadBlock(tiling, *memory).run(GroupedRows(tiling, scale_ref[0], True, tiles_ref, x_ref, w_ref, out_ref))

    T, depth = x_tk.shape[0] if rows is None else rows, _depth(x_tk.dtype, x_tk.shape[1])
    tiling = replace(tiling, stages=tiling.stages * STEP // depth)
    a = jax.ShapeDtypeStruct((tiling.rows, depth), x_tk.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, depth), w_enk.dtype)
    out = jax.ShapeDtypeStruct((T, w_enk.shape[1]), dtype)
    call = launch(kernel, "grouped_matmul_fp8", tiling, (a, b), out, blocks, interpret)
    return call(row_tiles(group_sizes_e, T, tiling.rows), _scalar(inverse_scale), _padded(x_tk), w_enk)


def weight_gradient(
    x_tm: jax.Array,
    dy_tn: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """x_eᵀ dy_e over the rows of each group: x [T, M] and dy [T, N] -> [E, M, N] in `dtype`; zeros for empty groups.

    Rows after the last group do not count, but must be finite.
    """

    def kernel(bounds_ref, x_ref, dy_ref, out_ref, *memory) -> None:
        ThreadBlock(tiling, *memory).run(_Weights(tiling, None, bounds_ref, x_ref, dy_ref, out_ref))

    E, M, N = group_sizes_e.shape[0], x_tm.shape[1], dy_tn.shape[1]
    sizes = group_sizes_e.astype(jnp.int32)
    ends, depth = running_sum(sizes), _depth(x_tm.dtype)
    a = jax.ShapeDtypeStruct((depth, tiling.rows), x_tm.dtype)
    b = jax.ShapeDtypeStruct((depth, tiling.block_cols), dy_tn.dtype)
    out = jax.ShapeDtypeStruct((E, M, N), dtype)
    call = launch(kernel, "grouped_weight_gradient", tiling, (a, b), out, blocks, interpret)
    return call(jnp.stack([ends - sizes, ends], axis=1), _padded(x_tm), _padded(dy_tn))


def fp8_weight_gradient(
    x_mp: jax.Array,
    dy_np: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """x_e dy_eᵀ over the columns of each group, times a scalar: x [M, P] and dy [N, P] in FP8 -> [E, M, N] in `dtype`.

    Groups are aligned to steps (`grouped_rows`), with zeros after each. Zeros for empty groups.
    """

    def kernel(bounds_ref, scale_ref, x_ref, dy_ref, out_ref, *memory) -> None:
        ThreadBlock(tiling, *memory).run(GroupedTransposes(tiling, scale_ref[0], bounds_ref, x_ref, dy_ref, out_ref))

    assert _depth(x_mp.dtype) == STEP
    a = jax.ShapeDtypeStruct((tiling.rows, STEP), x_mp.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, STEP), dy_np.dtype)
    out = jax.ShapeDtypeStruct((group_sizes_e.shape[0], x_mp.shape[0], dy_np.shape[0]), dtype)
    call = launch(kernel, "grouped_weight_gradient_fp8", tiling, (a, b), out, blocks, interpret)
    return call(step_bounds(group_sizes_e), _scalar(inverse_scale), x_mp, dy_np)


def _padded(x_tk: jax.Array) -> jax.Array:
    padding = -x_tk.shape[0] % ALIGNMENT
    return jnp.pad(x_tk, ((0, padding), (0, 0))) if padding else x_tk


def _scalar(scale: jax.Array) -> jax.Array:
    return scale.astype(jnp.float32).reshape(1)


def _depth(dtype: Any, width: int = 0) -> int:
    """The depth of one step of a sum over `width` numbers, if it is known: half steps if it is no whole steps."""
    depth = SWIZZLE // jnp.dtype(dtype).itemsize
    return depth // 2 if width % depth else depth


@dataclass(frozen=True)
class GroupedRows:
    """Rows of x times the w of their group."""

    tiling: MatmulTiling
    scale: Any
    transpose_w: bool
    tiles: Any
    x: Any
    w: Any
    out: Any

    def count(self):
        return self.tiles[0, 4], pl.cdiv(self.out.shape[1], self.tiling.block_cols)

    def tile(self, index, col_tiles):
        row_tile, col_tile = plgpu.planar_snake(index, (self.tiles[0, 4], col_tiles), 0, self.tiling.panel)
        return tuple(self.tiles[row_tile, field] for field in range(4)), col_tile

    @property
    def depth(self) -> int:
        return _depth(self.x.dtype, self.x.shape[1])

    def steps(self, tile):
        (_, group, first, last), _ = tile
        return jnp.where((group < self.w.shape[0]) & (first < last), self.x.shape[1] // self.depth, 0)

    def load(self, tile, step, a, b, arrived):
        (start, group, _, _), col_tile = tile
        down = pl.ds(pl.multiple_of(start, ALIGNMENT), self.tiling.rows)
        depth = pl.ds(step * self.depth, self.depth)
        across = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x.at[down, depth], a, arrived)
        w = self.w.at[group]
        plgpu.copy_gmem_to_smem(w.at[across, depth] if self.transpose_w else w.at[depth, across], b, arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        own = self.tiling.own(wg)
        plgpu.wgmma(acc, a, b.at[own].transpose((1, 0)) if self.transpose_w else b.at[:, own])

    def store(self, tile, row, col, part):
        (start, _, first, last), col_tile = tile
        first, last = (jnp.clip(bound - row, 0, STORE_ROWS) for bound in (first, last))
        across = pl.ds(col_tile * self.tiling.block_cols + col, part.shape[1])
        # A TMA copy has a constant height, so the rows are copied in pieces whose heights are powers of two.
        height, begin = STORE_ROWS, first
        while height:
            chosen = jnp.bitwise_and(last - first, height)

            @pl.when(chosen != 0)
            def _copy(begin=begin, height=height):
                destination = self.out.at[pl.ds(start + row + begin, height), across]
                plgpu.copy_smem_to_gmem(part.at[pl.ds(begin, height)], destination, commit_group=False)

            begin, height = begin + chosen, height // 2


@dataclass(frozen=True)
class _Weights:
    """x_eᵀ dy_e of each group."""

    tiling: MatmulTiling
    scale: Any
    bounds: Any
    x: Any
    dy: Any
    out: Any

    def count(self):
        E, M, N = self.out.shape
        return E * pl.cdiv(M, self.tiling.rows), pl.cdiv(N, self.tiling.block_cols)

    def tile(self, index, col_tiles):
        row_tiles = pl.cdiv(self.out.shape[1], self.tiling.rows)
        size = jnp.int32(row_tiles * col_tiles)
        group, index = lax.div(index, size), lax.rem(index, size)
        row_tile, col_tile = plgpu.planar_snake(index, (row_tiles, col_tiles), 0, self.tiling.panel)
        start, end = self.bounds[group, 0], self.bounds[group, 1]
        return (group, row_tile, lax.div(start, ALIGNMENT) * ALIGNMENT, start, end), col_tile

    def steps(self, tile):
        (_, _, aligned, start, end), _ = tile
        depth = _depth(self.x.dtype)
        return jnp.where(start < end, lax.div(end - aligned + (depth - 1), depth), 0)

    def load(self, tile, step, a, b, arrived):
        (_, row_tile, aligned, _, _), col_tile = tile
        depth = _depth(self.x.dtype)
        down = pl.ds(pl.multiple_of(aligned + step * depth, ALIGNMENT), depth)
        across_x = pl.ds(row_tile * self.tiling.rows, self.tiling.rows)
        across_dy = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x.at[down, across_x], a, arrived)
        plgpu.copy_gmem_to_smem(self.dy.at[down, across_dy], b, arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        (_, _, aligned, start, end), _ = tile
        b = b.at[:, self.tiling.own(wg)]
        depth = _depth(self.x.dtype)
        begin = aligned + step * depth

        @pl.when((begin < start) | (begin + depth > end))
        def _others():
            # In dy: each warpgroup reads its own columns of it, while both read all of x.
            _keep_rows(b, start - begin, end - begin)

        plgpu.wgmma(acc, a.transpose((1, 0)), b)

    def store(self, tile, row, col, part):
        (group, row_tile, _, _, _), col_tile = tile
        down = pl.ds(row_tile * self.tiling.rows + row, part.shape[0])
        across = pl.ds(col_tile * self.tiling.block_cols + col, part.shape[1])
        plgpu.copy_smem_to_gmem(part, self.out.at[group, down, across], commit_group=False)


@dataclass(frozen=True)
class GroupedTransposes(_Weights):
    """x_e dy_eᵀ of each group: x and dy are transposed, and their groups are aligned to steps."""

    def load(self, tile, step, a, b, arrived):
        (_, row_tile, start, _, _), col_tile = tile
        depth = pl.ds(pl.multiple_of(start + step * STEP, STEP), STEP)
        down_x = pl.ds(row_tile * self.tiling.rows, self.tiling.rows)
        down_dy = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x.at[down_x, depth], a, arrived)
        plgpu.copy_gmem_to_smem(self.dy.at[down_dy, depth], b, arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        plgpu.wgmma(acc, a, b.at[self.tiling.own(wg)].transpose((1, 0)))


def _keep_rows(tile: Any, first: jax.Array, end: jax.Array) -> None:
    """Sets the rows of a tile in shared memory outside [first, end) to zero."""
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tile.shape, 0), plgpu.Layout.WGMMA)
    values = tile[...]
    tile[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
    plgpu.commit_smem()
