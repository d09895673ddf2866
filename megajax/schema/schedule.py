"""The keys of the section `schedule`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from megajax.options.schedules import COSINE, DECAY, LOWEST, SCHEDULES, STYLE, TAIL, LearningRateSchedule
from megajax.schema.fields import CountOrZero, Positive, PositiveOrZero, Registered, Steps, derived
from megajax.schema.rules import AtMost, Needs, ReadIf


def _reads(key: str) -> ReadIf:
    return ReadIf("kind", lambda kind: key in SCHEDULES[kind].reads)


def lowest_rate(kind: str, learning_rate: float) -> float:
    """The default of `schedule.min_learning_rate`: above 0, so that the last step of a decay is not lost."""
    return float(f"{learning_rate * SCHEDULES[kind].lowest:.6g}")


class ScheduleConfig(Registered):
    """The learning rate over the steps."""

    kind: Annotated[str, SCHEDULES] = Field(
        default=COSINE.name,
        description="Shape after the warm-up; wsd: constant, then a final decay; or one registered by run.extensions.",
    )
    settings: Annotated[
        dict[str, Any], Needs("kind", lambda kind: SCHEDULES[kind].rate is not None, what="a registered schedule")
    ] = Field(default={}, description="Settings of a registered schedule, by name.")
    learning_rate: Positive = Field(default=3e-4, description="Highest learning rate.")
    min_learning_rate: Annotated[PositiveOrZero, _reads(LOWEST), AtMost("learning_rate")] = derived(
        lambda schedule: lowest_rate(schedule["kind"], schedule["learning_rate"]),
        "a tenth of learning_rate; 0 for inverse_sqrt",
        "Learning rate at the end of the decay; with 0 the step decay_steps changes nothing.",
    )
    warmup_steps: Annotated[CountOrZero, AtMost("decay_steps")] = Field(
        default=0, description="Steps of linear warm-up; the first step has learning_rate / warmup_steps."
    )
    delay_steps: CountOrZero = Field(
        default=0,
        description="Step t has the schedule's rate of step t - delay_steps; 1: as in Megatron-LM, whose first step of"
        " a warm-up has rate 0.",
    )
    decay_steps: Annotated[Steps, _reads(DECAY)] = derived(  # filled in by Config, which sees the run
        lambda schedule: None,
        "run.steps, at least warmup_steps + 1",
        "Step at which the learning rate reaches min_learning_rate.",
    )
    wsd_decay_steps: Annotated[Steps | None, _reads(TAIL)] = Field(
        default=None,
        description="wsd: number of steps of the final decay.",
        json_schema_extra={"derived": "a tenth of decay_steps if kind is wsd"},
    )

    wsd_decay_style: Annotated[Literal["linear", "exponential", "cosine", "minus_sqrt"], _reads(STYLE)] = Field(
        default="linear",
        description="wsd: shape of the final decay, of its share r from learning_rate to min_learning_rate. linear:"
        " 1 - r; exponential: 2 * 0.5^r - 1; cosine: (1 + cos(pi * r)) / 2; minus_sqrt: 1 - sqrt(r).",
    )

    @property
    def chosen(self) -> LearningRateSchedule:
        """The declarations of the schedule."""
        return SCHEDULES[self.kind]
