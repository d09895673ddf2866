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
    # Sizes of different axes differ, or a transposed array would have the right shape.
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 12,
    "vocab_size": 250,
    "init_std": 0.1,
    "ffn_hidden_size": 40,
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


# Models that read another sequence or pictures, and those whose tokens see later ones
TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 24, "init_std": 0.2}
TINY |= {"vocab_size": 60, "vocab_multiple": 4}
TOWER = {"image_token": 59, "num_layers": 2, "hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 24, "patch_size": 2}
OF_IMAGES = {"rope_sections": [1, 1, 1], "head_dim": 6}
QWEN = TOWER | {"merge": 2, "temporal_patch_size": 2, "patches_per_row": 64}
QWEN25 = QWEN | {"window": 2, "global_layers": [1], "norm": "rmsnorm", "activation": "swiglu", "patch_bias": False}
QWEN3 = QWEN | {"grid": 3, "interpolate": True, "deepstack_layers": [0, 1]}
QWEN3_VL = TINY | OF_IMAGES | {"num_layers": 3, "qk_norm": True, "rope_interleaved": True, "vision": QWEN3}
QWEN25_VL = TINY | OF_IMAGES | {"attention_bias": "qkv", "vision": QWEN25}
GEMMA = TINY | {"num_layers": 4, "sliding_window": 5, "layer_pattern": ["local", "global"], "activation": "geglu"}
GEMMA |= {"vision": TOWER | {"grid": 4, "merge": 2, "projector": "average", "bidirectional": True}}
GEMMA["vision"]["patches_per_row"] = 64
CLIP = {"grid": 2, "class_token": True, "embedding_norm": True, "final_norm": False, "activation": "quick_gelu"}
LLAVA = TINY | {"vision": TOWER | CLIP | {"patch_bias": False, "patches_per_row": 16}}
T5 = TINY | {"num_kv_heads": 4, "activation": "geglu", "position": "relative", "attention_scale": 1.0}
T5 |= {"relative_buckets": 8, "relative_max_distance": 16}
T5 |= {"encoder": {"kind": "layers", "num_layers": 2, "sequence_length": 32}}
MODERN_BERT = TINY | {"norm": "layernorm", "activation": "geglu_exact", "causal": False, "tie_embeddings": True}
MODERN_BERT |= {"num_kv_heads": 4, "num_layers": 4, "sliding_window": 4, "rope_local_theta": 20.0}
MODERN_BERT |= {"layer_pattern": ["global", "local", "local"], "embedding_norm": True, "prediction_head": True}
MASKED = {"objective": {"kind": "masked_tokens", "masking": {"rate": 0.3}}}
UL2 = [{"token": "a"}, {"noise_density": 0.5, "token": "b"}, {"mean_span_length": None, "noise_density": 0.25}]


def only(*parameters: str) -> dict[str, Any]:
    """Settings with which these parameters are trained, and no others."""
    groups = [{"parameters": [*parameters]}, {"parameters": ["*"], "learning_rate": 0.0}]
    return {"optimizer": {"groups": groups}}


# Variants of the table: the model, documents in its sequences, what is recomputed, and other settings.
ENCODER_VARIANTS: dict[str, tuple[dict[str, Any], bool, str, dict[str, Any]]] = {
    "Qwen3-VL": (QWEN3_VL, False, "none", {}),
    "Qwen3-VL packed": (QWEN3_VL, True, "full", {}),
    "Qwen3-VL, LoRA": (QWEN3_VL, True, "none", LORA),
    "Qwen3-VL, projector": (QWEN3_VL, False, "none", only("vision.projector.*")),
    "Qwen2.5-VL": (QWEN25_VL, False, "selective", {}),
    "Qwen2.5-VL packed": (QWEN25_VL, True, "none", {}),
    "Qwen2.5-VL, tower": (QWEN25_VL, True, "none", only("vision.*")),
    "Gemma 3": (GEMMA, False, "none", {}),
    "Gemma 3 packed": (GEMMA, True, "save_matmuls", {}),
    "LLaVA": (LLAVA, True, "none", {}),
    "LLaVA, LoRA": (LLAVA, True, "none", LORA),
    "T5": (T5, False, "none", {}),
    "T5, UL2": (T5 | {"dropout": 0.1}, False, "full", {"data": {"denoisers": UL2}}),
    "ModernBERT": (MODERN_BERT, True, "none", MASKED),
    "prefix-LM": (TINY | {"prefix_lm": True}, False, "none", {}),
    "prefix-LM packed": (TINY | {"prefix_lm": True}, True, "none", {}),
}


def uneven_weights(weights: Mapping[str, np.ndarray], kind: str = "moe") -> dict[str, np.ndarray]:
    """Weights of UNEVEN with which every token chooses the first expert, and none the last three."""
    router, bias = f"blocks.{kind}.moe.router", f"blocks.{kind}.moe.norm_bias"
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


def encoder_rows() -> list[tuple[str, dict[str, int], dict[str, Any]]]:
    """(variant, mesh, settings of `pipeline`): axes, pairs and triples in turn, pipelines with each schedule."""

    def of(*groups: str, **pipeline: Any) -> list[tuple[dict[str, int], dict[str, Any]]]:
        return [(dict.fromkeys(group.split(), 2), pipeline if "pipeline" in group else {}) for group in groups]

    split, staged = "fsdp tensor", "pipeline data"
    meshes = {
        "Qwen3-VL": of(split, "context", staged, "pipeline tensor context", "fsdp context"),
        "Qwen3-VL packed": of("context tensor", "pipeline context", schedule="zero_bubble")
        + of("pipeline fsdp", virtual_stages=2),
        "Qwen3-VL, LoRA": of(split, staged),
        "Qwen3-VL, projector": of("context", staged),
        "Qwen2.5-VL": of("data", "tensor", "pipeline"),
        "Qwen2.5-VL packed": of("context", split, "pipeline tensor", schedule="gpipe"),
        "Qwen2.5-VL, tower": of("context tensor", staged),
        "Gemma 3": of("fsdp", "context", "pipeline context"),
        "Gemma 3 packed": of("context tensor", "fsdp context tensor", "pipeline data"),
        "LLaVA": of(split, "context", "pipeline tensor", "data context"),
        "LLaVA, LoRA": of("data tensor"),
        "T5": of(split, "context", "pipeline data", "context tensor", "pipeline context"),
        "T5, UL2": of("fsdp context", "pipeline tensor", schedule="zero_bubble"),
        "ModernBERT": of("context fsdp", "tensor", "pipeline tensor"),
        "prefix-LM": of("context", "pipeline tensor"),
        "prefix-LM packed": of("context tensor", "data fsdp", "pipeline context"),
    }
    return [(variant, *case) for variant, cases in meshes.items() for case in cases]


# Models for groups of devices: what is recomputed, and a mesh of one other axis with which each is divided.
DYNAMIC_VARIANTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "llama": (MODELS["llama"] | {"attention_sinks": True}, "none", "fsdp"),
    "llama, window": (MODELS["llama"] | {"sliding_window": 9}, "selective", "tensor"),
    "gpt2, dropout": (MODELS["gpt2"] | {"dropout": 0.2}, "save_matmuls", "data"),
    "deepseek": (DEEPSEEK, "full", "expert"),
    "latent, MTP 2": (LATENT_MODELS["v3"] | {"mtp_layers": 2}, "selective", "expert"),
    "gated DeltaNet": (HYBRID, "none", "expert"),
    "Mamba-2": (MAMBA, "full", "tensor"),
}


