"""`checkpoint.export_hf`: folders that a run writes while it trains."""

import os
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from trainers import QuickTrainer

import megajax
from megajax.errors import ConfigError, InputError
from megajax.hf import exporting
from megajax.hf.compare import compare


@pytest.fixture
def build(make_config, tmp_path):
    """(overrides..., devices=1) → a Trainer of `tmp_path/run` that writes folders into `tmp_path/hf`."""

    def build(*overrides, devices=1, kind=QuickTrainer):
        paths = (f"run.dir={tmp_path / 'run'}", f"checkpoint.export_hf.dir={tmp_path / 'hf'}")
        config = make_config("data.kind=synthetic", "run.eval_steps=0", "model.block_pattern=null", *paths, *overrides)
        return kind(config, jax.devices()[:devices])

    return build


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("mesh", [{}, {"fsdp": 2, "pipeline": 2}], ids=str)
def test_folders_have_the_weights_of_their_checkpoints(build, tmp_path, capsys, mesh):
    overrides = ["model.num_layers=2", *(f"mesh.{axis}={size}" for axis, size in mesh.items())]
    settings = ("run.steps=5", "run.checkpoint_interval=1", "checkpoint.export_hf.every=2", "checkpoint.keep=5")
    more = ("batch.num_microbatches=2", "checkpoint.save_optimizer=false", "checkpoint.export_hf.dtype=bfloat16")
    trainer = build(*settings, *more, *overrides, devices=4 if mesh else 1)
    assert trainer.run() == 0
    assert names(tmp_path / "hf") == {"step-2", "step-4", "step-5"}
    lines = capsys.readouterr().out.splitlines()
    wrote = [line.split(" (")[0] for line in lines if line.startswith("wrote ")]
    assert wrote == [f"wrote {tmp_path / 'hf' / f'step-{step}'}" for step in (2, 4, 5)]
    for step in (2, 5):
        differences = compare(tmp_path / f"hf/step-{step}", str(tmp_path / f"run/checkpoints/{step}"))
        assert len(differences) == 21 and not any(d.unequal for d in differences)
        assert max(d.absolute for d in differences) > 0  # BF16


def test_with_epochs_the_last_step_has_a_folder_and_services_get_the_number_of_steps(build, tmp_path, monkeypatch):
    """It is known once the data is open."""
    package = Mock()
    package.entities.Param = lambda key, value: (key, value)
    package.MlflowClient().create_run().info.run_id = "r1"
    monkeypatch.setitem(sys.modules, "mlflow", package)
    epochs = ("data.kind=indexed", "run.steps=null", "run.epochs=0.1", "run.checkpoint_interval=0")
    trainer = build(*epochs, "logging.mlflow=http://x")
    assert trainer.run() == 0 and 1 < trainer.step < 50
    assert names(tmp_path / "hf") == {f"step-{trainer.step}"}
    sent = dict(each for call in package.MlflowClient().log_batch.mock_calls for each in call.kwargs.get("params", ()))
    assert sent["run.steps"] == str(trainer.step) and sent["run.epochs"] == "0.1"


def test_training_waits_for_a_folder_only_before_the_next_checkpoint(build, tmp_path, monkeypatch):
    """Its checkpoint must not be deleted before: `checkpoint.keep` is 1."""
    trainer = build("run.steps=6", "run.checkpoint_interval=3", "checkpoint.keep=1")
    export, go_on, seen = exporting.export_step, threading.Event(), []

    def slow(*arguments):
        assert go_on.wait(60)
        seen.append(trainer.step)
        export(*arguments)

    monkeypatch.setattr(exporting, "export_step", slow)
    step = trainer.train_step
    trainer.train_step = lambda batch: (trainer.step == 5 and go_on.set(), step(batch))[1]  # the sixth step
    assert trainer.run() == 0
    assert names(tmp_path / "hf") == {"step-3", "step-6"}
    assert seen[0] >= 5


def test_a_folder_that_fails_is_a_warning(build, tmp_path, monkeypatch, capsys):
    def full(number):
        if "/hf/" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    trainer = build("run.steps=3", "run.checkpoint_interval=2")
    assert trainer.run() == 0
    assert names(tmp_path / "hf") == set()
    folder = tmp_path / "hf" / "step-2"
    expected = (
        f"megajax: warning: {folder} could not be written (No space left on device): free disk space there, or give "
        "another folder; training continues"
    )
    lines = capsys.readouterr().out.splitlines()
    assert expected in lines and expected.replace("step-2", "step-3") in lines
    assert megajax.load_weights(tmp_path / "run/checkpoints/3")


def test_ones_own_loop_gets_folders_and_warnings(build, tmp_path):
    trainer = build("run.steps=2", "run.checkpoint_interval=1")
    (tmp_path / "hf/.step-1.partial-99").mkdir(parents=True)  # of a killed process
    trainer.step = 1
    trainer.save()
    trainer.step = 2
    trainer.save()
    trainer.close()
    assert names(tmp_path / "hf") == {"step-1", "step-2"}
    again = build("run.steps=3", "run.checkpoint_interval=1")
    (tmp_path / "hf/step-3").mkdir()
    (tmp_path / "hf/step-3/mine").touch()
    again.step = 3
    again.save()
    with pytest.warns(UserWarning, match=r"step-3 exists: give a new folder, or remove it\."):
        again.close()
    assert names(tmp_path / "hf/step-3") == {"mine"}


@pytest.mark.smoke
def test_mistakes_are_found_at_the_start(build, make_config, tmp_path):
    with pytest.raises(
        InputError, match=r"^checkpoint.export_hf.dir=.*/hf \(.*: no model_type that megajax writes has .*=30.0 "
    ):
        build("model.logit_softcap=30.0")
    with pytest.raises(ConfigError) as error:
        build("run.checkpoint_interval=20", "checkpoint.export_hf.every=30")
    assert str(error.value) == (
        "checkpoint.export_hf.every=30 is not a multiple of run.checkpoint_interval=20 (the "
        "command line: checkpoint.export_hf.every=30): set run.checkpoint_interval=30, or use a "
        "multiple of 20."
    )
    with pytest.raises(ConfigError, match="run.checkpoint_interval=0 .*: set run.checkpoint_interval=30.$"):
        build("checkpoint.export_hf.every=30")
    with pytest.warns(UserWarning, match="export_hf.every=3 has no effect with checkpoint.export_hf.dir=null"):
        make_config("checkpoint.export_hf.every=3")
    (tmp_path / "file").touch()
    trainer = build("run.steps=1", f"checkpoint.export_hf.dir={tmp_path / 'file' / 'hf'}")
    with pytest.raises(InputError, match="export_hf.dir=.*file/hf .* cannot be written .Not a directory.: choose a"):
        trainer.run()
