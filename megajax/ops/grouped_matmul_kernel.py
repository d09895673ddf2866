"""Matmuls of groups of rows, each group with its own weights, in BF16 or FP16 on Hopper GPUs (Pallas, Mosaic GPU).

Two kernels of one shape. A persistent block has a warpgroup that loads tiles of both operands into a ring of shared
memory, and two that multiply them, keep the sums in registers and store the results, while the next tile's operands
are being loaded; all copies are TMA's. `matmul` walks over tiles of the result's rows, each with rows of one group
alone; `weight_gradient` over tiles of each group's weights, summing along the group's rows.

TMA reads rows from a multiple of 8 on, the height of a swizzled tile: a tile may thus begin up to 7 rows before its
group, and end after it. Rows of other groups are not stored by `matmul`, and are zeroed by `weight_gradient`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ALIGNMENT = 8  # of the first row of a tile
COLUMNS = 64  # what the width of operands and results is a multiple of
MULTIPROCESSORS = 132  # of H100 SXM, H200 and GH200
COMPUTE = 2  # warpgroups that multiply; the one after them loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232
DEPTH = 64  # of a step of the sum, whose operands are one stage of the ring
PANEL = 8  # tiles are walked in panels of so many tiles of rows, down each panel first
SWIZZLE = 128  # bytes
STORE_ROWS = 64  # rows of a part of the result on its way through shared memory, SWIZZLE bytes wide
SLOTS = 2  # such parts that a warpgroup has under way; code relies on 2


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work. The default was fastest on an H200, smaller ones are for tests.

    A warpgroup has rows × cols of the result, a block twice as many columns. The ring holds so many `stages`.
    """

    rows: int = 128
    cols: int = 128
    stages: int = 4

    @property
    def block_cols(self) -> int:
        return COMPUTE * self.cols

    def own(self, wg: jax.Array) -> pl.Slice:
        """The columns of warpgroup `wg` in its block's tile."""
        return pl.ds(wg * self.cols, self.cols)


def fits(*widths: int) -> bool:
    """Whether the kernels take operands so many columns wide."""
    return all(width % COLUMNS == 0 for width in widths)


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
    T, N = x_tk.shape[0], w.shape[1 if transpose_w else 2]

    def kernel(tiles_ref, x_ref, w_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_Rows(tiling, transpose_w, tiles_ref, x_ref, w_ref, out_ref))

    b_shape = (tiling.block_cols, DEPTH) if transpose_w else (DEPTH, tiling.block_cols)
    out = jax.ShapeDtypeStruct((T, N), x_tk.dtype)
    call = _kernel(kernel, "grouped_matmul", tiling, (tiling.rows, DEPTH), b_shape, out, blocks, interpret)
    return call(row_tiles(group_sizes_e, T, tiling.rows), _padded(x_tk), w.astype(x_tk.dtype))


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
    E, M, N = group_sizes_e.shape[0], x_tm.shape[1], dy_tn.shape[1]
    sizes = group_sizes_e.astype(jnp.int32)
    ends = _running_sum(sizes)

    def kernel(bounds_ref, x_ref, dy_ref, out_ref, *memory) -> None:
        _Block(tiling, *memory).run(_Weights(tiling, bounds_ref, x_ref, dy_ref, out_ref))

    shapes = (DEPTH, tiling.rows), (DEPTH, tiling.block_cols)
    out = jax.ShapeDtypeStruct((E, M, N), dtype)
    call = _kernel(kernel, "grouped_weight_gradient", tiling, *shapes, out, blocks, interpret, x_tm.dtype)
    return call(jnp.stack([ends - sizes, ends], axis=1), _padded(x_tm), _padded(dy_tn))


