"""Matmuls of groups of rows, each group with its own weights: a plain reference, two kernels, batched matmuls.

They are the matmuls of experts, with or without a capacity. The group sizes are known only at run time.
"""

from functools import partial
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.ops import grouped_matmul_triton, grouped_matmul_xla
from megajax.ops.grouped_rows import STEP, step_bounds
from megajax.ops.numerics import wide

GroupedImplementation = Literal["reference", "pallas", "triton", "xla"]


def rows_times_weights(
    x_tk: jax.Array,
    w: jax.Array,
    group_sizes_e: jax.Array,
    *,
    transpose_w: bool = False,
    implementation: GroupedImplementation,
) -> jax.Array:
    """Rows of x [T, K] times the w of their group, [E, K, N] or with `transpose_w` [E, N, K] -> [T, N] in x's dtype.

    The first group_sizes[0] rows are group 0, the next group_sizes[1] are group 1, and so on; a size may be 0. Results
    of rows after the last group are zeros. w is cast to x's dtype; sums are in float32 (float64 for float64).
    """
    if implementation == "pallas":
        return _kernel().matmul(x_tk, w, group_sizes_e, transpose_w=transpose_w, blocks=_multiprocessors())
    if implementation == "triton":
        return grouped_matmul_triton.matmul(x_tk, w, group_sizes_e, transpose_w=transpose_w)
    if implementation == "xla":
        return grouped_matmul_xla.matmul(x_tk, w, group_sizes_e, transpose_w=transpose_w)
    dtype = wide(x_tk.dtype)
    w = w.astype(x_tk.dtype)
    parts = jnp.where(_members(group_sizes_e, x_tk.shape[0])[..., None], x_tk, 0)
    out = jnp.einsum("etk,enk->tn" if transpose_w else "etk,ekn->tn", parts, w, preferred_element_type=dtype)
    return out.astype(x_tk.dtype)


def weight_gradient(
    x_tm: jax.Array,
    dy_tn: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    implementation: GroupedImplementation,
) -> jax.Array:
    """x_eᵀ dy_e over the rows of each group: x [T, M] and dy [T, N] -> [E, M, N] in `dtype`; zeros for empty groups.

    Rows after the last group do not count, but must be finite.
    """
    if implementation == "pallas":
        return _kernel().weight_gradient(x_tm, dy_tn, group_sizes_e, dtype, blocks=_multiprocessors())
    if implementation == "triton":
        return grouped_matmul_triton.weight_gradient(x_tm, dy_tn, group_sizes_e, dtype)
    if implementation == "xla":
        return grouped_matmul_xla.weight_gradient(x_tm, dy_tn, group_sizes_e, dtype)
    parts = jnp.where(_members(group_sizes_e, x_tm.shape[0])[..., None], x_tm, 0)
    return jnp.einsum("etm,tn->emn", parts, dy_tn, preferred_element_type=wide(x_tm.dtype)).astype(dtype)


def fp8_rows_times_weights(
    x_tk: jax.Array,
    w_enk: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    rows: int | None = None,
    implementation: GroupedImplementation,
) -> jax.Array:
    """Rows of x [T, K] times the w [E, N, K] of their group times a scalar -> [T, N] in `dtype`; x and w E4M3 or E5M2.

    Rows after the last group may hold NaN; their results are zeros. `rows`: the number of result rows, if fewer than T.
    """
    if implementation == "pallas":
        how = {"rows": rows, "blocks": _multiprocessors()}
        return _kernel().fp8_matmul(x_tk, w_enk, inverse_scale, group_sizes_e, dtype, **how)
    if implementation == "xla":
        sum_dtype = jnp.float32 if dtype == jnp.float16 else dtype  # unscaled sums overflow FP16

        def dot(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> jax.Array:
            """On GPUs one FP8 matmul with the FP32 scale inside, as `fp8_reference.matmul`."""
            product = grouped_matmul_xla.dot_of_groups(a, b, sum_dtype)
            return (product * inverse_scale.astype(sum_dtype)).astype(dtype)

        return grouped_matmul_xla.product(dot, (x_tk,), (w_enk,), group_sizes_e, rows)
    x, w = x_tk[:rows].astype(jnp.float32), w_enk.astype(jnp.float32)
    out = rows_times_weights(x, w, group_sizes_e, transpose_w=True, implementation="reference")
    return (out * inverse_scale).astype(dtype)


def fp8_weight_gradient(
    x_mp: jax.Array,
    dy_np: jax.Array,
    inverse_scale: jax.Array,
    group_sizes_e: jax.Array,
    dtype: Any,
    *,
    implementation: GroupedImplementation,
) -> jax.Array:
    """x_e dy_eᵀ over the columns of each group, times a scalar: x [M, P] and dy [N, P] -> [E, M, N] in `dtype`.

    Groups are aligned to steps (`grouped_rows`), with zeros after each. Zeros for empty groups.
    """
    if implementation == "pallas":
        return _kernel().fp8_weight_gradient(
            x_mp, dy_np, inverse_scale, group_sizes_e, dtype, blocks=_multiprocessors()
        )
    P = min(x_mp.shape[1], dy_np.shape[1])
    if implementation == "xla":
        dot = partial(grouped_matmul_xla.dot_of_groups, dtype=jnp.float32)
        rows = P - (len(group_sizes_e) - 1) * STEP
        found = grouped_matmul_xla.sum_over_steps(dot, (x_mp,), (dy_np,), group_sizes_e, rows)
        return (found * inverse_scale).astype(dtype)
    bounds = step_bounds(group_sizes_e)
    members = _between(bounds[:, 0], bounds[:, 1], P)[:, None]
    x, dy = (jnp.where(members, a[:, :P].astype(jnp.float32), 0) for a in (x_mp, dy_np))
    return (jnp.einsum("emp,enp->emn", x, dy) * inverse_scale).astype(dtype)


def _members(group_sizes_e: jax.Array, T: int) -> jax.Array:
    """Whether a row is in a group, [E, T]."""
    ends = jnp.cumsum(group_sizes_e)
    return _between(ends - group_sizes_e, ends, T)


def _between(starts_e: jax.Array, ends_e: jax.Array, T: int) -> jax.Array:
    rows = jnp.arange(T)[None, :]
    return (rows >= starts_e[:, None]) & (rows < ends_e[:, None])


def _kernel() -> ModuleType:
    """The module of the Hopper kernel, imported where it is used: Mosaic takes half a second."""
    from megajax.ops import grouped_matmul_kernel

    return grouped_matmul_kernel


def _multiprocessors() -> int:
    """Their number on this GPU; an H200's without a GPU, as when compiling for one."""
    return getattr(jax.devices()[0], "core_count", _kernel().MULTIPROCESSORS)
