"""A whole training run: its parts, its start, rollbacks and its end."""

import contextlib
import itertools
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from megajax import threads
from megajax.checkpoint import Checkpoints, complete_steps
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.kinds import expert_layers
from megajax.console import DONE
from megajax.data.describe import describe_data
from megajax.data.epochs import resolve_epochs
from megajax.data.loader import Split, datasets
from megajax.data.whole import WholeSet
from megajax.errors import ConfigError, InputError
from megajax.mesh import build_mesh
from megajax.runtime import keep_autotuning, prepare_environment
from megajax.training import logs
from megajax.training.batches import batches, check_own_fields
from megajax.training.checks import NumberChecks
from megajax.training.compiled_steps import compile_steps, remove_damaged_programs
from megajax.training.exports import Exports
from megajax.training.monitoring import Monitoring
from megajax.training.profiling import Profile
from megajax.training.resuming import Start
from megajax.training.rollbacks import Rollback
from megajax.training.run_directory import RunDirectory
from megajax.training.run_lock import on_first_process
from megajax.training.save_reports import SaveReports
from megajax.training.saving import StateSaver
from megajax.training.shared_programs import SharedCompiler
from megajax.training.step import TrainProgram, TrainState
from megajax.training.steps import Steps
from megajax.training.stop_signals import StopSignals, deadline
from megajax.training.summary import summary
from megajax.training.watch import Watch

STEPS_AHEAD = 4  # steps that the host may queue before the devices have finished them


