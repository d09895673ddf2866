"""The tiny models of Gemma, Phi-3, OLMo 2, Nemotron, SmolLM3, GPT-OSS and ModernBERT."""

import torch
from llama_references import (
    NO_SPECIAL_TOKENS,
    Reference,
    Tensors,
    heads_in,
    heads_out,
    llama_options,
    llama_section,
    stack,
)
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    ModernBertConfig,
    ModernBertForMaskedLM,
    NemotronConfig,
    NemotronForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

LLAMA_NORMS = {"attention.norm": "input_layernorm", "mlp.norm": "post_attention_layernorm"}
GEMMA_NORMS = {
    "attention.norm": "input_layernorm",
    "attention.post_norm": "post_attention_layernorm",
    "mlp.norm": "pre_feedforward_layernorm",
    "mlp.post_norm": "post_feedforward_layernorm",
}
OLMO_NORMS = {"attention.post_norm": "post_attention_layernorm", "mlp.post_norm": "post_feedforward_layernorm"}
YARN = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "attention_factor": 1.25, "truncate": False}


def converter(norms: dict[str, str]):
    """The function from a network's tensors to canonical names; `norms` are the layers' norms."""

    def convert(tensors: Tensors, model: dict) -> Tensors:
        layers, heads, kv_heads = range(model["num_layers"]), model["num_heads"], model["num_kv_heads"]
        has_bias = model["norm"] == "layernorm"

        def get(name: str) -> torch.Tensor:
            return stack(tensors, "model.layers.{}." + name + ".weight", layers)

        if "model.layers.0.self_attn.qkv_proj.weight" in tensors:
            widths = [count * model["head_dim"] for count in (heads, kv_heads, kv_heads)]
            query, key, value = get("self_attn.qkv_proj").split(widths, dim=1)
            gate, up = get("mlp.gate_up_proj").chunk(2, dim=1)
        else:
            query, key, value = (get(f"self_attn.{name}_proj") for name in "qkv")
            gate = None if model["activation"] == "relu2" else get("mlp.gate_proj")
            up = get("mlp.up_proj")
        block = {
            "attention.query": heads_out(query, heads),
            "attention.key": heads_out(key, kv_heads),
            "attention.value": heads_out(value, kv_heads),
            "attention.output": heads_in(get("self_attn.o_proj"), heads),
            "mlp.up": up.transpose(1, 2),
            "mlp.down": get("mlp.down_proj").transpose(1, 2),
            **{ours: get(theirs) for ours, theirs in norms.items()},
        }
        if gate is not None:
            block["mlp.gate"] = gate.transpose(1, 2)
        if has_bias:
            for ours, theirs in norms.items():
                block[f"{ours}_bias"] = stack(tensors, "model.layers.{}." + theirs + ".bias", layers)
        if model.get("qk_norm"):
            block |= {"attention.query_norm": get("self_attn.q_norm"), "attention.key_norm": get("self_attn.k_norm")}
        ends = {"embedding.tokens": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
        if has_bias:
            ends["final_norm_bias"] = tensors["model.norm.bias"]
        if not model["tie_embeddings"]:
            ends["head"] = tensors["lm_head.weight"].T
        return ends | {f"blocks.dense.{name}": tensor for name, tensor in block.items()}

    return convert


def section(**changes: object) -> dict:
    """A `model` section with grouped queries."""
    return {
        "num_layers": 3,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "ffn_hidden_size": 36,
        "vocab_size": 43,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-5,
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": 500.0,
        "tie_embeddings": False,
    } | changes


def options(model: dict, **rope: object) -> dict:
    """What transformers calls the keys of a section; `rope` are the keys of `rope_parameters` besides its base."""
    return {
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "intermediate_size": model["ffn_hidden_size"],
        "vocab_size": model["vocab_size"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]} | rope,
        "tie_word_embeddings": model["tie_embeddings"],
        "max_position_embeddings": 12,
        "attn_implementation": "eager",
        **NO_SPECIAL_TOKENS,
    }


def gemma_section(**changes: object) -> dict:
    gemma = {"activation": "geglu", "norm_placement": "both", "norm_zero_centred": True, "scale_embeddings": True}
    # Odd head widths: the heads together (4·8) are wider than the model (24).
    return section(head_dim=8, sliding_window=5, attention_scale=12**-0.5, **(gemma | changes))


