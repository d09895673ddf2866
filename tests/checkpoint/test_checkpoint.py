"""Checkpoints: canonical on disk whatever the mesh, usable by any mesh, safe from interrupted saves."""

import errno
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

import megajax
from megajax.checkpoint import manager
from megajax.checkpoint.description import compare_descriptions, describe_model
from megajax.config import ModelConfig, load_config
from megajax.errors import InputError
from megajax.optim.optimizer import OptimizerState
from megajax.training.loop import Trainer

# A width of 36 is padded on 8 storage shards; the vocabulary of 70 is padded to 128 on every mesh.
TINY = """
run: {log_interval: 1, steps: 2}
model: {num_layers: 2, hidden_size: 36, num_heads: 4, num_kv_heads: 2, head_dim: 8, ffn_hidden_size: 48,
        vocab_size: 70, vocab_multiple: 128}
batch: {global_size: 8, sequence_length: 16}
precision: {compute: float32}
kernels: {scan_unroll: 2}
data: {kind: synthetic}
logging: {tensorboard: false}
"""
MESHES = [{}, {"data": 2, "tensor": 4}, {"fsdp": 8}]  # two devices of `tensor` share a KV head

# Names and shapes of the parameters in a checkpoint: L=2, D=36, N=4, K=2, H=8, F=48, V=128.
BLOCK = {
    "attention.norm": (2, 36),
    "attention.query": (2, 36, 4, 8),
    "attention.key": (2, 36, 2, 8),
    "attention.value": (2, 36, 2, 8),
    "attention.output": (2, 4, 8, 36),
    "mlp.norm": (2, 36),
    "mlp.gate": (2, 36, 48),
    "mlp.up": (2, 36, 48),
    "mlp.down": (2, 48, 36),
}
ENDS = {"embedding.tokens": (128, 36), "final_norm": (36,), "head": (36, 128)}
# Of tests that train: they share a program.
ONE_LAYER = ("model.num_layers=1", "model.block_pattern=[mlp]", "kernels.scan_unroll=1", "run.eval_steps=0")
CANONICAL = ENDS | {f"blocks.dense.{name}": shape for name, shape in BLOCK.items()}


@pytest.fixture
def make_trainer(tmp_path):
    """(run directory, overrides..., axis=size...) → a Trainer on a mesh of the first devices."""
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)

    def make(run_dir, *overrides, **sizes):
        mesh = [f"mesh.{axis}={size}" for axis, size in sizes.items()]
        config = load_config(path, [f"run.dir={tmp_path / run_dir}", *mesh, *overrides])
        return Trainer(config, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])

    return make


def save(trainer, step=0):
    """The state as it is, as the checkpoint of `step`; the checkpoint's directory."""
    trainer.step = step
    trainer.save()
    trainer.checkpoints.close()
    return trainer.checkpoints.directory / str(step)


def read(checkpoint: Path) -> dict[str, np.ndarray]:
    """Every array of a checkpoint by its path, read by orbax alone."""
    with ocp.PyTreeCheckpointer() as reader:
        metadata = reader.metadata(checkpoint / "state").item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        tree = reader.restore(checkpoint / "state", args=ocp.args.PyTreeRestore(restore_args=arguments))
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(getattr(k, "key", k)) for k in path): np.asarray(leaf) for path, leaf in leaves}


def canonical(trainer) -> list[np.ndarray]:
    """Parameters and moments in their canonical shapes."""
    state, placements = trainer.state, trainer.program.placements
    moments = state.optimizer.slots["adamw"]
    trees = [state.params, moments["mu"], moments["nu"]]
    return [
        np.asarray(tree[name])[tuple(slice(size) for size in placements[name].shape)]
        for tree in trees
        for name in CANONICAL
    ]


