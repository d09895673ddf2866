"""A config's train step compiled for H200s, without a GPU: `python scripts/compile_row.py CONFIG [overrides]`.

The same as `python -m megajax.training.compiled_step`, which prints the figures of a table's row. The tables call
`compile_apart`: XLA reads its flags once per process, so each row has its own process.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.errors import InputError
from megajax.training.compiled_step import main

ROOT = Path(__file__).parents[1]
FAST = "--xla_gpu_autotune_level=0"  # compiles in half the time to the same operations


def run_apart(script: str, case: Sequence[str]) -> str:
    """The stdout of a script of this directory for a config, overrides and `--gpus N`, run in its own process.

    Flags that the user has set win over FAST. Raises InputError, with the script's stderr, if it fails.
    """
    command = [sys.executable, str(ROOT / "scripts" / script), *case]
    environment = {"XLA_FLAGS": FAST, **os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise InputError(f"python scripts/{script} {' '.join(case)} failed: {done.stderr.strip()}")
    return done.stdout


def compile_apart(config: str, overrides: Sequence[str], gpus: int) -> dict:
    """The result of `measure` in its own process. Raises InputError if the config does not compile."""
    return json.loads(run_apart("compile_row.py", [config, *overrides, "--gpus", str(gpus)]).splitlines()[-1])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
