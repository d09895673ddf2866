"""The kernel of the gated MLP's backward pass, interpreted, against the plain functions in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops import activate
from megajax.ops import expert_activation_kernel as expert_kernel
from megajax.ops.mlp_activation import activate_and_gradient
from megajax.ops.mlp_kernel import activate_and_gradient as kernel


@partial(jax.jit, static_argnums=0)
def plain(kind, x, dy):
    act, pull = jax.vjp(lambda x: activate(kind, x), x)
    return act, pull(dy)[0]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("swiglu", (8, 64)), ("geglu", (10, 48)), ("geglu_exact", (4, 1090)), ("clamped_swiglu", (10, 48))],
    ids=["whole blocks", "edges", "a cut last block", "clamped"],
)
def test_the_kernel_has_the_activation_and_its_gradient(rng, error, kind, shape):
    spread = 6.0 if kind == "clamped_swiglu" else 1.0
    x, dy = spread * rng.normal(size=(shape[0], 2 * shape[1])), rng.normal(size=shape)
    x = np.float64(np.asarray(x, jnp.bfloat16))  # rounding must not move it over the clamp
    with jax.enable_x64(True):
        expected_act, expected = plain(kind, x, dy)
    run = jax.jit(partial(kernel, kind, interpret=True))
    gradient, act = run(np.asarray(x, jnp.float32), np.asarray(dy, jnp.float32))
    assert error(act, expected_act) < 1e-6 and error(gradient, expected) < 1e-6
    if kind != "geglu":  # the conversion to BF16 is the same for all
        return
    gradient, act = run(np.asarray(x, jnp.bfloat16), np.asarray(dy, jnp.bfloat16))
    assert act.dtype == gradient.dtype == jnp.bfloat16
    assert error(act, expected_act) < 1e-2 and error(gradient, expected) < 1e-2


@pytest.mark.parametrize("kind", ["swiglu", "gelu", "relu2"])
def test_the_plain_form_is_the_activation_and_its_vjp(rng, kind):
    x = np.asarray(rng.normal(size=(4, 12)), jnp.float32)
    dy = np.asarray(rng.normal(size=jax.eval_shape(partial(activate, kind), x).shape), jnp.float32)
    found = jax.jit(lambda x, dy: activate_and_gradient(kind, x, dy, "reference"))(x, dy)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, plain(kind, x, dy))


def with_gradients(x, of_rows, weights, dy):
    act, pull = jax.vjp(lambda x, weights: activate("swiglu", x + of_rows) * weights[:, None], x, weights)
    return act, *pull(dy)


def by_kernels(x, weights, dy, *of_groups):
    act = expert_kernel.activate("swiglu", x, weights, *of_groups, interpret=True)
    return act, *expert_kernel.activate_and_gradient("swiglu", x, weights, dy, *of_groups, interpret=True)


with_gradients, by_kernels = jax.jit(with_gradients), jax.jit(by_kernels)  # compiled once for all sizes


@pytest.mark.parametrize(("has_bias", "width"), [(False, 48), (True, 1090)])
@pytest.mark.parametrize("sizes", [(0, 0, 0), (2, 0, 3), (6, 4, 0)])
def test_the_kernels_of_experts_have_the_rows_that_hold_something(rng, error, width, sizes, has_bias):
    x, dy = rng.normal(size=(10, 2 * width)), rng.normal(size=(10, width))
    weights, bias, rows = rng.random(10), rng.normal(size=(3, 2 * width)), sum(sizes)
    of_rows = np.repeat(bias, (*sizes[:2], 10 - sum(sizes[:2])), axis=0) * has_bias
    with jax.enable_x64(True):
        expected, dx, dweights = with_gradients(x, of_rows, weights, dy)
    held = np.arange(10) < rows
    x32, weights32, dy32, bias32 = (a.astype(np.float32) for a in (x, weights, dy, bias))
    # What no row was written to is not a number, and must not matter.
    garbage = np.where(held[:, None], x32, np.float32(np.nan))
    of_groups = np.asarray(sizes), bias32 if has_bias else None
    found = by_kernels(garbage, weights32, dy32, *of_groups)
    for one, other in zip(found, (expected, expected, dx, dweights), strict=True):
        other = np.where(held.reshape(-1, *(1,) * (other.ndim - 1)), other, 0)
        assert error(one, other) < 1e-6 if rows else not np.any(one)
