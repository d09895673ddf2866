"""What a run says about its saves, and which checkpoints it keeps."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from trainers import QuickTrainer

from megajax.checkpoint import SaveOutcome, checksums
from megajax.errors import ConfigError, InputError
from megajax.training.logs import saved_line
from megajax.training.loop import Trainer
from megajax.training.run_directory import SaveReports


@pytest.fixture
def build(tmp_path, make_config):
    return lambda *overrides, kind=Trainer: kind(
        make_config(f"run.dir={tmp_path / 'run'}", *overrides), jax.devices()[:1]
    )


class Slow:
    """Checkpoints whose last save, of step 5, takes 0.2 s longer."""

    saving = 5

    def outcome(self, wait):
        assert wait
        time.sleep(0.2)
        return SaveOutcome(5, 2 * 10**9, waited=0.3, seconds=4.0)


def test_a_save_that_waits_says_so_and_once_that_the_interval_is_too_short(make_config):
    lines = []
    config = make_config("run.checkpoint_interval=5")
    reports = SaveReports(config, lambda text, warning: lines.append((text, warning)))
    checkpoints = Slow()
    checkpoints.saving = None
    reports.wait_for_last(checkpoints, 5)
    assert not lines

    checkpoints.saving = 5
    time.sleep(0.1)
    assert reports.wait_for_last(checkpoints, 10).step == 5
    (waits, _), (warning, is_warning) = lines
    assert waits == "step 10: the save of step 5 is not complete yet; training waits for it"
    assert (
        is_warning and "run.checkpoint_interval=5" in warning and "a save takes 4 s, and the 5 steps before" in warning
    )
    # 5 steps take 0.3 s or more here, and a save 4: at most 5·4 / 0.3 · 1.1 steps.
    assert 5 < int(warning.split("set it to ")[1].split()[0]) <= 74

    reports.wait_for_last(checkpoints, 15)
    assert len(lines) == 3 and not lines[-1][1]

    reports.report(checkpoints.outcome(wait=True), newest=5, ending=False)
    assert reports.take() == {
        "checkpoint_step": 5,
        "checkpoint_gb": 2.0,
        "checkpoint_seconds": 4.0,
        "checkpoint_gb_per_second": 0.5,
        "checkpoint_stall_seconds": 0.3,
    }
    assert not reports.take()


def test_the_line_of_a_save_has_the_speed_of_the_whole_save():
    """2 GB in 4 s, of which training waited 0.3 s."""
    found = saved_line(SaveOutcome(5, 2 * 10**9, waited=0.3, seconds=4.0))
    assert found == "saved step 5 (2 GB in 4.0 s, 500 MB/s, training waited 0.3 s)"


def test_a_failed_save_and_one_that_nothing_verifies_are_warnings_and_other_saves_are_not(make_config):
    lines = []
    reports = SaveReports(make_config(), lambda text, warning: lines.append((text.partition(":")[0], warning)))
    good = SaveOutcome(5, 1, waited=0.0, seconds=1.0)
    reports.report(good, newest=5, ending=True)
    reports.report(replace(good, unverified="no room"), newest=5, ending=True)
    reports.report(replace(good, error="no room"), newest=4, ending=False)
    assert [warning for _, warning in lines] == [False, False, True, True]
    assert lines[2][0] == "the checkpoint of step 5 has no checksums (no room)"


def test_the_time_between_two_saves_is_without_the_wait_for_the_first(make_config, monkeypatch):
    """Five steps take 5 s and a save takes 9, of which training waits for 4: two intervals are enough."""
    clock, lines = 0.0, []
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    class Checkpoints:
        saving = 0

        def outcome(self, wait):
            nonlocal clock
            clock += 4
            return SaveOutcome(self.saving, 1, waited=4.0, seconds=9.0)

    config, checkpoints = make_config("run.checkpoint_interval=5"), Checkpoints()
    reports = SaveReports(config, lambda text, warning: lines.append(text) if warning else None)
    for checkpoints.saving in (0, 5):
        assert not lines
        reports.wait_for_last(checkpoints, checkpoints.saving + 5)
        clock += 5
    assert re.findall(r"took (\S+) s.*set it to (\d+) or more", *lines) == [("5", "10")]  # 1.1 · 9 s of steps of 1 s


def test_an_early_last_save_does_not_make_the_interval_too_short(make_config):
    """Saves take 4 s, 100 steps at least 5: enough between saves of the interval, not before the last save."""
    lines = []
    reports = SaveReports(make_config("run.checkpoint_interval=100"), lambda text, warning: lines.append(warning))
    checkpoints = Slow()
    checkpoints.saving = None
    reports.wait_for_last(checkpoints, 5)
    checkpoints.saving = 5
    time.sleep(0.1)
    reports.wait_for_last(checkpoints, 6)  # a step takes 0.1 s or more: 44 steps as long as a save
    assert lines == [False]


def test_a_trainer_that_has_to_wait_for_its_last_save_says_so(build, monkeypatch, capsys):
    compute = checksums.compute
    monkeypatch.setattr(checksums, "compute", lambda *arguments: time.sleep(0.3) or compute(*arguments))
    assert build("run.checkpoint_interval=1", "run.steps=2", "run.eval_steps=0", kind=QuickTrainer).run() == 0
    assert "step 2: the save of step 1 is not complete yet; training waits for it" in capsys.readouterr().out


class SlowlySaved(Trainer):
    def save(self):
        time.sleep(1 if self.step == 2 else 0)
        super().save()


def test_the_time_of_a_save_is_no_time_of_a_step(build, tmp_path, read_metrics):
    every = ("run.checkpoint_interval=2", "run.log_interval=2", "run.steps=4", "run.eval_steps=0")
    trainer = build(*every, kind=SlowlySaved)
    assert trainer.run() == 0
    # Steps of milliseconds; with the second of the save after step 2, steps 3 and 4 would take 0.5 s each.
    assert read_metrics(tmp_path / "run", "step_seconds")[4][0] < 0.4


def test_the_best_need_a_split_to_evaluate(build):
    every = ("run.checkpoint_interval=2", "run.eval_interval=2")
    with pytest.raises(ConfigError, match="checkpoint.keep_best=2 .* there is no data.valid: set it, or data.split"):
        build("data.split='1,0,0'", *every, "checkpoint.keep_best=2")
    for by, cure in (
        ("best eval_loss", "write it as in lowest eval_loss or highest eval_accuracy"),
        ("highest", "write it as in lowest eval_loss or highest eval_accuracy"),
        ("highest eval_accuracy", "write lowest or highest before one of eval_loss[.]"),
    ):
        with pytest.raises(ConfigError, match=f"checkpoint.best_by=.?{by}.* {cure}"):
            build("data.split='8,2,0'", *every, "checkpoint.keep_best=2", f"checkpoint.best_by={by}")


class Evaluated(QuickTrainer):
    losses = (3.0, 1.0, float("nan"), 2.0, 4.0, 5.0)  # after every second step

    def evaluate(self, split, averaged=False):
        return {"loss": self.losses[self.step // 2 - 1]}


def test_the_best_by_evaluation_loss_and_the_newest_are_kept(build, tmp_path, checkpoint_steps):
    every = ("run.checkpoint_interval=2", "run.eval_interval=2", "run.steps=12", "run.log_interval=3")
    trainer = build("data.split='8,2,0'", *every, "checkpoint.keep=1", "checkpoint.keep_best=2", kind=Evaluated)
    assert trainer.run() == 0
    assert checkpoint_steps(tmp_path / "run") == [4, 8, 12]

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    saves = [line for line in lines if "checkpoint_gb" in line]
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.state))
    assert saves[-1]["checkpoint_step"] == saves[-1]["step"] == 12
    assert all(line["checkpoint_gb"] == pytest.approx(size / 1e9, abs=1e-6) for line in saves)
    # A save that training waits for as a whole may end before training notices, so neither bounds the other.
    assert all(line["checkpoint_seconds"] > 0 and line["checkpoint_stall_seconds"] > 0 for line in saves)


@pytest.mark.parametrize(
    ("every", "logged", "saved"),
    [
        (("run.eval_interval=2", "run.checkpoint_interval=2"), [1, 2], [2]),
        (("run.eval_interval=2",), [1, 2], []),
        ((), [1, 2, 3], [3]),
    ],
    ids=["with a save", "interval", "last"],
)
def test_an_evaluation_that_fails_does_not_lose_the_step_before_it(
    build, tmp_path, text, read_metrics, checkpoint_steps, every, logged, saved
):
    (tmp_path / "valid.bin").write_bytes(Path(f"{text}.bin").read_bytes())
    (tmp_path / "valid.idx").write_bytes(Path(f"{text}.idx").read_bytes())
    trainer = build(f"data.valid={tmp_path / 'valid'}", "run.steps=3", "run.log_interval=1", *every, kind=QuickTrainer)
    # A start checks the first tokens of a file; this one stands for a later one.
    np.memmap(tmp_path / "valid.bin", np.uint16, "r+")[:] = 60_000
    with pytest.raises(InputError, match="60000"):
        trainer.run()
    assert [*read_metrics(tmp_path / "run", "loss")] == logged and checkpoint_steps(tmp_path / "run") == saved


def test_a_failed_trace_of_the_last_step_does_not_lose_it(build, tmp_path, capsys, checkpoint_steps):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("a file where the folder of traces should be")
    trainer = build("run.steps=2", "logging.profile_start=2", "logging.profile_steps=1")
    assert trainer.run() == 0 and checkpoint_steps(tmp_path / "run") == [2]
    assert "no trace was written to" in capsys.readouterr().out
