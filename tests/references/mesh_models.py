"""The small models of the mesh tables and of the tests of parallelism, and the tables' meshes."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

COMMON = {"num_layers": 4, "hidden_size": 64, "num_heads": 8, "ffn_hidden_size": 128, "vocab_size": 250}
COMMON |= {"init_std": 0.1}  # at 0.02 so small a model's attention is almost uniform
GPT2 = {
    "norm": "layernorm",
    "activation": "gelu",
    "position": "learned",
    "attention_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
}
MODELS: dict[str, dict[str, Any]] = {
    # Four KV heads: replicated where tensor is 8.
    "llama": {**COMMON, "num_kv_heads": 4},
    "gpt2": {**COMMON, **GPT2},
}
# Deep and narrow, since compiling takes most of the time. At an init_std of 0.1, 16 layers are so steep that the plain
# model's gradient norms differ by 1e-4 after ten steps if it only sums eight microbatches instead of one.
DEEP = {"num_layers": 16, "hidden_size": 32, "ffn_hidden_size": 64, "init_std": 0.05}
DEEP_MODELS = {"llama": {**MODELS["llama"], **DEEP, "num_kv_heads": 2}, "gpt2": {**MODELS["gpt2"], **DEEP}}
# The optimizers take turns, or the table would be twice as long.
DEEP_OPTIMIZERS = {"llama": "adamw", "gpt2": "sgd"}

# Two layers of eight narrow experts; the loads of each microbatch are balanced over all devices, and each sequence's.
MIXTRAL = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "vocab_size": 250,
    "init_std": 0.1,
    "ffn_hidden_size": 48,
    "num_experts": 8,
    "experts_per_token": 2,
    "router": {"global_loss": 0.1, "sequence_loss": 0.05, "z_loss": 0.01},
}
# DeepSeek-V3's router: groups, sigmoid scores, a bias for balance, a shared expert; noise on the router's input.
DEEPSEEK = MIXTRAL | {
    "experts_per_token": 3,
    "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
    "dropout": 0.1,
    "router": {
        "score_function": "sigmoid",
        "scaling_factor": 2.5,
        "num_groups": 4,
        "groups_per_token": 2,
        "jitter": 0.1,
        "expert_bias": True,
        "bias_update_rate": 0.05,
        "sequence_loss": 0.1,
    },
}
# A bias before the router, for `uneven_weights`.
UNEVEN = MIXTRAL | {"norm": "layernorm"}
EXPERT_MODELS = {"mixtral": MIXTRAL, "deepseek": DEEPSEEK, "uneven": UNEVEN}
# Dense layers among MoE layers: the first of six, with DeepSeek-V3's router, or every second of four. Stages of these
# leave slots of both kinds empty.
FIRST_DENSE = DEEPSEEK | {"num_layers": 6, "first_dense_layers": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 48}
EVERY_SECOND = MIXTRAL | {"num_layers": 4, "moe_layer_interval": 2, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 48}
MIXED_MODELS = {"first dense": FIRST_DENSE, "every second": EVERY_SECOND}

# Batches with padding: conversations, packed or each in a sequence; no file is read.
PADDED = {"kind": "chat", "train": "chats.jsonl", "tokenizer": "byte"}
UNPACKED = PADDED | {"packing": "none"}

# Latent attention (DeepSeek-V2 and V3): every width differs from the others, values are narrower than keys.
LATENT = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_positions": 8, "mscale": 0.7, "mscale_all_dim": 1.0},
    "ffn_hidden_size": 48,
    "vocab_size": 250,
    "init_std": 0.1,
}
ROUTED = {name: DEEPSEEK[name] for name in ("num_experts", "experts_per_token", "router")}
ROUTED |= {"expert_ffn_hidden_size": 24, "shared_expert_ffn_hidden_size": 16, "first_dense_layers": 1}
LATENT_MODELS = {
    "v2": LATENT | {"q_lora_rank": None},  # without a latent of the queries
    "v3": LATENT | ROUTED | {"num_layers": 3},
    "dense": LATENT,
}

# Variants of the table: the model, its MTP modules, documents in its sequences, and what is recomputed.
LATENT_VARIANTS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "v3, MTP 1": (LATENT_MODELS["v3"] | {"mtp_layers": 1}, False, "none"),
    "v3, MTP 2": (LATENT_MODELS["v3"] | {"mtp_layers": 2}, True, "selective"),
    "v2": (LATENT_MODELS["v2"], True, "full"),
    "dense, MTP 1": (LATENT_MODELS["dense"] | {"mtp_layers": 1}, False, "save_matmuls"),
}

# Gated DeltaNet in three of four layers, with an MLP in one of these, and gated attention, as Qwen3-Next's options are.
HYBRID = MIXTRAL | {
    "num_layers": 4,
    "num_kv_heads": 2,
    "expert_ffn_hidden_size": 24,
    "block_pattern": ["gated_deltanet_moe", "gated_deltanet", "gated_deltanet_moe", "moe"],
    "linear_attention": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 8, "value_head_dim": 6},
    "attention_gate": True,
    "qk_norm": True,
    "rope_fraction": 0.5,
    "norm_zero_centred": True,
}
# Kimi Linear's layers: an MLP in the first, and latent attention without positions in the last.
KIMI = LATENT_MODELS["v3"] | {
    "num_layers": 4,
    "first_dense_layers": 0,
    "position": "none",
    "rope_scaling": None,
    "q_lora_rank": None,
    "block_pattern": ["kda", "kda_moe", "kda_moe", "moe"],
    "kda": {"num_heads": 4, "head_dim": 8},
}
# Nemotron-H's layers of one sublayer, and attention beside Mamba-2 on one input.
MAMBA = MIXTRAL | {
    "num_layers": 4,
    "num_kv_heads": 2,
    "expert_ffn_hidden_size": 24,
    "activation": "relu2",
    "position": "none",
    "block_pattern": ["attention_mamba2", "experts", "mamba2", "mlp"],
    "mamba2": {"num_heads": 4, "num_groups": 2, "head_dim": 6, "state_dim": 8, "min_step": 0.001},
}
LORA = {"lora": {"rank": 3, "alpha": 12.0}, "checkpoint": {"init_from": "a run"}}
# Variants of the table by mixer: the model, documents in its sequences, what is recomputed, and other settings.
# The first ones take turns on its meshes.
HYBRID_VARIANTS: dict[str, dict[str, tuple[dict[str, Any], bool, str, dict[str, Any]]]] = {
    "gated DeltaNet": {
        "": (HYBRID, False, "none", {}),
        ", selective": (HYBRID, True, "selective", {}),
        ", MTP 1": (HYBRID | {"mtp_layers": 1}, True, "full", {}),
        ", LoRA": (HYBRID, True, "none", LORA),
        ", Muon": (HYBRID, True, "none", {"optimizer": "muon"}),
    },
    "KDA": {
        "": (KIMI, False, "none", {}),
        ", full": (KIMI, True, "full", {}),
        # Adapters freeze the routers, whose bias then must not change.
        ", LoRA": (KIMI | {"router": KIMI["router"] | {"bias_update_rate": 0.0}}, True, "none", LORA),
        ", Muon": (KIMI, True, "none", {"optimizer": "muon"}),
    },
    "Mamba-2": {
        "": (MAMBA, False, "save_matmuls", {}),
        ", full": (MAMBA, True, "full", {}),
        ", LoRA": (MAMBA, True, "none", LORA),
        ", Muon": (MAMBA, True, "none", {"optimizer": "muon"}),
    },
}


def uneven_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of UNEVEN with which every token chooses the first expert, and none the last three."""
    router, bias = "blocks.moe.moe.router", "blocks.moe.moe.norm_bias"
    slopes = np.array([0.3, 0, 0, 0, 0, -0.3, -0.3, -0.3], np.float32)
    return {**weights, router: weights[router] + slopes, bias: weights[bias] + 1}


