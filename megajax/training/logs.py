"""Logging to metrics.jsonl and the console."""

import json
import logging
import math
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megajax import cluster, metrics_file
from megajax.checkpoint import SaveOutcome
from megajax.config import Config
from megajax.config.sentences import located
from megajax.console import amount, command, fold, size
from megajax.errors import InputError, counted
from megajax.files import METRICS, replace_text
from megajax.options.registered import replaces_head
from megajax.training.expert_load import write_load_map
from megajax.training.trackers import TensorBoardLog, tag

CONSOLE = logging.getLogger("megajax.console")  # every line that a run prints
CONSOLE.propagate = False

LINE_WIDTH = 80


class MetricsLog:
    """Writes one object per logged step to every sink; only process 0 writes.

    A full disk does not stop a run: lines that do not fit into metrics.jsonl are written when there is space again.
    """

    def __init__(
        self,
        config: Config,
        start_step: int,
        writer: bool,
        send: Callable[[int, Mapping[str, float]], None] = lambda step, numbers: None,
    ):
        """`send(step, numbers by tag)` passes them to the services that follow the run."""
        self.writer, self._send = writer, send
        self._tensorboard = None
        self._unwritten = b""
        if not writer:
            return
        run_dir = Path(config.run.dir)
        path = run_dir / METRICS
        drop_lines_after(path, start_step)
        self._file = path.open("ab", buffering=0)
        if config.logging.tensorboard:
            self._tensorboard = TensorBoardLog(run_dir / "tensorboard", start_step, config.to_yaml())

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one line for `step`, with the time in seconds since 1970; the values are Python numbers."""
        if not self.writer:
            return
        # JSON has no NaN: numbers that are not finite become null.
        entry = {name: _finite(value) for name, value in values.items()}
        self._unwritten += json.dumps({"step": step, "time": round(time.time(), 3), **entry}).encode() + b"\n"
        self._write_lines()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        for name in values.keys() - numbers.keys():
            if "/" in name and isinstance(values[name], list):  # a norm of each layer
                numbers |= {f"{name}/{i}": value for i, value in enumerate(values[name])}
        tagged = {tag(name): value for name, value in numbers.items()}
        if self._tensorboard:
            self._tensorboard.write(step, tagged)
        self._send(step, tagged)

    def _write_lines(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            lines = self._unwritten.count(b"\n")
            problem = f"{counted(lines, 'line')} of {self._file.name} could not be written ({error.strerror})"
            warnings.warn(f"{problem}: free disk space there.", stacklevel=3)

    def close(self) -> None:
        if not self.writer:
            return
        self._write_lines()
        self._file.close()
        if self._tensorboard:
            self._tensorboard.close()


def _finite(value: Any) -> Any:
    """A logged value with None instead of numbers that are not finite."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def drop_lines_after(path: Path, step: int) -> None:
    """Remove lines that an interrupted run logged after its last checkpoint, so that each step occurs once."""
    if not path.exists():
        return
    lines = [line.rstrip(b"\n") for line, entry in metrics_file.read(path) if entry["step"] <= step]
    replace_text(path, "".join(f"{line.decode()}\n" for line in lines))


def make_run_dir(config: Config) -> Path:
    """The run directory; it is made if it does not exist. Raises InputError if it cannot be written."""
    run_dir = Path(config.run.dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        problem = f"{located(config, 'run.dir')} cannot be written ({error.strerror})"
        raise InputError(f"{problem}: choose a directory that you may write to.") from None
    return run_dir


def named_numbers(values: Mapping[str, float], names: Iterable[str]) -> list[str]:
    """Numbers of an objective as the console has them, each with its name."""
    return [f"{name} {values[name]:.3g}" for name in names]


def console_line(
    step: int, steps: int, values: Mapping[str, Any], seconds_left: float | None, own: Sequence[str] = ()
) -> str:
    """The console's line of a logged step, for 80 columns but for the objective's `own` numbers.

    metrics.jsonl has memory and TFLOP/s too.
    """
    speed, norm = amount(values["tokens_per_second_per_device"], ""), values["grad_norm"]
    parts = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {values['loss']:.4f}",
        *named_numbers(values, own),
        f"norm {norm:.1e}" if norm < 0.1 or norm >= 1000 else f"norm {norm:.{2 if norm < 10 else 1}f}",
        f"lr {values['learning_rate']:.1e}",
        f"{speed.replace(' ', '')} tok/s/dev",
    ]
    if values["mfu"] is not None:
        parts.append(f"MFU {values['mfu']:.0%}")
    if values.get("skipped"):
        parts.append(f"{values['skipped']} skipped")
    if seconds_left is not None:
        parts.append(f"{_longest_unit(seconds_left)} left")
    # The same in all lines of a run, for the eye and for grep.
    separator = "  " if values["mfu"] is None and steps < 1000 else " "
    line = separator.join(parts)
    return line if len(line) <= LINE_WIDTH else separator.join([f"step {step}", *parts[1:]])


