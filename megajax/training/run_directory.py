"""What a run writes besides its log: the lock of its directory, the record of its configs, and all its checkpoints.

And what it says about saves: their size, speed and cost, one that has to wait, and a failure.
"""

import time
from collections.abc import Callable
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from megajax import cluster
from megajax.checkpoint import Checkpoints, SaveOutcome, complete_steps
from megajax.checkpoint.storage import is_in_bucket, remove_partial
from megajax.config import Config
from megajax.config.sentences import located
from megajax.errors import InputError, counted
from megajax.training import logs, run_record
from megajax.training.hooks import RunView
from megajax.training.local_saves import LocalSaves
from megajax.training.resuming import ResumePoint
from megajax.training.run_lock import RunLock
from megajax.training.saving import StateSaver
from megajax.training.step import TrainState


class RunDirectory:
    """The run directory of a Trainer; all processes call each method at the same step.

    lock: one process trains here at a time; local_saves: those to `checkpoint.local_dir`, if it is set; writing:
    whether `begin` was called and `close` not yet; reports: what is said about saves.
    """

    def __init__(self, saver: StateSaver, reports: "SaveReports", run: RunView):
        """The hooks of `run` hear of complete checkpoints. Nothing is written before `take`."""
        self.config, self.path = saver.program.config, Path(saver.program.config.run.dir)
        self.lock, self.writing = RunLock(self.path), False
        self.local_saves = LocalSaves(saver, run.note) if self.config.checkpoint.local_dir is not None else None
        self.reports, self._saver, self._run = reports, saver, run

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints; makes the directory if it does not exist."""
        settings = self.config.checkpoint
        best = None if settings.keep_best is None else (settings.keep_best, settings.best_by)
        return Checkpoints(self.path, settings.keep, settings.keep_every, best)

    def take(self, seen: list[int]) -> bool:
        """Take the lock; whether another process has written since process 0 had `seen` checkpoints of these steps.

        Raises InputError if another process trains here, or if the directory cannot be written.
        """
        logs.make_run_dir(self.config)
        self.lock.acquire(logs.say)
        if self.writing:  # new ones are this run's own
            return False
        return cluster.current().first_decides(lambda: complete_steps(self.path) != seen)

    def begin(self, start: ResumePoint, step: int, local_step: int | None) -> None:
        """The run goes on from `start`, or from the local checkpoint of `local_step`.

        The config is recorded for the steps after `step`.
        """
        if self.local_saves is not None:
            self.local_saves.begin(local_step)
        start.rollbacks.forget_after(step)
        new = start.resumed_step is None
        cluster.current().first_decides(lambda: run_record.record_start(self.path, self.config, step, new, logs.say))
        checkpoints = self.checkpoints  # all processes open them together
        cluster.current().first_decides(lambda: remove_partial(checkpoints.directory))
        checkpoints.reload()
        self.writing = True

    def save(self, step: int, state: TrainState, samples: int, **more: Any) -> None:
        """Start a checkpoint of `step`, if there is none, after the last one is complete.

        `more` are further entries of its description. Raises InputError if the last one failed and there is no other.
        """
        self._report(self.reports.wait_for_last(self.checkpoints, step))
        cluster.current().first_decides(lambda: self.check_lock(step))
        self.before_removal()
        if self.checkpoints.latest_step != step:
            self._saver.save(self.checkpoints, step, state, samples, **more)

    def saved(self) -> Checkpoints:
        """The checkpoints, after the last save has ended and is reported."""
        self._report(self.checkpoints.outcome(wait=True))
        return self.checkpoints

    def report(self, ending: bool) -> None:
        """Report all that was written since the last call; if the run is `ending`, wait for the rest.

        Raises InputError if a save failed and no older checkpoint exists, or the run ends.
        """
        self._report(self.checkpoints.outcome(wait=ending), ending)
        if self.local_saves is not None:
            self.local_saves.report()

    def before_removal(self) -> None:
        """Checkpoints may be removed or moved after this."""
        for hook in self._run.hooks:
            hook.before_removal(self._run)

    def check_lock(self, step: int) -> None:
        """Raise InputError if another process took over the directory, at the latest after `step`."""
        if self.lock.lost:
            raise InputError(f"another process took over run.dir={self.path}: this one stops at step {step}.")

    def close(self, step: int) -> None:
        """Wait for the last save and release the directory, at the end of the run after `step`.

        Raises InputError if that save failed.
        """
        writing, self.writing = self.writing, False
        try:
            if "checkpoints" in self.__dict__:
                try:
                    self._report(self.checkpoints.outcome(wait=True), ending=True)
                    if writing and self.local_saves is not None:
                        self.local_saves.end(step, self.checkpoints.latest_step)
                finally:
                    self.__dict__.pop("checkpoints").close()
        finally:
            self.before_removal()
            self.lock.release()

    def _report(self, outcome: SaveOutcome | None, ending: bool = False) -> None:
        if outcome is None:
            return
        self.reports.report(outcome, self.checkpoints.latest_step, ending)
        if outcome.error is None:
            for hook in self._run.hooks:
                hook.on_save(self._run, outcome.step)


class SaveReports:
    """Reports the saves of one run, and keeps their figures for metrics.jsonl."""

    def __init__(self, config: Config, say: Callable[[str, bool], None]):
        """`say(text, whether it is a warning)` tells the user."""
        self.config, self._say = config, say
        self._figures: dict[str, Any] = {}
        self._last_start: float | None = None
        self._warned = False

    def wait_for_last(self, checkpoints: Checkpoints, step: int) -> SaveOutcome | None:
        """The result of the last save, before that of `step` starts; says so if training has to wait for it."""
        now, waits = time.perf_counter(), checkpoints.saving
        between, self._last_start = None if self._last_start is None else now - self._last_start, now
        if waits is None:
            return checkpoints.outcome(wait=True)
        self._say(f"step {step}: the save of step {waits} is not complete yet; training waits for it", False)
        outcome = checkpoints.outcome(wait=True)
        self._last_start = time.perf_counter()
        interval = self.config.run.checkpoint_interval
        if between and outcome is not None and outcome.error is None and interval and not self._warned:
            enough = ceil(1.1 * outcome.seconds * (step - waits) / between)  # steps that take as long as a save
            if enough > interval:  # the last save of a run may follow another one early
                self._warned = True
                self._say(
                    f"{located(self.config, 'run.checkpoint_interval')} is too short for this disk: a save takes "
                    f"{outcome.seconds:.3g} s, and the {counted(step - waits, 'step')} before the next one took "
                    f"{between:.3g} s, so training waits for saves: set it to {enough} or more",
                    True,
                )
        return outcome

    def report(self, outcome: SaveOutcome, newest: int | None, ending: bool) -> None:
        """Report the end of a save; `newest` is the step of the newest checkpoint.

        Raises InputError if it failed and no older checkpoint exists, or the run ends.
        """
        if outcome.error is None:
            self._say(logs.saved_line(outcome), False)
            if outcome.unverified is not None:
                problem = f"the checkpoint of step {outcome.step} has no checksums ({outcome.unverified})"
                self._say(f"{problem}: its files will not be verified", True)
            self._figures = {
                "checkpoint_step": outcome.step,
                "checkpoint_gb": round(outcome.size / 1e9, 6),
                "checkpoint_seconds": round(outcome.seconds, 3),
                "checkpoint_gb_per_second": round(outcome.size / 1e9 / max(outcome.seconds, 1e-9), 6),
                "checkpoint_stall_seconds": round(outcome.waited, 3),
            }
            return
        where, cure = self.config.run.dir, "free disk space"
        if self.config.checkpoint.dir is not None and is_in_bucket(self.config.checkpoint.dir):
            where, cure = self.config.checkpoint.dir, "check the bucket, its permissions and the connection"
        problem = f"the checkpoint of step {outcome.step} could not be saved in {where} ({outcome.error})"
        older = "there is no older one" if newest is None else f"the newest one is of step {newest}"
        if newest is None or ending:
            raise InputError(f"{problem}, and {older}: {cure}, then start the same command again.")
        self._say(f"{problem}: {older}", True)

    def take(self) -> dict[str, Any]:
        """The figures of a save that ended since the last call, for metrics.jsonl."""
        figures, self._figures = self._figures, {}
        return figures
