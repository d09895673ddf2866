"""Muon against plain NumPy, on meshes; scripts/muon_table.py has all meshes and more steps."""

import jax.numpy as jnp
import numpy as np
import pytest
from muon import muon_cases, orthogonal

from megajax.ops.newton_schulz import coefficients, newton_schulz, operations, parts

STEPS = 3
# Rows of the table: KV heads on several devices, padded storage, uneven stages in rounds, experts over other axes,
# latent attention with stages that share a prediction module.
MESHES = [
    ("llama", {"tensor": 8}),
    ("llama", {"data": 3, "tensor": 2}),
    ("five layers", {"pipeline": 2, "context": 2}),
    ("mixtral", {"fsdp": 4, "tensor": 2, "experts_over": ["fsdp", "tensor"]}),
    ("latent", {"pipeline": 2, "tensor": 2}),
]


@pytest.mark.parametrize("model, mesh", MESHES, ids=str)
def test_a_mesh_updates_weights_as_numpy_does(model, mesh):
    *_, case = [case for case in muon_cases() if case.model == model and mesh.items() <= case.mesh.items()]
    assert case.difference(STEPS) < 1e-5


@pytest.mark.parametrize("named", ["quintic", "polar_express"])
@pytest.mark.parametrize(("columns", "several"), [(224, True), (64, False)])
def test_newton_schulz_is_numpys_in_parts_of_one_or_several_steps(named, columns, several):
    """In FP32. In BF16, also with small singular values, its error is like NumPy's, no singular value is too large."""
    random, steps = np.random.default_rng(0), coefficients(named, 5)
    assert (len(parts(steps, 64, columns)) < 5) == several
    left, _ = np.linalg.qr(random.standard_normal((64, 64)))
    right, _ = np.linalg.qr(random.standard_normal((columns, 64)))
    i = 1 + np.arange(64)
    values = 1 / i, 1 / i**2, np.exp(-i / 5)
    x = np.stack([random.standard_normal((64, columns)), *((left * own) @ right.T for own in values)])
    expected = np.stack([orthogonal(matrix, named) for matrix in x])
    found = newton_schulz(jnp.asarray(x, jnp.float32), steps)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    found = newton_schulz(jnp.asarray(x, jnp.bfloat16), steps).astype(jnp.float32)
    for matrix, own, exact in zip(x, found, expected, strict=True):
        rounded = orthogonal_in_bf16(matrix, steps)
        assert np.linalg.norm(own - exact) < 3 * np.linalg.norm(rounded - exact) < np.linalg.norm(exact)
        assert np.linalg.norm(own, 2) < 1.02 * np.linalg.norm(exact, 2)


def orthogonal_in_bf16(x, steps):
    """The published program, with every result rounded to BF16."""

    def rounded(array):
        return np.asarray(jnp.asarray(array, jnp.bfloat16), np.float64)

    x = rounded(x / np.linalg.norm(x))
    for a, b, c in steps:
        gram = rounded(x @ x.T)
        x = rounded(a * x + rounded(rounded(b * gram + c * rounded(gram @ gram)) @ x))
    return x


def test_operations_count_every_product():
    """Of one matrix and one part of three steps, by hand: XXᵀ; three squares; P₁P₀, P₂P₁P₀ and two PGP; the last XP."""
    steps, R, C = coefficients("quintic", 5), 4, 14
    whole, square = 2 * R * R * C, 2 * R**3
    assert [len(part) for part in parts(steps, R, C)] == [3, 2]
    first, second = whole + 3 * square + 2 * square + 4 * square + whole, whole + 2 * square + 3 * square + whole
    assert operations(steps, R, C) == first + second
    assert operations(steps, R, R) == 5 * (2 * 2 * R**3 + square)


def test_the_singular_values_of_an_update_are_near_one():
    random, values = np.random.default_rng(0), np.logspace(-2, 0, 8)
    u, v = (np.linalg.qr(random.standard_normal((size, 8)))[0] for size in (8, 20))
    x = jnp.array((u * values) @ v.T, jnp.float32)[None]
    for settings, tolerance in ((("quintic", 5), 0.35), (("polar_express", 8), 1e-3)):
        found = np.linalg.svd(newton_schulz(x, coefficients(*settings))[0], compute_uv=False)
        np.testing.assert_allclose(found, 1, atol=tolerance)
    own = coefficients([(1.5, -0.5, 0.0)], 20)  # cubic Newton–Schulz, whose limit is exact
    np.testing.assert_allclose(newton_schulz(x, own)[0], u @ v.T, atol=1e-3)


def test_a_matrix_of_zeros_stays_zero():
    assert not newton_schulz(jnp.zeros((2, 4, 20), jnp.bfloat16), coefficients("quintic", 5)).any()
