"""Sentences about mistakes in a config: problem, location and correction; keys and values as in an override."""

import math
import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from megajax.errors import ConfigError, shown
from megajax.schema.config import Config
from megajax.schema.fields import Section
from megajax.schema.tree import COMMAND_LINE, as_override, show


def require_config(config: Any) -> None:
    """Raise ConfigError for what is no config, such as the path of one."""
    if not isinstance(config, Config):
        problem = f"{shown(config)} is of the type {type(config).__name__}, not a config"
        raise ConfigError(f"{problem}: give megajax.load_config(PATH).")


def value(config: Config, key: str) -> Any:
    """The value of the dotted `key`."""
    return operator.attrgetter(key)(config)


def format_keys(config: Config, *keys: str) -> str:
    """`key=value`, several joined by "and"."""
    return " and ".join(f"{key}={show(_plain(value(config, key)))}" for key in keys)


def located(config: Config, key: str) -> str:
    """`key=value (location)`, with the whole value."""
    return f"{key}={as_override(_plain(value(config, key)))} ({config.where(key)})"


def _plain(found: Any) -> Any:
    """Sections, also those in a list, as the keys that were set in them; other values unchanged."""
    if isinstance(found, tuple):
        return [_plain(each) for each in found]
    return found.model_dump(mode="json", exclude_unset=True) if isinstance(found, Section) else found


def fail(config: Config, problem: str, cure: str, *keys: str) -> NoReturn:
    """Raise `problem (location): cure.` with the location of the first of `keys` that is set."""
    raise ConfigError(f"{problem} ({location(config, *keys)}): {cure}.")


def warn(config: Config, problem: str, cure: str, *keys: str) -> None:
    """Warn with a sentence like `fail`'s; for a `_warn_...` function that `check` calls for `load_config`."""
    warnings.warn(f"{problem} ({location(config, *keys)}): {cure}.", stacklevel=6)  # `file_reader` is one of them


def location(config: Config, *keys: str) -> str:
    """The location of the first of `keys` that is set, overrides first; those of others elsewhere after their names."""
    places = {key: where for key in keys if (where := config.where(key)) != "default"}
    if not places:
        return "default"
    first = min(places, key=lambda key: not _is_override(places[key]))
    in_files: dict[str, list[str]] = {}
    for key, where in places.items():
        if _is_override(places[first]) and not _is_override(where):
            in_files.setdefault(where, []).append(key)
    return "; ".join([places[first], *(f"{listed(keys, 'and')}: {where}" for where, keys in in_files.items())])


def _is_override(where: str) -> bool:
    return where.startswith(COMMAND_LINE)


def listed(items: Iterable[Any], word: str = "or", most: int = 12) -> str:
    """ "1, 2 or 4"; for more than `most` items the first ones and "..."."""
    shown = [str(item) for item in items]
    if len(shown) > most:
        return f"{', '.join(shown[:most])}, ..."
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} {word} {shown[-1]}"


def at_most(number: int) -> str:
    """The range of counts from 1 to `number`, in words."""
    return "1" if number == 1 else f"{number} or less"


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in order; the loop ends at its square root."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def mesh_name(sizes: Mapping[str, int]) -> str:
    """The axes above 1, such as "data 2 × tensor 4"."""
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one device"


def format_axis(config: Config, sizes: dict[str, int], axis: str) -> str:
    """`mesh.axis=size`, with a note if the size comes from -1."""
    return f"mesh.{axis}={sizes[axis]}" + (" (from -1)" if getattr(config.mesh, axis) == -1 else "")
