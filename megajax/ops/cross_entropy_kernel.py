"""Loss and gradient of the cross-entropy in one kernel that reads each row of logits twice.

The contract of `cross_entropy.chunk_loss_and_grad`, as Pallas kernels on Triton, one program per row. The first pass
computes the row's maximum and the sum of exponentials relative to it (Milakov & Gimelshein, "Online normalizer
calculation for softmax", 2018, https://arxiv.org/abs/1805.02867); the second pass writes the gradient. It runs
backwards, so that it starts with the columns that are still in the L2 cache. With a sharded vocabulary the passes are
two kernels, with the reductions over the shards between them.

Any number of rows and columns is allowed. Multiples of 16 columns are fast, because rows are then aligned for 16-byte
accesses. jax 0.11 calls the Triton backend deprecated; Pallas's other one, Mosaic GPU, would need its own kernels.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.cross_entropy import Vocabulary

LOG2_E = math.log2(math.e)
LOWEST = float(jnp.finfo(jnp.float32).min)  # finite, because the difference of two infinities is NaN


@dataclass(frozen=True)
class RowTiling:
    """The division of a row into steps.

    A vector has `lanes` columns, a power of two. Each lane has its own maximum and sum up to the end of the row, so
    warps do not wait for each other. A step reads `unroll` vectors at the same time. Four lanes per thread are one load
    of 16 bytes. With 1024 threads a multiprocessor computes one row at a time: with fewer rows in flight, more of each
    stays in the L2 cache between the passes.
    """

    lanes: int = 4096
    unroll: int = 4
    num_warps: int = 32
    interpret: bool = False  # runs on any device, for tests


def chunk_loss_and_grad(
    logits_cv: jax.Array,
    targets_c: jax.Array,
    mask_c: jax.Array,
    scale: jax.Array | float,
    dtype: Any,
    vocabulary: Vocabulary,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    tiling: RowTiling = RowTiling(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`cross_entropy.chunk_loss_and_grad`, in float32 for logits of at most 32 bits."""
    (C, V), start, size = logits_cv.shape, vocabulary.start, vocabulary.size
    mask = mask_c.astype(jnp.float32)
    true_columns = jnp.clip(size - start, 0, V)
    target_columns = targets_c - start
    ours = (target_columns >= 0) & (target_columns < true_columns)
    target_columns = jnp.where(ours, target_columns, -1)  # no column is -1
    targets = jnp.take_along_axis(logits_cv, jnp.maximum(target_columns, 0)[:, None], axis=1)[:, 0]
    targets = vocabulary.capped(targets)

    may_be_padded = not isinstance(start, int) or start + V > size
    passes = _Passes(V, may_be_padded, vocabulary.softcap, z_loss, smoothing, smoothing / size, tiling)
    inputs = [logits_cv, true_columns.astype(jnp.int32).reshape(1)]
    to_gradient = [target_columns.astype(jnp.int32), (mask * scale).astype(jnp.float32)]
    row, statistic = jax.ShapeDtypeStruct((C, V), dtype), jax.ShapeDtypeStruct((C,), jnp.float32)
    if vocabulary.reduce_max is None or vocabulary.reduce_sum is None:
        outputs = [row, statistic, statistic]
        gradient, maximum, total = _over_rows(passes.cross_entropy, inputs + to_gradient, outputs, tiling)
        sums = [jnp.where(ours, targets - maximum, 0)]
        if smoothing:
            sums.append(_sum_of_logits(logits_cv, true_columns, vocabulary, maximum))
    else:
        own_maximum, own_total = _over_rows(passes.cross_entropy_statistics, inputs, [statistic, statistic], tiling)
        maximum = vocabulary.reduce_max(own_maximum)
        own_total *= jnp.exp(own_maximum - maximum)
        sums = [own_total, jnp.where(ours, targets - maximum, 0)]
        if smoothing:
            sums.append(_sum_of_logits(logits_cv, true_columns, vocabulary, maximum))
        total, *sums = vocabulary.reduce_sum(jnp.stack(sums))
        to_gradient += [maximum, total]
        [gradient] = _over_rows(passes.cross_entropy_gradient, inputs + to_gradient, [row], tiling)

    shifted = sums[0] if not smoothing else (1 - smoothing) * sums[0] + smoothing / size * sums[1]
    log_total = jnp.log(total)
    loss = jnp.sum(mask * (log_total - shifted))
    return loss, jnp.sum(mask * z_loss * jnp.square(log_total + maximum)), gradient


