"""Speed and memory of the steps between logged steps, and the time that each process itself spends on them.

All processes wait for each other in the collectives of a step, so their step times are equal. What differs is the time
in which a process does not wait for the devices: it reads data, and its main thread starts the step.
"""

import resource
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from megajax.config import Config
from megajax.estimate.costs import flops_per_token, peak_flops
from megajax.schema.batch_schedule import BatchSizes

OUTSTANDING = 2.0  # a process stands out at this multiple of the others' median
SHARE = 0.5  # and at this share of the step: below, the devices hide it


class Meter:
    """Measures the time from `restart(step)` to each `measure(step)`, without that of the first step's compilation.

    `sizes` are the numbers of sequences of the steps.
    """

    def __init__(self, config: Config, sizes: BatchSizes, devices: Any, step: int):
        self.sizes, self.length, self.devices = sizes, config.batch.sequence_length, devices
        self.flops_per_token = flops_per_token(config)
        self.peak = peak_flops(devices.flat[0].device_kind)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Start the measurement now, so that time before, such as an evaluation, is left out."""
        self._time, self._step, self._left_out = time.perf_counter(), step, 0.0
        self._warm: float | None = None  # when the first step of all had ended, if it is one of the measured ones

    def first_step_done(self, compile_seconds: float) -> None:
        """The first step of all has ended now: its compilation does not count.

        Nor does its warm-up, if other steps are measured with it.
        """
        self._left_out, self._warm = compile_seconds, time.perf_counter()

    def measure(self, step: int) -> dict[str, Any]:
        """The values for metrics.jsonl of the steps since the last measurement."""
        self._only_first = self._warm is not None and step == self._step + 1
        if self._warm is not None and not self._only_first:
            self._time, self._step, self._left_out = self._warm, self._step + 1, 0.0
        seconds, steps = time.perf_counter() - self._time - self._left_out, max(step - self._step, 1)
        speed = (self._tokens(step) - self._tokens(self._step)) / seconds / self.devices.size
        self.restart(step)
        flops = speed * self.flops_per_token
        return {
            "tokens": self._tokens(step),
            "step_seconds": seconds / steps,
            "tokens_per_second_per_device": speed,
            "tflops_per_second_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "peak_memory_gib": peak_memory_gib(),
        }

    def seconds_left(self, steps: int, measured: dict[str, Any]) -> float | None:
        """The time of the steps up to `steps` at the speed of `measured`, the last result of `measure`.

        None after the first step of all, whose speed is not that of the others.
        """
        if self._only_first:
            return None
        tokens = self._tokens(steps) - measured["tokens"]
        return tokens / self.devices.size / measured["tokens_per_second_per_device"]

    def _tokens(self, step: int) -> int:
        """The number of tokens in the first `step` steps."""
        return self.sizes.samples_before(step) * self.length


def peak_memory_gib() -> float:
    """The peak memory so far, of the local device with the most; of the process if devices have no statistics."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (max(peaks) or host) / 2**30


class StepTimes:
    """Adds up this process's own seconds in its steps."""

    def __init__(self):
        self._reset()

    def _reset(self) -> None:
        self._data = self._host = 0.0
        self._steps = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the wait for a step's batch."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the start of a step. CPU time of the thread is counted, because it may wait for the devices here."""
        start = time.thread_time()
        yield
        self._host += time.thread_time() - start
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Seconds per step since the last call: "data" for the batch, "host" for the start of the step."""
        steps = max(self._steps, 1)
        waits = {"data": round(self._data / steps, 6), "host": round(self._host / steps, 6)}
        self._reset()
        return waits


class Slowest(NamedTuple):
    """The process with the most time of its own: its number, its seconds per step by part, the others' median."""

    process: int
    seconds: dict[str, float]
    median_of_others: float

    @property
    def total(self) -> float:
        """Its seconds per step."""
        return sum(self.seconds.values())

    def stands_out(self, step_seconds: float) -> bool:
        """Whether it slows down steps of `step_seconds`."""
        return self.total > max(OUTSTANDING * self.median_of_others, SHARE * step_seconds)

    def explain(self, name: str, step_seconds: float) -> str:
        """The line for the console; `name` is the process's number and host."""
        parts = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in self.seconds.items())
        return (
            f"slowest: {name} needs {self.total:.3g} s of its own for a step of {step_seconds:.3g} s ({parts}); the "
            f"others need {self.median_of_others:.3g} s"
        )


def find_slowest(by_process: Mapping[int, Mapping[str, Any]]) -> Slowest | None:
    """The slowest of several processes, from the results of `take`; None if fewer than two are known."""
    known = {process: dict(seconds) for process, seconds in by_process.items() if seconds}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda process: sum(known[process].values()))
    of_others = [sum(seconds.values()) for process, seconds in known.items() if process != slowest]
    return Slowest(slowest, known[slowest], statistics.median(of_others))
