"""Requests to stop: signals, a deadline, and the step on which several processes agree."""

import itertools
import os
import random
import signal
import threading
import time

import jax
import pytest

from megajax.training import stop_signals
from megajax.training.stop_signals import Agreement, StopSignals


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


def test_a_deadline_asks_for_a_stop_when_it_is_reached():
    with StopSignals(deadline=time.monotonic() + 3600) as stop:
        assert not stop.requested(1)
    with StopSignals(deadline=time.monotonic()) as stop:
        assert stop.requested(1)


class Store:
    """A key-value store with the functions of jax's client that `Agreement` uses; each call takes a random time."""

    def __init__(self, slowest: float = 0.003):
        self._values, self._changed, self._slowest = {}, threading.Condition(), slowest

    def key_value_set(self, key: str, value: str) -> None:
        time.sleep(random.random() * self._slowest)
        with self._changed:
            if key in self._values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: {key}")
            self._values[key] = value
            self._changed.notify_all()

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: key in self._values, timeout=20), f"waited in vain for {key}"
        time.sleep(random.random() * self._slowest)
        return self._values[key]


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


def test_processes_that_run_ahead_of_each_other_stop_at_the_same_step(monkeypatch):
    for _ in range(15):
        store, devices, count = Store(), Devices(3, ahead=4), 3
        asks, asks_at = random.randrange(count), random.randrange(1, 30)
        with monkeypatch.context() as patch:
            patch.setattr(stop_signals.distributed.global_state, "client", store)
            patch.setattr(stop_signals, "RUNS", itertools.repeat(7))
            patch.setattr(jax, "process_count", lambda count=count: count)
            agreements = []
            for index in range(count):
                patch.setattr(jax, "process_index", lambda index=index: index)
                agreements.append(Agreement(0))

        def run(index: int, agreements=agreements, devices=devices, asks=asks, asks_at=asks_at):
            while True:
                time.sleep(random.random() * (0.004 if index == 1 else 0.0005))  # one is slow
                step = devices.start(index)
                if index == asks and step >= asks_at:
                    agreements[index].ask()
                if agreements[index].reached(step):
                    return

        hosts = [threading.Thread(target=run, args=(index,)) for index in range(count)]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join(timeout=20)
        assert len(set(devices.started)) == 1 and asks_at <= devices.started[0] <= asks_at + 40, devices.started
