"""Matmuls of groups of rows, each group with its own weights, in BF16 or FP16 on Hopper (Pallas, Mosaic GPU).

Two kernels of one shape. A persistent block has a warpgroup that loads tiles of both operands into a ring of shared
memory, with TMA, and two that multiply them, keep the sums in registers and store the results with TMA, while the
next tile's operands are being loaded. `matmul` walks over tiles of the result's rows, each with one group's rows
alone; `weight_gradient` over tiles of each group's weights, along the group's rows.

TMA reads rows from a multiple of 8 on (the height of a swizzled tile): a tile may thus begin up to 7 rows before its
group, and end after it. Rows of other groups are not stored by `matmul`, and are zeroed by `weight_gradient`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
SWIZZLE = 128  # bytes
STORE_ROWS = 64  # rows of a part of the result on its way through shared memory, SWIZZLE bytes wide
SLOTS = 2  # such parts that a warpgroup has under way


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work.

    A warpgroup has rows × cols of the result, a block twice as many rows (split="rows") or columns ("cols"), which the
    two warpgroups divide; `depth` is one step of the sum, `stages` the steps that fit the ring. Tiles are walked in
    panels of `panel` tiles of rows, down each panel first. With `pair`, two blocks side by side along the columns load
    each half of the rows' operand for both. `in_flight` steps (0 or 1) are not waited for before the next is begun.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 64
    stages: int = 4
    split: str = "cols"
    panel: int = 8
    pair: bool = False
    in_flight: int = 1

    @property
    def block_rows(self) -> int:
        return self.rows * (COMPUTE if self.split == "rows" else 1)

    @property
    def block_cols(self) -> int:
        return self.cols * (COMPUTE if self.split == "cols" else 1)

    def own_rows(self, wg) -> Any:
        """The rows of warpgroup `wg` in its block's tile."""
        return pl.ds(wg * self.rows if self.split == "rows" else 0, self.rows)

    def own_cols(self, wg) -> Any:
        return pl.ds(wg * self.cols if self.split == "cols" else 0, self.cols)


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
    T, K = x_tk.shape
    N = w.shape[1 if transpose_w else 2]
    padding = -T % ALIGNMENT
    if padding:
        x_tk = jnp.pad(x_tk, ((0, padding), (0, 0)))
    tiles, count = row_tiles(group_sizes_e, T, tiling.block_rows)
    col_tiles = pl.cdiv(N, tiling.block_cols)
    groups, rows, cols = w.shape[0], tiling.block_rows, tiling.block_cols

    def kernel(tiles_ref, count_ref, x_ref, w_ref, out_ref, *scratch) -> None:
        block = _Block(tiling, *scratch)

        def tile_at(index) -> Callable:
            row_tile, col_tile = plgpu.planar_snake(index, (count_ref[0], block.clusters_of(col_tiles)), 0, tiling.panel)
            return lambda field: tiles_ref[row_tile, field], block.of_pair(col_tile)

        def steps(tile):
            field, _ = tile
            return jnp.where(field(GROUP) < groups, K // tiling.depth, 0)

        def load(tile, step, a, b, arrived) -> None:
            field, col_tile = tile
            depth, across = pl.ds(step * tiling.depth, tiling.depth), pl.ds(col_tile * cols, cols)
            start = pl.multiple_of(field(START), ALIGNMENT)
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(start, rows), depth], a, arrived, collective_axes=block.shared)
            weights = w_ref.at[field(GROUP)]
            plgpu.copy_gmem_to_smem(weights.at[(across, depth) if transpose_w else (depth, across)], b, arrived)

        def multiply(tile, step, a, b, acc, wg) -> None:
            own = tiling.own_cols(wg)
            b = b.at[own].transpose((1, 0)) if transpose_w else b.at[:, own]
            plgpu.wgmma(acc, a.at[tiling.own_rows(wg)], b)

        def store(tile, row, col, part, plain, values) -> None:
            field, col_tile = tile
            first, last = (jnp.clip(field(f) - row, 0, STORE_ROWS) for f in (FIRST, LAST))
            start = pl.multiple_of(field(START) + row, ALIGNMENT)
            across = pl.ds(col_tile * cols + col, part.shape[1])

            @pl.when(last - first == STORE_ROWS)
            def _whole():
                part[...] = values
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(part, out_ref.at[pl.ds(start, STORE_ROWS), across], commit_group=False)

            @pl.when((first < last) & (last - first < STORE_ROWS))
            def _partial():
                plain[...] = values
                plgpu.commit_smem()
                _store_rows(plain, first, last, lambda begin, height: out_ref.at[pl.ds(start + begin, height), across])

        block.run(count_ref[0] * block.clusters_of(col_tiles), tile_at, steps, load, multiply, store)

    a_shape = (rows, tiling.depth)
    b_shape = (cols, tiling.depth) if transpose_w else (tiling.depth, cols)
    out = jax.ShapeDtypeStruct((T, N), x_tk.dtype)
    call = _kernel(kernel, "grouped_matmul", tiling, a_shape, b_shape, x_tk.dtype, out, blocks, interpret)
    return call(tiles, count, x_tk, w.astype(x_tk.dtype))


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
    """x_eᵀ dy_e of every group's rows of x [T, M] and dy [T, N] -> [E, M, N] in `dtype`; empty groups are zeros.

    Rows after the last group are not used, but must be finite.
    """
    (T, M), N = x_tm.shape, dy_tn.shape[1]
    E, rows, cols, depth = group_sizes_e.shape[0], tiling.block_rows, tiling.block_cols, tiling.depth
    padding = -T % ALIGNMENT
    if padding:
        x_tm, dy_tn = (jnp.pad(a, ((0, padding), (0, 0))) for a in (x_tm, dy_tn))
    ends = jnp.cumsum(group_sizes_e.astype(jnp.int32))
    bounds = jnp.stack([ends - group_sizes_e, ends], axis=1)

    def kernel(bounds_ref, x_ref, dy_ref, out_ref, *scratch) -> None:
        block = _Block(tiling, *scratch)
        tiles_of_group = pl.cdiv(M, rows), block.clusters_of(pl.cdiv(N, cols))

        def tile_at(index):
            size = jnp.int32(tiles_of_group[0] * tiles_of_group[1])
            group = lax.div(index, size)
            row_tile, col_tile = plgpu.planar_snake(lax.rem(index, size), tiles_of_group, 0, tiling.panel)
            return group, row_tile, block.of_pair(col_tile)

        def bounds_of(tile):
            """The group's first row, the aligned one before it, and the end."""
            start, end = bounds_ref[tile[0], 0], bounds_ref[tile[0], 1]
            return start, lax.div(start, ALIGNMENT) * ALIGNMENT, end

        def steps(tile):
            start, first, end = bounds_of(tile)
            return jnp.where(start < end, lax.div(end - first + (depth - 1), depth), 0)

        def load(tile, step, a, b, arrived) -> None:
            _, row_tile, col_tile = tile
            down = pl.ds(pl.multiple_of(bounds_of(tile)[1] + step * depth, ALIGNMENT), depth)
            across = pl.ds(row_tile * rows, rows)
            plgpu.copy_gmem_to_smem(x_ref.at[down, across], a, arrived, collective_axes=block.shared)
            plgpu.copy_gmem_to_smem(dy_ref.at[down, pl.ds(col_tile * cols, cols)], b, arrived)

        def multiply(tile, step, a, b, acc, wg) -> None:
            a, b = a.at[:, tiling.own_rows(wg)], b.at[:, tiling.own_cols(wg)]
            start, first, end = bounds_of(tile)
            first += step * depth

            @pl.when((first < start) | (first + depth > end))
            def _others_rows():
                _keep_rows(a if tiling.split == "rows" else b, start - first, end - first)  # what this one alone reads

            plgpu.wgmma(acc, a.transpose((1, 0)), b)

        def store(tile, row, col, part, plain, values) -> None:
            group, row_tile, col_tile = tile
            part[...] = values
            plgpu.commit_smem()
            down, across = pl.ds(row_tile * rows + row, STORE_ROWS), pl.ds(col_tile * cols + col, part.shape[1])
            plgpu.copy_smem_to_gmem(part, out_ref.at[group, down, across], commit_group=False)

        block.run(E * tiles_of_group[0] * tiles_of_group[1], tile_at, steps, load, multiply, store)

    out = jax.ShapeDtypeStruct((E, M, N), dtype)
    shapes = (depth, rows), (depth, cols)
    call = _kernel(kernel, "grouped_weight_gradient", tiling, *shapes, x_tm.dtype, out, blocks, interpret)
    return call(bounds, x_tm, dy_tn)


