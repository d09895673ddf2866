"""Products that are symmetric matrices, computed by half, in BF16 or FP16 on Hopper GPUs (Pallas, Mosaic GPU).

A loop of `grouped_matmul_block` over the squares of one triangle, two at a time. Each square is stored twice, the
second time transposed on the other side of the diagonal.
"""

from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.grouped_matmul_block import COMPUTE, MatmulTiling, ThreadBlock, launch
from megajax.ops.grouped_matmul_kernel import MULTIPROCESSORS
from megajax.ops.newton_schulz import SIDE


# It traces and compiles the kernel of equal products once.
@partial(jax.jit, static_argnames=("square", "panel", "blocks", "interpret"))
def symmetric_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    square: int = 128,
    panel: int = 8,
    blocks: int = MULTIPROCESSORS,
    interpret: Any = None,
) -> jax.Array:
    """a bᵀ [m, R, R] of a and b [m, R, C], where a bᵀ is symmetric; sums are in FP32. R and C are multiples of SIDE.

    SIDE is the depth of a step of the sum and the side of a store buffer. A warpgroup computes a `square` at a time.
    Squares are visited in panels of `panel` rows of them. `blocks` is the number of multiprocessors to use.
    """
    count, rows, _ = a.shape
    tiling, tiles = MatmulTiling(square, square, loads=1 + COMPUTE), jnp.asarray(triangle(-(-rows // square), panel))

    def kernel(tiles_ref, a_ref, b_ref, out_ref, *memory) -> None:
        _MirroredBlock(tiling, *memory).run(_Triangle(tiling, tiles_ref, a_ref, b_ref, out_ref))

    of_a, of_b = (jax.ShapeDtypeStruct((side, SIDE), a.dtype) for side in (square, COMPUTE * square))
    out = jax.ShapeDtypeStruct((count, rows, rows), a.dtype)
    launched = launch(kernel, "symmetric_matmul", tiling, (of_a, of_b), out, blocks, interpret)
    return launched(tiles, a, b)


def triangle(side: int, panel: int) -> np.ndarray:
    """Tiles (row, column, column) with each square of a symmetric matrix of `side` × `side` squares, or its mirror.

    If `side` is 3 or 4 more than a multiple of 4, each is there once; else the last one of a row may be there twice.
    """
    columns = [list(range(row + 1)) for row in range(side)]
    for row in range(0, side - 2, 4):  # two rows with an odd number of squares: one gives a square to the other
        columns[row].append(row + 2)
        columns[row + 2].remove(row)
    tiles = []
    for rows in batched(range(side), panel):
        pairs = [(index, row, *pair) for row in rows for index, pair in enumerate(batched(columns[row], COMPUTE))]
        tiles += [(row, first, (second or [first])[-1]) for _, row, first, *second in sorted(pairs)]
    return np.array(tiles, np.int32)


class _MirroredBlock(ThreadBlock):
    """A block that stores each part of a square twice: as it is, and its transpose."""

    def _store(self, work: Any, tile: tuple, values: jax.Array, wg: jax.Array) -> None:
        values = values.astype(self.parts.dtype)
        for row in range(0, self.tiling.rows, SIDE):
            for col in range(0, self.tiling.cols, SIDE):
                block = values[row : row + SIDE, col : col + SIDE]
                for mirrored in (False, True):
                    part = self.parts.at[wg, int(mirrored)]
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the previous copy of this buffer
                    if mirrored:
                        transposed = part.transpose((1, 0))
                        transposed[...] = plgpu.layout_cast(block, plgpu.Layout.WGMMA_TRANSPOSED)
                    else:
                        part[...] = block
                    plgpu.commit_smem()
                    (work.store_mirrored if mirrored else work.store)(tile, row, wg * self.tiling.cols + col, part)
                    plgpu.commit_smem_to_gmem_group()  # also without a copy: the wait counts groups


@dataclass(frozen=True)
class _Triangle:
    """The tiles of each a bᵀ."""

    tiling: MatmulTiling
    tiles: Any
    a: Any
    b: Any
    out: Any
    scale: None = None

    def count(self):
        return self.out.shape[0] * self.tiles.shape[0], 1

    def tile(self, index, col_tiles):
        matrix, index = lax.div(index, self.tiles.shape[0]), lax.rem(index, self.tiles.shape[0])
        return matrix, *(self.tiles[index, side] * self.tiling.rows for side in range(1 + COMPUTE))

    def steps(self, tile):
        return pl.cdiv(self.a.shape[2], SIDE)

    def load(self, tile, step, a, b, arrived):
        matrix, row, *columns = tile
        depth, side = pl.ds(step * SIDE, SIDE), self.tiling.rows
        plgpu.copy_gmem_to_smem(self.a.at[matrix, pl.ds(row, side), depth], a, arrived)
        for wg, column in enumerate(columns):
            plgpu.copy_gmem_to_smem(self.b.at[matrix, pl.ds(column, side), depth], b.at[self.tiling.own(wg)], arrived)

    def multiply(self, tile, step, a, b, acc, wg):
        plgpu.wgmma(acc, a, b.at[self.tiling.own(wg)].transpose((1, 0)))

    def store(self, tile, row, col, part):
        self._copy(part, tile[0], *self._corner(tile, row, col))

    def store_mirrored(self, tile, row, col, part):
        row, col = self._corner(tile, row, col)
        square = self.tiling.rows
        pl.when(lax.div(row, square) != lax.div(col, square))(lambda: self._copy(part, tile[0], col, row))

    def _corner(self, tile, row, col):
        """Where in the matrix a tile's (row, col) is."""
        _, first_row, *columns = tile
        return first_row + row, jnp.where(col < self.tiling.cols, *columns) + lax.rem(col, self.tiling.cols)

    def _copy(self, part, matrix, row, col):
        rows, columns = part.shape
        plgpu.copy_smem_to_gmem(part, self.out.at[matrix, pl.ds(row, rows), pl.ds(col, columns)], commit_group=False)
