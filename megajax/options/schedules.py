"""Learning rate schedules: what each reads of the section `schedule`; `optim/schedule.py` has the rates."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megajax.errors import ConfigError
from megajax.options.registry import Registry

LOWEST, DECAY, TAIL = "min_learning_rate", "decay_steps", "wsd_decay_steps"  # keys that some schedules read
STYLE = "wsd_decay_style"


@dataclass(frozen=True)
class LearningRateSchedule:
    """The shape of the learning rate after the warm-up, by its declarations."""

    name: str  # for `schedule.kind`
    reads: tuple[str, ...] = (LOWEST, DECAY)  # keys besides learning_rate and warmup_steps
    lowest: float = 0.1  # the default of min_learning_rate, as a part of learning_rate
    # Of an extension: section `schedule` → (steps after the warm-up → learning rate), in jax. If it has a class
    # `Settings`, it is given those of `schedule.settings` too.
    rate: Callable[..., Callable[[Any], Any]] | None = None


COSINE = LearningRateSchedule("cosine")
SCHEDULES = Registry(
    "schedule",
    LearningRateSchedule("constant", reads=()),
    LearningRateSchedule("linear"),
    COSINE,
    LearningRateSchedule("wsd", reads=(LOWEST, DECAY, TAIL, STYLE)),
    LearningRateSchedule("inverse_sqrt", reads=(LOWEST,), lowest=0.0),
)


def register_schedule(schedule: LearningRateSchedule) -> None:
    """Register a schedule for `schedule.kind`; before the config is loaded.

    Raises ConfigError for a name that another schedule has, for one without `rate`, and for unknown keys in `reads`.
    """
    if schedule.rate is None:
        raise ConfigError(f"the schedule {schedule.name} has no function `rate`: give one.")
    if unknown := sorted({*schedule.reads} - {LOWEST, DECAY, TAIL}):
        raise ConfigError(f"the schedule {schedule.name} reads {unknown[0]}: use {LOWEST}, {DECAY} and {TAIL}.")
    SCHEDULES.add(schedule)
