"""The matmuls of experts with operands that are quantised in blocks: `block_matmul` for rows `[R, F]` sorted by expert.

A block of a weight's gradient begins with the first row of an expert, and zeros fill an expert's last step of rows.
Emulated, the numbers are multiplied by the grouped kernels of the compute dtype. Block-scaled dots ("cudnn") have no
groups, so they are batched over the experts and take some rows of each, in rounds, until no expert has any left.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from megajax.ops import grouped_fp8_reference
from megajax.ops.block_formats import BlockOperand, Stored, operand_dtype, scaled_dot
from megajax.ops.block_matmul import BlockWeight, MaxOverDevices
from megajax.ops.grouped_matmul import GroupedImplementation, rows_times_weights, weight_gradient
from megajax.ops.grouped_rows import STEP, group_of_rows, padded_rows, running_sum, steps

# Rows of each expert in the first round and in a later one, as parts of an even share: gradients of matrices are sums
# over the rounds, so one should do for most routings.
FIRST, LATER = 1.25, 0.5


def grouped_product(
    x_rf: jax.Array,
    w: BlockWeight,
    group_sizes_e: jax.Array,
    which: str,
    max_over_devices: MaxOverDevices,
    implementation: GroupedImplementation,
) -> jax.Array:
    """`product` of the rows of each group with the matrix of its expert; `implementation` is of what is emulated."""
    has_factor, gradient = w.recipe.has_factor, which == "gradient"
    amax = max_over_devices(grouped_fp8_reference.amax(x_rf, group_sizes_e)) if has_factor else None
    bits = w.noise.bits(w.noise.token_ids, 0) if gradient and w.noise is not None else None
    x = w.quantise(x_rf, which, amax, bits)
    matrices = w.values if gradient else w.values.swapaxes(1, 2)
    stacked = jax.vmap(lambda matrix: w.quantise(matrix, "weight", w.amax))(matrices)
    factor = None if x.factor is None or stacked.factor is None else x.factor * stacked.factor[0]
    if w.implementation == "cudnn":
        return _rows_in_rounds(x, stacked, factor, group_sizes_e, x_rf.dtype)
    dtype = operand_dtype(x_rf.dtype)
    numbers = jax.vmap(lambda matrix: matrix.numbers(dtype))(stacked)
    how = {"transpose_w": True, "implementation": _in_dtype(implementation, dtype)}
    product = rows_times_weights(x.numbers(dtype), numbers, group_sizes_e, **how)
    return (product if factor is None else product * factor).astype(x_rf.dtype)


def grouped_weight_gradient(
    x_rf: jax.Array,
    dy_rf: jax.Array,
    w: BlockWeight,
    group_sizes_e: jax.Array,
    max_over_devices: MaxOverDevices,
    implementation: GroupedImplementation,
) -> BlockWeight:
    """`weight_gradient` of the rows of each group."""
    E, R = w.values.shape[0], len(x_rf)
    first, count = jnp.split(steps(group_sizes_e, padded_rows(R, E)), 2, axis=1)
    column = jnp.arange(STEP)
    rows, held = (first + column).reshape(-1), (column < count).reshape(-1)
    operands = list[BlockOperand]()
    for tensor, values in (("input", x_rf), ("gradient", dy_rf)):
        aligned = w.transformed(jnp.where(held[:, None], values.at[rows].get(mode="clip"), 0))
        bits = None
        if tensor == "gradient" and w.noise is not None:
            filled = jnp.broadcast_to(~column.astype(jnp.uint32), first.shape[:1] + column.shape).reshape(-1)
            ids = jnp.where(held, w.noise.token_ids.at[rows].get(mode="clip"), filled)
            bits = w.noise.bits(ids, 1).T
        operands.append(w.quantise(aligned, tensor, w.amax_of([aligned], max_over_devices), bits))
    x, dy = operands
    if w.implementation == "cudnn":
        gradient = _steps_in_rounds(x, dy, group_sizes_e, R)
    else:
        dtype, sizes = operand_dtype(x_rf.dtype), -(-group_sizes_e // STEP) * STEP
        how = {"implementation": _in_dtype(implementation, dtype)}
        gradient = weight_gradient(x.numbers(dtype).T, dy.numbers(dtype).T, sizes, jnp.float32, **how)
    if x.factor is not None and dy.factor is not None:
        gradient = gradient * (x.factor * dy.factor)
    return w.with_gradient(gradient.astype(x_rf.dtype))


def _in_dtype(implementation: GroupedImplementation, dtype: Any) -> GroupedImplementation:
    """The kernel has no FP32."""
    return "reference" if dtype == jnp.float32 else implementation


def _rows_in_rounds(
    x_rk: BlockOperand, w_enk: BlockOperand, factor: jax.Array | None, group_sizes_e: jax.Array, dtype: Any
) -> jax.Array:
    """The rows of x times the w of their group, times `factor`: `[R, N]` in `dtype`, zeros after the last group."""
    (R, _), (E, N, _) = x_rk.values.shape, w_enk.values.shape
    weights, rows = jax.vmap(BlockOperand.stored)(w_enk), x_rk.stored()
    starts = running_sum(group_sizes_e) - group_sizes_e
    group = group_of_rows(group_sizes_e, R)
    position = jnp.where(group < E, jnp.arange(R) - starts.at[group].get(mode="clip"), R)  # in its group

    def add(first: jax.Array | int, height: int, product_rn: jax.Array) -> jax.Array:
        taken = starts[:, None] + first + jnp.arange(height)
        found = scaled_dot(jax.tree.map(lambda a: a.at[taken].get(mode="clip"), rows), weights).reshape(-1, N)
        here = position - first
        found = found.at[group * height + here].get(mode="clip")
        inside = (here >= 0) & (here < height) & (group < E)
        return jnp.where(inside[:, None], (found if factor is None else found * factor).astype(dtype), product_rn)

    return _in_rounds(add, group_sizes_e, R, jnp.zeros((R, N), dtype))


def _steps_in_rounds(x_mp: BlockOperand, dy_np: BlockOperand, group_sizes_e: jax.Array, R: int) -> jax.Array:
    """x dyᵀ over the steps of each group (`grouped_rows`), without factors: `[E, M, N]` FP32."""
    counts = pl.cdiv(group_sizes_e, STEP)
    starts = running_sum(counts) - counts
    count = x_mp.values.shape[1] // STEP
    # [F, steps, numbers or scales of a step]
    operands = jax.tree.map(lambda a: a.reshape(len(a), count, -1), [x_mp.stored(), dy_np.stored()])

    def add(first: jax.Array | int, height: int, gradient_emn: jax.Array) -> jax.Array:
        index = first // STEP + jnp.arange(height // STEP)
        held = (index < counts[:, None])[..., None]

        def taken(numbers: jax.Array) -> jax.Array:
            return numbers.at[:, starts[:, None] + index].get(mode="clip").swapaxes(0, 1)

        def operand(elements: jax.Array, scales: jax.Array) -> Stored:
            numbers = jnp.where(held[:, None], taken(elements), 0), taken(scales)  # E8M0 has no zero
            return tuple(each.reshape(*each.shape[:2], -1) for each in numbers)

        return gradient_emn + scaled_dot(*(operand(*stored) for stored in operands))

    shape = len(counts), len(x_mp.values), len(dy_np.values)
    return _in_rounds(add, group_sizes_e, R, jnp.zeros(shape, jnp.float32))


def _in_rounds(
    add: Callable[[jax.Array | int, int, jax.Array], jax.Array], group_sizes_e: jax.Array, R: int, total: jax.Array
) -> jax.Array:
    """`add(first, height, total)` for the rows of all groups: `height` of each group, from its row `first` on."""
    first, later = (math.ceil(share * R / (len(group_sizes_e) * STEP)) * STEP for share in (FIRST, LATER))
    rounds = jnp.maximum(pl.cdiv(jnp.max(group_sizes_e).astype(jnp.int32) - first, later), 0)
    return lax.fori_loop(0, rounds, lambda r, total: add(first + r * later, later, total), add(0, first, total))
