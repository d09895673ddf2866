"""`import megajax`: the parts one by one, or a Trainer, as in a notebook."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import megajax
from megajax.config.checks import check_mesh
from megajax.data.indexed import IndexedWriter
from megajax.model import bind

CONFIG = """
run: {steps: 4, log_interval: 1, eval_steps: 2}
model: {num_layers: 1, hidden_size: 16, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 32, vocab_size: 50,
        vocab_multiple: 64, init_std: 0.1}
batch: {global_size: 8, sequence_length: 16}
mesh: {data: 2, tensor: 2}
precision: {compute: float32}
data: {split: "6,4,0"}
logging: {tensorboard: false}
"""


# Tests with these settings share a compiled step.
FAST = ("schedule.kind=constant", "schedule.learning_rate=1e-2", "model.block_pattern=[mlp]")


@pytest.fixture
def load(tmp_path):
    """(overrides...) → a config of a tiny model on tiny data."""
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    random = np.random.default_rng(0)
    with IndexedWriter(tmp_path / "tokens", np.uint16) as writer:
        for _ in range(20):
            writer.add_document(random.integers(0, 50, 40))
    return lambda *overrides: megajax.load_config(
        tmp_path / "tiny.yaml",
        [f"data.train={tmp_path / 'tokens'}", f"run.dir={tmp_path / 'run'}", *overrides],
    )


@pytest.mark.long
@pytest.mark.smoke
def test_importing_it_imports_no_jax():
    code = (
        "import sys, megajax, megajax.config, megajax.errors, megajax.runtime, megajax.data, megajax.data.loader\n"
        "import megajax.commands, megajax.train, megajax.generate, megajax.tools.bench\n"
        "assert 'jax' not in sys.modules, 'jax'\n"
        "assert all(hasattr(megajax, name) for name in megajax.__all__)\n"
        "assert 'jax' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_public_name_is_the_one_that_type_checkers_see():
    (typed,) = (node for node in ast.parse(Path(megajax.__file__).read_text()).body if isinstance(node, ast.If))
    modules = {name.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert {*megajax.__all__} == {*modules, "ConfigError", "InputError", "UserError", "__version__"}
    for name, module in modules.items():
        assert getattr(megajax, name) is getattr(importlib.import_module(module or ""), name), name


def test_a_name_that_it_has_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="megajax.*Trayner"):
        _ = megajax.Trayner


def test_mesh_model_state_and_step_one_by_one(load):
    config = load(*FAST)
    assert config.schedule.learning_rate == 1e-2
    mesh = megajax.build_mesh(check_mesh(config, 4), jax.devices()[:4])
    assert mesh.axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert mesh.devices.shape == (1, 2, 1, 1, 1, 2)
    assert [d.id for d in mesh.devices.flat] == [0, 1, 2, 3]  # neighbours on tensor are neighbours

    program = megajax.TrainProgram.build(config, mesh)
    state = program.init_state()
    assert state.params["embedding.tokens"].sharding.shard_shape((64, 16)) == (32, 8)
    fields = {name: np.zeros(program.plan.batch_shape, s.dtype) for name, s in program.abstract_batch.items()}
    fields["loss_mask"] += 1
    fields["targets"] += 3
    batch = jax.device_put(fields, program.batch_sharding)
    losses = []
    for _ in range(5):
        state, metrics = program.train_step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 0.1


def test_a_trainer_step_by_step_does_what_its_run_does(load, tmp_path, capsys):
    whole = megajax.Trainer(load(*FAST, f"run.dir={tmp_path / 'whole'}"), jax.devices()[:4])
    assert whole.run() == 0
    assert "loss" in capsys.readouterr().out

    trainer = megajax.Trainer(load(*FAST), jax.devices()[:4])
    assert trainer.step == 0
    for step in (1, 2):
        metrics = trainer.train_step(trainer.next_batch())
        assert trainer.step == step and np.isfinite(metrics["loss"])
    trainer.save()
    trainer.checkpoints.wait()
    weights = megajax.load_weights(tmp_path / "run")
    assert set(weights) == set(trainer.state.params)
    for name, array in trainer.state.params.items():
        np.testing.assert_array_equal(weights[name], array)

    again = megajax.Trainer(load(*FAST), jax.devices()[:4])
    assert again.step == 2
    assert again.run() == 0
    for name, array in again.state.params.items():
        np.testing.assert_array_equal(array, whole.state.params[name])


@pytest.mark.long
def test_an_evaluation_is_the_mean_loss_of_the_model_over_the_first_batches(load):
    trainer = megajax.Trainer(load("mesh.data=1", "mesh.tensor=1"), jax.devices()[:1])
    model = bind(trainer.program.model, trainer.state.params)
    total, count = 0.0, 0
    for index in range(2 * 8):
        sample = trainer.data["valid"][index]
        logits = np.asarray(model(sample[None, :-1]), np.float64)[0]
        log_normaliser = np.log(np.exp(logits).sum(-1))
        total += (log_normaliser - logits[np.arange(16), sample[1:]]).sum()
        count += 16
    assert trainer.evaluate() == {"loss": pytest.approx(total / count, rel=1e-5)}
    assert trainer.evaluate("valid") == trainer.evaluate()


def test_a_bad_override_raises_what_a_notebook_can_catch(load):
    with pytest.raises(megajax.ConfigError, match="mesh.tensor=3"):
        load("mesh.tensor=3")
    with pytest.raises(megajax.UserError, match="data.train"):
        megajax.Trainer(load("data.train=nowhere"), jax.devices()[:4])


def test_other_arguments_than_a_config_a_mesh_and_devices_are_sentences(load):
    config, devices = load(), jax.devices()
    sizes = check_mesh(config, 4)
    for call, sentence in (
        (lambda: megajax.Trainer("x.yaml"), "x.yaml is of the type str, not a config: give megajax.load_config"),
        (lambda: megajax.Trainer({"run": {}}, flags=[]), "is of the type dict, not a config"),
        (lambda: megajax.Trainer(config, 4), "devices=4 is no list of different devices: give one"),
        (lambda: megajax.Trainer(config, devices[0]), "devices=.* is no list of different devices"),
        (lambda: megajax.Trainer(config, []), r"devices=\[\] is no list"),
        (lambda: megajax.Trainer(config, [*devices[:2], *devices[:2]]), "is no list of different devices"),
        (lambda: check_mesh("x.yaml", 4), "x.yaml is of the type str, not a config"),
        (lambda: check_mesh(config, devices), "num_devices=.* is no number: give one"),
        (lambda: megajax.build_mesh(config), "sizes=.* are no sizes of axes: give config.checks.check_mesh"),
        (lambda: megajax.build_mesh({"dat": 8}), "sizes=.*dat.* are no sizes of axes"),
        (lambda: megajax.build_mesh(sizes, devices[:2]), r"4 devices, not 2: .*jax.devices\(\)\[:4\]"),
        (lambda: megajax.TrainProgram.build("x.yaml", megajax.build_mesh(sizes, devices[:4])), "not a config"),
        (lambda: megajax.TrainProgram.build(config, sizes), "mesh=.* is no mesh of all axes: give megajax.build_mesh"),
        (lambda: megajax.TrainProgram.build(config, jax.make_mesh((8,), ("data",))), "is no mesh of all axes"),
        (lambda: megajax.TrainProgram.build(config, megajax.build_mesh({"data": 8})), "mesh.data=.* has the size 8"),
        (lambda: megajax.load_config({"run": {}}), "is of the type dict, not a path"),
        (
            lambda: megajax.load_config("x.yaml", "run.steps=3"),
            r'run.steps=3 is no list .*\["section.key=value", ...\]',
        ),
        (lambda: megajax.load_config("x.yaml", {"run.steps": 3}), "is no list of overrides"),
    ):
        with pytest.raises(megajax.UserError, match=sentence):
            call()


def test_what_makes_and_what_gets_batches_is_checked(load):
    config = load(*FAST, "data={kind: synthetic}", "run.eval_steps=0")
    for batch_of in (lambda: {}, {"tokens": []}):
        with pytest.raises(megajax.InputError, match=r"batch_of=.* is no function .*: give one .* batch_of\(samples\)"):
            megajax.Trainer(config, jax.devices()[:4], batch_of=batch_of)
    trainer = megajax.Trainer(config, jax.devices()[:4], batch_of=lambda samples: None)
    with pytest.raises(megajax.InputError, match="batch_of is of the type NoneType: give a dictionary"):
        trainer.next_batch()
    with pytest.raises(megajax.InputError, match="the batch is of the type NoneType: give a dictionary"):
        trainer.train_step(None)
    fields = {name: np.zeros(s.shape, s.dtype) for name, s in trainer.program.abstract_batch.items()}
    with pytest.raises(megajax.InputError, match=r"tokens of the shape \[.*\], not \[microbatches, .*to_global"):
        trainer.train_step({name: field[0] for name, field in fields.items()})
    with pytest.raises(megajax.InputError, match="the batch has 2 microbatches, but batch.num_microbatches=1: give"):
        trainer.train_step({name: np.concatenate([field, field]) for name, field in fields.items()})
