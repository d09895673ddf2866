"""The tiny models of DeepSeek-V2 and V3, for make_transformers_references.py."""

import torch
from llama_references import Reference, Tensors, heads_in, heads_out, llama_options, llama_section, stack
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

WIDTHS = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10}
YARN = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False}
EXPERTS = {"num_experts": 12, "experts_per_token": 4, "expert_ffn_hidden_size": 8}


def half_split(rotated: torch.Tensor) -> torch.Tensor:
    """Elements (2i, 2i + 1) of the last dimension, which are rotated together, become (i, i + R/2)."""
    return torch.cat([rotated[..., 0::2], rotated[..., 1::2]], dim=-1)


def convert_deepseek(tensors: Tensors, model: dict) -> Tensors:
    """DeepSeek's tensors (Linear: [out, in]; experts [E, out, in], gate and up side by side) by canonical name."""
    out = {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "head": tensors["lm_head.weight"].T,
    }
    first, count = model["first_dense_layers"], model["num_layers"]
    for kind, layers in (("dense", range(first)), ("moe", range(first, count))):
        own = convert_attention(tensors, model, layers) | convert_mlp(tensors, model, layers, kind == "moe")
        out |= {f"blocks.{kind}.{name}": tensor for name, tensor in own.items()}
    return out


def convert_attention(tensors: Tensors, model: dict, layers: range) -> Tensors:
    """The attention of some layers."""
    heads, nope = model["num_heads"], model["qk_nope_head_dim"]

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "model.layers.{}." + name + ".weight", layers)

    has_latent = model.get("q_lora_rank") is not None
    query = heads_out(get("self_attn.q_b_proj" if has_latent else "self_attn.q_proj"), heads)
    down = get("self_attn.kv_a_proj_with_mqa").transpose(1, 2)
    latent, rotary = down.split([model["kv_lora_rank"], model["qk_rope_head_dim"]], dim=-1)
    up = heads_out(get("self_attn.kv_b_proj"), heads)
    out = {
        "attention.norm": get("input_layernorm"),
        "attention.query": torch.cat([half_split(query[..., nope:]), query[..., :nope]], dim=-1),
        "attention.key_value_down": latent,
        "attention.key_value_norm": get("self_attn.kv_a_layernorm"),
        "attention.rotary_key": half_split(rotary),
        "attention.key": up[..., :nope],
        "attention.value": up[..., nope:],
        "attention.output": heads_in(get("self_attn.o_proj"), heads),
    }
    if has_latent:
        out["attention.query_down"] = get("self_attn.q_a_proj").transpose(1, 2)
        out["attention.query_norm"] = get("self_attn.q_a_layernorm")
    return out


def convert_mlp(tensors: Tensors, model: dict, layers: range, experts: bool) -> Tensors:
    """The MLPs of some layers, or their experts."""

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "model.layers.{}." + name, layers)

    def matrices(ours: str, theirs: str) -> Tensors:
        return {f"{ours}{n}": get(f"mlp.{theirs}{n}_proj.weight").transpose(1, 2) for n in ("gate", "up", "down")}

    norm = get("post_attention_layernorm.weight")
    if not experts:
        return {"mlp.norm": norm} | matrices("mlp.", "")
    gate, up = get("mlp.experts.gate_up_proj").transpose(2, 3).chunk(2, dim=-1)
    out = {
        "moe.norm": norm,
        "moe.router": get("mlp.gate.weight").transpose(1, 2),
        "moe.gate": gate,
        "moe.up": up,
        "moe.down": get("mlp.experts.down_proj").transpose(2, 3),
    }
    if model["router"].get("expert_bias"):
        out["moe.expert_bias"] = get("mlp.gate.e_score_correction_bias")
    return out | matrices("moe.shared_", "shared_experts.")


def deepseek_section(**changes: object) -> dict:
    """A `model` section of three layers, the first dense."""
    experts = EXPERTS | {"shared_expert_ffn_hidden_size": 16, "first_dense_layers": 1}
    shape = {
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 14,
        "ffn_hidden_size": 40,
    }
    return llama_section(**(shape | WIDTHS | experts | changes))


def deepseek_options(model: dict, **rope: object) -> dict:
    """What transformers calls the keys of a section; `rope` are the keys of `rope_parameters` besides its base."""
    options = llama_options(model) | {name: model[name] for name in WIDTHS}
    options.pop("head_dim", None)
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": model["rope_theta"]} | rope
    return options | {
        "experts_implementation": "eager",
        "q_lora_rank": model.get("q_lora_rank"),
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "n_group": model["router"]["num_groups"],
        "topk_group": model["router"]["groups_per_token"],
        "routed_scaling_factor": model["router"]["scaling_factor"],
    }


def tiny_deepseek_v2() -> Reference:
    """Queries without a latent; two of four groups of three experts, by the groups' largest scores."""
    groups = {"num_groups": 4, "groups_per_token": 2, "group_score": "max"}
    model = deepseek_section(router={"pre_softmax": True, "normalise": False, "scaling_factor": 4.0, **groups})
    config = DeepseekV2Config(topk_method="group_limited_greedy", norm_topk_prob=False, **deepseek_options(model))
    return DeepseekV2ForCausalLM(config), model, convert_deepseek


def tiny_deepseek_v3() -> Reference:
    """Latents of queries too, YaRN; two of three groups of four experts, with a bias of the choice."""
    groups = {"num_groups": 3, "groups_per_token": 2}
    model = deepseek_section(
        q_lora_rank=24,
        rope_scaling={"kind": "yarn", "original_max_positions": 8, **YARN},
        router={"score_function": "sigmoid", "scaling_factor": 2.5, "expert_bias": True, **groups},
    )
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 8, **YARN}
    config = DeepseekV3Config(norm_topk_prob=True, num_mtp_layers=0, **deepseek_options(model, **rope))
    return DeepseekV3ForCausalLM(config), model, convert_deepseek