def tiny_gemma2() -> Reference:
    model = gemma_section(layer_pattern=["local", "global"], logit_softcap=3.0, attention_softcap=2.0)
    config = Gemma2Config(
        rms_norm_eps=1e-5,
        query_pre_attn_scalar=12,
        sliding_window=5,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        **options(model),
    )
    return Gemma2ForCausalLM(config), model, converter(GEMMA_NORMS)


def tiny_gemma3_text() -> Reference:
    """Two local layers of each three; scaled positions in the global layers."""
    scaling = {"kind": "linear", "factor": 4.0}
    pattern = ["local", "local", "global"]
    model = gemma_section(
        layer_pattern=pattern, qk_norm=True, tie_embeddings=True, rope_local_theta=50.0, rope_scaling=scaling
    )
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
    }
    config = Gemma3TextConfig(
        rms_norm_eps=1e-5,
        query_pre_attn_scalar=12,
        sliding_window=5,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        **options(model) | {"rope_parameters": rope},
    )
    return Gemma3ForCausalLM(config), model, converter(GEMMA_NORMS)


def tiny_phi3() -> Reference:
    """Six of eight elements of each head are rotated; the sequence is longer than in the original training."""
    scaling = {"short_factors": [1.0, 1.5, 2.0], "long_factors": [1.2, 2.5, 6.0], "original_max_positions": 8}
    model = section(
        hidden_size=32,
        head_dim=8,
        rope_fraction=0.75,
        sliding_window=7,
        rope_scaling={"kind": "longrope", "factor": 1.5, **scaling},
    )
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [1.2, 2.5, 6.0]}
    config = Phi3Config(
        rms_norm_eps=1e-5,
        sliding_window=7,
        original_max_position_embeddings=8,
        **options(model, partial_rotary_factor=0.75, **rope),
    )
    return Phi3ForCausalLM(config), model, converter(LLAMA_NORMS)


def tiny_olmo2() -> Reference:
    model = section(norm_placement="after", qk_norm="all_heads")
    return Olmo2ForCausalLM(Olmo2Config(rms_norm_eps=1e-5, **options(model))), model, converter(OLMO_NORMS)


def tiny_nemotron() -> Reference:
    """Dynamic scaling: the 17 tokens are more than the 12 of the original training."""
    model = section(
        head_dim=8,
        norm="layernorm",
        norm_zero_centred=True,
        activation="relu2",
        rope_fraction=0.5,
        rope_scaling={"kind": "dynamic", "factor": 2.0, "original_max_positions": 12},
    )
    rope = {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.5}
    config = NemotronConfig(norm_eps=1e-5, **options(model, **rope))
    return NemotronForCausalLM(config), model, converter(LLAMA_NORMS)


def tiny_smollm3() -> Reference:
    """YaRN in two layers, no positions in the third."""
    scaling = {"kind": "yarn", "original_max_positions": 8, **YARN}
    model = section(rope_pattern=["rope", "rope", "none"], rope_scaling=scaling, tie_embeddings=True)
    rope = options(model, rope_type="yarn", original_max_position_embeddings=8, **YARN)
    config = SmolLM3Config(rms_norm_eps=1e-5, no_rope_layers=[1, 1, 0], **rope)
    return SmolLM3ForCausalLM(config), model, converter(LLAMA_NORMS)


def convert_gpt_oss(tensors: Tensors, model: dict) -> Tensors:
    """GPT-OSS's tensors (Linear: [out, in]; experts [E, in, out], gate and up in turns) by canonical name."""
    heads, kv_heads = model["num_heads"], model["num_kv_heads"]

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "model.layers.{}." + name, range(model["num_layers"]))

    gate_up, gate_up_bias = get("mlp.experts.gate_up_proj"), get("mlp.experts.gate_up_proj_bias")
    block = {
        "attention.norm": get("input_layernorm.weight"),
        "attention.query": heads_out(get("self_attn.q_proj.weight"), heads),
        "attention.key": heads_out(get("self_attn.k_proj.weight"), kv_heads),
        "attention.value": heads_out(get("self_attn.v_proj.weight"), kv_heads),
        "attention.output": heads_in(get("self_attn.o_proj.weight"), heads),
        "attention.query_bias": get("self_attn.q_proj.bias").unflatten(1, (heads, -1)),
        "attention.key_bias": get("self_attn.k_proj.bias").unflatten(1, (kv_heads, -1)),
        "attention.value_bias": get("self_attn.v_proj.bias").unflatten(1, (kv_heads, -1)),
        "attention.output_bias": get("self_attn.o_proj.bias"),
        "attention.sinks": get("self_attn.sinks"),
        "moe.norm": get("post_attention_layernorm.weight"),
        "moe.router": get("mlp.router.weight").transpose(1, 2),
        "moe.router_bias": get("mlp.router.bias"),
        "moe.gate": gate_up[..., 0::2],
        "moe.up": gate_up[..., 1::2],
        "moe.gate_bias": gate_up_bias[..., 0::2],
        "moe.up_bias": gate_up_bias[..., 1::2],
        "moe.down": get("mlp.experts.down_proj"),
        "moe.down_bias": get("mlp.experts.down_proj_bias"),
    }
    return {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        **{f"blocks.moe.{name}": tensor for name, tensor in block.items()},
        "final_norm": tensors["model.norm.weight"],
        "head": tensors["lm_head.weight"].T,
    }


