"""What a run directory says of its run: it is true, complete, written by one process, and never damaged."""

import contextlib
import json
import resource
import shutil
import signal
import time
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import pytest
from trainers import QuickTrainer, StoppedTrainer

from megajax import train
from megajax.config import load_config
from megajax.errors import InputError
from megajax.schema.tree import read_file
from megajax.training import logs
from megajax.training.hooks import Hook
from megajax.training.logs import MetricsLog
from megajax.training.loop import STEPS_AHEAD, Trainer
from megajax.training.rollbacks import Rollbacks
from megajax.training.run_lock import Leftovers
from megajax.training.run_record import changed_keys, keep_tokenizer, set_aside, write_config
from megajax.training.saving import StateSaver
from megajax.training.spikes import Rollback
from megajax.training.trackers import TensorBoardLog


def files(root: Path) -> dict[str, bytes]:
    found = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != "console.log"]
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def digits(root: Path) -> list[int]:
    return sorted(int(path.stem) for path in root.iterdir())


@pytest.fixture
def build(tmp_path, make_config):
    """(overrides...) → a Trainer on one device with run.dir tmp_path/run."""
    return lambda *overrides, kind=Trainer, hooks=(): kind(
        make_config(f"run.dir={tmp_path / 'run'}", "data.split='8,2,0'", "run.eval_steps=1", *overrides),
        jax.devices()[:1],
        hooks=hooks,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny, text):
    """A run directory with checkpoints of steps 2 and 4 and the end of a run of 4 steps."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    overrides = [f"data.train={text}", "data.split='8,2,0'", "run.eval_steps=1", f"run.dir={run_dir}"]
    config = load_config(tiny, [*overrides, "run.steps=4", "run.checkpoint_interval=2"])
    assert Trainer(config, jax.devices()[:1]).run() == 0
    return run_dir


@pytest.fixture
def run_dir(saved, tmp_path):
    """A copy of `saved` where `build` looks."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_a_finished_run_has_nothing_to_do_and_writes_nothing(run_dir, build, capsys):
    before = files(run_dir)
    assert build("run.steps=4", "schedule.learning_rate=0.1", "precision.compute=float16").run() == 0
    assert (
        f"nothing to do: {run_dir} is at step 4 of run.steps=4; to train longer, raise run.steps"
        in capsys.readouterr().out
    )
    assert files(run_dir) == before


def test_building_and_evaluating_writes_nothing(run_dir, build):
    before = files(run_dir)
    build("run.steps=6", "schedule.learning_rate=0.1").evaluate()
    assert files(run_dir) == before


def test_a_changed_config_is_listed_and_the_earlier_ones_are_kept(run_dir, build, capsys):
    first = read_file(run_dir / "config.yaml").values
    assert build("run.steps=5", "run.checkpoint_interval=2", kind=QuickTrainer).run() == 0
    assert "run.steps 4 → 5" in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"step 6 is 0\.1, but 0\.003 in the schedule so far: restore the section"):
        more = ("run.steps=6", "run.checkpoint_interval=2", "schedule.learning_rate=0.1")
        assert build(*more, kind=QuickTrainer).run() == 0
    printed = capsys.readouterr().out
    assert "changed since the last start: run.steps 5 → 6; schedule.learning_rate 0.003 → 0.1" in printed
    assert digits(run_dir / "configs") == [0, 4, 5]
    rates = [read_file(run_dir / f"configs/{step}.yaml").values["schedule"]["learning_rate"] for step in (0, 4, 5)]
    assert rates == [0.003, 0.003, 0.1]
    assert read_file(run_dir / "configs/0.yaml").values == first
    assert (run_dir / "configs/5.yaml").read_bytes() == (run_dir / "config.yaml").read_bytes()


def test_configs_of_steps_that_are_lost_are_removed_though_the_config_is_that_of_the_last_start(tmp_path, make_config):
    first, second = make_config(), make_config("run.steps=9")
    for step, config in ((0, first), (5, second), (3, second)):
        write_config(tmp_path, config, step)
    assert digits(tmp_path / "configs") == [0, 3]


