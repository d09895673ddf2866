"""Checks of the section `checkpoint`."""

import math
import re

from megajax.config.sentences import fail, format_keys, warn
from megajax.files import is_url
from megajax.schema.config import Config


def check_checkpoints(config: Config) -> None:
    """Raise `ConfigError` for checkpoints, or folders made of them, that could not be written as asked."""
    _check_directory(config)
    _check_best(config)


def _check_directory(config: Config) -> None:
    directory, key = config.checkpoint.dir, "checkpoint.dir"
    if directory is not None and is_url(directory) and not re.fullmatch(r"(gs|s3)://[^/]+(/[^/]+)+/?", directory):
        problem = f"{format_keys(config, key)} is a URL, but not of the form gs://BUCKET/FOLDER or s3://BUCKET/FOLDER"
        cure = "give one, or a directory, such as a bucket of another store that is mounted (docs/checkpoints.md)"
        fail(config, problem, cure, key)


def warn_about_kept_checkpoints(config: Config) -> None:
    """Warn if `checkpoint.keep_every` misses most checkpoints."""
    interval, kept = config.run.checkpoint_interval, config.checkpoint.keep_every
    if interval and kept and kept % interval:
        keys = ("checkpoint.keep_every", "run.checkpoint_interval")
        problem = f"{format_keys(config, keys[0])} is not a multiple of {format_keys(config, keys[1])}"
        problem += f", so only steps that are a multiple of {math.lcm(interval, kept)} are both saved and kept"
        warn(config, problem, f"use a multiple of {interval}", *keys)


def _check_best(config: Config) -> None:
    """The best checkpoints are those with the best evaluations, so each needs an evaluation at its step."""
    key, run, by = "checkpoint.keep_best", config.run, "checkpoint.best_by"
    if not re.fullmatch(r"(lowest|highest) \S+", config.checkpoint.best_by):
        problem = f"{format_keys(config, by)} is not lowest or highest and the name of a number in metrics.jsonl"
        fail(config, problem, "write it as in lowest eval_loss or highest eval_accuracy", by)
    if config.checkpoint.keep_best is None:
        return
    keys = "run.checkpoint_interval", "run.eval_interval"
    if not run.checkpoint_interval or not run.eval_interval or run.checkpoint_interval % run.eval_interval:
        problem = f"{format_keys(config, key)} needs an evaluation at each checkpoint, but {format_keys(config, *keys)}"
        cure = f"set both intervals, {keys[0]} to a multiple of {keys[1]}, or remove {key}"
        fail(config, problem, cure, key, *keys)
