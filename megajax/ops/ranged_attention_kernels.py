"""The Pallas kernels of `ranged_attention`, on Mosaic GPU, for Hopper.

In each kernel a block keeps the rows of its two computing warpgroups, and columns pass by in tiles: keys for the output
and dq, queries for dk and dv. A third warpgroup loads these tiles into a ring of `stages` slots and waits with each
until both are done with the slot's last tile. Both take the same steps, which may be none.

Scores are kept in units of exp2, whose factor includes the scale.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # a finite maximum of no scores: the difference of two infinities is none

MATRIX = plgpu.Layout.WGMMA
PER_ROW, PER_COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
WARPGROUPS = 2  # of a block, that compute; the one after them loads
ROWS = 64  # of a warpgroup: Hopper multiplies so many at a time
BLOCK_ROWS = WARPGROUPS * ROWS
COMPUTE_REGISTERS, LOAD_REGISTERS = 240, 24  # of a thread: what fits


@dataclass(frozen=True)
class Bounds:
    """Columns: [any_from, any_to) are seen by some row of the block, [all_from, all_to) by all of the warpgroup."""

    any_from: jax.Array
    any_to: jax.Array
    all_from: jax.Array
    all_to: jax.Array

    def tiles(self, columns: int) -> tuple[jax.Array, jax.Array]:
        """The first tile with a column that is seen, and how many tiles there are up to the last."""
        start = lax.div(self.any_from, jnp.int32(columns))
        return start, jnp.maximum(pl.cdiv(self.any_to, jnp.int32(columns)) - start, 0)

    def whole(self, column: jax.Array | int, columns: int) -> jax.Array:
        """Whether all rows see all `columns` from this one."""
        return (column >= self.all_from) & (column + columns <= self.all_to)


@dataclass(frozen=True)
class _Kernel:
    """What the three share. `group` query heads read one KV head."""

    columns = 128  # of a tile
    stages = 2
    # Causal queries at the end see the most keys, and keys at the beginning are seen by the most queries: the longest
    # tiles start first.
    last_tile_first = True

    scale: float
    softcap: float | None
    group: int
    interpret: bool

    def grid(self, length: int, batch: int, kv_heads: int) -> dict[str, int]:
        """Blocks along each axis, of which the last changes fastest, for so many rows of as many sequences.

        Blocks of a sequence and KV head follow each other: its keys stay in the L2 cache.
        """
        return {"batch": batch, "kv_head": kv_heads, "tile": length // BLOCK_ROWS, "member": self.group}

    def place(self) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """(warpgroup, sequence, KV head, query head)."""
        warpgroup, batch, kv_head, member = (
            lax.axis_index(name) for name in ("warpgroup", "batch", "kv_head", "member")
        )
        return warpgroup, batch, kv_head, kv_head * self.group + member

    @property
    def factor(self) -> float:
        """Makes exponents of exp2 of what `squash` returns."""
        return LOG2_E * (self.scale if self.softcap is None else self.softcap)

    def squash(self, products: jax.Array) -> jax.Array:
        """q·k, with a soft-cap tanh(scale · q·k / softcap)."""
        return products if self.softcap is None else jnp.tanh(products * (self.scale / self.softcap))

    def of_block(self) -> tuple[jax.Array, jax.Array, pl.Slice]:
        """(the block's first row, this warpgroup's, its slice); the loading warpgroup gets those of the last one."""
        tile = lax.axis_index("tile")
        if self.last_tile_first:
            tile = lax.axis_size("tile") - 1 - tile
        start = tile * BLOCK_ROWS
        row = start + jnp.minimum(lax.axis_index("warpgroup"), WARPGROUPS - 1) * ROWS
        return start, row, pl.ds(row, ROWS)

    def share_out(self, compute: Callable[[], None], load: Callable[[], None]) -> None:
        """Each warpgroup's work, with its registers."""

        @pl.when(lax.axis_index("warpgroup") < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(COMPUTE_REGISTERS, action="increase")
            compute()

        @pl.when(lax.axis_index("warpgroup") == WARPGROUPS)
        def _load():
            plgpu.set_max_registers(LOAD_REGISTERS, action="decrease")
            load()

    def slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self.stages))

    def feed(self, steps: jax.Array, loads: Sequence[tuple[Any, Callable[[jax.Array, jax.Array], None]]]) -> None:
        """At every step each of the loads, (barrier that tells when a slot is free, load(step, slot)), in order."""
        stages = self.stages

        @pl.loop(0, steps)
        def _step(step):
            slot = self.slot(step)
            for free, load in loads:
                pl.when(step >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                load(step, slot)

        # A block may end only when nobody is about to arrive at its barriers.
        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _end(step):
            for free, _ in loads:
                plgpu.barrier_wait(free.at[self.slot(step)])

    def ring(self, arrivals: int = 1) -> Any:
        """A barrier for each slot."""
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages)

    def query_bounds(self, first: Any, end: Any, batch: jax.Array) -> Bounds:
        """The keys that this block's queries see. Bounds never fall: the first and last query have the extremes."""
        start, row, _ = self.of_block()
        last_of_block, last = start + BLOCK_ROWS - 1, row + ROWS - 1
        return Bounds(first[batch, start], end[batch, last_of_block], first[batch, last], end[batch, row])

    def multiply_registers(self, accumulator: Any, a: jax.Array, b: Any) -> None:
        """accumulator += a @ b, begun, where a is in registers; the interpreter wants a reference."""
        if not self.interpret:
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
    """x, -inf where the key, which is `start` and the index along `axis`, is not in [first, end)."""
    key = plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=MATRIX)
    across = per_row if axis == 1 else per_column
    return jnp.where((key >= across(first - start, x)) & (key < across(end - start, x)), x, -jnp.inf)