def test_names_and_shapes_on_disk_are_canonical_on_every_mesh(make_trainer, monkeypatch):
    """And no replica writes a slice of so small an array, which would take a program for each shape."""
    first = None
    for index, sizes in enumerate(MESHES):
        trainer = make_trainer(f"run{index}", **sizes)
        adam = trainer.state.optimizer.slots["adamw"]
        squares = jax.jit(lambda params: [jax.tree.map(jax.numpy.square, params) for _ in range(2)])
        moved = adam | dict(zip(("mu", "nu"), squares(trainer.state.params), strict=True))
        trainer.state = replace(trainer.state, optimizer=OptimizerState(None, {"adamw": moved}))
        with monkeypatch.context() as patch:
            patch.delattr(jax.lax, "slice_in_dim")  # which orbax calls
            found = read(save(trainer))
        params = {path.removeprefix("params/"): a for path, a in found.items() if path.startswith("params/")}
        assert {name: a.shape for name, a in params.items()} == CANONICAL
        for moment in ("mu", "nu"):
            moments = {p.split(f"{moment}/")[1]: a.shape for p, a in found.items() if f"/{moment}/" in p}
            assert moments == CANONICAL
        assert all(a.dtype == np.float32 for a in params.values())
        first = first or found
        assert found.keys() == first.keys()
        assert all(np.array_equal(found[name], first[name]) for name in found), sizes


def test_large_layers_are_stored_one_by_one(make_trainer, monkeypatch):
    """So one of them is read without the others; small ones are not worth a file's entry each."""
    layer = 4 * 36 * 48 // 2  # bytes of a layer of an MLP's matrix on one of two devices
    for largest, rows in ((layer, 1), (layer + 1, 2)):
        monkeypatch.setattr(manager, "LARGE_LAYER", largest)
        item = save(make_trainer(f"run{rows}", tensor=2)) / "state"
        store = {"driver": "ocdbt", "base": f"file://{item}/"}

        def chunk(name, store=store):
            spec = {"driver": "zarr", "kvstore": store | {"path": f"{name}/"}}
            return tensorstore.open(spec).result().chunk_layout.read_chunk.shape

        for name in ("params.blocks.dense.mlp.up", "optimizer.0.mu.blocks.dense.mlp.up"):
            assert chunk(name) == (rows, 36, 24)
        assert chunk("params.head") == (36, 64)


def test_layer_norms_biases_positions_and_ties_have_their_names(make_trainer):
    options = "norm=layernorm position=learned activation=gelu attention_bias=true mlp_bias=true qk_norm=true"
    overrides = [f"model.{option}" for option in (*options.split(), "tie_embeddings=true")]
    found = read(save(make_trainer("run", *overrides)))
    names = {path.removeprefix("params/"): a.shape for path, a in found.items() if path.startswith("params/")}
    biases = {"norm": 36, "query": (4, 8), "key": (2, 8), "value": (2, 8), "output": 36}
    added = {f"attention.{name}_bias": (2, *np.atleast_1d(shape)) for name, shape in biases.items()}
    added |= {"mlp.norm_bias": (2, 36), "mlp.up_bias": (2, 48), "mlp.down_bias": (2, 36)}
    added |= {"attention.query_norm": (2, 8), "attention.key_norm": (2, 8)}
    expected = {n: s for n, s in CANONICAL.items() if n != "head" and not n.endswith("mlp.gate")}
    expected |= {f"blocks.dense.{name}": shape for name, shape in added.items()}
    assert names == expected | {"embedding.positions": (16, 36), "final_norm_bias": (36,)}


def test_step_samples_and_seed_are_in_the_checkpoint(make_trainer):
    trainer = make_trainer("run", "run.seed=77", *ONE_LAYER)
    assert trainer.run() == 0
    text = (trainer.checkpoints.directory / "2" / "description" / "metadata").read_text()
    description = json.loads(text)
    assert (description["step"], description["samples_consumed"]) == (2, 16)
    assert description["run"]["seed"] == 77
    # What a resumed run must have again says nothing of the mesh: any mesh may go on.
    assert description.pop("saved_on") == {"mesh": {}, "devices": 1, "processes": 1}
    assert "mesh" not in json.dumps(description) and "process" not in json.dumps(description)
    assert read(trainer.checkpoints.directory / "2")["step"] == 2


