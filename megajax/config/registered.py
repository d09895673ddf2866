"""The settings of a registered class: those of its `Settings`, checked with a sentence."""

from typing import Any

from pydantic import ValidationError

from megajax.config.sentences import fail, listed
from megajax.schema.config import Config
from megajax.schema.tree import show


def settings_of(config: Config, registered: type[Any], section: str) -> Any:
    """`SECTION.settings` as the `Settings` of the `registered` class. Raises ConfigError for a wrong one."""
    chosen: Any = config
    for name in section.split("."):
        chosen = getattr(chosen, name)
    key = f"{section}.settings"
    try:
        return registered.Settings.model_validate(dict(chosen.settings))
    except ValidationError as error:
        mistake = error.errors(include_url=False)[0]
    name = ".".join(map(str, mistake["loc"]))
    known = [*registered.Settings.model_fields]
    own = f"it has {listed(known, 'and')}" if known else "it has none"
    if mistake["type"] == "extra_forbidden":
        fail(config, f"{key}.{name} is no setting of {registered.__name__}", own, f"{key}.{name}", key)
    if mistake["type"] == "missing":
        fail(config, f"{key}.{name} is not set", "add it", f"{section}.kind")
    problem = f"{key}.{name}={show(mistake['input'])} is wrong: {mistake['msg'][:1].lower()}{mistake['msg'][1:]}"
    fail(config, problem, "correct it", f"{key}.{name}", key)
