"""The steps after which a run saves."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from megajax import cluster
from megajax.training.hooks import Hook, RunView
from megajax.training.run_directory import RunDirectory
from megajax.training.step_log import StepLog
from megajax.training.watch import Watch


class Saves(Hook):
    """Saves at the intervals of both kinds of checkpoints and after the last step; reports saves that have ended."""

    def __init__(
        self,
        directory: RunDirectory,
        save: Callable[[], None],
        save_locally: Callable[[], None],
        log: StepLog,
        watch: Watch,
    ):
        """`save` and `save_locally` start a checkpoint of the current step."""
        self._directory, self._save, self._save_locally = directory, save, save_locally
        self._log, self._watch = log, watch

    def is_durable(self, run: RunView) -> bool:
        """Whether a checkpoint of the newest step is saved in the run directory."""
        interval = run.config.run.checkpoint_interval
        return run.is_ending or bool(interval) and run.step % interval == 0

    def is_due(self, run: RunView) -> bool:
        """Whether any checkpoint of the newest step is saved."""
        local = self._directory.local_saves
        return self.is_durable(run) or local is not None and local.is_due(run.step)

    def on_step(self, run: RunView) -> None:
        durable = self.is_durable(run)
        if self.is_due(run):
            self._log.read_waiting(run)
            for hook in run.hooks:
                hook.examine(run, run.step)
            if run.end is None:
                with self._watch.working("the save" if durable else "the local checkpoint"):
                    self._save() if durable else self._save_locally()
            self._log.write(run)  # after the save has started, since it may fail
            if run.end is not None:
                return
        with self._watch.working("the save") if durable else contextlib.nullcontext():
            self._directory.report(run.is_ending)
        if run.is_ending and (figures := self._directory.reports.take()):
            self._log.write_line(run.step, figures)
        if durable:
            self._log.restart(run.step)

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        if cluster.current().size == 1:  # several processes check the lock when they save
            self._directory.check_lock(run.step)
        values |= self._directory.reports.take()

    def on_evaluate(self, run: RunView, losses: Mapping[str, float]) -> None:
        if self.is_durable(run):
            self._directory.checkpoints.evaluated(run.step, losses)
