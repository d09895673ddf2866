"""Speed and memory of the steps between two logged ones."""

import resource
import time
from typing import Any

import jax

from megajax.config import Config
from megajax.plan import flops_per_token, peak_flops


class Meter:
    """Measures from `restart(step)` to each `measure(step)`; the caller says how many of the seconds don't count."""

    def __init__(self, config: Config, devices: Any, step: int):
        self.devices = devices
        self.step_tokens = config.batch.global_size * config.batch.sequence_length
        self.flops_per_token = flops_per_token(config)
        self.peak = peak_flops(devices.flat[0].device_kind)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Measure from here on: what came before, such as an evaluation, is left out."""
        self._time, self._step, self._left_out = time.perf_counter(), step, 0.0

    def leave_out(self, seconds: float) -> None:
        """Don't count `seconds` of the time since the last measurement, such as those of compiling."""
        self._left_out += seconds

    def measure(self, step: int) -> dict[str, Any]:
        """What metrics.jsonl says of the steps since the last measurement."""
        seconds = (time.perf_counter() - self._time - self._left_out) / max(step - self._step, 1)
        self.restart(step)
        speed = self.step_tokens / seconds / self.devices.size
        flops = speed * self.flops_per_token
        return {
            "tokens": step * self.step_tokens,
            "step_seconds": seconds,
            "tokens_per_second_per_device": speed,
            "tflops_per_second_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "peak_memory_gib": peak_memory_gib(),
        }


def peak_memory_gib() -> float:
    """The largest memory in use so far: of the fullest local device, or of the process where devices don't tell."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (max(peaks) or host) / 2**30
