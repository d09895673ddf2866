"""The short convolution before linear recurrences on the GPU, forward and backward, in one pass over its arrays each.

A program has consecutive tokens of some channels and goes through them one after the other. It keeps the last tokens in
registers, so that each number is read once. The backward pass computes the outputs before SiLU again.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from megajax.ops.mlp_kernel import sigmoid

Row = jax.Array  # numbers of a token, one for each of the program's channels


class Tiling(NamedTuple):
    """The size of a program."""

    tokens: int
    together: int  # tokens that are loaded before they are used, a divisor
    channels: int  # or the largest power of 2 that divides their number
    num_warps: int


FORWARD, BACKWARD = Tiling(32, 8, 256, 1), Tiling(64, 4, 128, 1)


class ConvolutionOperands(NamedTuple):
    """What a convolution of F channels reads."""

    x: jax.Array  # [B, S, X], with the channels and others
    weight: jax.Array  # [W, F] FP32
    bias: jax.Array  # [F] FP32
    position: jax.Array  # [B, S] int32, of a token in its document
    before: jax.Array | None  # [B, W - 1, F], the tokens before x in the same documents; None: there are none
    first: int  # of the channels of x


def fits(width: int) -> bool:
    """Whether programs for this many channels are wide enough to be faster than XLA's kernels."""
    return math.gcd(width, FORWARD.channels) >= 64


