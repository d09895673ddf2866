"""The kernel of the gated MLP's backward pass, interpreted, against the plain functions in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import activate
from megajax.ops.mlp import activate_and_gradient
from megajax.ops.mlp_kernel import activate_and_gradient as kernel


def plain(kind, x, dy):
    act, pull = jax.vjp(lambda x: activate(kind, x), x)
    return act, pull(dy)[0]


@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
@pytest.mark.parametrize("shape", [(8, 64), (10, 48)], ids=["whole blocks", "edges"])
def test_the_kernel_has_the_activation_and_its_gradient(rng, error, kind, shape):
    x, dy = rng.normal(size=(shape[0], 2 * shape[1])), rng.normal(size=shape)
    with jax.enable_x64(True):
        expected_act, expected = plain(kind, jnp.asarray(x), jnp.asarray(dy))
    gradient, act = kernel(kind, jnp.asarray(x, jnp.float32), jnp.asarray(dy, jnp.float32), interpret=True)
    assert error(act, expected_act) < 1e-6 and error(gradient, expected) < 1e-6
    gradient, act = kernel(kind, jnp.asarray(x, jnp.bfloat16), jnp.asarray(dy, jnp.bfloat16), interpret=True)
    assert act.dtype == gradient.dtype == jnp.bfloat16
    assert error(act, expected_act) < 1e-2 and error(gradient, expected) < 1e-2


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu2"])
def test_the_plain_form_is_the_activation_and_its_vjp(rng, kind):
    x = jnp.asarray(rng.normal(size=(4, 12)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=activate(kind, x).shape), jnp.float32)
    found = jax.jit(lambda x, dy: activate_and_gradient(kind, x, dy, "reference"))(x, dy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, plain(kind, x, dy))
