"""A line for each run: state, step, loss, speed, newest checkpoint. `megajax status RUN ... [--follow]`.

It reads the run directories only, so it works on any machine that sees them. States: starting, running, restarting (by
megajax launch), silent (its lock has no sign of life), done (the last step is saved), and ended (before).
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax import metrics_file
from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.errors import InputError, file_reader
from megajax.files import CONFIG, HEARTBEAT_SECONDS, LOCK, METRICS
from megajax.restart_sign import restarting_since
from megajax.schema.tree import read_file

SILENT_SECONDS = 6 * HEARTBEAT_SECONDS  # clocks of hosts differ


@file_reader("run_dir")
def status(run_dir: Path, now: float) -> dict[str, Any]:
    """What a run directory says: state, step and steps, the last logged values, and the ages in seconds."""
    path, state = run_dir / CONFIG, _life(run_dir, now)
    if not path.is_file():
        if state is None:
            raise InputError(f"{run_dir} has no {CONFIG}: give the directory of a run.")
        return {"state": "starting" if state == "running" else state, "step": 0, "steps": "?", "age": None}
    config = read_file(path).values
    values: dict[str, Any] = {"step": 0}
    for entry in metrics_file.read_tail(run_dir / METRICS):
        values |= entry
        if "checkpoint_step" in entry and "time" in entry:
            values |= {"saved_step": entry["checkpoint_step"], "saved_time": entry["time"]}
    section = config.get("run")
    steps = section.get("steps") if isinstance(section, dict) else None
    if type(steps) is not int:
        raise InputError(f"{path} has no run.steps, a number: give the directory of a run that has begun to train.")
    state = state or ("done" if values.get("saved_step", 0) >= steps else "ended")
    return values | {"state": state, "steps": steps, "age": now - values["time"] if "time" in values else None}


def _life(run_dir: Path, now: float) -> str | None:
    """The state of a run whose process or launcher has left a sign of life."""
    if now - (restarting_since(run_dir) or 0) < SILENT_SECONDS:
        return "restarting"
    try:
        return "running" if now - (run_dir / LOCK).stat().st_mtime < SILENT_SECONDS else "silent"
    except FileNotFoundError:
        return None


def line(name: str, found: dict[str, Any], now: float) -> str:
    """The line of a run."""
    parts = [f"{name}  {found['state']:10}  step {found['step']}/{found['steps']}"]
    for key, form in (
        ("loss", "loss {:.4f}"),
        ("eval_loss", "evaluation loss {:.4f}"),
        ("step_seconds", "{:.3g} s/step"),
    ):
        if found.get(key) is not None:
            parts.append(form.format(found[key]))
    if found.get("tokens_per_second_per_device") is not None:
        parts.append(f"{found['tokens_per_second_per_device']:,.0f} tok/s/dev")
    if "saved_step" in found:
        parts.append(f"saved step {found['saved_step']} {_age(now - found['saved_time'])} ago")
    if found["age"] is not None:
        parts.append(f"logged {_age(found['age'])} ago")
    return "  ".join(parts)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def lines(runs: Sequence[Path]) -> tuple[list[str], bool, InputError | None]:
    """(a line for each run, whether one of them is running, the first error of what is no run)."""
    now, shown, running, error = time.time(), [], False, None
    names = [shlex.quote(str(run)) for run in runs]
    width = max(map(len, names))
    for name, run in zip(names, runs, strict=True):
        try:
            found = status(run, now)
        except InputError as problem:
            error = error or problem
            continue
        running |= found["state"] in ("starting", "running", "restarting")
        shown.append(line(f"{name:{width}}", found, now))
    return shown, running, error


def main(arguments: Sequence[str]) -> int:
    """Print the lines; returns the exit status."""
    parser = CommandParser("megajax.status", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="directory of a run")
    parser.add_argument("--follow", action="store_true", help="print again while a run is running")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="seconds between reports (default: 10)")
    with user_errors():
        options = parser.parse_args(arguments)
        if not options.every > 0:
            raise InputError(f"--every={options.every:g} is not positive: give a number of seconds.")
        while True:
            shown, running, error = lines(options.runs)
            if shown:
                print("\n".join(shown), flush=True)
            if error is not None:
                raise error
            if not (options.follow and running):
                return 0
            time.sleep(options.every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
