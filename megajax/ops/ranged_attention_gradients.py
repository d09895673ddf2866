"""The kernels of `ranged_attention` for dq, and for dk and dv. They recompute the scores.

A step's last product still runs when the next step starts, and is done when the next step's scores are done.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops.barriers import not_repeated
from megajax.ops.ranged_attention_kernels import (
    BLOCK_ROWS,
    PER_COLUMN,
    PER_ROW,
    ROWS,
    WARPGROUPS,
    Bounds,
    RangedAttentionKernel,
    accumulator,
    keep_range,
    per_column,
    per_row,
)


class _Gradient(RangedAttentionKernel):
    """The softmax weights, recomputed from the log-sum-exp, and the gradient of the scores."""

    def weights(self, products: jax.Array, mask: Callable, whole: jax.Array, log2_sum: jax.Array):
        """(p, the derivative of the soft-cap or None)."""
        x = self.squash(products)
        slope = None if self.softcap is None else 1 - x * x
        x = lax.cond(whole, lambda: x, lambda: mask(x))
        return jnp.exp2(x * self.options.factor - log2_sum), slope

    def score_gradient(self, p: jax.Array, dp: jax.Array, delta: jax.Array, slope: jax.Array | None) -> jax.Array:
        """The gradient of q·k, without the scale."""
        ds = p * (dp - delta)
        return ds if slope is None else ds * slope

    def each_step(self, steps: jax.Array, free: Any, body: Callable[[jax.Array, Callable[[], None]], None]) -> None:
        """Calls body(step, done) for all steps; body calls done() when all products of earlier steps are done."""

        def release(step: jax.Array, condition: jax.Array) -> None:
            pl.when(condition)(lambda: plgpu.barrier_arrive(free.at[self.slot(step)]))

        @pl.loop(0, steps)
        def _step(step):
            body(step, lambda: release(step - 1, step > 0))

        plgpu.wgmma_wait(0)
        release(steps - 1, steps > 0)


class QueryGradient(_Gradient):
    """dq. Rows are queries, columns keys."""

    @property
    def columns(self) -> int:
        return 64 if self.widths[0] > 128 else 128  # as many as fit into shared memory

    @property
    def stages(self) -> int:
        return 4 if self.widths[0] <= 64 else 2

    def scratch(self, dtype: Any) -> dict[str, Any]:
        H, W = self.widths
        return {
            "q_dq": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),  # the queries, at the end their gradient
            "dout_rows": plgpu.SMEM((WARPGROUPS, ROWS, W), dtype),
            "k_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "v_ring": plgpu.SMEM((self.stages, self.columns, W), dtype),
            "rows_ready": plgpu.Barrier(num_arrivals=2, num_barriers=WARPGROUPS),
            "ready": self.ring(arrivals=2),
            "free": self.ring(WARPGROUPS),
        }

    def __call__(
        self, q, k, v, first, end, dout, log2_sum, delta, dq, *, q_dq, dout_rows, rows_ready, ready, free, **rings
    ) -> None:
        warpgroup, batch, kv_head, head = self.indices()
        _, _, rows = self.own_rows()
        bounds = self.query_bounds(first, end, batch)
        start, steps = bounds.tiles(self.columns)

        def compute():
            q_mine, dout_mine = q_dq.at[warpgroup], dout_rows.at[warpgroup]
            plgpu.copy_gmem_to_smem(q.at[batch, rows, head], q_mine, rows_ready.at[warpgroup])
            plgpu.copy_gmem_to_smem(dout.at[batch, rows, head], dout_mine, rows_ready.at[warpgroup])
            row_values = [a.at[batch, rows] for a in (first, end)] + [
                a.at[batch, head, rows] for a in (log2_sum, delta)
            ]
            row_values = [plgpu.load(a, layout=PER_ROW, optimized=False) for a in row_values]
            plgpu.barrier_wait(rows_ready.at[warpgroup])

            def all_steps(dq_acc):
                def body(step, done):
                    slot, key = self.slot(step), (start + step) * self.columns
                    plgpu.barrier_wait(ready.at[slot])
                    tile = {name: ring.at[slot] for name, ring in rings.items()}
                    whole = bounds.whole(key, self.columns)
                    self._step((q_mine, dout_mine), key, row_values, whole, dq_acc, done, tile)

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

        self.run_warpgroups(compute, steps, [(free, load)])

    def _step(self, rows, key, row_values, whole, dq_acc, done, tile) -> None:
        """Adds a tile of keys to dq."""
        (q, dout), (first, end, log2_sum, delta) = rows, row_values
        k, v = tile["k_ring"], tile["v_ring"]

        def products(s_acc, dp_acc):
            plgpu.wgmma(s_acc, q, k.transpose((1, 0)))
            plgpu.wgmma(dp_acc, dout, v.transpose((1, 0)))
            s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)  # dp may still run
            done()
            p, slope = self.weights(s, lambda x: keep_range(x, first, end, key, axis=1), whole, per_row(log2_sum, s))
            return p, slope, dp_acc[...]

        p, slope, dp = pl.run_scoped(products, *[accumulator(ROWS, self.columns)] * 2)
        ds = self.score_gradient(p, dp, per_row(delta, dp), slope)
        self.multiply_registers(dq_acc, ds.astype(q.dtype), k)


class KeyValueGradient(_Gradient):
    """dk and dv. Rows are keys; columns are queries of all query heads of the KV head, one head after the other."""

    columns = 64
    last_tile_first = False

    @property
    def stages(self) -> int:
        return 3 if self.widths[0] <= 64 else 2  # a third one is slower for keys of 192

    def grid(self, length: int, batch: int, kv_heads: int) -> dict[str, int]:
        """Tiles are the slowest axis: this was 6 % faster for packed documents, and not slower for one document."""
        return {"tile": length // BLOCK_ROWS, "batch": batch, "kv_head": kv_heads, "member": 1}

    def scratch(self, dtype: Any) -> dict[str, Any]:
        H, W = self.widths
        return {
            "k_dk": plgpu.SMEM((WARPGROUPS, ROWS, H), dtype),  # the keys, at the end their gradient
            "v_dv": plgpu.SMEM((WARPGROUPS, ROWS, W), dtype),
            "q_ring": plgpu.SMEM((self.stages, self.columns, H), dtype),
            "dout_ring": plgpu.SMEM((self.stages, self.columns, W), dtype),
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
        warpgroup, batch, kv_head, _ = self.indices()
        row, rows = self.own_rows()[1:]
        bounds = self._bounds(seen_by, batch)
        start, tiles = bounds.tiles(self.columns)
        steps = tiles * self.group

        def query_tile(step):
            """(the slice of queries, the query head)."""
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
                    self._step((k_mine, v_mine), row, ranges, whole, (dk_acc, dv_acc), done, tile)

                self.each_step(steps, free, body)
                return dk_acc[...], dv_acc[...]

            dk_sum, dv_sum = pl.run_scoped(all_steps, accumulator(*k_mine.shape), accumulator(*v_mine.shape))
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

        self.run_warpgroups(compute, steps, [(free, load)])

    def _bounds(self, seen_by: Any, batch: jax.Array) -> Bounds:
        """The queries that see this block's keys."""
        start, row, _ = self.own_rows()
        rows = jnp.int32(ROWS)
        first_part = lax.div(start, rows)
        mine, last = lax.div(row, rows), first_part + WARPGROUPS - 1
        any_from, any_to = seen_by[batch, first_part, 0], seen_by[batch, last, 1]
        return Bounds(any_from, any_to, seen_by[batch, mine, 2], seen_by[batch, mine, 3])

    def _step(self, rows, row, ranges, whole, sums, done, tile) -> None:
        """Adds a tile of queries to dk and dv; rows of the scores are keys."""
        (k, v), (dk_acc, dv_acc) = rows, sums
        q, dout, log2_sums, deltas = (tile[f"{name}_ring"] for name in ("q", "dout", "log2_sum", "delta"))

        def scores(acc):
            plgpu.wgmma(acc, k, q.transpose((1, 0)))
            return acc[...]

        def mask(x):
            first, end = (plgpu.load(a, layout=PER_COLUMN, optimized=False) for a in ranges)
            return keep_range(x, first, end, row, axis=0)

        shape = accumulator(ROWS, self.columns)
        s = pl.run_scoped(scores, shape)
        done()
        log2_sum = plgpu.load(log2_sums, layout=PER_COLUMN)
        p, slope = self.weights(s, mask, whole, per_column(log2_sum, s))

        rounded, wide = p.astype(k.dtype), self.widths[0] > 128
        if wide:  # FP32 weights beside both accumulators would be spilled: 16 % slower
            p = rounded = not_repeated(rounded)

        def weight_gradient(dp_acc):
            plgpu.wgmma(dp_acc, v, dout.transpose((1, 0)))
            self.multiply_registers(dv_acc, rounded, dout)
            # dv may still run; not with wide keys, whose registers are needed: 5 % faster.
            return plgpu.wgmma_accumulator_load(dp_acc, wait_n=0 if wide else 1)

        dp = pl.run_scoped(weight_gradient, shape)
        delta = plgpu.load(deltas, layout=PER_COLUMN)
        ds = self.score_gradient(p.astype(jnp.float32), dp, per_column(delta, dp), slope)
        self.multiply_registers(dk_acc, ds.astype(k.dtype), q)
