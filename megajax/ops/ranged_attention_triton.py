"""Attention with a range of visible keys per query, forward and backward, in Pallas kernels for any GPU since Ampere.

The contract of `ranged_attention`, whose kernels are for Hopper alone, on Triton (jax 0.11 calls that backend
deprecated; Pallas's other one, Mosaic GPU, has no tensor cores before Hopper). FlashAttention-2 (Dao 2023): a program
has a tile of rows and loops over tiles of columns; rows are queries for the output and dq, keys for dk and dv. Tiles
that no row sees are not loaded, and only tiles that contain a bound are masked: the others come first, because the
order of a sum is free. All three kernels are deterministic.

Triton's arrays have powers of two, so a head's width is divided into such parts (192 is 128 and 64).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.query_ranges import LOG2_E, Options, Ranges, of_queries, padded_ranges, seen_by

WIDEST = 256  # of a key or a value: a tile of both fits into shared memory
LOWEST = -1e30  # the maximum of no scores; finite, because the difference of two infinities is NaN
SMALLEST = 16  # the smallest side of a tensor cores' operand

Body = Callable[[jax.Array, bool, Any], Any]  # (tile, whether it is masked, carry) → carry


class AttentionTiling(NamedTuple):
    """The division of a kernel's work: rows and columns of a tile, warps of a program, copies in flight."""

    rows: int
    columns: int
    warps: int
    stages: int


class AttentionTilings(NamedTuple):
    """Of the three kernels."""

    forward: AttentionTiling
    query_gradient: AttentionTiling
    key_gradient: AttentionTiling


# The fastest on an H100, by the widest head; they fit into the shared memory of every GPU since Ampere.
TILINGS = {
    64: AttentionTilings(AttentionTiling(128, 64, 8, 3), AttentionTiling(128, 64, 8, 2), AttentionTiling(64, 64, 4, 2)),
    128: AttentionTilings(AttentionTiling(64, 64, 4, 3), AttentionTiling(64, 64, 4, 2), AttentionTiling(64, 64, 4, 2)),
    192: AttentionTilings(AttentionTiling(64, 64, 4, 2), AttentionTiling(64, 32, 4, 3), AttentionTiling(64, 32, 4, 2)),
    WIDEST: AttentionTilings(
        AttentionTiling(64, 32, 4, 2), AttentionTiling(64, 32, 4, 1), AttentionTiling(32, 32, 4, 2)
    ),
}


@partial(jax.jit, static_argnames=("options", "tilings"))  # it compiles the kernels of equal layers once
def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, ranges: Ranges, options: Options, tilings: AttentionTilings | None = None
) -> tuple[jax.Array, jax.Array]:
    """softmax(softcap(scale · q·k)) v over the keys [first, end) → (out in q's dtype, log-sum-exp `[B, N, Sq]` FP32).

    As `ranged_attention.attend`, for heads up to WIDEST wide.
    """
    tiling = _tilings(tilings, q, v).forward
    kernel = _Kernel(options, tiling, q, k, v)
    B, Sq, N, _ = q.shape
    shapes = [jax.ShapeDtypeStruct((*q.shape[:3], v.shape[-1]), q.dtype), jax.ShapeDtypeStruct((B, N, Sq), jnp.float32)]
    bounds = padded_ranges(tiling.rows, ranges, Sq, k.shape[1])
    return tuple(kernel.launch(kernel.ranged_attention, Sq, kernel.group, (q, k, v, *bounds), shapes))