def dynamic_rows() -> list[tuple[str, int, dict[str, int], dict[str, Any]]]:
    """(variant, documents in a row, mesh, settings of `pipeline`): few documents span groups, many do not."""
    kinds = ("gpipe", "1f1b", "zero_bubble")
    rows: list[tuple[str, int, dict[str, int], dict[str, Any]]] = []
    for variant, (_, _, axis) in DYNAMIC_VARIANTS.items():
        plain = [{"context": 4}, {"context": 2, axis: 2}, {"context": 4, axis: 2}, {"context": 2, "tensor": 2, axis: 2}]
        plain = plain[: 3 if axis == "tensor" else 4]
        cases: list[tuple[dict[str, int], dict[str, Any]]] = [(mesh, {}) for mesh in plain]
        cases += [({"pipeline": 2, "context": 2}, {"schedule": kind}) for kind in kinds]
        if variant == "llama":
            cases += [({"context": 8}, {}), ({"context": 2, "data": 2}, {}), ({"context": 2, "data": 2, "fsdp": 2}, {})]
            for kind in kinds:
                cases += [({"pipeline": 2, "context": 4}, {"schedule": kind})]
                cases += [({"pipeline": 4, "context": 2}, {"schedule": kind})]
                cases += [({"pipeline": 2, "context": 2, "tensor": 2}, {"schedule": kind, "virtual_stages": 2})]
        elif axis == "expert":
            cases += [({"pipeline": 2, "context": 2, "expert": 2}, {"schedule": "1f1b"})]
        rows += [(variant, (5, 14)[i % 2], *case) for i, case in enumerate(cases)]
    return sorted(rows, key=lambda row: (list(DYNAMIC_VARIANTS).index(row[0]), row[1], "pipeline" in row[2]))


