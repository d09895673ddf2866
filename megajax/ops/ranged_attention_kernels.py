"""The forward kernel of `ranged_attention` (Mosaic GPU, Hopper), and the base class of all its kernels.

A block keeps the rows of its two computing warpgroups and loops over tiles of columns: keys for the output and dq,
queries for dk and dv. A third warpgroup loads the tiles into a ring of `stages` buffer slots; it waits until both
warpgroups have used a slot's previous tile. Both do the same number of steps, which may be 0.

Scores are in units of exp2, with the scale in their factor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.barriers import not_before
from megajax.ops.query_ranges import LOG2_E, Options

Load = Callable[[jax.Array, jax.Array], None]  # (step, slot): loads the step's tile into the slot

LOWEST = -1e30  # the maximum of no scores; finite, because the difference of two infinities is NaN

MATRIX = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
WARPGROUPS = 2  # of a block that compute; the last one loads
ROWS = 64  # of a warpgroup: Hopper multiplies 64 rows at a time
BLOCK_ROWS = WARPGROUPS * ROWS
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24  # per thread: as many as fit


@dataclass(frozen=True)
class Bounds:
    """Columns: some row of the block sees [any_from, any_to), all rows of the warpgroup see [all_from, all_to)."""

    any_from: jax.Array
    any_to: jax.Array
    all_from: jax.Array
    all_to: jax.Array

    def tiles(self, columns: int) -> tuple[jax.Array, jax.Array]:
        """The first tile with a visible column, and the number of tiles up to the last one."""
        start = lax.div(self.any_from, jnp.int32(columns))
        return start, jnp.maximum(pl.cdiv(self.any_to, jnp.int32(columns)) - start, 0)

    def whole(self, column: jax.Array | int, columns: int) -> jax.Array:
        """Whether all rows see all `columns` from this one."""
        return (column >= self.all_from) & (column + columns <= self.all_to)


@dataclass(frozen=True)
class RangedAttentionKernel:
    """The base class of the three kernels. `group` query heads read one KV head."""

    columns = 128  # of a tile
    stages = 2  # buffer slots
    # The longest tiles start first: with causal attention the last queries see the most keys, and the first keys are
    # seen by the most queries.
    last_tile_first = True

    options: Options
    group: int
    widths: tuple[int, int]  # of a key, of a value

    @property
    def scale(self) -> float:
        return self.options.scale

    @property
    def softcap(self) -> float | None:
        return self.options.softcap

    def grid(self, length: int, batch: int, kv_heads: int) -> dict[str, int]:
        """The number of blocks along each axis; the last axis is the fastest. `length` is the rows of a sequence.

        Blocks of one sequence and KV head are consecutive, so the keys stay in the L2 cache.
        """
        return {"batch": batch, "kv_head": kv_heads, "tile": length // BLOCK_ROWS, "member": self.group}

    def indices(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(warpgroup, sequence, KV head, query head)."""
        warpgroup, batch, kv_head, member = map(lax.axis_index, ("warpgroup", "batch", "kv_head", "member"))
        return warpgroup, batch, kv_head, kv_head * self.group + member

    def squash(self, products: jax.Array) -> jax.Array:
        """q·k, or with a soft-cap tanh(scale · q·k / softcap)."""
        return products if self.softcap is None else jnp.tanh(products * (self.scale / self.softcap))

    def own_rows(self) -> tuple[jax.Array, jax.Array, pl.Slice]:
        """(the block's first row, this warpgroup's first row, its slice); the loader gets the last warpgroup's."""
        tile = lax.axis_index("tile")
        if self.last_tile_first:
            tile = lax.axis_size("tile") - 1 - tile
        start = tile * BLOCK_ROWS
        row = start + jnp.minimum(lax.axis_index("warpgroup"), WARPGROUPS - 1) * ROWS
        return start, row, pl.ds(row, ROWS)

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))

    def run_warpgroups(self, compute: Callable[[], None], steps: jax.Array, loads: Sequence[tuple[Any, Load]]) -> None:
        """Computing warpgroups call compute(); the loading warpgroup calls all loads in order at each step.

        `loads` are pairs: the barriers of free slots, and the function that loads a slot.
        """

        @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute()

        @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")

            @pl.loop(0, steps)
            def _step(step):
                slot = self.slot(step)
                for free, load in loads:
                    pl.when(step >= self.stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                    load(step, slot)

            # A block must not end while a warpgroup may still arrive at its barriers.
            @pl.loop(jnp.maximum(steps - self.stages, 0), steps)
            def _end(step):
                for free, _ in loads:
                    plgpu.barrier_wait(free.at[self.slot(step)])

    def ring(self, arrivals: int = 1) -> Any:
        """One barrier per slot."""
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages)

    def query_bounds(self, first: Any, end: Any, batch: jax.Array) -> Bounds:
        """The keys that this block's queries see; bounds never decrease, so the first and last query suffice."""
        start, row, _ = self.own_rows()
        last_of_block, last = start + BLOCK_ROWS - 1, row + ROWS - 1
        return Bounds(first[batch, start], end[batch, last_of_block], first[batch, last], end[batch, row])

    def multiply_registers(self, accumulator: Any, a: jax.Array, b: Any) -> None:
        """Starts accumulator += a @ b with `a` in registers; the interpreter needs a reference for it."""
        if not self.options.interpret:
            plgpu.wgmma(accumulator, a, b)
            return

        def through_reference(copy):
            copy[...] = a
            plgpu.wgmma(accumulator, copy, b)

        pl.run_scoped(through_reference, plgpu.REGS(a.shape, a.dtype))


