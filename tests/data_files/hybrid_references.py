"""The tiny models with linear attention, for make_transformers_references.py."""

from llama_references import NO_SPECIAL_TOKENS, Reference, Tensors, heads_in, heads_out, stack
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

# Kinds of blocks: a layer without experts among those with them, and attention in the last.
BLOCKS = ["gated_deltanet_moe", "gated_deltanet", "gated_deltanet_moe", "moe"]
SIZES = {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6, "value_head_dim": 5, "conv_kernel": 4}


def convert(tensors: Tensors, model: dict) -> Tensors:
    """Tensors of Qwen3-Next and Qwen3.5 by canonical names."""
    out = {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "head": tensors["lm_head.weight"].T,
    }
    for kind in dict.fromkeys(model["block_pattern"]):
        layers = [layer for layer, own in enumerate(model["block_pattern"]) if own == kind]
        mixer = attention if kind in ("moe", "dense") else gated_deltanet
        block = mixer(tensors, model, layers) | (experts if "moe" in kind else mlp)(tensors, layers)
        out |= {f"blocks.{kind}.{name}": tensor for name, tensor in block.items()}
    return out


def of_layers(tensors: Tensors, layers: list[int], base: str = "model"):
    return lambda name: stack(tensors, base + ".layers.{}." + name, layers)


def attention(tensors: Tensors, model: dict, layers: list[int]) -> Tensors:
    get = of_layers(tensors, layers)
    both = heads_out(get("self_attn.q_proj.weight"), model["num_heads"])  # [L, D, N, 2H]
    query, gate = both.chunk(2, dim=-1)
    return {
        "attention.norm": get("input_layernorm.weight"),
        "attention.query": query,
        "attention.gate": gate,
        "attention.key": heads_out(get("self_attn.k_proj.weight"), model["num_kv_heads"]),
        "attention.value": heads_out(get("self_attn.v_proj.weight"), model["num_kv_heads"]),
        "attention.query_norm": get("self_attn.q_norm.weight"),
        "attention.key_norm": get("self_attn.k_norm.weight"),
        "attention.output": heads_in(get("self_attn.o_proj.weight"), model["num_heads"]),
    }


def gated_deltanet(tensors: Tensors, model: dict, layers: list[int]) -> Tensors:
    """The split of `fix_query_key_value_ordering`, for a key head and its two value heads.

    Qwen3.5 has the heads of each projection in order.
    """
    get, heads, keys, values = of_layers(tensors, layers), 2, SIZES["key_head_dim"], 2 * SIZES["value_head_dim"]
    if f"model.layers.{layers[0]}.linear_attn.in_proj_z.weight" in tensors:
        qkv = get("linear_attn.in_proj_qkv.weight").split([heads * keys, heads * keys, heads * values], dim=1)
        projections = [heads_out(part, heads) for part in (*qkv, get("linear_attn.in_proj_z.weight"))]
        rates = [heads_out(get(f"linear_attn.in_proj_{name}.weight"), heads) for name in "ba"]
    else:
        widths = [keys, keys, values, values]
        projections = heads_out(get("linear_attn.in_proj_qkvz.weight"), heads).split(widths, dim=-1)
        rates = heads_out(get("linear_attn.in_proj_ba.weight"), heads).chunk(2, dim=-1)
    convolution = get("linear_attn.conv1d.weight")[:, :, 0].split([heads * keys, heads * keys, heads * values], dim=1)
    windows = [part.unflatten(1, (heads, -1)).movedim(-1, 1) for part in convolution]
    own = {
        **dict(zip(("query", "key", "value", "gate"), projections, strict=True)),
        **dict(zip(("strength", "decay"), rates, strict=True)),
        **dict(zip(("query_convolution", "key_convolution", "value_convolution"), windows, strict=True)),
        "norm": get("input_layernorm.weight"),
        "decay_rate": get("linear_attn.A_log"),
        "decay_bias": get("linear_attn.dt_bias"),
        "output_norm": get("linear_attn.norm.weight"),
        "output": heads_in(get("linear_attn.out_proj.weight"), heads),
    }
    return {f"gated_deltanet.{name}": tensor for name, tensor in own.items()}


def mlp(tensors: Tensors, layers: list[int]) -> Tensors:
    get = of_layers(tensors, layers)
    own = {name: get(f"mlp.{name}_proj.weight").transpose(1, 2) for name in ("gate", "up", "down")}
    return {f"mlp.{name}": w for name, w in own.items()} | {"mlp.norm": get("post_attention_layernorm.weight")}


