"""Checks of `run.max_rollbacks`."""

from megajax.config.sentences import fail, format_keys
from megajax.schema.config import Config


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
