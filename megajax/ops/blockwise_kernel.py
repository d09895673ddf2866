"""Matmuls of FP8 operands with scales of blocks, on Hopper GPUs (Pallas, Mosaic GPU).

An operand [rows, K] has one scale for each 128 numbers of K, or for 128 x 128 numbers. The products of each 128 numbers
are summed by the tensor cores from zero, then scaled and added to the sum in FP32 registers, as DeepSeek-V3 does it
(arXiv 2412.19437, section 3.3.2). The two computing warpgroups of a block take turns: one scales and adds while the
tensor cores compute the other one's products.

Rows of experts are in groups, as in `grouped_matmul_kernel`, with weights of their own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.barriers import not_before
from megajax.ops.blockwise_fp8_kernels import ScaledOperand
from megajax.ops.grouped_matmul_block import COMPUTE, MatmulTiling, ThreadBlock, launch
from megajax.ops.grouped_matmul_kernel import MULTIPROCESSORS, GroupedRows, GroupedTransposes
from megajax.ops.grouped_rows import ALIGNMENT, STEP, row_tiles, step_bounds

BLOCK = 128  # numbers of K with one scale, and a step of the sum
HEIGHT = 64  # rows that are multiplied at a time
WIDTH = 64  # columns of a sum in registers and of a store buffer at most
PER_ROW, PER_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
TILING = MatmulTiling(stages=3, slots=4)  # the fastest, or nearly, on an H100


# It traces and lowers the kernel of equal products once.
@partial(jax.jit, static_argnames=("dtype", "tiling", "blocks", "interpret"))
def matmul(
    a_mk: ScaledOperand,
    b_nk: ScaledOperand,
    dtype: Any,
    *,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """`a @ b.T` of E4M3 [M, K] and [N, K] → [M, N] in `dtype`.

    The scales are [K / 128, M], and [K / 128, N] or, of blocks of 128 x 128, [K / 128, N / 128]. K is a multiple of
    128, M and N are multiples of 16; the result is copied if N is none of 64.
    """
    M, N = len(a_mk.values), len(b_nk.values)
    of_columns = b_nk.scales.shape[1] == N
    tiling = replace(tiling, loads=3 + of_columns)

    def kernel(a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref, *memory) -> None:
        work: Any = _Product(tiling, a_ref, a_scales_ref, b_ref, b_scales_ref, out_ref, of_columns)
        _ScaledBlock(tiling, *memory).run(work)

    out = jax.ShapeDtypeStruct((M, pl.cdiv(N, WIDTH) * WIDTH), dtype)  # TMA stores whole buffers
    call = _launch(kernel, "blockwise_matmul", tiling, out, blocks, interpret)
    return call(*a_mk, *b_nk)[:, :N]


@partial(jax.jit, static_argnames=("dtype", "rows", "tiling", "blocks", "interpret"))
def grouped_matmul(
    x_rk: ScaledOperand,
    w_enk: ScaledOperand,
    group_sizes_e: jax.Array,
    dtype: Any,
    rows: int,
    *,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """Rows of x [R, K] times the w [E, N, K] of their group, both E4M3 → [rows, N] in `dtype`.

    The scales are [K / 128, R] and [E, K / 128, N / 128]. R is a multiple of 8, K and N are multiples of 128.
    Rows after the last group are zeros, even if x has NaN there.
    """
    tiling = replace(tiling, loads=3)

    def kernel(tiles_ref, x_ref, x_scales_ref, w_ref, w_scales_ref, out_ref, *memory) -> None:
        tensors = tiles_ref, x_ref, w_ref, out_ref, x_scales_ref, w_scales_ref
        work: Any = _GroupedProduct(tiling, None, True, *tensors)
        _ScaledBlock(tiling, *memory).run(work)

    out = jax.ShapeDtypeStruct((rows, w_enk.values.shape[1]), dtype)
    call = _launch(kernel, "grouped_matmul_blockwise", tiling, out, blocks, interpret)
    return call(row_tiles(group_sizes_e, rows, tiling.rows), *x_rk, *w_enk)


@partial(jax.jit, static_argnames=("dtype", "tiling", "blocks", "interpret"))
def grouped_weight_gradient(
    x_mp: ScaledOperand,
    dy_np: ScaledOperand,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: MatmulTiling = TILING,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """x_e dy_eᵀ over the columns of each group: x [M, P] and dy [N, P] in E4M3 → [E, M, N] in `dtype`.

    The scales are [P / 128, M] and [P / 128, N]. Groups are aligned to steps (`grouped_rows`), with zeros after
    each; M and N are multiples of 128. Zeros for empty groups.
    """
    tiling = replace(tiling, loads=4)

    def kernel(bounds_ref, x_ref, x_scales_ref, dy_ref, dy_scales_ref, out_ref, *memory) -> None:
        tensors = bounds_ref, x_ref, dy_ref, out_ref, x_scales_ref, dy_scales_ref
        work: Any = _GroupedGradient(tiling, None, *tensors)
        _ScaledBlock(tiling, *memory).run(work)

    out = jax.ShapeDtypeStruct((len(group_sizes_e), len(x_mp.values), len(dy_np.values)), dtype)
    call = _launch(kernel, "grouped_weight_gradient_blockwise", tiling, out, blocks, interpret)
    return call(step_bounds(group_sizes_e), *x_mp, *dy_np)


def _launch(
    kernel: Callable, name: str, tiling: MatmulTiling, out: jax.ShapeDtypeStruct, blocks: int, interpret: Any
) -> Callable:
    """The kernel, with the memory of a `_ScaledBlock`."""
    operands = [jax.ShapeDtypeStruct((size, BLOCK), jnp.float8_e4m3fn) for size in (tiling.rows, tiling.block_cols)]
    more = (
        plgpu.SMEM((tiling.stages, tiling.rows), jnp.float32),
        plgpu.SMEM((tiling.stages, tiling.block_cols), jnp.float32),
        plgpu.Barrier(num_arrivals=COMPUTE),
    )
    return launch(kernel, name, tiling, (operands[0], operands[1]), out, blocks, interpret, more)


@dataclass(frozen=True)
class _ScaledBlock(ThreadBlock):
    """A block of threads that scales the products of each step before it adds them."""

    a_scales: Any  # rings of the steps' scales
    b_scales: Any  # unused with one scale for a warpgroup's columns
    turn: Any

    def _load_step(self, work: Any, tile: tuple, step: jax.Array, slot: jax.Array) -> None:
        buffers = (ring.at[slot] for ring in (self.a, self.b, self.a_scales, self.b_scales))
        work.load(tile, step, *buffers, self.arrived.at[slot])

    def _pass_turn(self, one: bool | jax.Array = True) -> None:
        """Both warpgroups arrive and wait; the second also before its first product, the first also after its last."""

        @pl.when(one)
        def _():
            plgpu.barrier_arrive(self.turn)
            plgpu.barrier_wait(self.turn)

    def _compute(self, work: Any, wg: jax.Array) -> None:
        tiling, stages = self.tiling, self.tiling.stages
        rows, cols = range(0, tiling.rows, HEIGHT), range(0, tiling.cols, WIDTH)

        def compute_tile(tile, done):
            def add_step(step, carry):
                done, sums = carry
                slot = lax.rem(done, stages)
                of_all = work.scale_of_columns(tile, step, wg)
                plgpu.barrier_wait(self.arrived.at[slot])
                sums = [self._plus_product(slot, row, own, of_all, wg) for row, own in zip(rows, sums, strict=True)]
                plgpu.barrier_arrive(self.consumed.at[slot])
                return done + 1, sums

            zero = plgpu.layout_cast(jnp.zeros((HEIGHT, WIDTH), jnp.float32), plgpu.Layout.WGMMA)
            done, sums = lax.fori_loop(0, work.steps(tile), add_step, (done, [[zero for _ in cols] for _ in rows]))
            self._store_sums(work, tile, sums, wg)
            return done

        self._pass_turn(wg == 1)
        self._over_tiles(work, compute_tile)
        self._pass_turn(wg == 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _plus_product(self, slot: jax.Array, row: int, sums: list, of_all: Any, wg: jax.Array) -> list[jax.Array]:
        """The sums of HEIGHT rows from `row` on, WIDTH columns each, plus the scaled products of one step."""
        rows, own = pl.ds(row, HEIGHT), self.tiling.own(wg)
        by_row = plgpu.load(self.a_scales.at[slot, rows], layout=PER_ROW)

        def product(ref):
            plgpu.wgmma(ref, self.a.at[slot, rows], self.b.at[slot, own].transpose((1, 0)))
            self._pass_turn()
            return ref[...]

        products = pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((HEIGHT, self.tiling.cols)))
        found = []
        for index, total in enumerate(sums):
            part = products[:, index * WIDTH : (index + 1) * WIDTH]
            if of_all is None:
                columns = pl.ds(wg * self.tiling.cols + index * WIDTH, WIDTH)
                by_column = plgpu.load(self.b_scales.at[slot, columns], layout=PER_COLUMN)
                part, scale = part * lax.broadcast_in_dim(by_column, part.shape, [1]), by_row
            else:
                scale = by_row * of_all
            found.append(total + part * lax.broadcast_in_dim(scale, part.shape, [0]))
        found = list(not_before(found))  # else the compiler may move it after the turn
        self._pass_turn()
        return found

    def _store_sums(self, work: Any, tile: tuple, sums: list, wg: jax.Array) -> None:
        """Copies a warpgroup's results to memory, part by part."""
        width, slots = self.parts.shape[-1], self.tiling.slots
        corners = [(row, col) for row in range(len(sums)) for col in range(0, self.tiling.cols, width)]
        for index, (row, col) in enumerate(corners):
            part = self.parts.at[wg, index % slots]
            # The slot's previous copy; the last tile's may be a later one if it ended at another slot.
            plgpu.wait_smem_to_gmem(slots - 1 if len(corners) % slots == 0 else 0, wait_read_only=True)
            values = sums[row][col // WIDTH].astype(part.dtype)
            part[...] = values[:, col % WIDTH : col % WIDTH + width]
            plgpu.commit_smem()
            work.store(tile, row * HEIGHT, wg * self.tiling.cols + col, part)
            plgpu.commit_smem_to_gmem_group()


@dataclass(frozen=True)
class _Product:
    """The tiles of one `a @ b.T`: (their first row, their first column)."""

    tiling: MatmulTiling
    a: Any
    a_scales: Any
    b: Any
    b_scales: Any
    out: Any
    of_columns: bool  # each column of the result has scales of its own

    def count(self):
        return pl.cdiv(self.out.shape[0], self.tiling.rows), pl.cdiv(self.out.shape[1], self.tiling.block_cols)

    def tile(self, index, col_tiles):
        row, col = plgpu.planar_snake(index, self.count(), 0, self.tiling.panel)
        return row * self.tiling.rows, col * self.tiling.block_cols

    def steps(self, tile):
        return pl.cdiv(self.a.shape[1], BLOCK)

    def load(self, tile, step, a, b, a_scales, b_scales, arrived):
        row, col = tile
        depth = pl.ds(step * BLOCK, BLOCK)
        rows, cols = pl.ds(row, self.tiling.rows), pl.ds(col, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.a.at[rows, depth], a, arrived)
        plgpu.copy_gmem_to_smem(self.b.at[cols, depth], b, arrived)
        plgpu.copy_gmem_to_smem(self.a_scales.at[step, rows], a_scales, arrived)
        if self.of_columns:
            plgpu.copy_gmem_to_smem(self.b_scales.at[step, cols], b_scales, arrived)

    def scale_of_columns(self, tile, step, wg):
        """The scale of all columns of a warpgroup, if they have only one."""
        if self.of_columns:
            return None
        square = lax.div(tile[1] + wg * self.tiling.cols, BLOCK)
        return self.b_scales[step, jnp.minimum(square, self.b_scales.shape[1] - 1)]

    def store(self, tile, row, col, part):
        rows, cols = part.shape
        corner = self.out.at[pl.ds(tile[0] + row, rows), pl.ds(tile[1] + col, cols)]
        plgpu.copy_smem_to_gmem(part, corner, commit_group=False)


@dataclass(frozen=True)
class _GroupedProduct(GroupedRows):
    """Rows of x times the w of their group, with scales."""

    x_scales: Any
    w_scales: Any

    def load(self, tile, step, a, b, a_scales, b_scales, arrived):
        super().load(tile, step, a, b, arrived)
        rows = pl.ds(pl.multiple_of(tile[0][0], ALIGNMENT), self.tiling.rows)
        plgpu.copy_gmem_to_smem(self.x_scales.at[step, rows], a_scales, arrived)

    def scale_of_columns(self, tile, step, wg):
        (_, group, _, _), col_tile = tile
        square = lax.div(col_tile * self.tiling.block_cols + wg * self.tiling.cols, BLOCK)
        return self.w_scales[group, step, jnp.minimum(square, self.w_scales.shape[2] - 1)]


@dataclass(frozen=True)
class _GroupedGradient(GroupedTransposes):
    """x_e dy_eᵀ of each group, with scales."""

    x_scales: Any
    dy_scales: Any

    def load(self, tile, step, a, b, a_scales, b_scales, arrived):
        super().load(tile, step, a, b, arrived)
        (_, row_tile, start, _, _), col_tile = tile
        step = lax.div(start, STEP) + step
        rows = pl.ds(row_tile * self.tiling.rows, self.tiling.rows)
        cols = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x_scales.at[step, rows], a_scales, arrived)
        plgpu.copy_gmem_to_smem(self.dy_scales.at[step, cols], b_scales, arrived)

    def scale_of_columns(self, tile, step, wg):
        return None
