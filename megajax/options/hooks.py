"""The hooks that `run.hooks` may name: those that modules of `run.extensions` register."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.options.registry import Registry


@dataclass(frozen=True)
class HookOption:
    """A hook by its name in `run.hooks`."""

    name: str
    make: Callable[[], Any]  # for each Trainer one: a subclass of `megajax.Hook`, or a function that makes one


HOOKS = Registry[HookOption]("hook")


def register_hook(name: str, make: Callable[[], Any]) -> None:
    """Register a hook for `run.hooks`, before the config is loaded. Raises ConfigError for a name that is taken."""
    HOOKS.add(HookOption(name, make))
