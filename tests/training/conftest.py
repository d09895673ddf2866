"""A tiny model, a learnable text and its runs: in this process, or as `python -m megajax.train` in another.

The model has one layer, an MLP: the step of two, a loop, takes twice as long to trace and compile, and so does that of
a layer with attention, which is for tests of what such layers have.
"""

import json
import os
from pathlib import Path

import pytest
from lab import FLAGS, TINY, Run, write_text

from megajax.config import load_config


@pytest.fixture(scope="session")
def tiny_with_attention(tmp_path_factory) -> Path:
    """The config file of a tiny model; its data come as an override."""
    path = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    path.write_text(TINY.replace("num_layers: 2", "num_layers: 1"))
    return path


@pytest.fixture(scope="session")
def tiny(tiny_with_attention, tmp_path_factory) -> Path:
    """The same with an MLP as its layer."""
    path = tmp_path_factory.mktemp("configs") / "tiny.yaml"
    path.write_text(tiny_with_attention.read_text().replace("num_layers: 1", "num_layers: 1, block_pattern: [mlp]"))
    return path


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> str:
    """The prefix of a text that repeats itself: 60 documents of counting words, one byte a token."""
    prefix = str(tmp_path_factory.mktemp("data") / "toy")
    write_text(prefix)
    return prefix


@pytest.fixture
def make_config(tiny, text):
    """(overrides...) → the resolved config of the tiny model on the toy text."""
    return lambda *overrides: load_config(tiny, [f"data.train={text}", *overrides])


@pytest.fixture
def start(tiny, text):
    """(overrides..., devices=1, **environment) → a `Run`, ended with the test if it is still there."""
    runs = []

    def start(*overrides: str, devices: int = 1, **environment: str) -> Run:
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {FLAGS}",
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
