"""The tiny models of Granite 4.0-H, Bamba and Falcon-H1, for make_transformers_references.py."""

from hybrid_references import LAYER_TYPES, mamba2, of_layers
from llama_references import NO_SPECIAL_TOKENS, Reference, Tensors, heads_in, heads_out
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
)

SUBLAYERS = {
    "dense": ("attention", "mlp"),
    "moe": ("attention", "moe"),
    "mamba2_mlp": ("mamba2", "mlp"),
    "mamba2_moe": ("mamba2", "moe"),
    "attention_mamba2": ("attention", "mamba2", "mlp"),
}


def convert_mamba_hybrid(tensors: Tensors, model: dict) -> Tensors:
    """Their tensors by canonical names, without multipliers."""
    granite = "model.layers.0.shared_mlp.input_linear.weight" in tensors
    second_norm, final_norm = ("post_attention", "norm") if granite else ("pre_ff", "final_layernorm")
    converters = {
        "attention": lambda get: hybrid_attention(get, model),
        "mamba2": lambda get: mamba2(get, model, "mamba"),
        "mlp": granite_mlp if granite else bamba_mlp,
        "moe": granite_experts,
    }
    out = {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        "final_norm": tensors[f"model.{final_norm}.weight"],
    }
    if not model.get("tie_embeddings"):
        out["head"] = tensors["lm_head.weight"].T
    pattern = model["block_pattern"] * (model["num_layers"] // len(model["block_pattern"]))
    for kind in dict.fromkeys(pattern):
        get = of_layers(tensors, [layer for layer, own in enumerate(pattern) if own == kind])
        own = {f"{name}.{n}": t for name in SUBLAYERS[kind] for n, t in converters[name](get).items()}
        own[f"{SUBLAYERS[kind][0]}.norm"] = get("input_layernorm.weight")
        own[f"{SUBLAYERS[kind][-1]}.norm"] = get(f"{second_norm}_layernorm.weight")
        out |= {f"blocks.{kind}.{name}": tensor for name, tensor in own.items()}
    return out


def hybrid_attention(get, model: dict) -> Tensors:
    heads = {"query": model["num_heads"], "key": model["num_kv_heads"], "value": model["num_kv_heads"]}
    own = {name: heads_out(get(f"self_attn.{name[0]}_proj.weight"), count) for name, count in heads.items()}
    return own | {"output": heads_in(get("self_attn.o_proj.weight"), model["num_heads"])}


def bamba_mlp(get) -> Tensors:
    return {name: get(f"feed_forward.{name}_proj.weight").transpose(1, 2) for name in ("gate", "up", "down")}


def granite_mlp(get) -> Tensors:
    gate, up = get("shared_mlp.input_linear.weight").transpose(1, 2).chunk(2, dim=-1)
    return {"gate": gate, "up": up, "down": get("shared_mlp.output_linear.weight").transpose(1, 2)}


def granite_experts(get) -> Tensors:
    gate, up = get("block_sparse_moe.experts.gate_up_proj").transpose(2, 3).chunk(2, dim=-1)  # [L, E, D, F]
    return {
        "router": get("block_sparse_moe.router.weight").transpose(1, 2),
        "gate": gate,
        "up": up,
        "down": get("block_sparse_moe.experts.down_proj").transpose(2, 3),
        **{f"shared_{name}": tensor for name, tensor in granite_mlp(get).items()},
    }


def hybrid_section(pattern: list[str], width: int, **changes: object) -> dict:
    """The section of a model of two layers, and Mamba-2's heads."""
    return {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_hidden_size": 20,
        "vocab_size": 43,
        "norm_epsilon": 1e-5,
        "block_pattern": pattern,
        "mamba2": {"num_heads": 4, "num_groups": 2, "head_dim": width, "state_dim": 6, "conv_kernel": 4},
    } | changes


def hybrid_options(model: dict) -> dict:
    """The keys of transformers' config for it."""
    sizes = model["mamba2"]
    return {
        "num_hidden_layers": 2,
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 20,
        "vocab_size": 43,
        "rms_norm_eps": 1e-5,
        "mamba_n_heads": sizes["num_heads"],
        "mamba_n_groups": sizes["num_groups"],
        "mamba_d_head": sizes["head_dim"],
        "mamba_d_state": sizes["state_dim"],
        "mamba_d_conv": sizes["conv_kernel"],
        "tie_word_embeddings": model.get("tie_embeddings", False),
        "rope_parameters": {"rope_type": "default", "rope_theta": model.get("rope_theta", 10000.0)},
        "attn_implementation": "eager",
        "max_position_embeddings": 512,
        **NO_SPECIAL_TOKENS,
    }


def granite(model: dict, outputs: tuple[str, ...], **options: object) -> Reference:
    """Multipliers of few bits: their products with the weights are exact."""
    model["multipliers"] = {"embedding_multiplier": 4.0, "logits_scaling": 8.0, "residual_multiplier": 0.375}
    config = GraniteMoeHybridConfig(**hybrid_options(model) | model["multipliers"] | options)
    ends = {"final_norm": 1 / 32} if model.get("tie_embeddings") else {"head": 1 / 8}
    factors = {"embedding.tokens": 4.0, **ends, **dict.fromkeys(outputs, 0.375)}
    return GraniteMoeHybridForCausalLM(config), model, convert_mamba_hybrid, factors


def tiny_granitemoehybrid() -> Reference:
    """Steps have a limit that half of them meet."""
    model = hybrid_section(["mamba2_moe", "moe"], 12, position="none", attention_scale=0.3, tie_embeddings=True)
    del model["ffn_hidden_size"]
    model["mamba2"]["min_step"] = 0.5
    model |= {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 20}
    model |= {"shared_expert_ffn_hidden_size": 16}
    options = {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
    options |= {"attention_multiplier": 0.3, "experts_implementation": "eager", "time_step_limit": (0.5, float("inf"))}
    return granite(model, GRANITE_OUTPUTS, layer_types=LAYER_TYPES["layer_types"], **options)


GRANITE_OUTPUTS = ("attention.output", "mamba2.output", "mlp.down", "moe.down", "moe.shared_down")


def tiny_granite_dense() -> Reference:
    """Without experts, with rotary positions and a head of its own."""
    model = hybrid_section(["mamba2_mlp", "dense"], 12, rope_theta=500.0)
    options = {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 20,
        "position_embedding_type": "rope",
    }
    return granite(model, GRANITE_OUTPUTS, **LAYER_TYPES, attention_multiplier=6**-0.5, **options)


def tiny_bamba() -> Reference:
    model = hybrid_section(["mamba2_mlp", "dense"], 12, head_dim=8, rope_theta=500.0, rope_fraction=0.5)
    options = hybrid_options(model) | {"head_dim": 8, "attn_layer_indices": [1]}
    return BambaForCausalLM(BambaConfig(**options)), model, convert_mamba_hybrid


def tiny_falcon_h1() -> Reference:
    """All multipliers, of few bits: their products with the weights are exact."""
    model = hybrid_section(["attention_mamba2"], 5, head_dim=8, rope_theta=500.0)
    model["mamba2"]["output_norm"] = "none"
    model["multipliers"] = {
        "embedding_multiplier": 4.0,
        "lm_head_multiplier": 0.125,
        "attention_in_multiplier": 0.75,
        "key_multiplier": 0.5,
        "attention_out_multiplier": 1.5,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.375,
        "ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 2.0],
        "mlp_multipliers": [0.75, 0.625],
    }
    options = hybrid_options(model) | {"head_dim": 8, "mamba_d_ssm": 20}
    projections = dict(zip(("gate", "value", "key", "query", "step"), (0.5, 1.5, 0.75, 1.25, 2.0), strict=True))
    factors = {
        "embedding.tokens": 4.0,
        "head": 0.125,
        **{f"mamba2.{name}": 1.25 * number for name, number in projections.items()},
        "mamba2.output": 0.375,
        **dict.fromkeys(("attention.query", "attention.value"), 0.75),
        "attention.key": 0.375,
        "attention.output": 1.5,
        "mlp.gate": 0.75,
        "mlp.down": 0.625,
    }
    config = FalconH1Config(**options | model["multipliers"])
    return FalconH1ForCausalLM(config), model, convert_mamba_hybrid, factors
