"""The time that each process itself spends on a step, and the slowest process.

All processes wait for each other in the collectives of a step, so their step times are equal. What differs is the time
in which a process does not wait for the devices: it reads data, and its main thread starts the step.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

OUTSTANDING = 2.0  # a process stands out at this multiple of the others' median
SHARE = 0.5  # and at this share of the step: below, the devices hide it


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
        own = {"data": round(self._data / steps, 6), "host": round(self._host / steps, 6)}
        self._reset()
        return own


class Slowest(NamedTuple):
    """The process with the most time of its own: its number, its seconds per step by part, the others' median."""

    process: int
    seconds: dict[str, float]
    others: float

    @property
    def own(self) -> float:
        """Its seconds per step."""
        return sum(self.seconds.values())

    def stands_out(self, step_seconds: float) -> bool:
        """Whether it slows down steps of `step_seconds`."""
        return self.own > max(OUTSTANDING * self.others, SHARE * step_seconds)

    def sentence(self, name: str, step_seconds: float) -> str:
        """The line for the console; `name` is the process's number and host."""
        parts = ", ".join(f"{part} {seconds:.3g} s" for part, seconds in self.seconds.items())
        return (
            f"slowest: {name} needs {self.own:.3g} s of its own for a step of {step_seconds:.3g} s ({parts}); the "
            f"others need {self.others:.3g} s"
        )


def find_slowest(by_process: Mapping[int, Mapping[str, Any]]) -> Slowest | None:
    """The slowest of several processes, from the results of `take`; None if fewer than two are known."""
    known = {process: dict(seconds) for process, seconds in by_process.items() if seconds}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda process: sum(known[process].values()))
    others = [sum(seconds.values()) for process, seconds in known.items() if process != slowest]
    return Slowest(slowest, known[slowest], statistics.median(others))
