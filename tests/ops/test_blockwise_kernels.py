"""The kernels of blockwise FP8, interpreted: quantisation bit for bit as the recipe has it, products against NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import ExpertKernels, ExpertMatrices, ExpertMlp, blockwise_kernel, grouped_blockwise_kernels
from megajax.ops import blockwise_fp8_kernels as kernels
from megajax.ops.block_matmul import BlockWeight
from megajax.ops.blockwise_fp8 import BLOCK, Blockwise
from megajax.ops.blockwise_fp8_kernels import BothWays, ScaledOperand
from megajax.ops.blockwise_kernel import matmul
from megajax.ops.expert_mlp import Route, expert_mlp
from megajax.ops.grouped_matmul_block import MatmulTiling
from megajax.ops.mlp_activation import activate

RECIPE = Blockwise()
quantised = jax.jit(RECIPE.quantised, static_argnums=1)


def assert_quantised(found: BothWays, x: jax.Array, tensor: str, differ: float = 0.0) -> None:
    """As operands of sums over both dimensions; up to a share of numbers and scales that `differ`."""
    found, x = jax.device_get((found, x))
    for blocks, values in zip(found, (x, x.T), strict=True):
        assert blocks is not None
        expected = jax.device_get(quantised(values.astype(np.float32), tensor, None, None))
        own = blocks.values.astype(np.float32)
        assert own.shape[1] == -(-values.shape[1] // BLOCK) * BLOCK and not own[:, values.shape[1] :].any()
        assert np.mean(own[:, : values.shape[1]] != expected.values) <= differ
        assert np.mean(blocks.scales.T != expected.scales) <= differ


def test_a_tensor_is_quantised_along_both_dimensions(rng):
    """Sizes that are no multiples of a block, a block of zeros, a block with an infinity, and a wide range."""
    shape = 160, 200
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 20, (160, 1)) * 2.0 ** rng.integers(-6, 6, 200)
    x[:3, :BLOCK], x[130, 7] = 0, np.inf
    x = np.asarray(x, jnp.bfloat16)
    finite = x.copy()
    finite[130, 7] = 1
    quantise = jax.jit(partial(kernels.quantise, interpret=True))
    assert_quantised(quantise(finite), finite, "input")
    for_weight = jax.jit(partial(kernels.quantise_weight, interpret=True), static_argnums=1)
    assert_quantised(BothWays(*(for_weight(finite, which) for which in ("gradient", "input"))), finite, "weight")
    rows, columns = jax.device_get(quantise(x))
    assert rows is not None and np.isnan(rows.scales[0, 130]) and np.isfinite(rows.scales[1]).all()
    assert np.isnan(columns.scales[1, 7]) and np.isfinite(columns.scales[0]).all()


def test_a_gated_activation_and_its_gradient_are_quantised_where_they_are_computed(rng):
    """Where the last bit of FP32 differs a number may round to the next one."""
    gate_up, dact = (np.asarray(rng.standard_normal((160, n * BLOCK)), np.float32) for n in (2, 1))

    @jax.jit
    def run(gate_up, dact):
        act, pull = jax.vjp(lambda gate_up: activate("swiglu", gate_up), gate_up)
        found = kernels.gated("swiglu", gate_up, interpret=True)
        return found, act, kernels.gated_backward("swiglu", gate_up, dact, interpret=True), pull(dact)[0]

    found, act, found_gradient, gradient = run(gate_up, dact)
    assert_quantised(found, act, "input", differ=1e-3)
    assert_quantised(found_gradient, gradient, "gradient", differ=1e-3)


@pytest.mark.parametrize(("tensor", "M"), [("weight", 144), ("gradient", 16)])
def test_products_of_each_block_are_scaled_and_added_in_fp32(rng, tensor, M):
    """More tiles than blocks of threads, more steps than stages, and sizes that are no multiples of a tile."""
    N, K = 160, 3 * BLOCK
    a, b = (
        rng.standard_normal((rows, K)) * 2.0 ** rng.integers(-6, 6, (rows, K // BLOCK)).repeat(BLOCK, 1)
        for rows in (M, N)
    )
    tiling = MatmulTiling(rows=128, cols=64, stages=2, slots=3)
    how = {"tiling": tiling, "blocks": 1, "interpret": plgpu.InterpretGPUParams(detect_races=False)}

    @jax.jit
    def run(a, b):
        operands = [RECIPE.quantised(x, which, None, None) for x, which in ((a, "input"), (b, tensor))]
        given = [ScaledOperand(x.values.astype(x.element.dtype), x.scales.T) for x in operands]
        return matmul(*given, jnp.float32, **how), [x.numbers(jnp.float32) for x in operands]

    found, numbers = run(np.float32(a), np.float32(b))
    expected = np.asarray(numbers[0], np.float64) @ np.asarray(numbers[1], np.float64).T
    assert found.shape == (M, N)
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)


SIZES, R = (3, 0, 140), 160  # of groups: fewer and more rows than a block, and rows after the last group


def groups():
    """(its rows, where its columns begin in a transpose) of each group."""
    start = column = 0
    for size in SIZES:
        yield slice(start, start + size), column
        start, column = start + size, column + -(-size // BLOCK) * BLOCK


def test_blocks_of_experts_begin_with_the_first_row_of_their_group(rng):
    """What is in rows of no group does not matter."""
    x = rng.standard_normal((R, BLOCK)) * 2.0 ** rng.integers(-6, 6, (R, 1))
    x[sum(SIZES) :] = np.nan
    x = np.asarray(x, jnp.bfloat16)
    both = jax.jit(partial(grouped_blockwise_kernels.quantise, interpret=True))(x, np.array(SIZES, np.int32))
    rows, columns = (tuple(np.asarray(array, np.float32) for array in operand or ()) for operand in both)
    expected = jax.device_get(quantised(x.astype(np.float32), "input", None, None))
    used = slice(sum(SIZES))
    np.testing.assert_array_equal(rows[0][used], expected.values[used])
    np.testing.assert_array_equal(rows[1].T[used], expected.scales[used])
    for own, column in groups():
        padded = np.zeros((2 * BLOCK, BLOCK), np.float32)
        padded[: own.stop - own.start] = x[own]
        expected = jax.device_get(quantised(padded.T, "input", None, None))
        for block in range(-(-(own.stop - own.start) // BLOCK)):
            first = column + block * BLOCK
            values = expected.values[:, block * BLOCK : (block + 1) * BLOCK]
            np.testing.assert_array_equal(columns[0][:, first : first + BLOCK], values)
            np.testing.assert_array_equal(columns[1][first // BLOCK], expected.scales[:, block])


def test_matrices_of_many_experts_are_in_arrays_that_triton_can_address():
    """Its addresses of FP8 arrays between 2 and 4 GiB are wrong; of 256 experts of DeepSeek-V3, 128 on a device."""
    w = jax.ShapeDtypeStruct((128, 7168, 4096), jnp.bfloat16)
    traced = jax.make_jaxpr(partial(grouped_blockwise_kernels.quantise_weights, which="input"))(w)
    assert [out.shape for out in traced.out_avals] == [(128, 4096, 7168), (128, 7168 // BLOCK, 4096 // BLOCK)]
    arrays = [equation.outvars[0].aval for equation in traced.eqns if equation.primitive.name == "pallas_call"]
    assert sum(array.size for array in arrays) == w.size and all(array.size <= 2**31 for array in arrays)


INTERPRETED = {"blocks": 1, "interpret": plgpu.InterpretGPUParams(detect_races=False)}


def test_products_of_experts_are_scaled_and_added_in_fp32(rng):
    """Against NumPy: tiles of one group with rows of others, matrices of an empty group, rows after the last group."""
    E, K, N = len(SIZES), 2 * BLOCK, BLOCK
    x, dy = (np.asarray(rng.standard_normal((R, size)), jnp.float8_e4m3fn) for size in (K, N))
    w = np.asarray(rng.standard_normal((E, N, K)), jnp.float8_e4m3fn)
    x_scales, w_scales = (np.exp2(rng.integers(-6, 6, shape)) for shape in ((K // BLOCK, R), (E, K // BLOCK, 1)))
    x[sum(SIZES) :] = np.nan
    how, sizes = INTERPRETED | {"tiling": MatmulTiling(rows=128, cols=64, stages=2, slots=3)}, np.array(SIZES, np.int32)
    given = (ScaledOperand(*each) for each in ((x, np.float32(x_scales)), (w, np.float32(w_scales))))
    found = np.asarray(blockwise_kernel.grouped_matmul(*given, sizes, jnp.float32, R, **how))
    expected, gradients = np.zeros((R, N)), np.zeros((E, K, N))
    columns = np.zeros((K + N, 4 * BLOCK), x.dtype)
    scales = np.exp2(rng.integers(-6, 6, (4, K + N)), dtype=np.float32)
    for e, (rows, column) in enumerate(groups()):
        own, matrix = np.float64(x[rows]) * x_scales.T[rows].repeat(BLOCK, 1), np.float64(w[e])
        expected[rows] = own @ (matrix * w_scales[e].repeat(BLOCK, 0).T).T
        columns[:, column : column + len(own)] = np.concatenate([x[rows], dy[rows]], 1).T
        blocks = slice(column, column + -(-len(own) // BLOCK) * BLOCK)
        scaled = np.float64(columns[:, blocks]) * scales.T.repeat(BLOCK, 1)[:, blocks]
        gradients[e] = scaled[:K] @ scaled[K:].T
    assert np.linalg.norm(found - expected) < 1e-6 * np.linalg.norm(expected)
    np.testing.assert_array_equal(found[sum(SIZES) :], 0)
    given = (ScaledOperand(columns[own], scales[:, own]) for own in (slice(K), slice(K, None)))
    found = np.asarray(blockwise_kernel.grouped_weight_gradient(*given, sizes, jnp.float32, **how))
    assert np.linalg.norm(found - gradients) < 1e-6 * np.linalg.norm(gradients)
    np.testing.assert_array_equal(found[1], 0)


@pytest.mark.long  # the tests above have its kernels
def test_experts_compute_what_is_emulated(rng, monkeypatch):
    """Products of the formats' numbers, which test_fp8_recipes.py has by hand; a number may round to the next one."""
    for name in ("quantise", "gated", "gated_backward", "quantise_weights"):
        function = partial(getattr(grouped_blockwise_kernels, name), interpret=True)
        monkeypatch.setattr(grouped_blockwise_kernels, name, function)
    how = INTERPRETED | {"tiling": MatmulTiling(rows=128, cols=128, stages=2)}
    for name in ("grouped_matmul", "grouped_weight_gradient"):
        monkeypatch.setattr(blockwise_kernel, name, partial(getattr(blockwise_kernel, name), **how))
    E, D, F = len(SIZES), BLOCK, BLOCK
    rows, dy = (jnp.float32(rng.standard_normal((R, D))) for _ in range(2))
    weights = jnp.float32(rng.random(R) * (np.arange(R) < sum(SIZES)))
    matrices = [jnp.float32(rng.standard_normal(shape) / 16) for shape in ((E, D, 2 * F), (E, F, D))]

    def gradients(implementation, grouped_matmul):
        mlp = ExpertMlp("swiglu", ExpertKernels(grouped_matmul))
        up, down = (BlockWeight(w, None, None, RECIPE, implementation) for w in matrices)

        def apply(rows, weights, up_values, down_values):
            used = ExpertMatrices(replace(up, values=up_values), replace(down, values=down_values))
            return expert_mlp(mlp, Route(jnp.asarray(SIZES)), rows, weights, used)

        y, pull = jax.vjp(apply, rows, weights, *matrices)
        return y, *pull(dy)

    found, expected = (
        jax.jit(partial(gradients, *each))() for each in (("pallas", "pallas"), ("emulated", "reference"))
    )
    for own, emulated in zip(found, expected, strict=True):
        assert np.linalg.norm(own - emulated) < 2e-3 * np.linalg.norm(emulated)
        np.testing.assert_array_equal(own[emulated == 0], 0)  # rows after the last group, and its empty matrices
