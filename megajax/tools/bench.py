"""Measures the speed of configs: `megajax bench CONFIG [section.key=value ...]`.

Each config is followed by its overrides and runs in its own process, on synthetic tokens: 5 warm-up and 15 timed steps.
The command prints a JSON line per config, then a table with median and spread. A CONFIG is a path, or the name of a
file in configs/.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import metadata
from itertools import pairwise

from megajax.command_parser import CommandParser
from megajax.config import Config, load_config
from megajax.console import fold, user_errors
from megajax.errors import InputError
from megajax.runtime import prepare_environment, process_start_time

WARMUP_STEPS, TIMED_STEPS = 5, 15
COLUMNS = (
    "config",
    "mesh",
    "tokens/s/device",
    "TFLOP/s/device",
    "MFU",
    "step ms (spread)",
    "peak GiB",
    "compile s",
)


def split_runs(arguments: list[str]) -> list[list[str]]:
    """One list per config: its path or name, and the overrides after it. Raises InputError if there is no config."""
    runs: list[list[str]] = []
    for argument in arguments:
        if "=" not in argument:
            runs.append([])
        elif not runs:
            raise InputError(f"no config precedes the override {argument} (the command line): give a config first.")
        runs[-1].append(argument)
    return runs


def synthetic_config(name: str, overrides: list[str], directory: str) -> Config:
    """The config of a file or a name on synthetic tokens, without TensorBoard, with `directory` as run directory.

    Every step has `batch.global_size` sequences. Weights are random, also those that adapters (`lora`) are trained
    beside.
    """
    fixed = ["data.kind=synthetic", "data.packing=null", "run.eval_steps=1", f"run.dir={directory}"]
    fixed += ["logging.tensorboard=false", "checkpoint.init_from=random"]
    config = load_config(name, [*fixed, *overrides, "batch.schedule=null", "run.epochs=null"])
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"init_from": None})})


def versions() -> dict[str, str | None]:
    """The versions of jax and, on GPUs, of CUDA, cuDNN and the driver; None if unknown."""
    import jax

    from megajax.jax_internals import cuda_versions

    found: dict[str, str | None] = {name: metadata.version(name) for name in ("jax", "jaxlib")}
    if jax.default_backend() == "gpu":
        cuda = cuda_versions.cuda_runtime_get_version() if cuda_versions else 0
        cudnn = cuda_versions.cudnn_get_version() if cuda_versions else 0
        found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None
        found["cudnn"] = f"{cudnn // 10000}.{cudnn % 10000 // 100}.{cudnn % 100}" if cudnn else None
        found["driver"] = driver_version()
    return found


def driver_version() -> str | None:
    """The NVIDIA driver's version; None without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def bench(name: str, overrides: list[str], warmup: int = WARMUP_STEPS, timed: int = TIMED_STEPS) -> dict:
    """Measure one config in this process, with at least one warm-up step."""
    with user_errors(), tempfile.TemporaryDirectory() as directory:
        steps = warmup + timed
        config = synthetic_config(name, overrides, directory)
        flags = prepare_environment(config)

        import jax

        from megajax.estimate.costs import flops_per_token, parameter_count, peak_flops
        from megajax.training.loop import Trainer
        from megajax.training.speed import peak_memory_gib
        from megajax.training.summary import summary

        trainer = Trainer(config, flags=flags)
        print(fold(summary(trainer.program, flags), sys.stderr), file=sys.stderr)
        finished, losses = [], []
        running = trainer.train_step(trainer.next_batch())
        for _ in range(steps):
            # The next step starts before the host waits for the last one, so that the device never waits for the host.
            # After the last one too: the host gets a loss later while another step runs.
            following = trainer.train_step(trainer.next_batch())
            losses.append(float(running["loss"]))
            finished.append(time.perf_counter())
            running = following
        float(running["loss"])
        first_step = time.time() - process_start_time() - (time.perf_counter() - finished[0])
        times = sorted(step_seconds(finished, warmup))
        trainer.checkpoints.close()

        device, count = jax.devices()[0], trainer.program.mesh.size
        median = times[len(times) // 2]
        speed = config.batch.global_size * config.batch.sequence_length / median / count
        tflops = speed * flops_per_token(config) / 1e12
        peak = peak_flops(device.device_kind)
        mesh = {axis: size for axis, size in trainer.program.mesh.shape.items() if size > 1}
        return {
            "config": config.run.name,
            "overrides": overrides,
            "devices": f"{count} × {device.device_kind}",
            "mesh": " ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one device",
            "precision": config.precision.model_dump(mode="json"),
            "parameters": parameter_count(trainer.program.model),
            "tokens_per_second_per_device": speed,
            "tflops_per_second_per_device": tflops,
            "mfu": tflops * 1e12 / peak if peak else None,
            "step_ms": [1e3 * median, 1e3 * times[0], 1e3 * times[-1]],
            "peak_memory_gib": peak_memory_gib(),
            "compile_seconds": trainer.compile_seconds,
            "first_step_seconds": first_step,  # from the start of the process
            "loss": [losses[0], losses[-1]],
            "versions": versions(),
            "flags": os.environ["XLA_FLAGS"].split(),  # including the user's
            "date": time.strftime("%Y-%m-%d"),
        }


def step_seconds(finished: list[float], warmup: int) -> list[float]:
    """The seconds of each step after the `warmup` first ones, from the times at which all were finished."""
    return [after - before for before, after in pairwise(finished[warmup - 1 :])]


def row(result: dict) -> str:
    """A row of the table."""
    median, low, high = result["step_ms"]
    cells = (
        " ".join([result["config"], *result["overrides"]]),
        result["mesh"],
        f"{result['tokens_per_second_per_device']:,.0f}",
        f"{result['tflops_per_second_per_device']:.1f}",
        f"{result['mfu']:.1%}" if result["mfu"] else "–",
        f"{median:.1f} ({low:.1f}–{high:.1f})",
        f"{result['peak_memory_gib']:.1f}",
        f"{result['compile_seconds']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Run each config in its own process, then print the table; returns the exit status."""
    parser = CommandParser(
        "megajax.tools.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="CONFIG [section.key=value ...]", help="configs to measure")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in the process of a run
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        runs = split_runs(options.runs)
        if options.one:
            print(json.dumps(bench(runs[0][0], runs[0][1:])))
            return 0
        with warnings.catch_warnings(action="ignore"):  # each run's process prints its warnings
            for name, *overrides in runs:  # to find mistakes before the first run
                synthetic_config(name, overrides, "bench")
        table, failed = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)], 0
        for run in runs:
            command = [sys.executable, "-m", "megajax.tools.bench", "--one", *run]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                failed = 1
                if done.returncode < 0:  # it could not say why
                    name = signal.Signals(-done.returncode).name
                    why = "; the system does that when the host has too little memory" if name == "SIGKILL" else ""
                    print(f"{' '.join(run)}: the process was ended by {name}{why}", file=sys.stderr, flush=True)
                table.append(f"| {' '.join(run)} | failed |" + " – |" * (len(COLUMNS) - 2))
                continue
            print(done.stdout.strip(), flush=True)
            table.append(row(json.loads(done.stdout.splitlines()[-1])))
        print("\n".join(table))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
