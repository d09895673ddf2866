"""A whole training run: its parts, the loop over its steps, and its end."""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from megajax import cluster
from megajax.checkpoint import Checkpoints, complete_steps
from megajax.checkpoint.description import OWN_BATCHES
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.console import DONE, STOPPED
from megajax.data.describe import describe_data, has_chats
from megajax.data.epochs import resolve_epochs
from megajax.data.loader import Split, open_datasets
from megajax.errors import ConfigError, InputError
from megajax.inference.sampling import DEFAULT, Sampling
from megajax.mesh import build_mesh, device_list
from megajax.runtime import prepare_environment
from megajax.sources import text_settings
from megajax.training import logs
from megajax.training.agreement import consequence, warn_of_another_rate
from megajax.training.batch_fields import check_fields
from megajax.training.batches import BatchOf, batches, check_batch_of, check_own_fields, own_batches
from megajax.training.checks import EmptyStepCheck, NonFiniteCheck, SpikeCheck
from megajax.training.compiled_steps import CompiledSteps, remove_damaged_programs
from megajax.training.evaluation import Evaluation, check_best, means
from megajax.training.exports import Exports
from megajax.training.gpu_health import GpuHealth
from megajax.training.hooks import Hook, RunView, StopReason, restore_hooks, saved_of_hooks, user_hooks
from megajax.training.in_memory import StateGenerator, export_weights
from megajax.training.modalities import Modalities
from megajax.training.monitoring import Monitoring
from megajax.training.norms import Norms
from megajax.training.profiling import Profile
from megajax.training.replicas import ReplicaCheck
from megajax.training.resuming import ResumePoint
from megajax.training.run_directory import RunDirectory, SaveReports
from megajax.training.saves import Saves
from megajax.training.saving import StateSaver
from megajax.training.spikes import Rollback
from megajax.training.step import TrainProgram, TrainState
from megajax.training.step_log import StepLog
from megajax.training.stop_signals import StopSignals, deadline
from megajax.training.summary import summary
from megajax.training.watch import Watch
from megajax.training.work_balance import WorkBalance, balance_lines

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
        hooks: Sequence[Hook] = (),
        batch_of: BatchOf | None = None,
    ):
        """`hooks` are called beside the steps of `run`, after those that `run.hooks` names.

        `batch_of` makes the batches in place of `data.train`: of the numbers of the samples that this process reads in
        a step it gives the fields (docs/custom_loop.md).

        `start_time` (as of time.time(), default now): start of the measured time to the first step. `watch`: the
        context that ends the process if it hangs or its peers are gone; by default nothing does.
        """
        self.start_time = time.time() if start_time is None else start_time
        self.flags = prepare_environment(config) if flags is None else flags
        sizes = check_mesh(config, len(device_list(devices)), cluster.current().size, jax.default_backend())
        self.console = logs.Console()
        self.monitoring = Monitoring(config, self.console.tell)
        self._exports = Exports(config, self.console.report) if config.checkpoint.export_hf.dir is not None else None
        if batch_of is not None:
            check_batch_of(config, batch_of)
        self.data = open_datasets(config)
        self.config = config = self.monitoring.config = resolve_epochs(config, self.data["train"])
        if self._exports is not None:
            self._exports.config = config
        check_best(config, self.data)
        given = user_hooks(config, hooks)
        reports = SaveReports(config, self.console.report)
        self.program = TrainProgram.build(config, build_mesh(sizes, devices))
        if batch_of is None:
            check_own_fields(self.program)
        self.saver = StateSaver(self.program, None if batch_of is None else {"kind": OWN_BATCHES})
        self.watch = watch or Watch(config)
        self.log = StepLog(self.monitoring.write, self.watch)
        self.view = RunView(self.program, lambda: self.step, lambda: self.state, self.console.note, self.log.add)
        self.directory = RunDirectory(self.saver, reports, self.view)
        self.run_dir, self.writer = self.directory.path, cluster.current().is_first
        self._state: TrainState | None = None
        self._batch_of = batch_of
        self._train_batches: Generator | None = None
        self._compiled = CompiledSteps(self.program, self.console.note)
        self._ahead: deque[jax.Array] = deque()
        self._make_hooks(given)
        self._resume_point = ResumePoint(self.saver, lambda: self.checkpoints, self.directory.local_saves)
        self._begin()

    def _make_hooks(self, given: Sequence[Hook]) -> None:
        """All hooks, with the user's, in the order in which they are called; their `on_end` in reverse order.

        The log is the first: saves and evaluations read the numbers that it has just kept of this step. A save comes
        before the evaluation of its step, whose numbers are added to the checkpoint.
        """
        saves = Saves(self.directory, self.save, self.save_locally, self.log, self.watch)
        self.profile, self._norms = Profile(self.view, self._compiled.text), Norms(self.program)
        self._spikes = SpikeCheck(self.config, self.saved, self.monitoring.event)
        self._replicas = ReplicaCheck(self.program, self.saved, saves.is_due)
        non_finite = NonFiniteCheck(lambda: self.checkpoints)
        checks = (GpuHealth(), self._replicas, self._spikes, EmptyStepCheck(), non_finite)
        exports = () if self._exports is None else (self._exports,)
        evaluation = Evaluation(self.data, self.evaluate, self.log, self.watch)
        balance = WorkBalance(self.config, self.data["train"])
        measures = (self.profile, self.watch, balance, Modalities(self.data["train"]))
        self.view.hooks += [self.log, *measures, *checks, *given, saves, *exports, evaluation]

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

    def compile(self) -> None:
        """Start to compile the steps in a thread; meanwhile the state and the first batch can be read.

        Raises InputError if the files of `optimizer.offload_dir` cannot be made.
        """
        if self._compiled.has_started:
            return
        if self.program.streamed is not None:
            self.program.streamed.make_files()
        self._compile()

    def _compile(self) -> None:
        sizes = self._sizes_ahead()
        self.watch.end_with(self._compiled.start(sizes, lambda: (self._replicas.compile(), self._norms.compile(sizes))))

    @property
    def is_compiled(self) -> bool:
        """Whether a step can start without waiting for its compilation."""
        return self._compiled.is_ready

    @property
    def compile_seconds(self) -> float:
        """Seconds for which the first step has waited for its compilation."""
        return self._compiled.seconds

    def next_batch(self) -> dict[str, jax.Array]:
        """The batch of the next step; the position in the data depends on the step only."""
        if self._train_batches is None:
            program, step, sizes = self.program, self.step, self.sizes
            if self._batch_of is None:
                self._train_batches = batches(program, "train", self.data["train"], step, sizes)
            else:
                self._train_batches = own_batches(program, self._batch_of, step, sizes)
        with self.log.times.reading():
            return next(self._train_batches)

    def train_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """One step on `batch`; the metrics are still on the device."""
        check_fields(self.config, self.program.graph.fields, batch)
        if not self.is_compiled:
            self.compile()
            self._compiled.wait()
        with self.log.times.starting():
            norms = self._norms.before(self.step + 1, self.state, batch)  # the step takes the state's memory
            self.state, metrics = self._compiled.run(self.state, batch)
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

    def evaluate(self, split: Split = "valid", averaged: bool = False) -> dict[str, float]:
        """The mean `loss` and those of the objective's METRICS over `run.eval_steps` batches of a split.

        They are always the same ones; all: each sample once. `averaged`: of the moving averages of the weights
        (`optimizer.ema_decay`).
        """
        if split not in self.data or not self.config.run.eval_steps:
            raise ConfigError(f"there is nothing to evaluate: set data.{split} and run.eval_steps above 0.")
        state = self.program.with_files(self.state, "ema") if averaged else self.state
        weights = state.averaged if averaged else state.weights
        wait, layer_state = self._wait_for_devices, self.state.layer_state
        return means(self.program, split, self.data[split], weights, layer_state, wait)

    def generator(self, sampling: Sampling = DEFAULT, mesh: Mesh | None = None) -> StateGenerator:
        """A generator with the current weights, without a file; `generator.update(trainer.state)` gives it later ones.

        `mesh`: another one of the same processes; by default that of the training.
        """
        return StateGenerator(self.program, self.state, sampling, mesh, text_settings(self.config, self.run_dir))

    def export_weights(self, form: str = "hf", dtype: str = "float32") -> Iterator[tuple[str, np.ndarray]]:
        """The tensors of the folder that `hf export` would write now, one by one with their names; see `in_memory`."""
        return export_weights(self.program, self.state, form, dtype)

    def save(self) -> None:
        """Start a checkpoint of the current step, if there is none, after the last one is complete.

        Raises InputError if the last one failed and there is no other.
        """
        self._start_writing()
        samples = self.sizes.samples_before(self.step)
        self.directory.save(self.step, self.state, samples, **self._saved_beside())

    def save_locally(self) -> None:
        """Start a save of the current step to `checkpoint.local_dir`, while `run` runs."""
        assert self.directory.local_saves is not None
        state, samples = self.program.with_files(self.state), self.sizes.samples_before(self.step)
        self.directory.local_saves.save(self.step, state, samples, **self._saved_beside())

    def _saved_beside(self) -> dict[str, Any]:
        """What a checkpoint has beside the state and the settings."""
        return self._spikes.losses.saved(self.step) | saved_of_hooks(self.view.hooks)

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
            if self.writer:  # it compares them when this run writes again
                self._seen = complete_steps(self.run_dir)

    def run(self) -> int:
        """Train to `run.steps`; the exit status.

        The constructor has found the checkpoint to resume from (`ResumePoint`), without reading its arrays. Now the run
        directory is locked, and that point looked for again if another process has trained there; the summary is
        printed; a thread compiles the steps, while the state is read, or initialised. Then the steps run. If the
        checkpoint turns out to be damaged, the point is an earlier one (`_first_state`).
        """
        if self._is_done():
            return DONE
        end = None
        try:
            self._lock()
            if self._is_done():  # the process that had the lock has finished the run
                return DONE
            self._prepare()
            with StopSignals(self.step, deadline(self.config.run.max_minutes, self.start_time)) as stop:
                self.view.ask = stop.ask
                while isinstance(end := self._steps(stop), Rollback):
                    self._roll_back(end)
                    stop.go_back(self.step)
                return end
        finally:
            self._end(end if isinstance(end, int) else None)

    def _steps(self, stop: StopSignals) -> StopReason:
        """Train until the run ends, with its exit status, or until it has to go back."""
        run = self.view
        run.begin(self.sizes)
        self._resume_point.rollbacks.log(self.log.file)
        while run.end is None:
            batch = self.next_batch()
            for hook in run.hooks:
                hook.before_step(run, batch)
            compiles = not self.is_compiled
            run.metrics = self.train_step(batch)
            if compiles:
                self._report_first_step(run.metrics)
            self.console.set_step(self.step)
            self.log.read_waiting(run)  # the numbers of the step before, so that the devices never wait for the host
            self.log.write(run)
            run.stopping = run.end is None and stop.requested(self.step)
            for hook in run.hooks:
                if run.end is None and self.step % hook.every == 0:
                    hook.on_step(run)
            if run.end is None and run.is_ending:
                run.end_with(self._report_last_step(stop))
        return run.end

    def _report_first_step(self, metrics: dict[str, jax.Array]) -> None:
        """Wait for the first step, which was compiled."""
        metrics["loss"].block_until_ready()
        self.log.first_step_done(self.compile_seconds)
        self.console.note(f"first step done {time.time() - self.start_time:.1f} s after the start")

    def _report_last_step(self, stop: StopSignals) -> int:
        """The run ends in order after this step; its exit status."""
        if not (self.view.is_last or stop.is_done):
            self.console.note(logs.stopped_line(self.config, self.step, stop.at_deadline))
            return STOPPED
        samples, seconds = self.sizes.samples_before(self.step), time.time() - self.start_time
        chats = has_chats(self.data["train"])
        self.console.note(logs.closing_line(self.config, self.step, samples, seconds, chats))
        return DONE

    def _is_done(self) -> bool:
        if self.step < self.config.run.steps:
            return False
        self.watch.last_line = logs.nothing_line(self.config, self.step, self.sizes.samples_before(self.step))
        logs.say(self.watch.last_line)
        return True

    def _prepare(self) -> None:
        """Tell what is about to run, start to compile, and read the state meanwhile."""
        cluster.current().first_decides(lambda: self.monitoring.start(logs.say))
        about_data = ["batches of batch_of, a function of this program"]
        if self._batch_of is None:
            about_data = describe_data(self.config, self.data, self.sizes)
        about_data += balance_lines(self.program, self.data["train"], self.sizes, self.step)
        logs.say(summary(self.program, self.flags, about_data, self.sizes))
        self.console.open(self.step, self.config.run.steps, self.writer)
        cluster.current().first_decides(lambda: remove_damaged_programs(self.config))
        self.compile()
        with ThreadPoolExecutor(1) as thread:
            reserved = thread.submit(self.saver.reserve_host_memory)
            self._start_writing()
        reserved.result()

    def _begin(self) -> None:
        """Take over the position of the start: its step, and the sequences of the steps after it."""
        self._seen, self.sizes = self._resume_point.seen, self._resume_point.sizes
        self._spikes.begin(self._resume_point)
        restore_hooks(self.view.hooks, self._resume_point.saved)
        self.step = self._recorded_step = self._resume_point.step  # the config applies after `_recorded_step`

    def _first_state(self, say: Callable[[str], None]) -> TrainState:
        """The state of the start; this Trainer goes back with it if the newest checkpoint is damaged."""
        expected, compiling = self._resume_point.step, self._sizes_ahead() if self._compiled.has_started else None
        state = self.program.to_files(self._resume_point.state(say))
        if self._resume_point.step != expected:
            self._begin()
            self.console.set_step(self.step)
            if compiling is not None and self._sizes_ahead() != compiling:
                self._compile()
        return state

    def _sizes_ahead(self) -> list[int]:
        """The numbers of sequences for which steps are compiled."""
        # A rollback may come to sizes of batch.schedule that are too late for this run without one.
        stop = 2**31 if self.config.run.max_rollbacks else self.config.run.steps
        return self.sizes.sizes(self.step, stop)

    def _lock(self) -> None:
        """Take the run directory, and adapt to changes by its last owner since this Trainer was built."""
        changed = self.directory.take(self._seen)
        self.watch.ending.owns_run = True
        if not changed:
            return
        if self._state is not None:
            raise InputError(f"another process trained in {self.run_dir} meanwhile: build the Trainer again.")
        self.checkpoints.reload()
        self._resume_point.find()
        self._begin()

    def _start_writing(self) -> None:
        """Before the first write: take the lock, read the state, and record the config of the following steps."""
        if self.directory.writing:
            return
        self._lock()
        if self._exports is not None:
            cluster.current().first_decides(self._exports.check_directory)
        local_step = self._resume_point.local_step if self.step == self._resume_point.step else None
        if self._state is None:
            self._state = self._first_state(logs.say)
            for change in self._resume_point.allowed:
                samples = self._resume_point.sizes.samples_before(self.step)
                logs.say(f"let through by checkpoint.allow_changes: {change}{consequence(change, samples)}")
            if self._resume_point.resumed_step is not None:
                warn_of_another_rate(self.config, self._resume_point.saved, self._resume_point.name)
            local_step = self._resume_point.local_step  # reading it may have led to another checkpoint
        self.directory.begin(self._resume_point, self._recorded_step, local_step)

    def _roll_back(self, rollback: Rollback) -> None:
        """Return to the checkpoint of `rollback`."""
        with self.watch.working("the rollback"):
            self.directory.before_removal()
            frozen, self._state = self.state.frozen, None  # so that there is room for another one
            self._state = self.program.to_files(self._resume_point.go_back(rollback, frozen))
        self._begin()
        if self._train_batches is not None:
            self._train_batches.close()
            self._train_batches = None
        self.console.set_step(self.step)

    def _end(self, status: int | None) -> None:
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
            last_first.callback(self.console.close)
            for hook in self.view.hooks if self.view.is_running else ():
                last_first.callback(hook.on_end, self.view)
            if self._train_batches is not None:
                last_first.callback(self._train_batches.close)  # ends the loader's workers too
            self.view.is_running, self._train_batches = False, None
