"""Checks for mixtures of experts: the router's settings, the mesh, and settings that exclude experts."""

from megajax.config.sentences import at_most, counted, divisors, fail, format_keys, listed, value
from megajax.layout.kinds import expert_layers
from megajax.schema.config import Config
from megajax.schema.model import ModelConfig, RouterConfig

# Keys that only models with experts read.
EXPERT_KEYS = (
    "model.first_dense_layers",
    "model.moe_layer_interval",
    "model.experts_per_token",
    "model.expert_ffn_hidden_size",
    "model.shared_expert_ffn_hidden_size",
    "model.shared_expert_gate",
    "mesh.experts_over",
    *(f"model.router.{name}" for name in RouterConfig.model_fields),
)
REMOVE = "remove one of them"


def check_experts(config: Config) -> None:
    """Raise `ConfigError` for settings of experts that can run on no mesh."""
    model = config.model
    if model.num_experts is None:
        _check_dense(config)
        return
    if model.experts_per_token > model.num_experts:
        keys = ("model.experts_per_token", "model.num_experts")
        problem = f"{format_keys(config, keys[0])} is more than {format_keys(config, keys[1])}"
        fail(config, problem, f"use {at_most(model.num_experts)}", *keys)
    if model.block_pattern:
        for key in ("model.first_dense_layers", "model.moe_layer_interval"):
            if value(config, key) != ModelConfig.model_fields[key.removeprefix("model.")].default:
                keys = (key, "model.block_pattern")
                fail(
                    config,
                    f"{format_keys(config, key)} cannot be combined with {format_keys(config, keys[1])}",
                    REMOVE,
                    *keys,
                )
        if not expert_layers(model):
            keys = ("model.block_pattern", "model.num_experts")
            problem = f"{format_keys(config, keys[0])} has no layer with the experts of {format_keys(config, keys[1])}"
            fail(config, problem, "add moe to it, or set model.num_experts=null", *keys)
    if not expert_layers(model):
        keys = ("model.first_dense_layers", "model.moe_layer_interval")
        problem = (
            f"{format_keys(config, *keys)} leave no layer of {format_keys(config, 'model.num_layers')} with experts"
        )
        fail(config, problem, "lower them, or set model.num_experts=null", *keys, "model.num_experts")
    _check_groups(config, model)
    _check_router(config, model.router)
    _check_with_others(config)


def _check_dense(config: Config) -> None:
    if expert_layers(config.model):
        problem = f"{format_keys(config, 'model.block_pattern')} has layers with experts"
        fail(config, problem, "set model.num_experts", "model.block_pattern")
    for key in EXPERT_KEYS:
        section, name = key.rsplit(".", 1)
        if value(config, key) not in (None, type(value(config, section)).model_fields[name].default):
            fail(config, f"{format_keys(config, key)} needs experts", "set model.num_experts, or remove it", key)


def _check_groups(config: Config, model: ModelConfig) -> None:
    groups, chosen, experts = "model.router.num_groups", "model.router.groups_per_token", model.num_experts or 0
    router = model.router
    if experts % router.num_groups:
        problem = f"{format_keys(config, groups)} does not divide {format_keys(config, 'model.num_experts')}"
        chosen_number, each = router.groups_per_token, model.experts_per_token
        usable = [n for n in divisors(experts) if chosen_number <= n and experts // n * chosen_number >= each]
        fail(config, problem, f"use {listed(usable or divisors(experts))}", groups, "model.num_experts")
    if router.groups_per_token > router.num_groups:
        problem = f"{format_keys(config, chosen)} is more than {format_keys(config, groups)}"
        least = -(-model.experts_per_token * router.num_groups // experts)
        fail(config, problem, f"use {listed(range(least, router.num_groups + 1))}", chosen, groups)
    reachable = experts // router.num_groups * router.groups_per_token
    if model.experts_per_token > reachable:
        keys = ("model.experts_per_token", chosen, groups)
        problem = f"{format_keys(config, keys[0])} is more than the {counted(reachable, 'expert')} in"
        problem += f" {format_keys(config, chosen)} of {format_keys(config, groups)}"
        fail(config, problem, "raise model.router.groups_per_token", *keys)


def _check_router(config: Config, router: RouterConfig) -> None:
    name = "model.router."
    if router.score_function == "sigmoid" and router.pre_softmax:
        keys = (f"{name}pre_softmax", f"{name}score_function")
        problem = f"{format_keys(config, keys[0])} cannot be combined with {format_keys(config, keys[1])}"
        fail(config, problem, f"set {name}pre_softmax=false", *keys)
    over_chosen = router.score_function == "softmax" and not router.pre_softmax
    for key, senseless, why in (
        (
            "model.experts_per_token",
            config.model.experts_per_token == 1,
            "the softmax of one score is 1 and has no gradient",
        ),
        (f"{name}normalise", not router.normalise, "the softmax over the chosen experts is normalised already"),
    ):
        if over_chosen and senseless:
            other = format_keys(config, f"{name}pre_softmax")
            problem = f"{format_keys(config, key)} cannot be combined with {other}, because {why}"
            # With Sinkhorn's choice the weight of one expert is a sigmoid in Megatron-LM.
            cure = "score_function=sigmoid" if router.sinkhorn else "pre_softmax=true"
            fail(config, problem, f"set {name}{cure}", key, f"{name}pre_softmax")
    for first, second, both in (
        ("sinkhorn", "expert_bias", router.sinkhorn and router.expert_bias),
        ("sinkhorn", "num_groups", router.sinkhorn and router.num_groups > 1),
        ("force_balance", "sinkhorn", router.force_balance and router.sinkhorn),
        ("force_balance", "expert_bias", router.force_balance and router.expert_bias),
    ):
        if both:
            keys = (f"{name}{first}", f"{name}{second}")
            problem = f"{format_keys(config, keys[0])} cannot be combined with {format_keys(config, keys[1])}"
            fail(config, problem, REMOVE, *keys)
    if router.drop_policy != "probability" and router.capacity_factor is None:
        key = f"{name}drop_policy"
        problem = f"{format_keys(config, key)} needs an expert capacity"
        fail(config, problem, f"set {name}capacity_factor, or remove it", key)


def _check_with_others(config: Config) -> None:
    model = config.model
    experts = format_keys(config, "model.num_experts")
    if config.precision.fp8.backend != "xla":
        key = "precision.fp8.backend"
        problem = f"{format_keys(config, key)} cannot be combined with {experts}"
        fail(config, problem, "set precision.fp8.backend=xla", key, "model.num_experts")
    if model.mlp_bias and model.shared_expert_ffn_hidden_size:
        keys = ("model.mlp_bias", "model.shared_expert_ffn_hidden_size")
        problem = f"{format_keys(config, keys[0])} cannot be combined with {format_keys(config, keys[1])}"
        fail(config, problem, "set model.mlp_bias=false", *keys)
    if model.shared_expert_gate and not model.shared_expert_ffn_hidden_size:
        key = "model.shared_expert_gate"
        problem = f"{format_keys(config, key)} needs a shared expert"
        fail(config, problem, "set model.shared_expert_ffn_hidden_size", key)
