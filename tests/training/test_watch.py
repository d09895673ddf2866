"""A process that hangs, or whose peers are gone, ends with a sentence."""

import json
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import pytest
from several_processes import Store

from megajax import threads
from megajax.cluster import Cluster, peers, relay
from megajax.cluster.peers import Peers
from megajax.console import BAD_NUMBERS, DONE, INTERRUPTED, LOST, MISTAKE, STOPPED
from megajax.training import watch
from megajax.training.watch import Watch


class Client:
    """A process's access to the store; `lose` makes all calls hang, as those of a dead or stopped process."""

    def __init__(self, store: Store):
        self.store, self.lost = store, False

    def __getattr__(self, name: str):
        if self.lost:
            threading.Event().wait()
        return getattr(self.store, name)


@pytest.fixture
def processes():
    """(count, timeout) → the `Peers` of each process, and their clients."""

    every: list[Client] = []

    def make(count: int, timeout: float) -> tuple[list[Peers], list[Client]]:
        store = Store(count)
        clients = [Client(store) for _ in range(count)]
        every.extend(clients)
        made = [Peers(Cluster(rank, count, client), timeout) for rank, client in enumerate(clients)]
        for each in made:
            each.step = 7 + each.rank
        return made, clients

    yield make
    for client in every:
        client.lost = True  # its thread waits for ever


def verdicts(those: list[Peers], seconds: float) -> dict[int, str]:
    """What the processes find within `seconds`, by their index in `those`; each is asked as the watch does it.

    The seconds are those that the processes are told of: on a busy machine more of them pass.
    """
    found = {}
    for _ in range(round(seconds / 0.01)):
        if len(found) == len(those):
            break
        time.sleep(0.01)
        for index, process in enumerate(those):
            if index not in found and (sentence := process.check(0.01)):
                found[index] = sentence
                process.leave(LOST, sentence)
    return found


def test_a_process_that_ends_in_order_does_not_take_the_end_of_process_0_for_a_loss(processes):
    those, clients = processes(2, timeout=0.6)
    time.sleep(0.2)
    clients[0].lost = True  # it has gone
    those[1].leave(DONE)
    assert not verdicts(those[1:], 0.8)


@pytest.mark.parametrize("status", [DONE, STOPPED, BAD_NUMBERS, MISTAKE, INTERRUPTED, LOST])
def test_an_end_on_which_all_processes_agree_is_no_loss_of_one(processes, status):
    """At the end of the steps, at a stop or at bad numbers the others end too; else one has ended alone."""
    (first, second), clients = processes(2, timeout=0.3)
    second.leave(status)
    clients[1].lost = True  # it has gone
    found = verdicts([first], 0.5)
    assert (not found) == (status in (DONE, STOPPED, BAD_NUMBERS)), found


@pytest.mark.parametrize("lost", [0, 2])
def test_all_others_end_with_the_number_host_and_last_step_of_a_lost_process(processes, lost):
    those, clients = processes(3, timeout=1.2)
    assert not verdicts(those, 0.7)  # longer than the silence that ends the run
    clients[lost].lost = True
    others = [process for process in those if process.rank != lost]
    found = verdicts(others, 2)
    assert len(found) == 2
    assert [process.speaks_for_all for process in others] == [True, False]  # one event of a run, also without process 0
    for sentence in found.values():
        assert f"process {lost} on host {peers.socket.gethostname()} was lost (last known step: {7 + lost})" in sentence


def test_time_in_which_a_process_itself_was_stopped_is_no_silence_of_the_others(processes):
    those, clients = processes(2, timeout=60)
    clients[1].lost = True
    assert those[0].check(15) is None and those[0].check(15) is not None


def test_a_failed_collective_or_a_closed_connection_shortens_the_wait(processes):
    """With a sign each 5 s from a third of the timeout to three signs, and to two: not to less."""
    those, clients = processes(2, timeout=60)
    time.sleep(0.1)  # for the first signs
    clients[0].lost = True
    assert those[1].check(14) is None
    those[1].suspect()
    assert those[1].check(0.5) is None and those[1].check(1) is not None
    those, clients = processes(2, timeout=60)
    time.sleep(0.1)
    clients[0].lost = True
    assert those[1].check(9) is None
    relay.LOST.set()
    try:
        assert those[1].check(0.5) is None and those[1].check(1) is not None
    finally:
        relay.LOST.clear()
    those, _ = processes(3, timeout=60)
    assert those[0].check(14) is None  # of both others
    those[0].signs[1] = {"suspicious": True}  # the collective failed there
    assert those[0].check(0.5) is None and those[0].check(1) is not None