def experts(tensors: Tensors, layers: list[int]) -> Tensors:
    get = of_layers(tensors, layers)
    gate, up = get("mlp.experts.gate_up_proj").transpose(2, 3).chunk(2, dim=-1)  # [L, E, D, F]
    own = {
        "norm": get("post_attention_layernorm.weight"),
        "router": get("mlp.gate.weight").transpose(1, 2),
        "gate": gate,
        "up": up,
        "down": get("mlp.experts.down_proj").transpose(2, 3),
        "shared_router": get("mlp.shared_expert_gate.weight")[:, 0],
    }
    for name in ("gate", "up", "down"):
        own[f"shared_{name}"] = get(f"mlp.shared_expert.{name}_proj.weight").transpose(1, 2)
    return {f"moe.{name}": tensor for name, tensor in own.items()}


def qwen_section(blocks: list[str], experts: bool) -> dict:
    """The section of a model of Qwen3-Next or Qwen3.5."""
    section = {
        "num_layers": len(blocks),
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 43,
        "norm_epsilon": 1e-5,
        "norm_zero_centred": True,
        "qk_norm": True,
        "attention_gate": True,
        "rope_theta": 500.0,
        "rope_fraction": 0.5,
        "block_pattern": blocks,
        "linear_attention": SIZES,
    }
    return section | (EXPERTS if experts else {})


EXPERTS = {
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 12,
    "shared_expert_ffn_hidden_size": 16,
    "shared_expert_gate": True,
}


def qwen_options(model: dict) -> dict:
    """The keys of transformers' config for it."""
    options = {
        "num_hidden_layers": model["num_layers"],
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 43,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "attn_implementation": "eager",
        "max_position_embeddings": 512,
        **NO_SPECIAL_TOKENS,
    }
    if "num_experts" not in model:
        return options
    return options | {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "shared_expert_intermediate_size": 16,
        "experts_implementation": "eager",
    }


def tiny_qwen3_next() -> Reference:
    model = qwen_section(BLOCKS, experts=True) | {"ffn_hidden_size": 20}
    config = Qwen3NextConfig(intermediate_size=20, mlp_only_layers=[1], norm_topk_prob=True, **qwen_options(model))
    return Qwen3NextForCausalLM(config), model, convert


LAYER_TYPES = {"layer_types": ["linear_attention", "full_attention"]}


def tiny_qwen3_5_text() -> Reference:
    model = qwen_section(["gated_deltanet", "dense"], experts=False) | {"ffn_hidden_size": 20}
    config = Qwen3_5TextConfig(intermediate_size=20, **LAYER_TYPES, **qwen_options(model))
    return Qwen3_5ForCausalLM(config), model, convert


def tiny_qwen3_5_moe_text() -> Reference:
    model = qwen_section(["gated_deltanet_moe", "moe"], experts=True)
    config = Qwen3_5MoeTextConfig(**LAYER_TYPES, **qwen_options(model))
    return Qwen3_5MoeForCausalLM(config), model, convert


KINDS = {"mamba2": "linear_attention", "experts": "moe", "attention": "full_attention", "mlp": "mlp"}
ONE_SUBLAYER = ["mamba2", "experts", "attention", "mamba2", "mlp"]
MAMBA = {"num_heads": 4, "num_groups": 2, "head_dim": 5, "state_dim": 6, "conv_kernel": 4, "min_step": 0.5}


