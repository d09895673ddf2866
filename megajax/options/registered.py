"""What modules of `run.extensions` register by the name that a key of the config has.

The classes of objectives and encoders need jax, so that this module does not import them: `register_objective` and
`register_encoder` put them here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.options.registry import Registry

# The objectives of `objective.kind` that need no registration
NEXT_TOKEN, MASKED_TOKENS = OWN_OBJECTIVES = "next_token", "masked_tokens"
OBJECTIVES: dict[str, type[Any]] = {}  # for `objective.kind`
ENCODER_KIND, NO_ENCODER = "model.encoder.kind", "none"
ENCODERS: dict[str, type[Any]] = {}  # for ENCODER_KIND


def replaces_head(objective: str) -> bool:
    """Whether an objective has parameters of its own in place of the model's head (`step.objective.Hidden`)."""
    return getattr(OBJECTIVES.get(objective), "REPLACES_HEAD", False)


def own_metrics(objective: str) -> tuple[str, ...]:
    """The names of the numbers that an objective gives beside its loss (`step.objective_bases.Objective.METRICS`)."""
    return getattr(OBJECTIVES.get(objective), "METRICS", ())


def taken_together(objective: str) -> int | None:
    """How many segments have one loss, such as 2 of a pair (`Segment.TOGETHER`); None for an objective of tokens."""
    return getattr(OBJECTIVES.get(objective), "TOGETHER", None)


@dataclass(frozen=True)
class HookOption:
    """A hook by its name in `run.hooks`."""

    name: str
    # For each Trainer: a subclass of `megajax.Hook`, or a function that makes one. If it has a class `Settings`, it is
    # given those of `run.hook_settings`.
    make: Callable[..., Any]


HOOKS = Registry[HookOption]("hook")


def register_hook(name: str, make: Callable[..., Any]) -> None:
    """Register a hook for `run.hooks`, before the config is loaded. Raises ConfigError for a name that is taken."""
    HOOKS.add(HookOption(name, make))
