"""The training loop: steps, logs, evaluations, checkpoints and orderly stops."""

import contextlib
import itertools
import resource
import signal
import time
from collections.abc import Generator
from typing import Any

import jax
import numpy as np

from megajax.checkpoint import Checkpoints, has_checkpoint
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.kinds import block_layers
from megajax.data.loader import Split, datasets
from megajax.errors import ConfigError
from megajax.mesh import build_mesh
from megajax.model.transformer import COUNTS
from megajax.plan import flops_per_token, peak_flops
from megajax.runtime import keep_autotuning, prepare_environment
from megajax.training import logs
from megajax.training.batches import batches
from megajax.training.load_map import draw_load_map
from megajax.training.saving import StateSaver, Weights
from megajax.training.step import TrainProgram, TrainState
from megajax.training.summary import summary

DONE, BAD_NUMBERS, STOPPED = 0, 3, 75  # exit statuses


class Trainer:
    """A whole run: `Trainer(config).run()`; the parts are attributes, for notebooks.

    program: model, mesh and compiled functions; state: the TrainState; step: steps done; data: samples by split.
    Resumes from the newest checkpoint of `run.dir` if there is one.
    """

    def __init__(self, config: Config, devices: list[Any] | None = None, flags: list[str] | None = None):
        self.config, self.flags = config, prepare_environment(config) if flags is None else flags
        sizes = check_mesh(config, len(jax.devices() if devices is None else devices))
        logs.check_sinks(config)
        self.data = datasets(config)
        self.program = TrainProgram.build(config, build_mesh(sizes, devices))
        self.saver = StateSaver(self.program)
        first_weights = self._first_weights()
        self.run_dir = logs.make_run_dir(config)
        self.checkpoints = Checkpoints(self.run_dir, config.checkpoint.keep, config.checkpoint.keep_every)
        self.step, self.state = self._first_state(first_weights)
        self.writer = jax.process_index() == 0
        if self.writer:
            (self.run_dir / "config.yaml").write_text(config.to_yaml())
        self.compile_seconds = 0.0
        self._train_batches: Generator | None = None
        self._compiled_step = None
        self._tracing = False
        self._stop = StopSignals()

    def _first_weights(self) -> Weights | None:
        """Another run's weights, read before anything of this run is written; not if there is a run to resume."""
        if self.config.checkpoint.init_from is None or has_checkpoint(self.config.run.dir):
            return None
        return self.saver.restore_weights(self.config.checkpoint.init_from)

    def _first_state(self, first_weights: Weights | None) -> tuple[int, TrainState]:
        latest = self.checkpoints.latest_step
        self.resumed = latest is not None
        if latest is not None:
            return latest, self.saver.restore(self.checkpoints, latest)
        state = self.program.init_state()
        return 0, state if first_weights is None else self.saver.with_weights(state, first_weights)

    def next_batch(self) -> dict[str, jax.Array]:
        """The batch of the next step; the position in the data follows from the step alone."""
        if self._train_batches is None:
            self._train_batches = batches(self.program, "train", self.data["train"], self.step)
        return next(self._train_batches)

    def train_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """One step on `batch`; the metrics are still on the device."""
        if self._compiled_step is None:
            start = time.perf_counter()
            self._compiled_step = self.program.train_step.lower(self.state, batch).compile()
            self.compile_seconds = time.perf_counter() - start
            keep_autotuning(self.config)
        self.state, metrics = self._compiled_step(self.state, batch)
        self.step += 1
        return metrics

    def evaluate(self, split: Split = "valid") -> float:
        """Mean loss per token over `run.eval_steps` batches of a split, always the same ones."""
        if split not in self.data or not self.config.run.eval_steps:
            raise ConfigError(f"there is nothing to evaluate: set data.{split} and run.eval_steps above 0.")
        loss = tokens = 0.0
        source = batches(self.program, split, self.data[split])
        for batch in itertools.islice(source, self.config.run.eval_steps):
            batch_loss, batch_tokens = self.program.eval_step(
                self.state.params, self.state.fp8, batch, state=self.state.experts
            )
            loss, tokens = loss + batch_loss, tokens + batch_tokens
        source.close()  # and the loader's threads with it
        return float(loss / tokens)

    def save(self) -> None:
        """Start a checkpoint of the current step."""
        if self.checkpoints.latest_step != self.step:
            self.saver.save(self.checkpoints, self.step, self.state)

    def run(self) -> int:
        """Train to `run.steps`; the exit status."""
        logs.say(summary(self.program, self.flags))
        if self.resumed:
            logs.say(f"resuming from the checkpoint of step {self.step} in {self.checkpoints.directory}")
        log = logs.MetricsLog(self.config, self.step, self.writer)
        self.progress = logs.Progress(self.step, self.config.run.steps, self.writer)
        try:
            with self._stop:
                return self._run(log)
        finally:
            self._stop_profile()
            if self._train_batches is not None:
                self._train_batches.close()  # and the loader's workers with it
                self._train_batches = None
            self.progress.close()
            log.close()
            self.checkpoints.close()
            if self.writer and self.config.model.num_experts:
                draw_load_map(self.run_dir, block_layers(self.config.model)["moe"])

    def _run(self, log: logs.MetricsLog) -> int:
        run, meter = self.config.run, Meter(self)
        pending: tuple[int, dict[str, jax.Array]] | None = None
        while self.step < run.steps:
            batch = self.next_batch()
            with self._profile():
                metrics = self.train_step(batch)
            self.progress.advance()
            if pending:  # read one step late, so that the device never waits for the host
                if self._log(log, meter, *pending):
                    return BAD_NUMBERS
                pending = None
            last = self.step == run.steps
            if self.step % run.log_interval == 0 or last:
                pending = self.step, metrics
            evaluation = run.eval_interval and self.step % run.eval_interval == 0
            saving = run.checkpoint_interval and self.step % run.checkpoint_interval == 0
            stopping = self._stop.requested(agree=pending is not None)
            if pending and (last or evaluation or saving or stopping):
                if self._log(log, meter, *pending):
                    return BAD_NUMBERS
                pending = None
            if (evaluation or last) and "valid" in self.data and run.eval_steps:
                self._evaluate(log)
            if saving or last or stopping:
                self.save()
            if evaluation or saving:
                meter.restart()
            if stopping and not last:
                self.checkpoints.wait()
                self.progress.print(f"stopped on request at step {self.step}, saved; start the same command to go on")
                return STOPPED
        return DONE

    def _log(self, log: logs.MetricsLog, meter: "Meter", step: int, metrics: dict[str, jax.Array]) -> bool:
        """Write a logged step; True if the numbers have gone bad for good."""
        arrays = jax.device_get(metrics)
        counts, dropped = (arrays.pop(name, None) for name in COUNTS)
        values = {} if counts is None else logs.expert_load(counts, dropped)
        values = {name: array.item() for name, array in arrays.items()} | values
        in_row = values.pop("skipped_in_row")
        if not values["skipped"]:
            del values["skipped"]
        values |= meter.measure(step)
        log.write(step, values)
        left = (self.config.run.steps - step) * values["step_seconds"]
        self.progress.print(logs.console_line(step, self.config.run.steps, values, left))
        if in_row <= self.config.run.max_nonfinite_steps:
            return False
        self.progress.print(
            f"megajax: error: {in_row} steps in a row had a loss or gradient that is not finite, more than "
            f"run.max_nonfinite_steps={self.config.run.max_nonfinite_steps}: the last checkpoint is untouched; "
            "lower schedule.learning_rate or look at the data of these steps, then start again."
        )
        return True

    def _evaluate(self, log: logs.MetricsLog) -> None:
        loss = self.evaluate()
        log.write(self.step, {"eval_loss": loss})
        self.progress.print(f"step {self.step}  evaluation loss {loss:.4f}")

    @contextlib.contextmanager
    def _profile(self):
        """Around each step: traces the steps that `logging.profile_start` and `profile_steps` name."""
        start, count = self.config.logging.profile_start, self.config.logging.profile_steps
        if start is not None and not self._tracing and start <= self.step + 1 < start + count:
            jax.profiler.start_trace(str(self.run_dir / "profile"))
            self._tracing = True
        yield
        if start is not None and self.step + 1 >= start + count:
            self._stop_profile()

    def _stop_profile(self) -> None:
        if self._tracing:
            jax.block_until_ready(self.state.step)
            jax.profiler.stop_trace()
            self._tracing = False


