"""The tiny model of Kimi Linear, for make_transformers_references.py."""

import torch
from deepseek_references import convert_attention, convert_mlp
from llama_references import NO_SPECIAL_TOKENS, Reference, Tensors, heads_in, heads_out, stack
from transformers import KimiLinearConfig, KimiLinearForCausalLM

# An MLP in the first layer, and attention in the third.
BLOCKS = ["kda", "kda_moe", "moe", "kda_moe"]
HEADS = 4


def convert(tensors: Tensors, model: dict) -> Tensors:
    """The network's tensors by canonical names."""
    out = {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "head": tensors["lm_head.weight"].T,
    }
    for kind in dict.fromkeys(BLOCKS):
        layers = [layer for layer, own in enumerate(BLOCKS) if own == kind]
        mixer = convert_attention(tensors, model, layers) if kind == "moe" else delta_attention(tensors, layers)
        block = mixer | convert_mlp(tensors, model, layers, experts=kind != "kda")
        out |= {f"blocks.{kind}.{name}": tensor for name, tensor in block.items()}
    return out


def delta_attention(tensors: Tensors, layers: list[int]) -> Tensors:
    def get(name: str) -> torch.Tensor:
        return stack(tensors, "model.layers.{}." + name, layers)

    names = ("query", "key", "value")
    windows = get("self_attn.conv1d.weight")[:, :, 0].chunk(3, dim=1)
    own = {name: heads_out(get(f"self_attn.{name[0]}_proj.weight"), HEADS) for name in names}
    for name, window in zip(names, windows, strict=True):
        own[f"{name}_convolution"] = window.unflatten(1, (HEADS, -1)).movedim(-1, 1)
    for name, module in (("decay", "forget_gate.f"), ("gate", "g")):
        own[f"{name}_down"] = get(f"self_attn.{module}_a_proj.weight").transpose(1, 2)
        own[f"{name}_up"] = heads_out(get(f"self_attn.{module}_b_proj.weight"), HEADS)
    own |= {
        "norm": get("input_layernorm.weight"),
        "strength": get("self_attn.b_proj.weight").transpose(1, 2),
        "decay_rate": get("self_attn.forget_gate.A_log").flatten(1),
        "decay_bias": get("self_attn.forget_gate.dt_bias").unflatten(1, (HEADS, -1)),
        "output_norm": get("self_attn.o_norm.weight"),
        "output": heads_in(get("self_attn.o_proj.weight"), HEADS),
    }
    return {f"kda.{name}": tensor for name, tensor in own.items()}


def tiny_kimi_linear() -> Reference:
    model = {
        "num_layers": 4,
        "hidden_size": 24,
        "num_heads": 4,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "ffn_hidden_size": 20,
        "vocab_size": 43,
        "norm_epsilon": 1e-5,
        "position": "none",
        "block_pattern": BLOCKS,
        "kda": {"num_heads": HEADS, "head_dim": 6, "conv_kernel": 3},
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "shared_expert_ffn_hidden_size": 24,
        "router": {
            "score_function": "sigmoid",
            "expert_bias": True,
            "normalise": True,
            "scaling_factor": 2.5,
            "loss_counts": "top_scores",
        },
    }
    config = KimiLinearConfig(
        num_hidden_layers=4,
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=12,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        intermediate_size=20,
        vocab_size=43,
        layer_types=["full_attention" if kind == "moe" else "linear_attention" for kind in BLOCKS],
        linear_num_heads=HEADS,
        linear_head_dim=6,
        linear_conv_kernel_dim=3,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        attn_implementation="eager",
        experts_implementation="eager",
        max_position_embeddings=512,
        **NO_SPECIAL_TOKENS,
    )
    return KimiLinearForCausalLM(config), model, convert
