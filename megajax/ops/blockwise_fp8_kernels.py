"""Quantisation to `blockwise` FP8 along both dimensions of a tensor, in one pass over memory (Pallas, Triton).

A block of threads reads one tile of 128 x 128 numbers, computes in FP32, and writes the tile with a scale for each row
and its transpose with a scale for each column; of a weight one scale is for the whole tile. The numbers and scales are
those of `blockwise_fp8`, bit for bit. Sizes that are not multiples of 128 have smaller tiles at their ends; operands
end with zeros along the dimension that is summed over.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops import mlp_kernel
from megajax.ops.block_formats import LEAST_SCALE
from megajax.ops.blockwise_fp8 import BLOCK
from megajax.ops.fp8_kernels import halves, require_countable

E4M3 = jnp.float8_e4m3fn
WARPS = 8


class ScaledOperand(NamedTuple):
    """An operand [R, K] of a sum over K in FP8, with FP32 scales [K / 128, R], of a weight [K / 128, R / 128].

    K is a multiple of 128.
    """

    values: jax.Array
    scales: jax.Array


class BothWays(NamedTuple):
    """A tensor [T, F] as operand of sums over F and over T."""

    rows: ScaledOperand | None  # [T, F]; None if only the other is kept, for the backward pass
    columns: ScaledOperand  # [F, T]; of experts [F, P], with groups aligned to steps (`grouped_rows`)

    def without_rows(self) -> "BothWays":
        """What the weight's gradient needs."""
        return self._replace(rows=None)


@dataclass(frozen=True)
class _Pass:
    """The computation of a kernel on each tile, and its settings."""

    compute: Callable[..., Sequence[jax.Array]]  # FP32 tiles of all parts of all operands → a tile for each part
    parts: int = 1  # of the result, side by side
    square: bool = False  # one scale for a tile
    rows: bool = True  # which ways are written
    columns: bool = True
    warps: int = WARPS
    interpret: bool = False


def quantise(x_tf: jax.Array, *, warps: int = WARPS, interpret: bool = False) -> BothWays:
    """x [T, F]."""
    return _both_ways(_Pass(lambda x: (x,), warps=warps, interpret=interpret), [x_tf[:, None]])


def quantise_weight(w: jax.Array, which: str, *, warps: int = WARPS, interpret: bool = False) -> ScaledOperand:
    """w [in, out] → [out, in] for the product with a layer's "input", [in, out] for that with its output "gradient"."""
    is_input = which == "input"
    how = _Pass(lambda x: (x,), 1, True, not is_input, is_input, warps, interpret)
    [blocks] = _over_tiles(how, [w[:, None]])
    return blocks


def gated(kind: str, gate_up_tf: jax.Array, *, warps: int = WARPS, interpret: bool = False) -> BothWays:
    """activation(gate) · up [T, F] of gate_up [T, 2F], gate first."""

    def compute(gate: jax.Array, up: jax.Array) -> Sequence[jax.Array]:
        return (mlp_kernel.gated(kind, gate, up, interpret),)

    return _both_ways(_Pass(compute, warps=warps, interpret=interpret), [halves(gate_up_tf)])


def gated_backward(
    kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array, *, warps: int = 2 * WARPS, interpret: bool = False
) -> BothWays:
    """The gradient of gate_up [T, 2F] for dact [T, F]; F is a multiple of 128, so that no block is of both halves."""
    assert dact_tf.shape[1] % BLOCK == 0

    def compute(gate: jax.Array, up: jax.Array, dact: jax.Array) -> Sequence[jax.Array]:
        return mlp_kernel.gated_gradients(kind, gate, up, dact, interpret)[1]

    return _both_ways(_Pass(compute, 2, warps=warps, interpret=interpret), [halves(gate_up_tf), dact_tf[:, None]])


def _both_ways(how: _Pass, operands: list[jax.Array]) -> BothWays:
    rows, columns = _over_tiles(how, operands)
    return BothWays(rows, columns)


