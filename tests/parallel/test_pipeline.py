"""Any number of stages, any schedule and any mesh around them trains as one device does.

A covering sample of `dev/mesh_table.py --table pipeline` with uneven stages and the model's options added: losses
and gradient norms within 1e-5, the first step's gradients within 1e-4, relative to megajax/reference.py with one
microbatch.
"""

import math
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from mesh_models import GPT2
from model_options import GEMMA
from reused_programs import first_weights

from megajax.config.checks import check_mesh
from megajax.layout.backward_parts import backward_parts
from megajax.mesh import AXES, build_mesh
from megajax.sharding import EMPTY, stored_layers
from megajax.step.pipeline.runner import StageRunner
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

STEPS = 2
SMALL = {"num_heads": 8, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 250, "init_std": 0.05}
# Layers of one sublayer compile in half the time; test_plain_model.py has whole ones in stages, test_teacher.py also
# in lockstep.
# Where layers do not fill the stages, some slots are empty: gpt2's biases would show it if they did anything.
MODELS = {
    "llama": {**SMALL, "num_layers": 8, "num_kv_heads": 2},
    "mlp of 6": {**SMALL, "num_layers": 6, "block_pattern": ["mlp"], "mlp_bias": True},
    "attention of 4": {**SMALL, "num_layers": 4, "num_kv_heads": 2, "block_pattern": ["attention"]},
    "gpt2 of 3": {**SMALL, **GPT2, "num_layers": 3, "dropout": 0.2},
    "gpt2's mlp of 3": {**SMALL, **GPT2, "num_layers": 3, "dropout": 0.2, "block_pattern": ["mlp"]},
    "gemma": {**SMALL, **GEMMA, "num_layers": 4},
}

PACKED = {"synthetic_documents": 4, "reset_attention": True, "reset_positions": True}

# model, mesh, schedule, virtual stages, microbatches, sections.
CASES = [
    pytest.param(
        *("mlp of 6", {"pipeline": 3, "fsdp": 2}, "zero_bubble", 2, 6),
        {"remat": {"policy": "save_matmuls"}, "batch": {"global_size": 24}},
        marks=pytest.mark.smoke,
    ),
    # One operation a tick: the backward pass of a stage's two layers in two parts; a program for each buffer slot.
    (
        *("attention of 4", {"pipeline": 2, "fsdp": 2, "tensor": 2}, "1f1b", 1, 4),
        {"remat": {"policy": "save_matmuls"}, "kernels": {"scan_unroll": 2}},
    ),
    pytest.param(  # the two layers of a part in a loop
        *("llama", {"pipeline": 2, "fsdp": 2, "tensor": 2}, "1f1b", 1, 4, {"remat": {"policy": "save_matmuls"}}),
        marks=pytest.mark.long,
    ),
    # The last virtual stage is empty. Stages do not divide the tokens of a microbatch; no token of the first is valid.
    pytest.param(
        "gpt2 of 3",
        {"pipeline": 2, "tensor": 2},
        "1f1b",
        2,
        32,
        {"remat": {"policy": "full"}},  # its backward pass makes the dropout of each virtual stage's layers again
        marks=pytest.mark.long,
    ),
    pytest.param(
        *(
            "gemma",
            {"pipeline": 2, "fsdp": 2},
            "gpipe",
            1,
            2,
            {"remat": {"policy": "full", "layers": 1}, "data": PACKED},
        ),
        marks=pytest.mark.long,
    ),
]


def case_name(value) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "plain"
    return None


@pytest.fixture(scope="module")
def make_config(table):
    """(model, mesh, schedule, virtual stages, microbatches, sections) → a checked config."""

    def make(model, mesh, schedule="1f1b", virtual_stages=1, microbatches=1, sections=None):
        sections = dict(sections or {})
        sections["pipeline"] = {"schedule": schedule, "virtual_stages": virtual_stages, **sections.get("pipeline", {})}
        # Shorter than the tables': without LLVM's optimisations every write to a pipeline's buffer copies all of it.
        sections["batch"] = {"sequence_length": 10, **sections.get("batch", {})}
        return table.make_config(
            MODELS[model], mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections
        )

    return make


def assert_agrees(difference):
    assert not difference.problems(), difference


@pytest.mark.parametrize(
    ("model", "mesh", "schedule", "virtual_stages", "microbatches", "sections"), CASES, ids=case_name
)
def test_stages_train_as_one_device_does(
    make_config, difference, model, mesh, schedule, virtual_stages, microbatches, sections
):
    config = make_config(model, mesh, schedule, virtual_stages, microbatches, sections)
    if microbatches == 32:
        assert config.batch.global_size // 32 * config.batch.sequence_length // 2 % 2, "stages divide the tokens"
    if schedule == "1f1b" and virtual_stages == 1:
        sizes = check_mesh(config, math.prod(mesh.values()))
        assert backward_parts(config, sizes, "cpu").slots, "the stages run in lockstep"
    assert_agrees(difference(config))


def build(config) -> TrainProgram:
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def test_initial_weights_are_the_same_bit_for_bit_and_empty_slots_are_zero(table, make_config):
    mesh = {"pipeline": 2, "fsdp": 2, "tensor": 2}
    config = make_config("gpt2's mlp of 3", mesh, virtual_stages=2, microbatches=2)
    staged = build(config)
    params = staged.init_state().params
    found = table.canonical(staged, params)
    expected = first_weights(staged.model, config.run.seed, config.model.init_std)  # without a mesh
    assert found.keys() == expected.keys()
    for name in expected:
        assert np.array_equal(found[name].view(np.uint32), expected[name].view(np.uint32)), name
    empty = stored_layers(config, 2).flatten() == EMPTY
    assert empty.sum() == 1
    assert not any(np.asarray(w)[empty].any() for name, w in params.items() if name.startswith("blocks."))


def test_the_evaluation_loss_is_that_of_the_reference(table, make_config):
    """test_plain_model.py has attention too."""
    config = make_config("gpt2's mlp of 3", {"pipeline": 2, "data": 2, "tensor": 2}, "zero_bubble", 2, 4)
    program, weights, fields = build(config), table.weights_of(config), next(table.make_batches(config))
    sums, tokens = program.eval_step(table.first_state(program, weights).params, {}, to_global(program, fields))
    assert tokens == fields["loss_mask"].sum()
    expected = table.expected_evaluation(config, weights, fields)
    assert float(sums["loss"] / tokens) == pytest.approx(expected, rel=table.SCALAR_TOLERANCE)


def test_virtual_stages_have_their_parts_of_loops_and_of_single_layers():
    """Of four: the layers of a segment without a loop are stacked by stage, those of a loop follow each other."""
    stack = SimpleNamespace(segments=[SimpleNamespace(iterations=n) for n in (1, 3)])
    own: Any = SimpleNamespace(schedule=SimpleNamespace(virtual_stages=4), stack=stack)
    single, loop = np.arange(4 * 2).reshape(4, 2), np.arange(12 * 2).reshape(12, 2)
    layers: Any = [({"a": single},), ({"a": loop},)]
    found: Any = StageRunner.by_virtual_stage(own, layers)
    for r, (of_single, of_loop) in enumerate(found):
        np.testing.assert_array_equal(of_single[0]["a"], [2 * r, 2 * r + 1])
        np.testing.assert_array_equal(of_loop[0]["a"], 6 * r + np.arange(6).reshape(3, 2))
    jax.tree.map(np.testing.assert_array_equal, StageRunner.join_virtual_stages(own, found), layers)
