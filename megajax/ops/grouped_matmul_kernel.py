"""Matmuls of groups of rows, each group with its own weights, in BF16, FP16 or FP8 on Hopper GPUs (Pallas, Mosaic GPU).

Kernels of one shape. A persistent block has a warpgroup that loads tiles of both operands into a ring of shared memory,
and two that multiply them, keep the sums in registers and store the results, while the next tile's operands are being
loaded; all copies are TMA's. `matmul` walks over tiles of the result's rows, each with rows of one group alone;
`weight_gradient` over tiles of each group's weights, summing along the group's rows.

TMA reads rows from a multiple of 8 on, the height of a swizzled tile: a tile may thus begin up to 7 rows before its
group, and end after it. Rows of other groups are not stored by `matmul`, and are zeroed by `weight_gradient`.

FP8 operands must have the dimension that is summed over last. So `matmul` takes weights [E, N, K] alone, and
`fp8_weight_gradient` transposes in which groups begin where a step of the sum does (`grouped_rows`).
E4M3 and E5M2 may meet. Sums stay in the tensor cores' accumulator, which keeps fewer bits than FP32 of FP8 products
(cuBLASLt's "fast accumulation"); they are scaled in FP32 before they are rounded.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.grouped_rows import ALIGNMENT, STEP, row_tiles, running_sum, step_bounds

COLUMNS = 64  # what the width of 16-bit operands and of results is a multiple of
MULTIPROCESSORS = 132  # of H100 SXM, H200 and GH200
COMPUTE = 2  # warpgroups that multiply; the one after them loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232
SWIZZLE = 128  # bytes: the depth of a step of the sum, whose operands are one stage of the ring
STORE_ROWS = 64  # rows of a part of the result on its way through shared memory, SWIZZLE bytes wide


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work. The default was fastest on an H200, smaller ones are for tests.

    A warpgroup has rows × cols of the result, a block twice as many columns. The ring holds so many `stages`; so many
    `slots` a warpgroup has for parts of the result on their way to memory. Tiles are walked in panels of `panel` tiles
    of rows, down each panel first.
    """

    rows: int = 128
    cols: int = 128
    stages: int = 4
    slots: int = 2
    panel: int = 8

    @property
    def block_cols(self) -> int:
        return COMPUTE * self.cols

    def own(self, wg: jax.Array) -> pl.Slice:
        """The columns of warpgroup `wg` in its block's tile."""
        return pl.ds(wg * self.cols, self.cols)


def columns(fp8: bool) -> int:
    """What the width of operands is a multiple of: in FP8, of a whole step of the sum."""
    return STEP if fp8 else COLUMNS


def matmul(
    x_tk: jax.Array,
    w: jax.Array,
    group_sizes_e: jax.Array,
    *,
    transpose_w: bool = False,
    tiling: Tiling = Tiling(),
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """Each group's rows of x [T, K] times its w [E, K, N], or [E, N, K] read transposed -> [T, N] in x's dtype.

    Rows after the last group are zeros. `blocks` is the number of multiprocessors to use.
    """

    def kernel(tiles_ref, x_ref, w_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_Rows(tiling, None, transpose_w, tiles_ref, x_ref, w_ref, out_ref))

    T, N = x_tk.shape[0], w.shape[1 if transpose_w else 2]
    depth, w = _depth(x_tk.dtype), w.astype(x_tk.dtype)
    a = jax.ShapeDtypeStruct((tiling.rows, depth), x_tk.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, depth) if transpose_w else (depth, tiling.block_cols), w.dtype)
    out = jax.ShapeDtypeStruct((T, N), x_tk.dtype)
    call = _kernel(kernel, "grouped_matmul", tiling, a, b, out, blocks, interpret)
    return call(row_tiles(group_sizes_e, T, tiling.rows), _padded(x_tk), w)


def fp8_matmul(
    x_tk: jax.Array,
    w_enk: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    rows: int | None = None,
    tiling: Tiling = Tiling(),
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """Each group's rows of x [T, K] times its w [E, N, K], both in FP8, times a scalar -> [T, N] in `dtype`.

    Rows after the last group are zeros, whatever x has there. `rows`: the result has so many, if fewer than T.
    """

    def kernel(tiles_ref, scale_ref, x_ref, w_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_Rows(tiling, scale_ref[0], True, tiles_ref, x_ref, w_ref, out_ref))

    T, depth = x_tk.shape[0] if rows is None else rows, _depth(x_tk.dtype)
    a = jax.ShapeDtypeStruct((tiling.rows, depth), x_tk.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, depth), w_enk.dtype)
    out = jax.ShapeDtypeStruct((T, w_enk.shape[1]), dtype)
    call = _kernel(kernel, "grouped_matmul_fp8", tiling, a, b, out, blocks, interpret)
    return call(row_tiles(group_sizes_e, T, tiling.rows), _scalar(inverse_scale), _padded(x_tk), w_enk)


