"""SOAP against plain NumPy on meshes, with slots on the host and in other forms, and resumed on another mesh."""

import math

import jax
import numpy as np
import pytest
import soap
from muon import MUON_MODELS, random_gradients, run_optimizer
from single_device import make_config, weights_of

from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.training.step import TrainProgram

RATE, STEPS, LARGEST = 1e-2, 6, 48
SETTINGS = {"beta1": 0.9, "beta2": 0.95, "frequency": 2, "largest": LARGEST}  # bases are refreshed in steps 3 and 5
STAGED = {"batch": {"num_microbatches": 4}}
CASES = [
    ("llama", {}, {}),
    ("llama", {"fsdp": 2, "tensor": 2}, {}),
    ("llama", {"data": 3, "tensor": 2}, {"batch": {"global_size": 42}}),  # padded storage, and copies
    ("five layers", {"pipeline": 2, "fsdp": 2}, STAGED | {"pipeline": {"layout": (2, 3)}}),  # an empty slot
    ("mixtral", {"fsdp": 4, "tensor": 2, "experts_over": ["fsdp", "tensor"]}, {}),
]


def make_program(model: str, mesh, sections, **optimizer) -> TrainProgram:
    """The program on the first virtual devices."""
    own = {"kind": "soap", "soap": {"precondition_frequency": 2, "max_dimension": LARGEST}, "clip_norm": 0.0}
    schedule = {"kind": "constant", "learning_rate": RATE}
    config = make_config(
        MUON_MODELS[model], mesh, steps=STEPS, optimizer=own | optimizer, schedule=schedule, **sections
    )
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def gradients_of(weights) -> list[dict[str, np.ndarray]]:
    """Random ones; singular values of matrices are of one size, so that FP32 sorts eigenvalues as FP64 does."""
    return [random_gradients(weights, seed, decades=0.5) for seed in range(STEPS)]


def difference(found, expected, weights) -> float:
    """The largest difference of a weight over the root mean square of its array's changes."""
    assert found.keys() == expected.keys()
    return max(np.abs(found[n] - w).max() / np.sqrt(np.mean((w - weights[n]) ** 2)) for n, w in expected.items())


@pytest.mark.parametrize(("model", "mesh", "sections"), CASES, ids=str)
def test_a_mesh_updates_weights_as_numpy_does(model, mesh, sections):
    program = make_program(model, mesh, sections)
    weights = weights_of(program.config)
    gradients = gradients_of(weights)
    expected = soap.reference(weights, gradients, RATE, **SETTINGS)
    found = run_optimizer(program, weights, gradients)
    error = difference(found, expected, weights)
    print(model, mesh, error)
    assert error < 1e-3
