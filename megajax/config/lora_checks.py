"""Checks of low-rank adapters: the base model, and settings that exclude them."""

from megajax.config.sentences import fail, format_keys
from megajax.schema.config import Config


def check_lora(config: Config) -> None:
    """Raise `ConfigError` for settings that `lora.rank` excludes. `model.lora.targets` checks the targets."""
    rank, base = "lora.rank", "checkpoint.init_from"
    if config.lora.rank is None:
        return
    if config.checkpoint.init_from is None:
        problem = f"{format_keys(config, rank)} freezes the weights of a trained model, but {base} names none"
        fail(config, problem, f"set {base} to a run or to a Hugging Face folder", rank)
    if config.precision.fp8.chosen.is_on:
        recipe = "precision.fp8.recipe"
        problem = f"{format_keys(config, rank)} cannot be combined with {format_keys(config, recipe)}"
        fail(config, problem, f"set {recipe}=none", rank, recipe)
    if config.model.mtp_layers:
        modules = "model.mtp_layers"
        problem = f"{format_keys(config, rank)} trains adapters of the model's layers only, but"
        problem += f" {format_keys(config, modules)} adds prediction modules"
        fail(config, problem, f"set {modules}=0; the base may have modules", rank, modules)
    router = config.model.router
    if router.expert_bias and router.bias_update_rate > 0:
        rate = "model.router.bias_update_rate"
        problem = f"{format_keys(config, rank)} freezes the routers, but {format_keys(config, rate)} changes their bias"
        fail(config, problem, f"set {rate}=0", rank, rate)
