"""Golden runs: tiny models trained on the CPU through `megajax.train`, whose numbers later code must repeat."""

import hashlib
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dev.programs.cases import DELAYED, MODELS, PACKED

STEPS, SAVED = 6, 3
BASE = """
run: {log_interval: 1, steps: STEPS, checkpoint_interval: SAVED, deterministic: true}
batch: {global_size: 8, num_microbatches: 2, sequence_length: 32}
schedule: {kind: constant, learning_rate: 3.0e-3}
data: {kind: synthetic}
checkpoint: {keep: 9}
logging: {tensorboard: false}
"""
# The first also has the weights from which adapters start.
RUNS = {
    "llama-dense": "mesh.fsdp=2 mesh.tensor=2",
    "llama-lora": "mesh.fsdp=2 lora.rank=4 lora.dropout=0.1 checkpoint.init_from=llama-dense",
    "llama-muon": "mesh.fsdp=2 mesh.tensor=2 optimizer.kind=muon",
    "llama-split": "mesh.fsdp=2 optimizer.master=split optimizer.state=int8",
    "llama-averages": "mesh.data=2 optimizer.ema_decay=0.9 model.dropout=0.1",
    "mixtral-fp8": f"mesh.expert=2 {DELAYED}",
    "deepseek-pipeline": "mesh.pipeline=2 mesh.tensor=2 model.num_layers=4",
    "gemma-context": f"mesh.context=2 remat.policy=selective {PACKED}",
}
# Those of tests/conftest.py: programs that are compiled in a fraction of the time.
FLAGS = (
    "--xla_force_host_platform_device_count={count} --xla_cpu_parallel_codegen_split_count=1"
    " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
TIMES = re.compile("time|second|tflop|mfu|memory|save|checkpoint_|utili[sz]ation")  # of numbers that no run repeats


def train_all(directory: Path, only: str) -> None:
    """Train the runs into `directory`, with checkpoints, and `NAME.jsonl` with their metrics."""
    for name in chosen(only):
        metrics = _train(name, directory, directory / name)
        (directory / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics), encoding="utf-8")
        print(f"{name}: {len(metrics)} lines", flush=True)


def repeat_all(directory: Path, only: str) -> int:
    """Train again with this code, from the start and from the golden checkpoint; the number of runs that differ."""
    wrong = 0
    for name in chosen(only):
        golden = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
        with tempfile.TemporaryDirectory() as scratch:
            first, resumed = Path(scratch, "first"), Path(scratch, "resumed")
            shutil.copytree(directory / name, resumed)
            whole, rest = (
                _train(name, directory, first),
                _train(name, directory, resumed, f"checkpoint.resume_step={SAVED}"),
            )
            found = {
                "from the start": (golden, whole),
                f"from the checkpoint of step {SAVED}": (_later(golden), _later(rest)),
            }
        for how, (old, new) in found.items():
            difference = _difference(old, new)
            wrong += difference is not None
            print(f"{name} {how}: {difference or f'{len(new)} lines are equal'}", flush=True)
    return wrong


def chosen(only: str) -> list[str]:
    """The runs whose name has the pattern."""
    return [name for name in RUNS if re.search(only, name)]


def _train(name: str, directory: Path, run_dir: Path, *more: str) -> list[dict[str, Any]]:
    """The metrics of a run in `run_dir`; paths of other runs are relative to `directory`."""
    yaml = BASE.replace("STEPS", str(STEPS)).replace("SAVED", str(SAVED))
    config = directory / f"{name}.yaml"
    if not config.exists():  # golden runs are repeated with their own
        config.write_text(f"model: {MODELS[name.partition('-')[0]]}\n{yaml}", encoding="utf-8")
    count = math.prod(int(size) for size in re.findall(r"mesh\.\w+=(\d+)", RUNS[name]))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": FLAGS.format(count=count),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "megajax.train", config.name, *shlex.split(RUNS[name]), f"run.dir={run_dir}"]
    done = subprocess.run([*command, *more], cwd=directory, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    numbers = [{key: value for key, value in line.items() if not TIMES.search(key)} for line in lines]
    reported = [line for line in numbers if len(line) > 1]  # a save's line has times only
    return [*reported, {"step": STEPS, "weights": _hash_of_weights(run_dir)}]


def _hash_of_weights(run_dir: Path) -> str:
    """The SHA-256 of the newest checkpoint's weights, with their names and shapes."""
    import megajax

    found = hashlib.sha256()
    for name, weight in sorted(megajax.load_weights(str(run_dir)).items()):
        found.update(f"{name} {weight.shape} {weight.dtype}".encode() + weight.tobytes())
    return found.hexdigest()


def _later(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in metrics if line["step"] > SAVED]


def _difference(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str | None:
    """The first difference of two lists of metrics."""
    for before, after in zip(old, new, strict=False):
        for key in [*before, *(after.keys() - before)]:
            if before.get(key) != after.get(key):
                return f"step {before['step']}: {key} is {after.get(key)}, was {before.get(key)}"
    return None if len(old) == len(new) and old else f"{len(new)} lines, were {len(old)}"