def tiny_gpt_oss() -> Reference:
    """A window of 5 tokens in the first of two layers; YaRN; widths that MXFP4 can have; biases that the clamps cut."""
    scaling = {"kind": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5}
    scaling |= {"original_max_positions": 16, "truncate": False}
    model = llama_section(
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        ffn_hidden_size=64,
        rope_scaling=scaling,
        activation="clamped_swiglu",
        attention_bias=True,
        attention_sinks=True,
        mlp_bias=True,
        sliding_window=5,
        layer_pattern=["local", "global"],
        num_experts=4,
        experts_per_token=2,
        router={"logit_bias": True},
    )
    config = GptOssConfig(
        experts_implementation="eager",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        attention_bias=True,
        **llama_options(model),
    )
    return GptOssForCausalLM(config), model, convert_gpt_oss


def convert_modernbert(tensors: Tensors, model: dict) -> Tensors:
    """ModernBERT's tensors by canonical name; the first layer has no norm before its attention."""
    out = {
        "embedding.tokens": tensors["model.embeddings.tok_embeddings.weight"],
        "embedding.norm": tensors["model.embeddings.norm.weight"],
        "final_norm": tensors["model.final_norm.weight"],
        "head_dense": tensors["head.dense.weight"].T,
        "head_norm": tensors["head.norm.weight"],
        "head_bias": tensors["decoder.bias"],
    }
    for kind, layers in (("first", range(1)), ("dense", range(1, model["num_layers"]))):

        def get(name: str, layers: range = layers) -> torch.Tensor:
            return stack(tensors, "model.layers.{}." + name + ".weight", layers)

        query, key, value = (heads_out(part, model["num_heads"]) for part in get("attn.Wqkv").chunk(3, dim=1))
        gate, up = (part.transpose(1, 2) for part in get("mlp.Wi").chunk(2, dim=1))
        block = {
            "attention.query": query,
            "attention.key": key,
            "attention.value": value,
            "mlp.gate": gate,
            "mlp.up": up,
        }
        block |= {
            "attention.output": heads_in(get("attn.Wo"), model["num_heads"]),
            "mlp.down": get("mlp.Wo").transpose(1, 2),
            "mlp.norm": get("mlp_norm"),
        }
        if kind == "dense":
            block["attention.norm"] = get("attn_norm")
        out |= {f"blocks.{kind}.{name}": tensor for name, tensor in block.items()}
    return out


def tiny_modernbert() -> Reference:
    """Windows of 3 tokens on each side in two of five layers, with another base of the rotary wavelengths."""
    model = section(num_layers=5, num_kv_heads=4, norm="layernorm", norm_bias=False, activation="geglu_exact")
    model |= {"causal": False, "embedding_norm": True, "prediction_head": True, "head_bias": True}
    model |= {"tie_embeddings": True, "sliding_window": 4, "layer_pattern": ["global", "local", "local"]}
    model |= {"rope_local_theta": 20.0}
    renamed = {"norm_eps": 1e-5, "local_attention": 6, "cls_token_id": None, "sep_token_id": None}
    own = options(model) | renamed
    del own["num_key_value_heads"], own["head_dim"]
    bases = {"full_attention": model["rope_theta"], "sliding_attention": model["rope_local_theta"]}
    own["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return ModernBertForMaskedLM(ModernBertConfig(**own)), model, convert_modernbert
