"""Kernels write nothing beyond an array: on a GPU such a store would hit other memory, which the interpreter hides."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jaxpr_equations import equations

from megajax.ops import (
    blockwise_fp8_kernels,
    expert_activation_kernel,
    fp8_kernels,
    grouped_blockwise_kernels,
    grouped_fp8_kernels,
    grouped_matmul_triton,
    mlp_kernel,
    ranged_attention_triton,
)
from megajax.ops.query_ranges import Options

BF16, FP32, INT32, E4M3, KIND = jnp.bfloat16, jnp.float32, jnp.int32, jnp.float8_e4m3fn, "swiglu"
T, F = 70, 200  # no whole tiles


def a(*shape: int, dtype=BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SIZES, SCALE, WEIGHTS = a(3, dtype=INT32), a(dtype=FP32), a(T, dtype=FP32)
QKV, RANGES, ROWS = (a(2, 150, 2, 72),) * 3, (a(1, 150, dtype=INT32),) * 2, a(2, 2, 150, dtype=FP32)
ATTENTION = {"options": Options(0.1, None)}
CALLS = {
    "cast": (partial(fp8_kernels.cast_transpose, dtype=E4M3), a(T, F), SCALE),
    "gated cast": (partial(fp8_kernels.gated_cast_transpose, KIND, dtype=E4M3), a(T, 2 * F), SCALE),
    "MLP": (partial(mlp_kernel.activate_and_gradient, KIND), a(T, 2 * F), a(T, F)),
    "experts": (partial(expert_activation_kernel.activate, KIND), a(T, 2 * F), WEIGHTS, SIZES),
    "experts backward": (
        partial(expert_activation_kernel.activate_and_gradient, KIND),
        *(a(T, 2 * F), WEIGHTS, a(T, F), SIZES),
    ),
    "blockwise": (blockwise_fp8_kernels.quantise, a(72, 200)),
    "grouped cast": (partial(grouped_fp8_kernels.cast_transpose, dtype=E4M3), a(T, F), SIZES, SCALE),
    "grouped transpose": (grouped_fp8_kernels.transpose, a(T, F, dtype=E4M3), SIZES),
    "grouped blockwise": (grouped_blockwise_kernels.quantise, a(72, 256), SIZES),
    "grouped matmul": (partial(grouped_matmul_triton.matmul, tiling=grouped_matmul_triton.TILINGS[0]),)
    + (a(T, F), a(3, F, 72), SIZES),
    "grouped weight gradient": (
        partial(grouped_matmul_triton.weight_gradient, dtype=BF16, tiling=grouped_matmul_triton.TILINGS[0]),
        *(a(T, F), a(T, 72), SIZES),
    ),
    "attention": (partial(ranged_attention_triton.attend, **ATTENTION), *QKV, RANGES),
    "attention backward": (
        partial(ranged_attention_triton.attend_backward, **ATTENTION),
        *(*QKV, RANGES, (QKV[0], ROWS), QKV[0]),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_store_that_may_be_beyond_the_array_has_a_mask(name):
    function, *arguments = CALLS[name]
    kernels = [e for e in equations(jax.make_jaxpr(function)(*arguments).jaxpr) if e.primitive.name == "pallas_call"]
    assert kernels
    for kernel in kernels:
        grid = kernel.params["grid_mapping"]
        cut = set()  # blocks of outputs that are no whole ones, or of which the kernel takes a part itself
        for output in grid.block_mappings[-grid.num_outputs :]:
            sizes, whole = [getattr(size, "block_size", size) for size in output.block_shape], output.array_aval
            block = tuple(size for size in sizes if isinstance(size, int))
            fits = all(n % size == 0 for n, size in zip(whole.shape, sizes, strict=True) if isinstance(size, int))
            if not fits or block == whole.shape:
                cut.add((block, whole.dtype))
        stores = [e for e in equations(kernel.params["jaxpr"]) if e.primitive.name == "masked_swap"]
        stores = [e for e in stores if (e.invars[0].aval.shape, e.invars[0].aval.dtype) in cut]
        assert stores
        for store in stores:
            *_, mask = jax.tree.unflatten(store.params["args_tree"], store.invars)
            assert mask is not None, store