def test_the_console_tells_what_happens_and_what_to_do_next(run_dir, build, capsys):
    shutil.rmtree(run_dir)
    assert build("run.steps=3", "run.log_interval=10", "run.checkpoint_interval=2").run() == 0
    lines = capsys.readouterr().out.splitlines()
    starts = ["compiling…", "compiled in ", "first step done ", "step 1/3 ", "step 3/3 ", "saved step 3 (", "done: "]
    positions = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert positions == sorted(positions)
    assert any(line.startswith("saved step 2 (") for line in lines)
    assert lines[-1].endswith("to train longer, raise run.steps")


def test_the_host_does_not_run_ahead_of_the_devices(run_dir, build):
    trainer, waited = build("run.steps=6"), []

    class Loss:
        def __init__(self, step):
            self.step = step

        def block_until_ready(self):
            waited.append(self.step)

    compiled = Mock(side_effect=lambda state, batch: (state, {"loss": Loss(trainer.step + 1)}))
    vars(trainer.program)["step_program"] = Mock(**{"lower.return_value.compile.return_value": compiled})
    batch = trainer.next_batch()
    for step in range(5, 12):
        trainer.train_step(batch)
        assert waited == list(range(5, step + 1 - STEPS_AHEAD))


def damage(run_dir: Path, kind: str) -> None:
    checkpoint = run_dir / "checkpoints" / "4"
    if kind == "arrays":
        for path in checkpoint.glob("state/d/*"):
            path.write_bytes(path.read_bytes()[:10])
        for path in checkpoint.glob("state/ocdbt.process_0/d/*"):
            path.write_bytes(path.read_bytes()[:10])
    elif kind == "metadata":
        (checkpoint / "state" / "_METADATA").unlink()
    else:
        shutil.rmtree(checkpoint / "description")


@pytest.mark.parametrize(("kind", "verified"), [("arrays", True), ("metadata", False), ("description", True)])
def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(run_dir, build, kind, verified, read_metrics, capsys):
    damage(run_dir, kind)
    if not verified:  # saved by an older version
        for path in run_dir.glob("checkpoints/*/checksums.json*"):
            path.unlink()
    damaged = files(run_dir / "checkpoints" / "4")
    for end in ("", "-1700000000"):  # of newer and of older versions of orbax
        (run_dir / "checkpoints" / f"6.orbax-checkpoint-tmp{end}" / "state").mkdir(parents=True)
    expected = read_metrics(run_dir, "loss")
    file = {"arrays": "state/(ocdbt.process_0/)?d/.* bytes instead of", "metadata": "state/_METADATA is missing"}
    why = file.get(kind, "description/.* is missing") if verified else ".*"
    with pytest.warns(UserWarning, match=rf"checkpoints/4 is damaged \({why}.*\): the run resumes from an older"):
        assert build("run.steps=5").run() == 0
    losses = read_metrics(run_dir, "loss")
    assert losses.pop(5) and losses == expected
    assert files(run_dir / "set_aside" / "1" / "checkpoints" / "4") == damaged
    assert digits(run_dir / "checkpoints") == [2, 5]
    printed = capsys.readouterr().out
    line = f"resuming from the checkpoint of step 2 in {run_dir / 'checkpoints'}"
    line += "" if verified else ", which has no checksums, so it is not verified"
    assert f"{line}\n" in printed


def test_what_is_set_aside_gets_a_folder_of_its_own_whichever_were_removed(tmp_path):
    (tmp_path / "set_aside" / "2").mkdir(parents=True)
    assert [set_aside(tmp_path, 4, []) for _ in range(2)] == [f"{tmp_path}/set_aside/{n}" for n in (3, 4)]


def test_an_evaluation_uses_the_checkpoint_before_a_damaged_one_and_writes_nothing(run_dir, build):
    shutil.rmtree(run_dir / "checkpoints" / "4" / "state" / "d")
    shutil.copytree(run_dir / "checkpoints" / "2", run_dir / "checkpoints" / "1")  # an older one, which is not taken
    before = files(run_dir)
    trainer = build("run.steps=6")
    assert trainer.step == 4
    with pytest.warns(UserWarning, match=r"4 is damaged \(state/d/.* is missing\): the run"):
        trainer.evaluate()
    assert trainer.step == 2 and files(run_dir) == before


