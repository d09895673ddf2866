"""SOAP against plain NumPy: on meshes, resumed on other meshes, and with its arrays on the host."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import soap
from mesh_models import MIXTRAL, MODELS
from muon import random_gradients
from single_device import first_state, make_config, stored, weights_of

from megajax.checkpoint import Checkpoints
from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.optim import matrix_exchange
from megajax.optim.update import Given
from megajax.tools.verify.runs import canonical
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

RATE, STEPS, SAVED, LARGEST = 1e-2, 6, 3, 48
# Bases are refreshed in steps 3 and 5. With an epsilon of 1e-8 the first update is the sign of each rotated number,
# and that of one near 0 depends on the rounding of a processor.
SETTINGS = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-3, "frequency": 2, "largest": LARGEST}
# The FFN's side of a matrix has no basis
LLAMA = MODELS["llama"] | {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64}
UNEVEN = {"batch": {"num_microbatches": 4}, "pipeline": {"layout": (1, 2)}}  # one empty slot
CASES = {  # (model, two meshes with their sections)
    "padding and copies, then the host": (
        LLAMA,
        ({"data": 3, "tensor": 2}, {"batch": {"global_size": 42}}),
        ({"fsdp": 2, "tensor": 2}, {"optimizer": {"offload": 1.0}}),
    ),
    "rounds, then stages": (LLAMA | {"num_layers": 3}, ({"fsdp": 2}, {}), ({"pipeline": 2, "data": 2}, UNEVEN)),
    "experts": (
        MIXTRAL | {"num_layers": 1, "num_experts": 4},
        ({"fsdp": 2, "tensor": 2, "experts_over": ["fsdp", "tensor"]}, {}),
        ({}, {}),
    ),
}


def make_program(model, mesh, sections) -> TrainProgram:
    """The program on the first virtual devices."""
    own = {"kind": "soap", "soap": {"precondition_frequency": 2, "max_dimension": LARGEST}, "clip_norm": 0.0}
    own |= {"epsilon": SETTINGS["epsilon"]}
    sections = sections | {"schedule": {"kind": "constant", "learning_rate": RATE}}
    config = make_config(model, mesh, steps=STEPS, **(sections | {"optimizer": own | sections.get("optimizer", {})}))
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def train(program: TrainProgram, state, gradients):
    """The state after a step with each of the canonical gradients."""

    def following(state, gradients):
        given = Given(gradients, {}, {}, state.step, jnp.bool_(True))
        return replace(state, **program.update(state.updated, given)._asdict(), step=state.step + 1)

    step, places = jax.jit(following, out_shardings=program.state_shardings), program.placements
    for each in gradients:
        own = {n: jax.device_put(stored(g, places[n], g.dtype), state.params[n].sharding) for n, g in each.items()}
        state = step(state, own)
    return state


@pytest.mark.parametrize(
    ("model", "first", "second"),
    [pytest.param(*case, id=name, marks=[] if "copies" in name else pytest.mark.long) for name, case in CASES.items()],
)
def test_meshes_update_weights_as_numpy_does(model, first, second, tmp_path, monkeypatch):
    """Three steps on a mesh, a checkpoint, and three on another one, where the bases are refreshed again."""
    monkeypatch.setattr(matrix_exchange, "CHUNK", 2048)  # two matrices of D x D at once, so several rounds
    program, other = (make_program(model, *each) for each in (first, second))
    weights = weights_of(program.config)
    gradients = [random_gradients(weights, step, decades=0.5) for step in range(STEPS)]
    state = train(program, first_state(program, weights), gradients[:SAVED])

    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=None)
    StateSaver(program).save(checkpoints, SAVED, state)
    outcome = checkpoints.outcome(wait=True)
    assert outcome is not None and not outcome.error
    restored = StateSaver(other).restore(checkpoints, SAVED)
    checkpoints.close()
    slots = restored.optimizer.slots["soap"].keys()
    assert {f"{side}_{kind}" for side in ("rows", "columns") for kind in ("factor", "basis")} <= slots
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(restored.optimizer.slots["soap"]["square"])}
    assert kinds == {"pinned_host" if other.config.optimizer.offload else "device"}

    found = canonical(other, train(other, restored, gradients[SAVED:]).params)
    expected = soap.reference(weights, gradients, RATE, **SETTINGS)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        error, change = np.linalg.norm(found[name] - weight), np.linalg.norm(weight - weights[name])
        assert error < 5e-5 * change, (name, error / change)
