"""Numbers in blocks with one scale each: the element and scale formats, their products, and the contract of a recipe.

An operand is a matrix `[rows, K]` whose K is summed over. A block is `height` rows by `width` of K. Rounding is written
in FP32 arithmetic that is exact on every device: the unit of a number's binade, a power of two, divides it, and the
quotient is rounded. So any backend and any mesh gives the bits of the formats (OCP 8-bit Floating Point, 2023;
OCP Microscaling Formats, 2023).
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.numerics import mix

# "cudnn": one block-scaled call, on Blackwell. "pallas": megajax's kernels for Hopper. "emulated": the numbers that the
# blocks stand for, multiplied in BF16 or FP32 with FP32 sums.
Implementation = Literal["emulated", "cudnn", "pallas"]


class Minifloat(NamedTuple):
    """A floating-point format without infinities."""

    mantissa_bits: int
    least_exponent: int  # of normal numbers
    largest: float
    dtype: Any


E4M3 = Minifloat(3, -6, 448.0, jnp.float8_e4m3fn)
E2M1 = Minifloat(1, 0, 6.0, jnp.float4_e2m1fn)
Stored = tuple[jax.Array, ...]  # elements [..., rows, K] and scales [..., rows, K / width] in their formats
LEAST_SCALE = -126  # exponent: E8M0 goes to -127, but devices flush that FP32 number to zero


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockOperand:
    """An operand `[rows, K]`: `values · scales of their blocks · factor`."""

    values: jax.Array  # [rows, K] FP32, numbers of the element format
    scales: jax.Array  # [rows / height, K / width] FP32, numbers of the scale format
    factor: jax.Array | None  # FP32, of all numbers; None: 1
    block: tuple[int, int] = field(metadata={"static": True})
    element: Minifloat = field(metadata={"static": True})
    scale_dtype: Any = field(metadata={"static": True})  # E8M0 or E4M3

    def numbers(self, dtype: Any) -> jax.Array:
        """The numbers without `factor`; BF16 holds them exactly, as far as its exponents reach."""
        return (self.values * spread(self.scales, self.block, self.values.shape)).astype(dtype)

    def stored(self) -> Stored:
        """This operand without `factor`, as block-scaled dots take it."""
        scales = spread(self.scales, (self.block[0], 1), (len(self.values), self.scales.shape[1]))
        return self.values.astype(self.element.dtype), scales.astype(self.scale_dtype)


def rounded(x: jax.Array, to: Minifloat, bits: jax.Array | None = None) -> jax.Array:
    """FP32 `x` → the nearest numbers of a format, ties to even; with random uint32 `bits` up or down at random.

    Then the expected value is `x`. Larger numbers become the largest; NaN stays NaN.
    """
    x = jnp.clip(x, -to.largest, to.largest)
    exponent = jnp.maximum(exponent_of(x), to.least_exponent) - to.mantissa_bits
    share = x * power_of_two(-exponent)
    if bits is None:
        units = jnp.round(share)
    else:
        below = jnp.floor(share)
        units = below + ((bits >> 8).astype(jnp.float32) * 2.0**-24 < share - below)
    return units * power_of_two(exponent)


def exponent_of(x: jax.Array) -> jax.Array:
    """floor(log2 |x|) of normal FP32 numbers, int32; -127 for zero, 128 for infinities and NaN."""
    return ((lax.bitcast_convert_type(x, jnp.uint32) >> 23) & 255).astype(jnp.int32) - 127


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent in FP32; exponents from -126 to 127."""
    return lax.bitcast_convert_type((exponent.astype(jnp.uint32) + jnp.uint32(127)) << 23, jnp.float32)


