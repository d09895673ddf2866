"""Checks of `run.epochs`, whose number of steps follows once the data is open."""

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
