"""FP8 of rows in groups: quantisation and grouped matmuls, plain and by kernels, against NumPy in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from megajax.ops import grouped_fp8_kernels, grouped_fp8_reference, grouped_matmul, grouped_matmul_kernel, grouped_rows
from megajax.ops.fp8_kernels import CastTiling

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
R, SCALE, STEP = 300, 40.0, 128
SIZES = {
    "uneven": (70, 0, 3, 227),
    "rows left over": (3, 131, 0, 66),
    "all in one": (0, 0, 300, 0),
    "nothing": (0, 0, 0, 0),
}


def each_size(function):
    return pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())(function)


def groups(sizes):
    """Of each group: its rows, and where its columns begin in a transpose."""
    start = column = 0
    for size in sizes:
        yield slice(start, start + size), column
        start, column = start + size, column + -(-size // STEP) * STEP


def bits(q):
    return np.asarray(q).view(np.uint8)


def transpose(q, sizes):
    """q [R, F] transposed, groups in steps, up to the end of the last step."""
    steps = sum(-(-size // STEP) for size in sizes)
    q_t = np.zeros((q.shape[1], steps * STEP), q.dtype)
    for rows, column in groups(sizes):
        q_t[:, column : column + rows.stop - rows.start] = q[rows].T
    return q_t


@pytest.mark.parametrize("seed", range(4))
def test_steps_hold_every_row_once(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 400, size=11) * rng.integers(0, 2, size=11)
    total = int(sizes.sum() + rng.integers(0, 300))
    P = grouped_rows.padded_rows(total, len(sizes))
    run = jax.jit(lambda sizes: (grouped_rows.steps(sizes, P), grouped_rows.step_bounds(sizes)))
    table, bounds = jax.device_get(run(sizes))
    found = np.full(P, -1)
    for step, (first, count) in enumerate(table):
        found[step * STEP : step * STEP + count] = np.arange(first, first + count)
    expected = np.full(P, -1)
    for (rows, column), bound in zip(groups(sizes), bounds, strict=True):
        expected[column : column + rows.stop - rows.start] = np.arange(rows.start, rows.stop)
        np.testing.assert_array_equal(bound, [column, column + rows.stop - rows.start])
    np.testing.assert_array_equal(found, expected)


# Quantisation


def tensors(rng, F, sizes):
    """x, gate_up, weights; what is in rows of no group must not matter."""
    x, gate_up, weights = rng.normal(size=(R, F)), rng.normal(size=(R, 2 * F)), rng.random(R)
    for a in (x, gate_up, weights):
        a[sum(sizes) :] = np.nan
    return np.asarray(x, jnp.bfloat16), np.asarray(gate_up, jnp.bfloat16), np.asarray(weights, np.float32)


def in_float64(operation, x, gate_up, weights):
    """The values before quantisation, and the gradients of the weights."""
    x, gate_up, weights = (np.asarray(a, np.float64) for a in (x, gate_up, weights[:, None]))
    if operation == "cast":
        return x, None
    gate, up = np.split(gate_up, 2, axis=-1)
    # Either activation is gate · sigmoid(u): tanh-GELU with u = 2 sqrt(2/π) (gate + 0.044715 gate³).
    c, swiglu = 2.0 * np.sqrt(2.0 / np.pi), operation.startswith("swiglu")
    u, slope = (gate, 1.0) if swiglu else (c * (gate + 0.044715 * gate**3), c * (1.0 + 3.0 * 0.044715 * gate**2))
    sigmoid = 1.0 / (1.0 + np.exp(-u))
    if not operation.endswith("backward"):
        return gate * sigmoid * up * weights, None
    derivative = sigmoid + gate * sigmoid * (1.0 - sigmoid) * slope
    gradient = np.concatenate([x * up * derivative, x * gate * sigmoid], axis=-1) * weights
    return gradient, np.sum(x * gate * sigmoid * up, axis=-1)


def run(module, operation, arrays, sizes, dtype, **options):
    """(q, q_t, amax[, dweights]), and the amax alone."""
    x, gate_up, weights = arrays
    kind, *backward = operation.split()
    if kind == "cast":
        arguments, name = (x,), ""
    else:
        arguments, name = (kind, gate_up, weights, *([x] * len(backward))), "gated_" + "backward_" * len(backward)
    sizes = jnp.asarray(sizes, jnp.int32)
    found = getattr(module, f"{name}cast_transpose")(*arguments, sizes, jnp.float32(SCALE), dtype, **options)
    alone = getattr(module, f"{name}amax")(*arguments, sizes, **(options if name else {}))
    return found, alone


def check(found, alone, operation, arrays, sizes, dtype):
    (q, q_t, amax, *dweights), used = found, sum(sizes)
    values, gradient = in_float64(operation, *(np.asarray(a[:used], np.float64) for a in arrays))
    expected = np.clip(values * SCALE, -LARGEST[dtype], LARGEST[dtype]).astype(np.float32).astype(dtype)
    assert q.dtype == q_t.dtype == dtype and q.shape[1] == q_t.shape[0] == values.shape[1] and q.shape[0] >= R
    assert q_t.shape[1] % STEP == 0 and amax.shape == () and amax.dtype == jnp.float32
    assert np.mean(bits(q[:used]) != bits(expected)) < 2e-3 if used else True  # float32 may round to the other side
    q_t_expected = transpose(np.asarray(q), sizes)
    np.testing.assert_array_equal(bits(q_t)[:, : q_t_expected.shape[1]], bits(q_t_expected))
    np.testing.assert_allclose(amax, np.abs(values).max(initial=0), rtol=1e-5)
    np.testing.assert_array_equal(amax, alone)
    if gradient is not None:
        np.testing.assert_allclose(dweights[0][:used], gradient, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(dweights[0][used:], 0)


each_module = pytest.mark.parametrize(
    "module", [grouped_fp8_reference, grouped_fp8_kernels], ids=["reference", "kernels"]
)
# test_mlp_kernel.py has the values and gradients of each activation, which these kernels call.
OPERATIONS = {"cast": E4M3, "swiglu": E4M3, "geglu backward": E5M2}


def interpreted(module):
    return {"tiling": CastTiling(tokens=32, features=32), "interpret": True} if module is grouped_fp8_kernels else {}


@functools.cache
def compiled_quantisers(module):
    """All of them, compiled once for all sizes."""

    @jax.jit
    def all_of_them(arrays, sizes):
        found = {o: run(module, o, arrays, sizes, dtype, **interpreted(module)) for o, dtype in OPERATIONS.items()}
        return found, module.transpose(found["cast"][0][0], sizes, **interpreted(module))

    return all_of_them


@each_module
@each_size
def test_rows_of_groups_are_quantised(rng, sizes, module):
    arrays = tensors(rng, 48, sizes)  # not whole tiles
    quantised, transposed = jax.device_get(compiled_quantisers(module)(arrays, np.asarray(sizes, np.int32)))
    for operation, found in quantised.items():
        check(*found, operation, arrays, sizes, OPERATIONS[operation])
    alone = transpose(np.asarray(quantised["cast"][0][0]), sizes)
    np.testing.assert_array_equal(bits(transposed)[:, : alone.shape[1]], bits(alone))


@each_module
def test_what_is_too_large_saturates_and_nan_stays(module):
    x = np.ones((40, 32), jnp.bfloat16)
    x[2, :2], x[3, 0] = (np.inf, np.nan), -1e6
    quantise = functools.partial(module.cast_transpose, scale=jnp.float32(1), dtype=E4M3, **interpreted(module))
    quantise = jax.jit(quantise)
    q, q_t, amax = jax.device_get(quantise(x, np.array([20, 20], np.int32)))
    np.testing.assert_array_equal(q[2:4, :3].astype(np.float32), [[448, np.nan, 1], [-448, 1, 1]])
    np.testing.assert_array_equal(q_t[:3, 2:4].astype(np.float32), [[448, -448], [np.nan, 1], [1, 1]])
    assert np.isnan(amax)
    assert quantise(x, np.array([2, 0], np.int32))[2] == 1


def test_arrays_that_triton_cannot_address_are_larger():
    x = jax.ShapeDtypeStruct((2**17, 2**14 + 2**13), jnp.bfloat16)
    quantise = functools.partial(grouped_fp8_kernels.cast_transpose, scale=jnp.float32(1), dtype=E4M3)
    q, q_t, _ = jax.eval_shape(quantise, x, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert q.size > 2**32 < q_t.size and q.shape[0] % 8 == q_t.shape[1] % STEP == 0
    rows, sizes = jax.ShapeDtypeStruct(x.shape, E4M3), jax.ShapeDtypeStruct((8,), jnp.int32)
    traced = jax.make_jaxpr(grouped_fp8_kernels.transpose)(rows, sizes)
    assert [each.invars[-1].aval.size > 2**32 for each in traced.eqns if "pallas" in each.primitive.name] == [True]
    assert traced.out_avals[0].size > 2**32


# Matmuls

K, N, INVERSE = 128, 192, 0.25  # sums over a whole step, and over half steps
TILING = grouped_matmul_kernel.MatmulTiling(rows=64, cols=128, stages=2)  # wider than N, and a ring that goes round


def operands(rng, sizes, rows=R):
    """x E4M3, w E4M3, dy E5M2 with NaN in rows of no group, and their transposes with NaN after the last step."""
    x, w, dy = (rng.normal(size=s) for s in ((rows, K), (len(sizes), N, K), (rows, N)))
    x, w, dy = (np.asarray(a, np.float32).astype(d) for a, d in ((x, E4M3), (w, E4M3), (dy, E5M2)))
    x[sum(sizes) :], dy[sum(sizes) :] = np.nan, np.nan
    P = grouped_rows.padded_rows(rows, len(sizes))
    x_t, dy_t = (
        np.pad(a, ((0, 0), (0, P - a.shape[1])), constant_values=np.nan)
        for a in map(functools.partial(transpose, sizes=sizes), (x, dy))
    )
    return x, w, dy, x_t, dy_t


def products_in_float64(x, w, dy, sizes):
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    out, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros((len(sizes), K, N))
    for e, (rows, _) in enumerate(groups(sizes)):
        out[rows], dx[rows], dw[e] = x[rows] @ w[e].T, dy[rows] @ w[e], x[rows].T @ dy[rows]
    return [a * INVERSE for a in (out, dx, dw)]


def all_products(multiply, gradient, x, w, dy, x_t, dy_t, sizes):
    inverse = jnp.full(1, INVERSE)
    return (
        multiply(x, w, inverse, sizes, jnp.bfloat16),
        multiply(dy, jnp.swapaxes(w, 1, 2), inverse, sizes, jnp.bfloat16),
        gradient(x_t, dy_t, inverse, sizes, jnp.float32),
    )


def check_products(found, expected):
    for a, b, tolerance in zip(found, expected, (3e-3, 3e-3, 1e-6), strict=False):
        a = np.asarray(a, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)
        np.testing.assert_array_equal(a[b == 0], 0)  # unused rows and empty groups


@each_size
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_products(rng, sizes, implementation):
    arrays = operands(rng, sizes)
    products = (
        functools.partial(f, implementation=implementation)
        for f in (grouped_matmul.fp8_rows_times_weights, grouped_matmul.fp8_weight_gradient)
    )
    found = jax.jit(functools.partial(all_products, *products))(*arrays, np.asarray(sizes, np.int32))
    check_products(found, products_in_float64(*arrays[:3], sizes))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_the_first_rows_alone(rng, implementation):
    sizes = SIZES["rows left over"]
    x, w, dy, *_ = operands(rng, sizes)
    how = {"rows": sum(sizes) + 1, "implementation": implementation}
    found = jax.jit(functools.partial(grouped_matmul.fp8_rows_times_weights, **how), static_argnums=4)(
        x, w, jnp.full(1, INVERSE), np.asarray(sizes, np.int32), jnp.bfloat16
    )
    expected = products_in_float64(x, w, dy, sizes)[0][: sum(sizes) + 1]
    assert found.shape == expected.shape and sum(sizes) + 1 < R
    check_products([found], [expected])


@functools.cache
def compiled_products():
    how = {"tiling": TILING, "blocks": 2, "interpret": plgpu.InterpretGPUParams(detect_races=False)}
    kernels = (grouped_matmul_kernel.fp8_matmul, grouped_matmul_kernel.fp8_weight_gradient)
    return jax.jit(functools.partial(all_products, *(functools.partial(f, **how) for f in kernels)))


@pytest.mark.parametrize(
    ("sizes", "rows"), [((131, 0, 3), 150), pytest.param(SIZES["uneven"], R, marks=pytest.mark.long)]
)
def test_kernels_multiply(rng, sizes, rows):
    """More rows than a step, an empty group before another one, and rows of no group."""
    arrays = operands(rng, sizes, rows)
    found = compiled_products()(*arrays, np.asarray(sizes, np.int32))
    check_products(found, products_in_float64(*arrays[:3], sizes))