@dataclass(frozen=True)
class _Passes:
    """The kernels; profiles show their names. Refs hold one row: logits and gradient [V], all others [1]."""

    columns: int
    may_be_padded: bool
    softcap: float | None
    z_loss: float
    smoothing: float
    share_of_each: float  # of the smoothing, for one token of the vocabulary
    tiling: RowTiling

    def cross_entropy_statistics(self, logits, true_columns, maximum, total) -> None:
        maximum[0], total[0] = self._maximum_and_total(logits, true_columns[0])

    def cross_entropy_gradient(self, logits, true_columns, target_column, weight, maximum, total, gradient) -> None:
        row = logits, true_columns[0], target_column[0], weight[0]
        self._write_gradient(*row, maximum[0], total[0], gradient)

    def cross_entropy(self, logits, true_columns, target_column, weight, gradient, maximum, total) -> None:
        row_maximum, row_total = self._maximum_and_total(logits, true_columns[0])
        row = logits, true_columns[0], target_column[0], weight[0]
        self._write_gradient(*row, row_maximum, row_total, gradient)
        maximum[0], total[0] = row_maximum, row_total

    def _maximum_and_total(self, logits, true_columns) -> tuple[jax.Array, jax.Array]:
        """max x and Σ exp(x - max x) over the true columns; LOWEST and 0 if there are none."""

        def step(starts, masked, carry):
            maximum, total = carry
            vectors = [self._load(logits, start, masked, "evict_last") for start in starts]
            true = functools.partial(self._true_logits, masked=masked, true_columns=true_columns)
            vectors = [true(x, start)[0] for x, start in zip(vectors, starts, strict=True)]
            new = functools.reduce(jnp.maximum, vectors, maximum)
            return new, sum((self._exp(x - new) for x in vectors), total * self._exp(maximum - new))

        lanes = (self.tiling.lanes,)
        maximum, total = self._steps(step, (jnp.full(lanes, LOWEST, jnp.float32), jnp.zeros(lanes, jnp.float32)))
        row_maximum = jnp.max(maximum)
        return row_maximum, jnp.sum(total * self._exp(maximum - row_maximum))

    def _write_gradient(self, logits, true_columns, target_column, weight, maximum, total, gradient) -> None:
        """weight · (softmax · (1 + 2 · z_loss · lse) - one-hot target), through the soft-cap."""
        share = weight * (1 + 2 * self.z_loss * (jnp.log(total) + maximum)) / total

        def step(starts, masked, carry):
            vectors = [self._load(logits, start, masked, "evict_first") for start in starts]
            for x, start in zip(vectors, starts, strict=True):
                x, slope = self._true_logits(x, start, masked, true_columns)
                is_target = lax.iota(jnp.int32, self.tiling.lanes) == target_column - start
                if self.smoothing:
                    wanted = jnp.where(is_target, weight * (1 - self.smoothing), 0.0) + weight * self.share_of_each
                    wanted = jnp.where(self._before(true_columns, start), wanted, 0.0)
                else:
                    wanted = jnp.where(is_target, weight, 0.0)
                dx = self._exp(x - maximum) * share - wanted
                dx = dx if slope is None else dx * slope
                self._store(gradient, start, masked, dx.astype(gradient.dtype))
            return carry

        self._steps(step, (), backwards=True)

    def _steps(self, step: Callable, carry: Any, backwards: bool = False) -> Any:
        """The carry after all calls of step(first columns of vectors, whether they may pass the row's end, carry)."""
        lanes, width = self.tiling.lanes, self.tiling.lanes * self.tiling.unroll
        whole = self.columns // width
        rest = range(whole * width, self.columns, lanes)

        def whole_step(index, carry):
            start = width * (whole - 1 - index if backwards else index)
            return step([start + offset for offset in range(0, width, lanes)], False, carry)

        if rest and backwards:
            carry = step(rest, True, carry)
        carry = lax.fori_loop(0, whole, whole_step, carry)
        if rest and not backwards:
            carry = step(rest, True, carry)
        return carry

    def _load(self, logits, start, masked: bool, eviction_policy: str) -> jax.Array:
        mask = self._before(self.columns, start) if masked else None
        other = 0.0 if masked else None
        return plgpu.load(self._at(logits, start), mask=mask, other=other, eviction_policy=eviction_policy)

    def _store(self, gradient, start, masked: bool, values: jax.Array) -> None:
        mask = self._before(self.columns, start) if masked else None
        plgpu.store(self._at(gradient, start), values, mask=mask, eviction_policy="evict_first")

    def _true_logits(self, x, start, masked: bool, true_columns) -> tuple[jax.Array, jax.Array | None]:
        """The soft-capped logits, -inf in padding, and their derivative in x (None: 1)."""
        x, slope = _softcapped(x.astype(jnp.float32), self.softcap)
        if self.may_be_padded or masked:
            x = jnp.where(self._before(true_columns if self.may_be_padded else self.columns, start), x, -jnp.inf)
        return x, slope

    def _before(self, end, start) -> jax.Array:
        return start + lax.iota(jnp.int32, self.tiling.lanes) < end

    def _at(self, ref, start):
        # Pallas does not check an array start against the end of the row; the masks handle it.
        return ref.at[pl.ds(jnp.asarray(start, jnp.int32), self.tiling.lanes)]

    def _exp(self, x) -> jax.Array:
        """exp(x) by the GPU's instruction for 2^x; the library needs three more for results below 1e-38."""
        x = x * LOG2_E
        if self.tiling.interpret:
            return jnp.exp2(x)
        [result] = plgpu.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[x],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return result