def row_tiles(group_sizes_e: jax.Array, T: int, height: int) -> jax.Array:
    """The tiles of T rows, none with rows of two groups: int32 [tiles, 5].

    Of each tile the row it begins at, a multiple of ALIGNMENT; the group; where the group's rows begin and end in it;
    and how many tiles are in use. The rows after the last group are group E.
    """
    E, sizes = group_sizes_e.shape[0], group_sizes_e.astype(jnp.int32)
    ends = _running_sum(sizes)
    # So many tiles are enough wherever a group begins; the last may be without rows.
    last_tiles = _running_sum(jnp.where(sizes > 0, pl.cdiv(sizes + (ALIGNMENT - 1), height), 0))
    starts, ends = jnp.append(0, ends), jnp.append(ends, T)
    first_tiles = jnp.append(0, last_tiles)
    count = last_tiles[-1:] + pl.cdiv(T - starts[-1:] + (ALIGNMENT - 1), height)
    tile = jnp.arange(T // height + 2 * (E + 1), dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= last_tiles[None, :], axis=1, dtype=jnp.int32)
    start = starts[group] // ALIGNMENT * ALIGNMENT + (tile - first_tiles[group]) * height
    first, last = (jnp.clip(bound[group] - start, 0, height) for bound in (starts, ends))
    return jnp.stack([start, group, first, last, jnp.broadcast_to(count, tile.shape)], axis=1)


def _running_sum(sizes: jax.Array) -> jax.Array:
    """As a masked sum, which XLA fuses; a cumsum is kernels of its own."""
    index = jnp.arange(sizes.shape[0])
    return jnp.sum(jnp.where(index[:, None] >= index[None, :], sizes[None, :], 0), axis=1, dtype=jnp.int32)


def _padded(x_tk: jax.Array) -> jax.Array:
    padding = -x_tk.shape[0] % ALIGNMENT
    return jnp.pad(x_tk, ((0, padding), (0, 0))) if padding else x_tk


class _Work(Protocol):
    """What a kernel computes, tile by tile; tiles are tuples of scalars."""

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
    transpose_w: bool
    tiles: Any
    x: Any
    w: Any
    out: Any

    def count(self):
        return self.tiles[0, 4], pl.cdiv(self.out.shape[1], self.tiling.block_cols)

    def tile(self, index, col_tiles):
        row_tile, col_tile = plgpu.planar_snake(index, (self.tiles[0, 4], col_tiles), 0, PANEL)
        return tuple(self.tiles[row_tile, field] for field in range(4)), col_tile

    def steps(self, tile):
        (_, group, first, last), _ = tile
        return jnp.where((group < self.w.shape[0]) & (first < last), pl.cdiv(self.x.shape[1], DEPTH), 0)

    def load(self, tile, step, a, b, arrived):
        (start, group, _, _), col_tile = tile
        down = pl.ds(pl.multiple_of(start, ALIGNMENT), self.tiling.rows)
        depth = pl.ds(step * DEPTH, DEPTH)
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
        row_tile, col_tile = plgpu.planar_snake(index, (row_tiles, col_tiles), 0, PANEL)
        start, end = self.bounds[group, 0], self.bounds[group, 1]
        return (group, row_tile, lax.div(start, ALIGNMENT) * ALIGNMENT, start, end), col_tile

    def steps(self, tile):
        (_, _, aligned, start, end), _ = tile
        return jnp.where(start < end, lax.div(end - aligned + (DEPTH - 1), DEPTH), 0)

    def load(self, tile, step, a, b, arrived):
        (_, row_tile, aligned, _, _), col_tile = tile
        down = pl.ds(pl.multiple_of(aligned + step * DEPTH, ALIGNMENT), DEPTH)
        across_x = pl.ds(row_tile * self.tiling.rows, self.tiling.rows)
        across_dy = pl.ds(col_tile * self.tiling.block_cols, self.tiling.block_cols)
        plgpu.copy_gmem_to_smem(self.x.at[down, across_x], a, arrived)
        plgpu.copy_gmem_to_smem(self.dy.at[down, across_dy], b, arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        (_, _, aligned, start, end), _ = tile
        b = b.at[:, self.tiling.own(wg)]
        begin = aligned + step * DEPTH

        @pl.when((begin < start) | (begin + DEPTH > end))
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
class _Block:
    """A block's shared memory, and the walk over tiles of its warpgroups."""

    tiling: Tiling
    a: Any  # the rings of operands
    b: Any
    parts: Any  # [COMPUTE, SLOTS, STORE_ROWS, width] of the result
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
        values = values.astype(self.parts.dtype)
        width, own_col = self.parts.shape[-1], wg * self.tiling.cols
        corners = [
            (row, col) for row in range(0, self.tiling.rows, STORE_ROWS) for col in range(0, self.tiling.cols, width)
        ]
        for index, (row, col) in enumerate(corners):
            part = self.parts.at[wg, index % SLOTS]
            pending = SLOTS - 1 if index else (len(corners) - 1) % SLOTS  # copies since the slot's last
            plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
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
    a_shape: Sequence[int],
    b_shape: Sequence[int],
    out: jax.ShapeDtypeStruct,
    blocks: int,
    interpret: Any,
    dtype: Any = None,
) -> Callable:
    """The kernel of body(*inputs, out, *memory of _Block), for operands of `dtype` (None: that of the result)."""
    dtype = jnp.dtype(out.dtype if dtype is None else dtype)
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            plgpu.SMEM((tiling.stages, *a_shape), dtype),
            plgpu.SMEM((tiling.stages, *b_shape), dtype),
            plgpu.SMEM((COMPUTE, SLOTS, STORE_ROWS, SWIZZLE // out.dtype.itemsize), out.dtype),
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
