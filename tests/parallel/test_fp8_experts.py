"""Experts in FP8 train on a mesh as on one device, as far as roundings to FP8 allow (test_fp8_mesh.py says why)."""

import jax
import numpy as np
import pytest

from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.model.block import linear_layers
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

STEPS = 2
MODEL = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "ffn_hidden_size": 256,
    "vocab_size": 250,
    "init_std": 0.03,
    "num_experts": 4,
    "expert_ffn_hidden_size": 64,
    "shared_expert_ffn_hidden_size": 64,
    "first_dense_layers": 1,
    "router": {"global_loss": 0.1},
}
EXPERTS_ALONE = MODEL | {"first_dense_layers": 0}  # a layer on each of two stages
# Parameters of a linear layer's weight.
WEIGHTS = {
    "moe.gate_up": ("moe.gate", "moe.up"),
    "moe.down": ("moe.down",),
    "moe.shared_gate_up": ("moe.shared_gate", "moe.shared_up"),
}


def run(table, recipe, model, mesh, microbatches, weights=None, **sections):
    """(losses, gradients of the first step, amax histories, first weights)."""
    fp8 = {"recipe": recipe} | ({"amax_history_length": STEPS} if recipe == "delayed" else {})
    config = table.make_config(
        model,
        mesh,
        microbatches=microbatches,
        steps=STEPS,
        optimizer="sgd",
        precision={"fp8": fp8},
        batch={"global_size": 16, "sequence_length": 32},
        **sections,
    )
    count = int(np.prod(list(mesh.values()) or [1]))
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    weights = weights or table.weights_of(config)
    state, losses, gradients = table.first_state(program, weights), [], {}
    for fields in table.make_batches(config):
        state, metrics = program.train_step(state, to_global(program, fields))
        losses.append(float(metrics["loss"]))
        gradients = gradients or table.first_gradients(program, state, float(metrics["grad_norm"]))
    return np.array(losses), gradients, jax.tree.map(np.asarray, state.layer_state.get("fp8", {})), weights


@pytest.mark.parametrize(
    ("recipe", "model", "mesh", "microbatches", "sections"),
    [
        (
            "current",
            EXPERTS_ALONE | {"num_layers": 1, "block_pattern": ["experts"]},  # attention: test_fp8_mesh.py
            {"expert": 2, "tensor": 2},
            1,
            {"communication": {"experts": "all_to_all"}, "remat": {"policy": "save_matmuls"}},
        ),
        pytest.param(
            *("delayed", EXPERTS_ALONE, {"pipeline": 2, "expert": 2}, 2, {"pipeline": {"schedule": "zero_bubble"}}),
            marks=pytest.mark.long,
        ),
    ],
    ids=["current", "delayed"],
)
def test_a_mesh_trains_as_one_device_does(table, recipe, model, mesh, microbatches, sections):
    losses, gradients, history, weights = run(table, recipe, model, {}, microbatches)
    found = run(table, recipe, model, mesh, microbatches, weights, **sections)
    assert abs(found[0][0] / losses[0] - 1) < 1e-4  # the weights are still the same
    np.testing.assert_allclose(found[0], losses, rtol=1e-3)
    for name, gradient in gradients.items():
        error = np.linalg.norm(found[1][name] - gradient) / np.linalg.norm(gradient)
        assert error < 5e-2, (name, error)
    assert history.keys() == found[2].keys() and bool(history) == (recipe == "delayed")
    for name, amaxes in history.items():  # the oldest is the first step's, over all devices
        np.testing.assert_allclose(found[2][name][:, -1], amaxes[:, -1], rtol=2e-2, err_msg=name)
        layer, tensor = name.rsplit(".", 1)
        own = amaxes[0]
        assert (own > 0).all(), name
        if tensor == "weight" and layer in WEIGHTS:
            largest = max(np.abs(weights[f"blocks.moe.{part}"][0]).max() for part in WEIGHTS[layer])
            assert own[-1] == largest, name


def test_the_models_linear_layers_are_those_of_its_blocks(table):
    config = table.make_config(MODEL, {})
    attention, dense = ("attention.qkv", "attention.output"), ("mlp.gate_up", "mlp.down")
    experts, shared = ("moe.gate_up", "moe.down"), ("moe.shared_gate_up", "moe.shared_down")
    assert linear_layers(config.model) == (*attention, *dense, *experts, *shared)
    every = config.model.model_copy(update={"first_dense_layers": 0, "shared_expert_ffn_hidden_size": 0})
    assert linear_layers(every) == (*attention, *experts)
