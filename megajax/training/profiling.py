"""Traces of some steps by jax's profiler, for `megajax profile`."""

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from megajax.checkpoint import reason
from megajax.console import command

if TYPE_CHECKING:
    from megajax.training.loop import Trainer

# In a run directory: the folder of traces, and in it the compiled module and what else a reader has to know.
FOLDER, MODULE, FACTS = "profile", "step.hlo.gz", "trace.json"


class Profile:
    """Traces the steps of `logging.profile_start` and `profile_steps` into a run directory."""

    def __init__(self, trainer: "Trainer"):
        self.trainer, logging = trainer, trainer.config.logging
        self.start, self.count = logging.profile_start, logging.profile_steps
        self.traced: int | None = None  # steps of the trace that is being written

    @property
    def directory(self) -> Path:
        return self.trainer.run_dir / FOLDER

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around step `number` (from 1)."""
        if self.start is not None and self.traced is None and self.start <= number < self.start + self.count:
            jax.block_until_ready(self.trainer.state.step)  # the trace has no part of an earlier step
            with self._warning():
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # it would slow the host down
                jax.profiler.start_trace(str(self.directory), profiler_options=options)
                self.traced = 0
        yield
        if self.traced is not None:
            self.traced += 1
            if self.start is not None and number + 1 >= self.start + self.count:
                self.stop()

    def stop(self) -> None:
        """End a trace that has begun."""
        if self.traced is None:
            return
        trainer, steps, self.traced = self.trainer, self.traced, None
        jax.block_until_ready(trainer.state.step)
        with self._warning():
            jax.profiler.stop_trace()
            if trainer.writer and steps:
                devices = trainer.program.mesh.devices
                facts = {"steps": steps, "devices": devices.size, "device_kind": devices.flat[0].device_kind}
                (self.directory / MODULE).write_bytes(gzip.compress(trainer.running_text().encode(), 1))
                (self.directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")
            trainer.note(f"trace written to {self.directory}: {command('profile', trainer.run_dir)} reads it")

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Around what may fail, such as on a full disk: a trace must not lose the step that it shows."""
        try:
            yield
        except Exception as error:
            self.start = None
            self.trainer.note(f"megajax: warning: no trace was written to {self.directory} ({reason(error)})")
