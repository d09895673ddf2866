"""Experts and their router."""

from megajax.schema.fields import shortest_pattern
from megajax.tools.from_megatron.model import by_layer
from megajax.tools.from_megatron.translation import Translation

LOSSES = {"aux_loss": "global_loss", "global_aux_loss": "global_loss", "seq_aux_loss": "sequence_loss"}
ROUTER = "model.router."


def translate_experts(t: Translation, replicas: int) -> None:
    """The keys of MoE layers; none without experts."""
    if not t["num_experts"]:
        t.use("num_experts")
        return
    t.put("model.num_experts", t["num_experts"], "num_experts")
    t.put("model.experts_per_token", t["moe_router_topk"], "moe_router_topk")
    width = t["moe_ffn_hidden_size"]
    if width is None:
        width = t.settings["model.ffn_hidden_size"].value
    t.put("model.expert_ffn_hidden_size", width, "moe_ffn_hidden_size", note="Megatron's default: --ffn-hidden-size")
    if t["moe_shared_expert_intermediate_size"]:
        t.put(
            "model.shared_expert_ffn_hidden_size",
            t["moe_shared_expert_intermediate_size"],
            "moe_shared_expert_intermediate_size",
        )
        if t["moe_shared_expert_gate"]:
            t.put("model.shared_expert_gate", True, "moe_shared_expert_gate")
    _layers(t)
    _scores(t)
    _losses(t, replicas)
    _capacity(t)
    if t["add_bias_linear"]:
        t.put(f"{ROUTER}logit_bias", True, "add_bias_linear")
        t.differs("router-bias", "add_bias_linear")
    _exchanges(t)


def _exchanges(t: Translation) -> None:
    """How tokens go to experts on other devices."""
    t.use("moe_token_dispatcher_type")
    axes = t.settings["mesh.experts_over"].value if "mesh.experts_over" in t.settings else ["expert"]
    if not any(t.settings[f"mesh.{axis}"].value > 1 for axis in axes if f"mesh.{axis}" in t.settings):
        return
    if t.given("moe_token_dispatcher_type"):
        gathers = t["moe_token_dispatcher_type"] == "allgather"
        t.put("communication.experts", "all_gather" if gathers else "all_to_all", "moe_token_dispatcher_type")
    in_pairs = t.settings["batch.num_microbatches"].value % 2 == 0 and "batch.schedule" not in t.settings
    if t["overlap_moe_expert_parallel_comm"] and t["pipeline_model_parallel_size"] == 1 and in_pairs:
        t.put("communication.overlap_experts", True, "overlap_moe_expert_parallel_comm")


def _layers(t: Translation) -> None:
    """Which layers have experts; a frequency n means the first of n layers."""
    found = by_layer(t, "moe_layer_freq", lambda i, n: i == 0) or []
    kinds = tuple("moe" if number else "dense" for number in found)
    first = kinds.index("moe") if "moe" in kinds else len(kinds)
    if "dense" not in kinds[first:]:
        t.put("model.first_dense_layers", first, "moe_layer_freq")
    else:
        t.put("model.block_pattern", list(shortest_pattern(kinds, len(kinds))), "moe_layer_freq")
    if "dense" not in kinds and t["moe_ffn_hidden_size"] not in (None, t.settings["model.ffn_hidden_size"].value):
        del t.settings["model.ffn_hidden_size"]  # which no layer has


