"""Two processes with a few virtual devices each, joined by the explicit JAX_* variables."""

import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from lab import FLAGS

from megajax import launch
from megajax.config import load_config
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import CHECKED_TOKENS
from megajax.errors import InputError
from megajax.hf.compare import compare
from megajax.training.loop import Trainer

STEPS = 12
OPTIONS = (f"run.steps={STEPS}", "run.checkpoint_interval=6", "run.eval_interval=2", "run.eval_steps=1")
OPTIONS += ("data.split='8,2,0'", "model.num_layers=2", "schedule.kind=cosine")
MESH = ("mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2")


# Notes the files that a process opens: those for writing, and for reading those of the tests and compiled programs.
SPY = """
import sys
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0] not in {notes!r}:
        writes = bool(set(arguments[1] or "") & set("wax+"))
        if writes or arguments[0].startswith({root!r}) or arguments[0].endswith("-cache"):
            with open({notes!r}[writes], "a") as notes:
                notes.write(arguments[0] + chr(10))
sys.addaudithook(note)
"""


@pytest.fixture
def start_two(tmp_path, text, start):
    """(overrides..., devices=4) → two `Run`s of one mesh, with this number of devices each.

    `tmp_path/written{0,1}` gets the names of the files that each of them opens for writing, `tmp_path/read{0,1}` those
    for reading, of the tests.
    """
    for index in range(2):
        (tmp_path / f"spy{index}").mkdir()
        notes = [str(tmp_path / f"{kind}{index}") for kind in ("read", "written")]
        spy = SPY.format(notes=notes, root=os.path.commonpath([tmp_path, text]))
        (tmp_path / f"spy{index}" / "sitecustomize.py").write_text(spy)

    def start_two(*overrides, devices=4):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        return [
            start(
                *OPTIONS,
                *MESH,
                *overrides,
                devices=devices,
                JAX_COORDINATOR_ADDRESS=address,
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(index),
                PYTHONPATH=os.pathsep.join([str(tmp_path / f"spy{index}"), os.environ.get("PYTHONPATH", "")]),
            )
            for index in range(2)
        ]

    return start_two


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run directory of one process with one device; written by the first test that needs it."""
    return tmp_path_factory.mktemp("alone") / "run"


@pytest.fixture
def train_here(make_config):
    """(overrides...) trains to the end in this process, on one device."""

    def train(*overrides):
        assert Trainer(make_config(*OPTIONS, *overrides), jax.devices()[:1]).run() == 0

    return train


@pytest.fixture
def expected(alone, train_here, read_metrics):
    """Losses and gradient norms, and evaluations, of one process with one device."""
    if not alone.exists():
        train_here(f"run.dir={alone}")
    losses = read_metrics(alone, "loss", "grad_norm")
    assert list(losses) == list(range(1, STEPS + 1))
    return losses, read_metrics(alone, "eval_loss")


def agree(ours: dict, theirs: dict) -> bool:
    return list(ours) == list(theirs) and all(ours[s] == pytest.approx(theirs[s], rel=1e-5) for s in ours)


def logs_written(tmp_path: Path, index: int) -> set[str]:
    """What a process wrote directly into the run directory or its TensorBoard files."""
    paths = [Path(line) for line in (tmp_path / f"written{index}").read_text().splitlines()]
    names = {path.name.removesuffix(".tmp") if path.parent.name == "two" else path.parent.name for path in paths}
    return names & {"metrics.jsonl", "config.yaml", "tensorboard"}


def names_read(tmp_path: Path, index: int) -> list[str]:
    """Each file that a process has opened for reading, by name and two folders; a checkpoint's arrays are left out."""
    lines = (tmp_path / f"read{index}").read_text().splitlines()
    return ["/".join(Path(line).parts[-3:]) for line in lines if "/state" not in line]


