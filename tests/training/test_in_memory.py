"""The weights of a trainer in use without a file: its generator, and tensors in Hugging Face's names."""

import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from trainers import QuickTrainer

import megajax
from megajax.checkpoint.weights import run_config
from megajax.errors import InputError
from megajax.hf.exporting import export_step
from megajax.inference.generation import Generator
from megajax.inference.sampling import Sampling
from megajax.training.in_memory import StateSource
from megajax.training.loop import Trainer
from megajax.training.step import TrainProgram

GREEDY = Sampling(temperature=0)
PROMPTS = [[5, 6, 7], [40, 3], [9, 9, 9, 9], [70]]
STATES = {
    "fsdp and tensor": ("mesh.fsdp=2", "mesh.tensor=2"),
    "split masters, padded": (
        *("mesh.fsdp=4", "mesh.tensor=2", "model.hidden_size=44", "model.num_heads=4", "model.head_dim=8"),
        *("optimizer.master=split", "precision.compute=bfloat16"),
    ),
    "stages and experts": (
        *("mesh.pipeline=2", "mesh.expert=2", "mesh.tensor=2", "batch.num_microbatches=2", "model.num_layers=3"),
        *("model.num_experts=4", "model.experts_per_token=2"),
    ),
}


@pytest.fixture(scope="session")
def tiny(tiny_with_attention):
    return tiny_with_attention


@pytest.fixture
def build(tmp_path, make_config):
    """(overrides..., kind=QuickTrainer, name="run") → a Trainer on as many devices as its mesh has."""

    def build(*overrides, kind=QuickTrainer, name="run"):
        fixed = (f"run.dir={tmp_path / name}", "run.steps=4", "run.eval_steps=0", "data.kind=synthetic")
        config = make_config(*fixed, *overrides)
        sizes = [int(each.split("=")[1]) for each in overrides if each.startswith("mesh.")]
        return kind(config, jax.devices()[: math.prod(sizes)])

    return build


def tokens(generator: Generator) -> list[list[int]]:
    return [*generator.tokens(PROMPTS, 8)][-1]


def assert_same(found, expected):
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


def assert_streamed(trainer, tmp_path: Path, dtype="float32"):
    """The tensors are those of the folder that is written from the checkpoint, bit for bit and in the same order."""
    run_dir, step = trainer.run_dir, trainer.checkpoints.latest_step
    export_step(run_dir, step, run_config(run_dir, "RUN"), tmp_path / f"hf-{dtype}", dtype)
    expected, found = load_file(tmp_path / f"hf-{dtype}/model.safetensors"), dict(trainer.export_weights("hf", dtype))
    assert found.keys() == expected.keys() and len(found) > 10
    for name, array in found.items():
        assert array.dtype == expected[name].dtype and array.shape == expected[name].shape, name
        assert np.ascontiguousarray(array).tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if "masters" in kind else pytest.mark.long) for kind in STATES]
)
def test_the_weights_of_a_state_are_those_of_its_checkpoint(build, tmp_path, kind):
    trainer = build(*STATES[kind])
    random = np.random.default_rng(0)
    noisy = {
        name: jax.device_put((np.asarray(w) + random.normal(0, 0.05, w.shape)).astype(w.dtype), w.sharding)
        for name, w in trainer.state.params.items()
        if trainer.program.placements[name].is_canonical
    }
    trainer.state = replace(trainer.state, params=trainer.state.params | noisy)
    trainer.save()
    trainer.close()
    mesh = trainer.program.mesh
    loaded, generator = megajax.load_run(trainer.run_dir, mesh), trainer.generator(GREEDY)
    assert_same(generator.model.weights, loaded.weights)
    assert tokens(generator) == tokens(Generator(loaded, GREEDY))
    assert_streamed(trainer, tmp_path)
    if kind == "fsdp and tensor":
        assert_streamed(trainer, tmp_path, "float16")
        one = megajax.build_mesh({"tensor": 2}, jax.devices()[:2])
        moved = trainer.generator(GREEDY, one)
        assert tokens(moved) == tokens(generator)
        assert {d for w in jax.tree.leaves(moved.model.weights) for d in w.devices()} == {*jax.devices()[:2]}


