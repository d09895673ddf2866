"""Forms of an optimizer's arrays between steps; a step computes with FP32. Each form is a class.

BF16 is rounded stochastically: a moment changes by less than half a unit in the last place in most steps, so rounding
to nearest would keep it where it is. 8 bits are blockwise (Dettmers et al. 2022): a block of at most 256 numbers along
one dimension has an FP32 scale, its largest magnitude. They are rounded stochastically for the same reason.

- Signed moments: scale · q·|q| / 127². The square makes small numbers more exact than a linear code does.
- Second moments: scale · 2^((q - 255) / 12), which is 2^-21 of the scale for q = 1, and zero for q = 0. A code that is
  linear has many zeros in a block with one large number, and an update divided by the root of zero is huge. So no
  positive number becomes zero: a smaller one becomes that of q = 1, which makes its update smaller.

Blocks, and the random bits of a number, are functions of its logical index, the parameter's name and the step, and not
of the mesh. Padding stays zero.
"""

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.ops.numerics import mix
from megajax.optim.blocks import block_of, scales_of
from megajax.optim.offload import on_host
from megajax.sharding import Placement

STEPS_PER_OCTAVE = 12  # of the code of second moments


@dataclass(frozen=True)
class StateArray:
    """An array of the train state, as it is stored."""

    placement: Placement | None  # None: a scalar, or another array that all devices have
    dtype: Any
    on_host: bool = False

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """On a mesh, in the memory in which it is stored."""
        sharding = NamedSharding(mesh, P() if self.placement is None else self.placement.spec)
        return on_host(sharding) if self.on_host else sharding

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array, with the padding of its placement; without a placement that of a scalar."""
        return () if self.placement is None else self.placement.stored_shape

    @property
    def bytes(self) -> int:
        """Of the whole array, with the padding of its placement."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Form:
    """FP32 numbers as they are; other forms derive from this one. Zeros in all arrays are zeros in each form."""

    is_rounded = False  # whether `encode` needs random bits
    has_scales = False  # of blocks, which an encoding needs before the first number

    def arrays(self, placement: Placement, non_negative: bool, sizes: Mapping[str, int]) -> Any:
        """The arrays of a slot, as a tree of `StateArray`."""
        return StateArray(placement, jnp.float32)

    def encode(self, x: jax.Array, placement: Placement, non_negative: bool, bits: Any) -> Any:
        """FP32 → the arrays; `bits` are 32 random ones for each number."""
        return x

    def encode_with_scales(
        self, x: jax.Array, again: jax.Array, placement: Placement, non_negative: bool, bits: Any
    ) -> Any:
        """`encode`, if the form has scales with those of `again`, which has the numbers of `x`."""
        return self.encode(x, placement, non_negative, bits)

    def decode(self, stored: Any, placement: Placement, non_negative: bool) -> jax.Array:
        """The arrays → FP32."""
        return stored


class LowBits(Form):
    """The lower 16 bits of FP32 numbers (`weights.masters`), which are never decoded by themselves."""

    def arrays(self, placement: Placement, non_negative: bool, sizes: Mapping[str, int]) -> StateArray:
        return StateArray(placement, jnp.uint16)


class BFloat16(Form):
    is_rounded = True

    def arrays(self, placement: Placement, non_negative: bool, sizes: Mapping[str, int]) -> StateArray:
        return StateArray(placement, jnp.bfloat16)

    def encode(self, x: jax.Array, placement: Placement, non_negative: bool, bits: Any) -> jax.Array:
        """The upper 16 of `bits` are added to those that are cut off, so the expected value is `x`."""
        sum_of = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
        return jax.lax.bitcast_convert_type((sum_of >> 16).astype(jnp.uint16), jnp.bfloat16)

    def decode(self, stored: jax.Array, placement: Placement, non_negative: bool) -> jax.Array:
        return stored.astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """Numbers in 8 bits: `codes` in the stored shape, int8, or uint8 of a second moment."""

    codes: Any
    scales: Any  # FP32, in the stored shape with one number for each block


class Int8(Form):
    is_rounded = has_scales = True

    def arrays(self, placement: Placement, non_negative: bool, sizes: Mapping[str, int]) -> Blocks:
        codes = StateArray(placement, jnp.uint8 if non_negative else jnp.int8)
        return Blocks(codes, StateArray(scales_of(placement, sizes), jnp.float32))

    def encode(self, x: jax.Array, placement: Placement, non_negative: bool, bits: Any) -> Blocks:
        return self.encode_with_scales(x, x, placement, non_negative, bits)

    def encode_with_scales(
        self, x: jax.Array, again: jax.Array, placement: Placement, non_negative: bool, bits: Any
    ) -> Blocks:
        return to_blocks(x, again, block_of(placement), non_negative, bits)

    def decode(self, stored: Blocks, placement: Placement, non_negative: bool) -> jax.Array:
        return from_blocks(stored, block_of(placement), non_negative)


def to_blocks(x: jax.Array, again: jax.Array, block: tuple[int, int], second: bool, bits: jax.Array) -> Blocks:
    """FP32 `x` in 8 bits, rounded stochastically; the expected value is `x`, unless a second moment is below q = 1.

    `again` has the numbers of `x`; the scales are the largest of them.
    """
    dim, size = block
    scales = jnp.max(_in_blocks(jnp.abs(again), dim, size), axis=dim + 1)
    share = x / _spread(jnp.where(scales > 0, scales, 1.0), dim, size)
    uniform = (bits >> 8).astype(jnp.float32) * 2.0**-24  # in [0, 1)
    if second:
        # The number of the next lower value, at most 254; the rest is its position between the two values.
        low = jnp.clip(jnp.floor(255 + STEPS_PER_OCTAVE * jnp.log2(share)), 1, 254)
        below, above = _second_of(low), _second_of(low + 1)
        code = low + (share - below > uniform * (above - below))
        codes = jnp.where(share > 0, code, 0).astype(jnp.uint8)
    else:
        low = jnp.clip(jnp.floor(127 * jnp.sqrt(jnp.abs(share))), 0, 126)
        below, above = jnp.square(low / 127), jnp.square((low + 1) / 127)
        code = low + (jnp.abs(share) - below > uniform * (above - below))
        codes = (jnp.sign(share) * code).astype(jnp.int8)
    return Blocks(codes, scales)


def from_blocks(blocks: Blocks, block: tuple[int, int], second: bool) -> jax.Array:
    """The inverse of `to_blocks`, FP32."""
    code = blocks.codes.astype(jnp.float32)
    share = jnp.where(code > 0, _second_of(code), 0.0) if second else code * jnp.abs(code) / 127**2
    return share * _spread(blocks.scales, *block)


def _second_of(code: jax.Array) -> jax.Array:
    return jnp.exp2((code - 255) / STEPS_PER_OCTAVE)


def _in_blocks(x: jax.Array, dim: int, size: int) -> jax.Array:
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _spread(scales: jax.Array, dim: int, size: int) -> jax.Array:
    """Each block's scale at each of its numbers."""
    shape = (*scales.shape[: dim + 1], size, *scales.shape[dim + 1 :])
    wide = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), shape)
    return wide.reshape(*scales.shape[:dim], scales.shape[dim] * size, *scales.shape[dim + 1 :])


def seed_of(name: str, step: Any) -> jax.Array:
    """The seed of a slot's random bits at a step, uint32."""
    return mix(jnp.uint32(zlib.crc32(name.encode())) ^ mix(step.astype(jnp.uint32)))
