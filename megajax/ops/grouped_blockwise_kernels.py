"""Quantisation of experts' rows to `blockwise` FP8 along both dimensions, in one pass over memory (Pallas, Triton).

As `blockwise_fp8_kernels`, but a tile is a step of the sum over rows (`grouped_rows`): it has up to 128 rows of one
group, so the blocks of a group's columns begin with its first row. Numbers and scales after the last group, and the
transpose's steps after the last one, are undefined.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.blockwise_fp8 import BLOCK
from megajax.ops.blockwise_fp8_kernels import E4M3, WARPS, BothWays, ScaledOperand, power_scaled, quantise_weight
from megajax.ops.fp8_kernels import CastTiling, halves
from megajax.ops.grouped_fp8_kernels import (
    TilePass,
    addressable,
    gated_backward_pass,
    gated_pass,
    gradient_of_weights,
    read_tiles,
)
from megajax.ops.grouped_rows import ALIGNMENT, STEP, padded_rows, steps


def quantise(x_rf: jax.Array, group_sizes_e: jax.Array, *, warps: int = WARPS, interpret: bool = False) -> BothWays:
    """x [R, F] of groups → [R, F] and [F, P], P as `padded_rows`, which may be longer; F is a multiple of 128."""
    how = TilePass("grouped_blockwise_quantise", lambda x: ((x,), ()), 1, 0, _tiling(warps), interpret)
    return _over_steps(how, [x_rf[:, None]], None, group_sizes_e)[0]


def gated(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    group_sizes_e: jax.Array,
    *,
    warps: int = WARPS // 2,
    interpret: bool = False,
) -> BothWays:
    """activation(gate) · up · weight: gate_up [R, 2F], gate first → [R, F] and [F, P]."""
    return _over_steps(gated_pass(kind, _tiling(warps), interpret), [halves(gate_up_rf)], weights_r, group_sizes_e)[0]


def gated_backward(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    group_sizes_e: jax.Array,
    *,
    warps: int = WARPS,
    interpret: bool = False,
) -> tuple[BothWays, jax.Array]:
    """For dact [R, F] the gradients of gate_up, [R, 2F] and [2F, P], and of the weights [R], in their dtype.

    The gradient of the weights is 0 after the last group.
    """
    how, operands = gated_backward_pass(kind, _tiling(warps), interpret), [halves(gate_up_rf), dact_rf[:, None]]
    quantised, [sums] = _over_steps(how, operands, weights_r, group_sizes_e)
    return quantised, gradient_of_weights(sums, weights_r, group_sizes_e)


def quantise_weights(w: jax.Array, which: str, *, interpret: bool = False) -> ScaledOperand:
    """w [E, in, out] → [E, out, in] for an "input", [E, in, out] for a "gradient"."""
    quantise = jax.vmap(lambda matrix: quantise_weight(matrix, which, interpret=interpret))
    E, size = len(w), math.prod(w.shape[1:])
    if addressable(E, size, 1) == E:
        return quantise(w)
    parts = [quantise(w[start : start + 2**31 // size]) for start in range(0, E, 2**31 // size)]
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)


def _tiling(warps: int) -> CastTiling:
    return CastTiling(STEP, BLOCK, warps)


def _over_steps(
    how: TilePass, operands: list[jax.Array], weights: jax.Array | None, group_sizes: jax.Array
) -> tuple[BothWays, list[jax.Array]]:
    """Operands [R, parts, F] → (parts · F numbers of each row, sums over tiles' features [F / 128, R])."""
    (R, _, F), parts = operands[0].shape, how.parts
    assert F % BLOCK == 0
    P, blocks, width = padded_rows(R, len(group_sizes)), F // BLOCK, parts * F
    rows, columns = addressable(pl.cdiv(R, ALIGNMENT) * ALIGNMENT, width, ALIGNMENT), addressable(P, width, STEP)
    whole = pl.BlockSpec()
    # Shapes and types, and the blocks of a tile
    results = [
        (((rows, parts, F), E4M3), whole),
        (((parts, blocks, rows), jnp.float32), whole),
        (((parts, F, columns), E4M3), pl.BlockSpec((parts, BLOCK, STEP), lambda f, t: (0, f, t))),
        (((columns // STEP, parts, F), jnp.float32), pl.BlockSpec((1, parts, BLOCK), lambda f, t: (t, 0, f))),
        *[(((blocks, R), jnp.float32), whole)] * how.sums,
    ]
    inputs = [steps(group_sizes, P), *operands, *([] if weights is None else [weights])]
    q, scales, q_t, scales_t, *sums = pl.pallas_call(
        _kernel(how, [operand.shape[1] for operand in operands], weights is not None),
        grid=(blocks, P // STEP),  # consecutive blocks are neighbours along the features
        in_specs=[pl.BlockSpec((1, 2), lambda f, t: (t, 0)), *[whole] * (len(inputs) - 1)],
        out_specs=[spec for _, spec in results],
        out_shape=[jax.ShapeDtypeStruct(*of_array) for of_array, _ in results],
        compiler_params=plgpu.CompilerParams(num_warps=how.tiling.num_warps),
        interpret=how.interpret,
        name=how.name,
    )(*inputs)
    by_row = ScaledOperand(q.reshape(rows, width), scales.reshape(parts * blocks, rows))
    return BothWays(by_row, ScaledOperand(q_t.reshape(width, columns), scales_t.reshape(-1, width))), sums


def _kernel(how: TilePass, parts: list[int], weighted: bool) -> Callable[..., None]:
    """The kernel for operands with these numbers of parts."""

    def kernel(step_ref: Any, *refs: Any) -> None:
        q_ref, scales_ref, q_t_ref, scales_t_ref, *sums_refs = refs[len(parts) + weighted :]
        f, zero = pl.program_id(0), np.int32(0)
        first, count = step_ref[0, 0], step_ref[0, 1]
        rows, features = pl.ds(first, STEP), pl.ds(f * BLOCK, BLOCK)
        held = lax.iota(jnp.int32, STEP) < count
        mask = jnp.broadcast_to(held[:, None], (STEP, BLOCK))

        @pl.when(count > 0)
        def _some_rows() -> None:
            weight = refs[len(parts)] if weighted else None
            values, sums = how.compute(*read_tiles(refs[: len(parts)], parts, weight, (rows, features), held, mask))
            for part, value in enumerate(values):
                part, magnitude = np.int32(part), lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(0x7FFFFFFF)
                q, scale = power_scaled(value, magnitude, 1)
                plgpu.store(q_ref.at[rows, part, features], q, mask=mask)
                plgpu.store(scales_ref.at[part, f, rows], scale, mask=held)
                q, scale = power_scaled(value, magnitude, 0)
                plgpu.store(q_t_ref.at[part], q.T)
                plgpu.store(scales_t_ref.at[zero, part], scale)
            for ref, total in zip(sums_refs, sums, strict=True):
                plgpu.store(ref.at[f, rows], total, mask=held)

    return kernel
