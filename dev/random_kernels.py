"""Random models on a GPU with its kernels beside a CPU: `python dev/random_kernels.py [--seed 1] [--seconds 600]`.

Draws a model of one to three layers, a precision and a batch until the time is up. A config that start-up refuses is
counted. Of each other one the first steps run on one GPU with the kernels of `auto` or drawn ones, on the CPU in the
same precision, where plain jax.numpy computes and FP8 is emulated, and there in FP32. The kernels may be further from
FP32 than the same precision is on the CPU by a factor and a little; in the loss, the gradient of each layer's weight,
and what Muon adds to it. With `--mesh '{"fsdp": 2}'` both are such a mesh, with XLA's flags for it. With `--compile 4`
steps are only compiled, for meshes of four H200s and without a GPU. Prints the config of each that differs or crashes;
exit status 1 if there is one.
"""

import json
import math
import os
import random
import sys
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from random_settings import (
    PACKED,
    RECURRENT,
    Choices,
    Settings,
    draw_hybrid,
    draw_mesh,
    draw_section,
    parser_of,
    search,
)

from megajax.config import AXES, Config
from megajax.config.checks import check, check_mesh
from megajax.mesh import build_mesh
from megajax.runtime import prepare_environment, threads_of
from megajax.tools.plan.compile import compile_for_gpus
from megajax.tools.verify.runs import Arrays, batches, canonical, first_gradients
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

STEPS = 2
# How far the GPU may be from FP32: FACTOR times as far as the CPU in the same precision, and this much more, ‖Δ‖ / ‖g‖.
FACTOR, GRADIENT, LOSS = 3.0, 0.01, 1e-3
REROUTED = 0.1  # in place of GRADIENT where an expert got another number of tokens: one of 500 is 4 % of a gradient
ATTENTION: Choices = (
    (0.25, "qk_norm", (True, "all_heads")),
    (0.25, "attention_bias", (True, "qkv")),
    (0.2, "attention_sinks", (True,)),
    (0.2, "attention_softcap", (30.0,)),
    (0.2, "attention_gate", (True,)),
    (0.35, "sliding_window", (33, 64, 128, 300)),
    (0.1, "position", ("none",)),
    (0.2, "rope_fraction", (0.5, 0.25)),
)
MODEL: Choices = (
    (0.2, "norm", ("layernorm",)),
    (0.2, "norm_placement", ("after", "both")),
    (0.15, "norm_zero_centred", (True,)),
    (0.5, "activation", ("geglu", "clamped_swiglu", "gelu", "relu2", "geglu_exact")),
    (0.2, "mlp_bias", (True,)),
    (0.15, "logit_softcap", (20.0,)),
    (0.2, "tie_embeddings", (True,)),
    (0.2, "dropout", (0.1,)),
    (0.15, "z_loss", (1e-3,)),
    (0.15, "mtp_layers", (1,)),
    (0.15, "qk_clip", (2.0,)),
)
EXPERTS: Choices = (
    (1.0, "num_experts", (4, 8, 16, 60)),
    (1.0, "experts_per_token", (1, 2, 4)),
    (1.0, "expert_ffn_hidden_size", (96, 128, 192, 256, 320, 512)),
    (0.35, "shared_expert_ffn_hidden_size", (128, 256)),
)
ROUTER: Choices = (
    (0.5, "score_function", ("sigmoid",)),
    (0.2, "pre_softmax", (True,)),
    (0.2, "logit_bias", (True,)),
    (0.3, "global_loss", (0.05,)),
    (0.3, "z_loss", (0.01,)),
    (0.2, "capacity_factor", (1.0, 1.5)),
)
KERNELS: Choices = (
    (0.15, "scan_unroll", (1,)),
    (0.2, "loss_chunk_tokens", (128, 500)),
    (0.25, "attention", ("cudnn", "pallas", "triton")),
    (0.25, "grouped_matmul", ("pallas", "triton", "xla")),
    (0.2, "linear_attention", ("jla", "reference")),
)
REMAT: Choices = ((1.0, "policy", ("none", "none", "full", "selective", "save_matmuls")),)
COMMUNICATION: Choices = (
    (1.0, "context", ("auto", "ring", "all_gather", "all_to_all", "all_to_all+ring")),
    (1.0, "experts", ("auto", "all_to_all", "all_gather")),
    (0.2, "overlap_experts", (True,)),
)
RECIPES = ("current", "delayed", "blockwise")
OPTIMIZER: Choices = ((1.0, "kind", ("adamw", "adamw", "muon")), (0.2, "clip_norm", (0.0,)))


