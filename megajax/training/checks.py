"""Checks of the loss of each step; bad numbers lead to a warning, a rollback, or the end of the run."""

from collections.abc import Callable
from typing import Any

from megajax.checkpoint import Checkpoints
from megajax.config import Config
from megajax.console import BAD_NUMBERS
from megajax.training import spikes
from megajax.training.hooks import Hook, RunView
from megajax.training.resuming import ResumePoint
from megajax.training.spikes import LossWatch
from megajax.training.step_log import IN_ROW


class SpikeCheck(Hook):
    """Examines the loss of every step at log points and before a save, and goes back to a checkpoint if it may.

    losses: the LossWatch of the steps since `begin`.
    """

    def __init__(self, config: Config, saved: Callable[[], Checkpoints], event: Callable[[str, int, str], None]):
        """`saved` gives the checkpoints after the last save has ended; `event(kind, step, text)` tells others."""
        self._config, self._saved, self._event = config, saved, event

    def begin(self, start: ResumePoint) -> None:
        """The run begins, or continues after a rollback, at the step of `start`."""
        self.losses, self._rollbacks = LossWatch(self._config, start.saved.get("losses")), start.rollbacks

    def on_step(self, run: RunView) -> None:
        self.losses.keep(run.step, run.metrics)

    def examine(self, run: RunView, step: int) -> None:
        if run.end is not None or not (bad := self.losses.examine(step)):
            return
        rollback, line = self._rollbacks.plan(bad, run.sizes, self._saved)
        run.note(f"megajax: warning: {line}")
        self._event("spike" if rollback is None else "rollback", bad[0].step, line)
        if rollback is not None:
            run.end_with(rollback)

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        if self.losses.spikes:
            values["spikes"] = self.losses.spikes


class NonFiniteCheck(Hook):
    """Ends the run after more than `run.max_nonfinite_steps` steps in a row with numbers that are not finite."""

    def __init__(self, checkpoints: Callable[[], Checkpoints]):
        self._checkpoints = checkpoints

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        if run.end is None and values[IN_ROW] > run.config.run.max_nonfinite_steps:
            run.note(spikes.explain_nonfinite(values[IN_ROW], run.config, self._checkpoints().latest_step))
            run.end_with(BAD_NUMBERS)


class EmptyStepCheck(Hook):
    """Warns once of a step in which no token or segment counts."""

    def __init__(self) -> None:
        self._told = False

    def on_log(self, run: RunView, step: int, values: dict[str, Any]) -> None:
        if values["loss"] == values["grad_norm"] == 0 and not self._told:
            self._told = True
            cure = "look at the loss_mask of its targets, and whether the members of a pair are in one microbatch"
            run.note(f"megajax: warning: nothing counts in step {step}, its loss and gradients are 0: {cure}.")