@pytest.mark.parametrize("pattern", ["dense", "mlp,dense"])
@pytest.mark.parametrize("stages", [(2, 3), (3, 2)], ids=str)
def test_each_layer_of_a_pipeline_is_exported_under_its_own_number(make_config, stages, pattern):
    """With an order of the stored layers that is not its own inverse; layer l is filled with l."""
    pipeline, rounds = stages
    every = len(pattern.split(","))  # the last of these many layers is `dense`
    layers = range(every - 1, 6 * every, every)
    overrides = (f"mesh.pipeline={pipeline}", f"pipeline.virtual_stages={rounds}", f"model.num_layers={6 * every}")
    overrides += (f"model.block_pattern=[{pattern}]",)
    config = make_config("data.kind=synthetic", *overrides, f"batch.num_microbatches={pipeline}", "batch.global_size=6")
    mesh = megajax.build_mesh({"pipeline": pipeline}, jax.devices()[:pipeline])
    program, norm = TrainProgram.build(config, mesh), "blocks.dense.attention.norm"
    order = program.placements[norm].layers
    rows = [layers.index(layer) for layer in order]
    assert sorted(rows) == [*range(6)] and [rows[row] for row in rows] != [*range(6)]
    state = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), program.abstract_state)
    stored = np.broadcast_to(np.float32(order)[:, None], state.params[norm].shape)
    filled = {norm: jax.device_put(stored, state.params[norm].sharding)}
    with StateSource(program, replace(state, params=state.params | filled)).open(config.model) as weights:
        assert [set(weights[norm][(row,)].tolist()) for row in range(6)] == [{layer} for layer in layers]


@pytest.mark.long
def test_a_generator_takes_the_weights_of_later_steps_without_compiling(build, tmp_path):
    trainer = build("mesh.fsdp=2", "mesh.tensor=2", "schedule.learning_rate=0.05", kind=Trainer)
    generator = trainer.generator(GREEDY)
    before = tokens(generator)
    trainer.train_step(trainer.next_batch())
    trainer.train_step(trainer.next_batch())
    jax.block_until_ready(trainer.state)
    taken = trainer.state
    trainer.train_step(trainer.next_batch())
    jax.block_until_ready(trainer.state)
    for state, sentence in (
        (trainer.state.params, "the state is of the type dict: give a TrainState"),
        (replace(trainer.state, params={}), "weights of other shapes"),
        (taken, "a step has taken the state's memory"),
    ):
        with pytest.raises(InputError, match=sentence):
            generator.update(state)
    assert tokens(generator) == before  # it keeps its weights
    compiled = []

    def count(event, *_, **__):
        compiled.append(event) if event == "/jax/core/compile/backend_compile_duration" else None

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        generator.update(trainer.state)
        after = tokens(generator)
        assert not compiled
        jax.jit(lambda x: x + 41.5)(np.float32(1))
        assert len(compiled) == 1  # so compilations are counted
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    trainer.train_step(trainer.next_batch())  # takes the memory of the state, but not that of the generator
    assert tokens(generator) == after != before
    trainer.close()
    fresh = build("mesh.fsdp=2", "mesh.tensor=2", "schedule.learning_rate=0.05", kind=Trainer, name="again")
    for _ in range(3):
        fresh.train_step(fresh.next_batch())
    fresh.save()
    fresh.close()
    assert tokens(Generator(megajax.load_run(fresh.run_dir, fresh.program.mesh), GREEDY)) == after


@pytest.mark.long
def test_adapters_are_merged(build, tmp_path):
    base = build("mesh.fsdp=2", "mesh.tensor=2", name="base")
    base.save()
    base.close()
    lora = (f"checkpoint.init_from={base.run_dir}", "lora.rank=2", "lora.alpha=4")
    trainer = build("mesh.fsdp=2", "mesh.tensor=2", *lora)
    random = np.random.default_rng(0)
    noisy = {
        name: jax.device_put(random.normal(0, 0.1, w.shape).astype(w.dtype), w.sharding)
        for name, w in trainer.state.params.items()
    }
    trainer.state = replace(trainer.state, params=noisy)
    trainer.save()
    trainer.close()
    loaded, generator = megajax.load_run(trainer.run_dir, trainer.program.mesh), trainer.generator(GREEDY)
    assert_same(generator.model.weights, loaded.weights)
    assert_streamed(trainer, tmp_path)


def test_what_is_not_known_is_a_sentence(build):
    trainer = build("mesh.fsdp=2")
    with pytest.raises(InputError, match="the format gguf is not known: give hf"):
        trainer.export_weights("gguf")
    with pytest.raises(InputError, match="the dtype bf17 is not known: give one such as bfloat16"):
        trainer.export_weights("hf", "bf17")
    with pytest.raises(InputError, match="sampling=greedy is no Sampling: give .*Sampling"):
        trainer.generator("greedy")
