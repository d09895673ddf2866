"""Trains cases with megajax, in FP32 on CPU devices: `python -m megatron_parity.megajax_side OUT CASE...`.

OUT/CASE gets start.npz and megajax.npz, the first and the last weights by Megatron's names, and megajax.json.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from megatron_parity.batches import batch
from megatron_parity.case import Case
from megatron_parity.cases import CASES
from single_device import first_state, weights_of

from megajax.config import Config, ModelConfig
from megajax.config.checks import check, check_mesh
from megajax.hf.tensors import Tensor, assembled, tensor_names
from megajax.megatron.gpt import entries
from megajax.mesh import build_mesh
from megajax.model import parameters
from megajax.model.block import state_by_name
from megajax.model.parameters import init_parameters
from megajax.optim.groups import decays
from megajax.tools.verify.runs import canonical
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram, TrainState

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
Arrays = dict[str, np.ndarray]


def config_of(case: Case) -> Config:
    """megajax's config."""
    rate = case.rate
    schedule: dict[str, Any] = {"kind": rate.kind, "learning_rate": rate.highest, "min_learning_rate": rate.lowest}
    schedule |= {"warmup_steps": rate.warmup}
    if rate.kind not in ("constant", "inverse_sqrt"):
        schedule["decay_steps"] = rate.decay
    if rate.kind == "wsd":
        schedule |= {"wsd_decay_steps": rate.tail, "wsd_decay_style": rate.style}
    settings: dict[str, Any] = {
        "run": {"steps": case.steps},
        "model": {**case.model, "vocab_size": case.vocab},
        "precision": {"compute": "float32"},
        "batch": {
            "global_size": case.batch,
            "num_microbatches": case.microbatches,
            "sequence_length": case.length,
        },
        "schedule": schedule,
        "data": {"kind": "synthetic"},
        "mesh": {"data": case.devices},
    }
    for name, section in case.sections.items():
        settings[name] = settings.get(name, {}) | section
    config = Config.model_validate(settings | {"optimizer": case.optimizer})
    check(config)
    return config


def first_weights(config: Config) -> Arrays:
    """Numbers for every weight, with norms and biases that show a swap, and routers that decide."""
    return {name: w * (10 if name.endswith("router") else 1) for name, w in weights_of(config).items()}


def by_megatrons_names(model: ModelConfig, arrays: Arrays) -> Arrays:
    """Parameters and layers' state → Megatron's."""
    parts: dict[str, list[tuple[Tensor, np.ndarray]]] = {}
    for entry in entries(model):
        for index, name in tensor_names(entry, model).items() if entry.ours in arrays else ():
            parts.setdefault(_name_in_module(name, model.num_layers), []).append((entry, arrays[entry.ours][index]))
    whole = {name: assembled(own) for name, own in parts.items()}
    return whole | {name: whole[name][: model.vocab_size] for name in VOCABULARY if name in whole}


def _name_in_module(name: str, layers: int) -> str:
    """Prediction modules count from the number of layers on in a checkpoint's names, from 0 in a module's."""
    if not name.startswith("mtp.layers."):
        return name
    number, _, rest = name.removeprefix("mtp.layers.").partition(".")
    return f"mtp.layers.{int(number) - layers}.{rest}"


def train(case: Case) -> tuple[TrainProgram, Arrays, Arrays, list[dict[str, Any]]]:
    """(the program, the first weights and the last ones by Megatron's names, the metrics of each step)."""
    config, devices = config_of(case), jax.devices()[: case.devices]
    program = TrainProgram.build(config, build_mesh(check_mesh(config, len(devices)), devices))
    weights = first_weights(config)
    state, curve = first_state(program, weights), []
    first = by_megatrons_names(config.model, weights | _of_layers(state))
    for step in range(case.steps):
        fields = batch(case, step)
        documents = fields.pop("documents")
        if config.data.reset_attention:
            fields["segment_ids"] = documents
        state, metrics = program.train_step(state, to_global(program, fields))
        curve.append({name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()})
    last = by_megatrons_names(config.model, canonical(program, state.weights) | _of_layers(state))
    return program, first, last, curve


def _of_layers(state: TrainState) -> Arrays:
    return {name: np.asarray(a) for name, a in state_by_name(state.layer_state).items()}


def decay_factors(program: TrainProgram) -> dict[str, float]:
    """The factor of each parameter's weight decay, by Megatron's names."""
    whole, declared = program.config.optimizer.weight_decay, parameters(program.model)
    found = {name: np.full(declared[name].shape, own / whole) for name, own in decays(program.plan, declared).items()}
    return {name: float(own.mean()) for name, own in by_megatrons_names(program.config.model, found).items()}


def initial_statistics(program: TrainProgram) -> dict[str, list[float]]:
    """Mean and deviation of megajax's own initial weights, by Megatron's names."""
    model = program.config.model
    own = {name: np.array(a) for name, a in init_parameters(program.model, 1234, model.init_std).items()}
    return {name: [float(a.mean()), float(a.std())] for name, a in by_megatrons_names(model, own).items()}


def main(case: Case, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    program, first, last, curve = train(case)
    np.savez(out / "start.npz", allow_pickle=False, **first)
    np.savez(out / "megajax.npz", allow_pickle=False, **last)
    has_decay = bool(program.config.optimizer.weight_decay)
    facts = {"decay": decay_factors(program) if has_decay else {}, "initial": initial_statistics(program)}
    (out / "megajax.json").write_text(json.dumps({"curve": curve, **facts}), encoding="utf-8")


if __name__ == "__main__":
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        start = time.time()
        main(CASES[name], folder / name)
        print(f"{name}: megajax, {time.time() - start:.0f} s", flush=True)
