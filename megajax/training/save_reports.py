"""What a run says about its saves: their size, speed and cost, a save that has to wait, and a failure."""

import time
from collections.abc import Callable
from math import ceil
from typing import Any

from megajax.checkpoint import Checkpoints, SaveOutcome
from megajax.checkpoint.storage import is_in_bucket
from megajax.config import Config
from megajax.config.sentences import counted
from megajax.errors import ConfigError, InputError
from megajax.training import logs


class SaveReports:
    """Reports the saves of one run, and keeps their figures for metrics.jsonl."""

    def __init__(self, config: Config, evaluates: bool, say: Callable[[str, bool], None]):
        """`evaluates`: whether there is a split `valid`; `say(text, whether it is a warning)` tells the user.

        Raises ConfigError if `checkpoint.keep_best` lacks a loss to choose by.
        """
        key, best = "checkpoint.keep_best", config.checkpoint.keep_best
        if best is not None and not evaluates:
            problem = f"{key}={best} ({config.where(key)}) needs an evaluation loss, but there is no data.valid"
            raise ConfigError(f"{problem}: set it, or data.split.")
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
        interval, key = self.config.run.checkpoint_interval, "run.checkpoint_interval"
        if between and outcome is not None and outcome.error is None and interval and not self._warned:
            enough = ceil(1.1 * outcome.seconds * (step - waits) / between)  # steps that take as long as a save
            if enough > interval:  # the last save of a run may follow another one early
                self._warned = True
                self._say(
                    f"{key}={interval} ({self.config.where(key)}) is too short for this disk: a save takes "
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