def _softcapped(x: jax.Array, softcap: float | None) -> tuple[jax.Array, jax.Array | None]:
    """softcap · tanh(x / softcap) and its derivative in x, None for 1."""
    if softcap is None:
        return x, None
    tanh = jnp.tanh(x / softcap)
    return softcap * tanh, 1 - tanh * tanh


def _sum_of_logits(logits_cv: jax.Array, true_columns: jax.Array, vocabulary: Vocabulary, maximum: jax.Array):
    """Σ (x - maximum) over the true columns, `[C]`: one more read of the logits, by XLA, with label smoothing only."""
    x = vocabulary.capped(logits_cv)
    is_true = jnp.arange(x.shape[1])[None, :] < true_columns
    return jnp.where(is_true, x - maximum[:, None], 0).sum(axis=1)


def _over_rows(
    kernel: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    tiling: RowTiling,
) -> list[jax.Array]:
    """The outputs of one program per row; arrays are [C, V], [C], or [1] for all rows."""
    rows, columns = inputs[0].shape

    def spec(array: Any) -> pl.BlockSpec:
        if len(array.shape) == 2:
            return pl.BlockSpec((None, columns), lambda row: (row, 0))
        return pl.BlockSpec((1,), (lambda row: (row,)) if array.shape[0] == rows else (lambda row: (0,)))

    return pl.pallas_call(
        kernel,
        grid=(rows,),
        in_specs=[spec(array) for array in inputs],
        out_specs=[spec(array) for array in outputs],
        out_shape=list(outputs),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps),
        interpret=tiling.interpret,
    )(*inputs)