@dataclass(frozen=True)
class Forward(_Kernel):
    """Rows are queries, columns keys."""

    def scratch(self, H: int, dtype: Any) -> dict[str, Any]:
        return {
            "q_out": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),  # the queries, in the end the output
            "k_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "v_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "lse_rows": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
            "q_ready": plgpu.Barrier(num_barriers=WARPGROUPS),
            "k_ready": self.ring(),
            "v_ready": self.ring(),
            "k_free": self.ring(WARPGROUPS),
            "v_free": self.ring(WARPGROUPS),
            "turn": plgpu.Barrier(num_arrivals=WARPGROUPS),
        }

    def __call__(self, q, k, v, first, end, out, lse, *, q_out, lse_rows, q_ready, turn, **rings) -> None:
        warpgroup, batch, kv_head, head = self.place()
        _, _, rows = self.of_block()
        bounds = self.query_bounds(first, end, batch)
        start, steps = bounds.tiles(self.columns)
        k_ring, v_ring = rings["k_ring"], rings["v_ring"]

        def compute():
            q_mine = q_out.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_mine, q_ready.at[warpgroup])
            own_range = tuple(plgpu.load(a.at[batch, rows], layout=PER_ROW, optimized=False) for a in (first, end))
            plgpu.barrier_wait(q_ready.at[warpgroup])
            output, log_sum = self._attend(q_mine, bounds, own_range, turn, rings)
            q_mine[...] = output.astype(out.dtype)
            lse_rows[warpgroup] = log_sum
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_mine, out.at[batch, rows, head])
            plgpu.copy_smem_to_gmem(lse_rows.at[warpgroup], lse.at[batch, head, rows])
            plgpu.wait_smem_to_gmem(0)

        def load():
            def of(source, ring, ready):
                def tile(step, slot):
                    keys = pl.ds((start + step) * self.columns, self.columns)
                    plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], ring.at[slot], ready.at[slot])

                return tile

            k_load, v_load = of(k, k_ring, rings["k_ready"]), of(v, v_ring, rings["v_ready"])
            self.feed(steps, [(rings["k_free"], k_load), (rings["v_free"], v_load)])

        self.share_out(compute, load)

    def _attend(self, q, bounds: Bounds, own_range, turn, rings) -> tuple[jax.Array, jax.Array]:
        """The output [rows, H] and log-sum-exp [rows] of a warpgroup's queries."""
        first, end = own_range
        start, steps = bounds.tiles(self.columns)
        second = lax.axis_index("warpgroup") == 1

        def pass_turn(one: bool | jax.Array = True):
            # Both warpgroups arrive and wait; the second once more before its first step, the first after its last.
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

            new = jnp.maximum(maximum, x.max(axis=1) * self.factor)
            shrink = jnp.exp2(maximum - new)
            p = jnp.exp2(x * self.factor - per_row(new, x))
            acc *= per_row(shrink, acc)
            total = total * shrink + p.sum(axis=1)
            p = p.astype(q.dtype)
            # All of the softmax before the turn is passed: else the compiler may move it behind the next product.
            acc, total, new, p = lax.optimization_barrier((acc, total, new, p))
            pass_turn()
            plgpu.barrier_wait(rings["v_ready"].at[slot])
            acc = self._plus_product(acc, p, rings["v_ring"].at[slot])
            plgpu.barrier_arrive(rings["v_free"].at[slot])
            return acc, new, total

        empty = plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), PER_ROW)
        zero = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
        acc = plgpu.layout_cast(jnp.zeros(q.shape, jnp.float32), MATRIX)
        pass_turn(second)
        acc, maximum, total = lax.fori_loop(0, steps, step, (acc, empty, zero))
        pass_turn(~second)
        acc *= per_row(1 / jnp.where(total == 0, 1.0, total), acc)
        return acc, maximum * (1 / LOG2_E) + jnp.log(total)

    def _plus_product(self, acc: jax.Array, a: jax.Array, b: Any) -> jax.Array:
        """acc + a @ b."""
        if self.interpret:

            def product(ref):
                self.multiply_registers(ref, a, b)
                return ref[...]

            return acc + pl.run_scoped(product, accumulator(*acc.shape))
        in_place: Any = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
        return in_place(plgpu.WGMMAAccumulatorRef.init(acc))


