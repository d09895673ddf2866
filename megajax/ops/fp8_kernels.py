"""Quantisation to FP8 with the transpose and the largest magnitude, in one pass over memory, for GPUs since Ada.

The functions of `fp8_reference`, with its contract, as Pallas kernels on Triton. A block reads one tile, computes in
float32, and writes the quantised tile, its transpose and its largest magnitude. A small reduction over the tiles
follows. Without these kernels XLA writes the transpose in a second, slower kernel.

T and F of any size are allowed. Multiples of 16 are fast, because the rows of both results are then aligned for 16-byte
accesses. Tiles that cross an edge are masked. The kernels have no derivatives.

The GPU must be an L40S, H100 or newer, whose instruction cvt.rn.satfinite converts to FP8, saturates and keeps NaN.
jax 0.11 calls the Triton backend deprecated; Pallas's other one, Mosaic GPU, would need its own kernels.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops import mlp_kernel
from megajax.ops.fp8_reference import Quantised, matmul, saturate

__all__ = [
    "cast_transpose",
    "gated_amax",
    "gated_backward_amax",
    "gated_backward_cast_transpose",
    "gated_cast_transpose",
    "matmul",
]


@dataclass(frozen=True)
class CastTiling:
    """The division of a tensor into tiles; powers of two.

    A row of a tile is 2 · `features` bytes read and `features` bytes written; a row of the transpose is `tokens` bytes.
    A thread has tokens · features / (32 · num_warps) elements; with more than 32, the gradients of the gates need so
    many registers that few blocks fit on a multiprocessor. On an H200 the defaults were fastest, or nearly, for all
    kernels.
    """

    tokens: int = 32
    features: int = 128
    num_warps: int = 4


def cast_transpose(
    x_tf: jax.Array, scale: jax.Array, dtype: Any, *, tiling: CastTiling = CastTiling(), interpret: bool = False
) -> Quantised:
    """x [T, F] quantised: q [T, F] and q_t [F, T] in `dtype`, amax."""
    return _over_tiles(_as_is, [x_tf[:, None]], tiling, interpret, scale, dtype)


def gated_cast_transpose(
    kind: str,
    gate_up_tf: jax.Array,
    scale: jax.Array,
    dtype: Any,
    *,
    tiling: CastTiling = CastTiling(),
    interpret: bool = False,
) -> Quantised:
    """activation(gate) · up quantised: gate_up [T, 2F], gate first -> q [T, F], q_t [F, T], amax."""
    return _over_tiles(_gated(kind, interpret), [halves(gate_up_tf)], tiling, interpret, scale, dtype)


def gated_backward_cast_transpose(
    kind: str,
    gate_up_tf: jax.Array,
    dact_tf: jax.Array,
    scale: jax.Array,
    dtype: Any,
    *,
    tiling: CastTiling = CastTiling(),
    interpret: bool = False,
) -> Quantised:
    """The gradient of gate_up [T, 2F] for dact [T, F], quantised -> q [T, 2F], q_t [2F, T], amax."""
    operands = [halves(gate_up_tf), dact_tf[:, None]]
    return _over_tiles(_gated_backward(kind, interpret), operands, tiling, interpret, scale, dtype, parts=2)


def gated_amax(
    kind: str, gate_up_tf: jax.Array, *, tiling: CastTiling = CastTiling(), interpret: bool = False
) -> jax.Array:
    """Only the amax of `gated_cast_transpose`."""
    return _over_tiles(_gated(kind, interpret), [halves(gate_up_tf)], tiling, interpret)[-1]


def gated_backward_amax(
    kind: str, gate_up_tf: jax.Array, dact_tf: jax.Array, *, tiling: CastTiling = CastTiling(), interpret: bool = False
) -> jax.Array:
    """Only the amax of `gated_backward_cast_transpose`."""
    return _over_tiles(_gated_backward(kind, interpret), [halves(gate_up_tf), dact_tf[:, None]], tiling, interpret)[-1]


# The arguments of a computation are the tiles [tokens, features] of all parts of all operands [T, parts, F]; it returns
# a float32 tile for each part of the result.
Computation = Callable[..., Sequence[jax.Array]]


def _as_is(x: jax.Array) -> Sequence[jax.Array]:
    return (x.astype(jnp.float32),)


def _gated(kind: str, interpret: bool) -> Computation:
    def compute(gate: jax.Array, up: jax.Array) -> Sequence[jax.Array]:
        return (mlp_kernel.gated(kind, gate.astype(jnp.float32), up.astype(jnp.float32), interpret),)

    return compute


def _gated_backward(kind: str, interpret: bool) -> Computation:
    def compute(gate: jax.Array, up: jax.Array, dact: jax.Array) -> Sequence[jax.Array]:
        gate, up, dact = (a.astype(jnp.float32) for a in (gate, up, dact))
        return mlp_kernel.gated_gradients(kind, gate, up, dact, interpret)[1]

    return compute


def halves(gate_up_tf: jax.Array) -> jax.Array:
    """gate_up [T, 2F] -> [T, 2, F]."""
    return gate_up_tf.reshape(gate_up_tf.shape[0], 2, -1)


def _over_tiles(
    compute: Computation,
    operands: list[jax.Array],
    tiling: CastTiling,
    interpret: bool,
    scale: jax.Array | None = None,
    dtype: Any = None,
    parts: int = 1,
) -> Any:
    """The `parts` that `compute` returns, side by side: (q [T, parts · F], q_t [parts · F, T], amax).

    (amax,) without a scale.
    """
    T, _, F = operands[0].shape
    require_countable(parts * T * F)
    block_t, block_f = tiling.tokens, tiling.features
    blocks_t, blocks_f = pl.cdiv(T, block_t), pl.cdiv(F, block_f)
    inputs = list(operands)
    in_specs = [pl.BlockSpec((block_t, operand.shape[1], block_f), lambda f, t: (t, 0, f)) for operand in operands]
    out_shape = [jax.ShapeDtypeStruct((blocks_t, blocks_f), jnp.int32)]
    out_specs = [pl.BlockSpec((1, 1), lambda f, t: (t, f))]
    if scale is not None:
        inputs.append(scale.astype(jnp.float32).reshape(1))
        in_specs.append(pl.BlockSpec((1,), lambda f, t: (0,)))
        q, q_t = jax.ShapeDtypeStruct((T, parts, F), dtype), jax.ShapeDtypeStruct((parts, F, T), dtype)
        out_shape = [q, q_t, *out_shape]
        out_specs = [
            pl.BlockSpec((block_t, parts, block_f), lambda f, t: (t, 0, f)),
            pl.BlockSpec((parts, block_f, block_t), lambda f, t: (0, f, t)),
            *out_specs,
        ]
    *quantised, magnitudes = pl.pallas_call(
        _kernel(compute, [operand.shape[1] for operand in operands], T, F, tiling, interpret, dtype),
        grid=(blocks_f, blocks_t),  # consecutive blocks are neighbours along the features
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plgpu.CompilerParams(num_warps=tiling.num_warps),
        interpret=interpret,
    )(*inputs)
    largest = lax.bitcast_convert_type(jnp.max(magnitudes), jnp.float32)
    if scale is None:
        return (largest,)
    q, q_t = quantised
    return q.reshape(T, parts * F), q_t.reshape(parts * F, T), largest


def require_countable(elements: int) -> None:
    """Raises ValueError if there are more than Triton's addresses count."""
    if elements >= 2**31:
        raise ValueError(f"{elements:,} elements: the kernels count them in 32 bits, quantise fewer tokens at once.")


