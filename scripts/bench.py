"""Benchmark named configs: `python scripts/bench.py configs/llama3_8b_l8.yaml [section.key=value ...]`.

Synthetic tokens, 5 warm-up and 15 timed steps; prints a table row (median, spread) and a JSON line. Several configs
can be given, each followed by its own overrides; each runs in a process of its own.
"""

import json
import subprocess
import sys
import tempfile
import time

from megajax.config import load_config
from megajax.config.cli import user_errors
from megajax.runtime import prepare_environment

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
    """One list per config: its path and the overrides after it."""
    runs: list[list[str]] = []
    for argument in arguments:
        if "=" not in argument:
            runs.append([])
        if runs:
            runs[-1].append(argument)
    return runs


def bench(path: str, overrides: list[str]) -> dict:
    """Measure one config in this process."""
    with user_errors(), tempfile.TemporaryDirectory() as directory:
        steps = WARMUP_STEPS + TIMED_STEPS
        fixed = ["data.kind=synthetic", f"run.dir={directory}", "logging.tensorboard=false"]
        config = load_config(path, [*fixed, *overrides])
        flags = prepare_environment(config)

        import jax

        from megajax.plan import flops_per_token, parameter_count, peak_flops
        from megajax.training.loop import Trainer, peak_memory_gib
        from megajax.training.summary import summary

        trainer = Trainer(config, flags=flags)
        print(summary(trainer.program, flags), file=sys.stderr)
        finished, losses = [], []
        running = trainer.train_step(trainer.next_batch())
        for step in range(1, steps + 1):
            # The next step starts before the last one is waited for, so that the device never waits for the host.
            following = trainer.train_step(trainer.next_batch()) if step < steps else running
            losses.append(float(running["loss"]))
            finished.append(time.perf_counter())
            running = following
        times = sorted(b - a for a, b in zip(finished[WARMUP_STEPS - 1 :], finished[WARMUP_STEPS:], strict=False))
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
            "parameters": parameter_count(trainer.program.model),
            "tokens_per_second_per_device": speed,
            "tflops_per_second_per_device": tflops,
            "mfu": tflops * 1e12 / peak if peak else None,
            "step_ms": [1e3 * median, 1e3 * times[0], 1e3 * times[-1]],
            "peak_memory_gib": peak_memory_gib(),
            "compile_seconds": trainer.compile_seconds,
            "loss": [losses[0], losses[-1]],
            "jax": jax.__version__,
            "flags": flags,
            "date": time.strftime("%Y-%m-%d"),
        }


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
    """Each run in a process of its own, then the table."""
    if arguments[:1] == ["--one"]:
        print(json.dumps(bench(arguments[1], arguments[2:])))
        return 0
    runs = split_runs(arguments)
    if not runs:
        print(__doc__)
        return 2
    table, failed = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)], 0
    for run in runs:
        done = subprocess.run([sys.executable, __file__, "--one", *run], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            failed = 1
            table.append(f"| {' '.join(run)} | failed |" + " – |" * (len(COLUMNS) - 2))
            continue
        print(done.stdout.strip(), flush=True)
        table.append(row(json.loads(done.stdout.splitlines()[-1])))
    print("\n".join(table))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