class _Gradient(_Kernel):
    """Scores once more, given the log-sum-exp, and their gradient."""

    def weights(self, products: jax.Array, mask: Callable, whole: jax.Array, log2_sum: jax.Array):
        """(p, the derivative of the soft-cap or None)."""
        x = self.squash(products)
        slope = None if self.softcap is None else 1 - x * x
        x = lax.cond(whole, lambda: x, lambda: mask(x))
        return jnp.exp2(x * self.factor - log2_sum), slope

    def score_gradient(self, p: jax.Array, dp: jax.Array, delta: jax.Array, slope: jax.Array | None) -> jax.Array:
        """By q·k, but for the scale."""
        ds = p * (dp - delta)
        return ds if slope is None else ds * slope

    def each_step(self, steps: jax.Array, free: Any, body: Callable[[jax.Array, Callable[[], None]], None]) -> None:
        """body(step, done) for all steps; it calls done() when all products that earlier steps began are there."""

        def release(step: jax.Array, condition: jax.Array) -> None:
            pl.when(condition)(lambda: plgpu.barrier_arrive(free.at[self.slot(step)]))

        @pl.loop(0, steps)
        def _step(step):
            body(step, lambda: release(step - 1, step > 0))

        plgpu.wgmma_wait(0)
        release(steps - 1, steps > 0)


