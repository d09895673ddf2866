"""Random combinations of settings on random meshes: `python dev/random_meshes.py [--seed 1] [--seconds 600]`.

Draws a config and a mesh of up to eight devices, until the time is up. A config that start-up refuses is counted; each
other one must train as on one device (`megajax verify`), every second one also through checkpoints of both. With
`--fp8` linear layers are in FP8. `--trace` only traces its step and an evaluation, one a
second, and finds those that crash. Prints the config of each that differs or crashes; exit status 1 if there is one.
"""

import contextlib
import io
import math
import os
import random
import sys

from lab import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("NPROC", "32")  # as megajax.runtime.threads_of
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # each program runs for a few steps
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS} --xla_force_host_platform_device_count=8"


import jax
from random_settings import PACKED, Choices, Settings, draw_hybrid, draw_mesh, draw_section, parser_of, search

from megajax.config import AXES, Config
from megajax.config.checks import check, check_mesh
from megajax.mesh import build_mesh
from megajax.tools.verify.report import report
from megajax.tools.verify.shrink import Precision
from megajax.training.step import TrainProgram

STEPS = 3
ATTENTION: Choices = (
    (0.2, "qk_norm", (True, "all_heads")),
    (0.25, "attention_bias", (True, "qkv")),
    (0.15, "attention_sinks", (True,)),
    (0.15, "attention_softcap", (30.0,)),
    (0.25, "sliding_window", (5, 8)),
    (0.15, "position", ("learned", "none")),
    (0.15, "rope_fraction", (0.5,)),
    (0.15, "rope_scaling", ({"kind": "linear", "factor": 4.0}, {"kind": "yarn", "factor": 4.0})),
    (0.15, "attention_gate", (True,)),
    (0.1, "attention_scale", (0.3,)),
    (0.1, "prefix_lm", (True,)),
)
MODEL: Choices = (
    (0.2, "norm", ("layernorm",)),
    (0.2, "norm_placement", ("after", "both")),
    (0.1, "norm_zero_centred", (True,)),
    (0.15, "norm_bias", (False,)),
    (0.1, "embedding_norm", (True,)),
    (0.1, "prediction_head", (True,)),
    (0.1, "head_bias", (True,)),
    (0.1, "scale_head", (True,)),
    (0.4, "activation", ("geglu", "clamped_swiglu", "gelu", "relu2")),
    (0.2, "mlp_bias", (True,)),
    (0.2, "logit_softcap", (20.0,)),
    (0.15, "mup_base_width", (32,)),
    (0.2, "qk_clip", (0.5, 2.0, 100.0)),
    (0.2, "tie_embeddings", (True,)),
    (0.15, "scale_embeddings", (True,)),
    (0.25, "dropout", (0.1,)),
    (0.15, "z_loss", (1e-3,)),
    (0.25, "mtp_layers", (1, 2)),
)
EXPERTS: Choices = (
    (1.0, "num_experts", (4, 8, 16)),
    (1.0, "experts_per_token", (1, 2, 3)),
    (1.0, "expert_ffn_hidden_size", (48,)),
    (0.3, "first_dense_layers", (1,)),
    (0.2, "moe_layer_interval", (2,)),
    (0.35, "shared_expert_ffn_hidden_size", (16,)),
    (0.15, "shared_expert_gate", (True,)),
)
ROUTER: Choices = (
    (0.5, "score_function", ("sigmoid",)),
    (0.2, "pre_softmax", (True,)),
    (0.2, "normalise", (False,)),
    (0.2, "scaling_factor", (2.5,)),
    (0.3, "num_groups", (2,)),
    (0.2, "group_score", ("sum", "max")),
    (0.2, "logit_bias", (True,)),
    (0.15, "jitter", (0.1,)),
    (0.3, "sequence_loss", (0.05,)),
    (0.3, "global_loss", (0.05,)),
    (0.3, "z_loss", (0.01,)),
    (0.3, "expert_bias", (True,)),
    (0.1, "sinkhorn", (True,)),
    (0.25, "capacity_factor", (1.0, 1.5)),
    (0.15, "drop_policy", ("position",)),
    (0.1, "force_balance", (True,)),
)
COMMUNICATION: Choices = (
    (1.0, "context", ("ring", "all_gather", "all_to_all", "all_to_all+ring")),
    (1.0, "experts", ("auto", "all_to_all", "all_gather")),
    (0.2, "overlap_experts", (True,)),
)
KERNELS: Choices = (
    (0.3, "scan_unroll", (1, 2)),
    (0.3, "loss_chunk_tokens", (8,)),
)
REMAT: Choices = (
    (1.0, "policy", ("none", "none", "full", "selective", "save_matmuls", "offload")),
    (0.2, "layers", (1,)),
    (0.1, "group", (2,)),
)
CHATS: Settings = {"kind": "chat", "train": "chats.jsonl", "tokenizer": "byte"}  # no file is read; batches have padding
GROUP = {"parameters": ["*_norm", "*attention*"], "weight_decay": 0, "learning_rate": 0.5, "clip_norm": 0.3}
OPTIMIZER: Choices = (
    (1.0, "kind", ("adamw", "adamw", "muon", "muon", "sgd", "lion", "ademamix", "soap")),
    (0.3, "offload", (0.5, 1.0)),
    (0.2, "ema_decay", (0.9,)),
    (0.2, "groups", ([GROUP],)),
    (0.15, "layer_decay", (0.8,)),
    (0.15, "clip_norm", (0.0, 0.1)),
)
MUON: Choices = (
    (0.3, "per_head", (True,)),
    (0.3, "coefficients", ("polar_express",)),
    (0.3, "nesterov", (False,)),
    (0.3, "scale", ("spectral",)),
)
HEADS: dict[str, Settings] = {
    "gated_deltanet": {"num_key_heads": 4, "num_value_heads": 8, "key_head_dim": 8, "value_head_dim": 8},
    "kda": {"num_heads": 4, "head_dim": 8},
    "mamba2": {"num_heads": 8, "num_groups": 4, "head_dim": 8, "state_dim": 8},
}
TOWER: Settings = {"image_token": 7, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 48}
TOWER |= {"patch_size": 2, "merge": 2, "patches_per_row": 64}
VISION: Choices = (
    (0.3, "window", (4,)),
    (0.3, "deepstack_layers", ([0, 1],)),
    (0.3, "norm", ("rmsnorm",)),
    (0.3, "grid", (8,)),
    (0.3, "bidirectional", (True,)),
)
ENCODER: Choices = (
    (0.5, "position", ("relative",)),
    (0.3, "num_kv_heads", (2, 4)),
    (0.3, "attention_bias", (True,)),
    (0.3, "qk_norm", (True,)),
)
SECONDS = (*[""] * 20, "encoder", "encoder", "vision", "vision", "two sides")
OBJECTIVE: Choices = (
    (0.2, "label_smoothing", (0.1,)),
    (0.2, "average", ("microbatches",)),
)
LORA: Choices = ((1.0, "rank", (4,)), (0.5, "dropout", (0.1,)), (0.3, "targets", (["query", "value"],)))