@partial(jax.jit, static_argnames=("options", "tilings"))
def attend_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ranges: Ranges,
    whole: tuple[jax.Array, jax.Array],
    dout: jax.Array,
    options: Options,
    tilings: AttentionTilings | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients (dq, dk, dv) of `attend`, as those of `ranged_attention.attend_backward`."""
    chosen = _tilings(tilings, q, v)
    delta, log2_sum = of_queries(whole, dout)
    dout, Sq, Sk = dout.astype(q.dtype), q.shape[1], k.shape[1]

    def shape_of(*arrays: jax.Array) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays]

    kernel = _Kernel(options, chosen.query_gradient, q, k, v)
    bounds = padded_ranges(kernel.tiling.rows, ranges, Sq, Sk)
    arrays = q, k, v, *bounds, dout, log2_sum, delta
    [dq] = kernel.launch(kernel.ranged_attention_dq, Sq, kernel.group, arrays, shape_of(q))

    kernel = _Kernel(options, chosen.key_gradient, q, k, v)
    bounds = padded_ranges(kernel.tiling.columns, ranges, Sq, Sk)
    arrays = q, k, v, *bounds, seen_by(*bounds, Sk, kernel.tiling.rows), dout, log2_sum, delta
    dk, dv = kernel.launch(kernel.ranged_attention_dkv, Sk, 1, arrays, shape_of(k, v))
    return dq, dk, dv


def _tilings(given: AttentionTilings | None, q: jax.Array, v: jax.Array) -> AttentionTilings:
    width = max(q.shape[-1], v.shape[-1])
    return given or next(tilings for widest, tilings in TILINGS.items() if width <= widest)


@dataclass(frozen=True)
class _Kernel:
    """The kernels; profiles show their names. Refs hold whole arrays."""

    options: Options
    tiling: AttentionTiling
    q: Any  # arrays, of which only shapes and dtypes are read
    k: Any
    v: Any

    @property
    def group(self) -> int:
        """The number of query heads that read a KV head."""
        return self.q.shape[2] // self.k.shape[2]

    def launch(self, kernel: Callable, rows: int, members: int, arrays: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """The outputs, by one program per tile of `rows`, sequence and head; those of a KV head are neighbours.

        So its keys stay in the L2 cache.
        """
        B, K = self.k.shape[0], self.k.shape[2]
        return pl.pallas_call(
            kernel,
            grid=(members, pl.cdiv(rows, self.tiling.rows), B * K),
            out_shape=list(outputs),
            compiler_params=plgpu.CompilerParams(num_warps=self.tiling.warps, num_stages=self.tiling.stages),
            interpret=self.options.interpret,
            name=kernel.__name__,
        )(*arrays)

    def indices(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(sequence, KV head, query head)."""
        K = jnp.int32(self.k.shape[2])
        both = pl.program_id(2)
        kv_head = lax.rem(both, K)
        return lax.div(both, K), kv_head, kv_head * self.group + pl.program_id(0)

    def ranged_attention(self, q, k, v, first, end, out, lse) -> None:
        """The output and the log-sum-exp. Rows are queries, columns keys."""
        batch, kv_head, head = self.indices()
        row, bounds = self._queries(first, end, batch)
        q_parts = self._load(q, batch, row, self.tiling.rows, head, masked=True)
        own_range = self._ranges(first, end, batch, row, self.tiling.rows)

        def step(tile, masked, carry):
            accs, maximum, total = carry
            key = tile * self.tiling.columns
            k_parts, v_parts = (self._load(a, batch, key, self.tiling.columns, kv_head, masked) for a in (k, v))
            x = self._squash(_product(q_parts, k_parts))[0] * self.options.factor
            if masked:
                x = jnp.where(_visible(key, own_range, x.shape, 1), x, -jnp.inf)
            new = jnp.maximum(maximum, jnp.max(x, axis=1))
            shrink = self._exp2(maximum - new)
            p = self._exp2(x - new[:, None])
            total = total * shrink + jnp.sum(p, axis=1)
            p = p.astype(v.dtype)
            accs = tuple(acc * shrink[:, None] + _dot(p, part) for acc, part in zip(accs, v_parts, strict=True))
            return accs, new, total

        rows = self.tiling.rows
        zeros = tuple(jnp.zeros((rows, width), jnp.float32) for _, width in _parts(self.v.shape[-1]))
        empty, nothing = jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
        accs, maximum, total = self._over_tiles(bounds, step, (zeros, empty, nothing))
        accs = [acc * (1 / jnp.where(total == 0, 1.0, total))[:, None] for acc in accs]
        self._store(out, batch, row, rows, head, accs)
        index = row + lax.iota(jnp.int32, rows)
        log_sum = jnp.where(total == 0, -jnp.inf, maximum * (1 / LOG2_E) + jnp.log(total))
        plgpu.store(lse.at[batch, head, pl.ds(row, rows)], log_sum, mask=index < self.q.shape[1])

    def ranged_attention_dq(self, q, k, v, first, end, dout, log2_sum, delta, dq) -> None:
        """dq. Rows are queries, columns keys; the scores are computed again."""
        batch, kv_head, head = self.indices()
        row, bounds = self._queries(first, end, batch)
        rows, columns = self.tiling.rows, self.tiling.columns
        q_parts, dout_parts = (self._load(a, batch, row, rows, head, masked=True) for a in (q, dout))
        own_range = self._ranges(first, end, batch, row, rows)
        sums, deltas = (self._numbers(a, batch, head, row, rows) for a in (log2_sum, delta))

        def step(tile, masked, accs):
            key = tile * columns
            k_parts, v_parts = (self._load(a, batch, key, columns, kv_head, masked) for a in (k, v))
            x, slope = self._squash(_product(q_parts, k_parts))
            p = self._exp2(x * self.options.factor - sums[:, None])
            if masked:
                p = jnp.where(_visible(key, own_range, p.shape, 1), p, 0.0)
            ds = p * (_product(dout_parts, v_parts) - deltas[:, None])
            ds = (ds if slope is None else ds * slope).astype(q.dtype)
            return tuple(acc + _dot(ds, part) for acc, part in zip(accs, k_parts, strict=True))

        zeros = tuple(jnp.zeros((rows, width), jnp.float32) for _, width in _parts(self.q.shape[-1]))
        accs = self._over_tiles(bounds, step, zeros)
        self._store(dq, batch, row, rows, head, [acc * self.options.scale for acc in accs])

    def ranged_attention_dkv(self, q, k, v, first, end, seen, dout, log2_sum, delta, dk, dv) -> None:
        """dk and dv. Rows are keys; columns are queries of all query heads of the KV head."""
        batch, kv_head, _ = self.indices()
        rows, columns = self.tiling.rows, self.tiling.columns
        tile_of_keys = pl.program_id(1)
        key = tile_of_keys * rows
        k_parts, v_parts = (self._load(a, batch, key, rows, kv_head, masked=True) for a in (k, v))
        bounds = _Bounds(*(seen[batch, tile_of_keys, field] for field in range(4)))

        def head_of_group(member, carry):
            head = kv_head * self.group + member

            def step(tile, masked, carry):
                dk_accs, dv_accs = carry
                query = tile * columns
                q_parts, dout_parts = (self._load(a, batch, query, columns, head, masked) for a in (q, dout))
                sums, deltas = (self._numbers(a, batch, head, query, columns, masked) for a in (log2_sum, delta))
                x, slope = self._squash(_product(k_parts, q_parts))
                p = self._exp2(x * self.options.factor - sums[None, :])
                if masked:
                    own_range = self._ranges(first, end, batch, query, columns)
                    p = jnp.where(_visible(key, own_range, p.shape, 0), p, 0.0)
                rounded = p.astype(q.dtype)
                dv_accs = tuple(acc + _dot(rounded, part) for acc, part in zip(dv_accs, dout_parts, strict=True))
                ds = p * (_product(v_parts, dout_parts) - deltas[None, :])
                ds = (ds if slope is None else ds * slope).astype(q.dtype)
                return tuple(acc + _dot(ds, part) for acc, part in zip(dk_accs, q_parts, strict=True)), dv_accs

            return self._over_tiles(bounds, step, carry)

        zeros = tuple(
            tuple(jnp.zeros((rows, width), jnp.float32) for _, width in _parts(a.shape[-1])) for a in (self.k, self.v)
        )
        dk_accs, dv_accs = lax.fori_loop(0, self.group, head_of_group, zeros)
        self._store(dk, batch, key, rows, kv_head, [acc * self.options.scale for acc in dk_accs])
        self._store(dv, batch, key, rows, kv_head, dv_accs)

    def _queries(self, first, end, batch) -> "tuple[jax.Array, _Bounds]":
        """(the program's first query, the keys that its queries see).

        The longest tiles start first: with causal attention the last queries see the most keys.
        """
        row = (pl.num_programs(1) - 1 - pl.program_id(1)) * self.tiling.rows
        last = row + self.tiling.rows - 1
        # Bounds never decrease, so the first and the last query suffice.
        return row, _Bounds(first[batch, row], end[batch, last], first[batch, last], end[batch, row])

    def _over_tiles(self, bounds: "_Bounds", body: Body, carry: Any) -> Any:
        """The carry after all tiles with a visible column: those that all rows see whole, then those with a mask."""
        columns = jnp.int32(self.tiling.columns)
        start, stop = lax.div(bounds.any_from, columns), pl.cdiv(bounds.any_to, columns)
        stop = jnp.maximum(start, stop)
        whole_from = jnp.clip(pl.cdiv(bounds.all_from, columns), start, stop)
        whole_to = jnp.clip(lax.div(bounds.all_to, columns), whole_from, stop)
        before = whole_from - start

        def masked(index, carry):
            return body(jnp.where(index < before, start + index, whole_to + (index - before)), True, carry)

        carry = lax.fori_loop(whole_from, whole_to, lambda tile, carry: body(tile, False, carry), carry)
        return lax.fori_loop(0, before + (stop - whole_to), masked, carry)

    def _squash(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(q·k, None), or with a soft-cap tanh(scale · q·k / softcap) and the derivative of the soft-cap."""
        if self.options.softcap is None:
            return products, None
        x = products * (self.options.scale / self.options.softcap)
        x = jnp.tanh(x) if self.options.interpret else _instruction("tanh.approx.f32 $0, $1;", x)
        return x, 1 - x * x

    def _exp2(self, x: jax.Array) -> jax.Array:
        """By the GPU's instruction; the library needs three more for results below 1e-38."""
        return jnp.exp2(x) if self.options.interpret else _instruction("ex2.approx.ftz.f32 $0, $1;", x)

    def _load(self, ref, batch, start, count: int, head, masked: bool) -> list[jax.Array]:
        """The parts `[count, width]` of some tokens' heads; zeros after the last token and after the width."""
        length, H = ref.shape[1], ref.shape[3]
        parts = []
        for column, width in _parts(H):
            mask = _inside(start, count, length, column, width, H, masked)
            block = ref.at[batch, pl.ds(start, count), head, pl.ds(jnp.int32(column), width)]
            parts.append(plgpu.load(block, mask=mask, other=None if mask is None else 0.0))
        return parts

    def _store(self, ref, batch, start, count: int, head, parts: Sequence[jax.Array]) -> None:
        length, H = ref.shape[1], ref.shape[3]
        for (column, width), part in zip(_parts(H), parts, strict=True):
            mask = _inside(start, count, length, column, width, H, True)
            block = ref.at[batch, pl.ds(start, count), head, pl.ds(jnp.int32(column), width)]
            plgpu.store(block, part.astype(ref.dtype), mask=mask)

    def _numbers(self, ref, batch, head, start, count: int, masked: bool = True) -> jax.Array:
        """One number of each token; zero after the last one, which sees no key."""
        block, length = ref.at[batch, head, pl.ds(start, count)], ref.shape[2]
        if not masked or length % count == 0:
            return plgpu.load(block)
        return plgpu.load(block, mask=start + lax.iota(jnp.int32, count) < length, other=0.0)

    def _ranges(self, first, end, batch, start, count: int) -> tuple[jax.Array, jax.Array]:
        return first[batch, pl.ds(start, count)], end[batch, pl.ds(start, count)]


class _Bounds(NamedTuple):
    """Columns: some row sees [any_from, any_to), all rows see [all_from, all_to)."""

    any_from: jax.Array
    any_to: jax.Array
    all_from: jax.Array
    all_to: jax.Array


def _parts(width: int) -> list[tuple[int, int]]:
    """The (first column, number of columns) of the parts of a head: the second of two may have more than the head."""
    largest = 1 << (width.bit_length() - 1)
    if width <= SMALLEST or width == largest:
        return [(0, max(width, SMALLEST) if width <= SMALLEST else width)]
    return [(0, largest), (largest, max(SMALLEST, 1 << (width - largest - 1).bit_length()))]


def _inside(start, count: int, length: int, column: int, width: int, H: int, masked: bool) -> jax.Array | None:
    """Whether a block's entries are in the array `[length, H]`; None if all are."""
    mask = None
    if masked and length % count:
        mask = jnp.broadcast_to((start + lax.iota(jnp.int32, count) < length)[:, None], (count, width))
    if column + width > H:
        columns = jnp.broadcast_to((column + lax.iota(jnp.int32, width) < H)[None, :], (count, width))
        mask = columns if mask is None else mask & columns
    return mask


def _dot(a: jax.Array, b: jax.Array, axis_of_b: int = 0) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (axis_of_b,)), ((), ())), preferred_element_type=jnp.float32)


def _product(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> jax.Array:
    """a bᵀ, summed over the parts of a head."""
    return sum(_dot(one, other, 1) for one, other in zip(a, b, strict=True))  # type: ignore[return-value]


def _visible(key: jax.Array, ranges: tuple[jax.Array, jax.Array], shape: tuple[int, ...], axis: int) -> jax.Array:
    """Whether a key is in its query's range; keys are `key` and the following ones, along `axis`."""
    first, end = (jnp.expand_dims(bound, axis) for bound in ranges)
    index = key + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (index >= first) & (index < end)


def _instruction(ptx: str, x: jax.Array) -> jax.Array:
    [result] = plgpu.elementwise_inline_asm(
        ptx, args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)]
    )
    return result
