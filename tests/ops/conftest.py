"""What every op is held to: a float64 NumPy reference, its central differences, and three dtypes."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

VALUE_TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "bfloat16": 1e-2}
GRADIENT_TOLERANCE = {"float64": 1e-8, "float32": 1e-5, "bfloat16": 2e-2}


def relative_error(found, expected) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def directional_derivatives(function, args, index, directions, step=1e-5):
    """Central differences of a float64 scalar function along directions of one argument."""

    def moved(direction, by):
        return function(*args[:index], args[index] + by * direction, *args[index + 1 :])

    return np.array([(moved(d, step) - moved(d, -step)) / (2 * step) for d in directions])


@pytest.fixture
def error() -> Callable[..., float]:
    """‖found - expected‖ / ‖expected‖ in float64."""
    return relative_error


@pytest.fixture
def x64():
    """Runs the test with 64-bit types."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20)


@pytest.fixture
def check_op(rng):
    """Holds op to a NumPy reference: jitted value and gradients in float64; vmap; float32 and bfloat16."""

    def check(op: Callable, reference: Callable, args: Sequence[np.ndarray], thorough: bool = True) -> None:
        args = [np.asarray(a, np.float64) for a in args]
        cotangent = rng.normal(size=reference(*args).shape)
        run = compiled(op, len(args))
        check_float64(run, reference, args, cotangent, rng)
        if thorough:
            check_vmap(op, reference, args)
            for name in ("float32", "bfloat16"):
                check_dtype(run, reference, args, cotangent, jnp.dtype(name))

    return check


def compiled(op, count):
    """(cotangent, *args) -> op's value and the gradients of sum(cotangent · op) in every argument."""

    def scalar(cotangent, *args):
        out = op(*args)
        return jnp.sum(out.astype(jnp.promote_types(out.dtype, jnp.float32)) * cotangent), out

    with_value = jax.value_and_grad(scalar, tuple(range(1, count + 1)), has_aux=True)

    def run(cotangent, *args):
        (_, value), gradients = with_value(cotangent, *args)
        return value, gradients

    return jax.jit(run)


def check_float64(run, reference, args, cotangent, rng):
    with jax.enable_x64(True):
        value, gradients = run(cotangent, *args)
    assert value.dtype == jnp.float64
    assert relative_error(value, reference(*args)) < VALUE_TOLERANCE["float64"]
    for index, gradient in enumerate(gradients):
        assert np.all(np.isfinite(gradient))
        directions = rng.normal(size=(3, *args[index].shape))
        found = np.array([np.vdot(gradient, d) for d in directions])
        wanted = directional_derivatives(lambda *a: float(np.vdot(reference(*a), cotangent)), args, index, directions)
        assert relative_error(found, wanted) < GRADIENT_TOLERANCE["float64"], f"argument {index}"


def check_vmap(op, reference, args):
    with jax.enable_x64(True):
        mapped = jax.jit(jax.vmap(op))(*(np.stack([a, 0.5 * a]) for a in args))
    expected = np.stack([reference(*args), reference(*(0.5 * a for a in args))])
    assert relative_error(mapped, expected) < VALUE_TOLERANCE["float64"]


def check_dtype(run, reference, args, cotangent, dtype):
    """Against float64 on the rounded arguments, whose gradients check_float64 has proven."""
    low = [a.astype(np.float32).astype(dtype) for a in args]
    rounded = [a.astype(np.float64) for a in low]
    cotangent = cotangent.astype(np.float32).astype(dtype).astype(np.float64)
    value, gradients = run(cotangent.astype(np.float32), *low)
    with jax.enable_x64(True):
        _, wanted = run(cotangent, *rounded)
    assert value.dtype == dtype
    assert relative_error(value, reference(*rounded)) < VALUE_TOLERANCE[dtype.name]
    for index, (found, expected) in enumerate(zip(gradients, wanted, strict=True)):
        assert found.dtype == dtype
        assert relative_error(found, expected) < GRADIENT_TOLERANCE[dtype.name], f"argument {index}"


@pytest.fixture
def kept_for_backward() -> Callable[..., list]:
    """The arrays that op keeps from its forward pass, as (shape, dtype name)."""

    def kept(op: Callable, *args: np.ndarray) -> list:
        kept = jax.eval_shape(lambda *args: jax.tree.leaves(jax.vjp(op, *args)[1]), *args)
        return [(leaf.shape, leaf.dtype.name) for leaf in kept]

    return kept
