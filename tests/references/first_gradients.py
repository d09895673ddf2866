"""First gradients of small models with FP8 and FP4 in blocks, on one device and on meshes."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import single_device as table

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.mesh import AXES, build_mesh
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 250,
    "init_std": 0.1,
}
EXPERTS = MODEL | {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 64}
Gradients = dict[str, np.ndarray]


def make(
    recipe: str, model: Mapping[str, Any] = MODEL, mesh: Mapping[str, Any] | None = None, microbatches: int = 1, **fp8
) -> Config:
    """512 tokens in sequences of 64: two devices on `context` have two chunks of 16 each, blocks of NVFP4."""
    precision = {"compute": "float32", "fp8": {"recipe": recipe, **fp8}}
    batch = {"global_size": 8, "sequence_length": 64}
    how = {"microbatches": microbatches, "steps": 1, "optimizer": "sgd", "precision": precision, "batch": batch}
    return table.make_config(model, mesh or {}, **how)


def build(config: Config) -> TrainProgram:
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def first_gradients(config: Config, count: int = 3) -> list[tuple[float, Gradients]]:
    """The loss and the gradients of the first step from each of `count` initial weights."""
    program, found = build(config), []
    fields = to_global(program, next(iter(table.make_batches(config))))
    for shift in range(count):
        weights = {name: np.roll(w, shift, axis=-1) for name, w in table.weights_of(config).items()}
        state, metrics = program.train_step(table.first_state(program, weights), fields)
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        assert np.isfinite([loss, norm]).all()
        found.append((loss, table.first_gradients(program, state, norm)))
    return found


def difference(found: Gradients, expected: Gradients) -> float:
    """‖Δ‖ / ‖g‖ of the worst layer of the worst parameter."""
    out = []
    for name, gradient in expected.items():
        rows = len(gradient) if name.startswith("blocks.") else 1
        own, gradient = found[name].reshape(rows, -1), gradient.reshape(rows, -1)
        out.append(np.max(np.linalg.norm(own - gradient, axis=1) / np.linalg.norm(gradient, axis=1)))
    return float(max(out))
