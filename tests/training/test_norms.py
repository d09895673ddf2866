"""Norms by parameter and layer: equal to NumPy's on one device, the same on a mesh, and without effect on training."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import AXES
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.sharding import EMPTY, place
from megajax.tools.verify.runs import first_gradients
from megajax.training.batches import to_global
from megajax.training.loop import Trainer
from megajax.training.norms import Norms, _squares
from megajax.training.step import TrainProgram

# Clipping is active.
RUN = (
    *("model.num_layers=4", "batch.num_microbatches=2", "logging.norms_interval=2"),
    *("optimizer.clip_norm=0.05", "optimizer.weight_decay=0.1", "schedule.learning_rate=1e-2"),
)
MESH = ("mesh.pipeline=2", "pipeline.virtual_stages=2", "mesh.fsdp=2")  # stores layers 0, 2, 1, 3


def prepared(make_config, devices, *overrides):
    """A program, its first state, and a batch of random tokens that is the same on any mesh."""
    config = make_config(*RUN, *overrides)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))
    M, B, S = program.plan.batch_shape
    tokens = np.random.default_rng(1).integers(0, 125, (M * B, S + 1), np.int32)
    fields = {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "loss_mask": np.ones((M * B, S), np.float32),
        "positions": np.broadcast_to(np.arange(S, dtype=np.int32), (M * B, S)),
    }
    return program, program.init_state(), to_global(program, fields)


def numpy_norms(arrays):
    """The norm of each array, by layer for those of blocks, and of all parameters of each layer."""
    norms, layers = {}, np.zeros(4)
    for name, array in arrays.items():
        in_block = name.startswith("blocks.")
        squares = np.square(np.asarray(array, np.float64)).reshape(len(array) if in_block else 1, -1).sum(axis=1)
        layers += squares if in_block else 0
        norms[name] = np.sqrt(squares if in_block else squares[0])
    return norms | {"layers": np.sqrt(layers)}


def test_norms_equal_numpy(make_config):
    """Of weights in shards; a step that is not finite updates nothing."""
    program, state, batch = prepared(make_config, 2, "batch.num_microbatches=1", "mesh.fsdp=2")
    norms = Norms(program)
    assert norms.before(3, state, batch) == {}
    scale = jax.device_put(jnp.float32(np.nan), state.loss_scale.sharding)
    skipped = jax.device_get(norms.before(2, replace(state, loss_scale=scale), batch))
    assert all(not own.any() for name, own in skipped.items() if name.startswith("update_ratio"))
    # The sum of the losses is 5 · 8e37, beyond FP32; that of the weights of tokens and the gradients are finite.
    heavy = jax.device_put(jnp.full_like(batch["loss_mask"], 6.25e35), batch["loss_mask"].sharding)
    skipped = jax.device_get(norms.before(2, state, batch | {"loss_mask": heavy}))
    for name, own in skipped.items():
        assert not own.any() if name.startswith("update_ratio") else np.isfinite(own).all() and own.any(), name
    logged = jax.device_get(norms.before(2, state, batch))

    before = jax.device_get(state.params)
    after, metrics = program.train_step(state, batch)
    gradients = first_gradients(program, after, norm := float(metrics["grad_norm"]))
    change = {name: before[name].astype(np.float64) - np.asarray(array) for name, array in after.params.items()}
    weights = numpy_norms(before)
    ratios = {name: own / weights[name] for name, own in numpy_norms(change).items()}
    expected = {"grad_norm": numpy_norms(gradients), "weight_norm": weights, "update_ratio": ratios}
    names = {f"{kind}/{name}" for kind, own in expected.items() for name in own}
    assert logged.keys() == names and norm > 0.05
    for kind, tolerance in (("grad_norm", 1e-5), ("weight_norm", 1e-5), ("update_ratio", 1e-4)):  # FP32 weights
        for name, own in expected[kind].items():
            np.testing.assert_allclose(logged[f"{kind}/{name}"], own, rtol=tolerance, err_msg=f"{kind}/{name}")
    total = sum(np.square(logged[f"grad_norm/{name}"]).sum() for name in before)
    assert np.sqrt(total) == pytest.approx(norm, rel=1e-5)


def test_layers_that_are_stored_in_another_order_have_their_own_norms():
    """Layer l is filled with l + 1; a row of the storage has no layer."""
    placement = place((3, 8), ("layers", "embed"), dict.fromkeys(AXES, 1), (0, 2, EMPTY, 1))
    stored = jnp.broadcast_to(jnp.array([1.0, 3.0, 0.0, 2.0])[:, None], (4, 8))
    assert _squares(stored, placement).tolist() == [8, 4 * 8, 9 * 8]


@pytest.mark.long
def test_layers_of_virtual_stages_have_their_norms(make_config):
    runs = (prepared(make_config, 4, *MESH), prepared(make_config, 1))
    assert any(placement.reordered for placement in runs[0][0].placements.values())
    found, logged = (jax.device_get(Norms(program).before(2, state, batch)) for program, state, batch in runs)
    assert found.keys() == logged.keys()
    for name, own in found.items():
        np.testing.assert_allclose(own, logged[name], rtol=1e-5, err_msg=name)


@pytest.mark.long
def test_norms_of_split_masters_are_those_of_both_halves(make_config):
    """All weights are 1.003, of which the upper half is 1."""
    split = ("optimizer.master=split", "precision.compute=bfloat16", "model.num_layers=1", "batch.num_microbatches=1")
    program, state, batch = prepared(make_config, 1, *split)
    sizes = {name: w.size for name, w in state.params.items()}
    params, low_bits = program.update.halves(
        {name: jnp.full(w.shape, 1.003, jnp.float32) for name, w in state.params.items()}
    )
    logged = jax.device_get(Norms(program).before(2, replace(state, params=params, master_low_bits=low_bits), batch))
    assert low_bits and params["blocks.mlp.mlp.up"].astype(jnp.float32).max() == 1
    for name, size in sizes.items():
        np.testing.assert_allclose(logged[f"weight_norm/{name}"], 1.003 * np.sqrt(size), rtol=1e-5, err_msg=name)


def logged(make_config, read_metrics, run_dir, interval, *overrides):
    """What a run with norms every `interval` steps logs, with its losses and norms."""
    overrides = (*overrides, "run.steps=3", f"logging.norms_interval={interval}")
    assert Trainer(make_config(*overrides, f"run.dir={run_dir}"), jax.devices()[:1]).run() == 0
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], read_metrics(run_dir, "loss", "grad_norm")


def test_norms_are_logged_at_their_steps(tmp_path, make_config, read_metrics):
    lines, _ = logged(make_config, read_metrics, tmp_path, 2)
    assert ["grad_norm/head" in line for line in lines] == [False, True, False]
    assert len(lines[1]["update_ratio/layers"]) == len(lines[1]["weight_norm/blocks.mlp.mlp.up"]) == 1
    assert isinstance(lines[1]["weight_norm/final_norm"], float)


@pytest.mark.long
def test_norms_change_no_loss(tmp_path, make_config, read_metrics):
    overrides = (*RUN, "model.num_layers=1")
    never, always = (logged(make_config, read_metrics, tmp_path / f"{n}", n, *overrides)[1] for n in (0, 1))
    assert never == always and len(never) == 3
