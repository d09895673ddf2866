"""Differences between a config and the defaults, and between two configs."""

from typing import Any

import yaml

from megajax.schema.config import Config
from megajax.schema.tree import Dumper, show

REQUIRED: tuple[tuple[str, ...], ...] = (
    ("model", "num_layers"),
    ("model", "hidden_size"),
    ("model", "num_heads"),
    ("model", "vocab_size"),
    ("batch", "global_size"),
    ("batch", "sequence_length"),
)


def from_defaults(config: Config) -> str:
    """The shortest YAML that loads to an equal config: keys without a default, or with another value."""
    wanted = config.model_dump(mode="json")
    chosen: dict[tuple[str, ...], Any] = {path: _at(wanted, path) for path in REQUIRED}
    # A key may change the defaults of others, so keys are added one at a time, and unnecessary ones are removed.
    while differing := _differences(wanted, _resolved(chosen)):
        chosen[differing[0][0]] = differing[0][1]
    for path in [path for path in chosen if path not in REQUIRED]:
        fewer = {other: value for other, value in chosen.items() if other != path}
        if _resolved(fewer) == wanted:
            chosen = fewer
    ordered = sorted(chosen.items(), key=lambda item: _order(wanted, item[0]))
    return yaml.dump(_nested(dict(ordered)), Dumper=Dumper, sort_keys=False, width=10**6)


def between(one: Config, other: Config, name: str, other_name: str) -> str:
    """A table of the keys with different values in two configs."""
    rows = [
        (".".join(path), show(mine), show(theirs))
        for path, mine, theirs in _differences(one.model_dump(mode="json"), other.model_dump(mode="json"))
    ]
    if not rows:
        return f"{name} and {other_name} resolve to the same config.\n"
    rows.insert(0, ("key", name, other_name))
    first, second = (max(len(row[column]) for row in rows) + 2 for column in (0, 1))
    return "".join(f"{key:{first}}{mine:{second}}{theirs}\n" for key, mine, theirs in rows)


def _differences(one: Any, other: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any, Any]]:
    """(path, value in `one`, value in `other`) wherever they differ, in order."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [found for key in one for found in _differences(one[key], other[key], (*path, key))]
    return [] if one == other else [(path, one, other)]


def _resolved(chosen: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    return Config.model_validate(_nested(chosen)).model_dump(mode="json")


def _nested(chosen: dict[tuple[str, ...], Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in chosen.items():
        below = tree
        for key in path[:-1]:
            below = below.setdefault(key, {})
        below[path[-1]] = value
    return tree


def _at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _order(tree: Any, path: tuple[str, ...]) -> list[int]:
    """The position of `path` in `tree`, as a sort key."""
    positions = []
    for key in path:
        positions.append(list(tree).index(key))
        tree = tree[key]
    return positions
