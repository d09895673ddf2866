"""Checks of a run's name and length; with `run.epochs` the number of steps follows once the data is open."""

from pathlib import Path

from megajax.config.sentences import fail, format_keys, value
from megajax.files import is_url
from megajax.schema.config import Config
from megajax.schema.data import sources_of
from megajax.schema.fields import UNKNOWN_STEPS


def check_one_length(config: Config) -> None:
    """Raise `ConfigError` if both `run.steps` and `run.epochs` are set; the record of a run has both."""
    if config.run.epochs is not None and config.run.steps != UNKNOWN_STEPS:
        keys = ("run.epochs", "run.steps")
        fail(config, f"{format_keys(config, *keys)} both set the length", "remove one, or set it to null", *keys)


def check_name(config: Config) -> None:
    """Raise `ConfigError` for a `run.name` that is no name of a folder, if the run directory follows from it."""
    name, follows = config.run.name, "dir" not in config.run.model_fields_set
    if follows and (Path(name).name != name or name == ".." or not name.isprintable()):
        problem = f"{format_keys(config, 'run.name')} is no name of a folder in runs/"
        cure = "write it without / and control characters, or set run.dir, which may be any directory"
        fail(config, problem, cure, "run.name")


def check_directories(config: Config) -> None:
    """Raise `ConfigError` for a URL where a directory must be: a folder `s3:` would be made in the current one."""
    keys = ("run.dir", "run.compilation_cache", "checkpoint.local_dir", "checkpoint.export_hf.dir", "data.index_cache")
    for key in keys:
        path = value(config, key)
        if path is not None and is_url(path):
            cure = f"write {path.removeprefix('file://')}" if path.startswith("file:///") else "give a directory"
            cure += "; only checkpoints can be in a bucket: checkpoint.dir" * (key == "run.dir")
            fail(config, f"{format_keys(config, key)} is a URL, but must be a directory", cure, key)


def check_epochs(config: Config) -> None:
    """Raise `ConfigError` for data of several sources that has no number of passes."""
    weights = [weight for _, weight in sources_of(config.data.train or "")]
    if config.run.epochs is not None and len(weights) > 1 and None not in weights:
        problem = f"{format_keys(config, 'run.epochs')} counts passes over data.train, but the weights of its"
        problem += f" {len(weights)} sources give each another number of them"
        cure = "set run.steps instead, or give each source weight: null (its size), as the list [a, b] does"
        fail(config, problem, cure, "run.epochs", "data.train")
