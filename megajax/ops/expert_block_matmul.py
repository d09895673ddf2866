"""The matmuls of experts with operands that are quantised in blocks: `block_matmul` for rows `[R, F]` sorted by expert.

A block of a weight's gradient begins with the first row of an expert, and zeros fill an expert's last step of rows.
Emulated, and with the reference of grouped matmuls, the numbers are multiplied in the compute dtype; block-scaled dots
("cudnn") are batched over the experts (`grouped_matmul_xla`).
"""

from typing import Any

import jax
import jax.numpy as jnp

from megajax.ops import grouped_fp8_reference, grouped_matmul_xla
from megajax.ops.block_formats import BlockOperand, Stored, operand_dtype, scaled_dot
from megajax.ops.block_matmul import BlockWeight, MaxOverDevices
from megajax.ops.grouped_matmul import GroupedImplementation, rows_times_weights, weight_gradient
from megajax.ops.grouped_rows import STEP, padded_rows, steps


def grouped_product(
    x_rf: jax.Array,
    w: BlockWeight,
    group_sizes_e: jax.Array,
    which: str,
    max_over_devices: MaxOverDevices,
    implementation: GroupedImplementation,
) -> jax.Array:
    """`product` of the rows of each group with the matrix of its expert."""
    has_factor, gradient = w.recipe.has_factor, which == "gradient"
    amax = max_over_devices(grouped_fp8_reference.amax(x_rf, group_sizes_e)) if has_factor else None
    bits = w.noise.bits(w.noise.token_ids, 0) if gradient and w.noise is not None else None
    x = w.quantise(x_rf, which, amax, bits)
    matrices = w.values if gradient else w.values.swapaxes(1, 2)
    stacked = jax.vmap(lambda matrix: w.quantise(matrix, "weight", w.amax))(matrices)
    factor = None if x.factor is None or stacked.factor is None else x.factor * stacked.factor[0]
    if w.implementation == "cudnn" and implementation == "xla":
        weights = jax.vmap(BlockOperand.stored)(stacked)

        def dot(a: Stored, b: Stored) -> jax.Array:
            product = scaled_dot(a, b, x_rf.dtype if factor is None else jnp.float32)
            return (product if factor is None else product * factor).astype(x_rf.dtype)

        return grouped_matmul_xla.product(dot, x.stored(), weights, group_sizes_e)
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
    if w.implementation == "cudnn" and implementation == "xla":
        gradient = grouped_matmul_xla.sum_over_steps(scaled_dot, x.stored(), dy.stored(), group_sizes_e, R)
    else:
        dtype, sizes = operand_dtype(x_rf.dtype), -(-group_sizes_e // STEP) * STEP
        rows_of = x.numbers(dtype).T, dy.numbers(dtype).T, sizes
        gradient = weight_gradient(*rows_of, jnp.float32, implementation=_in_dtype(implementation, dtype))
    if x.factor is not None and dy.factor is not None:
        gradient = gradient * (x.factor * dy.factor)
    return w.with_gradient(gradient.astype(x_rf.dtype))


def _in_dtype(implementation: GroupedImplementation, dtype: Any) -> GroupedImplementation:
    """The kernel has no FP32."""
    return "reference" if dtype == jnp.float32 else implementation