class Meter:
    """Speed and memory between two logged steps; time spent on evaluation and saving is left out."""

    def __init__(self, trainer: Trainer):
        config, self.devices = trainer.config, trainer.program.mesh.devices
        self.trainer = trainer
        self.step_tokens = config.batch.global_size * config.batch.sequence_length
        self.flops_per_token = flops_per_token(config)
        self.peak = peak_flops(self.devices.flat[0].device_kind)
        self.restart()

    def restart(self) -> None:
        self.time, self.step = time.perf_counter(), self.trainer.step
        self.compile_seconds = self.trainer.compile_seconds

    def measure(self, step: int) -> dict[str, Any]:
        now = time.perf_counter()
        compiling = self.trainer.compile_seconds - self.compile_seconds
        seconds = (now - self.time - compiling) / max(step - self.step, 1)
        self.time, self.step, self.compile_seconds = now, step, self.trainer.compile_seconds
        speed = self.step_tokens / seconds / self.devices.size
        flops = speed * self.flops_per_token
        return {
            "tokens": step * self.step_tokens,
            "step_seconds": seconds,
            "tokens_per_second_per_device": speed,
            "tflops_per_second_per_device": flops / 1e12,
            "mfu": flops / self.peak if self.peak else None,
            "peak_memory_gib": peak_memory_gib(),
        }


class StopSignals:
    """SIGTERM and SIGUSR1 ask for an orderly stop while this context is open."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self):
        self._asked = False

    def __enter__(self) -> "StopSignals":
        self._before = {}
        with contextlib.suppress(ValueError):  # signals belong to the main thread; a notebook may run in another
            self._before = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, *_: object) -> None:
        self._asked = True

    def requested(self, agree: bool) -> bool:
        """Whether to stop now. Several processes must agree, which they do where `agree` is true for all of them."""
        if jax.process_count() == 1:
            return self._asked
        if not agree:
            return False
        from jax.experimental import multihost_utils

        return bool(multihost_utils.process_allgather(np.array(self._asked)).any())


def peak_memory_gib() -> float:
    """The largest memory in use so far: of the fullest local device, or of the process where devices don't tell."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices()]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (max(peaks) or host) / 2**30
