"""Quantisation to FP8 of rows in groups, in one pass over memory, for Hopper GPUs (Pallas, Triton).

The functions of `grouped_fp8_reference`, with its contract. As in `fp8_kernels`, a block computes one tile in float32
and writes the tile and its transpose. Tiles are parts of steps (`grouped_rows`), so a tile has rows of one group only,
and its transpose is aligned. Blocks after the last step write nothing.

q may have more rows than the input, and q_t more columns than necessary: Triton's addresses of FP8 arrays between 2 and
4 GiB are wrong, so such arrays are made larger.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops import mlp_kernel
from megajax.ops.fp8_kernels import CastTiling, halves, largest_magnitude
from megajax.ops.fp8_reference import Quantised, saturate
from megajax.ops.grouped_fp8_reference import amax
from megajax.ops.grouped_rows import ALIGNMENT, STEP, padded_rows, steps

__all__ = [
    "TilePass",
    "addressable",
    "amax",
    "cast_transpose",
    "gated_amax",
    "gated_backward_amax",
    "gated_backward_cast_transpose",
    "gated_backward_pass",
    "gated_cast_transpose",
    "gated_pass",
    "gradient_of_weights",
    "read_tiles",
    "transpose",
]

TILING = CastTiling()


class TilePass(NamedTuple):
    """The computation of a kernel on each tile of rows, and its settings."""

    name: str
    # Float32 tiles [tokens, features] of all parts of all operands and of the weights -> a tile for each part of the
    # result, and sums over the tile's features, if any.
    compute: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]
    parts: int
    sums: int
    tiling: CastTiling
    interpret: bool


def cast_transpose(
    x_rf: jax.Array,
    group_sizes_e: jax.Array,
    scale: jax.Array,
    dtype: Any,
    *,
    tiling: CastTiling = TILING,
    interpret: bool = False,
) -> Quantised:
    """x [R, F] quantised: q [R, F] and q_t [F, P] in `dtype`, amax."""

    def compute(x):
        return (x,), ()

    how = TilePass("grouped_quantise", compute, 1, 0, tiling, interpret)
    q, q_t, _, largest = _over_steps(how, [x_rf[:, None]], None, group_sizes_e, scale, dtype)
    return q, q_t, largest


def transpose(
    q_rf: jax.Array, group_sizes_e: jax.Array, *, tiling: CastTiling = TILING, interpret: bool = False
) -> jax.Array:
    """The transpose [F, P] of rows [R, F] that are quantised already."""
    (R, F), block_t, block_f = q_rf.shape, tiling.tokens, tiling.features
    P, tiles = padded_rows(R, len(group_sizes_e)), STEP // tiling.tokens
    missing = addressable(R, F, ALIGNMENT) - R

    def kernel(step_ref, rows_ref, transposed_ref) -> None:
        tile = StepTile.of(step_ref, tiling, F)

        @pl.when(tile.count > 0)
        def _some_rows():
            values = plgpu.load(rows_ref.at[tile.rows, tile.columns], mask=tile.mask, other=0)
            plgpu.store(transposed_ref, values.T, mask=tile.mask_of_transpose)

    bits = lax.bitcast_convert_type(q_rf, jnp.uint8)
    transposed = pl.pallas_call(
        kernel,
        grid=(pl.cdiv(F, block_f), P // block_t),
        in_specs=[pl.BlockSpec((1, 2), lambda f, t: (lax.div(t, np.int32(tiles)), 0)), pl.BlockSpec()],
        out_specs=pl.BlockSpec((block_f, block_t), lambda f, t: (f, t)),
        out_shape=jax.ShapeDtypeStruct((F, addressable(P, F, STEP)), jnp.uint8),
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps),
        interpret=interpret,
        name="grouped_transpose",
    )(steps(group_sizes_e, P), jnp.pad(bits, ((0, missing), (0, 0))) if missing else bits)
    return lax.bitcast_convert_type(transposed, q_rf.dtype)


def gated_cast_transpose(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    group_sizes_e: jax.Array,
    scale: jax.Array,
    dtype: Any,
    *,
    tiling: CastTiling = TILING,
    interpret: bool = False,
) -> Quantised:
    """activation(gate) · up · weight quantised: gate_up [R, 2F], gate first -> q [R, F], q_t [F, P], amax."""
    how = gated_pass(kind, tiling, interpret)
    q, q_t, _, largest = _over_steps(how, [halves(gate_up_rf)], weights_r, group_sizes_e, scale, dtype)
    return q, q_t, largest


def gated_backward_cast_transpose(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    group_sizes_e: jax.Array,
    scale: jax.Array,
    dtype: Any,
    *,
    tiling: CastTiling = TILING,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For dact [R, F] the gradient of gate_up, quantised -> q [R, 2F], q_t [2F, P], amax, gradient of the weights [R].

    The gradient of the weights has their dtype, and is 0 after the last group.
    """
    how, operands = gated_backward_pass(kind, tiling, interpret), [halves(gate_up_rf), dact_rf[:, None]]
    q, q_t, [sums], largest = _over_steps(how, operands, weights_r, group_sizes_e, scale, dtype)
    return q, q_t, largest, gradient_of_weights(sums, weights_r, group_sizes_e)


