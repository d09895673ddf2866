"""Speed and memory of the steps between logged steps."""

import resource
import time
from typing import Any

import jax

from megajax.config import Config
from megajax.config.batch_schedule import BatchSizes
from megajax.plan.costs import flops_per_token, peak_flops


class Meter:
    """Measures the time from `restart(step)` to each `measure(step)`, without the seconds given to `leave_out`.

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

    def leave_out(self, seconds: float) -> None:
        """Leave out `seconds` of the time since the last measurement, such as those of compilation."""
        self._left_out += seconds

    def first_step_done(self) -> None:
        """The first step of all has ended now: its warm-up does not count if other steps are measured with it."""
        self._warm = time.perf_counter()

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