def all_meshes() -> list[dict[str, int]]:
    """Every mesh of data, fsdp and tensor with 1, 2, 4 or 8 devices."""
    sizes = (1, 2, 4, 8)
    shapes = sorted((s for s in itertools.product(sizes, repeat=3) if math.prod(s) in sizes), key=math.prod)
    return [{"data": data, "fsdp": fsdp, "tensor": tensor} for data, fsdp, tensor in shapes]


def pipeline_meshes() -> list[dict[str, int]]:
    """Eight devices: 2, 4 or 8 stages, and the rest on one other axis."""
    meshes = [{"pipeline": stages, axis: 8 // stages} for stages in (2, 4) for axis in ("data", "fsdp", "tensor")]
    return [*meshes, {"pipeline": 8}]


def context_meshes() -> list[dict[str, int]]:
    """Eight devices: 2, 4 or 8 on `context`, and the rest on other axes."""
    others = ("data", "fsdp", "tensor", "pipeline")
    meshes = [{"context": size, axis: 8 // size} for size in (2, 4) for axis in others]
    return [*meshes, {"context": 2, "fsdp": 2, "tensor": 2}, {"context": 8}]


def expert_meshes() -> list[dict[str, Any]]:
    """2, 4 or 8 devices on `expert` alone, 2 or 4 and the rest of eight on each other axis, and all others alone.

    And experts over several axes, or over others.
    """
    others = ("data", "fsdp", "context", "tensor", "pipeline")
    meshes = [{"expert": size} for size in (2, 4, 8)]
    meshes += [{"expert": 2, axis: 4} for axis in others[:-1]] + [{"expert": 4, axis: 2} for axis in others]
    meshes += [{"expert": 2, "pipeline": 2, "fsdp": 2}, *({axis: 2} for axis in others)]
    folded = [{"expert": 2, "context": 2, "tensor": 2}, {"context": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}]
    folded += [{"pipeline": 2, "expert": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "context": 2}]
    return [*meshes, *({**mesh, "experts_over": [axis for axis in mesh if axis != "pipeline"]} for mesh in folded)]


def latent_meshes() -> list[dict[str, int]]:
    """Two devices on every axis, on every pair of axes, and on some three; and four on some."""
    axes = ("data", "fsdp", "tensor", "context", "expert", "pipeline")
    triples = (("fsdp", "tensor", "context"), ("tensor", "context", "pipeline"), ("fsdp", "expert", "pipeline"))
    triples += (("data", "fsdp", "tensor"), ("expert", "tensor", "context"), ("expert", "context", "pipeline"))
    groups = [*((axis,) for axis in axes), *itertools.combinations(axes, 2), *triples]
    meshes = [dict.fromkeys(group, 2) for group in groups]
    return [*meshes, {"context": 4, "tensor": 2}, {"tensor": 4}, {"context": 8}]


def hybrid_rows() -> list[tuple[str, str, dict[str, int], dict[str, Any]]]:
    """(mixer, variant, mesh, settings of `pipeline`); each of the two groups of heads is on one device at least."""
    meshes = [(mesh, {}) for mesh in latent_meshes() if mesh.get("tensor", 1) <= 2]
    others, rows = itertools.cycle(("context", "tensor", "fsdp", "expert")), []
    for schedule, stages in itertools.product(("gpipe", "1f1b", "zero_bubble"), (1, 2)):
        meshes.append(({"pipeline": 2, next(others): 2}, {"schedule": schedule, "virtual_stages": stages}))
    meshes += [({"pipeline": 4}, {}), ({"pipeline": 4, "context": 2}, {"schedule": "zero_bubble"})]
    few = [{"tensor": 2, "context": 2}, {"fsdp": 2, "expert": 2}, {"pipeline": 2, "data": 2}]
    for mixer, variants in HYBRID_VARIANTS.items():
        special = [variant for variant in variants if variant in (", LoRA", ", Muon")]
        plain = [variant for variant in variants if variant not in special]
        rows += [(mixer, plain[i % len(plain)], *case) for i, case in enumerate(meshes)]
        rows += [(mixer, variant, mesh, {}) for variant in special for mesh in few]
    return sorted(rows, key=lambda row: row[:2])  # a reference serves neighbours


def mixed_meshes() -> list[tuple[dict[str, int], int]]:
    """Meshes for dense and MoE layers, and the pipeline's virtual stages; those with four microbatches last."""
    plain = [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "tensor": 4}, {"expert": 2, "context": 2, "tensor": 2}]
    staged = [({"pipeline": 2, "expert": 2}, 1), ({"pipeline": 2, "fsdp": 2}, 2), ({"pipeline": 2, "tensor": 2}, 2)]
    return [*((mesh, 1) for mesh in plain), *staged, ({"pipeline": 4}, 1), ({"pipeline": 4, "expert": 2}, 1)]
