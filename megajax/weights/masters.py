"""`optimizer.master: split`: an FP32 master weight as a BF16 number and the 16 lower bits of the FP32 one.

The BF16 number is the FP32 one rounded to nearest, so the step computes with it as it is stored. Both together are the
FP32 number bit for bit: the sign of the 16 bits tells whether the rounding was up. Numbers halfway between two BF16
numbers, one in 65,536, are rounded away from zero. A cast rounds them to even, but then one half has 65,537 numbers and
its neighbours have 65,535, which 16 bits cannot tell apart. TransformerEngine's `store_param_remainders` does the same.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.lax import bitcast_convert_type

from megajax.sharding import Placement
from megajax.step_plan import StepPlan


def is_split(plan: StepPlan, placement: Placement) -> bool:
    """Whether a trained weight is stored in two halves: all with which the step does not compute in FP32."""
    return plan.optimizer.master == "split" and not placement.computes_in_fp32


def split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """FP32 → (BF16, the lower 16 bits, uint16)."""
    bits = bitcast_convert_type(x, jnp.uint32)
    upper = ((bits + 0x8000) >> 16).astype(jnp.uint16)
    return bitcast_convert_type(upper, jnp.bfloat16), bits.astype(jnp.uint16)


def joined(half: jax.Array, low_bits: jax.Array) -> jax.Array:
    """The inverse of `split`."""
    upper, lower = bitcast_convert_type(half, jnp.uint16).astype(jnp.uint32), low_bits.astype(jnp.uint32)
    return bitcast_convert_type(((upper - (lower >> 15)) << 16) | lower, jnp.float32)


def join_all(params: Mapping[str, jax.Array], low_bits: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """FP32 weights by name; those without low bits are FP32 already."""
    return {name: joined(w, low_bits[name]) if name in low_bits else w for name, w in params.items()}
