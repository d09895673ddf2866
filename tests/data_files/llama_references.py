"""The tiny models of GPT-2, GPT-NeoX, Llama, Mistral, Mixtral and Qwen, for make_transformers_references.py.

A builder returns transformers' model, the `model` section of the config that describes it, the function from its
tensors to canonical names, and multipliers of activations that our weights contain, if there are any: by the weights'
names, without their block's.
"""

from collections.abc import Callable, Iterable

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Tensors = dict[str, torch.Tensor]
Convert = Callable[[Tensors, dict], Tensors]
Reference = tuple[PreTrainedModel, dict, Convert] | tuple[PreTrainedModel, dict, Convert, dict[str, float]]
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def stack(tensors: Tensors, pattern: str, layers: Iterable[int]) -> torch.Tensor:
    """The tensors named by `pattern` with the number of each of these layers for {}, stacked on a first dimension."""
    return torch.stack([tensors[pattern.format(layer)] for layer in layers])


def heads_out(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Linear weights [L, N·H, D] -> [L, D, N, H]."""
    return weight.transpose(1, 2).unflatten(2, (num_heads, -1))


def heads_in(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Linear weights [L, D, N·H] -> [L, N, H, D]."""
    return weight.transpose(1, 2).unflatten(1, (num_heads, -1))


def convert_gpt2(tensors: Tensors, model: dict) -> Tensors:
    """GPT-2's tensors (Conv1D: [in, out], query, key and value side by side) by canonical name."""
    layers, heads = model["num_layers"], model["num_heads"]

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "transformer.h.{}." + name, range(layers))

    query, key, value = get("attn.c_attn.weight").unflatten(2, (3, heads, -1)).unbind(2)
    query_bias, key_bias, value_bias = get("attn.c_attn.bias").unflatten(1, (3, heads, -1)).unbind(1)
    block = {
        "attention.norm": get("ln_1.weight"),
        "attention.norm_bias": get("ln_1.bias"),
        "attention.query": query,
        "attention.key": key,
        "attention.value": value,
        "attention.query_bias": query_bias,
        "attention.key_bias": key_bias,
        "attention.value_bias": value_bias,
        "attention.output": get("attn.c_proj.weight").unflatten(1, (heads, -1)),
        "attention.output_bias": get("attn.c_proj.bias"),
        "mlp.norm": get("ln_2.weight"),
        "mlp.norm_bias": get("ln_2.bias"),
        "mlp.up": get("mlp.c_fc.weight"),
        "mlp.up_bias": get("mlp.c_fc.bias"),
        "mlp.down": get("mlp.c_proj.weight"),
        "mlp.down_bias": get("mlp.c_proj.bias"),
    }
    return {
        "embedding.tokens": tensors["transformer.wte.weight"],
        "embedding.positions": tensors["transformer.wpe.weight"],
        **{f"blocks.dense.{name}": tensor for name, tensor in block.items()},
        "final_norm": tensors["transformer.ln_f.weight"],
        "final_norm_bias": tensors["transformer.ln_f.bias"],
    }


def convert_gpt_neox(tensors: Tensors, model: dict) -> Tensors:
    """GPT-NeoX's tensors (Linear: [out, in]; query, key and value together per head) by canonical name."""
    layers, heads = model["num_layers"], model["num_heads"]

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "gpt_neox.layers.{}." + name, range(layers))

    fused = get("attention.query_key_value.weight").transpose(1, 2).unflatten(2, (heads, 3, -1))
    query, key, value = fused.unbind(3)
    query_bias, key_bias, value_bias = get("attention.query_key_value.bias").unflatten(1, (heads, 3, -1)).unbind(2)
    block = {
        "attention.norm": get("input_layernorm.weight"),
        "attention.norm_bias": get("input_layernorm.bias"),
        "attention.query": query,
        "attention.key": key,
        "attention.value": value,
        "attention.query_bias": query_bias,
        "attention.key_bias": key_bias,
        "attention.value_bias": value_bias,
        "attention.output": heads_in(get("attention.dense.weight"), heads),
        "attention.output_bias": get("attention.dense.bias"),
        "mlp.norm": get("post_attention_layernorm.weight"),
        "mlp.norm_bias": get("post_attention_layernorm.bias"),
        "mlp.up": get("mlp.dense_h_to_4h.weight").transpose(1, 2),
        "mlp.up_bias": get("mlp.dense_h_to_4h.bias"),
        "mlp.down": get("mlp.dense_4h_to_h.weight").transpose(1, 2),
        "mlp.down_bias": get("mlp.dense_4h_to_h.bias"),
    }
    return {
        "embedding.tokens": tensors["gpt_neox.embed_in.weight"],
        **{f"blocks.dense.{name}": tensor for name, tensor in block.items()},
        "final_norm": tensors["gpt_neox.final_layer_norm.weight"],
        "final_norm_bias": tensors["gpt_neox.final_layer_norm.bias"],
        "head": tensors["lm_head.weight"].T,
    }


