"""Values of the keys that a family's config.json may lack, and other names of keys: those of transformers 5.

Keys that are not here have no effect when they are absent. A null stands for a value only in NULLABLE.
"""

from typing import Any

Json = dict[str, Any]
NULLABLE = ("num_key_value_heads", "sliding_window", "final_logit_softcapping", "attn_logit_softcapping")
NULLABLE += ("q_lora_rank", "n_group", "topk_group")

# Other names of a family's keys
ALIASES: dict[str, dict[str, str]] = {
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    **{family: {"num_experts": "num_local_experts"} for family in ("mixtral", "qwen3_moe", "gpt_oss")},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "granitemoehybrid": {"layers_block_type": "layer_types"},
    "nemotron_h": {"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"},
    "deepseek_v3": {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    "kimi_linear": {
        "model_max_length": "max_position_embeddings",
        "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
        "num_local_experts": "num_experts",
        "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts",
    },
}


def _sizes(layers: int, width: int, heads: int, ffn: int, vocabulary: int, positions: int) -> Json:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


def _tower(layers: int, width: int, heads: int, ffn: int) -> Json:
    return {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, "intermediate_size": ffn}


LLAMA: Json = {"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 1e4}
LLAMA |= _sizes(32, 4096, 32, 11008, 32000, 2048)
MISTRAL: Json = LLAMA | {"intermediate_size": 14336, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
QWEN2: Json = LLAMA | _sizes(32, 4096, 32, 22016, 151_936, 32_768) | {"num_key_value_heads": 32}
QWEN2 |= {"sliding_window": 4096, "max_window_layers": 28}
QWEN2_VL_TEXT = QWEN2 | _sizes(80, 8192, 64, 29_568, 152_064, 32_768)
QWEN2_VL_TEXT |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80}
GEMMA2: Json = _sizes(26, 2304, 8, 9216, 256_000, 8192) | {
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 2,  # every n-th layer has no window
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
# Of both DeepSeek families
LATENT: Json = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
LATENT |= {"v_head_dim": 128}
DEEPSEEK_V3: Json = LLAMA | _sizes(61, 7168, 128, 18432, 129_280, 4096) | LATENT
DEEPSEEK_V3 |= {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
LINEAR_ATTENTION: Json = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
LINEAR_ATTENTION |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4}
LINEAR_ATTENTION |= {"head_dim": 256, "partial_rotary_factor": 0.25}
QWEN3_5: Json = LLAMA | LINEAR_ATTENTION | {"num_attention_heads": 16, "vocab_size": 248_320}
QWEN3_5 |= {"max_position_embeddings": 32_768, "mtp_num_hidden_layers": 0}
del QWEN3_5["intermediate_size"]
# Of Granite 4.0-H, Bamba and Falcon-H1
MAMBA2: Json = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256}
MAMBA2 |= {"mamba_d_conv": 4, "mamba_expand": 2}
BAMBA: Json = LLAMA | _sizes(32, 4096, 32, 14336, 128_000, 8192) | MAMBA2
BAMBA |= {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}

DEFAULTS: dict[str, Json] = {
    "t5": {
        **{"vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6},
        **{"num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
        **{"layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True},
    },
    "gpt2": {
        **{"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
        **{"layer_norm_epsilon": 1e-5, "activation_function": "gelu_new", "tie_word_embeddings": True},
    },
    "llama": LLAMA,
    "mistral": MISTRAL | {"sliding_window": 4096},
    "mixtral": MISTRAL | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": QWEN2,
    "qwen3": QWEN2 | {"head_dim": 128},
    "qwen3_moe": LLAMA
    | _sizes(24, 2048, 32, 6144, 151_936, 32_768)
    | {"num_key_value_heads": 4, "sliding_window": 4096, "num_local_experts": 128, "num_experts_per_tok": 8}
    | {"moe_intermediate_size": 768},
    "qwen3_next": LLAMA
    | _sizes(48, 2048, 16, 5632, 151_936, 32_768)
    | LINEAR_ATTENTION
    | {"num_key_value_heads": 2, "decoder_sparse_step": 1, "num_experts": 512}
    | {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    | {"norm_topk_prob": True, "num_nextn_predict_layers": 1},
    "qwen3_5_text": QWEN3_5
    | {"num_hidden_layers": 32, "hidden_size": 4096, "num_key_value_heads": 4}
    | {"intermediate_size": 12288},
    "qwen3_5_moe_text": QWEN3_5
    | {"num_hidden_layers": 40, "hidden_size": 2048, "num_key_value_heads": 2}
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512},
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2
    | {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6, "sliding_window_pattern": 6}
    | {"final_logit_softcapping": None, "attn_logit_softcapping": None},
    "llava": {"image_token_index": 32_000, "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
    "gemma3": {"image_token_index": 262_144, "mm_tokens_per_image": 256},
    "qwen2_vl": {"image_token_id": 151_655},
    "qwen2_vl_text": QWEN2_VL_TEXT,
    "qwen2_5_vl": {"image_token_id": 151_655},
    "qwen2_5_vl_text": QWEN2_VL_TEXT,
    "qwen3_vl": {"image_token_id": 151_655},
    "qwen3_vl_text": QWEN2
    | _sizes(32, 4096, 32, 22_016, 151_936, 128_000)
    | {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500_000.0, "attention_bias": False},
    # Of vision_config
    "clip_vision_model": _tower(12, 768, 12, 3072)
    | {"image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu"}
    | {"layer_norm_eps": 1e-5},
    "siglip_vision_model": _tower(12, 768, 12, 3072)
    | {"image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    "qwen2_vl_vision": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "num_heads": 16}
    | {"hidden_act": "quick_gelu", "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2},
    "qwen2_5_vl_vision": {"depth": 32, "hidden_size": 3584, "num_heads": 16, "intermediate_size": 3420}
    | {"hidden_act": "silu", "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 112}
    | {"fullatt_block_indexes": [7, 15, 23, 31]},
    "qwen3_vl_vision": {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304}
    | {"hidden_act": "gelu_pytorch_tanh", "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    | {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
    "phi3": LLAMA
    | _sizes(32, 3072, 32, 8192, 32_064, 4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "olmo2": LLAMA | {"vocab_size": 50_304, "rms_norm_eps": 1e-5},
    "nemotron": _sizes(32, 6144, 48, 24_576, 256_000, 4096)
    | {"tie_word_embeddings": False, "norm_eps": 1e-5, "hidden_act": "relu2", "rope_theta": 1e4}
    | {"partial_rotary_factor": 0.5},
    "nemotron_h": {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 21_504, "vocab_size": 131_072}
    | {"max_position_embeddings": 4096}
    | {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5}
    | {"mlp_hidden_act": "relu2", "hybrid_override_pattern": "ME*-", "mamba_num_heads": 128, "mamba_head_dim": 64}
    | {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, "time_step_min": 0.001, "n_routed_experts": 8}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688}
    | {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": LLAMA
    | MAMBA2
    | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    "bamba": BAMBA | {"max_position_embeddings": 262_144, "partial_rotary_factor": 0.5},
    "falcon_h1": BAMBA
    | {"max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True},
    "mamba2": {"num_hidden_layers": 64, "hidden_size": 4096, "vocab_size": 32_768, "tie_word_embeddings": False}
    | {"layer_norm_epsilon": 1e-5, "hidden_act": "silu", "expand": 2, "num_heads": 128, "head_dim": 64}
    | {"n_groups": 8, "state_size": 128, "conv_kernel": 4},
    "modernbert": _sizes(22, 768, 12, 1152, 50_368, 8192)
    | {"norm_eps": 1e-5, "norm_bias": False, "attention_bias": False, "mlp_bias": False, "decoder_bias": True}
    | {"classifier_bias": False, "classifier_activation": "gelu", "hidden_activation": "gelu"}
    | {"local_attention": 128, "global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0}
    | {"local_rope_theta": 1e4, "tie_word_embeddings": True},
    "smollm3": LLAMA
    | _sizes(36, 2048, 16, 11008, 128_256, 32_768)
    | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6, "no_rope_layer_interval": 4},
    "deepseek_v2": LLAMA
    | LATENT
    | {"vocab_size": 102_400, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    | {"first_k_dense_replace": 0, "topk_method": "greedy"},
    "deepseek_v3": DEEPSEEK_V3,
    "kimi_k2": DEEPSEEK_V3,
    "kimi_linear": LLAMA
    | LATENT
    | _sizes(27, 2304, 32, 9216, 163_840, 1_048_576)
    | {"q_lora_rank": None, "num_key_value_heads": 32, "rms_norm_eps": 1e-5}
    | {"num_experts": 256, "num_experts_per_token": 8, "moe_intermediate_size": 1024, "num_shared_experts": 1}
    | {"first_k_dense_replace": 1, "num_expert_group": 1, "topk_group": 1, "moe_renormalize": True}
    | {"routed_scaling_factor": 2.446, "linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4},
    "gpt_oss": LLAMA
    | _sizes(36, 2880, 64, 2880, 201_088, 131_072)
    | {"head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0}
    | {"num_local_experts": 128, "num_experts_per_tok": 4},
}
