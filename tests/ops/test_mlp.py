import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import activate
from megajax.ops.mlp_activation import FUNCTIONS, Gated, activate_weighted, register_activation
from megajax.options.activations import ACTIVATIONS


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def tanh_gelu(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


def clamped(x):
    gate, up = np.minimum(x[..., :37], 7.0), np.clip(x[..., 37:], -7.0, 7.0)
    return gate * sigmoid(1.702 * gate) * (up + 1.0)


REFERENCES = {
    "swiglu": lambda x: x[..., :37] * sigmoid(x[..., :37]) * x[..., 37:],
    "geglu": lambda x: tanh_gelu(x[..., :37]) * x[..., 37:],
    "geglu_exact": lambda x: REFERENCES["gelu_exact"](x[..., :37]) * x[..., 37:],
    "clamped_swiglu": clamped,
    "gelu": tanh_gelu,
    "quick_gelu": lambda x: x / (1.0 + np.exp(-1.702 * x)),
    "gelu_exact": lambda x: 0.5 * x * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2.0))),
    "relu": lambda up: np.maximum(up, 0.0),
    "relu2": lambda up: np.maximum(up, 0.0) ** 2,
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", REFERENCES)
def test_activation_value_and_gradients(check_op, rng, kind):
    width = 74 if ACTIVATIONS[kind].is_gated else 37  # the gate in the first half
    spread = 6.0 if kind == "clamped_swiglu" else 2.0
    check_op(lambda x: activate(kind, x), REFERENCES[kind], [spread * rng.normal(size=(2, 3, width))])


def test_a_registered_activation_is_computed_without_kernels(check_op, rng):
    """Also where built-in ones have kernels, which no CPU runs: for experts on GPUs."""
    register_activation("reglu", Gated(jax.nn.relu))
    try:
        arguments, sizes = [rng.normal(size=(6, 2 * 128)), rng.uniform(1, 2, 6)], jnp.asarray([4, 2])
        run = partial(activate_weighted, "reglu", group_sizes=sizes, implementation="pallas")
        expected = lambda x, w: np.maximum(x[:, :128], 0.0) * x[:, 128:] * w[:, None]  # noqa: E731
        check_op(run, expected, arguments)
    finally:
        del ACTIVATIONS["reglu"], FUNCTIONS["reglu"]


def test_an_unknown_activation_is_refused():
    with pytest.raises(
        ValueError, match='"tanh" is not an activation: use one of swiglu, .*, gelu_exact, quick_gelu, relu, relu2'
    ):
        activate("tanh", np.ones((2, 4)))


def test_the_backward_pass_keeps_only_the_inputs(kept_for_backward):
    x = np.ones((16, 40), jnp.bfloat16)
    assert kept_for_backward(lambda x: activate("swiglu", x), x) == [((16, 40), "bfloat16")]


def test_activations_pass_through_scan_and_remat(rng):
    x = np.asarray(rng.normal(size=(3, 8)), jnp.float32)

    def plain(x):
        for _ in range(3):
            x = activate("swiglu", jnp.concatenate([x, x], axis=-1))
        return x.sum()

    def looped(x):
        body = jax.checkpoint(lambda x, _: (activate("swiglu", jnp.concatenate([x, x], axis=-1)), None))
        return jax.lax.scan(body, x, length=3)[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(looped))(x), jax.jit(jax.grad(plain))(x), rtol=1e-5)
