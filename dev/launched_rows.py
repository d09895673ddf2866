"""Rows under `megajax launch`: the speed and losses of several processes, and the restart after one is killed."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

LOGGED = 5  # steps between logged lines
STEPS, KILL_AT, AFTER_KILL = 30, 150, 50  # steps of a row; before a process is killed; after the restart


def launched(
    config: str, overrides: Sequence[str], processes: int, kill: bool, environment: dict, limit: float, log: TextIO
) -> dict[str, Any]:
    """The losses and the speed of a run, which is killed before it would save.

    With `kill` instead: the seconds from the kill of one process to the first step after the restart, and the number
    of steps that were repeated then, with the largest difference of their losses. RuntimeError: the run failed;
    TimeoutError: it took longer than `limit` seconds.
    """
    directory, deadline = Path(tempfile.mkdtemp(prefix="rows-")), time.monotonic() + limit
    fixed = [f"run.dir={directory / 'run'}", "run.steps=100000", f"run.log_interval={LOGGED}", "run.eval_steps=0"]
    command = [sys.executable, "-m", "megajax.launch", "--processes", str(processes), "--", config, *overrides, *fixed]
    with (directory / "output").open("w", encoding="utf-8") as output:
        launcher = subprocess.Popen(
            [*command, "logging.tensorboard=false"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        before = wait_for(directory, launcher, KILL_AT if kill else STEPS, deadline)
        return restarted(directory, launcher, before, deadline) if kill else speed(before)
    finally:
        launcher.kill()  # its processes end with it
        launcher.wait()
        log.write(f"=== {' '.join(command)}\n{output_of(directory)[-20000:]}\n")
        log.flush()
        time.sleep(2)  # for the processes to end, and free their memory
        shutil.rmtree(directory, ignore_errors=True)


def restarted(directory: Path, launcher: subprocess.Popen, before: list[dict], deadline: float) -> dict[str, Any]:
    """Kill one of the launcher's processes, and wait for the run to go on."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text(encoding="utf-8").split()
    killed = time.time()
    os.kill(int(children[-1]), signal.SIGKILL)
    time.sleep(2)  # for lines of steps that had run
    before = lines_of(directory) or before
    lines = wait_for(directory, launcher, before[-1]["step"] + AFTER_KILL, deadline)
    after = [line for line in lines if line["time"] > killed + 2]
    losses = {line["step"]: line["loss"] for line in before}
    differences = [abs(line["loss"] - losses[line["step"]]) for line in after if line["step"] in losses]
    return {
        "killed_at": before[-1]["step"],
        "first_step_after": after[0]["step"],
        "seconds_to_new_step": after[0]["time"] - killed,
        "compared": len(differences),
        "largest_difference": max(differences, default=None),
    }


def speed(lines: list[dict]) -> dict[str, Any]:
    """The median of the speeds after the first logged line, and the losses by step."""
    speeds = sorted(lines[1:], key=lambda line: line["step_seconds"])
    middle = speeds[len(speeds) // 2]
    return {
        "tflops_per_second_per_device": middle["tflops_per_second_per_device"],
        "step_ms": [1e3 * line["step_seconds"] for line in (middle, speeds[0], speeds[-1])],
        "losses": {line["step"]: line["loss"] for line in lines},
    }


def wait_for(directory: Path, launcher: subprocess.Popen, step: int, deadline: float) -> list[dict]:
    """The logged steps as soon as `step` is one of them."""
    while not (lines := lines_of(directory)) or lines[-1]["step"] < step:
        if launcher.poll() is not None:
            raise RuntimeError(f"the launcher ended with {launcher.returncode}: {output_of(directory)[-300:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"step {step} did not come in time: {output_of(directory)[-300:]}")
        time.sleep(0.05)
    return lines


def lines_of(directory: Path) -> list[dict]:
    """The logged steps; none while the file cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        text = (directory / "run/metrics.jsonl").read_text(encoding="utf-8")
        return [line for line in map(json.loads, text.splitlines()) if "loss" in line]
    return []


def output_of(directory: Path) -> str:
    """What the run has printed."""
    return (directory / "output").read_text(encoding="utf-8", errors="replace")