START, GROUP, FIRST, LAST = range(4)  # the columns of row_tiles


def row_tiles(group_sizes_e: jax.Array, T: int, height: int) -> tuple[jax.Array, jax.Array]:
    """The tiles of T rows, none with rows of two groups: ([tiles, 4], how many are in use [1]), int32.

    Of each the row it begins at, a multiple of ALIGNMENT; the group; and where the group's rows begin and end in it.
    The rows after the last group are group E.
    """
    sizes = group_sizes_e.astype(jnp.int32)
    E = sizes.shape[0]
    sizes = jnp.append(sizes, T - jnp.sum(sizes))
    most = T // height + 2 * (E + 1)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    aligned = starts // ALIGNMENT * ALIGNMENT
    last_tiles = jnp.cumsum(jnp.where(sizes > 0, pl.cdiv(ends - aligned, height), 0))
    tile = jnp.arange(most)
    group = jnp.minimum(jnp.sum(tile[:, None] >= last_tiles[None, :], axis=1), E)
    tiles_before = jnp.where(group > 0, last_tiles[jnp.maximum(group - 1, 0)], 0)
    start = aligned[group] + (tile - tiles_before) * height
    first, last = (jnp.clip(bound[group] - start, 0, height) for bound in (starts, ends))
    return jnp.stack([start, group, first, last], axis=1).astype(jnp.int32), last_tiles[-1:].astype(jnp.int32)


