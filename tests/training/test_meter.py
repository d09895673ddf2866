"""The speed of the logged steps, and the time that is left."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from megajax.schema.batch_schedule import BatchSizes
from megajax.training.speed import Meter, peak_memory_gib


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests set: `clock[0]`."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


@pytest.fixture
def meter(make_config, clock):
    return Meter(make_config("batch.sequence_length=16"), BatchSizes.constant(8), np.array(jax.devices()[:1]), 4)


def test_the_first_step_gives_no_time_left_and_the_others_do(meter, clock):
    clock[0] = 5.0  # compilation and warm-up
    meter.first_step_done(2.0)
    clock[0] = 5.25
    first = meter.measure(5)
    assert first["step_seconds"] == 3.25 and meter.seconds_left(15, first) is None
    clock[0] = 7.25
    second = meter.measure(9)
    assert second["step_seconds"] == 0.5 and meter.seconds_left(15, second) == pytest.approx(3.0)


def test_a_first_step_that_is_measured_with_others_is_left_out(meter, clock):
    clock[0] = 60.0
    meter.first_step_done(50.0)
    clock[0] = 62.0
    measured = meter.measure(9)  # steps 5 to 9, of which the last four took 2 s
    assert measured["step_seconds"] == 0.5 and meter.seconds_left(15, measured) == pytest.approx(3.0)
    assert measured["tokens_per_second_per_device"] == 8 * 16 / 0.5


def test_an_evaluation_before_the_first_line_starts_the_measurement_again(meter, clock):
    clock[0] = 60.0
    meter.first_step_done(0.0)
    clock[0] = 70.0
    meter.restart(6)
    clock[0] = 71.0
    assert meter.seconds_left(10, meter.measure(8)) == pytest.approx(1.0)


def test_the_tokens_of_all_devices_are_divided_among_them(make_config, clock):
    meter = Meter(make_config("batch.sequence_length=16"), BatchSizes.constant(8), np.array(jax.devices()[:4]), 0)
    clock[0] = 2.0
    measured = meter.measure(4)  # 4 steps of 8 sequences of 16 tokens on 4 devices in 2 s
    assert measured["tokens_per_second_per_device"] == 4 * 8 * 16 / 2.0 / 4
    assert meter.seconds_left(10, measured) == pytest.approx(3.0)  # 6 more steps of half a second


def test_the_peak_memory_is_that_of_the_device_with_the_most(monkeypatch):
    def device(peak):
        return SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": peak})

    monkeypatch.setattr(jax, "local_devices", lambda: [device(2**30), device(3 * 2**30), device(2**30)])
    assert peak_memory_gib() == 3.0


def test_the_peak_memory_without_statistics_of_devices_is_that_of_the_process():
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak_memory_gib() == pytest.approx(int(kib) / 2**20, rel=0.01)