def gradient_of_weights(sums_fr: jax.Array, weights_r: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """The sums over tiles' features, added up: the gradient of the weights [R], in their dtype."""
    dweights = jnp.where(jnp.arange(len(weights_r)) < group_sizes_e.sum(), sums_fr.sum(axis=0), 0)
    return dweights.astype(weights_r.dtype)


def gated_amax(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    group_sizes_e: jax.Array,
    *,
    tiling: CastTiling = TILING,
    interpret: bool = False,
) -> jax.Array:
    """Only the amax of `gated_cast_transpose`."""
    return _over_steps(gated_pass(kind, tiling, interpret), [halves(gate_up_rf)], weights_r, group_sizes_e)[-1]


def gated_backward_amax(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    group_sizes_e: jax.Array,
    *,
    tiling: CastTiling = TILING,
    interpret: bool = False,
) -> jax.Array:
    """Only the amax of `gated_backward_cast_transpose`."""
    how, operands = gated_backward_pass(kind, tiling, interpret), [halves(gate_up_rf), dact_rf[:, None]]
    return _over_steps(how, operands, weights_r, group_sizes_e)[-1]


def gated_pass(kind: str, tiling: CastTiling, interpret: bool) -> TilePass:
    def compute(gate, up, weight):
        return (mlp_kernel.gated(kind, gate, up, interpret) * weight,), ()

    return TilePass("grouped_activation", compute, 1, 0, tiling, interpret)


def gated_backward_pass(kind: str, tiling: CastTiling, interpret: bool) -> TilePass:
    def compute(gate, up, dact, weight):
        act, gradients = mlp_kernel.gated_gradients(kind, gate, up, dact, interpret)
        return [gradient * weight for gradient in gradients], (jnp.sum(act * dact, axis=1),)

    return TilePass("grouped_activation_gradient", compute, 2, 1, tiling, interpret)


def _over_steps(
    how: TilePass,
    operands: list[jax.Array],
    weights: jax.Array | None,
    group_sizes: jax.Array,
    scale: jax.Array | None = None,
    dtype: Any = None,
) -> Any:
    """Operands [R, parts, F] -> (q [R, parts · F], q_t [parts · F, P], sums over tiles' features [F / tile, R], amax).

    (amax,) without a scale.
    """
    R, _, F = operands[0].shape
    block_t, block_f = how.tiling.tokens, how.tiling.features
    assert STEP % block_t == 0, "tiles are parts of steps"
    P, blocks_f, tiles = padded_rows(R, len(group_sizes)), pl.cdiv(F, block_f), STEP // block_t
    inputs = [steps(group_sizes, P), *operands, *(a.reshape(-1) for a in (weights, scale) if a is not None)]
    whole = pl.BlockSpec()
    out_shape = [jax.ShapeDtypeStruct((P // block_t, blocks_f), jnp.int32)]
    out_specs = [pl.BlockSpec((1, 1), lambda f, t: (t, f))]
    if scale is not None:
        width = how.parts * F
        q = jax.ShapeDtypeStruct((addressable(R, width, ALIGNMENT), how.parts, F), dtype)
        q_t = jax.ShapeDtypeStruct((how.parts, F, addressable(P, width, STEP)), dtype)
        sums = [jax.ShapeDtypeStruct((blocks_f, R), jnp.float32)] * how.sums
        out_shape = [q, q_t, *sums, *out_shape]
        transposed = pl.BlockSpec((how.parts, block_f, block_t), lambda f, t: (0, f, t))
        out_specs = [whole, transposed, *[whole] * how.sums, *out_specs]
    *quantised, magnitudes = pl.pallas_call(
        _kernel(how, [operand.shape[1] for operand in operands], F, weights is not None, dtype),
        grid=(blocks_f, P // block_t),  # consecutive blocks are neighbours along the features
        in_specs=[pl.BlockSpec((1, 2), lambda f, t: (lax.div(t, np.int32(tiles)), 0)), *[whole] * (len(inputs) - 1)],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=how.tiling.num_warps),
        interpret=how.interpret,
        name=how.name if scale is not None else f"{how.name}_amax",
    )(*inputs)
    largest = lax.bitcast_convert_type(jnp.max(magnitudes), jnp.float32)
    if scale is None:
        return (largest,)
    q, q_t, *sums = quantised
    return q.reshape(q.shape[0], -1), q_t.reshape(-1, q_t.shape[-1]), sums, largest


class StepTile(NamedTuple):
    """A program's tile of a step's rows."""

    count: jax.Array  # the step's rows
    rows: pl.Slice
    columns: pl.Slice
    held: jax.Array  # [tokens]: whether a row is one of the step's
    mask: jax.Array  # [tokens, features]: and a column one of F
    inside: jax.Array | None  # [features]: whether a column is one of F; None: all are

    @classmethod
    def of(cls, step_ref: Any, tiling: CastTiling, F: int) -> "StepTile":
        block_t, block_f = tiling.tokens, tiling.features
        f, t = pl.program_id(0), pl.program_id(1)
        first, count = step_ref[0, 0], step_ref[0, 1]
        before = lax.rem(t, np.int32(STEP // block_t)) * block_t  # rows of the step in other tiles
        rows, columns = pl.ds(first + before, block_t), pl.ds(f * block_f, block_f)
        held = lax.iota(jnp.int32, block_t) < count - before
        inside = f * block_f + lax.iota(jnp.int32, block_f) < F
        mask = jnp.broadcast_to(held[:, None] & inside[None] if F % block_f else held[:, None], (block_t, block_f))
        return cls(count, rows, columns, held, mask, inside if F % block_f else None)

    @property
    def mask_of_transpose(self) -> jax.Array | None:
        """Zeros after the step's last row are written too."""
        return None if self.inside is None else self.inside[:, None]


def _kernel(how: TilePass, parts: list[int], F: int, weighted: bool, dtype: Any) -> Callable:
    """The kernel for operands with these numbers of parts; dtype None: only the amax."""

    def kernel(step_ref, *refs: Any) -> None:
        amax_ref, f, tile = refs[-1], pl.program_id(0), StepTile.of(step_ref, how.tiling, F)
        count, rows, columns, held, mask, _ = tile

        def compute():
            weight = refs[len(parts)] if weighted else None
            values, sums = how.compute(*read_tiles(refs[: len(parts)], parts, weight, (rows, columns), held, mask))
            if dtype is None:
                return largest_magnitude(values), (), ()
            scaled = [value * refs[len(parts) + weighted][0] for value in values]
            # On the GPU the conversion itself saturates, and keeps NaN.
            qs = [(saturate(value, dtype) if how.interpret else value).astype(dtype) for value in scaled]
            return largest_magnitude(values), tuple(qs), tuple(sums)

        def nothing():
            if dtype is None:
                return count, (), ()  # count is 0
            return count, how.parts * (jnp.zeros(mask.shape, dtype),), how.sums * (jnp.zeros(held.shape, jnp.float32),)

        # The results come from a branch, so the compiler cannot transpose before the arithmetic. With weights, which it
        # would then load in two layouts, it would do all arithmetic twice.
        amax_ref[0, 0], qs, sums = lax.cond(count > 0, compute, nothing)
        if dtype is None:
            return

        @pl.when(count > 0)
        def _some_rows():
            q_ref, q_t_ref, *sums_refs = refs[len(parts) + weighted + 1 : -1]
            within = tile.mask_of_transpose
            for part, q in enumerate(qs):
                plgpu.store(q_ref.at[rows, np.int32(part), columns], q, mask=mask)
                plgpu.store(q_t_ref.at[np.int32(part)], q.T, mask=within)
            for ref, total in zip(sums_refs, sums, strict=True):
                plgpu.store(ref.at[f, rows], total, mask=held)

    return kernel


def read_tiles(
    operands: Sequence[Any], parts: Sequence[int], weights: Any, tile: tuple[pl.Slice, pl.Slice], held: Any, mask: Any
) -> list[jax.Array]:
    """The FP32 tiles at (rows, features) of all parts of refs [R, parts, F], and of the weights [R] of `held` rows."""
    rows, features = tile

    def load(ref: Any, part: int) -> jax.Array:
        return plgpu.load(ref.at[rows, np.int32(part), features], mask=mask, other=0.0).astype(jnp.float32)

    tiles = [load(ref, part) for ref, n in zip(operands, parts, strict=True) for part in range(n)]
    if weights is not None:
        weight = plgpu.load(weights.at[rows], mask=held, other=0.0).astype(jnp.float32)
        tiles.append(jnp.broadcast_to(weight[:, None], mask.shape))
    return tiles


def addressable(rows: int, width: int, multiple: int) -> int:
    """`rows`, or more if Triton cannot count the FP8 array's elements: it can up to 2³¹, and in 64 bits from 2³² on."""
    if 2**31 < rows * width <= 2**32:
        return pl.cdiv(2**32 // width + 1, multiple) * multiple
    return rows