@dataclass(frozen=True)
class _Block:
    """A block's place on the GPU, its shared memory, and the walk over tiles that its warpgroups share."""

    tiling: Tiling
    a_ring: Any
    b_ring: Any
    parts: Any  # [COMPUTE, SLOTS, STORE_ROWS, width], swizzled, and the same memory plain
    arrived: Any
    consumed: Any

    @property
    def shared(self) -> str | None:
        """The axis of blocks among which the rows' operand is loaded."""
        return "pair" if self.tiling.pair else None

    def clusters_of(self, col_tiles: int) -> int:
        return pl.cdiv(col_tiles, 2) if self.tiling.pair else col_tiles

    def of_pair(self, col_tile):
        """This block's tile of columns; the last may lie outside of the result, where TMA neither loads nor stores."""
        return 2 * col_tile + lax.axis_index("pair") if self.tiling.pair else col_tile

    def run(self, tiles, tile_at, steps, load, multiply, store) -> None:
        """All tiles of this block: tile_at(index) is what the functions are given as `tile`, steps(tile) its steps."""
        wg = lax.axis_index("wg")

        @pl.when(wg == COMPUTE)
        def _loads():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            self._load_all(tiles, tile_at, steps, load)

        @pl.when(wg < COMPUTE)
        def _computes():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self._compute_all(wg, tiles, tile_at, steps, multiply, store)

    def _load_all(self, tiles, tile_at, steps, load) -> None:
        stages = self.tiling.stages

        def load_tile(loop, carry):
            tile = tile_at(loop.index[0])

            def load_step(step, total):
                slot = lax.rem(total, stages)
                pl.when(total >= stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
                load(tile, step, self.a_ring.at[slot], self.b_ring.at[slot], self.arrived.at[slot])
                return total + 1

            return lax.fori_loop(0, steps(tile), load_step, carry)

        total = plgpu.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))(load_tile)

        # A block must not end while its pair may still signal to it.
        @pl.loop(jnp.maximum(total - stages, 0), total)
        def _wait(step):
            plgpu.barrier_wait(self.consumed.at[lax.rem(step, stages)])

    def _compute_all(self, wg, tiles, tile_at, steps, multiply, store) -> None:
        tiling, stages = self.tiling, self.tiling.stages

        def compute_tile(loop, carry):
            tile = tile_at(loop.index[0])
            count = steps(tile)

            def release(total) -> None:
                plgpu.barrier_arrive(self.consumed.at[lax.rem(total, stages)])

            def with_accumulator(acc):
                def compute_step(step, total):
                    slot = lax.rem(total, stages)
                    plgpu.barrier_wait(self.arrived.at[slot])
                    multiply(tile, step, self.a_ring.at[slot], self.b_ring.at[slot], acc, wg)
                    plgpu.wgmma_wait(tiling.in_flight)
                    if tiling.in_flight:
                        pl.when(step > 0)(lambda: release(total - 1))
                    else:
                        release(total)
                    return total + 1

                total = lax.fori_loop(0, count, compute_step, carry)
                values = acc[...]
                if tiling.in_flight:
                    pl.when(count > 0)(lambda: release(total - 1))
                self._store_all(wg, tile, values, store)
                return total

            return pl.run_scoped(with_accumulator, plgpu.ACC((tiling.rows, tiling.cols)))

        plgpu.nd_loop((tiles,), collective_axes="block", init_carry=jnp.int32(0))(compute_tile)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _store_all(self, wg, tile, values, store) -> None:
        """A warpgroup's results to memory, part by part."""
        swizzled, plain = self.parts
        width, tiling = swizzled.shape[-1], self.tiling
        values = values.astype(swizzled.dtype)
        rows, cols = (wg * size if tiling.split == name else 0 for name, size in
                      (("rows", tiling.rows), ("cols", tiling.cols)))
        index = 0
        for row in range(0, tiling.rows, STORE_ROWS):
            for col in range(0, tiling.cols, width):
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                at = wg, index % SLOTS
                part = values[row : row + STORE_ROWS, col : col + width]
                store(tile, rows + row, cols + col, swizzled.at[at], plain.at[at], part)
                plgpu.commit_smem_to_gmem_group()  # empty where nothing is stored: the wait counts groups
                index += 1