def nothing_line(config: Config, step: int, samples: int) -> str:
    """The only line of a run that is complete already, at `step` after `samples`."""
    run = shlex.quote(config.run.dir)
    at = f"{run} is at step {step} of run.steps={config.run.steps}"
    return f"nothing to do: {at}; to train longer, {_to_train_longer(config, samples)}, or choose another run.dir"


def closing_line(config: Config, step: int, samples: int, seconds: float, chats: bool = False) -> str:
    """The last line of a complete run, at `step` after `samples`: its duration, and the next commands.

    `chats`: it was trained on some; data of kind chat may be prompts with completions only.
    """
    run = config.run.dir
    return (
        f"done: at step {step} after {_duration(seconds)}, written to {shlex.quote(run)}; {_to_generate(config, chats)}"
        f"plot: {command('plot', run)}; to train longer, {_to_train_longer(config, samples)}"
    )


def _to_generate(config: Config, chats: bool) -> str:
    """The command that generates with a complete run; empty if its model does not."""
    run = config.run.dir
    if not config.model.causal or replaces_head(config.objective.kind):
        return ""
    if chats:
        return f"talk to it: {command('chat', run)}; "
    if config.data.kind == "chat":
        return f"answer lines like those of the training: {command('generate', run, '--prompts', 'FILE.jsonl')}; "
    return f"sample: {command('generate', run, '--prompt', 'TEXT')}; " if config.data.tokenizer else ""


def _to_train_longer(config: Config, samples: int) -> str:
    """What lets a complete run, which has read `samples`, go on."""
    data, longer = config.data, "raise run.steps" if config.run.epochs is None else "raise run.epochs"
    if not config.checkpoint.save_optimizer:
        return f"start another with checkpoint.init_from={shlex.quote(config.run.dir)}"
    if data.kind == "synthetic" or data.order != "megatron":
        return longer
    if data.train_samples is not None:
        steps = (data.train_samples - samples) // config.batch.global_size
        if steps > 0:
            return f"{longer} by at most {steps}, as far as data.train_samples={data.train_samples} reach"
        longer += " and data.train_samples"
    why = "data.order=megatron then has another order of the samples, unless data.train_samples is set from the start"
    return f"{longer} with checkpoint.allow_changes=[data.train_samples] ({why})"


def stopped_line(config: Config, step: int, at_deadline: bool) -> str:
    """The last line of a run that was stopped on request, or at its deadline."""
    cure = "saved; start the same command to resume"
    if not config.checkpoint.save_optimizer:
        cure = (
            f"saved without optimizer state; start another run with checkpoint.init_from={shlex.quote(config.run.dir)}"
        )
    why = f"stopped at the end of run.max_minutes={config.run.max_minutes:g}" if at_deadline else "stopped on request"
    return f"{why} at step {step}, {cure}"


def saved_line(outcome: SaveOutcome) -> str:
    """The line of a complete checkpoint: bytes, seconds until it was on disk with its checksums, wait of training."""
    speed = f"{size(outcome.size / outcome.seconds)}/s"
    figures = f"{size(outcome.size)} in {outcome.seconds:.1f} s, {speed}, training waited {outcome.waited:.1f} s"
    return f"saved step {outcome.step} ({figures})"


def draw_load_map(run_dir: Path, layers: Sequence[int]) -> None:
    """`write_load_map`, with a warning instead of any error, since a picture must not stop a run."""
    try:
        write_load_map(run_dir, layers)
    except Exception as error:
        say(f"megajax: warning: the heat map of expert load was not drawn: {error!r}")


def say(text: str) -> None:
    """Print a line on the console, from process 0 only."""

    if cluster.current().is_first:
        print(fold(text), flush=True)
        CONSOLE.info(text)


class Console:
    """What a run prints: above a progress bar on terminals, elsewhere only lines; open while `Trainer.run` runs."""

    def __init__(self):
        self._bar, self._is_open = None, False

    def open(self, start: int, steps: int, writer: bool) -> None:
        self._is_open = True
        if writer and sys.stdout.isatty():
            from rich.progress import Progress as Bar

            self._bar = Bar(transient=True)
            self._task = self._bar.add_task("training", total=steps, completed=start)
            self._bar.start()

    def set_step(self, step: int) -> None:
        """Set the bar to a step."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def note(self, text: str) -> None:
        """Print a line if the console is open."""
        if self._is_open:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Print a line."""
        if self._bar:
            style = "yellow" if text.startswith("megajax: warning") else None
            self._bar.console.print(text, style=style, highlight=text.startswith("step "), markup=False)
            CONSOLE.info(text)
        else:
            say(text)

    def report(self, text: str, warning: bool) -> None:
        """Note what was done beside the steps, or could not be; in the user's own loop a warning is Python's."""
        if warning and not self._is_open:
            warnings.warn(f"{text}.", stacklevel=3)
        self.note(f"megajax: warning: {text}; training continues" if warning else text)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        self._bar, self._is_open = None, False


def _longest_unit(seconds: float) -> str:
    """A duration in the longest unit that leaves 2 or more of it, days to seconds."""
    unit, length = next(((u, s) for u, s in (("d", 86400), ("h", 3600), ("m", 60)) if seconds >= 2 * s), ("s", 1))
    return f"{seconds / length:.0f}{unit}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