def test_every_mesh_restores_the_checkpoint_of_another_bit_for_bit(make_trainer):
    """Of a mesh that pads: on disk, it is like that of any mesh."""
    trainer, random = make_trainer("run", fsdp=8), np.random.default_rng(1)
    placements = trainer.program.placements

    def moved(arrays):
        """Random values in the places that are no padding."""
        found = {}
        for name, array in arrays.items():
            values, shape = np.zeros(array.shape, array.dtype), placements[name].shape
            values[tuple(slice(size) for size in shape)] = random.standard_normal(shape)
            found[name] = jax.device_put(values, array.sharding)
        return found

    state, adam = trainer.state, trainer.state.optimizer.slots["adamw"]
    adam = adam | {name: moved(adam[name]) for name in ("mu", "nu")}
    optimizer, step = OptimizerState(None, {"adamw": adam}), jax.device_put(np.int32(2), state.step.sharding)
    trainer.state = replace(state, params=moved(state.params), optimizer=optimizer, step=step)
    save(trainer, step=2)
    saved = canonical(trainer)
    for sizes in MESHES:
        restored = make_trainer("run", **sizes)
        assert restored.step == 2 and int(restored.state.step) == 2
        for a, b in zip(canonical(restored), saved, strict=True):
            np.testing.assert_array_equal(a, b)
        for name, placement in restored.program.placements.items():
            array = np.asarray(restored.state.params[name])
            assert array.shape == placement.stored_shape
            unpadded = array[tuple(slice(size) for size in placement.shape)]
            assert np.count_nonzero(array) == np.count_nonzero(unpadded)  # the padding is zero


@pytest.mark.long
def test_weights_come_from_a_run_or_from_one_checkpoint(make_trainer, tmp_path):
    source = make_trainer("source", "run.steps=3", "run.checkpoint_interval=1", "checkpoint.keep=3", fsdp=8)
    assert source.run() == 0
    for given, step in ((tmp_path / "source", 3), (tmp_path / "source" / "checkpoints" / "1", 1)):
        trainer = make_trainer(f"from{step}", f"checkpoint.init_from={given}", tensor=2)
        weights = read(source.checkpoints.directory / str(step))
        found = canonical(trainer)
        for name, array in zip(CANONICAL, found, strict=False):
            np.testing.assert_array_equal(array, weights[f"params/{name}"])
        assert not any(a.any() for a in found[len(CANONICAL) :])  # weights only: the moments start anew
        assert trainer.step == int(trainer.state.step) == 0