def weight_gradient(
    x_tm: jax.Array,
    dy_tn: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: Tiling = Tiling(),
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """x_eᵀ dy_e of every group's rows of x [T, M] and dy [T, N] -> [E, M, N] in `dtype`; empty groups have zeros.

    Rows after the last group count for nothing, but must be finite.
    """

    def kernel(bounds_ref, x_ref, dy_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_Weights(tiling, None, bounds_ref, x_ref, dy_ref, out_ref))

    E, M, N = group_sizes_e.shape[0], x_tm.shape[1], dy_tn.shape[1]
    sizes = group_sizes_e.astype(jnp.int32)
    ends, depth = running_sum(sizes), _depth(x_tm.dtype)
    a = jax.ShapeDtypeStruct((depth, tiling.rows), x_tm.dtype)
    b = jax.ShapeDtypeStruct((depth, tiling.block_cols), dy_tn.dtype)
    out = jax.ShapeDtypeStruct((E, M, N), dtype)
    call = _kernel(kernel, "grouped_weight_gradient", tiling, a, b, out, blocks, interpret)
    return call(jnp.stack([ends - sizes, ends], axis=1), _padded(x_tm), _padded(dy_tn))


def fp8_weight_gradient(
    x_mp: jax.Array,
    dy_np: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    tiling: Tiling = Tiling(),
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """x_e dy_eᵀ of every group's columns of x [M, P] and dy [N, P] in FP8, times a scalar -> [E, M, N] in `dtype`.

    Groups lie in steps, as `grouped_rows` says, with zeros after each; empty ones have zeros.
    """

    def kernel(bounds_ref, scale_ref, x_ref, dy_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_TransposedWeights(tiling, scale_ref[0], bounds_ref, x_ref, dy_ref, out_ref))

    assert _depth(x_mp.dtype) == STEP
    a = jax.ShapeDtypeStruct((tiling.rows, STEP), x_mp.dtype)
    b = jax.ShapeDtypeStruct((tiling.block_cols, STEP), dy_np.dtype)
    out = jax.ShapeDtypeStruct((group_sizes_e.shape[0], x_mp.shape[0], dy_np.shape[0]), dtype)
    call = _kernel(kernel, "grouped_weight_gradient_fp8", tiling, a, b, out, blocks, interpret)
    return call(step_bounds(group_sizes_e), _scalar(inverse_scale), x_mp, dy_np)


def _padded(x_tk: jax.Array) -> jax.Array:
    padding = -x_tk.shape[0] % ALIGNMENT
    return jnp.pad(x_tk, ((0, padding), (0, 0))) if padding else x_tk


def _scalar(scale: jax.Array) -> jax.Array:
    return scale.astype(jnp.float32).reshape(1)


def _depth(dtype: Any) -> int:
    """Of a step of the sum."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


class _Work(Protocol):
    """What a kernel computes, tile by tile; tiles are tuples of scalars."""

    @property
    def scale(self) -> Any:
        """What sums are multiplied by, or None."""
        ...

    def count(self) -> tuple[Any, int]:
        """The rows and columns of all tiles, as if they were one matrix."""
        ...

    def tile(self, index: jax.Array, col_tiles: int) -> tuple:
        """A tile, but for its column, and its column."""
        ...

    def steps(self, tile: tuple) -> Any:
        """The steps of its sum."""
        ...

    def load(self, tile: tuple, step: jax.Array, a: Any, b: Any, arrived: Any) -> None:
        """Begins the copies of one step's operands."""
        ...

    def multiply(self, tile: tuple, step: jax.Array, a: Any, b: Any, acc: Any, wg: jax.Array) -> None:
        """Begins to add a step's product to what a warpgroup has summed."""
        ...

    def store(self, tile: tuple, row: Any, col: Any, part: Any) -> None:
        """Begins the copy of a part of the result, which begins at (row, col) of the tile."""
        ...


@dataclass(frozen=True)
class _Rows:
    """Rows of x times their group's w."""

    tiling: Tiling
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

    def steps(self, tile):
        (_, group, first, last), _ = tile
        steps = pl.cdiv(self.x.shape[1], _depth(self.x.dtype))
        return jnp.where((group < self.w.shape[0]) & (first < last), steps, 0)

    def load(self, tile, step, a, b, arrived):
        (start, group, _, _), col_tile = tile
        down = pl.ds(pl.multiple_of(start, ALIGNMENT), self.tiling.rows)
        depth = _depth(self.x.dtype)
        depth = pl.ds(step * depth, depth)
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
        # TMA's heights are constants: the rows are divided into heights that are powers of two.
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
    """Transposed rows of x times rows of dy, of every group."""

    tiling: Tiling
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
            # Not in the operand that both warpgroups read.
            _keep_rows(b, start - begin, end - begin)

        plgpu.wgmma(acc, a.transpose((1, 0)), b)

    def store(self, tile, row, col, part):
        (group, row_tile, _, _, _), col_tile = tile
        down = pl.ds(row_tile * self.tiling.rows + row, part.shape[0])
        across = pl.ds(col_tile * self.tiling.block_cols + col, part.shape[1])
        plgpu.copy_smem_to_gmem(part, self.out.at[group, down, across], commit_group=False)


@dataclass(frozen=True)
class _TransposedWeights(_Weights):
    """The same of x and dy that lie transposed, their groups in steps."""

    def load(self, tile, step, a, b, arrived):
        (_, row_tile, start, _, _), col_tile = tile
        depth = pl.ds(pl.multiple_of(start + step * STEP, STEP), STEP)
        down_x = pl.ds(row_tile * self.tiling.rows, self.tiling.rows)
        down_dy = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x.at[down_x, depth], a, arrived)
        plgpu.copy_gmem_to_smem(self.dy.at[down_dy, depth], b, arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        plgpu.wgmma(acc, a, b.at[self.tiling.own(wg)].transpose((1, 0)))


@dataclass(frozen=True)
class _Block:
    """A block's shared memory, and the walk over tiles of its warpgroups."""

    tiling: Tiling
    a: Any  # the rings of operands
    b: Any
    parts: Any  # [COMPUTE, slots, STORE_ROWS, width] of the result
    arrived: Any  # barriers, one for each stage
    consumed: Any

    def run(self, work: _Work) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            self._load(work)

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self._compute(work, wg)

    def _over_tiles(self, work: _Work, body: Callable) -> jax.Array:
        """The steps that were taken by body(tile, steps before it) -> steps after it, for this block's tiles."""
        row_tiles, col_tiles = work.count()

        def at(loop, carry):
            return body(work.tile(loop.index[0], col_tiles), carry)

        return plgpu.nd_loop((row_tiles * col_tiles,), collective_axes="block", init_carry=jnp.int32(0))(at)

    def _load(self, work: _Work) -> None:
        stages = self.tiling.stages

        def load_tile(tile, done):
            def load_step(step, done):
                slot = lax.rem(done, stages)
                pl.when(done >= stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
                work.load(tile, step, self.a.at[slot], self.b.at[slot], self.arrived.at[slot])
                return done + 1

            return lax.fori_loop(0, work.steps(tile), load_step, done)

        done = self._over_tiles(work, load_tile)

        # A block must not end while somebody may still arrive at its barriers.
        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _wait(step):
            plgpu.barrier_wait(self.consumed.at[lax.rem(step, stages)])

    def _compute(self, work: _Work, wg: jax.Array) -> None:
        tiling, stages = self.tiling, self.tiling.stages

        def release(step) -> None:
            plgpu.barrier_arrive(self.consumed.at[lax.rem(step, stages)])

        def compute_tile(tile, done):
            steps = work.steps(tile)

            def in_registers(acc):
                def compute_step(step, done):
                    slot = lax.rem(done, stages)
                    plgpu.barrier_wait(self.arrived.at[slot])
                    work.multiply(tile, step, self.a.at[slot], self.b.at[slot], acc, wg)
                    plgpu.wgmma_wait(1)  # the step before is done, this one under way
                    pl.when(step >= 1)(lambda: release(done - 1))
                    return done + 1

                after = lax.fori_loop(0, steps, compute_step, done)
                values = acc[...]
                pl.when(steps > 0)(lambda: release(after - 1))
                self._store(work, tile, values, wg)
                return after

            return pl.run_scoped(in_registers, plgpu.WGMMAAccumulatorRef((tiling.rows, tiling.cols)))

        self._over_tiles(work, compute_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _store(self, work: _Work, tile: tuple, values: jax.Array, wg: jax.Array) -> None:
        """A warpgroup's results to memory, part by part."""
        values = (values if work.scale is None else values * work.scale).astype(self.parts.dtype)
        width, own_col = self.parts.shape[-1], wg * self.tiling.cols
        corners = [
            (row, col) for row in range(0, self.tiling.rows, STORE_ROWS) for col in range(0, self.tiling.cols, width)
        ]
        slots = math.gcd(self.tiling.slots, len(corners))  # so that tiles go round all slots
        for index, (row, col) in enumerate(corners):
            part = self.parts.at[wg, index % slots]
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # the slot's last copy
            part[...] = values[row : row + STORE_ROWS, col : col + width]
            plgpu.commit_smem()
            work.store(tile, row, own_col + col, part)
            plgpu.commit_smem_to_gmem_group()  # also of no copies: the wait counts groups


def _keep_rows(tile: Any, first: jax.Array, end: jax.Array) -> None:
    """Zeroes the rows of a tile in shared memory that are not first … end - 1."""
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tile.shape, 0), plgpu.Layout.WGMMA)
    values = tile[...]
    tile[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _kernel(
    body: Callable,
    name: str,
    tiling: Tiling,
    a: jax.ShapeDtypeStruct,
    b: jax.ShapeDtypeStruct,
    out: jax.ShapeDtypeStruct,
    blocks: int,
    interpret: Any,
) -> Callable:
    """The kernel of body(*inputs, out, *memory of _Block), for operands a and b of a step."""
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            plgpu.SMEM((tiling.stages, *a.shape), a.dtype),
            plgpu.SMEM((tiling.stages, *b.shape), b.dtype),
            plgpu.SMEM((COMPUTE, tiling.slots, STORE_ROWS, SWIZZLE // out.dtype.itemsize), out.dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiling.stages),
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
    )