def accumulator(rows: int, columns: int) -> Any:
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def per_row(values: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(values, like.shape, [0])


def per_column(values: jax.Array, like: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(values, like.shape, [1])


def keep_range(x: jax.Array, first: jax.Array, end: jax.Array, start: jax.Array, axis: int) -> jax.Array:
    """x, or -inf where the key is not in [first, end); the key is `start` plus the index along `axis`."""
    key = plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=MATRIX)
    across = per_row if axis == 1 else per_column
    return jnp.where((key >= across(first - start, x)) & (key < across(end - start, x)), x, -jnp.inf)


@dataclass(frozen=True)
class Forward(RangedAttentionKernel):
    """The output and the log-sum-exp. Rows are queries, columns keys."""

    def scratch(self, dtype: Any) -> dict[str, Any]:
        H, W = self.widths
        return {
            "q_rows": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),
            "k_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "v_ring": plgpu.SMEM((self.stages, self.columns, W), dtype),
            "lse_rows": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=WARPGROUPS),
            "k_ready": self.ring(),
            "v_ready": self.ring(),
            "k_free": self.ring(WARPGROUPS),
            "v_free": self.ring(WARPGROUPS),
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }

    def __call__(self, q, k, v, first, end, out, lse, *, q_rows, lse_rows, q_ready, turn, **rings) -> None:
        warpgroup, batch, kv_head, head = self.indices()
        _, _, rows = self.own_rows()
        bounds = self.query_bounds(first, end, batch)
        start, steps = bounds.tiles(self.columns)

        def compute():
            q_mine = q_rows.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_mine, q_ready.at[warpgroup])
            own_range = tuple(plgpu.load(a.at[batch, rows], layout=PER_ROW, optimized=False) for a in (first, end))
            plgpu.barrier_wait(q_ready.at[warpgroup])
            output, log_sum = self._attend(q_mine, bounds, own_range, turn, rings)
            # All tiles of values are used: one is as large as the block's output.
            out_mine = rings["v_ring"].at[0, pl.ds(warpgroup * ROWS, ROWS)]
            out_mine[...] = output.astype(out.dtype)
            lse_rows[warpgroup] = log_sum
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_mine, out.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_rows.at[warpgroup], lse.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

        def loads_of(source, name):
            def load(step, slot):
                keys = pl.ds((start + step) * self.columns, self.columns)
                ring, ready = rings[f"{name}_ring"], rings[f"{name}_ready"]
                plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], ring.at[slot], ready.at[slot])

            return rings[f"{name}_free"], load

        self.run_warpgroups(compute, steps, [loads_of(k, "k"), loads_of(v, "v")])

    def _attend(self, q, bounds: Bounds, own_range, turn, rings) -> tuple[jax.Array, jax.Array]:
        """The output [rows, W] and log-sum-exp [rows] of a warpgroup's queries."""
        first, end = own_range
        start, steps = bounds.tiles(self.columns)
        second = lax.axis_index("warpgroup") == 1

        def pass_turn(one: bool | jax.Array = True):
            # Both warpgroups arrive and wait; the second also before its first step, the first also after its last.
            @pl.when(one)
            def _():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def step(index, carry):
            acc, maximum, total = carry
            slot, key = self.slot(index), (start + index) * self.columns

            def scores(ref):
                plgpu.barrier_wait(rings["k_ready"].at[slot])
                plgpu.wgmma(ref, q, rings["k_ring"].at[slot].transpose((1, 0)))
                pass_turn()
                return ref[...]

            x = self.squash(pl.run_scoped(scores, accumulator(ROWS, self.columns)))
            plgpu.barrier_arrive(rings["k_free"].at[slot])
            x = lax.cond(bounds.whole(key, self.columns), lambda: x, lambda: keep_range(x, first, end, key, axis=1))

            new = jnp.maximum(maximum, x.max(axis=1) * self.options.factor)
            shrink = jnp.exp2(maximum - new)
            p = jnp.exp2(x * self.options.factor - per_row(new, x))
            acc *= per_row(shrink, acc)
            total = total * shrink + p.sum(axis=1)
            p = p.astype(q.dtype)
            # The whole softmax is before the turn is passed; else the compiler may move it after the next product.
            acc, total, new, p = not_before((acc, total, new, p))
            pass_turn()
            plgpu.barrier_wait(rings["v_ready"].at[slot])
            acc = self._plus_product(acc, p, rings["v_ring"].at[slot])
            plgpu.barrier_arrive(rings["v_free"].at[slot])
            return acc, new, total

        empty = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), PER_ROW)
        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
        acc = plgpu.layout_cast(jnp.zeros((ROWS, self.widths[1]), jnp.float32), MATRIX)
        pass_turn(second)
        acc, maximum, total = lax.fori_loop(0, steps, step, (acc, empty, zero))
        pass_turn(~second)
        pass_turn()  # both have used all tiles
        acc *= per_row(1 / jnp.where(total == 0, 1.0, total), acc)
        return acc, maximum * (1 / LOG2_E) + jnp.log(total)

    def _plus_product(self, acc: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        """acc + a @ b."""
        if self.options.interpret:

            def product(ref):
                self.multiply_registers(ref, a, b)
                return ref[...]

            return acc + pl.run_scoped(product, accumulator(*acc.shape))
        in_place: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
        return in_place(plgpu.WGMMAAccumulatorRef.init(acc))
