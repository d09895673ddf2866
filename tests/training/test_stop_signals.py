"""Requests to stop: signals, a deadline, and the step on which several processes agree."""

import gc
import itertools
import os
import random
import signal
import threading
import time

import pytest
from several_processes import Store, clusters, together

from megajax.training import ending
from megajax.training.stop_signals import StopSignals, deadline


@pytest.fixture
def interruptible():
    """Ctrl-C interrupts, which a shell's job in the background ignores, and no garbage is collected.

    Python drops an interrupt that comes during a callback of a collection (hypothesis has such).
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()
    yield
    gc.enable()
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_first_signal_asks_for_a_stop_and_a_second_ctrl_c_interrupts(number, capsys):
    with StopSignals() as stop:
        assert not stop.requested(1)
        os.kill(os.getpid(), number)
        assert stop.requested(2)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("interruptible")
def test_a_second_ctrl_c_is_heard_by_who_listens_to_signals_and_the_first_is_not():
    """`megajax.train` has a thread that ends a process which is stuck in a call."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer)
    try:
        with StopSignals():
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(BlockingIOError):
                os.read(reader, 9)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            assert os.read(reader, 9) == bytes([signal.SIGINT])
    finally:
        signal.set_wakeup_fd(before)


@pytest.mark.parametrize("requests", [*itertools.product([True, False], repeat=2)], ids=str)
def test_a_run_that_has_reached_its_goal_stays_done_whatever_else_asks_for_a_stop(requests):
    with StopSignals() as stop:
        for done in requests:
            stop.ask(done) if done else os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested(1) and stop.is_done == any(requests)


def test_a_request_from_before_the_first_step_is_one_for_the_run(monkeypatch):
    """A scheduler may preempt a run while it reads its weights: `megajax.train` has noted the signal."""
    early = []
    monkeypatch.setattr(ending, "early", early)
    for number in (None, *ending.STOP_SIGNALS):
        early[:] = []
        if number is not None:
            ending.read_by_a_thread(number, None)
        with StopSignals() as stop:
            assert stop.requested(1) == (number is not None) and not stop.is_done


def test_a_deadline_asks_for_a_stop_when_it_is_reached():
    with StopSignals(deadline=time.monotonic() + 3600) as stop:
        assert not stop.requested(1)
    with StopSignals(deadline=time.monotonic()) as stop:
        assert stop.requested(1) and stop.at_deadline


def test_the_deadline_counts_from_the_start_of_the_process():
    """A process that started half an hour ago may run for another half an hour of 60 minutes."""
    assert deadline(None, time.time()) is None
    assert deadline(60.0, time.time() - 1800) == pytest.approx(time.monotonic() + 1800, abs=1)


class Devices:
    """Steps that need all processes, and hosts that start at most `ahead` of them before the devices have run them."""

    def __init__(self, processes: int, ahead: int):
        self.started, self._ahead, self._changed = [0] * processes, ahead, threading.Condition()

    def start(self, process: int) -> int:
        with self._changed:
            self.started[process] += 1
            self._changed.notify_all()
            waits_for = self.started[process] - self._ahead
            assert self._changed.wait_for(lambda: min(self.started) >= waits_for, timeout=20), "waited for ever"
            return self.started[process]


@pytest.fixture
def stopped_at():
    """(go_back_at=0) → the started steps of three processes until they stop, and the one at which a stop is requested.

    The third result is the latest step that a process was about to start when it heard of the request.

    After step `go_back_at` all go back by 1000 steps, once, which shows in the steps that they count.
    """

    def run_all(go_back_at: int = 0) -> tuple[list[int], int, int]:
        devices, count, store = Devices(3, ahead=4), 3, Store(3, slowest=0.003)
        asks = random.randrange(count)
        asks_at = go_back_at - random.randrange(5) if go_back_at else random.randrange(1, 30)
        rollback = threading.Barrier(count)

        def run(index: int):
            with StopSignals() as stop:
                run_until_stopped(index, stop)

        def run_until_stopped(index: int, stop: StopSignals):
            back = 0
            while True:
                time.sleep(random.random() * (0.004 if index == 1 else 0.0005))  # one is slow
                started = devices.start(index)
                if go_back_at and started == go_back_at + 1 and not back:
                    rollback.wait(20)  # a rollback is a collective
                    back = 1000
                    stop.go_back(started - back)
                    continue
                if index == asks and started >= asks_at:
                    stop.ask()
                if stop.requested(started - back):
                    return

        with together(clusters(count, store)) as call:
            assert call(run) == [None] * count
        return devices.started, asks_at, max(int(store.values[f"megajax/stop/0/{i}"]) for i in range(count))

    return run_all


def test_processes_that_run_ahead_of_each_other_stop_at_the_same_step(stopped_at):
    for _ in range(15):
        started, asks_at, latest = stopped_at()
        assert started == [latest] * 3 and asks_at <= latest <= asks_at + 40, started


def test_a_process_that_has_started_no_step_proposes_its_next_one():
    store = Store(2)

    def run(rank: int) -> int:
        with StopSignals(step=41) as stop:
            if rank == 0:
                stop.ask()
            else:
                assert store.blocking_key_value_get("megajax/stop/0/1", 20_000) == "42"
            return next(step for step in itertools.count(42) if stop.requested(step))

    with together(clusters(2, store)) as call:
        first, second = call(run)
    assert first == second >= 42


def test_a_stop_that_is_requested_before_a_rollback_comes_soon_after_it(stopped_at):
    """It would come 1000 steps later, at the step on which the processes agreed before."""
    for _ in range(15):
        started, asks_at, _ = stopped_at(go_back_at=20)
        assert len(set(started)) == 1 and asks_at <= started[0] <= 20 + 40, started
