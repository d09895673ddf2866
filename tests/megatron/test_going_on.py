"""Runs go on with trainings that megatron-core 0.19.2 began. `megatron_training.zip` has checkpoints of step 10, and
the losses of its own steps 11 to 15.

llama: grouped queries; gpt: LayerNorm, biases, tied embeddings, written without the distributed optimizer, so with a
`common_step`; mixtral: experts with balancing losses; deepseek: latent attention, a dense layer, groups of experts, a
prediction module; bfloat16: llama with FP32 master weights; fragments: llama's training by four data-parallel ranks of
megatron-core 0.12.2 in the format `fully_sharded_model_space`. The rate falls from 0.01 to 0.001 in 30 steps.
"""

import json
import math
import os
import pickle
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from megatron_files import stored, unpacked_legacy
from single_device import make_config

from megajax.config import ModelConfig
from megajax.config.checks import check_mesh
from megajax.data.indexed import IndexedWriter
from megajax.errors import ConfigError, InputError
from megajax.megatron.convert import open_training
from megajax.megatron.distributed import Chunk, MegatronTensors, StoredTensor, in_model_space
from megajax.megatron.resume_point import saved_training
from megajax.megatron.torch_files import Instance, Named, save, tensor
from megajax.mesh import build_mesh
from megajax.model import Transformer, parameters
from megajax.training import continuing
from megajax.training.continuing import ContinuedTraining
from megajax.training.loop import Trainer
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

