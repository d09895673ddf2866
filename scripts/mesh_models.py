"""The small models of the mesh tables and of the tests of parallelism."""

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


def uneven_weights(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights of UNEVEN with which every token chooses the first expert, and none the last three."""
    router, bias = "blocks.moe.moe.router", "blocks.moe.moe.norm_bias"
    slopes = np.array([0.3, 0, 0, 0, 0, -0.3, -0.3, -0.3], np.float32)
    return {**weights, router: weights[router] + slopes, bias: weights[bias] + 1}
