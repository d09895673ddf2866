"""FP8 linear layers against NumPy: the same quantisation, then exact products in float64."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight, scale_for
from megajax.parallel.tensor.linear import (
    TensorParallel,
    column_activation_row,
    column_linear,
    replicated_linear,
    row_linear,
)
from megajax.parallel.tensor.ring import TensorRing

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
ONE_DEVICE = TensorParallel(TensorRing(1, False), fp8.kernels("reference"), "reference", lambda amax: amax, False)
LAYERS = {"column": column_linear, "row": row_linear, "own": replicated_linear}
T, D, F = 64, 48, 80  # three different sizes: a wrong transposition does not fit or shows
# Nothing but FP32 sums stand between the layers and the reference. In the MLP a product's last bit can move a value
# across the boundary between two FP8 numbers: one such value of 3000 is up to 1e-3.
LINEAR_TOLERANCE, MLP_TOLERANCE = 2e-6, 2e-3


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def largest(dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)


def current_scale(x: np.ndarray, dtype) -> np.float32:
    return np.float32(largest(dtype)) / np.float32(np.abs(x).max())


def rounded(x: np.ndarray, scale, dtype) -> np.ndarray:
    """The FP8 numbers for x; values that are too large become the largest."""
    return np.clip(np.float32(x) * np.float32(scale), -largest(dtype), largest(dtype)).astype(dtype)


def dequantised(x: np.ndarray, scale, dtype) -> np.ndarray:
    """What is left of x after a round trip through FP8, in float64; without a scale, by its own largest magnitude."""
    scale = current_scale(x, dtype) if scale is None else scale
    return rounded(x, scale, dtype).astype(np.float64) / np.float64(np.float32(scale))


def quantised_weight(w: np.ndarray, input_scale, gradient_scale, gradient_dtype, compute=jnp.float32) -> Fp8Weight:
    """The weight for the layers, made without them."""
    scale = current_scale(w, E4M3)
    values = rounded(w, scale, E4M3)
    given = [None if s is None else np.float32(s) for s in (input_scale, gradient_scale)]
    zeros = np.zeros(w.shape, compute), np.zeros(2, np.float32)
    return Fp8Weight(values, values.T, np.float32(1 / scale), *given, *zeros, jnp.dtype(gradient_dtype))


def value_and_pullback(function, *args):
    """A function's value and a function from the value's gradient to the arguments', both compiled."""
    both = jax.jit(lambda dy, *args: (function(*args), jax.vjp(function, *args)[1](dy)))
    return lambda dy: both(dy, *args)


def relative_error(found, expected) -> float:
    found = np.asarray(found, np.float64)
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