class Trainer:
    """A whole run: `Trainer(config).run()`; its parts are attributes, for notebooks.

    program: model, mesh and compiled functions; state: the TrainState; step: number of finished steps; data: samples by
    split; sizes: the sequences of each step from this Trainer's first one on; checkpoints: those of `run.dir`. Resumes
    from the newest of them if there is one, or from `checkpoint.resume_step`. Only training and saving write there, so
    a Trainer may evaluate while another process trains.
    """

    def __init__(
        self,
        config: Config,
        devices: list[Any] | None = None,
        flags: list[str] | None = None,
        start_time: float | None = None,
        watch: Watch | None = None,
    ):
        """`start_time` (as of time.time(), default now): start of the measured time to the first step.

        `watch`: the context that ends the process if it hangs or its peers are gone; by default nothing does.
        """
        self.start_time = time.time() if start_time is None else start_time
        self.config, self.flags = config, prepare_environment(config) if flags is None else flags
        count = len(jax.devices() if devices is None else devices)
        sizes = check_mesh(config, count, jax.process_count(), jax.default_backend())
        self.monitoring = Monitoring(config, self._tell)
        exports = Exports(config, self._report) if config.checkpoint.export_hf.dir is not None else None
        self.data = datasets(config)
        self.config = config = self.monitoring.config = resolve_epochs(config, self.data["train"])
        if exports is not None:
            exports.config = config
        self.reports = SaveReports(config, "valid" in self.data, self._report)
        self.program = TrainProgram.build(config, build_mesh(sizes, devices))
        check_own_fields(self.program)
        self.saver = StateSaver(self.program)
        self.directory = RunDirectory(self.saver, exports, self.reports, self.note)
        self.run_dir, self.writer = self.directory.path, jax.process_index() == 0
        self.compile_seconds = 0.0
        self.progress: logs.ProgressBar | None = None
        self._state: TrainState | None = None
        self._start = Start(self.saver, lambda: self.checkpoints, self.directory.local_saves)
        self.checks = NumberChecks(self.program, self.note, self.monitoring.event)
        self._begin()
        self._train_batches: Generator | None = None
        self._compiled_steps: dict[int, jax.stages.Compiled] = {}  # by number of microbatches
        self._running: jax.stages.Compiled | None = None  # that of the last step
        self._compiling: Future[dict[int, jax.stages.Compiled]] | None = None
        self._ahead: deque[jax.Array] = deque()
        self.profile = Profile(self)
        self.watch = watch or Watch(config)

    @property
    def checkpoints(self) -> Checkpoints:
        """The run directory's checkpoints; makes the directory if it does not exist."""
        return self.directory.checkpoints

    @property
    def state(self) -> TrainState:
        """The current state; its first use reads the checkpoint or initialises the state."""
        if self._state is None:
            self._state = self._first_state(lambda _: None)
        return self._state

    @state.setter
    def state(self, state: TrainState) -> None:
        self._state = state

    def _begin(self) -> None:
        """Take over the position of the start: its step, and the sequences of the steps after it."""
        self._seen, self.sizes = self._start.seen, self._start.sizes
        self.checks.begin(self._start)
        self.step = self._recorded_step = self._start.step  # the config applies after `_recorded_step`

    def _first_state(self, say: Callable[[str], None]) -> TrainState:
        """The state of the start; this Trainer goes back with it if the newest checkpoint is damaged."""
        expected, compiling = self._start.step, self._sizes_ahead() if self._compiling is not None else None
        state = self._start.state(say)
        if self._start.step != expected:
            self._begin()
            if self.progress is not None:
                self.progress.go_back(self.step)
            if compiling is not None and self._sizes_ahead() != compiling:
                self._compiling = None
                self.compile()
        return state

    def _sizes_ahead(self) -> list[int]:
        """The numbers of sequences for which steps are compiled."""
        # A rollback may come to sizes of batch.schedule that are too late for this run without one.
        stop = 2**31 if self.config.run.max_rollbacks else self.config.run.steps
        return self.sizes.sizes(self.step, stop)

    def compile(self) -> None:
        """Start to compile the steps in a thread; meanwhile the state and the first batch can be read."""
        if self._compiling is None and not self._compiled_steps:
            thread, compiler = ThreadPoolExecutor(1), SharedCompiler(self.config)
            self._compiling = thread.submit(compile_steps, self.program, self._sizes_ahead(), self.note, compiler)
            threads.watched(thread.submit(self.checks.compile, self._sizes_ahead()), "the compilation of the checks")
            thread.shutdown(wait=False)
            self.watch.end_with(thread)

    @property
    def is_compiled(self) -> bool:
        """Whether a step can start without waiting for its compilation."""
        return bool(self._compiled_steps)

    def running_text(self) -> str:
        """The compiled module of the last step, in XLA's text form; empty before the first step."""
        return (self._running.as_text() or "") if self._running is not None else ""

    def next_batch(self) -> dict[str, jax.Array]:
        """The batch of the next step; the position in the data depends on the step only."""
        if self._train_batches is None:
            self._train_batches = batches(self.program, "train", self.data["train"], self.step, self.sizes)
        return next(self._train_batches)

    def train_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """One step on `batch`; the metrics are still on the device."""
        microbatches = len(batch["tokens"])
        self.program.graph.check_fields(batch)
        if microbatches not in self._compiled_steps:
            start = time.perf_counter()
            self.compile()
            assert self._compiling is not None
            self._compiled_steps = self._compiling.result()
            self.compile_seconds = time.perf_counter() - start
            keep_autotuning(self.config)
        norms = self.checks.norms.before(self.step + 1, self.state, batch)  # the step takes the state's memory
        self._running = self._compiled_steps[microbatches]
        self.state, metrics = self._running(self.state, batch)
        self.step += 1
        self._wait_for_devices(metrics["loss"])
        return metrics | norms

    def _wait_for_devices(self, value: jax.Array) -> None:
        """Keep the host at most STEPS_AHEAD steps ahead; `value` is a result of one step.

        The devices always have a step to run while the host prepares the next. Without a bound the memory for batches
        grows, and collectives on CPUs wait for each other until they time out.
        """
        self._ahead.append(value)
        if len(self._ahead) > STEPS_AHEAD:
            self._ahead.popleft().block_until_ready()

    def evaluate(self, split: Split = "valid", averaged: bool = False) -> float:
        """Mean loss per token over `run.eval_steps` batches of a split, always the same ones; all: each sample once.

        `averaged`: of the moving averages of the weights (`optimizer.ema_decay`).
        """
        if split not in self.data or not self.config.run.eval_steps:
            raise ConfigError(f"there is nothing to evaluate: set data.{split} and run.eval_steps above 0.")
        samples, steps = self.data[split], self.config.run.eval_steps
        if not isinstance(steps, int):
            assert isinstance(samples, WholeSet)
            steps = -(-len(samples) // self.config.batch.global_size)
        loss = tokens = 0.0
        weights = self.state.averaged if averaged else self.state.weights
        source = batches(self.program, split, samples)
        for batch in itertools.islice(source, steps):
            batch_loss, batch_tokens = self.program.eval_step(weights, self.state.layer_state, batch)
            self._wait_for_devices(batch_loss)
            loss, tokens = loss + batch_loss, tokens + batch_tokens
        source.close()  # ends the loader's threads too
        return float(loss / tokens)

    def save(self) -> None:
        """Start a checkpoint of the current step, if there is none, after the last one is complete.

        Raises InputError if the last one failed and there is no other.
        """
        self._start_writing()
        samples = self.sizes.samples_before(self.step)
        self.directory.save(self.step, self.state, samples, **self.checks.losses.saved(self.step))

    def save_locally(self) -> None:
        """Start a save of the current step to `checkpoint.local_dir`, while `run` runs."""
        assert self.directory.local_saves is not None
        samples = self.sizes.samples_before(self.step)
        self.directory.local_saves.save(self.step, self.state, samples, **self.checks.losses.saved(self.step))

    def saved(self) -> Checkpoints:
        """The checkpoints, after the last save has ended and is reported."""
        with self.watch.working("the save"):
            return self.directory.saved()

    def close(self) -> None:
        """Wait for the last save and release the run directory, as `run` does at its end.

        Raises InputError if that save failed.
        """
        try:
            self.directory.close(self.step)
        finally:
            self._recorded_step = self.step
            if jax.process_index() == 0:  # it compares them when this run writes again
                self._seen = complete_steps(self.run_dir)

    def _lock(self) -> None:
        """Take the run directory, and adapt to changes by its last owner since this Trainer was built."""
        changed = self.directory.take(self._seen)
        self.watch.ending.owns_run = True
        if not changed:
            return
        if self._state is not None:
            raise InputError(f"another process trained in {self.run_dir} meanwhile: build the Trainer again.")
        self.checkpoints.reload()
        self._start.find()
        self._begin()

    def _start_writing(self) -> None:
        """Before the first write: take the lock, read the state, and record the config of the following steps."""
        if self.directory.writing:
            return
        self._lock()
        local_step = self._start.local_step if self.step == self._start.step else None
        if self._state is None:
            self._state = self._first_state(logs.say)
            if self._start.resumed_step is not None:
                for change in self._start.allowed:
                    logs.say(f"let through by checkpoint.allow_changes: {change}")
                self.saver.warn_of_another_rate(self._start.saved, self._start.name)
            local_step = self._start.local_step  # reading it may have led to another checkpoint
        self.directory.begin(self._start, self._recorded_step, local_step)

    def run(self) -> int:
        """Train to `run.steps`; the exit status."""
        if self._is_done():
            return DONE
        log = ended = None
        try:
            self._lock()
            if self._is_done():  # the process that had the lock has finished the run
                return DONE
            on_first_process(lambda: self.monitoring.start(logs.say))
            about_data = describe_data(self.config, self.data, self.sizes)
            logs.say(summary(self.program, self.flags, about_data, self.sizes))
            self.progress = logs.ProgressBar(self.step, self.config.run.steps, self.writer)
            on_first_process(lambda: remove_damaged_programs(self.config))
            self.compile()
            with ThreadPoolExecutor(1) as thread:
                reserved = thread.submit(self.saver.reserve_host_memory)
                self._start_writing()
            reserved.result()
            log = self._open_log()
            with StopSignals(self.step, deadline(self.config.run.max_minutes, self.start_time)) as stop:
                steps = Steps(self, stop)
                while not isinstance(ended := steps.run(log), int):
                    self._roll_back(ended)
                    stop.go_back(self.step)
                    log.close()
                    log = self._open_log()
                return ended
        finally:
            self._end(log, ended if isinstance(ended, int) else None)

    def _open_log(self) -> logs.MetricsLog:
        log = logs.MetricsLog(self.config, self.step, self.writer, self.monitoring.write)
        self._start.rollbacks.log(log)
        return log

    def _roll_back(self, rollback: Rollback) -> None:
        """Return to the checkpoint of `rollback`."""
        with self.watch.working("the rollback"):
            self.directory.wait_for_exports()
            frozen, self._state = self.state.frozen, None  # so that there is room for another one
            self._state = self._start.go_back(rollback, frozen)
        self._begin()
        if self._train_batches is not None:
            self._train_batches.close()
            self._train_batches = None
        if self.progress is not None:
            self.progress.go_back(self.step)

    def _is_done(self) -> bool:
        if self.step < self.config.run.steps:
            return False
        self.watch.last_line = logs.nothing_line(self.config, self.step, self.sizes.samples_before(self.step))
        logs.say(self.watch.last_line)
        return True

    def _end(self, log: logs.MetricsLog | None, status: int | None) -> None:
        """Close everything, after the run has ended with `status` or with an error."""
        error = sys.exception()
        self.watch.ending.step, self.watch.last_line = self.step, self.monitoring.last_line
        with (
            self.watch.working("the end of the run"),
            contextlib.ExitStack() as last_first,
        ):  # runs all callbacks, even if one of them raises
            last_first.callback(self.close)
            last_first.callback(self.watch.run_ended, status, error)
            last_first.callback(self.monitoring.end, status, error)
            if log is not None:
                if self.writer and self.config.model.num_experts:
                    last_first.callback(logs.draw_load_map, self.run_dir, expert_layers(self.config.model))
                last_first.callback(log.close)
            if self.progress is not None:
                last_first.callback(self.progress.close)
            if self._train_batches is not None:
                last_first.callback(self._train_batches.close)  # ends the loader's workers too
            self.profile.stop()
            self.progress = self._train_batches = None

    def _report(self, text: str, warning: bool) -> None:
        if warning and self.progress is None:  # the user's own loop
            warnings.warn(f"{text}.", stacklevel=3)
        self.note(f"megajax: warning: {text}; training continues" if warning else text)

    def note(self, text: str) -> None:
        """Print a line on the console while `run` runs."""
        if self.progress is not None:
            self.progress.print(text)

    def _tell(self, text: str) -> None:
        """Print a line on the console."""
        logs.say(text) if self.progress is None else self.progress.print(text)
