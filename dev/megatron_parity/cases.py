"""The compared models: megajax's section `model` and Megatron's TransformerConfig side by side.

A case with a `row` has one formula that differs: the row of docs/migration.md. `proof_` cases change only that formula
and must be equal.
"""

import math
from dataclasses import replace
from typing import Any

from megatron_parity.case import ROPE, Case, Rate

L, D, N, K, H, F = 2, 64, 4, 2, 16, 96
LLAMA = {"num_layers": L, "hidden_size": D, "num_heads": N, "num_kv_heads": K, "ffn_hidden_size": F}
LLAMA_MG = {
    **{"num_layers": L, "hidden_size": D, "num_attention_heads": N, "num_query_groups": K, "kv_channels": H},
    **{"ffn_hidden_size": F, "gated_linear_unit": True, "activation": "silu", "normalization": "RMSNorm"},
    **{"layernorm_epsilon": 1e-5, "add_bias_linear": False},
}
GPT = {
    **{"num_layers": L, "hidden_size": D, "num_heads": N, "ffn_hidden_size": 4 * D, "norm": "layernorm"},
    **{"activation": "gelu", "position": "learned", "attention_bias": True, "mlp_bias": True, "tie_embeddings": True},
}
GPT_MG = {
    **{"num_layers": L, "hidden_size": D, "num_attention_heads": N, "ffn_hidden_size": 4 * D, "activation": "gelu"},
    **{"normalization": "LayerNorm", "layernorm_epsilon": 1e-5, "add_bias_linear": True},
    "bias_activation_fusion": True,
}
LEARNED = {"position_embedding_type": "learned_absolute", "share_embeddings_and_output_weights": True}
E, FE = 8, 48
MOE = {**LLAMA, "num_experts": E, "expert_ffn_hidden_size": FE, "experts_per_token": 2}
MOE_MG = {
    **LLAMA_MG,
    **{"num_moe_experts": E, "moe_ffn_hidden_size": FE, "moe_router_topk": 2, "moe_grouped_gemm": False},
    **{"moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32"},
}
V3_ROUTER = {
    **{"score_function": "sigmoid", "scaling_factor": 2.5, "num_groups": 4, "groups_per_token": 2},
    **{"expert_bias": True, "bias_update_rate": 0.01},
}
V3 = {
    **MOE,
    **{"num_layers": 3, "num_experts": 16, "first_dense_layers": 1, "experts_per_token": 4},
    **{"shared_expert_ffn_hidden_size": FE, "router": V3_ROUTER},
}
V3_MG = {
    **MOE_MG,
    **{"num_layers": 3, "num_moe_experts": 16, "moe_layer_freq": [0, 1, 1], "moe_router_topk": 4},
    **{"moe_shared_expert_intermediate_size": FE, "moe_router_score_function": "sigmoid"},
    **{"moe_router_topk_scaling_factor": 2.5, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
    **{"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0.01},
    **{"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0},
}
YARN = {"kind": "yarn", "factor": 4.0, "original_max_positions": 16, "mscale": 1.0, "mscale_all_dim": 0.5}
LATENT = {
    **{"num_heads": N, "norm_epsilon": 1e-6, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 16},
    **{"qk_rope_head_dim": 8, "v_head_dim": 12, "rope_scaling": YARN},
}
LATENT_MG = {
    **{"multi_latent_attention": True, "layernorm_epsilon": 1e-6, "kv_lora_rank": 24, "q_lora_rank": 32},
    **{"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12, "rope_type": "yarn", "rotary_base": 10000},
    **{"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 0.5},
    **{"beta_fast": 32, "beta_slow": 1, "qk_layernorm": True},
}


def without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


MLA, UNGROUPED = {**without(LLAMA, "num_kv_heads"), **LATENT}, ("num_query_groups", "kv_channels")
MLA_MG, ROPE_OF_MLA = {**without(LLAMA_MG, *UNGROUPED), **LATENT_MG}, without(ROPE, "rotary_base")
MTP, MTP_MG = (
    {"mtp_layers": 1, "mtp_loss_weight": 0.3},
    {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.3},
)
PACKED = {"data": {"reset_attention": True, "reset_positions": True, "mask_end_of_document_loss": True}}
SLOW = Rate(highest=4e-3, lowest=4e-4)  # rounding grows more slowly, so no token of equal runs is at a tie
SLOWER = Rate(highest=2e-3, lowest=2e-4)
FAST = Rate(highest=0.5, lowest=0.05)  # of SGD


def llama(model: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case({**LLAMA, **(model or {})}, {**LLAMA_MG, **(config or {})}, **settings)


def gpt(model: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case({**GPT, **(model or {})}, {**GPT_MG, **(config or {})}, gpt=LEARNED, **settings)


def moe(
    router: dict[str, Any],
    config: dict[str, Any],
    model: dict[str, Any] | None = None,
    loss: tuple[str, float] | None = None,
    **settings: Any,
) -> Case:
    """Mixtral; `loss` is Megatron's type and weight of the balancing loss."""
    kind, weight = loss or ("none", 0.0)
    balancing = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": weight}
    ours = {**MOE, "router": router, **(model or {})}
    return Case(ours, {**MOE_MG, **balancing, **config}, **{"rate": SLOW, **settings})


def v3(
    router: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **settings: Any,
) -> Case:
    ours = {**V3, "router": {**V3_ROUTER, **(router or {})}, **(model or {})}
    return Case(ours, {**V3_MG, **(config or {})}, **{"rate": SLOW, **settings})


def mla(model: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **settings: Any) -> Case:
    return Case({**MLA, **(model or {})}, {**MLA_MG, **(config or {})}, gpt=ROPE_OF_MLA, **settings)


def wsd(style: str) -> Case:
    return llama(rate=Rate("wsd", tail=15, style=style))


AUX, SEQUENCE = ("aux_loss", 0.02), ("seq_aux_loss", 0.02)
SEQUENCE_MG = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.02}
MIXTRAL = moe({"global_loss": 0.02, "z_loss": 0.003}, {"moe_z_loss_coeff": 0.003}, loss=AUX)
DROPS = {"moe_expert_capacity_factor": 1.0, "moe_token_drop_policy": "probs"}
TOP_1 = {"moe_router_topk": 1, "moe_router_load_balancing_type": "sinkhorn"}
SINKHORN = {"sinkhorn": True, "score_function": "sigmoid"}
NO_GROUPS = ("num_groups", "groups_per_token", "expert_bias", "bias_update_rate")
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.0}
ONE_MSCALE = {**without(YARN, "mscale_all_dim"), "mscale": 0.707}
ATTENTION_FACTOR = {
    **without(YARN, "mscale", "mscale_all_dim"),
    "attention_factor": 0.1 * 0.707 * math.log(4) + 1,
}
BIASES = {"attention_bias": True, "mlp_bias": True, "attention_sinks": True}
DP2: dict[str, Any] = {"ranks": 2, "devices": 2}
MEANS = {"objective": {"average": "microbatches"}}

SHORT = Rate(highest=4e-3, lowest=4e-4, warmup=2, decay=8)
# A few steps of these are stored for the tests: what most models need, in few programs
STORED: dict[str, Case] = {
    "stored_gpt": gpt(rate=replace(SHORT, kind="wsd", tail=4, style="exponential"), steps=6),
    "stored_mixtral": moe(  # a dense layer and one of experts
        {"global_loss": 0.02, "z_loss": 0.003},
        {"moe_z_loss_coeff": 0.003, "moe_layer_freq": [0, 1]},
        {"first_dense_layers": 1},
        loss=AUX,
        rate=SHORT,
        steps=6,
        mask="random",
        per_token=False,
        sections=MEANS,
    ),
    "stored_v3": Case(
        {
            **{**without(V3, "num_kv_heads"), **LATENT, **MTP, "num_layers": 2},
            "router": {**V3_ROUTER, "sequence_loss": 0.02, "loss_counts": "top_scores"},
        },
        {
            **{**without(V3_MG, *UNGROUPED), **LATENT_MG, **MTP_MG, **SEQUENCE_MG},
            **{"num_layers": 2, "moe_layer_freq": [0, 1]},
        },
        ROPE_OF_MLA,
        rate=SHORT,
        steps=6,
        mask="last target is 0",
    ),
}
CASES: dict[str, Case] = {
    **STORED,
    # Llama: RMSNorm, SwiGLU, grouped queries, rotary positions
    "llama": llama(),
    "llama_microbatch_mean": llama(per_token=False),
    "llama_delayed_rate": llama(aligned=False, sections={"schedule": {"delay_steps": 1}}),
    "llama_other_rate": llama(aligned=False, row="rate-step"),
    "llama_vocab_padding": llama(vocab=100, padded=128, row="vocabulary-padding"),
    "proof_vocab_multiple": llama(vocab=100),
    "qkv_bias": llama({"attention_bias": "qkv"}, {"add_qkv_bias": True}),
    "qk_norm": llama({"qk_norm": True}, {"qk_layernorm": True}),
    "window": llama({"sliding_window": 9}, {"window_size": (8, 0)}),
    "window_pattern": llama(
        {"num_layers": 4, "sliding_window": 9, "layer_pattern": ["local", "global"]},
        {"num_layers": 4, "window_size": (8, 0), "window_attn_skip_freq": 2},
        rate=SLOW,
    ),
    "partial_rope": llama({"rope_fraction": 0.5}, gpt={**ROPE, "rotary_percent": 0.5}),
    "llama3_rope": llama(
        {"rope_scaling": {"factor": 8}}, gpt={**ROPE, "rope_scaling": True, "rope_scaling_factor": 8.0}
    ),
    "no_rope_freq": llama(
        {"num_layers": 4, "rope_pattern": ["rope", "none"]}, {"num_layers": 4, "no_rope_freq": 2}, rate=SLOW
    ),
    "clamped_swiglu": llama(
        {"activation": "clamped_swiglu"},
        {"activation": "quick_gelu", "activation_func_clamp_value": 7.0, "glu_linear_offset": 1.0},
    ),
    # GPT: learned positions, LayerNorm, GELU, biases, tied embeddings
    "gpt": gpt(),
    "gpt_documents": gpt(mask="documents", sections=PACKED),
    "gpt_unfused_gelu": gpt({"activation": "gelu_exact"}, {"bias_activation_fusion": False}),
    "gpt_qk_norm": gpt({"qk_norm": "layernorm"}, {"qk_layernorm": True}),
    "relu2": gpt({"activation": "relu2"}, {"activation": "relu2", "bias_activation_fusion": False}),
    # Loss masks and documents
    "mask_per_token": llama(mask="random"),
    "mask_microbatch_mean": llama(mask="random", per_token=False, sections=MEANS),
    "mask_other_mean": llama(mask="random", per_token=False, row="loss-mean"),
    "proof_other_mean": llama(mask="half", per_token=False),
    "documents": llama(mask="documents", sections=PACKED),
    # Schedules and optimizers
    "linear": llama(rate=Rate("linear")),
    "inverse_sqrt": llama(rate=Rate("inverse_sqrt")),
    "wsd_linear": wsd("linear"),
    "wsd_exponential": wsd("exponential"),
    "wsd_cosine": wsd("cosine"),
    "wsd_minus_sqrt": wsd("minus_sqrt"),
    "sgd": llama(rate=FAST, sections={"optimizer": {"kind": "sgd"}}, row="sgd-decay"),
    "sgd_no_decay": llama(rate=FAST, sections={"optimizer": {"kind": "sgd", "weight_decay": 0.0}}),
    # Mixtral: top-2 of softmax, balancing loss, z-loss
    "mixtral": MIXTRAL,
    "mixtral_microbatch_mean": replace(MIXTRAL, per_token=False),
    "mixtral_sequence_loss": moe({"sequence_loss": 0.02}, {}, loss=SEQUENCE),
    "mixtral_global_aux_loss": moe({"global_loss": 0.02}, {}, loss=("global_aux_loss", 0.02), row="global-aux-loss"),
    "proof_global_aux_loss": moe({"global_loss": 0.02}, {}, loss=("global_aux_loss", 0.02), micro=8),
    "mixtral_pre_softmax": moe(
        {"pre_softmax": True, "normalise": False, "global_loss": 0.02}, {"moe_router_pre_softmax": True}, loss=AUX
    ),
    "mixtral_normalised_pre_softmax": moe(
        {"pre_softmax": True, "global_loss": 0.02}, {"moe_router_pre_softmax": True}, loss=AUX, row="pre-softmax"
    ),
    "mixtral_mask_per_token": replace(MIXTRAL, mask="random", row="masked-router-losses"),
    "mixtral_mask_microbatch_mean": replace(MIXTRAL, mask="random", per_token=False, sections=MEANS),
    "proof_mixtral_mask": moe(
        {"global_loss": 0.04, "z_loss": 0.006}, {"moe_z_loss_coeff": 0.003}, loss=AUX, mask="half"
    ),
    "proof_mixtral_mask_microbatch_mean": replace(MIXTRAL, mask="half", per_token=False),
    "biases_sinks": moe(
        {"logit_bias": True, "global_loss": 0.02},
        {"add_bias_linear": True, "softmax_type": "learnable"},
        BIASES,
        loss=AUX,
    ),
    "shared_gate": moe(
        {"global_loss": 0.02},
        {"moe_shared_expert_intermediate_size": FE, "moe_shared_expert_gate": True},
        {"shared_expert_ffn_hidden_size": FE, "shared_expert_gate": True},
        loss=AUX,
    ),
    "capacity": moe({"global_loss": 0.02, "capacity_factor": 1.0}, DROPS, loss=AUX, row="capacity"),
    "proof_capacity": moe(
        {"global_loss": 0.02, "capacity_factor": 1.0}, DROPS, loss=AUX, patches=("rounded priorities",), rate=SLOWER
    ),
    "sinkhorn": moe(SINKHORN, TOP_1, {"experts_per_token": 1}, row="sinkhorn-balance"),
    "proof_sinkhorn": moe(SINKHORN, TOP_1, {"experts_per_token": 1}, patches=("20 iterations of Sinkhorn",)),
    "sinkhorn_softmax": moe({"sinkhorn": True, "pre_softmax": True}, TOP_1, {"experts_per_token": 1}, row="sinkhorn"),
    # DeepSeek-V3's router: sigmoid, groups, bias update, shared expert
    "v3": v3(),
    "v3_sequence_loss": v3({"sequence_loss": 0.02, "loss_counts": "top_scores"}, SEQUENCE_MG),
    "v3_chosen_counts": v3({"sequence_loss": 0.02}, SEQUENCE_MG, row="loss-counts"),
    "proof_v3_chosen_counts": v3({"sequence_loss": 0.02}, SEQUENCE_MG, patches=("counts of chosen experts",)),
    "v3_no_groups_no_bias_sequence_loss": Case(
        {**V3, "router": {**without(V3_ROUTER, *NO_GROUPS), "sequence_loss": 0.02}},
        {
            **without(V3_MG, "moe_router_num_groups", "moe_router_group_topk"),
            **SEQUENCE_MG,
            "moe_router_enable_expert_bias": False,
        },
        rate=SLOWER,
    ),
    "capacity_expert_bias": v3({"capacity_factor": 1.0}, DROPS, row="capacity"),
    "proof_capacity_expert_bias": v3(
        {"capacity_factor": 1.0}, DROPS, steps=2, patches=("rounded priorities", "bias of chosen experts")
    ),
    # Latent attention, with YaRN
    "mla": mla(),
    "mla_no_q_lora": Case(
        without(MLA, "q_lora_rank"), {**MLA_MG, "q_lora_rank": None, "qk_layernorm": False}, gpt=ROPE_OF_MLA
    ),
    "mla_epsilon_1e-5": mla({"norm_epsilon": 1e-5}, {"layernorm_epsilon": 1e-5}, row="latent-norms"),
    "mla_mscale_only": mla(
        {"rope_scaling": {**without(YARN, "mscale_all_dim"), "mscale": 0.707}}, MSCALE, row="mscale"
    ),
    "proof_mla_mscale": mla({"rope_scaling": ATTENTION_FACTOR}, MSCALE),
    "v3_mla": Case(
        {**without(V3, "num_kv_heads"), **LATENT}, {**without(V3_MG, *UNGROUPED), **LATENT_MG}, ROPE_OF_MLA, rate=SLOW
    ),
    # Multi-token prediction
    "mtp": llama(MTP, MTP_MG),
    "mtp2": llama({**MTP, "mtp_layers": 2}, {**MTP_MG, "mtp_num_layers": 2}),
    "mtp_microbatch_mean": llama(MTP, MTP_MG, per_token=False),
    "mtp_mask": llama(MTP, MTP_MG, mask="random", row="mtp-mask"),
    "mtp_mask_microbatch_mean": llama(MTP, MTP_MG, mask="random", per_token=False, sections=MEANS),
    "proof_mtp_mask": llama(MTP, MTP_MG, mask="half"),
    "mtp_documents": llama(MTP, MTP_MG, mask="documents", sections=PACKED, row="mtp-mask"),
    "mtp_moe": v3({}, MTP_MG, MTP, row="mtp-mask"),
    "proof_mtp_moe": v3({}, MTP_MG, MTP, mask="last target is 0"),
    # Two data-parallel ranks
    "dp2": llama(per_token=False, **DP2),
    "dp2_distributed_optimizer": llama(distributed_optimizer=True, **DP2),
    "dp2_mask": llama(mask="random", **DP2),
    "dp2_mask_microbatch_mean": llama(mask="random", per_token=False, sections=MEANS, **DP2),
    "dp2_mask_other_mean": llama(mask="random", per_token=False, row="loss-mean", **DP2),
    "dp2_mixtral": replace(MIXTRAL, row="aux-loss", **DP2),
    "proof_dp2_mixtral": replace(MIXTRAL, ranks=2),
    "dp2_v3": v3(**DP2),
}