def _scores(t: Translation) -> None:
    top, function = t["moe_router_topk"], t["moe_router_score_function"]
    pre = t["moe_router_pre_softmax"]
    t.use("moe_router_pre_softmax")
    if function == "sqrtsoftplus":
        t.refuse("scores are softmax or sigmoid", "moe_router_score_function")
        return
    kinds = t["moe_router_load_balancing_type"]
    if kinds == ["sinkhorn"]:  # Megatron's scores are then sigmoid for one expert, softmax for several
        t.put(f"{ROUTER}sinkhorn", True, "moe_router_load_balancing_type")
        t.differs("sinkhorn-balance", "moe_router_load_balancing_type")
        function = "sigmoid" if top == 1 else "softmax"
        pre = function == "softmax"
    t.put(f"{ROUTER}score_function", function, "moe_router_score_function")
    if function == "softmax":
        if top == 1 and not pre:
            t.refuse("the softmax of one score is 1: add --moe-router-pre-softmax", "moe_router_topk")
        t.put(f"{ROUTER}pre_softmax", pre, "moe_router_pre_softmax")
    # Scores before the choice are not divided by their sum again, and one sigmoid never.
    raw = (function == "softmax" and pre) or (function == "sigmoid" and top == 1)
    t.put(f"{ROUTER}normalise", not raw, "moe_router_pre_softmax", "moe_router_score_function")
    if t["moe_router_topk_scaling_factor"]:
        t.put(f"{ROUTER}scaling_factor", t["moe_router_topk_scaling_factor"], "moe_router_topk_scaling_factor")
    if t["moe_router_num_groups"]:
        t.put(f"{ROUTER}num_groups", t["moe_router_num_groups"], "moe_router_num_groups")
        t.put(f"{ROUTER}groups_per_token", t.arguments.required("moe_router_group_topk"), "moe_router_group_topk")
    if t["moe_router_dtype"] == "fp64":
        t.refuse("routers compute in FP32", "moe_router_dtype")
    if t["moe_input_jitter_eps"]:
        t.put(f"{ROUTER}jitter", t["moe_input_jitter_eps"], "moe_input_jitter_eps")
    if t["moe_router_force_load_balancing"]:
        t.put(f"{ROUTER}force_balance", True, "moe_router_force_load_balancing")
    if t["moe_router_enable_expert_bias"]:
        t.put(f"{ROUTER}expert_bias", True, "moe_router_enable_expert_bias")
        t.put(f"{ROUTER}bias_update_rate", t["moe_router_bias_update_rate"], "moe_router_bias_update_rate")


def _losses(t: Translation, replicas: int) -> None:
    """The balancing losses with their weights, and the z-loss."""
    kinds, texts = t["moe_router_load_balancing_type"], t["moe_aux_loss_coeff"]
    names = ("moe_aux_loss_coeff", "moe_router_load_balancing_type")
    t.use(*names)
    try:
        weights = [float(text) for text in texts]
    except ValueError:
        raise t.arguments.fail(f"{t.arguments.shown('moe_aux_loss_coeff')} has no numbers", "correct it") from None
    weights = weights * len(kinds) if len(weights) == 1 else weights
    if len(weights) != len(kinds):
        problem = (
            f"{t.arguments.shown('moe_router_load_balancing_type')} has {len(kinds)} kinds, but {len(weights)} weights"
        )
        raise t.arguments.fail(problem, "give each one weight")
    sums: dict[str, float] = {}
    for kind, weight in zip(kinds, weights, strict=True):
        if kind not in (*LOSSES, "sinkhorn", "none"):
            t.refuse("losses are aux_loss, seq_aux_loss or sinkhorn", "moe_router_load_balancing_type")
        elif weight and kind in LOSSES:
            sums[LOSSES[kind]] = sums.get(LOSSES[kind], 0.0) + weight
            if kind == "global_aux_loss":
                t.differs("global-aux-loss", names[1])
            elif kind == "aux_loss" and replicas > 1:
                t.differs("aux-loss", names[0])
    if t["moe_z_loss_coeff"]:
        sums["z_loss"] = t["moe_z_loss_coeff"]
    for key, weight in sums.items():
        t.put(f"{ROUTER}{key}", weight, *(("moe_z_loss_coeff",) if key == "z_loss" else names))
    balanced = sums.keys() - {"z_loss"}
    if balanced and (t["moe_router_enable_expert_bias"] or t["moe_router_num_groups"]):
        t.put(f"{ROUTER}loss_counts", "top_scores", "moe_router_enable_expert_bias", "moe_router_num_groups")
    if sums and t["eod_mask_loss"] and t["calculate_per_token_loss"]:
        t.differs("masked-router-losses", "eod_mask_loss")


def _capacity(t: Translation) -> None:
    factor = t["moe_expert_capacity_factor"]
    t.use("moe_token_drop_policy", "moe_expert_capacity_factor")
    if factor is None or factor < 0:
        return
    t.put(f"{ROUTER}capacity_factor", factor, "moe_expert_capacity_factor")
    policy = {"probs": "probability", "position": "position"}[t["moe_token_drop_policy"]]
    t.put(f"{ROUTER}drop_policy", policy, "moe_token_drop_policy")
    t.differs("capacity", "moe_expert_capacity_factor")