def convolve(operands: ConvolutionOperands, tiling: Tiling = FORWARD, *, interpret: bool = False) -> jax.Array:
    """`ops.short_convolution`: `[B, S, F]`."""
    call, (B, S, _), (W, F) = _Call(operands, tiling), operands.x.shape, operands.weight.shape

    def kernel(*refs: Any) -> None:
        program = _Program(call, refs[:-1])

        def some(step: jax.Array, earlier: list[Row]) -> list[Row]:
            start = program.start + step * tiling.together
            for index, x in enumerate(program.tokens(start, tiling.together)):
                token = start + index
                seen, pre = program.convolved(token, [x, *earlier])
                program.store(refs[-1], token, pre * sigmoid(pre, interpret), token < S)
                earlier = [x, *earlier[: W - 2]]
            return earlier

        lax.fori_loop(0, tiling.tokens // tiling.together, some, program.tokens_before())

    [y] = call(kernel, [], [jax.ShapeDtypeStruct((B * S, F), operands.x.dtype)], interpret, "short_convolution")
    return y.reshape(B, S, F)


def gradients(
    operands: ConvolutionOperands, dy: jax.Array, tiling: Tiling = BACKWARD, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients `dy [B, S, F]` of the outputs → those of (the channels of x `[B, S, F]`, weight, bias)."""
    call, (B, S, _), (W, F) = _Call(operands, tiling), operands.x.shape, operands.weight.shape

    def kernel(*refs: Any) -> None:
        inputs, (dy_ref, dx_ref, sums_ref) = refs[:-3], refs[-3:]
        program, zero = _Program(call, inputs), jnp.zeros((call.channels,), jnp.float32)
        end = program.start + tiling.tokens

        def some(step: jax.Array, carried: tuple[list[Row], ...]) -> tuple[list[Row], ...]:
            earlier, partial, sums = carried  # `partial`: gradients of x of the last tokens, without later outputs
            start = program.start + step * tiling.together
            loaded = program.tokens(start, tiling.together), program.tokens(start, tiling.together, dy_ref)
            for index, (x, d) in enumerate(zip(*loaded, strict=True)):
                token = start + index
                seen, pre = program.convolved(token, [x, *earlier])
                opening = sigmoid(pre, interpret)
                d = d * opening * (1.0 + pre * (1.0 - opening))
                own = jnp.where(token < end, d, 0.0)  # the next program has the others
                sums = [total + own * each for total, each in zip(sums, [*seen, 1.0], strict=True)]
                position = program.position(token)
                *partial, complete = [
                    sum_ + jnp.where(position >= back, d * program.weights[back], 0.0)
                    for back, sum_ in enumerate([zero, *partial])
                ]
                oldest, earlier = token - (W - 1), [x, *earlier[: W - 2]]
                program.store(dx_ref, oldest, complete, (oldest >= program.start) & (oldest < jnp.minimum(end, S)))
            return earlier, partial, sums

        steps = pl.cdiv(tiling.tokens + W - 1, tiling.together)
        carried = program.tokens_before(), [zero] * (W - 1), [zero] * (W + 1)
        for index, values in enumerate(lax.fori_loop(0, steps, some, carried)[2]):
            row = (pl.program_id(2) * call.programs + pl.program_id(1)) * (W + 1) + index
            plgpu.store(sums_ref.at[row, program.columns], values)

    shapes = [
        jax.ShapeDtypeStruct((B * S, F), operands.x.dtype),
        jax.ShapeDtypeStruct((B * call.programs * (W + 1), F), jnp.float32),
    ]
    dx, sums = call(kernel, [dy.reshape(B * S, F)], shapes, interpret, "short_convolution_backward")
    sums = jnp.sum(sums.reshape(-1, W + 1, F), axis=0)
    return dx.reshape(B, S, F), sums[W - 1 :: -1], sums[W]


class _Call:
    """The grid and the inputs of a kernel."""

    def __init__(self, operands: ConvolutionOperands, tiling: Tiling):
        x = operands.x
        if x.size >= 2**31:
            raise ValueError(f"{x.size:,} numbers: the kernel counts them in 32 bits, convolve fewer tokens at once.")
        (self.sequences, self.length, _), (self.window, self.width) = x.shape, operands.weight.shape
        self.first, self.tiling = operands.first, tiling
        self.channels = math.gcd(self.width, tiling.channels)
        self.programs = pl.cdiv(self.length, tiling.tokens)
        self.inputs = [x.reshape(-1, x.shape[-1]), operands.weight, operands.bias, operands.position.reshape(-1)]
        if operands.before is not None:
            self.inputs.append(operands.before.reshape(-1, self.width))

    def __call__(
        self, kernel: Callable[..., None], others: list[jax.Array], outputs: list[Any], interpret: bool, name: str
    ) -> Sequence[jax.Array]:
        """The outputs of a kernel that sees whole arrays."""

        def whole(array: Any) -> pl.BlockSpec:
            return pl.BlockSpec(array.shape, lambda *_: (0,) * len(array.shape))

        inputs = [*self.inputs, *others]
        return pl.pallas_call(
            kernel,
            grid=(self.width // self.channels, self.programs, self.sequences),
            in_specs=[whole(array) for array in inputs],
            out_specs=[whole(array) for array in outputs],
            out_shape=outputs,
            compiler_params=plgpu.CompilerParams(num_warps=self.tiling.num_warps),
            interpret=interpret,
            name=name,
        )(*inputs)


class _Program:
    """One program of a kernel: what it loads."""

    def __init__(self, call: _Call, refs: Sequence[Any]):
        self.call, (self.x, weights, bias, self.positions, *self.before) = call, refs
        self.sequence, self.start = pl.program_id(2), pl.program_id(1) * call.tiling.tokens
        self.channel = pl.program_id(0) * call.channels
        self.columns = pl.ds(self.channel, call.channels)
        rows = (weights.at[np.int32(row), self.columns] for row in reversed(range(call.window)))
        self.weights = [plgpu.load(row) for row in rows]  # of the own token first
        self.bias = plgpu.load(bias.at[self.columns])

    def tokens(self, start: jax.Array, count: int, ref: Any = None) -> list[Row]:
        """The inputs, or numbers of another array, of consecutive tokens, FP32; 0 outside of the sequence."""
        columns = self.columns if ref is not None else pl.ds(self.call.first + self.channel, self.call.channels)
        ref = self.x if ref is None else ref

        def load(token: jax.Array) -> Row:
            mask = jnp.broadcast_to((token >= 0) & (token < self.call.length), (self.call.channels,))
            return plgpu.load(ref.at[self._row(token), columns], mask=mask, other=0.0).astype(jnp.float32)

        return [load(start + index) for index in range(count)]

    def tokens_before(self) -> list[Row]:
        """The inputs before the program's first, the last one first."""
        count = self.call.window - 1
        rows = self.tokens(self.start - count, count)
        if self.before:
            [ref] = self.before
            mask = jnp.broadcast_to(self.start == 0, (self.call.channels,))
            earlier = (ref.at[self.sequence * count + index, self.columns] for index in range(count))
            rows = [row + plgpu.load(at, mask=mask, other=0.0) for row, at in zip(rows, earlier, strict=True)]
        return rows[::-1]

    def position(self, token: jax.Array) -> jax.Array:
        return plgpu.load(self.positions.at[self._row(token)])

    def convolved(self, token: jax.Array, tokens: list[Row]) -> tuple[list[Row], Row]:
        """(of these tokens, the last first, those that `token` sees; its output before SiLU)."""
        position = self.position(token)
        seen = [jnp.where(position >= back, each, 0.0) if back else each for back, each in enumerate(tokens)]
        return seen, sum((weight * each for weight, each in zip(self.weights, seen, strict=True)), self.bias)

    def store(self, ref: Any, token: jax.Array, values: Row, where: jax.Array) -> None:
        mask = jnp.broadcast_to(where, values.shape)
        plgpu.store(ref.at[self._row(token), self.columns], values.astype(ref.dtype), mask=mask)

    def _row(self, token: jax.Array) -> jax.Array:
        """Of the flat arrays; that of another token where the token is outside of the sequence."""
        return self.sequence * self.call.length + jnp.clip(token, 0, self.call.length - 1)
