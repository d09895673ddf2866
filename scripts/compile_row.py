"""A config's train step compiled for H200s, without a GPU: the figures of a table's row as one JSON object.

    python scripts/compile_row.py CONFIG [section.key=value ...] [--gpus N]

Prints the layers as [loops, layers of the body] of each segment, seconds of tracing and lowering, seconds of XLA, the
peak memory of this process, and XLA's memory per device by part, in bytes. The tables call `compile_apart`: XLA reads
its flags once per process, so each row has its own process.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.config import load_config
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.plan.compile import compile_for_h200
from megajax.training.step import TrainProgram

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


def measure(config: str, overrides: list[str], gpus: int) -> dict:
    """Compiles a config in this process; see above."""
    step = compile_for_h200(TrainProgram.build, load_config(config, overrides), gpus)
    return {
        "segments": [(segment.loops, segment.unroll) for segment in step.program.local.layers.segments],
        "lower_seconds": step.trace_seconds + step.lower_seconds,
        "xla_seconds": step.compile_seconds,
        "compiler_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
        "device_memory": step.memory,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="path of a config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpus", type=int, default=1)
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        print(json.dumps(measure(args.config, args.overrides, args.gpus)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
