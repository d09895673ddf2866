"""The sentences about a config: problem, place and cure, with keys written as an override has them."""

import functools
import warnings
from typing import Any, NoReturn

from megajax.config.schema import Config
from megajax.config.tree import show
from megajax.errors import ConfigError


def value(config: Config, key: str) -> Any:
    """The value of the dotted `key`."""
    return functools.reduce(getattr, key.split("."), config)


def said(config: Config, *keys: str) -> str:
    """`key=value`, several joined by "and"."""
    return " and ".join(f"{key}={show(value(config, key))}" for key in keys)


def refuse(config: Config, problem: str, cure: str, *keys: str) -> NoReturn:
    """Raise `problem (place): cure.` with the place of the first of `keys` that someone set."""
    raise ConfigError(f"{problem} ({place(config, *keys)}): {cure}.")


def warn(config: Config, problem: str, cure: str, *keys: str) -> None:
    """Warn with a sentence like `refuse`'s; for a `_warn_...` function that `check` calls for `load_config`."""
    warnings.warn(f"{problem} ({place(config, *keys)}): {cure}.", stacklevel=5)


def place(config: Config, *keys: str) -> str:
    """Where the first of `keys` that someone set was set."""
    return next((where for where in map(config.where, keys) if where != "default"), "default")


def listed(numbers: list[int]) -> str:
    """At most 12 numbers: "1, 2 or 4"."""
    shown = [str(number) for number in numbers[:12]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def said_axis(config: Config, sizes: dict[str, int], axis: str) -> str:
    """`mesh.axis=size`, saying where the size was filled in."""
    return f"mesh.{axis}={sizes[axis]}" + (" (filled up)" if getattr(config.mesh, axis) == -1 else "")