def in_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """`[rows, K]` → `[rows / height, height, K / width, width]`; zeros fill the last blocks."""
    (rows, K), (height, width) = x.shape, block
    padded = jnp.pad(x, ((0, -rows % height), (0, -K % width)))
    return padded.reshape(padded.shape[0] // height, height, padded.shape[1] // width, width)


def amax_of_blocks(x: jax.Array, block: tuple[int, int]) -> jax.Array:
    """The largest magnitude of each block, `[rows / height, K / width]`."""
    return jnp.abs(in_blocks(x, block)).max((1, 3))


def spread(scales: jax.Array, block: tuple[int, int], shape: tuple[int, ...]) -> jax.Array:
    """The scale of each number of an operand of this shape."""
    return jnp.repeat(jnp.repeat(scales, block[0], 0)[: shape[0]], block[1], 1)[:, : shape[1]]


def with_powers_of_two(x: jax.Array, block: tuple[int, int]) -> BlockOperand:
    """FP32 `[rows, K]` in E4M3; a block's scale is the least power of two with which no number of it is clipped.

    A block with a number that is not finite is NaN, as E8M0's scale is.
    """
    amax = amax_of_blocks(x, block)
    # ceil(log2(amax / 448)), and 448 = 1.75 · 2^8
    more = (lax.bitcast_convert_type(amax, jnp.uint32) & 0x7FFFFF) > 0x600000
    exponent, finite = jnp.maximum(exponent_of(amax) - 8 + more, LEAST_SCALE), jnp.isfinite(amax)
    scales, inverses = (jnp.where(finite, power_of_two(e), jnp.nan) for e in (exponent, -exponent))
    values = rounded(x * spread(inverses, block, x.shape), E4M3)
    return BlockOperand(values, scales, None, block, E4M3, jnp.float8_e8m0fnu)


def random_bits(seed: jax.Array, rows: jax.Array, columns: jax.Array) -> jax.Array:
    """32 random bits of each number `[rows, columns]`: a hash of the seed and of its indices, all uint32."""
    return mix(mix(rows ^ seed)[:, None] ^ mix(columns + jnp.uint32(0x9E3779B9))[None, :])


def multiply(a_mk: BlockOperand, b_nk: BlockOperand, dtype: Any, implementation: Implementation) -> jax.Array:
    """`a @ b.T`, `[M, K]` and `[N, K]` → `[M, N]` in `dtype`; sums are in FP32."""
    if implementation == "cudnn":
        a, b = (jax.tree.map(lambda stored: stored[None], operand.stored()) for operand in (a_mk, b_nk))
        product = scaled_dot(a, b)[0]
    else:
        exact = operand_dtype(dtype)
        product = lax.dot_general(
            a_mk.numbers(exact), b_nk.numbers(exact), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
    for operand in (a_mk, b_nk):
        product = product if operand.factor is None else product * operand.factor
    return product.astype(dtype)


def scaled_dot(a_bmk: Stored, b_bnk: Stored, dtype: Any = jnp.float32) -> jax.Array:
    """`a @ b.T` of stacks of operands without their factors: `[B, M, N]`, one block-scaled call on Blackwell."""
    (a, a_scales), (b, b_scales) = a_bmk, b_bnk
    return jax.nn.scaled_matmul(a, b, a_scales, b_scales, dtype)


def operand_dtype(dtype: Any) -> Any:
    """The dtype of emulated operands: the compute dtype, but FP32 for FP16, whose exponents do not reach far enough."""
    return jnp.float32 if dtype == jnp.float16 else dtype


@dataclass(frozen=True)
class BlockRecipe:
    """How operands `[rows, K]` are quantised, where K is summed over. Each recipe is one class in one module."""

    has_factor: ClassVar[bool] = False  # one FP32 factor for a tensor, from its amax
    is_stochastic: ClassVar[bool] = False  # gradients are rounded at random

    def transformed(self, x: jax.Array) -> jax.Array:
        """Both operands `[rows, tokens]` of a weight's gradient, before they are quantised; FP32."""
        return x

    def quantised(self, x: jax.Array, tensor: str, amax: jax.Array | None, bits: jax.Array | None) -> BlockOperand:
        """FP32 `x` of a layer's "input", "weight" or output "gradient" in blocks.

        `amax` is the tensor's over all devices, with `has_factor`. `bits` are 32 random ones of each number of a
        gradient if the recipe is stochastic; None: to nearest.
        """
        raise NotImplementedError
