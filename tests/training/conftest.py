"""A tiny model, a learnable text and its runs: in this process, or as `python -m megajax.train` in another."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.config import load_config
from megajax.data.indexed import IndexedWriter

TINY = """
run: {log_interval: 1, steps: 8}
model: {num_layers: 2, hidden_size: 32, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 64, vocab_size: 125,
        vocab_multiple: 64, init_std: 0.1}
batch: {global_size: 8, sequence_length: 16}
precision: {compute: float32}
schedule: {kind: constant, learning_rate: 3.0e-3}
logging: {tensorboard: false}
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The config file of the tiny model; its data come as an override."""
    path = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """The prefix of a text that repeats itself: 60 documents of counting words, one byte a token."""
    prefix = str(tmp_path_factory.mktemp("data") / "toy")
    random = np.random.default_rng(5)
    words = b"one two three four five six seven eight nine ten "
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(60):
            start = random.integers(len(words))
            writer.add_document(np.frombuffer((words * 3)[start : start + random.integers(30, 90)], np.uint8))
    return prefix


@pytest.fixture
def make_config(tiny, text):
    """(overrides...) → the resolved config of the tiny model on the toy text."""
    return lambda *overrides: load_config(tiny, [f"data.train={text}", *overrides])


class Run:
    """`python -m megajax.train` in a process of its own; its output is read line by line.

    The pipe holds one page: a process whose output is not read blocks a few steps later, so a signal sent after
    the line of step n arrives soon after step n, however fast or slow the machine is.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megajax.train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        fcntl.fcntl(self.process.stdout, fcntl.F_SETPIPE_SZ, 4096)
        self.output = ""

    def read_to(self, start: str) -> None:
        """Read until a line that begins with `start`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if " ".join(line.split()).startswith(start):
                return
        raise AssertionError(f"ended before {start}:\n{self.output}")

    def read_to_step(self, step: int) -> None:
        """Read until the console line of `step`."""
        self.read_to(f"step {step}/")

    def finish(self) -> int:
        """Read to the end; the exit status."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.read()
        return self.process.wait()


@pytest.fixture
def start(tiny, text):
    """(overrides..., devices=1, **environment) → a `Run`, ended with the test if it is still there."""
    runs = []

    def start(*overrides: str, devices: int = 1, **environment: str) -> Run:
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            # Unoptimised code compiles three times faster, and is as deterministic.
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0",
            **environment,
        }
        runs.append(Run([str(tiny), f"data.train={text}", *overrides], variables))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
        run.process.stdout.close()


@pytest.fixture
def read_metrics():
    """(run directory, names) → the logged values by step, after a check that no step occurs twice.

    Evaluation lines are read by the name "eval_loss".
    """

    def read(run_dir, *names: str) -> dict[int, tuple]:
        lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
        lines = [line for line in lines if names[0] in line]
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)), steps
        return {line["step"]: tuple(line[name] for name in names) for line in lines}

    return read


@pytest.fixture
def checkpoint_steps():
    """(run directory) → the steps whose checkpoints are complete."""
    return lambda run_dir: sorted(
        int(entry.name) for entry in Path(run_dir, "checkpoints").iterdir() if entry.name.isdigit()
    )
