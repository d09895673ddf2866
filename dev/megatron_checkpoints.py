"""Checkpoints to megatron-core and back: the same logits, and the same weights bit for bit.

    python dev/megatron_checkpoints.py --megatron PYTHON [--out FOLDER] [MODEL ...]

PYTHON is that of an environment with megatron-core and torch for CPUs, as in compare_megatron.py. For each model a run
with random weights is exported; Megatron reads it in one process and in several, and writes it in both of its formats
(megatron_parity/checkpoint_side.py); these are read here, and exported again. Prints a row for each model and reader
with the numbers of tensors that differ; the status is 1 if any does.
"""

import argparse
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from megajax.checkpoint.description import describe_model
from megajax.checkpoint.manager import save_weights
from megajax.config import Config, ModelConfig
from megajax.megatron.convert import load
from megajax.model import Transformer, bind, parameters
from megajax.model.block import layer_state
from megajax.runtime import use_cpu
from megajax.tools.export_megatron.__main__ import export_step

SMALL = {"num_layers": 4, "hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 96, "vocab_size": 250}
LLAMA = SMALL | {"num_kv_heads": 2, "norm_epsilon": 1e-5}
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden_size": 48}
ROUTER = {"score_function": "sigmoid", "scaling_factor": 2.5, "num_groups": 4, "groups_per_token": 2}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 16, "mscale": 1.0, "mscale_all_dim": 0.5}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MODELS = {
    "Llama": LLAMA | {"qk_norm": True, "attention_bias": "qkv"},
    "GPT": SMALL
    | {"norm": "layernorm", "activation": "gelu", "position": "learned", "max_positions": 32, "tie_embeddings": True}
    | {"attention_bias": True, "mlp_bias": True},
    "Mixtral": LLAMA | EXPERTS,
    "DeepSeek": SMALL
    | EXPERTS
    | LATENT
    | {"experts_per_token": 4, "first_dense_layers": 1, "shared_expert_ffn_hidden_size": 48, "mtp_layers": 1}
    | {"router": ROUTER | {"expert_bias": True}, "rope_scaling": YARN, "norm_epsilon": 1e-6},
}
STEP, LENGTH, TOLERANCE = 7, 32, 1e-5
READERS = [(1, 1, 1), (2, 2, 1), (1, 2, 2)]  # tensor-, pipeline- and expert-parallel sizes


def make_run(folder: Path, model: ModelConfig, weights, state) -> None:
    """A run directory with these weights."""
    values = {
        "run": {"name": "run", "dir": str(folder), "steps": 9},
        "model": model.model_dump(mode="json"),
        "batch": {"global_size": 8, "sequence_length": LENGTH},
        "data": {"kind": "synthetic"},
        "mesh": {"data": 1},
        "precision": {"compute": "float32"},
    }
    folder.mkdir(parents=True)
    save_weights(folder, weights, state, {"format": 1, "step": STEP, "model": describe_model(model)})
    (folder / "config.yaml").write_text(Config.model_validate(values).to_yaml(), encoding="utf-8")


def random_weights(model: ModelConfig):
    """(weights, layers' state) that leave no tensor at its usual first value."""
    draw = np.random.default_rng(0)
    weights = {}
    for name, p in parameters(Transformer(model)).items():
        numbers = draw.standard_normal(p.shape).astype(np.float32) / np.sqrt(max(64, p.shape[-1]))
        weights[name] = jnp.asarray(numbers + ("norm" in name and "bias" not in name))
    weights["embedding.tokens"] = weights["embedding.tokens"].at[model.vocab_size :].set(0)
    if "head" in weights:
        weights["head"] = weights["head"].at[:, model.vocab_size :].set(0)
    state = {
        kind: {name: jnp.asarray(draw.standard_normal(a.shape).astype(np.float32) / 50) for name, a in own.items()}
        for kind, own in layer_state(model).items()
    }
    return weights, state


def read(folder: Path, model: ModelConfig):
    """The weights and the state of a checkpoint of Megatron."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {n: jax.ShapeDtypeStruct(p.shape, jnp.float32, sharding=device) for n, p in _declared(model).items()}
    kept = {
        kind: {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=device) for name, a in own.items()}
        for kind, own in layer_state(model).items()
    }
    return load(folder, wanted, kept, model)


def _declared(model: ModelConfig):
    return parameters(Transformer(model))


def megatron(python: str, sizes: tuple[int, int, int], source: Path, tokens: Path, out: Path) -> None:
    """Megatron's processes."""
    out.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    world = math.prod(sizes)
    environment = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [python, "-m", "megatron_parity.checkpoint_side", *map(str, (*sizes, source, tokens, out))]
    processes = []
    for rank in range(world):
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (out / f"log.{rank}").open("wb") as log:
            processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT))
    try:
        statuses = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(statuses):
        failed = next(rank for rank, status in enumerate(statuses) if status)
        sys.exit((out / f"log.{failed}").read_text(encoding="utf-8")[-3000:])


def different(one, other) -> int:
    """The number of arrays that are not the same bit for bit."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(not np.array_equal(a, b) for a, b in pairs)


def check(name: str, python: str, out: Path) -> bool:
    """Print the rows of a model; whether all is equal."""
    model = ModelConfig.model_validate(MODELS[name] | {"vocab_multiple": 32})
    weights, state = random_weights(model)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, LENGTH))
    np.save(out / "tokens.npy", tokens)
    ours = np.asarray(bind(Transformer(model), weights)(jnp.asarray(tokens), state))[..., : model.vocab_size]
    make_run(out / "run", model, weights, state)
    export_step(out / "run", STEP, out / "exported", (2, 2, 1), "float32")
    good = True
    for sizes in READERS:
        tensor, pipeline, expert = sizes
        if expert > 1 and not model.num_experts:
            continue
        own = out / f"read_{tensor}_{pipeline}_{expert}"
        megatron(python, sizes, out / "exported", out / "tokens.npy", own)
        theirs = np.load(own / "logits.npy")[..., : model.vocab_size]
        distance = float(np.max(np.abs(theirs - ours)))
        counts = [different(read(own / kind, model), (weights, state)) for kind in ("torch_dist", "torch")]
        again, whole = own / "again", out / "read_1_1_1/arrays.npz"
        make_run(again / "run", model, *read(own / "torch_dist", model))
        export_step(again / "run", STEP, again / "exported", (1, 1, 1), "float32")
        megatron(python, (1, 1, 1), again / "exported", out / "tokens.npy", again / "read")
        there, back = dict(np.load(whole)), dict(np.load(again / "read/arrays.npz"))
        counts.append(different(there, back))
        good = good and distance <= TOLERANCE and not any(counts)
        reader = f"TP {tensor} × PP {pipeline} × EP {expert}"
        print(
            f"| {name} | {reader} | {np.max(np.abs(ours)):.1f} | {distance:.1e} | "
            + " | ".join(map(str, counts))
            + " |"
        )
    return good


def main() -> int:
    """Check the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--megatron", required=True, metavar="PYTHON", help="the Python that has torch and megatron-core"
    )
    parser.add_argument("--out", type=Path, help="a new folder for the checkpoints (default: a temporary one)")
    options = parser.parse_args()
    use_cpu()
    print("| model | read on | largest logit | difference | from `torch_dist` | from `torch` | and back again |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        good = True
        for name in options.models or MODELS:
            folder = (options.out or Path(temporary)) / name
            folder.mkdir(parents=True)
            good = check(name, options.megatron, folder) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
