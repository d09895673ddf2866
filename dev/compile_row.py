"""Train steps compiled for H200s, without a GPU, each in its own process: XLA reads its flags once per process."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import InputError

ROOT = Path(__file__).parents[1]
FAST = "--xla_gpu_autotune_level=0"  # compiles in half the time to the same operations


def run_apart(case: Sequence[str], seconds: float | None = None) -> str:
    """The stdout of `megajax compile` for a config, overrides and options, run in its own process.

    Flags that the user has set win over FAST. Raises InputError, with stderr, if it fails, or if it runs longer than
    `seconds`, when it is killed.
    """
    command = [sys.executable, "-m", "megajax", "compile", *case]
    environment = {"XLA_FLAGS": FAST, **os.environ}
    name = f"megajax compile {' '.join(case)}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InputError(f"{name} was killed after {seconds:.0f} s.") from None
    if done.returncode:
        raise InputError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def compile_apart(config: str, overrides: Sequence[str], gpus: int, seconds: float | None = None) -> dict:
    """The figures of a compiled step. Raises InputError if the config does not compile in `seconds`."""
    return json.loads(run_apart([config, *overrides, "--gpus", str(gpus), "--json"], seconds).splitlines()[-1])