def test_a_damaged_checkpoint_that_was_chosen_or_is_the_only_one_is_a_sentence(run_dir, build):
    shutil.rmtree(run_dir / "checkpoints" / "2" / "state" / "d")
    before = files(run_dir)
    with pytest.raises(InputError) as caught:
        build("run.steps=6", "checkpoint.resume_step=2").run()
    path = run_dir / "checkpoints" / "2"
    assert str(caught.value).startswith("checkpoint.resume_step=2 (") and f"the checkpoint {path} is" in str(
        caught.value
    )
    assert str(caught.value).endswith(" is missing): set it to 4, the newest good one.")
    assert files(run_dir) == before
    shutil.rmtree(run_dir / "checkpoints" / "4")
    with pytest.raises(InputError, match=r"2 is damaged \(state/d/.*\), and there is no older one: choose another run"):
        build("run.steps=6").run()


def test_whole_files_that_changed_extensions_cannot_read_are_not_called_damaged(run_dir, build, monkeypatch):
    """Nor is an older checkpoint taken instead."""

    def restore(*_: Any) -> None:
        raise ValueError("blocks.dense.mine has another shape")

    monkeypatch.setattr(StateSaver, "restore", restore)
    before = files(run_dir)
    with pytest.raises(
        InputError, match=r"4 cannot be read .*mine has another shape.*: bring back the code of run.ext"
    ):
        build("run.steps=6", "run.extensions=[string]").run()
    assert files(run_dir) == before
    with pytest.warns(UserWarning, match="4 is damaged"), pytest.raises(InputError, match="2 is damaged"):
        build("run.steps=6").run()


@pytest.mark.parametrize("kind", ["arrays", "description"])
def test_damaged_weights_to_start_from_are_named_with_older_ones(run_dir, build, tmp_path, kind):
    damage(run_dir, kind)
    with pytest.raises(InputError) as caught:
        build(f"run.dir={tmp_path / 'other'}", f"checkpoint.init_from={run_dir}")
    assert f"{run_dir / 'checkpoints' / '4'}" in str(caught.value) and " is damaged (" in str(caught.value)
    assert str(caught.value).endswith(f"): try {run_dir / 'checkpoints' / '2'}.")


def test_a_trainer_that_was_stopped_goes_on_and_saves(run_dir, build, checkpoint_steps):
    trainer = build("run.steps=6", kind=StoppedTrainer)
    trainer.stop_at = 5
    assert trainer.run() == 75
    assert trainer.run() == 0
    assert checkpoint_steps(run_dir) == [5, 6]
    assert trainer.run() == 0  # nothing to do


def test_a_trainer_that_saved_by_hand_runs_the_rest(run_dir, build, checkpoint_steps):
    trainer = build("run.steps=6")
    trainer.train_step(trainer.next_batch())
    trainer.save()
    trainer.checkpoints.wait()
    assert trainer.run() == 0
    assert checkpoint_steps(run_dir) == [5, 6]


def test_a_run_that_another_process_finished_meanwhile_has_nothing_to_do(run_dir, build, capsys):
    late = build("run.steps=5", "schedule.learning_rate=0.1")
    assert build("run.steps=5").run() == 0
    before = files(run_dir)
    assert late.run() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("nothing to do: ")
    assert files(run_dir) == before


