"""FP8 and FP4 in blocks, bit for bit as tables of the formats' numbers and loops over blocks in NumPy give them."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.ops import block_formats, nvfp4
from megajax.ops.block_formats import E2M1, E4M3, LEAST_SCALE, multiply, random_bits
from megajax.ops.block_recipes import IMPLEMENTATIONS

pytestmark = pytest.mark.smoke


def numbers_of(exponent_bits: int, mantissa_bits: int, bias: int, count: int) -> np.ndarray:
    """The numbers from 0 up of a format, by their codes: exponent and mantissa as the specifications have them."""
    found = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & (1 << mantissa_bits) - 1
        assert exponent < 1 << exponent_bits
        if exponent == 0:
            found.append(math.ldexp(mantissa, 1 - bias - mantissa_bits))
        else:
            found.append(math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits))
    return np.array(found)


TABLES = {"E4M3": numbers_of(4, 3, 7, 127), "E2M1": numbers_of(2, 1, 1, 8)}  # the last code of E4M3 is NaN
FORMATS = {"E4M3": (E4M3, ml_dtypes.float8_e4m3fn), "E2M1": (E2M1, ml_dtypes.float4_e2m1fn)}


def nearest(x: float, table: np.ndarray) -> float:
    """The nearest number; of two that are equally near the one with the even code; the largest beyond it."""
    if math.isnan(x):
        return x
    above = int(np.searchsorted(table, abs(x)))
    if above == len(table):
        return math.copysign(table[-1], x)
    below = max(above - 1, 0)
    first, second = abs(x) - table[below], table[above] - abs(x)
    code = below if first < second or (first == second and below % 2 == 0) else above
    return math.copysign(table[code], x)


def all_nearest(x: np.ndarray, name: str) -> np.ndarray:
    return np.array([nearest(float(v), TABLES[name]) for v in x.reshape(-1)], np.float32).reshape(x.shape)


@pytest.mark.parametrize("name", TABLES)
def test_rounding_is_to_the_nearest_number_and_ties_to_even(name):
    table, rng = TABLES[name], np.random.default_rng(0)
    ties = (table[1:] + table[:-1]) / 2
    beside = [np.nextafter(np.float32(ties), np.float32(side)) for side in (0, np.inf)]
    spread = rng.standard_normal(2000) * 2.0 ** rng.integers(-14, 12, 2000)
    x = np.concatenate([table, ties, *beside, spread, [1e-40, 1e30, np.inf, np.nan]]).astype(np.float32)
    x = np.concatenate([x, -x])
    to, dtype = FORMATS[name]
    found, expected = np.array(jax.jit(block_formats.rounded, static_argnums=1)(x, to)), all_nearest(x, name)
    np.testing.assert_array_equal(found, expected)
    finite = np.abs(x) <= table[-1]
    np.testing.assert_array_equal(expected[finite], x[finite].astype(dtype).astype(np.float32))  # a cross-check
    assert table[-1] == to.largest == float(ml_dtypes.finfo(dtype).max)


def power_of_two_scale(block: np.ndarray) -> float:
    """The least power of two with which the largest magnitude is at most 448."""
    if not np.isfinite(block).all():
        return math.nan
    exponent = LEAST_SCALE
    while float(np.abs(block).max()) > math.ldexp(448, exponent):
        exponent += 1
    return math.ldexp(1, exponent)


def in_powers_of_two(x: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    values, scales = np.zeros_like(x), np.zeros((-(-len(x) // height), -(-x.shape[1] // width)), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        scales[i, j] = power_of_two_scale(x[part])
        values[part] = all_nearest((x[part].astype(np.float64) / scales[i, j]).astype(np.float32), "E4M3")
    return values, scales


def in_nvfp4(x: np.ndarray, height: int, amax: np.float32) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Appendix C of arXiv 2509.25149, in FP32."""
    factor = np.float32(amax * np.float32(1 / 2688))
    values, scales = np.zeros_like(x), np.zeros((len(x) // height, x.shape[1] // 16), np.float32)
    for i, j in np.ndindex(scales.shape):
        part = slice(i * height, (i + 1) * height), slice(16 * j, 16 * j + 16)
        scales[i, j] = nearest(float(np.abs(x[part]).max() * (np.float32(448) / amax)), TABLES["E4M3"])
        if scales[i, j]:
            values[part] = all_nearest(x[part] * (np.float32(1) / (scales[i, j] * factor)), "E2M1")
    return values, scales, factor


SHAPES = {"blockwise": (192, 200), "mxfp8": (6, 96), "nvfp4": (32, 64)}  # those of blockwise do not divide


@pytest.mark.parametrize("tensor", ["input", "weight", "gradient"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_operand_has_the_bits_of_its_format(name, tensor):
    rng = np.random.default_rng(1)
    rows, K = SHAPES[name]
    x = rng.standard_normal((rows, K)) * 2.0 ** rng.integers(-30, 20, (rows, 1)) * 2.0 ** rng.integers(-6, 6, K)
    x = x.astype(jnp.bfloat16).astype(np.float32)
    x[:, :32] *= np.arange(rows)[:, None] % 3 > 0  # some blocks of zeros
    if name == "nvfp4":
        x /= np.float32(2.0**20)  # its scales have the range of E4M3
        amax = np.abs(x).max()
        values, scales, factor = in_nvfp4(x, 16 if tensor == "weight" else 1, amax)
    else:
        amax, factor = None, None
        block = {"blockwise": (128 if tensor == "weight" else 1, 128), "mxfp8": (1, 32)}[name]
        values, scales = in_powers_of_two(x, *block)

    @jax.jit
    def run(x, amax):
        found = IMPLEMENTATIONS[name].quantised(x, tensor, amax, None)
        return found, found.numbers(jnp.bfloat16), *found.stored()

    found, numbers, elements, stored = run(x, amax)
    np.testing.assert_array_equal(found.scales, scales)
    np.testing.assert_array_equal(found.values, values)
    assert (found.factor is None) == (factor is None) and (factor is None or found.factor == factor)
    spread = scales.repeat(-(-rows // len(scales)) if found.block[0] == 1 else found.block[0], 0)[:rows]
    whole = values * spread.repeat(found.block[1], 1)[:, :K]
    np.testing.assert_array_equal(np.asarray(numbers, np.float32), whole)  # BF16 holds them
    assert 0.01 < np.linalg.norm(whole * (factor or 1) - x) / np.linalg.norm(x) < 0.2
    np.testing.assert_array_equal(np.asarray(elements).astype(np.float32), values)
    np.testing.assert_array_equal(np.asarray(stored).astype(np.float32), spread)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_zeros_stay_zeros_and_what_is_not_finite_makes_a_product_nan(name, bad):
    recipe, x = IMPLEMENTATIONS[name], np.zeros((2, 128), np.float32)

    @jax.jit
    def product(x):
        amax = jnp.abs(x).max()
        a, b = (recipe.quantised(a, "input", amax, None) for a in (x, jnp.ones_like(x)))
        return multiply(a, b, jnp.float32, "emulated")

    np.testing.assert_array_equal(product(x), 0)
    x[1, 70] = bad
    found = np.asarray(product(x))
    assert np.isnan(found[1]).all() and (name == "nvfp4" or not found[0].any())


def test_operands_may_be_beyond_the_range_of_fp16_if_their_product_is_not():
    """With precision.compute=float16 an emulated operand of 1e6 is not infinite, nor one of 1e-9 zero."""
    recipe, one = IMPLEMENTATIONS["mxfp8"], np.ones((1, 32), np.float32)

    @jax.jit
    def product(a, b):
        operands = (recipe.quantised(x, "input", jnp.abs(x).max(), None) for x in (a, b))
        return multiply(*operands, jnp.float16, "emulated")

    found = product(1e6 * one, 1e-9 * one)
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(np.float32(found), 32e-3, rtol=0.13)  # each may be half a unit of its 3 bits away


def test_random_rounding_goes_to_the_two_next_numbers_and_its_mean_is_the_number():
    shares = np.arange(2**12, dtype=np.uint32) << 20  # evenly over all bits
    x = np.float32([0.0, 0.1, 0.25, 0.8, 1.5, 1.9, 2.125, 3.3, 4.9, 5.999, 6.0, 7.5, -0.3, -2.75])
    found = jax.jit(jax.vmap(lambda bits: block_formats.rounded(x, E2M1, jnp.full(x.shape, bits))))(shares)
    table = np.concatenate([-TABLES["E2M1"][::-1], TABLES["E2M1"]])
    for values, number in zip(np.asarray(found).T, np.clip(x, -6, 6), strict=True):
        below, above = table[table <= number].max(), table[table >= number].min()
        assert {*values} <= {np.float32(below), np.float32(above)}
        assert abs(values.mean(dtype=np.float64) - number) <= (above - below) / len(shares)


def test_random_bits_depend_on_a_numbers_indices_alone_and_are_even():
    tokens, columns = np.arange(4096, dtype=np.uint32), np.arange(64, dtype=np.uint32)
    seed, run = np.uint32(77), jax.jit(random_bits)
    bits = np.asarray(run(seed, tokens, columns))
    part = run(seed, tokens[1000:1300], columns[16:32])
    np.testing.assert_array_equal(part, bits[1000:1300, 16:32])
    uniform = bits / 2.0**32
    for mean in (uniform.mean(0), uniform.mean(1)):  # of tokens, of columns: a standard deviation is 0.29 / sqrt(count)
        assert np.abs(mean - 0.5).max() < 5 * 0.289 / math.sqrt(uniform.size / len(mean))
    for first, second in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.01
    assert np.mean(np.asarray(run(seed + 1, tokens, columns)) == bits) < 1e-4


def test_the_hadamard_transform_leaves_a_product_as_it_is():
    rng = np.random.default_rng(2)
    a, b = (rng.integers(-8, 9, (5, 64)).astype(np.float32) for _ in range(2))
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])  # Sylvester
    matrix = np.float32(nvfp4.SIGNS)[:, None] * matrix / 4
    found = [np.asarray(jax.jit(nvfp4.hadamard)(x)) for x in (a, b)]
    for x, transformed in zip((a, b), found, strict=True):
        np.testing.assert_array_equal(transformed, (x.reshape(5, 4, 16) @ matrix).reshape(5, 64))
    np.testing.assert_array_equal(found[0] @ found[1].T, a @ b.T)  # all sums are exact
    assert np.abs(found[0] - a).max() > 1
