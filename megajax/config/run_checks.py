"""Checks of a run's length (with `run.epochs` the number of steps follows once the data is open) and of rollbacks."""

from megajax.config.sentences import fail, format_keys
from megajax.schema.config import Config
from megajax.schema.data import sources_of
from megajax.schema.fields import UNKNOWN_STEPS


def check_one_length(config: Config) -> None:
    """Raise `ConfigError` if both `run.steps` and `run.epochs` are set; the record of a run has both."""
    if config.run.epochs is not None and config.run.steps != UNKNOWN_STEPS:
        keys = ("run.epochs", "run.steps")
        fail(config, f"{format_keys(config, *keys)} both set the length", "remove one, or set it to null", *keys)


def check_epochs(config: Config) -> None:
    """Raise `ConfigError` for data that has no number of passes."""
    data, key, cure = config.data, "run.epochs", "set run.steps instead"
    if config.run.epochs is None:
        return
    counts = f"{format_keys(config, key)} counts passes over data.train"
    if data.kind == "synthetic":
        fail(config, f"{counts}, but {format_keys(config, 'data.kind')} has no end", cure, key, "data.kind")
    if data.order == "megatron":
        order = "data.order"
        problem = f"{counts}, but {format_keys(config, order)} is made for a number of samples"
        fail(config, problem, f"{cure}, or use shuffled or sequential", key, order)
    if data.stages:
        fail(config, f"{counts}, but data.stages reads others", f"{cure}, or remove the stages", key, "data.stages")
    weights = [weight for _, weight in sources_of(data.train or "")]
    if len(weights) > 1 and None not in weights:
        problem = f"{counts}, but the weights of its {len(weights)} sources give each another number of them"
        cure += ", or give each source weight: null (its size), as the list [a, b] does"
        fail(config, problem, cure, key, "data.train")


def check_rollbacks(config: Config) -> None:
    """Raise `ConfigError` for settings with which a run cannot go back to a checkpoint and leave out batches."""
    key, data = "run.max_rollbacks", config.data
    if not config.run.max_rollbacks:
        return
    off = f"or set {key}=0"
    if not config.run.checkpoint_interval:
        problem = f"{format_keys(config, key)} needs checkpoints, but {format_keys(config, 'run.checkpoint_interval')}"
        fail(config, problem, f"set run.checkpoint_interval, {off}", key, "run.checkpoint_interval")
    if not config.checkpoint.save_optimizer:
        name = "checkpoint.save_optimizer"
        problem = f"{format_keys(config, key)} needs checkpoints with optimizer state, but {format_keys(config, name)}"
        fail(config, problem, f"remove {name}, {off}", key, name)
    if data.kind != "synthetic" and data.order == "megatron":
        problem = f"{format_keys(config, key)} leaves out batches, but {format_keys(config, 'data.order')} is made for"
        fail(config, f"{problem} a fixed number of samples", f"use shuffled or sequential, {off}", key, "data.order")
    if data.kind != "synthetic" and data.stages:
        problem = f"{format_keys(config, key)} leaves out batches, but the stages of data.stages begin at fixed samples"
        fail(config, problem, f"remove the stages, {off}", key, "data.stages")
