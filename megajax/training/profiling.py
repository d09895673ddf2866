"""Traces of some steps by jax's profiler."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from megajax.config import LoggingConfig


class Profile:
    """Traces the steps of `logging.profile_start` and `profile_steps` into a run directory."""

    def __init__(self, config: LoggingConfig, run_dir: Path, note: Callable[[str], None]):
        self.start, self.count = config.profile_start, config.profile_steps
        self.directory, self.note, self.tracing = run_dir / "profile", note, False

    @contextlib.contextmanager
    def step(self, number: int, result: Callable[[], Any]) -> Iterator[None]:
        """Around step `number` (from 1); `result` gives an array that is ready when the step is."""
        if self.start is not None and not self.tracing and self.start <= number < self.start + self.count:
            jax.profiler.start_trace(str(self.directory))
            self.tracing = True
        yield
        if self.start is not None and number + 1 >= self.start + self.count:
            self.stop(result)

    def stop(self, result: Callable[[], Any]) -> None:
        """End a trace that has begun."""
        if self.tracing:
            jax.block_until_ready(result())
            jax.profiler.stop_trace()
            self.tracing = False
            self.note(f"trace written to {self.directory}: pip install xprof, then xprof --port 8791 {self.directory}")
