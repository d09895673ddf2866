"""Muon against plain NumPy, on meshes; scripts/muon_table.py has all meshes and more steps."""

import jax.numpy as jnp
import numpy as np
import pytest
from muon import muon_cases

from megajax.config.optimizer_schema import MuonConfig
from megajax.optim.muon import newton_schulz

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


def test_the_singular_values_of_an_update_are_near_one():
    random, values = np.random.default_rng(0), np.logspace(-2, 0, 8)
    u, v = (np.linalg.qr(random.standard_normal((size, 8)))[0] for size in (8, 20))
    x = jnp.array((u * values) @ v.T, jnp.float32)[None]
    for settings, tolerance in (({}, 0.35), ({"coefficients": "polar_express", "steps": 8}, 1e-3)):
        found = np.linalg.svd(newton_schulz(x, MuonConfig(**settings))[0], compute_uv=False)
        np.testing.assert_allclose(found, 1, atol=tolerance)
    own = MuonConfig(coefficients=((1.5, -0.5, 0.0),), steps=20)  # cubic Newton–Schulz, whose limit is exact
    np.testing.assert_allclose(newton_schulz(x, own)[0], u @ v.T, atol=1e-3)


def test_a_matrix_of_zeros_stays_zero():
    assert not newton_schulz(jnp.zeros((2, 4, 6), jnp.bfloat16), MuonConfig()).any()