def draw_model(draw: random.Random) -> Settings:
    model: Settings = {"num_layers": draw.choice((2, 3, 4, 6, 8)), "hidden_size": 64, "vocab_size": 250}
    model |= {"num_heads": draw.choice((4, 8)), "ffn_hidden_size": 128}
    second = draw.choice(SECONDS)
    if second == "encoder":  # its layers have attention and an MLP
        model |= draw_section(draw, ENCODER) | draw_section(draw, MODEL)
        return model | {"encoder": {"kind": "layers", "num_layers": draw.choice((2, 3)), "sequence_length": 64}}
    if second == "vision":
        model["vision"] = TOWER | draw_section(draw, VISION)
    if second == "two sides":
        model["causal"] = False
    if draw.random() < 0.25:  # latent attention
        model |= {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        model["q_lora_rank"] = draw.choice((None, 20))
    else:
        model |= {"num_kv_heads": draw.choice((1, 2, 4))} | draw_section(draw, ATTENTION)
        if "sliding_window" in model:
            model["layer_pattern"] = draw.choice((None, ["local", "global"], ["local", "local", "global"]))
        if model.get("position") == "learned":
            model["max_positions"] = 64
    model |= draw_section(draw, MODEL)
    if draw.random() < 0.45:
        model |= draw_section(draw, EXPERTS) | {"router": draw_section(draw, ROUTER)}
    if draw.random() < 0.2:
        kind = draw.choice(list(HEADS))
        model |= draw_hybrid(draw, kind, HEADS[kind], "num_experts" in model)
    return model


def draw_settings(draw: random.Random) -> Settings:
    """All sections of a config; it may be illegal."""
    model = draw_model(draw)
    settings = {"model": model, "mesh": draw_mesh(draw, draw.choice((2, 4, 4, 8, 8, 8)), "num_experts" in model)}
    pipelined = settings["mesh"]["pipeline"] > 1
    count = draw.choice((2, 4, 8) if pipelined else (1, 2, 4, 8))
    settings["batch"] = {"global_size": 64, "sequence_length": 64, "num_microbatches": count}
    if pipelined:
        schedule = draw.choice(("1f1b", "gpipe", "zero_bubble"))
        settings["pipeline"] = {"schedule": schedule, "virtual_stages": draw.choice((1, 1, 2))}
    settings |= {"remat": draw_section(draw, REMAT), "communication": draw_section(draw, COMMUNICATION)}
    settings["kernels"] = draw_section(draw, KERNELS)
    settings["data"] = {"kind": "synthetic"} | (draw_section(draw, PACKED) if draw.random() < 0.35 else {})
    if draw.random() < 0.25:
        settings["data"] = CHATS | {"packing": draw.choice(("none", "first_fit", "balanced"))}
    settings["objective"] = draw_section(draw, OBJECTIVE)
    if "causal" in model:
        settings["objective"]["kind"] = "masked_tokens"
    settings["optimizer"] = draw_section(draw, OPTIMIZER)
    if settings["optimizer"]["kind"] == "muon":
        settings["optimizer"]["muon"] = draw_section(draw, MUON)
    if draw.random() < 0.15:
        settings |= {"lora": draw_section(draw, LORA), "checkpoint": {"init_from": "unread"}}
    return settings


def draw_case(draw: random.Random, fp8: bool) -> Settings:
    """The settings, and `saved`: whether both also go on from a checkpoint."""
    case = draw_settings(draw) | {"saved": draw.random() < 0.5, "precision": {"compute": "float32"}}
    return case | ({"precision": {"fp8": {"recipe": draw.choice(("current", "delayed"))}}} if fp8 else {})


def differences(case: Settings) -> str:
    """What `megajax verify` prints if they differ."""
    settings, shown = {key: value for key, value in case.items() if key != "saved"}, io.StringIO()
    config, sizes = Config.model_validate(settings), {axis: settings["mesh"][axis] for axis in AXES}
    check(config)
    check_mesh(config, math.prod(sizes.values()))
    precision: Precision = "fp8" if config.precision.fp8.chosen.is_on else "float32"
    with contextlib.redirect_stdout(shown):
        status = report(config, [sizes], STEPS, precision, case["saved"])
    return shown.getvalue() if status else ""


def trace(case: Settings) -> str:
    """Trace a step and an evaluation on the mesh; never a difference."""
    config = Config.model_validate({key: value for key, value in case.items() if key != "saved"})
    count = math.prod(case["mesh"][axis] for axis in AXES)
    check(config)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, batch = program.abstract_state, program.abstract_batch
    jax.eval_shape(program.train_step, state, batch)
    jax.eval_shape(program.eval_step, state.weights, state.layer_state, batch)
    return ""


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--fp8", action="store_true", help="linear layers in FP8")
    parser.add_argument("--trace", action="store_true", help="only trace the step")
    options = parser.parse_args()
    return search(options, lambda draw: draw_case(draw, options.fp8), trace if options.trace else differences)


if __name__ == "__main__":
    sys.exit(main())