@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.long)], ids=["stopped", "killed"])
def test_two_processes_give_the_losses_of_one_device_which_goes_on_from_them(
    tmp_path, train_here, start_two, expected, read_metrics, checkpoint_steps, capsys, killed
):
    """The boundary between the processes is the one between the stages; only the first process logs."""
    run_dir, stages = tmp_path / "two", ("mesh.data=1", "mesh.pipeline=2", "mesh.tensor=1", "batch.num_microbatches=2")
    local = ("run.checkpoint_interval=0", f"checkpoint.local_dir={tmp_path / 'local'}", "checkpoint.local_interval=1")
    command = (f"run.dir={run_dir}", "logging.tensorboard=true", *stages, *local)
    newest = 0
    if killed:
        both = start_two(*command, devices=2)
        both[0].read_to_step(3)
        for run in both:
            run.process.kill()
            run.finish()
        saved = [{p.name for p in tmp_path.glob(f"local/*/process-{i}/*") if p.name.isdigit()} for i in range(2)]
        newest = max(map(int, saved[0] & saved[1]))
    first, second = start_two(*command, devices=2)
    # Asked to stop on the way: only the second one is told.
    first.read_to_step(newest + 1)
    second.process.send_signal(signal.SIGTERM)
    assert (first.finish(), second.finish()) == (75, 75), first.output + second.output
    assert (f"resuming from the local checkpoint of step {newest} " in first.output) == killed
    assert logs_written(tmp_path, 0) == {"metrics.jsonl", "config.yaml", "tensorboard"}
    assert not logs_written(tmp_path, 1) and "loss" not in second.output
    losses, evaluations = (read_metrics(run_dir, *names) for names in (("loss", "grad_norm"), ("eval_loss",)))
    stopped_at = list(losses)[-1]
    assert newest < stopped_at < STEPS and checkpoint_steps(run_dir) == [stopped_at]
    assert not [*tmp_path.glob("local/*/process-*/*")]  # the durable checkpoint replaces them
    before = [{step: values for step, values in each.items() if step <= stopped_at} for each in expected]
    assert evaluations and agree(losses, before[0]) and agree(evaluations, before[1])

    train_here(f"run.dir={run_dir}")
    assert f"resuming from the checkpoint of step {stopped_at}" in capsys.readouterr().out
    assert agree(read_metrics(run_dir, "loss", "grad_norm"), expected[0])


@pytest.mark.long
def test_two_processes_with_experts_go_on_from_the_checkpoint_of_one(
    tmp_path, train_here, start_two, read_metrics, checkpoint_steps
):
    """Each sequence is divided over both processes, and the experts too: tokens are sent to those of the other."""
    experts = ("model.block_pattern=null", "model.num_experts=4", "model.router.global_loss=0.1", "model.num_layers=1")
    experts += ("run.steps=4", "run.checkpoint_interval=2")
    run_dir, folders = tmp_path / "two", tmp_path / "folders"
    train_here(*experts, "checkpoint.keep=3", f"run.dir={tmp_path / 'one'}")
    shutil.copytree(tmp_path / "one", run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "4")
    mesh = ("mesh.data=1", "mesh.fsdp=1", "mesh.context=4", "mesh.experts_over=[context]")
    dispatch = ("communication.experts=all_to_all", f"checkpoint.export_hf.dir={folders}")
    first, second = start_two(*experts, *mesh, *dispatch, f"run.dir={run_dir}")
    assert (first.finish(), second.finish()) == (0, 0), first.output + second.output
    assert "resuming from the checkpoint of step 2" in first.output
    read = names_read(tmp_path, 1)
    assert f"{tmp_path.name}/two/config.yaml" not in read
    assert all(read.count(f"{step}/description/metadata") <= 1 for step in (2, 4)), "only to verify its share"
    assert sum("jit__train_step" in name for name in read) == 1, "process 0 has compiled the step"
    assert not any(difference.absolute for difference in compare(folders / "step-4", str(run_dir)))
    assert "folders" in (tmp_path / "written0").read_text()
    assert "folders" not in (tmp_path / "written1").read_text() and "wrote" not in second.output
    assert checkpoint_steps(run_dir) == [2, 4]
    keys = ("loss", "grad_norm", "aux_loss", "expert_load_max")
    assert agree(read_metrics(run_dir, *keys), read_metrics(tmp_path / "one", *keys))
    assert agree(read_metrics(run_dir, "eval_loss"), read_metrics(tmp_path / "one", "eval_loss"))