def convert_nemotron_h(tensors: Tensors, model: dict) -> Tensors:
    """Tensors of Nemotron-H and Mamba-2: one sublayer in a layer."""
    pattern = model["block_pattern"] * (model["num_layers"] // len(model["block_pattern"]))
    out = {
        "embedding.tokens": tensors[f"{backbone(tensors)}.embeddings.weight"],
        "final_norm": tensors[f"{backbone(tensors)}.norm_f.weight"],
        "head": tensors["lm_head.weight"].T,
    }
    for kind in dict.fromkeys(pattern):
        get = of_layers(tensors, [layer for layer, own in enumerate(pattern) if own == kind], backbone(tensors))
        if kind == "mamba2":
            own = mamba2(get, model, "mixer")
        else:
            own = {"attention": plain_attention, "mlp": plain_mlp, "experts": plain_experts}[kind](get)
        own["norm"] = get("norm.weight")
        name = "moe" if kind == "experts" else kind
        out |= {f"blocks.{kind}.{name}.{n}": tensor for n, tensor in own.items()}
    return out


def backbone(tensors: Tensors) -> str:
    return "model" if "model.norm_f.weight" in tensors else "backbone"


def mamba2(get, model: dict, theirs: str) -> Tensors:
    """The split of the mixer's forward pass; the heads of the weights are two groups."""
    sizes = model["mamba2"]
    inner, states = sizes["num_heads"] * sizes["head_dim"], sizes["num_groups"] * sizes["state_dim"]
    names, widths = ("value", "key", "query"), [inner, states, states]
    parts = get(f"{theirs}.in_proj.weight").split([inner, *widths, sizes["num_heads"]], dim=1)
    own = dict(zip(("gate", *names, "step"), (heads_out(part, 2) for part in parts), strict=True))
    windows = get(f"{theirs}.conv1d.weight")[:, :, 0].split(widths, dim=1)
    biases = get(f"{theirs}.conv1d.bias").split(widths, dim=1)
    for name, window, bias in zip(names, windows, biases, strict=True):
        own[f"{name}_convolution"] = window.unflatten(1, (2, -1)).movedim(-1, 1)
        own[f"{name}_bias"] = bias.unflatten(1, (2, -1))
    if sizes.get("output_norm") != "none":
        own["output_norm"] = get(f"{theirs}.norm.weight").unflatten(1, (2, -1))
    return own | {
        "decay_rate": get(f"{theirs}.A_log"),
        "step_bias": get(f"{theirs}.dt_bias"),
        "skip": get(f"{theirs}.D"),
        "output": heads_in(get(f"{theirs}.out_proj.weight"), 2),
    }


def plain_attention(get) -> Tensors:
    heads = {"query": 4, "key": 2, "value": 2}
    own = {name: heads_out(get(f"mixer.{name[0]}_proj.weight"), count) for name, count in heads.items()}
    return own | {"output": heads_in(get("mixer.o_proj.weight"), 4)}


def plain_mlp(get) -> Tensors:
    return {name: get(f"mixer.{name}_proj.weight").transpose(1, 2) for name in ("up", "down")}


def plain_experts(get) -> Tensors:
    own = {"router": get("mixer.gate.weight").transpose(1, 2), "expert_bias": get("mixer.gate.e_score_correction_bias")}
    for name in ("up", "down"):
        own[name] = get(f"mixer.experts.{name}_proj").transpose(2, 3)
        own[f"shared_{name}"] = get(f"mixer.shared_experts.{name}_proj.weight").transpose(1, 2)
    return own


def tiny_nemotron_h() -> Reference:
    """Steps have a limit that half of them meet."""
    model = {
        "num_layers": 5,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 20,
        "vocab_size": 43,
        "norm_epsilon": 1e-5,
        "activation": "relu2",
        "position": "none",
        "block_pattern": ONE_SUBLAYER,
        "mamba2": MAMBA,
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": 12,
        "shared_expert_ffn_hidden_size": 16,
        "router": {
            "score_function": "sigmoid",
            "expert_bias": True,
            "normalise": True,
            "scaling_factor": 2.5,
            "loss_counts": "top_scores",
        },
    }
    config = NemotronHConfig(
        layers_block_type=[KINDS[kind] for kind in ONE_SUBLAYER],
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=20,
        vocab_size=43,
        layer_norm_epsilon=1e-5,
        mamba_num_heads=4,
        mamba_head_dim=5,
        n_groups=2,
        ssm_state_size=6,
        conv_kernel=4,
        time_step_min=0.5,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=16,
        routed_scaling_factor=2.5,
        attn_implementation="eager",
        experts_implementation="eager",
        max_position_embeddings=512,
        **NO_SPECIAL_TOKENS,
    )
    return NemotronHForCausalLM(config), model, convert_nemotron_h


def tiny_mamba2() -> Reference:
    sizes = {"num_heads": 4, "num_groups": 2, "head_dim": 12, "state_dim": 6, "conv_kernel": 4, "min_step": 0.5}
    model = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 1,
        "vocab_size": 43,
        "norm_epsilon": 1e-5,
        "position": "none",
        "block_pattern": ["mamba2"],
        "mamba2": sizes,
    }
    config = Mamba2Config(
        num_hidden_layers=2,
        hidden_size=24,
        vocab_size=43,
        num_heads=4,
        head_dim=12,
        n_groups=2,
        state_size=6,
        conv_kernel=4,
        time_step_limit=(0.5, float("inf")),
        **NO_SPECIAL_TOKENS,
    )
    return Mamba2ForCausalLM(config), model, convert_nemotron_h