ARCHIVE = Path(__file__).parents[1] / "data_files/megatron_training.zip"
TOLERANCE = 2e-6  # of a loss; FP32 sums in another order
SCHEDULE = {
    "kind": "linear",
    "learning_rate": 1e-2,
    "min_learning_rate": 1e-3,
    "warmup_steps": 0,
    "decay_steps": 30,
    "delay_steps": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoints, by name, and the `corpus` of their trainings."""
    folder = tmp_path_factory.mktemp("megatron")
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(folder)
    following = (np.arange(32) * 29 + 7) % 32
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        for document in range(40):
            tokens = [document * 5 % 32]
            for i in range(1, 20 + document * 7 % 23):
                tokens.append(int(following[tokens[-1]]) if (document + i) % 5 else document * i % 32)
            writer.add_document(tokens)
    return folder


@pytest.fixture
def configure(folder, tmp_path):
    def configure(name, mesh=None, copy=False, **changes):
        """A config that goes on with a checkpoint, or with a copy of it in `tmp_path`."""
        if copy:
            shutil.copytree(folder / name, tmp_path / name)
        sections = {
            "run": {"steps": 15, "dir": str(tmp_path / "run"), "eval_steps": 0, "log_interval": 1},
            "batch": {"global_size": 8, "num_microbatches": 4, "sequence_length": 16},
            "schedule": SCHEDULE,
            "data": {
                "kind": "indexed",
                "train": str(folder / "corpus"),
                "order": "megatron",
                "train_samples": 240,
                "index_cache": str(folder / "cache"),
            },
            "checkpoint": {"init_from": str((tmp_path if copy else folder) / name), "init_state": "all"},
            "logging": {"tensorboard": False},
        }
        for section, keys in changes.items():
            sections[section] = {**sections.get(section, {}), **keys}
        return make_config(about(folder)[name]["model"], mesh, **sections)

    return configure


def about(folder) -> dict:
    return json.loads((folder / "about.json").read_text())


def continued(config) -> tuple[StateSaver, ContinuedTraining]:
    count = config.mesh.pipeline * config.mesh.fsdp
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    saver = StateSaver(program)
    training = ContinuedTraining.of(saver)
    assert training is not None
    return saver, training


def trainer(config, devices=1) -> Trainer:
    return Trainer(config, jax.devices()[:devices])


def state_of(config):
    saver, training = continued(config)
    state = saver.with_weights(saver.program.random_state(params=False), training.weights())
    return saver.program, training.into(state)


@pytest.mark.parametrize(
    ("name", "mesh", "microbatches"),
    [
        pytest.param("gpt", {"context": 2, "tensor": 2}, 1, marks=pytest.mark.long),
        ("mixtral", {"expert": 2}, 4),  # balancing losses are of a microbatch
        pytest.param("deepseek", {"expert": 2}, 1, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_next_losses_are_those_of_megatron(configure, folder, name, mesh, microbatches):
    config = configure(name, mesh, batch={"num_microbatches": microbatches})
    run = trainer(config, math.prod(mesh.values()))
    losses = [float(run.train_step(run.next_batch())["loss"]) for _ in range(5)]
    run.close()
    np.testing.assert_allclose(losses, about(folder)[name]["losses"], rtol=0, atol=TOLERANCE)


@pytest.mark.long
def test_a_run_that_went_on_resumes_from_its_own_checkpoints(configure, folder, tmp_path, capsys):
    mesh, source = {"pipeline": 2, "fsdp": 2, "tensor": 2}, tmp_path / "llama"
    first = configure("llama", mesh, copy=True, run={"steps": 12})
    assert Trainer(first).run() == 0
    assert f"going on after step 10 of {source}/iter_0000010, with 80 samples read" in capsys.readouterr().out
    shutil.rmtree(source)
    assert Trainer(configure("llama", mesh, checkpoint={"init_from": str(source)})).run() == 0
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert [*found] == [11, 12, 13, 14, 15]
    expected = about(folder)["llama"]["losses"]
    np.testing.assert_allclose([*found.values()], expected, rtol=0, atol=TOLERANCE)


def test_master_weights_are_those_in_fp32(configure):
    saver, training = continued(configure("bfloat16"))
    masters, _ = training.weights()
    rounded, _ = saver.restore_weights(str(training.saved.folder))
    masters, rounded = jax.device_get((dict(masters), dict(rounded)))
    for name, master in masters.items():
        np.testing.assert_array_equal(master.astype(jnp.bfloat16), rounded[name].astype(jnp.bfloat16))
    assert not np.array_equal(masters["blocks.dense.mlp.up"], rounded["blocks.dense.mlp.up"])


def test_a_weight_without_its_master_is_named(configure, tmp_path):
    config, name = configure("bfloat16", copy=True), "decoder.final_layernorm.weight"
    metadata = tmp_path / "bfloat16/iter_0000010/.metadata"
    state, other = (f"optimizer.{word}.param.{name}".encode() for word in ("state", "other"))
    assert state in metadata.read_bytes()
    metadata.write_bytes(metadata.read_bytes().replace(state, other))
    with pytest.raises(InputError, match=f"has {name} in less than FP32, and no master weight of it: set .*=position"):
        continued(config)[1].weights()


def test_fragments_of_the_optimizers_state_are_put_together(configure):
    """Some end in the middle of a matrix. The run was in FP32, so its master weights are its weights.

    The moments of one device are those of another checkpoint's whole tensors, on two stages.
    """
    config = configure("fragments")
    saver, training = continued(config)
    masters, _ = training.weights()
    weights, _ = saver.restore_weights(config.checkpoint.init_from)
    for name, master in masters.items():
        np.testing.assert_array_equal(master, weights[name], err_msg=name)
    (_, found), (_, whole) = state_of(config), state_of(configure("llama", {"pipeline": 2}))
    for slot in ("mu", "nu"):
        for name, expected in whole.optimizer.slots["adamw"][slot].items():
            x = found.optimizer.slots["adamw"][slot][name]
            np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max(), err_msg=name)


def test_a_block_of_fragments_is_that_of_the_whole_tensor(folder):
    """Some blocks begin within a chunk, as those of a device do that holds a part of a matrix; some have gaps."""
    model = ModelConfig.model_validate(about(folder)["fragments"]["model"])
    with MegatronTensors(next((folder / "fragments").glob("iter_*")), model) as tensors:
        moments = tensors.of_state("exp_avg")
        for name in moments.files:
            shape = moments.shape(name)
            whole = moments.read(name, [slice(0, size) for size in shape])
            for step in (1, 2):
                blocks = [slice(size // 3, size, step) for size in shape]
                np.testing.assert_array_equal(moments.read(name, blocks), whole[tuple(blocks)], err_msg=name)
        part = moments._parts[name]
        moments._parts[name] = replace(part, stored=replace(part.stored, chunks=part.stored.chunks[1:]))
        with pytest.raises(InputError, match=f"chunks of .*{name} are missing: copy all of its .distcp files"):
            moments.read(name, [slice(0, size) for size in moments.shape(name)])


@pytest.mark.long
@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_other_forms_of_moments_and_weights_hold_the_same_numbers(configure, form):
    mesh = {"pipeline": 2, "fsdp": 2}
    _, exact = state_of(configure("llama", mesh))
    small = {"state": form, "master": "split", "offload": 0.5}
    program, state = state_of(configure("llama", mesh, optimizer=small, precision={"compute": "bfloat16"}))
    slots = program.update.slots
    found = slots.each(lambda array, kept: array.decode(jax.device_get(kept)), state.optimizer.slots)["adamw"]
    expected = exact.optimizer.slots["adamw"]
    assert int(found["count"]) == int(expected["count"]) == int(state.optimizer.rounded) == 10
    for name, master in jax.jit(lambda state: state.masters)(jax.device_put(state)).items():
        np.testing.assert_array_equal(master, exact.params[name])
        for slot, share in (("mu", 2**-6), ("nu", 2**-3)):
            largest = np.abs(expected[slot][name]).max()
            assert largest > 0
            np.testing.assert_allclose(found[slot][name], expected[slot][name], rtol=share, atol=share * largest)


def test_a_position_is_taken_without_the_optimizer(configure):
    going_on = trainer(configure("llama", checkpoint={"init_state": "position"}))
    new = trainer(configure("llama", checkpoint={"init_state": "weights"}))
    assert (going_on.step, int(going_on.state.step), new.step) == (10, 10, 0)
    assert all(not np.any(np.asarray(x)) for x in jax.tree.leaves(going_on.state.optimizer))
    for _ in range(10):
        new.next_batch()
    np.testing.assert_array_equal(going_on.next_batch()["tokens"], new.next_batch()["tokens"])
    going_on.close()
    new.close()


def test_another_size_of_the_batch_goes_on_at_the_consumed_sample(configure):
    """Megatron's order does not depend on the size; `data.train_samples` is the same."""
    larger, usual = (trainer(configure("llama", batch={"global_size": size})) for size in (16, 8))
    rows = [np.asarray(each.next_batch()["tokens"]).reshape(-1, 16) for each in (larger, usual)]
    np.testing.assert_array_equal(rows[0][:8], rows[1])
    assert (len(rows[0]), larger.sizes.samples_before(11)) == (16, 96)
    larger.close()
    usual.close()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"optimizer": {"kind": "muon"}}, ["optimizer.kind=muon", "checkpoint.init_state=position"]),
        ({"optimizer": {"kind": "lion"}}, ["has exp_avg, exp_avg_sq", "optimizer.kind=lion", "keeps exp_avg:"]),
        ({"run": {"seed": 7}}, ["run.seed=1234", "7", "checkpoint.allow_changes", "checkpoint.init_state=weights"]),
        ({"batch": {"sequence_length": 8}}, ["batch.sequence_length=16", "8"]),
        ({"data": {"train_samples": 320}}, ["data.train_samples=240", "320"]),
        ({"data": {"order": "shuffled", "train_samples": None}}, ["data.order=megatron", "shuffled"]),
        # 80 samples in the first 10 steps, and 4 in each of the next 50
        (
            {"batch": {"global_size": 4}, "run": {"steps": 60}},
            ["data.train_samples=240", "280 samples", "run.steps=60"],
        ),
        ({"model": {"ffn_hidden_size": 16}}, ["linear_fc2.weight", "[8, 12]", "section model"]),
    ],
    ids=str,
)
def test_a_training_that_would_not_go_on_is_a_sentence(configure, changes, parts):
    model = changes.pop("model", None)
    config = configure("llama", **changes)
    if model:
        config = config.model_copy(update={"model": config.model.model_copy(update=model)})
    with pytest.raises(InputError) as caught:
        continued(config)[1].weights()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_allowed_changes_are_let_through(configure):
    config = configure("llama", run={"seed": 7}, checkpoint={"allow_changes": ["run.seed"]})
    assert [each.key for each in continued(config)[1].allowed] == ["run.seed"]