def _kernel(
    compute: Computation, parts: list[int], T: int, F: int, tiling: CastTiling, interpret: bool, dtype: Any
) -> Callable[..., None]:
    """The kernel for operands with these numbers of parts."""
    block_t, block_f = tiling.tokens, tiling.features

    def kernel(*refs: Any) -> None:
        inputs, quantised, amax_ref = refs[: len(parts)], refs[len(parts) : -1], refs[-1]
        # The rows and columns of the tile inside the tensor; None if all tiles are inside.
        rows = pl.program_id(1) * block_t + lax.iota(jnp.int32, block_t) < T if T % block_t else None
        columns = pl.program_id(0) * block_f + lax.iota(jnp.int32, block_f) < F if F % block_f else None
        mask = _outer(rows, columns)
        tiles = [
            _load(ref.at[:, np.int32(part)], mask) for ref, n in zip(inputs, parts, strict=True) for part in range(n)
        ]
        values = compute(*tiles)
        amax_ref[0, 0] = largest_magnitude(values)
        if quantised:
            scale_ref, q_ref, q_t_ref = quantised
            for part, value in enumerate(values):
                scaled = value * scale_ref[0]
                # On the GPU the conversion itself saturates, and keeps NaN.
                q = (saturate(scaled, dtype) if interpret else scaled).astype(dtype)
                plgpu.store(q_ref.at[:, np.int32(part)], q, mask=mask)
                plgpu.store(q_t_ref.at[np.int32(part)], q.T, mask=None if mask is None else mask.T)

    return kernel


def _outer(rows: jax.Array | None, columns: jax.Array | None) -> jax.Array | None:
    """The mask of a tile from the masks of its rows and columns, broadcastable to the tile; None for no mask."""
    if rows is None or columns is None:
        return rows[:, None] if rows is not None else columns[None] if columns is not None else None
    return rows[:, None] & columns[None]


def _load(ref: Any, mask: jax.Array | None) -> jax.Array:
    """The tile of `ref`, zero where `mask` is False."""
    if mask is None:
        return plgpu.load(ref)
    return plgpu.load(ref, mask=jnp.broadcast_to(mask, ref.shape), other=0.0)


def largest_magnitude(values: Sequence[jax.Array]) -> jax.Array:
    """The bits of max |value|. As integers, magnitudes keep their order, and infinity and then NaN are above them.

    A maximum of floats drops NaN on the GPU.
    """
    magnitudes = [lax.bitcast_convert_type(value, jnp.int32) & jnp.int32(0x7FFFFFFF) for value in values]
    return jnp.max(functools.reduce(jnp.maximum, magnitudes).reshape(-1))
