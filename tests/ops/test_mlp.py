import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import activate, gated


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def tanh_gelu(x):
    return 0.5 * x * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (x + 0.044715 * x**3)))


REFERENCES = {
    "swiglu": lambda up, gate: gate * sigmoid(gate) * up,
    "geglu": lambda up, gate: tanh_gelu(gate) * up,
    "gelu": tanh_gelu,
    "relu2": lambda up: np.maximum(up, 0.0) ** 2,
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", REFERENCES)
def test_activation_value_and_gradients(check_op, rng, kind):
    count = 2 if kind.endswith("glu") else 1
    args = [2.0 * rng.normal(size=(5, 37)) for _ in range(count)]
    check_op(lambda *a: activate(kind, *a), REFERENCES[kind], args)


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_gated_takes_the_gate_first(rng, kind):
    gate, up = (jnp.asarray(rng.normal(size=(3, 8)), jnp.float32) for _ in range(2))
    np.testing.assert_array_equal(gated(kind)(gate, up), activate(kind, up, gate))
    np.testing.assert_allclose(gated(kind)(gate, up), REFERENCES[kind](up, gate), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", [lambda x: activate("swiglu", x), lambda x: activate("gelu", x, x)])
def test_a_gate_too_few_or_too_many_is_refused(call):
    with pytest.raises(ValueError, match="use one of"):
        call(jnp.ones((2, 4)))


def test_the_backward_pass_keeps_only_the_inputs(kept_for_backward):
    x = jnp.ones((16, 40), jnp.bfloat16)
    kept = kept_for_backward(lambda up, gate: activate("swiglu", up, gate), x, x)
    assert kept == 2 * [((16, 40), "bfloat16")]


def test_activations_pass_through_scan_and_remat(rng):
    x = jnp.asarray(rng.normal(size=(3, 8)), jnp.float32)

    def plain(x):
        for _ in range(3):
            x = activate("swiglu", x, x)
        return x.sum()

    def looped(x):
        body = jax.checkpoint(lambda x, _: (activate("swiglu", x, x), None))
        return jax.lax.scan(body, x, length=3)[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(looped))(x), jax.grad(plain)(x), rtol=1e-5)