def test_a_model_with_experts_goes_on_at_the_position_of_a_dense_one(configure):
    dense = configure("llama", checkpoint={"init_state": "position"})
    model = dense.model.model_copy(update={"num_experts": 2, "expert_ffn_hidden_size": dense.model.ffn_hidden_size})
    checkpoint = dense.checkpoint.model_copy(update={"upcycle": True})
    (_, one), (_, other) = map(continued, (dense, dense.model_copy(update={"model": model, "checkpoint": checkpoint})))
    assert (other.position.step, other.position.samples) == (10, 80)
    mlp, experts = one.weights()[0]["blocks.dense.mlp.up"], other.weights()[0]["blocks.moe.moe.up"]
    np.testing.assert_array_equal(experts, np.stack([mlp, mlp], axis=1))
    with pytest.raises(InputError, match=r"llama.* has no experts, but .*num_experts=2: set checkpoint\.upcycle=true"):
        continued(configure("llama").model_copy(update={"model": model}))[1].weights()


def test_only_checkpoints_of_megatron_have_a_training_to_go_on_with(configure, tmp_path):
    with pytest.raises(InputError, match="init_from=.* is no checkpoint of Megatron-Core.*init_state"):
        continued(configure("llama", checkpoint={"init_from": str(tmp_path)}))
    with pytest.raises(InputError, match="init_from=.* does not exist"):
        continued(configure("llama", checkpoint={"init_from": str(tmp_path / "none")}))
    with pytest.raises(ConfigError, match=r"lora.rank=2 .*checkpoint.init_state=all.*init_state=weights"):
        configure("llama", lora={"rank": 2})