def convert_llama(tensors: Tensors, model: dict) -> Tensors:
    """The tensors of Llama, Mistral, Mixtral or Qwen 3 (Linear: [out, in]) by canonical name."""
    # Which layers have experts is told by the network's own tensors.
    moe = [i for i in range(model["num_layers"]) if f"model.layers.{i}.mlp.gate.weight" in tensors]
    dense = [i for i in range(model["num_layers"]) if i not in moe]
    converted = {
        "embedding.tokens": tensors["model.embed_tokens.weight"],
        **(convert_llama_blocks(tensors, model, "dense", dense) if dense else {}),
        **(convert_llama_blocks(tensors, model, "moe", moe) if moe else {}),
        "final_norm": tensors["model.norm.weight"],
    }
    if not model["tie_embeddings"]:
        converted["head"] = tensors["lm_head.weight"].T
    return converted


def convert_llama_blocks(tensors: Tensors, model: dict, kind: str, layers: list[int]) -> Tensors:
    """Those of the layers of one kind."""
    heads, kv_heads = model["num_heads"], model["num_kv_heads"]

    def get(name: str) -> torch.Tensor:
        return stack(tensors, "model.layers.{}." + name, layers)

    block = {
        "attention.norm": get("input_layernorm.weight"),
        "attention.query": heads_out(get("self_attn.q_proj.weight"), heads),
        "attention.key": heads_out(get("self_attn.k_proj.weight"), kv_heads),
        "attention.value": heads_out(get("self_attn.v_proj.weight"), kv_heads),
        "attention.output": heads_in(get("self_attn.o_proj.weight"), heads),
    }
    if kind == "moe":
        gate, up = get("mlp.experts.gate_up_proj").transpose(2, 3).chunk(2, dim=3)  # [L, E, D, 2F]
        block |= {
            "moe.norm": get("post_attention_layernorm.weight"),
            "moe.router": get("mlp.gate.weight").transpose(1, 2),
            "moe.gate": gate,
            "moe.up": up,
            "moe.down": get("mlp.experts.down_proj").transpose(2, 3),
        }
    else:
        block |= {
            "mlp.norm": get("post_attention_layernorm.weight"),
            "mlp.gate": get("mlp.gate_proj.weight").transpose(1, 2),
            "mlp.up": get("mlp.up_proj.weight").transpose(1, 2),
            "mlp.down": get("mlp.down_proj.weight").transpose(1, 2),
        }
    if model.get("attention_bias"):
        block["attention.query_bias"] = get("self_attn.q_proj.bias").unflatten(1, (heads, -1))
        block["attention.key_bias"] = get("self_attn.k_proj.bias").unflatten(1, (kv_heads, -1))
        block["attention.value_bias"] = get("self_attn.v_proj.bias").unflatten(1, (kv_heads, -1))
        if model["attention_bias"] is True:
            block["attention.output_bias"] = get("self_attn.o_proj.bias")
    if model.get("qk_norm"):
        block["attention.query_norm"] = get("self_attn.q_norm.weight")
        block["attention.key_norm"] = get("self_attn.k_norm.weight")
    if model.get("mlp_bias"):
        for name in ("gate", "up", "down"):
            block[f"mlp.{name}_bias"] = get(f"mlp.{name}_proj.bias")
    return {f"blocks.{kind}.{name}": tensor for name, tensor in block.items()}