# The format of gradients, and the factors between the input's and the gradient's own scales and those that are given;
# none are given with current scaling.
CASES = {
    "current": (E5M2, None),
    "current, e4m3": (E4M3, None),
    "delayed": (E5M2, (0.3, 0.7)),
    "delayed, the input saturates": (E5M2, (3.0, 0.7)),
    "delayed, the gradient saturates, e4m3": (E4M3, (0.3, 5.0)),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_linear_layer_and_its_gradients(rng, kind, case):
    gradient_dtype, factors = CASES[case]
    x, dy, w = (np.float32(rng.normal(size=shape)) for shape in ((T, D), (T, F), (D, F)))
    x, dy, w = 3 * x, 1e-4 * dy, 0.02 * w
    own = current_scale(x, E4M3), current_scale(dy, gradient_dtype)
    given = (None, None) if factors is None else tuple(s * np.float32(f) for s, f in zip(own, factors, strict=True))
    weight = quantised_weight(w, *given, gradient_dtype)
    y, (dx, dw) = value_and_pullback(lambda x, w: LAYERS[kind](ONE_DEVICE, x, w), x, weight)(dy)

    qx, qw = dequantised(x, given[0], E4M3), dequantised(w, None, E4M3)
    qdy = dequantised(dy, given[1], gradient_dtype)
    assert relative_error(y, qx @ qw) < LINEAR_TOLERANCE
    assert relative_error(dx, qdy @ qw.T) < LINEAR_TOLERANCE
    assert relative_error(dw.gradient, qx.T @ qdy) < LINEAR_TOLERANCE
    np.testing.assert_array_equal(dw.amax, [np.abs(x).max(), np.abs(dy).max()])  # not of what saturated
    # That the quantisation, the format and the saturation are there to be seen:
    other = E4M3 if gradient_dtype == E5M2 else E5M2
    assert min(relative_error(qx, np.float64(x)), relative_error(qdy, np.float64(dy))) > 1e-2
    assert relative_error(dequantised(dy, None, other) @ qw.T, qdy @ qw.T) > 1e-2
    for name, scale, tensor, dtype in (("input", given[0], x, E4M3), ("gradient", given[1], dy, gradient_dtype)):
        saturated = scale is not None and np.abs(tensor).max() * scale > largest(dtype)
        assert saturated == (f"the {name} saturates" in case)


@pytest.mark.parametrize("layer", [column_linear, row_linear])
def test_the_largest_magnitudes_are_those_of_all_pieces_that_a_ring_sends(rng, monkeypatch, layer):
    """On two devices, of own tokens or of all: delayed scaling keeps it, wherever among the tokens it is."""
    monkeypatch.setattr(TensorRing, "overlap_width", 1)
    tp = TensorParallel(TensorRing(2, False), fp8.kernels("reference"), "reference", lambda amax: amax, False)
    weight = quantised_weight(np.float32(rng.normal(size=(D, D))), 1.0, 1.0, E5M2)
    own, of_both = (np.float32(rng.normal(size=(2, tokens, D))) for tokens in (T // 2, T))
    order = slice(None, None, 1 if layer is column_linear else -1)  # (input, output gradient)

    @jax.jit
    @partial(jax.vmap, axis_name="tensor")
    def amax(x, dy):
        return jax.vjp(lambda x, w: layer(tp, x, w), x, weight)[1](dy)[1].amax

    for token in (5, T // 2 + 5):
        of_both[:, token] *= 9 + token
        largest = [np.abs(tokens).max((1, 2)) for tokens in (own, of_both)[order]]
        np.testing.assert_array_equal(amax(*(own, of_both)[order]), np.stack(largest, axis=1))


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def swiglu(ups):
    gate, up = np.split(ups, 2, axis=-1)
    return gate * sigmoid(gate) * up


def swiglu_gradient(ups, dacts):
    gate, up = np.split(ups, 2, axis=-1)
    slope = sigmoid(gate) * (1.0 + gate * (1.0 - sigmoid(gate)))
    return np.concatenate([dacts * up * slope, dacts * gate * sigmoid(gate)], axis=-1)


def relu2(ups):
    return np.maximum(ups, 0.0) ** 2


def relu2_gradient(ups, dacts):
    return 2.0 * np.maximum(ups, 0.0) * dacts


ACTIVATIONS = {"swiglu": (swiglu, swiglu_gradient, 2 * F), "relu2": (relu2, relu2_gradient, F)}


def reference_mlp(kind, x, w_up, w_down, dy, scales, gradient_dtype, to_compute=np.float64):
    """Both layers in float64; `to_compute` rounds what is a matmul's result in the layers' own dtype.

    `scales` are those of the input, the activation, its gradient and the output's gradient, None with current scaling.
    """
    activation, gradient, _ = ACTIVATIONS[kind]
    q_up, q_down = dequantised(w_up, None, E4M3), dequantised(w_down, None, E4M3)
    qx = dequantised(x, scales[0], E4M3)
    ups = to_compute(qx @ q_up)
    acts = activation(ups)
    q_acts = dequantised(acts, scales[1], E4M3)
    qdy = dequantised(dy, scales[3], gradient_dtype)
    dups = gradient(ups, to_compute(qdy @ q_down.T))
    qdups = dequantised(dups, scales[2], gradient_dtype)
    return SimpleNamespace(
        y=q_acts @ q_down,
        dx=qdups @ q_up.T,
        dw_up=qx.T @ qdups,
        dw_down=q_acts.T @ qdy,
        amax_up=[np.abs(x).max(), np.abs(dups).max()],
        amax_down=[np.abs(acts).max(), np.abs(dy).max()],
    )


def assert_agrees(found, expected, tolerance):
    y, (dx, d_up, d_down) = found
    errors = {
        "y": relative_error(y, expected.y),
        "dx": relative_error(dx, expected.dx),
        "dw_up": relative_error(d_up.gradient, expected.dw_up),
        "dw_down": relative_error(d_down.gradient, expected.dw_down),
    }
    assert max(errors.values()) < tolerance, errors


# The format of gradients, and the given scales in `reference_mlp`'s order.
MLP_CASES = [
    ("swiglu", E5M2, None),
    ("swiglu", E4M3, (60.0, 600.0, 1e5, 1e9)),
    ("relu2", E4M3, None),
    ("relu2", E5M2, (60.0, 20.0, 1e5, 1e6)),
]


@pytest.mark.parametrize(("kind", "gradient_dtype", "given"), MLP_CASES)
def test_an_mlp_and_its_gradients(rng, kind, gradient_dtype, given):
    """The largest scales saturate the activation and the output gradient."""
    x, w_up, w_down, dy = mlp_arguments(rng, kind)
    scales = given or (None,) * 4
    up = quantised_weight(w_up, scales[0], scales[2], gradient_dtype)
    down = quantised_weight(w_down, scales[1], scales[3], gradient_dtype)
    found = value_and_pullback(partial(mlp, kind), x, up, down)(dy)
    expected = reference_mlp(kind, x, w_up, w_down, dy, scales, gradient_dtype)
    assert_agrees(found, expected, MLP_TOLERANCE)
    np.testing.assert_allclose(found[1][1].amax, expected.amax_up, rtol=1e-5)
    np.testing.assert_allclose(found[1][2].amax, expected.amax_down, rtol=1e-5)


def mlp(kind, x, up, down):
    return column_activation_row(ONE_DEVICE, kind, x, up, None, down)


def mlp_arguments(rng, kind):
    width = ACTIVATIONS[kind][2]
    shapes = (T, D), (D, width), (F, D), (T, D)
    sizes = 2.0, 0.3, 0.2, 1e-4
    return [np.float32(size * rng.normal(size=shape)) for size, shape in zip(sizes, shapes, strict=True)]


def test_a_gated_activation_is_not_rounded_to_bfloat16_before_it_is_quantised(rng):
    """In BF16 only the products are rounded; with scales that are powers of two nothing else is."""

    def bfloat16(values):
        return np.float32(values).astype(ml_dtypes.bfloat16).astype(np.float64)

    x, w_up, w_down, dy = mlp_arguments(rng, "swiglu")
    # Each weight's largest magnitude is 448 / 2^n, so its own scale is 2^n.
    w_up[0, 0], w_down[0, 0] = 448 / 2**8, 448 / 2**9
    x, dy = (a.astype(ml_dtypes.bfloat16) for a in (x, dy))
    scales = 2.0**6, 2.0**3, 2.0**20, 2.0**24
    up = quantised_weight(w_up, scales[0], scales[2], E5M2, jnp.bfloat16)
    down = quantised_weight(w_down, scales[1], scales[3], E5M2, jnp.bfloat16)
    found = value_and_pullback(partial(mlp, "swiglu"), x, up, down)(dy)
    arguments = "swiglu", x.astype(np.float32), w_up, w_down, dy.astype(np.float32), scales, E5M2
    expected = reference_mlp(*arguments, to_compute=bfloat16)
    assert_agrees(found, expected, 4e-3)
    np.testing.assert_allclose(found[1][1].amax, expected.amax_up, rtol=1e-5)
    np.testing.assert_allclose(found[1][2].amax, expected.amax_down, rtol=1e-5)
    # With a rounding in between, the largest magnitudes would be those of BF16 numbers.
    for amax in (expected.amax_down[0], expected.amax_up[1]):
        assert abs(bfloat16(amax) / amax - 1) > 1e-4


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_scale_takes_the_largest_magnitude_to_the_largest_fp8_number(dtype):
    amax = np.float32([3.0, 0.7, 2.0**-100])
    scale = jax.jit(lambda amax, margin: scale_for(amax, jnp.dtype(dtype), margin), static_argnums=1)
    for margin in (0, 2):
        expected = largest(dtype) / 2**margin / amax.astype(np.float64)
        np.testing.assert_allclose(scale(amax, margin), expected, rtol=1e-6)
    # Nothing to scale by: no values yet, and a scale that would not be finite. Values that are not finite show.
    nothing = np.float32([0.0, 1e-38, np.nan, np.inf])
    np.testing.assert_array_equal(scale(nothing, 0), [1.0, 1.0, np.nan, np.nan])