def mixed_meshes() -> list[tuple[dict[str, int], int]]:
    """Meshes for dense and MoE layers, and the pipeline's virtual stages; those with four microbatches last."""
    plain = [{"data": 2, "fsdp": 2, "tensor": 2}, {"expert": 2, "tensor": 4}, {"expert": 2, "context": 2, "tensor": 2}]
    staged = [({"pipeline": 2, "expert": 2}, 1), ({"pipeline": 2, "fsdp": 2}, 2), ({"pipeline": 2, "tensor": 2}, 2)]
    return [*((mesh, 1) for mesh in plain), *staged, ({"pipeline": 4}, 1), ({"pipeline": 4, "expert": 2}, 1)]


def one_operation_rows() -> list[tuple[str, dict[str, Any], dict[str, int], dict[str, Any]]]:
    """(name, model, mesh, sections): stages of two or more layers, which do one operation a tick."""
    packed = {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}
    pictures = {"batch": {"global_size": 8, "sequence_length": 32}}
    llama, eight = MODELS["llama"], MODELS["gpt2"] | {"num_layers": 8, "dropout": 0.2}
    latent, gathered = LATENT_MODELS["dense"] | {"num_layers": 4, "mtp_layers": 1}, {"context": "all_gather"}
    return [
        ("llama", llama, {"pipeline": 2}, {}),
        ("llama", llama, {"pipeline": 2, "fsdp": 2, "data": 2}, {"remat": {"policy": "selective"}}),
        ("llama", llama, {"pipeline": 2, "fsdp": 2, "tensor": 2}, {}),
        ("llama, 8 layers", llama | {"num_layers": 8}, {"pipeline": 2}, {"kernels": {"scan_unroll": 4}}),
        (
            "llama, documents",
            llama,
            {"pipeline": 2, "context": 2, "fsdp": 2},
            {"data": packed, "communication": gathered},
        ),
        (
            "llama, dynamic",
            llama,
            {"pipeline": 2, "context": 4},
            {"data": packed, "communication": {"context": "dynamic"}},
        ),
        ("gpt2, dropout", eight, {"pipeline": 4, "fsdp": 2}, {"remat": {"policy": "save_matmuls"}}),
        ("gpt2, dropout", eight, {"pipeline": 4, "data": 2}, {"kernels": {"scan_unroll": 2}}),
        ("deepseek", DEEPSEEK | {"num_layers": 4}, {"pipeline": 2, "expert": 2, "fsdp": 2}, {}),
        ("first dense", FIRST_DENSE | {"num_layers": 7}, {"pipeline": 2, "expert": 2}, {}),
        (
            "latent, MTP 1",
            latent,
            {"pipeline": 2, "fsdp": 2, "context": 2},
            {"data": packed, "communication": gathered},
        ),
        ("mixtral, 4 layers", EXPERT_MODELS["mixtral"] | {"num_layers": 4}, {"pipeline": 2, "data": 2}, {}),
        ("llama, LoRA", llama, {"pipeline": 2, "data": 2}, LORA),
        ("T5", T5 | {"num_layers": 4, "dropout": 0.1}, {"pipeline": 2, "data": 2}, pictures),
        ("Qwen3-VL", QWEN3_VL | {"num_layers": 4}, {"pipeline": 2, "data": 2}, pictures),
    ]
