"""Checks for mixtures of experts: layers, groups and scores."""

from megajax.config.fitting import microbatches_cure
from megajax.config.sentences import divisors, fail, format_axis, format_keys, listed, warn
from megajax.errors import counted
from megajax.layout.kinds import BUILT_IN_BLOCKS, expert_layers, layer_kinds
from megajax.schema.config import Config
from megajax.schema.layer_sections import RouterConfig
from megajax.schema.model import ModelConfig


def check_experts(config: Config) -> None:
    """Raise `ConfigError` for settings of experts that can run on no mesh."""
    model = config.model
    if model.num_experts is None:
        if expert_layers(model):
            problem = f"{format_keys(config, 'model.block_pattern')} has layers with experts"
            fail(config, problem, "set model.num_experts", "model.block_pattern")
        return
    if model.block_pattern and not expert_layers(model):
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


def check_upcycling(config: Config) -> None:
    """Raise `ConfigError` if experts of `checkpoint.upcycle` cannot be copies of an MLP."""
    model, key = config.model, "checkpoint.upcycle"
    if not config.checkpoint.upcycle:
        return
    copies = f"{format_keys(config, key)} copies MLPs as they are"
    widths = ("model.expert_ffn_hidden_size", "model.ffn_hidden_size")
    if model.expert_ffn_hidden_size != model.ffn_hidden_size:
        problem = f"{copies}, but {format_keys(config, *widths)} differ"
        fail(config, problem, "set both to the width of the dense model's MLP", *widths, key)
    kinds = (kind for kind in layer_kinds(model) if kind.has_experts and kind.block not in BUILT_IN_BLOCKS)
    if kind := next(kinds, None):
        pattern = "model.block_pattern"
        problem = f"{copies}, and not to the experts of {kind.block} in {format_keys(config, pattern)}"
        fail(config, problem, f"use moe there, or set {key}=false", pattern, key)


def warn_about_upcycling(config: Config) -> None:
    """Warn if the first output of the experts of `checkpoint.upcycle` is not that of the MLP."""
    key, model, router = "checkpoint.upcycle", config.model, config.model.router
    sums = "the weights of a token's experts do not add up to 1"
    for other, value, differs, why in (
        ("model.experts_per_token", 2, model.experts_per_token == 1, sums),
        ("model.router.normalise", "true", not router.normalise, sums),
        ("model.router.scaling_factor", 1, router.scaling_factor != 1, sums),
        ("model.router.capacity_factor", "null", router.capacity_factor is not None, "experts drop tokens"),
    ):
        if config.checkpoint.upcycle and differs:
            problem = f"{format_keys(config, key, other)} begin with another loss than the dense model's, since {why}"
            warn(config, problem, f"set {other}={value} to begin with its loss", other, key)


def check_overlap(config: Config, sizes: dict[str, int]) -> None:
    """`communication.overlap_experts` needs experts on other devices, and pairs of microbatches."""
    key, batch = "communication.overlap_experts", config.batch
    if not config.communication.overlap_experts:
        return
    setting, off = format_keys(config, key), f"set {key}=false"
    if config.model.num_experts is None:
        problem = f"{setting} overlaps exchanges with experts, and the model has none"
        fail(config, problem, f"{off}, or set model.num_experts", key, "model.num_experts")
    if config.expert_shards(sizes) == 1:
        problem = f"{setting} overlaps exchanges with experts on other devices, and a device has all experts itself"
        fail(config, problem, f"set mesh.expert to 2 or more, or {off}", key, "mesh.expert")
    if sizes["pipeline"] > 1:
        problem = f"{setting} pairs microbatches, which {format_axis(config, sizes, 'pipeline')} runs one by one"
        fail(config, problem, f"set mesh.pipeline=1, or {off}", key, "mesh.pipeline")
    microbatch = batch.global_size // batch.num_microbatches
    at_once = config.communication.microbatches_at_once
    for size in (size for _, size in batch.sizes_by_tokens if size // microbatch % at_once):
        problem = f"{setting} pairs microbatches, and steps of {counted(size, 'sequence')} have an odd number,"
        problem += f" {size // microbatch}, of them"
        fail(config, problem, f"{microbatches_cure(config, sizes)}, or {off}", key, "batch.num_microbatches")


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
