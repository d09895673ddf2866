"""One process trains in a run directory; a process that is gone doesn't keep the others out."""

import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

import jax
import pytest
import several_processes
from trainers import QuickTrainer

from megajax import Hook
from megajax.errors import InputError
from megajax.training import run_lock
from megajax.training.loop import Trainer
from megajax.training.run_lock import RunLock


@pytest.fixture
def owner(tmp_path, tmp_path_factory):
    """(changes) → writes the lock of the parent of this process, which is alive, with changes."""

    def write(**changes):
        with RunLock(elsewhere := tmp_path_factory.mktemp("own")):
            own = json.loads((elsewhere / "lock").read_text())
        started = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
        (tmp_path / "lock").write_text(json.dumps(own | {"process": os.getppid(), "started": int(started)} | changes))

    return write


@pytest.fixture
def short_watch(monkeypatch):
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 0.2)


def test_a_lock_names_its_process_and_goes_with_it(tmp_path):
    with RunLock(tmp_path):
        held = json.loads((tmp_path / "lock").read_text())
        assert (held["process"], held["host"]) == (os.getpid(), os.uname().nodename)
        with RunLock(tmp_path):  # another Trainer of the same process
            pass
        assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("shared", [True, False])
def test_all_processes_of_a_run_must_see_its_lock(tmp_path, monkeypatch, shared):
    monkeypatch.setattr(run_lock, "SHARED_SECONDS", 0.1)

    def take(rank):
        lock = RunLock(tmp_path / ("run" if shared else f"run-{rank}"))
        lock.path.parent.mkdir(exist_ok=True)
        try:
            lock.acquire(lambda _: None)
        finally:
            assert lock.held is shared  # else a second try would not ask again
            lock.release()

    with several_processes.together(several_processes.clusters(2)) as call:
        problems = call(take)
    if shared:
        assert problems == [None, None]
    else:
        here, first = tmp_path / "run-1", tmp_path / "run-0"
        assert [type(problem) for problem in problems] == [InputError] * 2
        sentence = f"run.dir={here} is {here} on host .* process 0 .* writes to {first} on host .*: give the path"
        assert all(re.match(sentence, str(problem)) for problem in problems)
    assert not list(tmp_path.rglob("lock"))


def test_a_second_run_in_a_directory_is_refused_and_leaves_the_first_alone(tmp_path, make_config, owner):
    owner()
    before = (tmp_path / "lock").read_text()
    trainer = Trainer(make_config(f"run.dir={tmp_path}"), jax.devices()[:1])
    with pytest.raises(InputError, match=f"run.dir={tmp_path} is in use: process {os.getppid()} on .* or choose"):
        trainer.run()
    assert (tmp_path / "lock").read_text() == before
    assert os.listdir(tmp_path) == ["lock"]


@pytest.fixture(scope="module")
def zombie():
    """A process that has ended, and whose parent has not waited for it, as in a container without init."""
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    started = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19]
    yield {"process": process.pid, "started": int(started)}
    process.wait()


@pytest.mark.parametrize(
    "changes", [{"process": 2**22 + 5}, {"started": 5}, None], ids=["no such process", "another one", "zombie"]
)
def test_the_lock_of_a_process_of_this_host_that_is_gone_is_taken_over(tmp_path, owner, zombie, changes):
    owner(**(changes or zombie))
    said = []
    lock = RunLock(tmp_path)
    lock.acquire(said.append)
    assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()
    assert [line.startswith(f"taking over {tmp_path}: process ") for line in said] == [True]
    lock.release()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [None, "", '{"host": '], ids=["other host", "empty", "torn"])
def test_a_lock_that_cannot_be_looked_up_is_watched_for_a_heartbeat(tmp_path, owner, short_watch, content):
    owner(host="elsewhere")
    path = tmp_path / "lock"
    if content is not None:
        path.write_text(content)
    stop = threading.Event()

    def beat():
        count = 0
        while not stop.wait(0.02):
            count += 1
            os.utime(path, (count, count))

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(InputError, match="is in use"):
        RunLock(tmp_path).acquire(lambda _: None)
    stop.set()
    thread.join()
    with RunLock(tmp_path):
        assert json.loads(path.read_text())["process"] == os.getpid()


@pytest.mark.parametrize("key", ["host", "boot", "processes"])
def test_a_process_number_of_another_host_start_or_container_says_nothing(tmp_path, owner, short_watch, key):
    """There is a process with that number and start here too, but no heartbeat."""
    owner(**{key: "another"})
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock").read_text())["process"] == os.getpid()


def test_a_lock_that_cannot_be_read_for_a_moment_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    with RunLock(tmp_path) as lock:
        (tmp_path / "lock").unlink()
        while not (tmp_path / "lock").exists():  # it comes back with the next heartbeat
            pass
        assert not lock.lost


def test_a_run_whose_lock_was_taken_over_knows_it_and_leaves_it(tmp_path, owner, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    lock = RunLock(tmp_path)
    lock.acquire()
    owner()
    while not lock.lost:  # with its next heartbeat
        time.sleep(0.01)
    lock.release()
    assert json.loads((tmp_path / "lock").read_text())["process"] == os.getppid()


class TakenOver(Hook):
    """Before step 2 another process takes over the directory, and the trainer's next sign of life finds its lock."""

    def __init__(self, owner):
        self.owner, self.trainer = owner, None

    def before_step(self, run, batch):
        if run.step == 1:
            self.owner()
            while not self.trainer.directory.lock.lost:
                time.sleep(0.01)


def test_a_run_whose_lock_was_taken_over_ends_with_its_next_line(tmp_path, make_config, owner, monkeypatch):
    monkeypatch.setattr(run_lock, "HEARTBEAT_SECONDS", 0.01)
    config = make_config(f"run.dir={tmp_path}", "run.steps=9")
    hook = TakenOver(owner)
    hook.trainer = QuickTrainer(config, jax.devices()[:1], hooks=[hook])
    with pytest.raises(InputError, match=f"another process took over run.dir={tmp_path}: this one stops at step 2"):
        hook.trainer.run()
    assert json.loads((tmp_path / "lock").read_text())["process"] == os.getppid()
