"""A persistent block of the grouped matmul kernels: its warpgroups, shared memory and loop over tiles (Mosaic GPU).

One warpgroup loads tiles of both operands into a ring of shared memory buffers. Two warpgroups multiply them, keep the
sums in registers and store the results, while the next operands are being loaded. All copies use TMA.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COMPUTE = 2  # warpgroups that multiply; the last one loads
LOAD_REGISTERS, COMPUTE_REGISTERS = 40, 232
SWIZZLE = 128  # bytes: the depth of a step of the sum, whose operands are one stage of the ring
STORE_ROWS = 64  # rows of the result in one store buffer, which is SWIZZLE bytes wide


@dataclass(frozen=True)
class MatmulTiling:
    """The division of a kernel's work. The default was fastest on an H200; tests use smaller ones.

    A warpgroup computes rows × cols of the result, a block twice as many columns. The ring has `stages` buffers for
    operands; a warpgroup has `slots` store buffers. Tiles are visited in panels of `panel` tiles of rows, each panel
    down its rows first.
    """

    rows: int = 128
    cols: int = 128
    stages: int = 4
    slots: int = 2
    panel: int = 8
    loads: int = 2  # copies that bring the operands of a step

    @property
    def block_cols(self) -> int:
        return COMPUTE * self.cols

    def own(self, wg: jax.Array | int) -> pl.Slice:
        """The columns of warpgroup `wg` in its block's tile."""
        return pl.ds(wg * self.cols, self.cols)


class KernelWork(Protocol):
    """The computation of a kernel, tile by tile. A tile is a tuple of scalars."""

    @property
    def scale(self) -> Any:
        """The factor of all sums, or None."""
        ...

    def count(self) -> tuple[Any, int]:
        """The number of rows and columns of tiles, as if all tiles were one matrix."""
        ...

    def tile(self, index: jax.Array, col_tiles: int) -> tuple:
        """(a tile without its column, its column)."""
        ...

    def steps(self, tile: tuple) -> Any:
        """The number of steps of its sum."""
        ...

    def load(self, tile: tuple, step: jax.Array, a: Any, b: Any, arrived: Any) -> None:
        """Starts the copies of one step's operands."""
        ...

    def multiply(self, tile: tuple, step: jax.Array, a: Any, b: Any, acc: Any, wg: jax.Array) -> None:
        """Starts to add a step's product to a warpgroup's sum."""
        ...

    def store(self, tile: tuple, row: Any, col: Any, part: Any) -> None:
        """Starts the copy of a store buffer to (row, col) of the tile."""
        ...


@dataclass(frozen=True)
class ThreadBlock:
    """A block's shared memory, and the loops of its warpgroups over tiles."""

    tiling: MatmulTiling
    a: Any  # the rings of operands
    b: Any
    parts: Any  # store buffers [COMPUTE, slots, STORE_ROWS, width]
    arrived: Any  # barriers, one for each stage
    consumed: Any

    def run(self, work: KernelWork) -> None:
        wg = lax.axis_index("wg")

        @pl.when(wg == COMPUTE)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            self._load(work)

        @pl.when(wg < COMPUTE)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            self._compute(work, wg)

    def _over_tiles(self, work: KernelWork, body: Callable) -> jax.Array:
        """Calls body(tile, steps done before it) -> steps done after it for this block's tiles; the number of steps."""
        row_tiles, col_tiles = work.count()

        def at(loop, carry):
            return body(work.tile(loop.index[0], col_tiles), carry)

        return plgpu.nd_loop((row_tiles * col_tiles,), collective_axes="block", init_carry=jnp.int32(0))(at)

    def _load(self, work: KernelWork) -> None:
        stages = self.tiling.stages

        def load_tile(tile, done):
            def load_step(step, done):
                slot = lax.rem(done, stages)
                pl.when(done >= stages)(lambda: plgpu.barrier_wait(self.consumed.at[slot]))
                self._load_step(work, tile, step, slot)
                return done + 1

            return lax.fori_loop(0, work.steps(tile), load_step, done)

        done = self._over_tiles(work, load_tile)

        # A block must not end while a warpgroup may still arrive at its barriers.
        @pl.loop(jnp.maximum(done - stages, 0), done)
        def _wait(step):
            plgpu.barrier_wait(self.consumed.at[lax.rem(step, stages)])

    def _load_step(self, work: KernelWork, tile: tuple, step: jax.Array, slot: jax.Array) -> None:
        work.load(tile, step, self.a.at[slot], self.b.at[slot], self.arrived.at[slot])

    def _compute(self, work: KernelWork, wg: jax.Array) -> None:
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
                    plgpu.wgmma_wait(1)  # the previous step is done, this one still runs
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

    def _store(self, work: KernelWork, tile: tuple, values: jax.Array, wg: jax.Array) -> None:
        """Copies a warpgroup's results to memory, part by part."""
        values = (values if work.scale is None else values * work.scale).astype(self.parts.dtype)
        width, own_col = self.parts.shape[-1], wg * self.tiling.cols
        corners = [
            (row, col) for row in range(0, self.tiling.rows, STORE_ROWS) for col in range(0, self.tiling.cols, width)
        ]
        slots = math.gcd(self.tiling.slots, len(corners))  # each tile then starts at the first slot
        for index, (row, col) in enumerate(corners):
            part = self.parts.at[wg, index % slots]
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # the slot's previous copy
            part[...] = values[row : row + STORE_ROWS, col : col + width]
            plgpu.commit_smem()
            work.store(tile, row, own_col + col, part)
            plgpu.commit_smem_to_gmem_group()  # also without a copy: the wait counts groups


def launch(
    body: Callable,
    name: str,
    tiling: MatmulTiling,
    operands: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct],
    out: jax.ShapeDtypeStruct,
    blocks: int,
    interpret: Any,
    more: Sequence[Any] = (),
) -> Callable:
    """The kernel of body(*inputs, out, *memory of `ThreadBlock`, *more), with these operands of one step."""
    a, b = operands
    return plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            plgpu.SMEM((tiling.stages, *a.shape), a.dtype),
            plgpu.SMEM((tiling.stages, *b.shape), b.dtype),
            plgpu.SMEM((COMPUTE, tiling.slots, STORE_ROWS, SWIZZLE // out.dtype.itemsize), out.dtype),
            plgpu.Barrier(num_arrivals=tiling.loads, num_barriers=tiling.stages),
            plgpu.Barrier(num_arrivals=COMPUTE, num_barriers=tiling.stages),
            *more,
        ],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=COMPUTE + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
    )
