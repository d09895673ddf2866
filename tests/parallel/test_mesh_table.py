"""Any mesh, any number of microbatches and any remat policy train as one device does.

A covering sample of dev/mesh_table.py with the model's options added: losses and gradient norms within 1e-5, the
first step's gradients within 1e-4, relative to megajax/reference.py with one microbatch.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np
import pytest
from mesh_models import MODELS
from model_options import GEMMA

from megajax.config.checks import check_mesh
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import make_loader
from megajax.mesh import AXES, build_mesh
from megajax.parallel.tensor.ring import TensorRing
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

# A step after the first update, and after Adam's second, whose length depends on the gradients'. Muon: test_muon.py.
STEPS = {"adamw": 3, "sgd": 2}

TRIPLE = {"data": 2, "fsdp": 2, "tensor": 2}
ONE_LAYER = MODELS["llama"] | {"num_layers": 1}

OPTIONS = {
    "gemma": GEMMA,
    # The stored arrays of an odd width are padded.
    "padded_gpt2": {
        "num_layers": 2,
        "hidden_size": 35,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 72,
        "activation": "relu2",
        "z_loss": 1e-2,
    },
}


def case_name(value) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "plain"
    return None


def make(table, model, mesh=None, microbatches=1, optimizer="sgd", steps=None, **sections):
    sections["batch"] = {"sequence_length": 8}  # half the table's: every step takes its time on virtual devices
    return table.make_config(
        model, mesh, microbatches=microbatches, steps=steps or STEPS[optimizer], optimizer=optimizer, **sections
    )


def options_config(table, options, mesh, microbatches, **sections):
    base = table.MODELS["gpt2" if options.endswith("gpt2") else "llama"]
    if "gpt2" not in options:
        base = {key: value for key, value in base.items() if key != "num_kv_heads"}
    return make(table, {**base, **OPTIONS[options]}, mesh, microbatches, **sections)


def assert_agrees(difference, **tolerances):
    assert not difference.problems(**tolerances), difference


@pytest.mark.long
def test_recomputed_groups_of_an_unrolled_stack_change_no_number(table, difference):
    """And twice as many devices as KV heads. Each layer of a group makes its own dropout again."""
    model, remat = MODELS["llama"] | {"dropout": 0.1}, {"policy": "full", "group": 2}
    assert_agrees(difference(make(table, model, {"tensor": 8}, 2, remat=remat, kernels={"scan_unroll": 4})))


@pytest.mark.long
def test_looped_and_unrolled_layers_agree_bit_for_bit():
    """With XLA's own emitters of fused loops: those that the tests choose round another way where values are fused."""
    flags = re.sub("--xla_backend_extra_options=\\S+", "", os.environ["XLA_FLAGS"])
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(Path(__file__).parents[1] / "references/loops_bit_for_bit.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.long
def test_transfers_cut_into_pieces_change_no_number(table, difference, monkeypatch):
    """As where the layers are wide. Gated, and in FP8: test_fp8_mesh.py."""
    monkeypatch.setattr(TensorRing, "overlap_width", 1)
    remat = {"policy": "selective", "layers": 2}
    assert_agrees(difference(make(table, "gpt2", {"fsdp": 2, "tensor": 4}, 1, "adamw", remat=remat)))


@pytest.mark.smoke
def test_padded_weights_train_on_a_mesh_as_on_one_device(table, difference):
    assert_agrees(difference(options_config(table, "padded_gpt2", TRIPLE, 2, remat={"policy": "offload"})))


@pytest.mark.long
def test_documents_packed_by_work_train_on_a_mesh_as_on_one_device(table, difference, tmp_path, monkeypatch):
    """Rows of documents of 1 to 9 tokens, through the loader, over stages and devices of `data`, in microbatches."""
    draw = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for size in draw.integers(1, 10, 400):
            writer.add_document(draw.integers(0, 64, size))
    separate = {"reset_attention": True, "reset_positions": True, "mask_end_of_document_loss": True}
    data = {"kind": "indexed", "train": str(tmp_path / "tokens"), "packing": "balanced"} | separate
    mesh, remat = {"data": 2, "tensor": 2, "pipeline": 2}, {"policy": "save_matmuls"}
    config = options_config(table, "gemma", mesh, 4, remat=remat, data=data)
    size = config.batch.global_size
    loaded = list(islice(make_loader(config, split="train", rows=np.arange(size)), config.run.steps))
    parts = [batch["segment_ids"].max(axis=1).reshape(8, -1).sum(axis=1) for batch in loaded]
    assert all(part.max() > part.min() for part in parts)  # other numbers of documents
    monkeypatch.setattr(table, "make_batches", lambda _: iter(loaded))
    assert_agrees(difference(config))


@pytest.mark.parametrize(
    ("compute", "mesh"),
    [("bfloat16", {"fsdp": 2, "tensor": 2}), pytest.param("float16", {"data": 2, "fsdp": 2}, marks=pytest.mark.long)],
    ids=case_name,
)
def test_low_precision_trains_as_one_device_does_within_its_rounding(table, reference, compute, mesh):
    config, expected = (
        make(table, ONE_LAYER, mesh, 2, precision={"compute": compute}),
        reference(make(table, ONE_LAYER)),
    )
    difference = table.compare(table.train(config, expected.initial), expected)
    coarse = {"bfloat16": 8, "float16": 1}[compute]  # 8 against 11 bits
    assert_agrees(difference, scalar=5e-4 * coarse, gradient=1e-2 * coarse)


def test_gradients_reduced_in_bfloat16_are_close(table, reference):
    config = make(table, ONE_LAYER, {"data": 2, "fsdp": 2}, precision={"gradients": "bfloat16"})
    expected = reference(make(table, ONE_LAYER))
    found = table.compare(table.train(config, expected.initial), expected)
    assert_agrees(found, gradient=1e-2, scalar=1e-2)
    assert found.worst[1] > table.GRADIENT_TOLERANCE, "they were not reduced in bfloat16"


@pytest.fixture
def initial(table):
    """A config's initial weights in their canonical shapes."""

    def of(config):
        count = int(np.prod([*config.mesh.model_dump(include=set(AXES)).values()]))
        program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
        return table.canonical(program, program.init_state().params)

    return of


@pytest.mark.long
def test_initial_weights_are_the_same_bit_for_bit_on_a_mesh(table, initial):
    config = options_config(table, "padded_gpt2", {"fsdp": 2, "tensor": 4}, 1)
    expected, found = initial(table.reference_config(config)), initial(config)
    for name, weight in expected.items():
        assert np.array_equal(found[name].view(np.uint32), weight.view(np.uint32)), name


@pytest.mark.long
def test_the_evaluation_loss_is_that_of_the_reference(table):
    config = options_config(table, "padded_gpt2", TRIPLE, 2)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))
    weights, fields = table.weights_of(config), next(table.make_batches(config))
    sums, tokens = program.eval_step(table.first_state(program, weights).params, {}, to_global(program, fields))
    expected = table.expected_evaluation(config, weights, fields)
    assert float(sums["loss"] / tokens) == pytest.approx(expected, rel=table.SCALAR_TOLERANCE)


def test_the_table_sees_a_gradient_that_counts_twice(table, reference):
    expected = reference(make(table, ONE_LAYER))
    doubled = {name: g * (2 if name.endswith("mlp.gate") else 1) for name, g in expected.gradients.items()}
    assert len(table.compare(replace(expected, gradients=doubled), expected).problems()) == 1
