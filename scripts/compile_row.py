"""A config's train step compiled for H200s, without a GPU: `python scripts/compile_row.py CONFIG [overrides]`.

The same as `python -m megajax.tools.preflight.compiled_step`, which prints the figures of a table's row. The tables
call `compile_apart`: XLA reads its flags once per process, so each row has its own process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import InputError
from megajax.tools.preflight.compiled_step import main

ROOT = Path(__file__).parents[1]
FAST = "--xla_gpu_autotune_level=0"  # compiles in half the time to the same operations


def run_apart(script: str, case: Sequence[str], seconds: float | None = None) -> str:
    """The stdout of a script of this directory for a config, overrides and `--gpus N`, run in its own process.

    Flags that the user has set win over FAST. Raises InputError, with the script's stderr, if it fails, or if it runs
    longer than `seconds`, when it is killed.
    """
    command = [sys.executable, str(ROOT / "scripts" / script), *case]
    environment = {"XLA_FLAGS": FAST, **os.environ}
    name = f"python scripts/{script} {' '.join(case)}"
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise InputError(f"{name} was killed after {seconds:.0f} s.") from None
    if done.returncode:
        raise InputError(f"{name} failed: {done.stderr.strip()}")
    return done.stdout


def compile_apart(config: str, overrides: Sequence[str], gpus: int, seconds: float | None = None) -> dict:
    """The result of `measure` in its own process. Raises InputError if the config does not compile in `seconds`."""
    return json.loads(run_apart("compile_row.py", [config, *overrides, "--gpus", str(gpus)], seconds).splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
