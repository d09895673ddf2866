"""What a run writes besides its log: the lock of its directory, the record of its configs, and all its checkpoints."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from megajax.checkpoint import Checkpoints, SaveOutcome, complete_steps
from megajax.errors import InputError
from megajax.messages import from_first_process
from megajax.training import logs, run_record
from megajax.training.exports import Exports
from megajax.training.local_saves import LocalSaves
from megajax.training.resuming import Start
from megajax.training.run_lock import RunLock, on_first_process
from megajax.training.save_reports import SaveReports
from megajax.training.saving import StateSaver
from megajax.training.step import TrainState


class RunDirectory:
    """The run directory of a Trainer; all processes call each method at the same step.

    lock: one process trains here at a time; local_saves: those to `checkpoint.local_dir`, if it is set; writing:
    whether `begin` was called and `close` not yet.
    """

    def __init__(self, saver: StateSaver, exports: Exports | None, reports: SaveReports, note: Callable[[str], None]):
        """`note` prints a line. Nothing is written before `take`."""
        self.config, self.path = saver.program.config, Path(saver.program.config.run.dir)
        self.lock, self.writing = RunLock(self.path), False
        self.local_saves = LocalSaves(saver, note) if self.config.checkpoint.local_dir is not None else None
        self._saver, self._exports, self._reports = saver, exports, reports

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints; makes the directory if it does not exist."""
        kept = self.config.checkpoint
        return Checkpoints(self.path, kept.keep, kept.keep_every, kept.keep_best)

    def take(self, seen: list[int]) -> bool:
        """Take the lock; whether another process has written since process 0 had `seen` checkpoints of these steps.

        Raises InputError if another process trains here, or if the directory cannot be written.
        """
        logs.make_run_dir(self.config)
        self.lock.acquire(logs.say)
        if self.writing:  # new ones are this run's own
            return False
        return from_first_process(lambda: complete_steps(self.path) != seen)

    def begin(self, start: Start, step: int, local_step: int | None) -> None:
        """The run goes on from `start`, or from the local checkpoint of `local_step`.

        The config is recorded for the steps after `step`.
        """
        if self.local_saves is not None:
            self.local_saves.begin(local_step)
        start.rollbacks.forget_after(step)
        new = start.resumed_step is None
        on_first_process(lambda: run_record.record_start(self.path, self.config, step, new, logs.say))
        on_first_process(self.checkpoints.remove_partial)  # all processes open the checkpoints together
        if self._exports is not None:
            on_first_process(self._exports.check_directory)
        self.checkpoints.reload()
        self.writing = True

    def save(self, step: int, state: TrainState, samples: int, **more: Any) -> None:
        """Start a checkpoint of `step`, if there is none, after the last one is complete.

        `more` are further entries of its description. Raises InputError if the last one failed and there is no other.
        """
        self._report(self._reports.wait_for_last(self.checkpoints, step))
        on_first_process(lambda: self._before_save(step))
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
        if self._exports is not None:
            self._exports.report(wait=ending)

    def wait_for_exports(self) -> None:
        """Wait for the folder that is being written: it is read from a checkpoint, which may be moved after this."""
        if self._exports is not None:
            self._exports.wait()

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
            self.wait_for_exports()
            self.lock.release()

    def _before_save(self, step: int) -> None:
        self.check_lock(step)
        self.wait_for_exports()

    def _report(self, outcome: SaveOutcome | None, ending: bool = False) -> None:
        if outcome is None:
            return
        self._reports.report(outcome, self.checkpoints.latest_step, ending)
        if outcome.error is None and self._exports is not None and jax.process_index() == 0:
            self._exports.start(outcome.step)
