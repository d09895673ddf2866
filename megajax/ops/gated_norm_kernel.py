"""The gated norm of linear recurrences on the GPU, forward and backward, in one pass over its arrays each."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.mlp_kernel import sigmoid

NUMBERS, NUM_WARPS = 4096, 8  # of a tile of tokens and the channels of one norm
REPEATS = 32  # most tiles of a program of the backward pass, whose sums it adds


class GatedNormOperands(NamedTuple):
    """What a gated norm of groups of w channels reads."""

    x: jax.Array  # [T, G · w]
    gate: jax.Array  # [T, X], with the gates and others
    weight: jax.Array  # [G, w], or [1, w] of all groups
    first: int  # of the gates


class GatedNorm(NamedTuple):
    """What it computes."""

    epsilon: float
    gate_first: bool  # the norm is of the gated values


def fits(width: int) -> bool:
    """Whether the kernels have norms of `width` channels."""
    return width & (width - 1) == 0 and 16 <= width <= 2 * NUMBERS


def normalise(operands: GatedNormOperands, norm: GatedNorm, *, interpret: bool = False) -> jax.Array:
    """`ops.gated_norm`: `[T, G · w]`."""

    def kernel(x_ref, gate_ref, weight_ref, y_ref) -> None:
        x, gate = (plgpu.load(ref).astype(jnp.float32) for ref in (x_ref, gate_ref))
        gate = gate * sigmoid(gate, interpret)
        values = x * gate if norm.gate_first else x
        y = values * _scale(values, norm) * plgpu.load(weight_ref).astype(jnp.float32)
        plgpu.store(y_ref, (y if norm.gate_first else y * gate).astype(y_ref.dtype))

    x = operands.x
    return _call(kernel, operands, [], 1, [jax.ShapeDtypeStruct(x.shape, x.dtype)], interpret, "gated_norm")[0]


def gradients(
    operands: GatedNormOperands, norm: GatedNorm, dy: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients `dy [T, G · w]` of the outputs → those of (x and the gates `[T, G · w]`, the weight)."""
    (T, F), (own, w) = operands.x.shape, operands.weight.shape
    tokens = _tokens(T, w)
    repeats = math.gcd(T // tokens, REPEATS)

    def kernel(x_ref, gate_ref, weight_ref, dy_ref, dx_ref, dgate_ref, sums_ref) -> None:
        weight = plgpu.load(weight_ref).astype(jnp.float32)

        def one(index: jax.Array, total: jax.Array) -> jax.Array:
            rows = pl.ds(index * tokens, tokens)
            x, gate, dy = (plgpu.load(ref.at[rows, :]).astype(jnp.float32) for ref in (x_ref, gate_ref, dy_ref))
            opening = sigmoid(gate, interpret)
            gated = gate * opening
            values = x * gated if norm.gate_first else x
            scale = _scale(values, norm)
            normed, dout = values * scale, dy if norm.gate_first else dy * gated
            dnormed = dout * weight
            dvalues = scale * (dnormed - normed * jnp.mean(dnormed * normed, axis=-1, keepdims=True))
            dx, dgated = (dvalues * gated, dvalues * x) if norm.gate_first else (dvalues, dy * normed * weight)
            dgate = dgated * (opening + gated * (1.0 - opening))
            plgpu.store(dx_ref.at[rows, :], dx.astype(dx_ref.dtype))
            plgpu.store(dgate_ref.at[rows, :], dgate.astype(dgate_ref.dtype))
            return total + dout * normed

        total = lax.fori_loop(0, repeats, one, jnp.zeros((tokens, w), jnp.float32))
        plgpu.store(sums_ref, jnp.sum(total, axis=0, keepdims=True))

    like = jax.ShapeDtypeStruct((T, F), operands.x.dtype)
    sums = jax.ShapeDtypeStruct((T // (tokens * repeats), F), jnp.float32)
    dx, dgate, sums = _call(kernel, operands, [dy], repeats, [like, like, sums], interpret, "gated_norm_backward")
    return dx, dgate, jnp.sum(sums.reshape(-1, own, w), axis=0)


def _tokens(count: int, width: int) -> int:
    """Those of a tile."""
    return math.gcd(count, max(1, NUMBERS // width))


def _scale(values: jax.Array, norm: GatedNorm) -> jax.Array:
    return lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + norm.epsilon)


def _call(
    kernel: Callable[..., None],
    operands: GatedNormOperands,
    others: list[jax.Array],
    repeats: int,
    outputs: list[jax.ShapeDtypeStruct],
    interpret: bool,
    name: str,
) -> Sequence[jax.Array]:
    """The outputs of a kernel whose programs have `repeats` tiles of one group."""
    (T, F), (own, w) = operands.x.shape, operands.weight.shape
    rows = _tokens(T, w) * repeats
    assert operands.first % w == 0

    def spec(array: Any, first: int = 0) -> pl.BlockSpec:
        whole = array.shape[0] == T
        return pl.BlockSpec((rows if whole else 1, w), lambda group, row: (row, first // w + group))

    return pl.pallas_call(
        kernel,
        grid=(F // w, T // rows),
        in_specs=[
            spec(operands.x),
            spec(operands.gate, operands.first),
            pl.BlockSpec((1, w), lambda group, row: (group % own, 0)),
            *map(spec, others),
        ],
        out_specs=list(map(spec, outputs)),
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS),
        interpret=interpret,
        name=name,
    )(operands.x, operands.gate, operands.weight, *others)