def _over_tiles(how: _Pass, operands: list[jax.Array]) -> list[ScaledOperand]:
    """The ways that are written, of operands [T, parts, F]."""
    (T, _, F), parts = operands[0].shape, how.parts
    require_countable(parts * T * F)
    blocks_t, blocks_f = pl.cdiv(T, BLOCK), pl.cdiv(F, BLOCK)
    scales_t, scales_f, wide = (blocks_t, blocks_f, 1) if how.square else (T, F, BLOCK)
    # Shapes and types, and the blocks of a tile
    of_rows = {
        ((T, parts, blocks_f * BLOCK), E4M3): pl.BlockSpec((BLOCK, parts, BLOCK), lambda f, t: (t, 0, f)),
        ((parts, blocks_f, scales_t), jnp.float32): pl.BlockSpec((parts, 1, wide), lambda f, t: (0, f, t)),
    }
    of_columns = {
        ((parts, F, blocks_t * BLOCK), E4M3): pl.BlockSpec((parts, BLOCK, BLOCK), lambda f, t: (0, f, t)),
        ((blocks_t, parts, scales_f), jnp.float32): pl.BlockSpec((1, parts, wide), lambda f, t: (t, 0, f)),
    }
    results = [*(of_rows.items() if how.rows else ()), *(of_columns.items() if how.columns else ())]
    found = pl.pallas_call(
        _kernel(how, [operand.shape[1] for operand in operands], T, F),
        grid=(blocks_f, blocks_t),  # consecutive blocks are neighbours along the features
        in_specs=[pl.BlockSpec((BLOCK, operand.shape[1], BLOCK), lambda f, t: (t, 0, f)) for operand in operands],
        out_specs=[spec for _, spec in results],
        out_shape=[jax.ShapeDtypeStruct(*of_array) for of_array, _ in results],
        compiler_params=plgpu.CompilerParams(num_warps=how.warps),
        interpret=how.interpret,
        name="blockwise_quantise",
    )(*operands)
    blocks = []
    if how.rows:
        q, scales, *found = found
        blocks.append(ScaledOperand(q.reshape(T, -1), scales.reshape(parts * blocks_f, scales_t)))
    if how.columns:
        q, scales = found
        blocks.append(ScaledOperand(q.reshape(parts * F, -1), scales.reshape(blocks_t, parts * scales_f)))
    return blocks


def _kernel(how: _Pass, counts: list[int], T: int, F: int) -> Callable[..., None]:
    """The kernel for operands with these numbers of parts."""

    def kernel(*refs: Any) -> None:
        inputs, results = refs[: len(counts)], list(refs[len(counts) :])
        inside_t = pl.program_id(1) * BLOCK + lax.iota(jnp.int32, BLOCK) < T
        inside_f = pl.program_id(0) * BLOCK + lax.iota(jnp.int32, BLOCK) < F
        tile = BLOCK, BLOCK
        whole_t, whole_f = jnp.broadcast_to(inside_t[:, None], tile), jnp.broadcast_to(inside_f[None], tile)
        inside = whole_t & whole_f if T % BLOCK or F % BLOCK else None

        def load(ref: Any) -> jax.Array:
            other = None if inside is None else 0.0
            return plgpu.load(ref, mask=inside, other=other).astype(jnp.float32)

        tiles = [load(ref.at[:, np.int32(part)]) for ref, n in zip(inputs, counts, strict=True) for part in range(n)]
        for part, value in enumerate(how.compute(*tiles)):
            remaining, part = iter(results), np.int32(part)
            magnitude = lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(0x7FFFFFFF)
            if how.rows:
                q_ref, scales_ref = next(remaining).at[:, part], next(remaining).at[part, np.int32(0)]
                q, scale = power_scaled(value, magnitude, None if how.square else 1)
                plgpu.store(q_ref, q, mask=whole_t if T % BLOCK else None)
                plgpu.store(scales_ref, scale, mask=None if how.square else inside_t)
            if how.columns:
                q_ref, scales_ref = next(remaining).at[part], next(remaining).at[np.int32(0), part]
                q, scale = power_scaled(value, magnitude, None if how.square else 0)
                plgpu.store(q_ref, q.T, mask=whole_f.T if F % BLOCK else None)
                plgpu.store(scales_ref, scale, mask=None if how.square else inside_f)

    return kernel


def power_scaled(value: jax.Array, magnitude: jax.Array, axis: int | None) -> tuple[jax.Array, jax.Array]:
    """(a tile in E4M3, its scales [128] along the other axis, or [1]), as `block_formats.with_powers_of_two` has them.

    `magnitude` are the bits of |value|. A maximum of floats drops NaN on the GPU; as integers, magnitudes keep their
    order, and infinity and then NaN are above them.
    """
    amax = jnp.max(magnitude, axis=1 if axis is None else axis)
    amax = jnp.max(amax) if axis is None else amax
    more = ((amax & 0x7FFFFF) > 0x600000).astype(jnp.int32)
    exponent = jnp.maximum((amax >> 23) - (127 + 8) + more, LEAST_SCALE)

    def power(exponent: jax.Array) -> jax.Array:
        finite = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
        return jnp.where(amax < 0x7F800000, finite, jnp.nan)

    inverse, scale = power(-exponent), power(exponent)
    if axis is None:
        return (value * inverse).astype(E4M3), scale.reshape(1)
    return (value * jnp.expand_dims(inverse, axis)).astype(E4M3), scale
