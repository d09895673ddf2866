"""The registered objectives and the checks of the section `objective`.

It does not import the objectives, which need jax: `step.objective.register` puts them here.
"""

from typing import Any

from megajax.config.registered import settings_of
from megajax.config.schema import Config
from megajax.config.sentences import fail, format_keys, listed

NEXT_TOKEN = "next_token"
OBJECTIVES: dict[str, type[Any]] = {}  # the registered classes


def check_objective(config: Config) -> None:
    """Raise ConfigError for an unknown objective, wrong settings, and settings that only another objective reads."""
    kind, key = config.objective.kind, "objective.kind"
    if kind == NEXT_TOKEN:
        if config.objective.settings:
            problem = f"{format_keys(config, 'objective.settings')} with {format_keys(config, key)}, which has none"
            fail(config, problem, "remove them, or set objective.kind", "objective.settings", key)
        return
    if kind not in OBJECTIVES:
        known = listed([NEXT_TOKEN, *sorted(OBJECTIVES)])
        cure = f"use {known}, or name the module that registers it in run.extensions"
        fail(config, f"{format_keys(config, key)} is not a registered objective", cure, key)
    settings_of(config, OBJECTIVES[kind], "objective")
    for other in ("objective.label_smoothing", "model.z_loss"):
        section, _, name = other.partition(".")
        if getattr(getattr(config, section), name):
            problem = f"{format_keys(config, other)} belongs to next_token, but {format_keys(config, key)}"
            fail(config, problem, f"remove {other}", other, key)