@pytest.mark.long
def test_the_launcher_resumes_on_fewer_devices_after_a_kill(
    tmp_path, tiny, text, expected, read_metrics, checkpoint_steps, monkeypatch, capfd
):
    """A process with two devices is killed after step 2, and one of them does not come back."""
    run_dir, left = tmp_path / "launched", iter((["0", "1"], ["0"]))
    monkeypatch.setattr(launch, "working_devices", lambda: next(left))
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    arguments = [str(tiny), f"data.train={text}", *OPTIONS, "mesh.data=-1", f"run.dir={run_dir}"]
    arguments.append("run.checkpoint_interval=2")
    killers = []

    class Child(launch.Child):
        def __init__(self, *others, **named):
            super().__init__(*others, **named)
            if not killers:
                killers.append(threading.Thread(target=self.kill_after, args=(run_dir / "checkpoints/2",)))
                killers[0].start()

        def kill_after(self, path: Path) -> None:
            while not path.exists() and self.process.returncode is None:
                time.sleep(0.01)
            self.process.kill()

    monkeypatch.setattr(launch, "Child", Child)
    assert launch.Launcher(load_config(tiny, arguments[1:]), arguments, processes=1, max_restarts=1).run() == 0
    killers[0].join()
    errors = capfd.readouterr().err
    assert "process 0 was ended by SIGKILL" in errors
    assert re.search("restart in 1 s on 1 device; the newest checkpoint is of step [24]", errors), errors
    assert checkpoint_steps(run_dir)[-1] == STEPS
    assert agree(read_metrics(run_dir, "loss", "grad_norm"), expected[0])


@pytest.mark.long
def test_the_loss_of_process_0_while_compiling_ends_the_other_with_a_sentence(tmp_path, start_two):
    first, second = both = start_two(f"run.dir={tmp_path / 'two'}", "run.peer_timeout_seconds=10")
    first.read_to("compiling")
    first.process.kill()
    start = time.monotonic()
    assert second.finish() == 4 and time.monotonic() - start < 10, second.output
    # Its host is not named if the other had not heard of it yet.
    assert re.match("megajax: error: process 0 .*was lost", second.output.splitlines()[-1]), second.output
    warned = ["run.peer_timeout_seconds=10" in run.output and "set it to 30 or more" in run.output for run in both]
    assert warned == [True, False], first.output  # a short timeout, told once


@pytest.fixture(scope="module")
def late(tmp_path_factory) -> str:
    """The prefix of a file with the token -7 in some documents beyond those that are read at the start."""
    prefix = tmp_path_factory.mktemp("late") / "a"
    with IndexedWriter(prefix, np.int32) as writer:
        writer.add_document(np.full(CHECKED_TOKENS, 5))
        writer.add_documents(np.tile([5] * 60 + [-7], 30_000), np.full(30_000, 61))
    return str(prefix)


def test_a_negative_token_late_in_a_file_stops_one_device(make_config, late):
    trainer = Trainer(make_config(f"data.train={late}", *OPTIONS), jax.devices()[:1])
    with pytest.raises(InputError, match="data.train holds -7 in t"):
        for _ in range(STEPS):
            trainer.next_batch()


def test_a_negative_token_in_the_last_evaluation_loses_no_step(tmp_path, make_config, late, checkpoint_steps):
    overrides = (f"data.valid={late}", "data.split=null", "run.steps=2", "run.eval_interval=100", "run.eval_steps=4")
    same = (*OPTIONS, f"schedule.decay_steps={STEPS}")  # the program of other tests
    trainer = Trainer(make_config(f"run.dir={tmp_path / 'run'}", *same, *overrides), jax.devices()[:1])
    with pytest.raises(InputError, match="data.valid holds -7 in t"):
        trainer.run()
    assert checkpoint_steps(tmp_path / "run") == [2]