def test_another_learning_rate_is_a_warning(configure):
    with pytest.warns(UserWarning, match="learning rate of step 11 is 0.0023.*but 0.007 in .*section schedule"):
        state_of(configure("llama", schedule={"learning_rate": 0.003}))


def test_an_unknown_rate_and_an_unknown_number_of_samples_are_not_compared(configure, tmp_path):
    config = configure("llama", copy=True, schedule={"learning_rate": 0.003}, checkpoint={"init_state": "position"})
    common(tmp_path / "llama", optimizer=group(lr=None), args={"train_iters": None})
    assert int(state_of(config)[1].step) == 10


# Damaged and hostile checkpoints


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def common(folder: Path, **values) -> None:
    """A `common.pt`, which older checkpoints have instead of the object among the tensors."""
    args = SimpleNamespace(consumed_train_samples=80, seed=1234, seq_length=16, train_iters=30, global_batch_size=8)
    vars(args).update(values.pop("args", {}))
    with zipfile.ZipFile(folder / "iter_0000010/common.pt", "w") as archive:
        archive.writestr("common/data.pkl", pickle.dumps({"args": args, "iteration": 10} | values, protocol=2))
        archive.writestr("common/byteorder", "little")


def group(**values) -> dict:
    return {"optimizer": {"param_groups": [{"lr": 0.007} | values]}}


def test_the_optimizer_counts_its_updates_without_skipped_steps(configure, tmp_path):
    config = configure("llama", copy=True, optimizer={"state": "bfloat16"})
    common(tmp_path / "llama", optimizer=group(step=8))  # two of ten steps were skipped
    _, training = continued(config)
    assert str(training).endswith("80 samples read and its optimizer after 8 updates")
    _, state = state_of(config)
    assert int(state.step) == 10
    assert int(state.optimizer.slots["adamw"]["count"]) == int(state.optimizer.rounded) == 8


def test_numbers_of_a_common_state_may_be_tensors_and_the_rate_that_of_any_group(configure, tmp_path):
    configure("llama", copy=True)
    args = Instance(Named("argparse", "Namespace"), {"consumed_train_samples": 72})
    groups = [{"step": tensor("1", np.array(8.0, np.float32)), "lr": None}, {"lr": 0.007}]
    state = {"args": args, "iteration": tensor("0", np.array(9)), "optimizer": {"param_groups": groups}}
    numbers = {"0": np.array([9]), "1": np.array([8.0], np.float32)}
    with (tmp_path / "llama/iter_0000010/common.pt").open("wb") as file:
        save(file, state, numbers)
    found = saved_training(tmp_path / "llama")
    assert (found.step, found.samples, found.updates, found.rate) == (9, 72, 8, 0.007)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"iteration": 10**40}, "as iteration, so the position"),
        ({"iteration": "ten"}, "ten as iteration"),
        ({"iteration": None}, "no iteration.*checkpoint.init_state=weights"),
        ({"args": {"consumed_train_samples": -8}}, "-8 as consumed_train_samples"),
        ({"args": {"consumed_train_samples": [8]}}, "as consumed_train_samples"),
        ({"args": {"consumed_train_samples": float("nan")}}, "nan as consumed_train_samples"),
        ({"optimizer": {0: group(step=3), 1: group(step=4)}}, "3, 4 updates"),
        ({"optimizer": group(step=[1])}, "as step of the optimizer"),
        ({"args": {"seed": "x"}}, "run.seed=x"),
    ],
    ids=str,
)
def test_a_position_that_is_none_is_a_sentence(configure, tmp_path, values, sentence):
    config = configure("llama", copy=True)
    common(tmp_path / "llama", **values)
    with pytest.raises(InputError, match=sentence) as caught:
        continued(config)
    assert len(str(caught.value)) < 600