def draw_model(draw: random.Random) -> Settings:
    """Sizes for which the kernels are, and some next to them."""
    model: Settings = {
        "num_layers": draw.choice((1, 2, 3)),
        "hidden_size": draw.choice((256, 320, 512)),
        "vocab_size": draw.choice((500, 1000, 4099)),
        "ffn_hidden_size": draw.choice((352, 512, 1024)),
        "num_heads": draw.choice((4, 8)),
        "init_std": draw.choice((0.02, 0.05)),
    }
    kind = draw.choice(("full", "full", "full", "full", "latent", *RECURRENT))
    if kind == "latent":
        model |= {"kv_lora_rank": draw.choice((128, 512)), "qk_nope_head_dim": draw.choice((64, 128))}
        model |= {"qk_rope_head_dim": draw.choice((32, 64)), "v_head_dim": draw.choice((64, 128))}
        model["q_lora_rank"] = draw.choice((None, 192))
    else:
        model |= {"num_kv_heads": draw.choice((1, 2, 4)), "head_dim": draw.choice((64, 64, 80, 96, 128, 128, 256))}
        model |= draw_section(draw, ATTENTION)
        if "sliding_window" in model:
            model["layer_pattern"] = draw.choice((None, ["local", "global"]))
    model |= draw_section(draw, MODEL)
    if draw.random() < 0.4:
        model |= draw_section(draw, EXPERTS) | {"router": draw_section(draw, ROUTER)}
    if kind in RECURRENT:
        heads = {"gated_deltanet": {"num_key_heads": 2, "num_value_heads": 4}, "kda": {"num_heads": 4}}
        heads |= {"mamba2": {"num_heads": 8, "head_dim": 64, "num_groups": draw.choice((1, 2)), "state_dim": 128}}
        model |= draw_hybrid(draw, kind, heads[kind], "num_experts" in model)
    return model


def draw_settings(draw: random.Random) -> Settings:
    """All sections of a config; it may be illegal."""
    length = draw.choice((256, 384, 500, 512))
    settings: Settings = {"model": draw_model(draw)}
    count = draw.choice((1, 1, 2))
    settings["batch"] = {"global_size": 2 * count, "sequence_length": length, "num_microbatches": count}
    settings |= {"remat": draw_section(draw, REMAT), "kernels": draw_section(draw, KERNELS)}
    settings["data"] = {"kind": "synthetic"} | (draw_section(draw, PACKED) if draw.random() < 0.5 else {})
    settings["optimizer"] = draw_section(draw, OPTIMIZER)
    settings["precision"] = {"fp8": {"recipe": draw.choice(RECIPES)}} if draw.random() < 0.4 else {}
    settings["schedule"] = {"kind": "constant", "learning_rate": 1e-3, "min_learning_rate": 0.0, "warmup_steps": 0}
    settings["run"] = {"steps": STEPS}
    if draw.random() < 0.08:
        settings |= {"lora": {"rank": 8}, "checkpoint": {"init_from": "unread"}}
    return settings


class FirstSteps(NamedTuple):
    losses: np.ndarray  # [STEPS]
    gradients: Arrays  # of the first step
    changes: Arrays  # what it adds to the matrices of Muon
    rows: tuple[int, ...]  # of each expert in the first step


def run(config: Config, platform: str) -> FirstSteps:
    """On the platform's first devices."""
    devices = jax.devices(platform)[: devices_of(config.mesh.model_dump())]
    with jax.default_device(devices[0]):
        program = TrainProgram.build(config, build_mesh(check_mesh(config, len(devices)), devices))
        state, losses, gradients, changes, rows = program.random_state(), [], {}, {}, ()
        before = canonical(program, state.params)
        of_muon = [name for each in program.update.slots.members if each.kind == "muon" for name in each.layouts]
        for step, fields in enumerate(batches(config, config.run.seed), 1):
            state, metrics = program.train_step(state, to_global(program, fields))
            losses.append(float(metrics["loss"]))
            if step == 1:
                gradients = first_gradients(program, state, float(metrics["grad_norm"]))
                after = canonical(program, state.params)
                changes = {name: after[name] - before[name] for name in of_muon}
                rows = tuple(np.asarray(metrics.get("expert_counts", ())).ravel().tolist())
    return FirstSteps(np.array(losses), gradients, changes, rows)


