"""Checks of the section `checkpoint`."""

import math
import re

from megajax.config.sentences import fail, format_keys, warn
from megajax.schema.config import Config
from megajax.schema.data import is_remote


def check_checkpoints(config: Config) -> None:
    """Raise `ConfigError` for checkpoints, or folders made of them, that could not be written as asked."""
    _check_directory(config)
    _check_exports(config)
    _check_local_checkpoints(config)
    _check_best(config)


def _check_directory(config: Config) -> None:
    directory, key = config.checkpoint.dir, "checkpoint.dir"
    if directory is not None and is_remote(directory) and not re.fullmatch(r"(gs|s3)://[^/]+(/[^/]+)+/?", directory):
        problem = f"{format_keys(config, key)} is a URL, but not of the form gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"
        cure = "give one, or a directory, such as a bucket of another store that is mounted (docs/checkpoints.md)"
        fail(config, problem, cure, key)


def _check_exports(config: Config) -> None:
    every, interval = config.checkpoint.export_hf.every, config.run.checkpoint_interval
    if config.checkpoint.export_hf.dir is not None and every and (not interval or every % interval):
        keys = ("checkpoint.export_hf.every", "run.checkpoint_interval")
        problem = f"{format_keys(config, keys[0])} is not a multiple of {format_keys(config, keys[1])}"
        problem += ", but a folder is written from a checkpoint"
        cure = f"set {keys[1]}={every}" + (f", or use a multiple of {interval}" if interval else "")
        fail(config, problem, cure, *keys)


def _check_local_checkpoints(config: Config) -> None:
    checkpoint, keys = config.checkpoint, ("checkpoint.local_dir", "checkpoint.local_interval")
    if checkpoint.local_dir is None:
        return
    if checkpoint.local_interval is None:
        fail(config, f"{format_keys(config, keys[0])} needs {keys[1]}", f"set {keys[1]} to a number of steps", keys[0])
    if not checkpoint.save_optimizer:
        optimizer = "checkpoint.save_optimizer"
        problem = f"{format_keys(config, keys[0])} is to resume from, which {format_keys(config, optimizer)} excludes"
        fail(config, problem, "remove one of them", keys[0], optimizer)
    durable = "run.checkpoint_interval"
    if config.run.checkpoint_interval and checkpoint.local_interval >= config.run.checkpoint_interval:
        problem = f"{format_keys(config, keys[1])} is not less than {format_keys(config, durable)}"
        fail(config, problem, "use a smaller interval, or remove checkpoint.local_dir", keys[1], durable)


def warn_about_kept_checkpoints(config: Config) -> None:
    """Warn if `checkpoint.keep_every` misses most checkpoints."""
    interval, kept = config.run.checkpoint_interval, config.checkpoint.keep_every
    if interval and kept and kept % interval:
        keys = ("checkpoint.keep_every", "run.checkpoint_interval")
        problem = f"{format_keys(config, keys[0])} is not a multiple of {format_keys(config, keys[1])}"
        problem += f", so only steps that are a multiple of {math.lcm(interval, kept)} are both saved and kept"
        warn(config, problem, f"use a multiple of {interval}", *keys)


def _check_best(config: Config) -> None:
    """The best checkpoints are those with the lowest evaluation loss, so each needs an evaluation at its step."""
    key, run = "checkpoint.keep_best", config.run
    if config.checkpoint.keep_best is None:
        return
    if not run.eval_steps:
        problem = f"{format_keys(config, key)} needs evaluations, but {format_keys(config, 'run.eval_steps')}"
        fail(config, problem, f"set run.eval_steps above 0, or remove {key}", key, "run.eval_steps")
    keys = "run.checkpoint_interval", "run.eval_interval"
    if not run.checkpoint_interval or not run.eval_interval or run.checkpoint_interval % run.eval_interval:
        problem = f"{format_keys(config, key)} needs an evaluation at each checkpoint, but {format_keys(config, *keys)}"
        cure = f"set both intervals, {keys[0]} to a multiple of {keys[1]}, or remove {key}"
        fail(config, problem, cure, key, *keys)
