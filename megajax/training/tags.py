"""The names of logged numbers in TensorBoard, W&B, MLflow and Prometheus: a group, and the name in metrics.jsonl.

metrics.jsonl keeps its own names, which are fixed.
"""

# group: the names of its numbers, without what follows a slash (a layer, a parameter, an evaluation set)
GROUPS = {
    "throughput": (
        *("step_seconds", "tokens_per_second_per_device", "tflops_per_second_per_device", "mfu"),
        *("slowest_process", "slowest_own_seconds", "others_own_seconds", "attention_imbalance"),
    ),
    "memory": ("peak_memory_gib",),
    "moe": (
        *("aux_loss", "global_loss", "sequence_loss", "router_z_loss", "router_entropy"),
        *("expert_load_max", "idle_experts_max", "dropped_tokens_max", "dropped_tokens_mean"),
    ),
    "rollback": ("rollback", "bad_step", "bad_loss", "loss_median", "left_out_samples"),
    "norms": ("grad_norm", "weight_norm", "update_ratio"),  # by parameter or layer; that of all is in "train"
}
# prefix of a name: the prefix of its tag
PREFIXES = {"eval_": "eval/", "ema_eval_": "eval/ema_", "checkpoint_": "checkpoint/"}
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def tag(name: str) -> str:
    """The tag of a number of metrics.jsonl; numbers that no table names are in the group "train"."""
    for prefix, of_tag in PREFIXES.items():
        if name.startswith(prefix):
            return of_tag + name.removeprefix(prefix)
    whole, slash, _ = name.partition("/")
    group = _GROUP_OF.get(whole, "train")
    return f"{'train' if group == 'norms' and not slash else group}/{name}"