class QueryGradient(_Gradient):
    """dq. Rows are queries, columns keys."""

    def scratch(self, H: int, dtype: Any) -> dict[str, Any]:
        return {
            "q_dq": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),  # the queries, in the end their gradient
            "dout_rows": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),
            "k_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "v_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "rows_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "ready": self.ring(arrivals=2),
            "free": self.ring(WARPGROUPS),
        }

    def __call__(
        self, q, k, v, first, end, dout, log2_sum, delta, dq, *, q_dq, dout_rows, rows_ready, ready, free, **rings
    ) -> None:
        warpgroup, batch, kv_head, head = self.place()
        _, _, rows = self.of_block()
        bounds = self.query_bounds(first, end, batch)
        start, steps = bounds.tiles(self.columns)

        def compute():
            q_mine, dout_mine = q_dq.at[warpgroup], dout_rows.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_mine, rows_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(dout.at[batch, rows, head], dout_mine, rows_ready.at[warpgroup])
            of_rows = [a.at[batch, rows] for a in (first, end)] + [a.at[batch, head, rows] for a in (log2_sum, delta)]
            of_rows = [plgpu.load(a, layout=PER_ROW, optimized=False) for a in of_rows]
            plgpu.barrier_wait(rows_ready.at[warpgroup])

            def all_steps(dq_acc):
                def body(step, done):
                    slot, key = self.slot(step), (start + step) * self.columns
                    plgpu.barrier_wait(ready.at[slot])
                    tile = {name: ring.at[slot] for name, ring in rings.items()}
                    whole = bounds.whole(key, self.columns)
                    self._step(q_mine, dout_mine, key, of_rows, whole, dq_acc, done, **tile)

                self.each_step(steps, free, body)
                return dq_acc[...]

            gradient = pl.run_scoped(all_steps, accumulator(*q_mine.shape)) * self.scale
            q_mine[...] = gradient.astype(dq.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_mine, dq.at[batch, rows, head])
            plgpu.wait_smem_to_gmem(0)

        def load(step, slot):
            keys = pl.ds((start + step) * self.columns, self.columns)
            for source, ring in ((k, "k_ring"), (v, "v_ring")):
                plgpu.copy_gmem_to_smem(source.at[batch, keys, kv_head], rings[ring].at[slot], ready.at[slot])

        self.share_out(compute, lambda: self.feed(steps, [(free, load)]))

    def _step(self, q, dout, key, of_rows, whole, dq_acc, done, *, k_ring, v_ring) -> None:
        """Adds a tile of keys to dq."""
        first, end, log2_sum, delta = of_rows

        def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, q, k_ring.transpose((1, 0)))
            plgpu.wgmma(dp_acc, dout, v_ring.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # dp may still be under way
            done()
            p, slope = self.weights(s, lambda x: keep_range(x, first, end, key, axis=1), whole, per_row(log2_sum, s))
            return p, slope, dp_acc[...]

        p, slope, dp = pl.run_scoped(products, *[accumulator(ROWS, self.columns)] * 2)
        ds = self.score_gradient(p, dp, per_row(delta, dp), slope)
        self.multiply_registers(dq_acc, ds.astype(q.dtype), k_ring)


class KeyValueGradient(_Gradient):
    """dk and dv. Rows are keys, columns the queries of each query head in turn that reads the KV head."""

    columns = 64
    last_tile_first = False

    def grid(self, length: int, batch: int, kv_heads: int) -> dict[str, int]:
        """As for the others, but tile by tile: that was 6 % faster for packed documents, and no slower for one."""
        return {"tile": length // BLOCK_ROWS, "batch": batch, "kv_head": kv_heads, "member": 1}

    def scratch(self, H: int, dtype: Any) -> dict[str, Any]:
        return {
            "k_dk": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),  # the keys, in the end their gradient
            "v_dv": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),
            "q_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "dout_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "log2_sum_ring": plgpu.SMEM((self.stages, self.columns), jnp.float32),
            "delta_ring": plgpu.SMEM((self.stages, self.columns), jnp.float32),
            "rows_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "ready": self.ring(arrivals=4),
            "free": self.ring(WARPGROUPS),
        }

    def __call__(
        self, q, k, v, first, end, seen_by, dout, log2_sum, delta, dk, dv, *, k_dk, v_dv, rows_ready, **rings
    ) -> None:
        ready, free = rings.pop("ready"), rings.pop("free")
        warpgroup, batch, kv_head, _ = self.place()
        row, rows = self.of_block()[1:]
        bounds = self._bounds(seen_by, batch)
        start, tiles = bounds.tiles(self.columns)
        steps = tiles * self.group

        def query_tile(step):
            """(its slice, the query head)."""
            tile = start + lax.div(step, jnp.int32(self.group))
            return pl.ds(tile * self.columns, self.columns), kv_head * self.group + lax.rem(step, jnp.int32(self.group))

        def compute():
            k_mine, v_mine = k_dk.at[warpgroup], v_dv.at[warpgroup]
            for source, mine in ((k, k_mine), (v, v_mine)):
                plgpu.copy_gmem_to_smem(source.at[batch, rows, kv_head], mine, rows_ready.at[warpgroup])
            plgpu.barrier_wait(rows_ready.at[warpgroup])

            def all_steps(dk_acc, dv_acc):
                def body(step, done):
                    queries, _ = query_tile(step)
                    slot = self.slot(step)
                    plgpu.barrier_wait(ready.at[slot])
                    ranges = first.at[batch, queries], end.at[batch, queries]
                    tile = {name: ring.at[slot] for name, ring in rings.items()}
                    whole = bounds.whole(queries.start, self.columns)
                    self._step(k_mine, v_mine, row, ranges, whole, dk_acc, dv_acc, done, **tile)

                self.each_step(steps, free, body)
                return dk_acc[...], dv_acc[...]

            dk_sum, dv_sum = pl.run_scoped(all_steps, *[accumulator(*k_mine.shape)] * 2)
            k_mine[...] = (dk_sum * self.scale).astype(dk.dtype)
            v_mine[...] = dv_sum.astype(dv.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(k_mine, dk.at[batch, rows, kv_head])
            plgpu.copy_smem_to_gmem(v_mine, dv.at[batch, rows, kv_head])
            plgpu.wait_smem_to_gmem(0)

        def load(step, slot):
            queries, head = query_tile(step)
            for source, ring in ((q, "q_ring"), (dout, "dout_ring")):
                plgpu.copy_gmem_to_smem(source.at[batch, queries, head], rings[ring].at[slot], ready.at[slot])
            for source, ring in ((log2_sum, "log2_sum_ring"), (delta, "delta_ring")):
                plgpu.copy_gmem_to_smem(source.at[batch, head, queries], rings[ring].at[slot], ready.at[slot])

        self.share_out(compute, lambda: self.feed(steps, [(free, load)]))

    def _bounds(self, seen_by: Any, batch: jax.Array) -> Bounds:
        """The queries that see this block's keys."""
        start, row, _ = self.of_block()
        rows = jnp.int32(ROWS)
        of_block = lax.div(start, rows)
        mine, last = lax.div(row, rows), of_block + WARPGROUPS - 1
        any_from, any_to = seen_by[batch, of_block, 0], seen_by[batch, last, 1]
        return Bounds(any_from, any_to, seen_by[batch, mine, 2], seen_by[batch, mine, 3])

    def _step(
        self, k, v, row, ranges, whole, dk_acc, dv_acc, done, *, q_ring, dout_ring, log2_sum_ring, delta_ring
    ) -> None:
        """Adds a tile of queries to dk and dv; scores have keys in their rows."""

        def scores(acc):
            plgpu.wgmma(acc, k, q_ring.transpose((1, 0)))
            return acc[...]

        def mask(x):
            first, end = (plgpu.load(a, layout=PER_COLUMN, optimized=False) for a in ranges)
            return keep_range(x, first, end, row, axis=0)

        shape = accumulator(ROWS, self.columns)
        s = pl.run_scoped(scores, shape)
        done()
        log2_sum = plgpu.load(log2_sum_ring, layout=PER_COLUMN)
        p, slope = self.weights(s, mask, whole, per_column(log2_sum, s))

        def rest(dp_acc):
            plgpu.wgmma(dp_acc, v, dout_ring.transpose((1, 0)))
            self.multiply_registers(dv_acc, p.astype(k.dtype), dout_ring)
            return plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)  # dv may still be under way

        dp = pl.run_scoped(rest, shape)
        delta = plgpu.load(delta_ring, layout=PER_COLUMN)
        ds = self.score_gradient(p, dp, per_column(delta, dp), slope)
        self.multiply_registers(dk_acc, ds.astype(k.dtype), q_ring)