@pytest.mark.parametrize("value", [pytest.param(np.nan, marks=pytest.mark.long), -np.inf])
def test_weights_that_are_not_finite_or_of_another_shape_are_refused_by_name(make_trainer, tmp_path, value):
    source = make_trainer("source", fsdp=8)
    params = source.state.params
    bad = {"head": params["head"].at[3, 5].set(value), "blocks.dense.mlp.up": params["blocks.dense.mlp.up"] + value}
    source.state = replace(source.state, params=params | bad)
    checkpoint = save(source)
    sentence = rf"checkpoint.init_from={tmp_path / 'source'} .*: blocks.dense.mlp.up, head has NaN or Inf: give weights"
    for mesh in ({"tensor": 2, "fsdp": 2}, {}):
        with pytest.raises(InputError, match=sentence):
            make_trainer("run", f"checkpoint.init_from={tmp_path / 'source'}", **mesh)
    (tmp_path / "source/config.yaml").write_text(source.config.to_yaml())
    with pytest.raises(InputError, match=r"run=.*source: blocks.dense.mlp.up, head has NaN or Inf: give weights"):
        megajax.load_run(tmp_path / "source")
    base = {"driver": "file", "path": f"{checkpoint / 'state'}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
    header = json.loads(store.read("params.final_norm/.zarray").result().value)
    store.write("params.final_norm/.zarray", json.dumps(header | {"shape": [40]})).result()
    for record in checkpoint.glob("checksums.json*"):
        record.unlink()
    problem = r"/0 is damaged \(params.final_norm has shape \[40\] instead of \[36\]\): name another run"
    with pytest.raises(InputError, match=problem):
        make_trainer("run", f"checkpoint.init_from={tmp_path / 'source'}")


def test_weights_come_from_a_run_whose_name_is_a_number(make_trainer, tmp_path):
    save(make_trainer("2024", "run.seed=3"))
    trainer = make_trainer("run", f"checkpoint.init_from={tmp_path / '2024'}")
    weights = read(tmp_path / "2024" / "checkpoints" / "0")
    np.testing.assert_array_equal(trainer.state.params["head"], weights["params/head"])
    # Bits that no format checks: only the checksum knows them.
    (described,) = (tmp_path / "2024/checkpoints/0/description").glob("metadata")
    described.write_bytes(described.read_bytes() + b" ")
    with pytest.raises(InputError, match=r"2024 is damaged|/0 is damaged \(description/metadata has .* bytes instead"):
        make_trainer("run", f"checkpoint.init_from={tmp_path / '2024'}")


def test_a_run_goes_on_from_its_own_checkpoint_rather_than_from_init_from(make_trainer, tmp_path):
    save(make_trainer("source", "run.seed=3", *ONE_LAYER))
    own = make_trainer("run", f"checkpoint.init_from={tmp_path / 'source'}", "run.seed=77", *ONE_LAYER)
    assert own.run() == 0
    again = make_trainer("run", f"checkpoint.init_from={tmp_path / 'source'}", "run.seed=77", *ONE_LAYER)
    assert again.step == 2
    jax.tree.map(np.testing.assert_array_equal, again.state, own.state)


def files(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_reading_weights_leaves_the_other_run_as_it_is(make_trainer, tmp_path):
    """It may be training and saving right now."""
    save(make_trainer("source"))
    unfinished = tmp_path / "source" / "checkpoints" / "5.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "source" / "checkpoints" / "0", unfinished)
    before = files(tmp_path / "source")
    make_trainer("run", f"checkpoint.init_from={tmp_path / 'source'}")
    assert files(tmp_path / "source") == before


@pytest.mark.parametrize(
    "change",
    "model.num_layers=4 model.hidden_size=40 model.tie_embeddings=true model.vocab_size=60 model.vocab_size=71".split(),
)
def test_a_checkpoint_of_another_model_is_refused(make_trainer, tmp_path, change):
    save(make_trainer("run"))
    before = files(tmp_path / "run")
    key, value = change.split("=")
    for overrides in ((), (f"checkpoint.init_from={tmp_path / 'run'}",)):
        with pytest.raises(InputError) as caught:
            make_trainer("other" if overrides else "run", change, *overrides)
        sentence, *lines = str(caught.value).splitlines()
        assert str(tmp_path / "run") in sentence
        assert [line for line in lines if line.startswith(f"  {key}=") and f", but this run has {value}" in line]
        export = f"hf export {tmp_path / 'run'} HF_FOLDER writes"  # a folder that can grow (docs/huggingface.md)
        assert (export in sentence) == (bool(overrides) and change == "model.vocab_size=71")
    assert files(tmp_path / "run") == before


def test_init_from_what_is_no_run_is_refused_in_one_sentence(make_trainer, tmp_path):
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    save(make_trainer("run"))
    for given in ("nowhere", "empty", "run/checkpoints/9"):
        with pytest.raises(InputError, match=f"checkpoint.init_from={tmp_path / given}"):
            make_trainer("other", f"checkpoint.init_from={tmp_path / given}")


def tear(checkpoint: Path) -> None:
    """Reduce a checkpoint to the files of a killed process: no array data, no mark of completion."""
    for path in [*checkpoint.rglob("d"), *checkpoint.rglob("ocdbt.process_0")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in [*checkpoint.rglob("commit_success.txt"), *checkpoint.glob("_CHECKPOINT_METADATA")]:
        path.unlink()


@pytest.mark.long
def test_an_interrupted_save_leaves_the_last_good_checkpoint_usable(make_trainer):
    whole = make_trainer("whole", "run.steps=4", "schedule.decay_steps=4")
    assert whole.run() == 0
    trainer = make_trainer("run", "run.steps=3", "run.checkpoint_interval=2", "schedule.decay_steps=4")
    assert trainer.run() == 0
    directory = trainer.checkpoints.directory
    (directory / "3").rename(directory / "3.orbax-checkpoint-tmp")
    tear(directory / "3.orbax-checkpoint-tmp")

    again = make_trainer("run", "run.steps=4", "run.checkpoint_interval=1", "schedule.decay_steps=4")
    assert again.step == 2
    assert again.run() == 0
    assert sorted(entry.name for entry in directory.iterdir()) == ["3", "4"]
    for a, b in zip(canonical(again), canonical(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.smoke
def test_a_checkpoint_from_before_a_model_key_existed_has_its_default():
    def describe(**keys):
        return {"model": describe_model(ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, **keys))}

    old = describe()
    del old["model"]["qk_norm"]
    compare_descriptions(old, describe(), "It", ("model",), "name another")
    with pytest.raises(InputError, match="or name another.\n  model.qk_norm=false, but this run has true"):
        compare_descriptions(old, describe(qk_norm=True), "It", ("model",), "name another")
    experts = describe(num_experts=2)
    del experts["model"]["router.logit_bias"]
    compare_descriptions(experts, describe(num_experts=2), "It", ("model",), "name another")
    scaling = {"factor": 8.0}
    older = describe(rope_scaling=scaling)
    for key in ("beta_fast", "beta_slow", "attention_factor", "truncate"):  # of YaRN, which came later
        del older["model"]["rope_scaling"][key]
    compare_descriptions(older, describe(rope_scaling=scaling), "It", ("model",), "name another")


def test_training_waits_for_the_copy_to_the_host_and_for_the_result(tmp_path, monkeypatch):
    """Both times are measured around the calls, of a save that has ended when its result is asked for, and before."""
    checkpoints = manager.Checkpoints(tmp_path, keep=1, keep_every=None)
    begin = time.perf_counter()
    checkpoints.save(1, {"params": {"w": jax.numpy.zeros(4)}}, {})
    copying = time.perf_counter() - begin
    while checkpoints.saving is not None:
        time.sleep(0.01)
    begin = time.perf_counter()
    outcome = checkpoints.outcome()
    asking = time.perf_counter() - begin
    assert outcome is not None and outcome.error is None
    assert asking < outcome.waited <= copying + asking and outcome.unverified is None
    monkeypatch.setattr(manager.checksums, "compute", lambda *_: time.sleep(0.2) or json.loads("{"))
    checkpoints.save(2, {"params": {"w": jax.numpy.zeros(4)}}, {})
    outcome = checkpoints.outcome(wait=True)
    assert outcome is not None and 0.2 <= outcome.waited <= outcome.seconds + 0.1
    assert outcome is not None and outcome.error is None and "line 1 column 2" in str(outcome.unverified)
    checkpoints.close()


@pytest.mark.parametrize("code", ["ENOSPC", "EFBIG", "EDQUOT", "EACCES", "EROFS"])
def test_the_reason_of_a_failed_save_is_the_systems_text_alone(code):
    text = os.strerror(getattr(errno, code))
    assert manager.reason(OSError(getattr(errno, code), text, "/runs/7/checkpoints/100/d/0")) == text
    assert (
        manager.reason(ValueError(f"FAILED_PRECONDITION: Failed to write\n /runs: {text} [source locations=...]"))
        == text
    )
