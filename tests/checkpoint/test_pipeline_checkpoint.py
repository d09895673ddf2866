"""Checkpoints know nothing of stages: any number of stages and virtual stages loads any checkpoint, bit for bit."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from megajax.config import load_config
from megajax.sharding import EMPTY, stored_layers, to_canonical
from megajax.training.loop import Trainer

# Biases and tied weights; 36 is no multiple of 8 storage shards.
TINY = """
run: {log_interval: 1, eval_steps: 0, checkpoint_interval: 2}
model: {num_layers: 3, hidden_size: 36, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden_size: 48,
        vocab_size: 70, vocab_multiple: 128, attention_bias: true, mlp_bias: true, dropout: 0.1, init_std: 0.1}
batch: {global_size: 8, sequence_length: 16, num_microbatches: 2}
precision: {compute: float32}
schedule: {kind: constant, learning_rate: 1.0e-3}
data: {kind: synthetic}
logging: {tensorboard: false}
"""
HALF, WHOLE = 2, 4  # steps; both are saved
INTERLEAVED = {"mesh.pipeline": 2, "pipeline.virtual_stages": 2, "mesh.fsdp": 2}  # layers 0 and 2, 1 and none

# Meshes that restore what INTERLEAVED saved, with empty slots in other places; the first two go on.
OTHERS = [
    INTERLEAVED,
    {},
    {"mesh.pipeline": 2, "mesh.data": 2},
    {"mesh.pipeline": 3, "mesh.tensor": 2, "pipeline.schedule": "zero_bubble", "batch.num_microbatches": 4},
]


@pytest.fixture
def make_trainer(tmp_path):
    """(run directory, steps, settings) → a Trainer on a mesh of the first devices."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def make(run_dir, steps, settings):
        given = settings | {"run.dir": tmp_path / run_dir, "run.steps": steps}
        config = load_config(path, [f"{key}={value}" for key, value in given.items()])
        count = int(np.prod([size for key, size in settings.items() if key.startswith("mesh.")], dtype=int))
        return Trainer(config, jax.devices()[:count])

    return make


def state_of(trainer) -> dict[str, np.ndarray]:
    """Every parameter and moment in its canonical shape, and the other leaves of the state as they are."""
    placements = trainer.program.placements
    tree = {field.name: getattr(trainer.state, field.name) for field in fields(trainer.state)}
    found = named_leaves(tree | {"optimizer": trainer.program.update.slots.on_disk(trainer.state.optimizer)})
    return {
        path: to_canonical(leaf, placements[path.split("/")[-1]]) if path.split("/")[-1] in placements else leaf
        for path, leaf in found.items()
    }


def read(checkpoint: Path) -> dict[str, np.ndarray]:
    """The same of a checkpoint, read by orbax alone."""
    with ocp.PyTreeCheckpointer() as reader:
        metadata = reader.metadata(checkpoint / "state").item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        return named_leaves(reader.restore(checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=arguments)))


def named_leaves(tree) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)

    def part(key) -> str:
        return str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))

    return {"/".join(map(part, path)): np.asarray(leaf) for path, leaf in leaves}


def metrics(trainer) -> dict[int, tuple[float, float]]:
    lines = [json.loads(line) for line in (trainer.checkpoints.directory.parent / "metrics.jsonl").open()]
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "loss" in line}


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


@pytest.mark.long
def test_other_stages_go_on_from_a_checkpoint(make_trainer, tmp_path):
    """Exactly the state that was saved, then the losses of the run that stopped nowhere; on the same mesh exactly."""
    whole = make_trainer("whole", WHOLE, INTERLEAVED)
    assert whole.run() == 0
    expected, end = metrics(whole), read(whole.checkpoints.directory / str(WHOLE))
    assert_same(end, state_of(whole))
    saved = read(whole.checkpoints.directory / str(HALF))
    assert any(leaf.any() for name, leaf in saved.items() if "/mu/" in name), "the moments have not moved"

    for index, settings in enumerate(OTHERS):
        shutil.copytree(tmp_path / "whole", tmp_path / str(index))
        shutil.rmtree(tmp_path / str(index) / "checkpoints" / str(WHOLE))
        trainer = make_trainer(str(index), WHOLE, settings)
        assert trainer.step == HALF
        assert_same(state_of(trainer), saved)
        assert_empty_slots_are_zero(trainer)
        if index >= 2:
            trainer.checkpoints.close()
            continue
        assert trainer.run() == 0
        if settings == INTERLEAVED:
            assert metrics(trainer) == expected
            assert_same(state_of(trainer), end)
        for step, values in metrics(trainer).items():
            assert values == pytest.approx(expected[step], rel=1e-5), (settings, step)


def assert_empty_slots_are_zero(trainer) -> None:
    rows = stored_layers(trainer.program.config, trainer.program.mesh.shape["pipeline"]).flatten()
    for name, weight in trainer.state.params.items():
        if name.startswith("blocks."):
            assert not np.asarray(weight)[rows == EMPTY].any(), name


def test_on_disk_layers_stand_in_the_order_of_the_model(make_trainer):
    """As in the checkpoint of one device; the first weights tell the layers apart."""
    found = []
    for run_dir, given in (("one", {}), ("staged", INTERLEAVED)):
        trainer = make_trainer(run_dir, 1, given)
        trainer.save()
        trainer.checkpoints.close()
        found.append(read(trainer.checkpoints.directory / "0"))
    assert_same(found[1], found[0])
    query = next(leaf for path, leaf in found[1].items() if path.endswith("params/blocks.dense.attention.query"))
    assert len(query) == len(np.unique(query.reshape(len(query), -1), axis=0)) == trainer.config.model.num_layers
