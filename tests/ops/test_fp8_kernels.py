"""The FP8 kernels, interpreted, against the plain reference; the reference against NumPy in float64."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from megajax.ops import fp8_kernels, fp8_reference
from megajax.ops.fp8_kernels import CastTiling

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
TILING = CastTiling(tokens=32, features=32)
SCALE = 40.0
OPERATIONS = ["cast", "swiglu", "geglu", "swiglu backward", "geglu backward"]


@functools.cache
def compiled(operation: str, dtype, module, **options):
    """(x, gate_up) -> (the operation's (q, q_t, amax), its amax alone); compiled once for all tests."""
    kind, *backward = operation.split()
    name = "" if kind == "cast" else "gated_" + "backward_" * len(backward)

    @jax.jit
    def run(x, gate_up):
        arguments = (x,) if kind == "cast" else (kind, gate_up, *([x] * len(backward)))
        found = getattr(module, f"{name}cast_transpose")(*arguments, jnp.float32(SCALE), dtype, **options)
        if kind == "cast":  # XLA's own reduction is as fast
            return found, fp8_reference.amax(x)
        return found, getattr(module, f"{name}amax")(*arguments, **options)

    return run


def random_tensors(rng, T, F):
    # A gate beyond 4 would test the reference's tanh-GELU instead, which loses its digits where tanh is almost -1.
    shapes = (T, F), (T, 2 * F)
    return [np.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def in_float64(operation: str, x, gate_up):
    """The values before quantisation."""
    x, gate_up = (np.asarray(a, np.float64) for a in (x, gate_up))
    if operation == "cast":
        return x
    gate, up = np.split(gate_up, 2, axis=-1)
    # Either activation is gate · sigmoid(u): tanh-GELU with u = 2 sqrt(2/π) (gate + 0.044715 gate³).
    c = 2.0 * np.sqrt(2.0 / np.pi)
    is_swiglu = operation.startswith("swiglu")
    u = gate if is_swiglu else c * (gate + 0.044715 * gate**3)
    slope = 1.0 if is_swiglu else c * (1.0 + 3.0 * 0.044715 * gate**2)
    sigmoid = 1.0 / (1.0 + np.exp(-u))
    if operation.endswith("backward"):
        derivative = sigmoid + gate * sigmoid * (1.0 - sigmoid) * slope
        return np.concatenate([x * up * derivative, x * gate * sigmoid], axis=-1)
    return gate * sigmoid * up


def bits(q):
    return np.asarray(q).view(np.uint8)


def steps_between(a, b):
    """How many FP8 numbers lie between, elementwise: the bits are a sign and a magnitude that keeps the order."""

    def ordered(q):
        code = bits(q).astype(int)
        return np.where(code < 128, code, 128 - code)

    return np.abs(ordered(a) - ordered(b))


def assert_almost_all_equal(q, expected):
    """Equal but for another side of a rounding boundary, where float32 was rounded otherwise."""
    assert q.dtype == expected.dtype and q.shape == expected.shape
    steps = steps_between(q, expected)
    assert steps.max() <= 1
    assert np.mean(steps > 0) < 2e-3


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_reference_quantises_the_float32_value(rng, operation, dtype):
    tensors = random_tensors(rng, 48, 80)
    (q, q_t, amax), alone = compiled(operation, dtype, fp8_reference)(*tensors)
    value = in_float64(operation, *tensors)
    expected = np.clip(value * SCALE, -LARGEST[dtype], LARGEST[dtype]).astype(np.float32).astype(dtype)
    assert_almost_all_equal(q, expected)
    np.testing.assert_array_equal(bits(q_t), bits(q).T)
    np.testing.assert_allclose(amax, np.abs(value).max(), rtol=1e-5)
    np.testing.assert_array_equal(amax, alone)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((64, 96), E4M3, id="whole tiles", marks=pytest.mark.long),
        pytest.param((48, 80), E5M2, id="edges", marks=pytest.mark.smoke),
    ],
)
# Each kernel with one activation; test_mlp_kernel.py has the functions of all, which the kernels call.
@pytest.mark.parametrize(
    "operation",
    [
        *("cast", "swiglu", "geglu backward"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("geglu", "swiglu backward")),
    ],
)
def test_kernels_agree_with_the_reference(rng, operation, shape, dtype):
    tensors = random_tensors(rng, *shape)
    (q, q_t, amax), alone = compiled(operation, dtype, fp8_kernels, tiling=TILING, interpret=True)(*tensors)
    expected, _ = compiled(operation, dtype, fp8_reference)(*tensors)
    assert_almost_all_equal(q, expected[0])
    np.testing.assert_array_equal(bits(q_t), bits(q).T)
    assert amax.dtype == jnp.float32 and amax.shape == ()
    np.testing.assert_allclose(amax, expected[2], rtol=1e-6)
    np.testing.assert_array_equal(amax, alone)