def relative(found: Arrays, expected: Arrays) -> dict[str, float]:
    """‖Δ‖ / ‖g‖ of each layer of each array, at least a thousandth of the largest norm taken for ‖g‖."""
    least = 1e-3 * max((float(np.linalg.norm(x)) for x in expected.values()), default=0.0)
    out = {}
    for name, true in expected.items():
        layers = len(true) if name.startswith("blocks.") else 1
        for i, (own, row) in enumerate(zip(found[name].reshape(layers, -1), true.reshape(layers, -1), strict=True)):
            size = max(float(np.linalg.norm(row)), least)
            out[f"{name}[{i}]"] = float(np.linalg.norm(own - row)) / size if size else 0.0
    return out


def differences(platform: str, settings: Settings) -> str:
    """What differs, in words."""
    config = Config.model_validate({"mesh": dict.fromkeys(AXES, 1)} | settings)
    check(config)
    check_mesh(config, devices_of(config.mesh.model_dump()))
    plain = config.kernels.model_copy(update=dict.fromkeys(("attention", "grouped_matmul", "linear_attention"), "auto"))
    without = config.precision.fp8.model_copy(update={"recipe": "none"})
    fp32 = config.precision.model_copy(update={"compute": "float32", "fp8": without})
    found = run(config, platform)
    cpu = run(config.model_copy(update={"kernels": plain}), "cpu")
    true = run(config.model_copy(update={"kernels": plain, "precision": fp32}), "cpu")
    off, limit = (np.abs(each.losses - true.losses) / true.losses for each in (found, cpu))
    limit = np.maximum.accumulate(limit)  # two runs that have parted may come near each other by chance
    words = [] if (off <= FACTOR * limit + LOSS).all() else [f"losses {found.losses}: {true.losses}, CPU {cpu.losses}"]
    more = GRADIENT if found.rows == cpu.rows == true.rows else REROUTED
    for what in ("gradients", "changes"):
        here, there = (relative(getattr(each, what), getattr(true, what)) for each in (found, cpu))
        much = [name for name in here if not here[name] <= FACTOR * there[name] + more]
        words += [f"{what} of {name} {here[name]:.4f}, on the CPU {there[name]:.4f}" for name in much]
    return "\n".join(words)


def devices_of(mesh: Settings) -> int:
    return math.prod(mesh.get(axis, 1) for axis in AXES)


def draw_for_mesh(draw: random.Random, gpus: int, mesh: Settings | None = None) -> Settings:
    """Settings with this mesh, or one drawn for so many GPUs, and as many sequences as its devices need."""
    settings = draw_settings(draw)
    settings["model"]["num_layers"] = draw.choice((2, 4))
    settings["mesh"] = mesh or draw_mesh(draw, gpus, "num_experts" in settings["model"])
    count = draw.choice((1, 2)) * settings["mesh"].get("pipeline", 1)
    settings["batch"] |= {"global_size": gpus * count, "num_microbatches": count, "sequence_length": 512}
    settings["communication"] = draw_section(draw, COMMUNICATION)
    return settings


def prepare(mesh: Settings) -> None:
    """XLA's flags for this mesh, and as many CPU devices."""
    model = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 2, "vocab_size": 64}
    batch = {"global_size": 2, "sequence_length": 64}
    prepare_environment(Config.model_validate({"model": model, "batch": batch, "mesh": mesh}))
    jax.config.update("jax_num_cpu_devices", devices_of(mesh))
    os.environ |= threads_of(devices_of(mesh))


def compile_step(gpus: int, settings: Settings) -> str:
    """Compile a step for H200s; never a difference."""
    config = Config.model_validate(settings)
    check(config)
    compile_for_gpus(config, gpus)
    return ""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--compile", type=int, metavar="GPUS", help="only compile, for meshes of GPUS H200s")
    parser.add_argument("--mesh", type=json.loads, metavar="JSON", help="a mesh of several GPUs")
    parser.add_argument("--platform", default="cuda", help="cpu: to try this script")
    options = parser.parse_args()
    if gpus := options.compile:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
        return search(options, partial(draw_for_mesh, gpus=gpus), partial(compile_step, gpus))
    draw = draw_settings
    if mesh := options.mesh:
        prepare(mesh)
        draw = partial(draw_for_mesh, gpus=devices_of(mesh), mesh=mesh)
    return search(options, draw, partial(differences, options.platform))


if __name__ == "__main__":
    sys.exit(main())