def test_a_run_goes_back_to_a_chosen_step_once_and_loses_nothing(run_dir, build, read_metrics, checkpoint_steps):
    """Also the record of the rollbacks after that step."""
    Rollbacks(build().config).add(Rollback(1, 4, 48, 5, 9.0, 3.0, 8))
    before = files(run_dir)
    with pytest.raises(InputError, match="resume_step=3 .* has checkpoints of steps 2, 4: choose one of them"):
        build("checkpoint.resume_step=3")
    again = ("checkpoint.resume_step=2", "run.steps=5", "run.checkpoint_interval=1")
    assert build(*again).run() == 0
    assert list(read_metrics(run_dir, "loss")) == [1, 2, 3, 4, 5]
    assert checkpoint_steps(run_dir) == [4, 5]  # two are kept
    aside = files(run_dir / "set_aside" / "1")
    assert aside == {name: data for name, data in before.items() if name in aside}
    assert {"metrics.jsonl", "config.yaml", "configs/0.yaml", "checkpoints/4/description/metadata"} <= set(aside)
    again = build(*again)
    assert again.step == 5  # the same command goes on from where it got to
    assert Rollbacks(again.config).past == []


def test_a_longer_run_warns_of_the_learning_rate_that_jumps(run_dir, build):
    shutil.rmtree(run_dir)
    cosine = ("schedule.kind=cosine", "run.eval_steps=0")
    trainer = build(*cosine, "run.steps=2")
    trainer.state, trainer.step = trainer.program.init_state(), 2
    trainer.save()
    trainer.checkpoints.close()
    # 3e-4 + 2.7e-3 (1 + cos(3π/4)) / 2 at step 3 of 4; the cosine over 2 steps has ended at a tenth of the peak.
    with pytest.warns(
        UserWarning, match=r"learning rate of step 3 is 0\.000695, but 0\.0003 in the .*decay_steps=2 to keep"
    ):
        build(*cosine, "run.steps=4").save()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        build(*cosine, "run.steps=4", "schedule.decay_steps=2").save()


LIMITS = resource.getrlimit(resource.RLIMIT_FSIZE)