KERNELS = functools.partial(fp8_kernels.cast_transpose, tiling=TILING, interpret=True)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("cast_transpose", [fp8_reference.cast_transpose, KERNELS], ids=["reference", "kernels"])
def test_what_is_too_large_saturates_and_nan_stays(cast_transpose, dtype):
    largest = LARGEST[dtype]
    run = jax.jit(functools.partial(cast_transpose, scale=jnp.float32(1.0), dtype=dtype))
    row = np.asarray([2 * largest, -2 * largest, np.inf, -np.inf, 1.0, 0.0, -2.0, 0.5], jnp.bfloat16)
    x = np.tile(row, (16, 2))
    q, q_t, amax = jax.device_get(run(x))
    expected = np.tile([largest, -largest, largest, -largest, 1.0, 0.0, -2.0, 0.5], (16, 2))
    np.testing.assert_array_equal(q.astype(np.float32), expected)
    assert amax == np.inf

    x[3, 5] = expected[3, 5] = np.nan
    q, q_t, amax = jax.device_get(run(x))
    np.testing.assert_array_equal(q.astype(np.float32), expected)
    np.testing.assert_array_equal(q_t.astype(np.float32), expected.T)
    assert np.isnan(amax)


def test_rounds_to_nearest_even():
    midway = np.asarray(np.tile([17.0, 19.0, -17.0, -19.0], (16, 4)), jnp.bfloat16)  # E4M3 counts 16, 18, 20
    q, _, _ = jax.device_get(jax.jit(lambda x: KERNELS(x, jnp.ones(1), E4M3))(midway))
    np.testing.assert_array_equal(q.astype(np.float32), np.tile([16.0, 20.0, -16.0, -20.0], (16, 4)))
    np.testing.assert_array_equal(bits(q), bits(np.asarray(midway, np.float32).astype(ml_dtypes.float8_e4m3fn)))


def test_the_shape_of_the_blocks_changes_nothing(rng):
    x, _ = random_tensors(rng, 80, 48)
    other = replace(TILING, tokens=64)
    scale = np.float32(SCALE)
    results = jax.jit(lambda x: (KERNELS(x, scale, E4M3), KERNELS(x, scale, E4M3, tiling=other)))(x)
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(lambda a: np.asarray(a).astype(np.float32), results))


def test_kernels_run_inside_shard_map(rng):
    x, _ = random_tensors(rng, 64, 48)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    rows, columns = PartitionSpec("data", None), PartitionSpec(None, "data")

    def local(x):
        q, q_t, amax = KERNELS(x, jnp.float32(SCALE), E4M3)
        return q, q_t, jax.lax.pmax(amax, "data")

    mapped = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=(rows, columns, PartitionSpec()), check_vma=False)
    results = jax.jit(mapped)(x), jax.jit(lambda x: fp8_reference.cast_transpose(x, jnp.float32(SCALE), E4M3))(x)
    jax.tree.map(np.testing.assert_array_equal, *jax.tree.map(lambda a: np.asarray(a).astype(np.float32), results))


def test_what_the_kernels_cannot_do_is_refused():
    with pytest.raises(ValueError, match="use one of swiglu, geglu"):
        fp8_kernels.gated_amax("gelu", np.ones((16, 32), np.float32), tiling=TILING, interpret=True)
    with pytest.raises(ValueError, match="fewer tokens"):
        jax.eval_shape(
            lambda x: fp8_kernels.cast_transpose(x, jnp.float32(1), E4M3),
            jax.ShapeDtypeStruct((2**17, 2**14), jnp.bfloat16),
        )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_product_whose_unscaled_sums_are_beyond_fp16_is_exact(dtype):
    """1024 products of 448², which are 2·10⁸: FP16 ends at 65504."""
    ones = np.full((8, 1024), 448, E4M3)
    found = np.asarray(jax.jit(lambda x: fp8_reference.matmul(x, x, jnp.float32(2.0**-20), dtype))(ones))
    assert found.dtype == dtype and (found == 1024 * 448**2 / 2**20).all()