def test_the_arrays_of_each_optimizer_have_the_names_of_torch_and_of_megatron():
    """torch.optim.Adam and SGD, and Megatron-LM's Lion, by our names of their slots."""
    adam, sgd, lion = {"mu": "exp_avg", "nu": "exp_avg_sq"}, {"trace": "momentum_buffer"}, {"mu": "exp_avg"}
    assert continuing.STATES == {"adamw": adam, "sgd": sgd, "lion": lion}


def test_the_format_of_one_mesh_is_named_with_the_flag_of_another(configure, tmp_path):
    config = configure("llama", copy=True)
    metadata = tmp_path / "llama/iter_0000010/.metadata"
    metadata.write_bytes(metadata.read_bytes().replace(b"optimizer.state.", b"optimizer.other."))
    with pytest.raises(InputError, match="has no optimizer state|fully_reshardable"):
        continued(config)[1].weights()
    common(tmp_path / "llama", content_metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    with pytest.raises(InputError, match="format dp_reshardable.*--dist-ckpt-optim-fully-reshardable.*=position"):
        continued(config)[1].weights()


@pytest.mark.parametrize(
    ("shape", "sizes", "sentence"),
    [
        ((2, 2, 3, 8), (1, 1, 1, 8), "has the shape .*, its parameter"),  # 3 does not divide 8
        ((2, 1, 1, 63), (1, 1, 1, 63), "has the shape .*, its parameter"),
        ((2, 1, 1, 64), (2, 1, 1, 64), "a chunk of .* has several fragments"),
        ((4, 64), (1, 64), "has the shape .*, its parameter"),
    ],
    ids=str,
)
def test_fragments_that_do_not_fit_the_parameter_are_a_sentence(shape, sizes, sentence):
    parameter = StoredTensor("a", (2, 8, 8), np.dtype("float32"), ())
    chunk = Chunk((0,) * len(shape), sizes, "file", 0, 0)
    state = StoredTensor("optimizer.state.exp_avg.a", shape, np.dtype("float32"), (chunk,))
    with pytest.raises(InputError, match=sentence):
        list(in_model_space([parameter, state], "file"))


def test_the_older_format_has_a_position_only(tmp_path):
    older, model = unpacked_legacy("gqa", tmp_path), ModelConfig.model_validate(stored("gqa")[0])
    assert saved_training(older).step == 7
    shapes = {name: parameter.shape for name, parameter in parameters(Transformer(model)).items()}
    opened = open_training(older, model, shapes, ["exp_avg"], "optimizer.kind=adamw")
    with pytest.raises(InputError, match="no optimizer state that is read: set checkpoint.init_state=position"), opened:
        pass


def test_nothing_in_a_common_state_is_executed(configure, tmp_path):
    config, made = configure("llama", copy=True), tmp_path / "made"
    common(tmp_path / "llama", optimizer=Touch(str(made)), rng_state=Touch(str(made)))
    assert continued(config)[1].saved.updates == 10  # unknown, so those of the steps
    assert not made.exists()


def test_a_damaged_moment_is_a_sentence_before_the_run_directory_has_a_config(configure, tmp_path):
    config = configure("llama", copy=True)
    [file] = (tmp_path / "llama/iter_0000010").glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(InputError, match=r"shorter than .metadata says"):
        state_of(config)
    assert not (tmp_path / "run/config.yaml").exists()