def _store_rows(part, first, last, destination) -> None:
    """The rows first … last - 1 of a part, by copies whose heights are the powers of two in their number."""
    height, begin = STORE_ROWS // 2, first
    while height:
        chosen = jnp.bitwise_and(last - first, height)

        @pl.when(chosen != 0)
        def _copy(begin=begin, height=height):
            plgpu.copy_smem_to_gmem(part.at[pl.ds(begin, height)], destination(begin, height), commit_group=False)

        begin, height = begin + chosen, height // 2


def _keep_rows(tile, first, end) -> None:
    """Zeroes the rows of a tile in shared memory that are not first … end - 1."""
    row = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, tile.shape, 0), plgpu.Layout.WGMMA)
    values = tile[...]
    tile[...] = jnp.where((row >= first) & (row < end), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _kernel(body, name, tiling: Tiling, a_shape, b_shape, dtype, out, blocks: int, interpret) -> Callable:
    """The kernel of `body(*inputs, out, rings and barriers of _Block)`, whose rings hold tiles of the two shapes."""
    width = SWIZZLE // jnp.dtype(out.dtype).itemsize
    part = (COMPUTE, SLOTS, STORE_ROWS, width)
    if tiling.pair:
        consumed = plgpu.ClusterBarrier(collective_axes=("pair",), num_arrivals=COMPUTE, num_barriers=tiling.stages)
        cluster = {"cluster": (2,), "cluster_names": ("pair",)}
    else:
        consumed = plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiling.stages)
        cluster = {}
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            plgpu.SMEM((tiling.stages, *a_shape), dtype, transforms=_swizzled(dtype)),
            plgpu.SMEM((tiling.stages, *b_shape), dtype, transforms=_swizzled(dtype)),
            plgpu.RefUnion(
                plgpu.SMEM(part, out.dtype, transforms=_swizzled(out.dtype)), plgpu.SMEM(part, out.dtype)
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiling.stages),
            consumed,
        ],
        grid=(blocks // (2 if tiling.pair else 1),),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
        **cluster,
    )


def _swizzled(dtype: Any) -> tuple:
    elements = SWIZZLE // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ALIGNMENT, elements)), plgpu.SwizzleTransform(SWIZZLE)
