"""The slowest process of a run, and warnings about GPUs."""

import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from megajax.training import gpu_health
from megajax.training.gpu_health import GpuHealth
from megajax.training.speed import Slowest, StepTimes, find_slowest
from megajax.training.step_log import StepLog


def test_the_time_of_a_process_is_that_in_which_it_does_not_wait_for_the_devices():
    times = StepTimes()
    for steps in (3, 1):  # of each line its own
        waited = 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            with times.reading():
                time.sleep(0.04)
            waited += time.perf_counter() - begin
            with times.starting():
                time.sleep(0.05)  # as if for the devices
                start = time.thread_time()
                while time.thread_time() - start < 0.01:
                    pass
        own = times.take()
        assert 0.04 <= own["data"] <= waited / steps + 1e-6 and 0.01 <= own["host"] < 0.03  # of a step
        assert times.take() == {"data": 0, "host": 0}


def test_the_own_time_of_a_line_is_of_the_same_steps_as_its_step_time():
    """Both begin again after an evaluation or a save, and after the first step, which compiled."""
    for begin in ("restart", "first_step_done"):
        log = StepLog(Mock(), Mock())
        log._meter = Mock()
        with log.times.reading():
            time.sleep(0.001)
        getattr(log, begin)(4)
        getattr(log._meter, begin).assert_called_once_with(4)
        assert log.times.take() == {"data": 0, "host": 0}


def test_the_slowest_process_is_named_if_it_slows_down_the_others():
    own = {0: {"data": 0.01, "host": 0.01}, 1: {"data": 0.3, "host": 0.02}, 2: {"data": 0.02, "host": 0.02}, 3: {}}
    slowest = find_slowest(own)
    assert slowest == Slowest(1, own[1], pytest.approx(0.03))
    assert slowest.stands_out(0.35) and not slowest.stands_out(0.7)  # the devices hide it
    assert not Slowest(1, {"data": 0.3}, 0.2).stands_out(0.35)
    for least, median in ((0.4, 0.2), (0.25, 0.01)):  # twice the others' median, and half of the step
        for seconds in (0.97 * least, 1.03 * least):
            assert Slowest(1, {"data": seconds}, median).stands_out(0.5) == (seconds > least)
    assert slowest.explain("process 1 on host b", 0.35) == (
        "slowest: process 1 on host b needs 0.32 s of its own for a step of 0.35 s (data 0.3 s, host 0.02 s); the "
        "others need 0.03 s"
    )
    assert find_slowest({0: own[0]}) is None


class Nvml(SimpleNamespace):
    """pynvml with two GPUs: the first runs into its power limit and then reports an Xid."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 1, 1, 0, 8

    def __init__(self):
        self.xids, self.ecc, self.reasons = [], {"GPU-a": 0, "GPU-b": 0}, {"GPU-a": 0x5, "GPU-b": 0x1}
        self.started = False

    def __getattr__(self, name: str):
        answers = {
            "nvmlInit": lambda: setattr(self, "started", True),
            "nvmlEventSetCreate": self.event_set,
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetUUID": lambda gpu: gpu,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda gpu: self.reasons[gpu],
            "nvmlDeviceGetClockInfo": lambda gpu, clock: 1200,
            "nvmlDeviceGetMaxClockInfo": lambda gpu, clock: 1980,
            "nvmlDeviceGetTotalEccErrors": lambda gpu, kind, counter: self.ecc[gpu],
            "nvmlDeviceRegisterEvents": lambda gpu, kinds, events: None,
            "nvmlEventSetWait_v2": self.wait,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    def event_set(self):
        if not self.started:
            raise self.NVMLError  # as each call before nvmlInit
        return "set"

    def wait(self, events, timeout):
        if not self.xids:
            raise self.NVMLError
        return SimpleNamespace(device="GPU-a", eventData=self.xids.pop())


@pytest.mark.skipif(find_spec("pynvml") is None, reason="the extra nvml is not installed")
def test_the_package_has_what_is_read_of_it():
    import pynvml

    used = set(re.findall(r"\bNVML\w+|\bnvml[A-Z]\w+", Path(gpu_health.__file__).read_text(encoding="utf-8")))
    assert used >= {"nvmlInit", "nvmlEventSetWait_v2"} and not {name for name in used if not hasattr(pynvml, name)}


@pytest.fixture
def warnings_of(monkeypatch, capsys):
    """(nvml or None) → a function that reads once and returns the warnings."""

    def start(nvml):
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        monkeypatch.setattr(gpu_health, "cuda_devices", lambda: ["GPU-a", "GPU-b"])
        health = GpuHealth()
        health.on_start(SimpleNamespace(note=print))

        def read() -> list[str]:
            health.on_log(None, 1, {})
            if health._thread is not None:
                health._thread.join()
            return capsys.readouterr().err.splitlines()

        return read

    return start


# In nvml.h: GpuIdle, ApplicationsClocksSetting, SwPowerCap, HwSlowdown, SyncBoost, SwThermalSlowdown,
# HwThermalSlowdown, HwPowerBrakeSlowdown, DisplayClockSetting
CLOCKS = {
    0x1: "",
    0x2: "",
    0x4: "its power limit",
    0x8: "the hardware",
    0x10: "",
    0x20: "its temperature (driver)",
    0x40: "its temperature (hardware)",
    0x80: "the power supply",
    0x100: "",
}


@pytest.mark.parametrize("bit", CLOCKS)
def test_clocks_that_a_fault_or_a_limit_lowers_are_reported(warnings_of, bit):
    nvml = Nvml()
    nvml.reasons = {"GPU-a": 0, "GPU-b": bit}
    found = warnings_of(nvml)()
    assert len(found) == bool(CLOCKS[bit]) and all(
        f"GPU-b runs at 1200 of 1980 MHz because of {CLOCKS[bit]}" in line for line in found
    )


def test_problems_of_gpus_are_reported_once(warnings_of):
    nvml = Nvml()
    read = warnings_of(nvml)
    (line,) = read()
    assert line.startswith("megajax: warning: process 0 on host ")
    assert line.endswith("GPU-a runs at 1200 of 1980 MHz because of its power limit")
    assert not read()
    nvml.xids, nvml.ecc["GPU-b"] = [79, 31, 79], 2
    *xids, ecc = sorted(read())
    assert [line.partition(": GPU-a ")[2] for line in xids] == ["reported Xid 31", "reported Xid 79"]
    assert ecc.endswith("GPU-b has had 2 uncorrected memory errors (ECC) since the driver started")
    assert not read()
    nvml.ecc["GPU-b"] = 5
    (more,) = read()
    assert more.endswith("GPU-b has had 5 uncorrected memory errors (ECC) since the driver started")
    assert not read()


def test_without_the_package_a_line_says_so(warnings_of, capsys):
    read = warnings_of(None)  # an import that fails
    assert "pip install 'megajax[nvml]'" in capsys.readouterr().out
    assert not read()