def test_the_end_of_another_process_is_a_verdict_after_two_signs(processes):
    """This one may be about to end in the same way."""
    (first, _), _ = processes(2, timeout=60)
    time.sleep(0.1)
    first.signs[1] = {"status": MISTAKE, "in_order": False}
    assert first.check(9.5) is None and "ended with status 2" in first.check(1)


def test_a_text_that_is_no_sign_counts_as_silence(processes):
    """Of another program that reaches the coordinator's port: the thread goes on to read. A run for each text."""
    readers, texts = [], ["", "{", "[1]", "3", '{"step": 1}', "[" * 100_000]
    for text in texts:
        (reader, _), clients = processes(2, timeout=0.6)
        clients[1].lost = True
        clients[0].store.values["megajax/signs/0/1"] = text
        readers.append(reader)
    found = verdicts(readers, 5)
    for index, text in enumerate(texts):
        assert "process 1" in found[index] and "was lost" in found[index], text[:9]
        assert "step: 1" not in found[index], text[:9]
    threads.check()


def test_a_process_that_ends_is_not_lost(processes):
    """With a status on which all processes agree; another one, or the end of one alone, ends the others."""
    ends, others = [(0, True), (3, True), (75, True), (2, True), (0, False)], []
    for status, agreed in ends:
        (other, ending), clients = processes(2, timeout=1.2)
        ending.leave(status, agreed=agreed)
        clients[1].lost = True
        others.append(other)
    found = verdicts(others, 0.8)
    assert found.keys() == {3, 4}, found
    for index in found:
        assert "process 1 on host" in found[index] and f"ended with status {ends[index][0]}" in found[index]
    for index in (0, 1, 2):
        others[index].leave(ends[index][0])  # the other has left: no wait


@pytest.fixture
def ended(monkeypatch):
    """Statuses with which the process would have ended."""
    statuses, came = [], threading.Event()

    def end(status: int) -> None:
        statuses.append(status)
        came.set()
        threading.Event().wait()

    monkeypatch.setattr(watch, "_exit", end)
    monkeypatch.setattr(watch, "TICK", 0.02)
    return lambda seconds: statuses if came.wait(seconds) else []


def test_process_0_logs_the_slowest_process_and_notes_it_once(make_config, processes):
    (first, *_), _ = processes(3, 30.0)
    seconds, said = {1: {"data": 0.3, "host": 0.2}, 2: {"data": 0.01, "host": 0.02}}, []
    signs = {i: {"host": f"h{i}", "step": 1, "number": 1, "own_seconds": own} for i, own in seconds.items()}
    watch = Watch(make_config())
    watch.peers, first.signs = first, signs
    for _ in range(2):
        found = watch.slowest({"data": 0.02, "host": 0.03}, 0.6, said.append)
    assert first.own_seconds == {"data": 0.02, "host": 0.03}  # for its next sign
    assert found.pop("slowest_own_seconds") == pytest.approx(0.5)
    assert found.pop("others_own_seconds") == pytest.approx((0.05 + 0.03) / 2)
    assert found == {"slowest_process": 1, "slowest_host": "h1"}
    assert len(said) == 1 and "process 1 on host h1 needs 0.5 s of its own for a step of 0.6 s" in said[0]
    watch.slowest({"data": 0.02, "host": 0.03}, 600, said.append)  # nothing against such a step
    assert len(said) == 1


