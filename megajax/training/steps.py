"""The steps of a run and what follows each of them: logs, evaluations, saves, checks of numbers, a stop on request."""

import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from megajax import threads
from megajax.console import DONE, STOPPED
from megajax.data.describe import has_chats
from megajax.training import logs
from megajax.training.checks import End
from megajax.training.gpu_health import GpuHealth
from megajax.training.meter import Meter
from megajax.training.step_times import StepTimes
from megajax.training.stop_signals import StopSignals

if TYPE_CHECKING:
    from megajax.data.loader import Split
    from megajax.training.loop import Trainer


class Due(NamedTuple):
    """What follows a step: its line in the log, and evaluations and saves at their intervals.

    last: it is the last step of the run; stopping: a stop was requested.
    """

    log: bool
    evaluation: bool
    save: bool
    local_save: bool
    last: bool
    stopping: bool

    @property
    def ending(self) -> bool:
        """Whether the run ends after the step."""
        return self.last or self.stopping

    @property
    def saving(self) -> bool:
        """Whether a durable checkpoint is saved."""
        return self.save or self.ending


class Steps:
    """Runs the steps of a Trainer."""

    def __init__(self, trainer: "Trainer", stop: StopSignals):
        self.trainer, self.stop = trainer, stop
        self._times, self._health = StepTimes(), GpuHealth(trainer.note)

    def run(self, log: logs.MetricsLog) -> End:
        """Train until the run ends, with its exit status, or until it has to go back."""
        trainer, self._log = self.trainer, log
        self._meter = Meter(trainer.config, trainer.sizes, trainer.program.mesh.devices, trainer.step)
        self._unlogged: tuple[int, dict[str, jax.Array]] | None = None  # the last step to log, with its metrics
        # A step that was read: its values, and the seconds that the run has left.
        self._unwritten: tuple[int, dict[str, Any], float | None] | None = None
        while trainer.step < trainer.config.run.steps:
            if (end := self._step()) is not None:
                return end
        samples, seconds = trainer.sizes.samples_before(trainer.step), time.time() - trainer.start_time
        chats = has_chats(trainer.data["train"])
        trainer.note(logs.closing_line(trainer.config, trainer.step, samples, seconds, chats))
        return DONE

    def _step(self) -> End | None:
        """One step and what follows it; the end, if the run stops or goes back after it."""
        trainer = self.trainer
        metrics = self._train()
        end = self._read_metrics()  # one step late, so that the device never waits for the host
        self._write_line()
        if end is not None:
            return end
        trainer.watch.stepped(trainer.step)
        threads.check()
        due = self._due()
        if due.log:
            self._unlogged = trainer.step, metrics
        saves = due.saving or due.local_save
        trainer.checks.stepped(trainer.step, trainer.state, metrics, before_save=saves)
        evaluates = (due.evaluation or due.last) and bool(trainer.config.run.eval_steps)
        end = self._read_metrics() if saves or evaluates else None
        if end is None and saves:
            end = trainer.checks.examine(trainer.step, trainer.sizes, trainer.saved)
        if end is None:
            self._save(due)  # before the line of the log and the evaluation, since both may fail
        self._write_line()
        if end is not None:
            return end
        self._report_saves(due)
        if evaluates:
            with trainer.watch.working("the evaluation"):
                self._evaluate(due.saving)
        if due.evaluation or due.save:
            self._meter.restart(trainer.step)
            self._times.take()
        if due.stopping and not due.last:
            trainer.note(logs.stopped_line(trainer.config, trainer.step, self.stop.at_deadline))
            return STOPPED
        return None

    def _train(self) -> dict[str, jax.Array]:
        """Read the batch and start the step; its metrics."""
        trainer = self.trainer
        with self._times.reading():
            batch = trainer.next_batch()
        compiling = not trainer.is_compiled
        with trainer.profile.step(trainer.step + 1), self._times.starting():
            metrics = trainer.train_step(batch)
        if compiling:
            self._times.take()  # the first step's are left out
            self._meter.leave_out(trainer.compile_seconds)
            metrics["loss"].block_until_ready()
            self._meter.first_step_done()
            trainer.note(f"first step done {time.time() - trainer.start_time:.1f} s after the start")
        assert trainer.progress is not None
        trainer.progress.advance()
        return metrics

    def _due(self) -> Due:
        """What follows the step that has just been started."""
        trainer, run, step = self.trainer, self.trainer.config.run, self.trainer.step
        last, local_saves = step == run.steps, trainer.directory.local_saves
        return Due(
            log=step % run.log_interval == 0 or step == 1 or last,
            evaluation=bool(run.eval_interval) and step % run.eval_interval == 0,
            save=bool(run.checkpoint_interval) and step % run.checkpoint_interval == 0,
            local_save=local_saves is not None and local_saves.is_due(step),
            last=last,
            stopping=self.stop.requested(step),
        )

    def _read_metrics(self) -> End | None:
        """Read the step that waits for its line in the log, if one does; the end, if its numbers must not stand."""
        if self._unlogged is None:
            return None
        (step, metrics), self._unlogged, trainer = self._unlogged, None, self.trainer
        end = trainer.checks.examine(step, trainer.sizes, trainer.saved)
        values, in_row = logs.values_of(jax.device_get(metrics))
        if jax.process_count() == 1:  # several processes check the lock when they save
            trainer.directory.check_lock(trainer.step)
        measured = self._meter.measure(step)
        values |= measured
        values |= trainer.watch.slowest(self._times.take(), measured["step_seconds"], trainer.note)
        values |= trainer.checks.losses.count | trainer.reports.take()
        self._unwritten = step, values, self._meter.seconds_left(trainer.config.run.steps, measured)
        return trainer.checks.examine_row(in_row, trainer.checkpoints) if end is None else end

    def _write_line(self) -> None:
        """Write the line of the step that was read, if there is one."""
        if self._unwritten is None:
            return
        (step, values, seconds_left), self._unwritten = self._unwritten, None
        self._log.write(step, values)
        self.trainer.note(logs.console_line(step, self.trainer.config.run.steps, values, seconds_left))
        self._health.check()

    def _evaluate(self, saved: bool) -> None:
        """Evaluate the model; `saved`: there is a checkpoint of it."""
        trainer = self.trainer
        splits = [split for split in trainer.data if split.partition("/")[0] == "valid"]
        if not splits:
            return
        losses = {split: trainer.evaluate(split) for split in splits}
        if saved and "valid" in losses:
            trainer.checkpoints.evaluated(trainer.step, losses["valid"])
        self._report_losses(losses, "eval_loss", "evaluation loss")
        if trainer.config.optimizer.ema_decay:
            losses = {split: trainer.evaluate(split, averaged=True) for split in splits}
            self._report_losses(losses, "ema_eval_loss", "evaluation loss of the averaged weights")

    def _report_losses(self, losses: "dict[Split, float]", name: str, title: str) -> None:
        trainer = self.trainer
        self._log.write(trainer.step, {split.replace("valid", name): loss for split, loss in losses.items()})
        named = (f"{split.partition('/')[2]} {loss:.4f}".strip() for split, loss in losses.items())
        trainer.note(f"step {trainer.step}  {title} {', '.join(named)}")

    def _save(self, due: Due) -> None:
        """Start the save that is due."""
        if due.saving:
            with self.trainer.watch.working("the save"):
                self.trainer.save()
        elif due.local_save:
            with self.trainer.watch.working("the local checkpoint"):
                self.trainer.save_locally()

    def _report_saves(self, due: Due) -> None:
        """Report the saves that have ended; at the end of the run wait for them."""
        trainer = self.trainer
        with trainer.watch.working("the save") if due.saving else contextlib.nullcontext():
            trainer.directory.report(due.ending)
            if due.ending and (figures := trainer.reports.take()):
                self._log.write(trainer.step, figures)
