"""The lines of a run's steps: their metrics are read one step late, so that the devices never wait for the host."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax import cluster
from megajax.errors import ConfigError, InputError
from megajax.layout.kinds import expert_layers
from megajax.options.registered import own_metrics
from megajax.training import logs
from megajax.training.hooks import Hook, RunView
from megajax.training.speed import Meter, StepTimes
from megajax.training.watch import Watch

IN_ROW = "skipped_in_row"  # a metric that is examined, but not logged


class StepLog(Hook):
    """Reads the numbers of logged steps, and writes their lines to metrics.jsonl, the console and all services.

    Between `read_waiting` and `write` a save starts, so that a line that cannot be written loses no step.
    """

    def __init__(self, send: Callable[[int, Mapping[str, float]], None], watch: Watch):
        """`send(step, numbers by tag)` passes them to services."""
        self._send, self._watch, self.times = send, watch, StepTimes()
        self._file: logs.MetricsLog | None = None
        # A step on the devices: its metrics, empty if it is not logged, and the numbers of hooks.
        self._waiting: tuple[int, dict[str, jax.Array], dict[str, Any]] | None = None
        # A logged step that was read: its values, and the seconds that the run has left.
        self._line: tuple[int, dict[str, Any], float | None] | None = None

    @property
    def file(self) -> logs.MetricsLog:
        """The open metrics.jsonl."""
        assert self._file is not None
        return self._file

    def on_start(self, run: RunView) -> None:
        if self._file is not None:
            self._file.close()
        self._file = logs.MetricsLog(run.config, run.step, cluster.current().is_first, self._send)
        self._meter = Meter(run.config, run.sizes, run.program.mesh.devices, run.step)
        self._waiting = self._line = None

    def first_step_done(self, compile_seconds: float) -> None:
        """The first step, which was compiled for `compile_seconds`, has ended now; that is left out of its time."""
        self.times.take()
        self._meter.first_step_done(compile_seconds)

    def on_step(self, run: RunView) -> None:
        if run.step % run.config.run.log_interval == 0 or run.step == 1 or run.is_last:
            self._waiting = run.step, run.metrics, {}

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add numbers, or arrays on the devices, to the line of the newest step."""
        if self._file is None:  # a loop of the user's own has no lines
            return
        self._waiting = self._waiting or (step, {}, {})
        self._waiting[-1].update(values)

    def read_waiting(self, run: RunView) -> None:
        """Read the numbers of the step that waits for its line, if one does, for `examine` and `on_log` of all hooks.

        A hook may end the run because of them.
        """
        if self._waiting is None:
            return
        (step, metrics, added), self._waiting = self._waiting, None
        values: dict[str, Any] = {}
        if metrics:
            for hook in run.hooks:
                hook.examine(run, step)
            values = values_of(jax.device_get(metrics))
            measured = self._meter.measure(step)
            measured |= self._watch.slowest(self.times.take(), measured["step_seconds"], run.note)
            if taken := sorted(values.keys() & measured.keys()):
                problem = f"a part or the objective has the metric {taken[0]}, which the line of a step has already"
                raise ConfigError(f"{problem}: give it another name.")
            values |= measured
            for hook in run.hooks:
                hook.on_log(run, step, values)
            values = {name: _plain(value) for name, value in values.items()}
            del values[IN_ROW]
            self._line = step, values, self._meter.seconds_left(run.config.run.steps, measured)
        added = {name: _plain(value) for name, value in jax.device_get(added).items()}
        if taken := sorted(added.keys() & {"step", "time", *values}):
            raise InputError(f"a hook logs {taken[0]} at step {step}, which its line has already: give another name.")
        values |= added
        if values and not metrics:
            self.write_line(step, values)

    def write(self, run: RunView) -> None:
        """Write the line of the step that was read, if there is one."""
        if self._line is not None:
            (step, values, seconds_left), self._line = self._line, None
            self.write_line(step, values)
            own = own_metrics(run.config.objective.kind)
            run.note(logs.console_line(step, run.config.run.steps, values, seconds_left, own))

    def write_line(self, step: int, values: Mapping[str, Any]) -> None:
        """Write a line of its own, such as an evaluation's."""
        self.file.write(step, values)

    def restart(self, step: int) -> None:
        """Leave out the time since `step` of the next measurement, such as that of an evaluation or a save."""
        self._meter.restart(step)
        self.times.take()

    def on_end(self, run: RunView) -> None:
        if self._file is None:
            return
        if run.end is not None:  # after an error the devices may not answer
            self.read_waiting(run)
        self._file.close()
        if self._file.writer and run.config.model.num_experts:
            logs.draw_load_map(Path(run.config.run.dir), expert_layers(run.config.model))
        self._file = None


def _plain(value: Any) -> Any:
    """An array of any library, or a number of NumPy, as Python has it: metrics.jsonl takes no others."""
    return value.tolist() if hasattr(value, "tolist") else value


def values_of(metrics: dict[str, np.ndarray]) -> dict[str, Any]:
    """The values of a logged step from a step's metrics."""
    counts, dropped = (metrics.pop(name, None) for name in ("expert_counts", "dropped_tokens"))
    values = {name: array.tolist() for name, array in metrics.items()}
    values |= {} if counts is None else expert_load(counts, dropped)
    if not values["skipped"]:
        del values["skipped"]
    return values


def expert_load(counts: np.ndarray, dropped: np.ndarray | None = None) -> dict[str, Any]:
    """The load of experts from the counts of assignments `[L, E]` in the MoE layers: the worst layer's and all layers'.

    `expert_load` is the largest count divided by the mean, `idle_experts` the fraction of experts without a token. With
    `dropped [L]`, the number of dropped assignments, `dropped_tokens` is their fraction.
    """
    load = counts.max(axis=1) / np.maximum(counts.mean(axis=1), 1e-9)
    idle = (counts == 0).mean(axis=1)
    worst = {"expert_load_max": float(load.max()), "idle_experts_max": float(idle.max())}
    values = worst | {"expert_load": load.round(4).tolist(), "idle_experts": idle.round(4).tolist()}
    if dropped is None:
        return values
    share = dropped / counts.sum(axis=1)
    summed = {"dropped_tokens_max": float(share.max()), "dropped_tokens_mean": float(share.mean())}
    return values | summed | {"dropped_tokens": share.round(4).tolist()}
