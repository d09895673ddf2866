import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import layer_norm, rms_norm

EPSILON = 1e-5


def numpy_rms_norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPSILON) * weight


def numpy_layer_norm(x, weight, bias=0.0):
    variance = np.var(x, axis=-1, keepdims=True)
    return (x - np.mean(x, axis=-1, keepdims=True)) / np.sqrt(variance + EPSILON) * weight + bias


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(37, 40), (2, 3, 5, 8)])
def test_rms_norm_value_and_gradients(check_op, rng, shape):
    args = [2.0 * rng.normal(size=shape), 1.0 + 0.3 * rng.normal(size=shape[-1])]
    check_op(lambda x, w: rms_norm(x, w, EPSILON), numpy_rms_norm, args)


@pytest.mark.parametrize("shape", [(37, 40), (2, 3, 5, 8)])
def test_layer_norm_value_and_gradients(check_op, rng, shape):
    args = [
        0.5 + 2.0 * rng.normal(size=shape),
        1.0 + 0.3 * rng.normal(size=shape[-1]),
        rng.normal(size=shape[-1]),
    ]
    check_op(lambda x, w, b: layer_norm(x, w, b, EPSILON), numpy_layer_norm, args)


def test_layer_norm_without_bias(check_op, rng):
    args = [rng.normal(size=(7, 24)), 1.0 + 0.3 * rng.normal(size=24)]
    check_op(lambda x, w: layer_norm(x, w, None, EPSILON), numpy_layer_norm, args)


def test_layer_norm_survives_a_mean_large_beside_the_spread(error, rng):
    x = (1000.0 + rng.normal(size=(5, 64))).astype(np.float32)
    found = jax.jit(lambda x, w: layer_norm(x, w, None, EPSILON))(x, np.ones(64, np.float32))
    assert error(found, numpy_layer_norm(x.astype(np.float64), np.ones(64))) < 1e-4


def test_weights_multiply_before_the_result_is_rounded(rng):
    x = np.asarray(rng.normal(size=(11, 40)), jnp.bfloat16)
    weight = np.asarray(1.0 + 0.1 * rng.normal(size=40), np.float32)
    exact = numpy_rms_norm(np.asarray(x, np.float64), np.asarray(weight, np.float64))
    # One rounding to bfloat16 is off by at most half a unit of its 8 significant bits.
    found = np.asarray(jax.jit(lambda x, w: rms_norm(x, w, EPSILON))(x, weight), np.float64)
    assert np.all(np.abs(found - exact) <= 2.0**-8 * 1.001 * np.abs(exact))


def test_the_backward_pass_keeps_only_the_inputs(kept_for_backward):
    x, weight = np.ones((16, 40), jnp.bfloat16), np.ones(40, np.float32)
    inputs = [((16, 40), "bfloat16"), ((40,), "float32")]
    assert kept_for_backward(lambda x, w: rms_norm(x, w, EPSILON), x, weight) == inputs
    layer = kept_for_backward(lambda x, w, b: layer_norm(x, w, b, EPSILON), x, weight, weight)
    assert layer == [*inputs, ((40,), "float32")]


def test_zero_centred_weights_multiply_by_one_more(check_op, rng):
    x, weight, bias = rng.normal(size=(7, 24)), 0.3 * rng.normal(size=24), rng.normal(size=24)
    check_op(lambda x, w: rms_norm(x, w, EPSILON, True), lambda x, w: numpy_rms_norm(x, 1 + w), [x, weight])
    check_op(
        lambda x, w, b: layer_norm(x, w, b, EPSILON, True),
        lambda x, w, b: numpy_layer_norm(x, 1 + w, b),
        [x, weight, bias],
    )