@contextlib.contextmanager
def files_end_at(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, LIMITS[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, LIMITS)


class FullDisk(Trainer):
    """The checkpoints of the steps `full` find no room: files end at 20 kB while they are written."""

    full = ()

    def save(self):
        with files_end_at(20_000) if self.step in self.full else contextlib.nullcontext():
            super().save()
            while self.checkpoints.saving is not None:
                time.sleep(0.01)


class Saves(Hook):
    """Notes the steps that are saved."""

    def __init__(self):
        self.steps = []

    def on_save(self, run, step):
        self.steps.append(step)


def test_a_save_that_fails_is_a_warning_while_an_older_checkpoint_stands(run_dir, build, capsys):
    own = [Saves()]
    trainer = build("run.steps=7", "run.checkpoint_interval=1", "checkpoint.keep=1", kind=FullDisk, hooks=own)
    first, trainer.full = trainer.step + 1, (5,)
    assert trainer.run() == 0
    assert own[0].steps == [step for step in range(first, 8) if step != 5]
    printed = capsys.readouterr().out
    assert "the checkpoint of step 5 could not be saved" in printed
    assert "(File too large): the newest one is of step 4; training continues" in printed
    assert digits(run_dir / "checkpoints") == [7]


@pytest.mark.parametrize(
    "steps, interval, part",
    [((5,), 0, "the newest one is of step 4"), ((1,), 1, "there is no older one")],
    ids=["the last one", "the first one"],
)
def test_a_save_that_fails_with_nothing_to_fall_back_on_ends_the_run(run_dir, build, steps, interval, part):
    if interval:
        shutil.rmtree(run_dir)
    trainer = build("run.steps=5", f"run.checkpoint_interval={interval}", kind=FullDisk)
    trainer.full = steps
    with pytest.raises(
        InputError, match=f"step {steps[0]} could not be saved .*{part}: free disk space, then start the same"
    ):
        trainer.run()
    assert not (run_dir / "lock").exists()


def test_tensorboard_files_that_a_full_disk_refused_are_given_up_with_one_warning(tmp_path):
    log = TensorBoardLog(tmp_path, 0, "run: {}")
    with files_end_at(300), pytest.warns(UserWarning, match="TensorBoard files can't be written any more") as caught:
        for step in range(9):
            log.write(step, {"train/loss": 3.0})
    assert sum("TensorBoard" in str(item.message) for item in caught) == 1
    log.write(9, {"train/loss": 3.0})
    log.close()


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_the_template_is_kept_of_a_run_that_reads_it(tmp_path, make_config, kind):
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    data = (f"data.kind={kind}", "data.tokenizer=byte", "data.order=shuffled")
    unread = pytest.warns(UserWarning, match="data.chat_template=.* has no effect")
    with contextlib.nullcontext() if kind == "chat" else unread:
        config = make_config(*data, f"data.chat_template={tmp_path / 'a.jinja'}")
    (run := tmp_path / "run").mkdir()
    keep_tokenizer(run, config)
    assert [path.name for path in run.iterdir()] == ["chat_template.jinja"] * (kind == "chat")


def test_metrics_that_a_full_disk_refused_are_written_later(tmp_path, make_config, read_metrics):
    log = MetricsLog(make_config(f"run.dir={tmp_path}", "logging.tensorboard=false"), 0, True)
    with files_end_at(30), pytest.warns(UserWarning, match="could not be written"):
        log.write(1, {"loss": 4.0})
        log.write(2, {"loss": 3.0})
    log.write(3, {"loss": 2.0})
    log.close()
    assert read_metrics(tmp_path, "loss") == {1: (4.0,), 2: (3.0,), 3: (2.0,)}


REFUSED = ("data.order=megatron", "data.split='1,0,0'", "run.checkpoint_interval=2", "run.eval_interval=2")


def test_a_refused_start_leaves_nothing_behind(tiny, text, tmp_path, capsys):
    overrides = [f"run.dir={tmp_path / 'runs' / 'run'}", *REFUSED, "checkpoint.keep_best=1", "mesh.data=-1"]
    with pytest.raises(SystemExit, match="2"):
        train.main([str(tiny), f"data.train={text}", *overrides])
    assert "checkpoint.keep_best=1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("number", "status", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        pytest.param(signal.SIGTERM, 75, "stopped on request", marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, 75, "stopped", marks=pytest.mark.long),
    ],
)
def test_a_signal_before_the_first_step_leaves_nothing_behind(start, tmp_path, number, status, word):
    path = tmp_path / "runs" / "run"
    hook = f"logging.on_event=tee -a {tmp_path / 'events'}"
    run = start(f"run.dir={path}", hook, JAX_ENABLE_COMPILATION_CACHE="false")
    assert run.read_until((path / "lock").exists)
    run.process.send_signal(number)
    assert run.finish() == status and word in run.output
    assert not (tmp_path / "runs").exists()
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["status"]) == ("end", status) and word in event["text"]


def test_a_start_leaves_the_directory_of_another_process(tmp_path):
    made = Leftovers(tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text('{"process": 0, "host": "other"}')
    made.remove()
    assert files(tmp_path) == {"run/lock": b'{"process": 0, "host": "other"}'}
    (tmp_path / "run" / "lock").unlink()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1}')
    made.remove()
    assert files(tmp_path)


def test_a_key_that_one_of_two_starts_has_is_a_change():
    before = {"run": {"steps": 4, "former": 1}, "mesh": {"data": 2}}
    after = {"run": {"steps": 4, "new": [2]}, "mesh": {"data": 3}, "lora": {"rank": 8}}
    found = changed_keys(before, after)
    assert sorted(found) == ["lora.rank null → 8", "mesh.data 2 → 3", "run.former 1 → null", "run.new null → [2]"]


def test_the_last_line_says_how_far_the_samples_reach(make_config):
    """Of 100 samples 40 are read: steps of 8 sequences fit seven times into the others."""
    config = make_config("data={kind: indexed, train: a, order: megatron, train_samples: 100}", "batch.global_size=8")
    for line in (logs.nothing_line(config, 5, 40), logs.closing_line(config, 5, 40, 1.0)):
        assert "raise run.steps by at most 7, as far as data.train_samples=100 reach" in line
        assert "generate" not in line  # without data.tokenizer
    # After a ramp-up five steps have read fewer: three of 4 sequences and two of 8, so 72 are left.
    assert "raise run.steps by at most 9, as far as" in logs.nothing_line(config, 5, 28)
