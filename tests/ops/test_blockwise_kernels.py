"""The kernels of blockwise FP8, interpreted: quantisation bit for bit as the recipe has it, products against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import blockwise_fp8_kernels as kernels
from megajax.ops.blockwise_fp8 import BLOCK, Blockwise
from megajax.ops.blockwise_fp8_kernels import BothWays
from megajax.ops.blockwise_kernel import matmul
from megajax.ops.grouped_matmul_block import MatmulTiling
from megajax.ops.mlp_activation import activate

RECIPE = Blockwise()


def assert_quantised(found: BothWays, x: jax.Array, tensor: str, differ: float = 0.0) -> None:
    """As operands of sums over both dimensions; up to a share of numbers and scales that `differ`."""
    for blocks, values in zip(found, (x, x.T), strict=True):
        assert blocks is not None
        expected = RECIPE.quantised(values.astype(jnp.float32), tensor, None, None)
        own = np.asarray(blocks.values).astype(np.float32)
        assert own.shape[1] == -(-values.shape[1] // BLOCK) * BLOCK and not own[:, values.shape[1] :].any()
        assert np.mean(own[:, : values.shape[1]] != expected.values) <= differ
        assert np.mean(blocks.scales.T != expected.scales) <= differ


def test_a_tensor_is_quantised_along_both_dimensions(rng):
    """Sizes that are no multiples of a block, a block of zeros, a block with an infinity, and a wide range."""
    shape = 160, 200
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 20, (160, 1)) * 2.0 ** rng.integers(-6, 6, 200)
    x[:3, :BLOCK], x[130, 7] = 0, np.inf
    x = jnp.asarray(x, jnp.bfloat16)
    finite = x.at[130, 7].set(1)
    assert_quantised(kernels.quantise(finite, interpret=True), finite, "input")
    weight = [kernels.quantise_weight(finite, which, interpret=True) for which in ("gradient", "input")]
    assert_quantised(BothWays(*weight), finite, "weight")
    rows, columns = kernels.quantise(x, interpret=True)
    assert rows is not None and np.isnan(rows.scales[0, 130]) and np.isfinite(rows.scales[1]).all()
    assert np.isnan(columns.scales[1, 7]) and np.isfinite(columns.scales[0]).all()


def test_a_gated_activation_and_its_gradient_are_quantised_where_they_are_computed(rng):
    """Where the last bit of FP32 differs a number may round to the next one."""
    gate_up, dact = (jnp.asarray(rng.standard_normal((160, n * BLOCK)), jnp.float32) for n in (2, 1))
    act, pull = jax.vjp(lambda gate_up: activate("swiglu", gate_up), gate_up)
    assert_quantised(kernels.gated("swiglu", gate_up, interpret=True), act, "input", differ=1e-3)
    found = kernels.gated_backward("swiglu", gate_up, dact, interpret=True)
    assert_quantised(found, pull(dact)[0], "gradient", differ=1e-3)


@pytest.mark.parametrize("tensor", ["weight", "gradient"])
def test_products_of_each_block_are_scaled_and_added_in_fp32(rng, tensor):
    """More tiles than blocks of threads, more steps than stages, and sizes that are no multiples of a tile."""
    M, N, K = 144, 208, 3 * BLOCK
    a, b = (
        rng.standard_normal((rows, K)) * 2.0 ** rng.integers(-6, 6, (rows, K // BLOCK)).repeat(BLOCK, 1)
        for rows in (M, N)
    )
    operands = [RECIPE.quantised(jnp.float32(x), which, None, None) for x, which in ((a, "input"), (b, tensor))]
    expected = (
        np.asarray(operands[0].numbers(jnp.float32), np.float64)
        @ np.asarray(operands[1].numbers(jnp.float32), np.float64).T
    )
    given = [array for x in operands for array in (x.values.astype(x.element.dtype), x.scales.T)]
    tiling = MatmulTiling(rows=128, cols=64, stages=2, slots=3)
    found = matmul(*given, jnp.float32, tiling=tiling, blocks=1, interpret=plgpu.InterpretGPUParams(detect_races=False))
    assert found.shape == (M, N)
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)
