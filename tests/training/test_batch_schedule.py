"""Runs whose batch grows: the same steps whether by `batch.schedule` or by a change at a checkpoint, on any mesh."""

import shutil

import jax
import numpy as np
import pytest

from megajax.errors import InputError
from megajax.mesh import build_mesh
from megajax.training.batches import own_batches
from megajax.training.loop import Trainer
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

SMALL, LARGE = ("batch.global_size=4",), ("batch.num_microbatches=2",)  # microbatches of 4; one is no loop
RAMP = (*LARGE, "batch.schedule={0: 4, 150: 8}")  # after 3 steps of 4 x 16 = 64 tokens
COMMON = ("run.log_interval=2", "run.checkpoint_interval=2", "checkpoint.keep=5", "model.num_layers=1")


def test_batches_of_a_program_have_the_samples_of_each_step(make_config):
    def batch_of(samples):
        asked.append(samples.tolist())
        ones = np.ones((len(samples), 16), int)
        return {"tokens": samples[:, None] * ones, "targets": ones.tolist(), "loss_mask": ones, "positions": ones}

    asked: list[list[int]] = []
    config = make_config("data.kind=synthetic", "run.eval_steps=0", "mesh.fsdp=2", *COMMON, *RAMP)
    trainer = Trainer(config, jax.devices()[:2], batch_of=batch_of)
    first = [trainer.next_batch()["tokens"] for _ in range(4)]
    resumed = next(own_batches(trainer.program, batch_of, 3, trainer.sizes))["tokens"]
    expected = [[*range(n, n + size)] for n, size in ((0, 4), (4, 4), (8, 4), (12, 8), (12, 8))]
    assert asked == expected
    assert [np.asarray(tokens)[..., 5].ravel().tolist() for tokens in (*first, resumed)] == expected

    saved = trainer.saver.description(2)
    assert trainer.saver.compare(saved, "c")[1] == []
    with pytest.raises(InputError, match="data.kind.*batch_of.*made by the program"):  # not synthetic tokens in silence
        StateSaver(trainer.program).compare(saved, "c")
    allowing = make_config("data.kind=synthetic", "checkpoint.allow_changes=[data.kind]", *COMMON)
    program = TrainProgram.build(allowing, build_mesh({}, jax.devices()[:1]))
    assert [each.key for each in StateSaver(program).compare(saved, "c")[1]] == ["data.kind"]


@pytest.mark.long
def test_a_growing_batch_gives_the_same_steps_in_one_run_from_checkpoints_and_on_a_mesh(
    tmp_path, make_config, read_metrics, capsys
):
    def trainer(name, *overrides, devices=1):
        return Trainer(make_config(f"run.dir={tmp_path / name}", *COMMON, *overrides), jax.devices()[:devices])

    numbers = ("loss", "grad_norm", "tokens")
    assert trainer("whole", *RAMP, "run.steps=6").run() == 0
    printed = capsys.readouterr().out
    assert "4 sequences in 1 microbatch, from step 4 (192 tokens) on 8 sequences in 2 microbatches" in printed
    assert printed.index("compiled for 8 sequences") < printed.index("step 1/6")  # not in the middle of the run
    expected = read_metrics(tmp_path / "whole", *numbers)
    assert {step: values[2] for step, values in expected.items()} == {1: 64, 2: 128, 4: 320, 6: 576}
    for step, before in ((4, 2), (6, 4)):  # the interval with the change, and one after it
        speed, seconds, tokens = read_metrics(
            tmp_path / "whole", "tokens_per_second_per_device", "step_seconds", "tokens"
        )[step]
        assert speed * seconds * 2 == pytest.approx(tokens - expected[before][2])

    assert trainer("parts", *SMALL, "run.steps=3").run() == 0
    assert trainer("parts", *LARGE, "run.steps=6").run() == 0  # another batch from a checkpoint on
    assert "batch.global_size 4 → 8" in capsys.readouterr().out
    parts = read_metrics(tmp_path / "parts", *numbers)
    assert {step: parts[step] for step in expected} == expected
    for overrides in (LARGE, RAMP):
        after = trainer("parts", *overrides, "run.steps=7", "checkpoint.resume_step=4")
        assert after.sizes.phases == (((4, 3 * 4 + 8), 8),)

    shutil.copytree(tmp_path / "whole", tmp_path / "mesh")
    back = (*RAMP, "run.steps=6", "checkpoint.resume_step=2")
    assert trainer("mesh", *back, "mesh.fsdp=2", "mesh.tensor=2", devices=4).run() == 0
    for step, values in read_metrics(tmp_path / "mesh", *numbers).items():
        assert values == pytest.approx(expected[step], rel=1e-5), step
