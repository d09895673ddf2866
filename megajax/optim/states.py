"""Moments in 16 or 8 bits between steps; a step computes with them in FP32.

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

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, GetAttrKey

from megajax.parallel.weights.blocks import Kind, block_of, mix, random_bits, scales_of
from megajax.sharding import Placement

STEPS_PER_OCTAVE = 12  # of the code of second moments
NON_NEGATIVE = "nu"  # the field of optax's states with second moments


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """A moment in 8 bits: `codes` in the parameter's stored shape, int8, or uint8 of a second moment."""

    codes: jax.Array
    scales: jax.Array  # FP32, in the stored shape with one number for each block


class SmallState(NamedTuple):
    """The state of `small_states`."""

    rounded: jax.Array  # int32, the number of updates so far
    inner: Any  # the state of the transformation, its moments encoded


def small_states(
    inner: optax.GradientTransformation, kind: Kind, placements: Mapping[str, Placement]
) -> optax.GradientTransformation:
    """`inner`, whose moments are kept in `kind` between updates; a moment is a leaf at the key of its parameter."""
    if kind == "float32":
        return inner

    def encode(state: Any, step: jax.Array) -> Any:
        def of(path: Any, leaf: jax.Array) -> Any:
            placement = placements.get(_name(path))
            if placement is None:
                return leaf
            bits = random_bits(placement, seed_of(jax.tree_util.keystr(path), step))
            if kind == "bfloat16":
                return to_bfloat16(leaf, bits)
            return to_blocks(leaf, block_of(placement), _is_second(path), bits)

        return jax.tree_util.tree_map_with_path(of, state)

    def decode(state: Any) -> Any:
        def of(path: Any, leaf: Any) -> jax.Array:
            if isinstance(leaf, Blocks):
                return from_blocks(leaf, block_of(placements[_name(path)]), _is_second(path))
            return leaf.astype(jnp.float32) if _name(path) in placements else leaf

        return jax.tree_util.tree_map_with_path(of, state, is_leaf=lambda node: isinstance(node, Blocks))

    def init(params: Any) -> SmallState:
        # Behind a barrier: XLA would compute the codes of zeros while it compiles, for a minute.
        first = jax.lax.optimization_barrier(inner.init(params))
        return SmallState(jnp.zeros((), jnp.int32), encode(first, jnp.int32(0)))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, SmallState]:
        directions, new = inner.update(updates, decode(state.inner), params)
        step = state.rounded + 1
        return directions, SmallState(step, encode(new, step))

    return optax.GradientTransformation(init, update)


def placement_of(path: Any, placements: Mapping[str, Placement], sizes: Mapping[str, int]) -> Placement | None:
    """The placement of a leaf of an optimizer's state; None for leaves that are no moments, such as counts."""
    own = moment_path(path)
    placement = placements.get(_name(own))
    if placement is not None and own != path and path[-1].name == "scales":
        return scales_of(placement, sizes)
    return placement


def moment_path(path: Any) -> Any:
    """The path of the moment that a leaf of a state belongs to: without the last key of `Blocks`."""
    *above, last = path
    in_blocks = above and isinstance(last, GetAttrKey) and last.name in Blocks.__dataclass_fields__
    return tuple(above) if in_blocks else tuple(path)


def seed_of(name: str, step: jax.Array) -> jax.Array:
    """The seed of a moment's random bits at a step, uint32."""
    return mix(jnp.uint32(zlib.crc32(name.encode())) ^ mix(step.astype(jnp.uint32)))


def to_bfloat16(x: jax.Array, bits: jax.Array) -> jax.Array:
    """FP32 `x` rounded stochastically with the upper 16 of `bits`; the expected value is `x`."""
    sum_of = jax.lax.bitcast_convert_type(x, jnp.uint32) + (bits >> 16)
    return jax.lax.bitcast_convert_type((sum_of >> 16).astype(jnp.uint16), jnp.bfloat16)


def to_blocks(x: jax.Array, block: tuple[int, int], second: bool, bits: jax.Array) -> Blocks:
    """FP32 `x` in 8 bits, rounded stochastically; the expected value is `x`, unless a second moment is below q = 1."""
    dim, size = block
    scales = jnp.max(_in_blocks(jnp.abs(x), dim, size), axis=dim + 1)
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


def from_blocks(kept: Blocks, block: tuple[int, int], second: bool) -> jax.Array:
    """The inverse of `to_blocks`, FP32."""
    code = kept.codes.astype(jnp.float32)
    share = jnp.where(code > 0, _second_of(code), 0.0) if second else code * jnp.abs(code) / 127**2
    return share * _spread(kept.scales, *block)


def _second_of(code: jax.Array) -> jax.Array:
    return jnp.exp2((code - 255) / STEPS_PER_OCTAVE)


def _in_blocks(x: jax.Array, dim: int, size: int) -> jax.Array:
    return x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])


def _spread(scales: jax.Array, dim: int, size: int) -> jax.Array:
    """Each block's scale at each of its numbers."""
    shape = (*scales.shape[: dim + 1], size, *scales.shape[dim + 1 :])
    wide = jnp.broadcast_to(jnp.expand_dims(scales, dim + 1), shape)
    return wide.reshape(*scales.shape[:dim], scales.shape[dim] * size, *scales.shape[dim + 1 :])


def _name(path: Any) -> str:
    """The key of a leaf in a dictionary; empty for other leaves."""
    return path[-1].key if isinstance(path[-1], DictKey) else ""


def _is_second(path: Any) -> bool:
    return any(isinstance(key, GetAttrKey) and key.name == NON_NEGATIVE for key in path)
