"""Rollback: after bad numbers a run goes back to a checkpoint, and leaves out the batches up to the bad step.

PaLM (Chowdhery et al. 2022, section 5.1) was restarted about 100 steps before a spike, without the data around it: the
same data later gave no spike, so it came from some batches together with some state of the model. Hence a second
rollback to the same checkpoint, whose weights may be spoiled already, goes one checkpoint further back instead.

`rollbacks.json` in the run directory has every rollback of the run's steps so far, and is on the disk before training
continues. A checkpoint saved after a rollback holds the run's true position; only a start from the very checkpoint that
the run went back to needs the record.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megajax import cluster, json_files, metrics_file
from megajax.checkpoint import Checkpoints, agreed_steps
from megajax.config import Config
from megajax.errors import counted
from megajax.files import METRICS, replace_text
from megajax.schema.batch_schedule import BatchSizes, Position
from megajax.training.logs import MetricsLog
from megajax.training.spikes import BadStep, Rollback, explain

RECORD = "rollbacks.json"
CURE = "restore the file, or start again from a checkpoint with checkpoint.init_from and another run.dir"


class Rollbacks:
    """The rollbacks of a run so far, and the choice of the next one; the same on all processes."""

    def __init__(self, config: Config):
        self.config, self.run_dir = config, Path(config.run.dir)
        self._path = self.run_dir / RECORD
        self.past = json_files.read(self._path, list[Rollback], CURE) if self._path.exists() else []

    def position(self, checkpoint: Position) -> Position:
        """The position at which a run continues from a checkpoint that was saved at another one."""
        samples = [past.samples for past in self.past if past.step == checkpoint.step]
        return Position(checkpoint.step, max([checkpoint.samples, *samples]))

    def plan(
        self, found: list[BadStep], sizes: BatchSizes, saved: Callable[[], Checkpoints]
    ) -> tuple[Rollback | None, str]:
        """The rollback because of the first of some bad steps, and a sentence about both.

        None if all rollbacks are used up, or if there is no checkpoint from before that step. `saved` gives the
        checkpoints after the last save has ended.
        """
        bad, problem, limit = found[0], explain(found, self.config), self.config.run.max_rollbacks
        if not limit:
            return None, problem
        if len(self.past) >= limit:
            return None, f"{problem}; all rollbacks of run.max_rollbacks={limit} are used"
        checkpoints = saved()
        step = self._target(bad.step)
        if step is None:
            return None, f"{problem}; there is no checkpoint from before step {bad.step} to go back to"
        number, samples = len(self.past) + 1, sizes.samples_before(bad.step)
        left_out = samples - self.position(Position(step, checkpoints.describe(step)["samples_consumed"])).samples
        loss = bad.loss if np.isfinite(bad.loss) else None
        return Rollback(number, step, samples, bad.step, loss, bad.median, left_out), (
            f"{problem}; rollback {number} of run.max_rollbacks={limit}: back to the checkpoint of step {step}, "
            f"leaving out {counted(left_out, 'sample')} up to step {bad.step}"
        )

    def add(self, rollback: Rollback) -> None:
        """Record a rollback, on the disk when this returns; all processes call it."""
        self.past.append(rollback)
        self._write()

    def forget_after(self, step: int) -> None:
        """Drop the rollbacks after the last one to `step` or before, since the run begins there and repeats the rest.

        Earlier ones stay, even to later steps: they came before that one. All processes call it.
        """
        earlier = self.past[: max((i for i, past in enumerate(self.past, start=1) if past.step <= step), default=0)]
        if earlier != self.past:
            self.past = earlier
            self._write()

    def log(self, metrics: MetricsLog) -> None:
        """Write a line of metrics.jsonl for each rollback that has none: a killed process may not have come to it."""
        if not self.past or not metrics.writer:
            return
        logged = {line.get("rollback") for _, line in metrics_file.read(self.run_dir / METRICS)}
        for number, step, _, *values in (past for past in self.past if past.number not in logged):
            metrics.write(step, {"rollback": number} | dict(zip(Rollback._fields[3:], values, strict=True)))

    def _target(self, bad_step: int) -> int | None:
        """The newest checkpoint before `bad_step`, of a regular step and not gone back to yet, if there is one.

        A checkpoint of a requested stop counts only if there is no other, so a stop does not change the run's numbers.
        """
        earlier = [step for step in agreed_steps(self.run_dir) if step < bad_step]
        regular = [step for step in earlier if step % self.config.run.checkpoint_interval == 0]
        untried = [step for step in regular if step not in [past.step for past in self.past]]
        return max(untried or regular or earlier, default=None)

    def _write(self) -> None:
        text = json.dumps([past._asdict() for past in self.past], indent=1)
        cluster.current().first_decides(lambda: replace_text(self._path, text))