def llama_options(model: dict) -> dict:
    """What the configurations of Llama, Mistral and Qwen 3 call the keys of a `model` section."""
    rope = {"rope_type": "default", "rope_theta": model["rope_theta"]}
    if "rope_scaling" in model:
        scaling = dict(model["rope_scaling"])
        rope |= {
            "rope_type": scaling.pop("kind"),
            "original_max_position_embeddings": scaling.pop("original_max_positions"),
            **scaling,
        }
    return {
        "num_hidden_layers": model["num_layers"],
        "hidden_size": model["hidden_size"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_kv_heads"],
        "head_dim": model["head_dim"],
        "intermediate_size": model["ffn_hidden_size"],
        "vocab_size": model["vocab_size"],
        "rms_norm_eps": model["norm_epsilon"],
        "rope_parameters": rope,
        "tie_word_embeddings": model["tie_embeddings"],
        "max_position_embeddings": 512,
        "attn_implementation": "eager",
        **NO_SPECIAL_TOKENS,
    }


def tiny_gpt2() -> Reference:
    model = {
        "num_layers": 3,
        "hidden_size": 40,
        "num_heads": 5,
        "ffn_hidden_size": 112,
        "vocab_size": 101,
        "max_positions": 32,
        "norm": "layernorm",
        "norm_epsilon": 1e-3,
        "activation": "gelu",
        "position": "learned",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    }
    config = GPT2Config(
        n_layer=3,
        n_embd=40,
        n_head=5,
        n_inner=112,
        vocab_size=101,
        n_positions=32,
        layer_norm_epsilon=1e-3,
        attn_implementation="eager",
        **NO_SPECIAL_TOKENS,
    )
    return GPT2LMHeadModel(config), model, convert_gpt2


def tiny_gpt_neox() -> Reference:
    """RoPE on the first half of each head; residual branches one after the other; tanh GELU."""
    model = {
        "num_layers": 2,
        "hidden_size": 48,
        "num_heads": 3,
        "ffn_hidden_size": 112,
        "vocab_size": 97,
        "norm": "layernorm",
        "norm_epsilon": 1e-5,
        "activation": "gelu",
        "position": "rope",
        "rope_theta": 500.0,
        "rope_fraction": 0.5,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_embeddings": False,
    }
    config = GPTNeoXConfig(
        num_hidden_layers=2,
        hidden_size=48,
        num_attention_heads=3,
        intermediate_size=112,
        vocab_size=97,
        layer_norm_eps=1e-5,
        hidden_act="gelu_new",
        use_parallel_residual=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        max_position_embeddings=512,
        attn_implementation="eager",
        **NO_SPECIAL_TOKENS,
    )
    return GPTNeoXForCausalLM(config), model, convert_gpt_neox


def llama_section(**changes: object) -> dict:
    """A `model` section of the Llama family, with grouped queries and odd sizes."""
    return {
        "num_layers": 3,
        "hidden_size": 48,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden_size": 80,
        "vocab_size": 99,
        "norm": "rmsnorm",
        "norm_epsilon": 1e-5,
        "activation": "swiglu",
        "position": "rope",
        "rope_theta": 500.0,
        "tie_embeddings": False,
    } | changes


def tiny_llama() -> Reference:
    """Llama 3's RoPE scaling: of four frequencies one is kept, one interpolated, two divided."""
    scaling = {
        "kind": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_positions": 64,
    }
    model = llama_section(rope_scaling=scaling)
    return LlamaForCausalLM(LlamaConfig(**llama_options(model))), model, convert_llama


def tiny_llama_tied() -> Reference:
    model = llama_section(num_layers=2, norm_epsilon=1e-3, attention_bias=True, mlp_bias=True, tie_embeddings=True)
    config = LlamaConfig(attention_bias=True, mlp_bias=True, **llama_options(model))
    return LlamaForCausalLM(config), model, convert_llama


def tiny_mistral() -> Reference:
    model = llama_section(num_layers=2, num_kv_heads=3, sliding_window=7)
    return MistralForCausalLM(MistralConfig(sliding_window=7, **llama_options(model))), model, convert_llama


def tiny_qwen3() -> Reference:
    """The heads together (4·16) are wider than the model (48)."""
    model = llama_section(
        num_heads=4, head_dim=16, norm_epsilon=1e-6, rope_theta=10000.0, qk_norm=True, tie_embeddings=True
    )
    return Qwen3ForCausalLM(Qwen3Config(**llama_options(model))), model, convert_llama


def tiny_qwen3_local() -> Reference:
    """Layers 0 and 2 attend to everything, 1 and 3 to a window of 5 tokens."""
    model = llama_section(num_layers=4, qk_norm=True, sliding_window=5, layer_pattern=["global", "local"])
    config = Qwen3Config(
        use_sliding_window=True,
        sliding_window=5,
        layer_types=["full_attention", "sliding_attention"] * 2,
        **llama_options(model),
    )
    return Qwen3ForCausalLM(config), model, convert_llama


def tiny_qwen2() -> Reference:
    """Biases of queries, keys and values only; the last layer attends to a window."""
    pattern = ["global", "global", "local"]
    model = llama_section(attention_bias="qkv", sliding_window=6, layer_pattern=pattern, tie_embeddings=True)
    config = Qwen2Config(use_sliding_window=True, sliding_window=6, max_window_layers=2, **llama_options(model))
    return Qwen2ForCausalLM(config), model, convert_llama


def tiny_mixtral() -> Reference:
    model = llama_section(num_layers=2, ffn_hidden_size=32, num_experts=4, experts_per_token=2)
    config = MixtralConfig(
        experts_implementation="eager", num_local_experts=4, num_experts_per_tok=2, **llama_options(model)
    )
    return MixtralForCausalLM(config), model, convert_llama


def tiny_qwen3_moe() -> Reference:
    """Scores of all experts, then the choice, not normalised; experts narrower than a dense MLP would be."""
    router = {"pre_softmax": True, "normalise": False}
    model = llama_section(
        num_layers=2, qk_norm=True, num_experts=6, experts_per_token=3, expert_ffn_hidden_size=24, router=router
    )
    config = Qwen3MoeConfig(
        experts_implementation="eager",
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=False,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        **llama_options(model),
    )
    return Qwen3MoeForCausalLM(config), model, convert_llama


def tiny_qwen3_moe_mixed() -> Reference:
    """Layers 3 and 5 have experts; 1 would but for the dense layers at the start, 2 and 4 but for the interval."""
    model = llama_section(
        num_layers=6,
        hidden_size=32,
        num_heads=4,
        qk_norm=True,
        ffn_hidden_size=40,
        num_experts=4,
        experts_per_token=2,
        expert_ffn_hidden_size=16,
        first_dense_layers=2,
        moe_layer_interval=2,
    )
    config = Qwen3MoeConfig(
        experts_implementation="eager",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[0, 1],
        **llama_options(model),
    )
    return Qwen3MoeForCausalLM(config), model, convert_llama
