"""Reference quantisation to FP8 of rows in groups, for the grouped matmuls of experts.

The contract of `fp8_reference`, with two differences. Rows after the last group do not count: they may be non-finite,
the amax omits them, and q is undefined there. In the transpose, groups are aligned to steps (`grouped_rows`): q_t is
[F, P] with P = `padded_rows(R, E)` columns or more; columns after the last step are undefined. All groups have the same
scale.

A gated activation is multiplied by each row's weight [R] before it is quantised, as `expert_mlp` needs it.
`grouped_fp8_kernels` has the same functions for the GPU.
"""

from typing import Any

import jax
import jax.numpy as jnp

from megajax.ops.fp8_reference import Quantised, quantize
from megajax.ops.fp8_reference import amax as amax_of_all
from megajax.ops.grouped_rows import STEP, padded_rows, steps
from megajax.ops.mlp_activation import activate


def cast_transpose(x_rf: jax.Array, group_sizes_e: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    """x [R, F] quantised: q [R, F] and q_t [F, P] in `dtype`, amax."""
    return _quantise(_used(x_rf, group_sizes_e), group_sizes_e, scale, dtype)


def transpose(q_rf: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """The transpose [F, P] of rows [R, F] that are quantised already."""
    first, count = jnp.split(steps(group_sizes_e, padded_rows(len(q_rf), len(group_sizes_e))), 2, axis=1)
    column = jnp.arange(STEP)
    rows, held = (first + column).reshape(-1), (column < count).reshape(-1)
    return jnp.where(held[:, None], q_rf.at[rows].get(mode="clip"), jnp.zeros((), q_rf.dtype)).T


def gated_cast_transpose(
    kind: str, gate_up_rf: jax.Array, weights_r: jax.Array, group_sizes_e: jax.Array, scale: jax.Array, dtype: Any
) -> Quantised:
    """activation(gate) · up · weight quantised: gate_up [R, 2F], gate first -> q [R, F], q_t [F, P], amax."""
    return _quantise(_gated(kind, *_all_used(group_sizes_e, gate_up_rf, weights_r)), group_sizes_e, scale, dtype)


def gated_backward_cast_transpose(
    kind: str,
    gate_up_rf: jax.Array,
    weights_r: jax.Array,
    dact_rf: jax.Array,
    group_sizes_e: jax.Array,
    scale: jax.Array,
    dtype: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """For dact [R, F] the gradient of gate_up, quantised -> q [R, 2F], q_t [2F, P], amax, gradient of the weights [R].

    The gradient of the weights has their dtype, and is 0 after the last group.
    """
    gradient, dweights = _gated_backward(kind, *_all_used(group_sizes_e, gate_up_rf, weights_r, dact_rf))
    return *_quantise(gradient, group_sizes_e, scale, dtype), dweights.astype(weights_r.dtype)


def amax(x_rf: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """max |x| over the rows of all groups: a float32 scalar."""
    return amax_of_all(_used(x_rf, group_sizes_e))


def gated_amax(kind: str, gate_up_rf: jax.Array, weights_r: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """Only the amax of `gated_cast_transpose`."""
    return amax_of_all(_gated(kind, *_all_used(group_sizes_e, gate_up_rf, weights_r)))


def gated_backward_amax(
    kind: str, gate_up_rf: jax.Array, weights_r: jax.Array, dact_rf: jax.Array, group_sizes_e: jax.Array
) -> jax.Array:
    """Only the amax of `gated_backward_cast_transpose`."""
    return amax_of_all(_gated_backward(kind, *_all_used(group_sizes_e, gate_up_rf, weights_r, dact_rf))[0])


def _used(x: jax.Array, group_sizes_e: jax.Array) -> jax.Array:
    """x [R, ...] in float32, zeros in rows after the last group."""
    rows = jnp.arange(x.shape[0]).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(rows < group_sizes_e.sum(), x.astype(jnp.float32), 0)


def _all_used(group_sizes_e: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    return [_used(a, group_sizes_e) for a in arrays]


def _gated(kind: str, gate_up: jax.Array, weights: jax.Array) -> jax.Array:
    return activate(kind, gate_up) * weights[:, None]


def _gated_backward(kind: str, gate_up: jax.Array, weights: jax.Array, dact: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate_up and of the weights."""
    _, pull = jax.vjp(lambda gate_up, weights: _gated(kind, gate_up, weights), gate_up, weights)
    return pull(dact)


def _quantise(values_rf: jax.Array, group_sizes_e: jax.Array, scale: jax.Array, dtype: Any) -> Quantised:
    q_rf = quantize(values_rf, scale, dtype)
    return q_rf, transpose(q_rf, group_sizes_e), amax_of_all(values_rf)
