"""Traces of some steps by jax's profiler, for `megajax profile`."""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from megajax import cluster
from megajax.checkpoint import reason
from megajax.console import command
from megajax.training.hooks import Hook, RunView

# In a run directory: the folder of traces, and in it the compiled module and what else a reader has to know.
FOLDER, MODULE, FACTS = "profile", "step.hlo.gz", "trace.json"


class Profile(Hook):
    """Traces the steps of `logging.profile_start` and `profile_steps` into a run directory."""

    def __init__(self, run: RunView, running_text: Callable[[], str]):
        """`running_text` gives the compiled module of the last step in text form."""
        self._run, self._running_text, logging = run, running_text, run.config.logging
        self.run_dir = Path(run.config.run.dir)
        self.directory = self.run_dir / FOLDER
        self.start, self.count = logging.profile_start, logging.profile_steps
        self.traced: int | None = None  # steps of the trace that is being written

    def before_step(self, run: RunView, batch: dict[str, jax.Array]) -> None:
        if self.start is not None and self.traced is None and self.start <= run.step + 1 < self.start + self.count:
            jax.block_until_ready(run.state.step)  # the trace has no part of an earlier step
            with self._warning():
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0  # it would slow the host down
                jax.profiler.start_trace(str(self.directory), profiler_options=options)
                self.traced = 0

    def on_step(self, run: RunView) -> None:
        if self.traced is not None:
            self.traced += 1
            if self.start is not None and run.step + 1 >= self.start + self.count:
                self.on_end(run)

    def on_end(self, run: RunView) -> None:
        """End a trace that has begun."""
        if self.traced is None:
            return
        steps, self.traced = self.traced, None
        jax.block_until_ready(run.state.step)
        with self._warning():
            jax.profiler.stop_trace()
            if cluster.current().is_first and steps:
                devices = run.program.mesh.devices
                facts = {"steps": steps, "devices": devices.size, "device_kind": devices.flat[0].device_kind}
                (self.directory / MODULE).write_bytes(gzip.compress(self._running_text().encode(), 1))
                (self.directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")
            run.note(f"trace written to {self.directory}: {command('profile', self.run_dir)} reads it")

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        """Around what may fail, such as on a full disk: a trace must not lose the step that it shows."""
        try:
            yield
        except Exception as error:
            self.start = None
            self._run.note(f"megajax: warning: no trace was written to {self.directory} ({reason(error)})")