def test_a_step_that_hangs_ends_the_process_with_the_stacks_of_all_threads(
    make_config, tmp_path, ended, processes, capfd
):
    """And with the last known step of each process."""
    hook = f"logging.on_event=tee {tmp_path / 'event'}"
    config = make_config(f"run.dir={tmp_path}", "run.hang_min_seconds=1", hook)
    watched = Watch(config).__enter__()
    those, _ = processes(2, timeout=1.2)
    watched.peers = those[0]

    def a_step_that_hangs(watched: Watch) -> list[int]:
        for step in range(5):
            watched.on_step(SimpleNamespace(step=step))
            time.sleep(0.01)
        return ended(5)

    assert a_step_that_hangs(watched) == [4]
    sentence = capfd.readouterr().err
    assert re.search(r"the step after step 4 has taken 1 s, a usual step \S+ s: it hangs", sentence)
    assert f"{tmp_path}/hang-0.txt" in sentence
    stacks = (tmp_path / "hang-0.txt").read_text()
    steps = re.findall(r"last known step of process (\d): (\d)\n", stacks)
    assert steps == [("0", "4"), ("1", "8")] and "in a_step_that_hangs" in stacks
    assert "in a_step_that_hangs" in stacks.partition("Main thread:\n")[2].partition("hread 0x")[0]
    event = json.loads((tmp_path / "event").read_text())
    assert (event["event"], event["step"], event["status"]) == ("hang", 4, LOST) and event["text"] in sentence


def test_a_failed_collective_after_a_loss_is_told_once_as_the_loss(make_config, tmp_path, ended, processes, capfd):
    those, clients = processes(2, timeout=1.2)
    time.sleep(0.3)  # for the first signs
    watched = Watch(make_config(f"run.dir={tmp_path}", f"logging.on_event=tee -a {tmp_path / 'events'}"))
    watched.peers, clients[1].lost = those[0], True
    error = jax.errors.JaxRuntimeError("Gloo: connection closed by peer")
    for work, arguments in ((watched._watch, ()), (watched.__exit__, (type(error), error, None))):
        threading.Thread(target=work, args=arguments, daemon=True).start()
    assert ended(10) == [LOST]
    event = json.loads((tmp_path / "events").read_text())
    assert (event["event"], event["status"]) == ("lost", LOST) and event["text"] in capfd.readouterr().err
    assert event["text"].startswith("process 1 on host") and "was lost" in event["text"]


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [(None, 0, ""), (SystemExit(0), 0, ""), (ArithmeticError("an error"), 1, "ArithmeticError: an error\n")],
)
def test_only_the_status_of_a_run_is_one_on_which_all_agree(
    make_config, monkeypatch, processes, capsys, error, status, printed
):
    """After a closed pipe a process ends with status 0, and the others would wait for it."""
    those, _ = processes(2, timeout=60)
    left = {}
    monkeypatch.setattr(those[1], "leave", lambda status, **more: left.update(status=status, **more))
    monkeypatch.setattr(watch, "_exit", sys.exit)
    watched = Watch(make_config())
    watched.peers = those[1]
    with pytest.raises(SystemExit):
        watched.__exit__(type(error), error, None)
    assert left == {"status": status, "agreed": error is None}
    assert capsys.readouterr().err == printed


def test_a_thread_that_holds_the_end_of_the_process_hangs_too(make_config, tmp_path, ended, monkeypatch, capfd):
    monkeypatch.setattr(watch, "OTHER_WORK", 1)
    free, executor = threading.Event(), ThreadPoolExecutor(1)
    executor.submit(free.wait, 20)

    def end():
        with Watch(make_config(f"run.dir={tmp_path}", "run.hang_min_seconds=1")) as watched:
            watched.end_with(executor)

    threading.Thread(target=end, daemon=True).start()
    assert ended(10) == [4] and "the end of the process has taken 1 s: it hangs" in capfd.readouterr().err
    assert "last known step of process 0: " in (tmp_path / "hang-0.txt").read_text()
    free.set()


def test_no_other_thread_ends_a_process_that_has_ended_in_order(make_config):
    """Such as the one that waits for signals: it would change the status."""
    with Watch(make_config()) as watched:
        pass
    other = threading.Thread(target=watched.ending.begin, daemon=True)
    other.start()
    other.join(0.02)
    assert other.is_alive()


def test_the_limit_is_a_multiple_of_the_median_step_and_generous_for_other_work(make_config, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watched = Watch(make_config("run.hang_min_seconds=2", "run.hang_factor=3"))
    assert watched.limit() == 24  # the start
    for step, seconds in enumerate([0.0, 1.0, 2.0, 1.0, 60.0]):
        now += seconds
        watched.stepped(step)
    assert watched.limit() == 3 * 1.5
    with watched.working("the save"):
        now += 500
        assert watched.limit() == 24
    for step in (5, 6):  # the time of the save is in no step
        now += 1.0
        watched.stepped(step)
    assert watched.limit() == 3 * 1.0
    assert Watch(make_config("run.hang_factor=null")).limit() is None
