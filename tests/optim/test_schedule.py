"""Learning rates against values worked out by hand; steps count from 1."""

import math

import jax.numpy as jnp
import pytest

from megajax.config import LearningRateSchedule, ScheduleConfig
from megajax.errors import ConfigError
from megajax.optim import make_schedule
from megajax.optim.schedule import check_schedule
from megajax.options.schedules import SCHEDULES
from megajax.schema.fields import Section

PEAK, LOW = 1e-3, 1e-4


def rates(steps, **settings):
    settings = {"learning_rate": PEAK, "min_learning_rate": LOW, "warmup_steps": 4, "decay_steps": 24} | settings
    schedule = make_schedule(ScheduleConfig.model_validate(settings))
    return [float(schedule(step)) for step in steps]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
def test_warm_up_rises_in_equal_parts_to_the_peak(kind):
    found = rates([1, 2, 3, 4], kind=kind, wsd_decay_steps=2)
    assert found == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3], rel=1e-6)


def test_constant_stays_at_the_peak():
    assert rates([1, 10, 100, 10000], kind="constant", warmup_steps=0) == pytest.approx([PEAK] * 4)
    assert rates([5, 24, 25, 1000], kind="constant") == pytest.approx([PEAK] * 4)


def test_linear_falls_in_equal_parts_to_the_minimum_and_stays():
    # 20 steps from 1e-3 down to 1e-4: 4.5e-5 a step.
    expected = [1e-3 - 4.5e-5, 5.5e-4, 1e-4 + 4.5e-5, 1e-4, 1e-4, 1e-4]
    assert rates([5, 14, 23, 24, 25, 1000], kind="linear") == pytest.approx(expected, rel=1e-5)


def test_cosine_is_half_way_in_the_middle_and_ends_at_the_minimum():
    quarter = LOW + (PEAK - LOW) * (1 + math.sqrt(0.5)) / 2
    expected = [quarter, 5.5e-4, LOW + PEAK - quarter, 1e-4, 1e-4, 1e-4]
    assert rates([9, 14, 19, 24, 25, 1000], kind="cosine") == pytest.approx(expected, rel=1e-5)


def test_wsd_stays_at_the_peak_and_falls_in_its_last_steps():
    # From the peak at step 14 to the minimum at step 24.
    found = rates([5, 14, 15, 19, 24, 25, 1000], kind="wsd", wsd_decay_steps=10)
    assert found == pytest.approx([1e-3, 1e-3, 9.1e-4, 5.5e-4, 1e-4, 1e-4, 1e-4], rel=1e-5)


@pytest.mark.parametrize(("style", "half"), [("exponential", 2**0.5 - 1), ("cosine", 0.5), ("minus_sqrt", 1 - 2**-0.5)])
def test_the_final_decay_of_wsd_has_megatrons_shapes(style, half):
    found = rates([14, 19, 24, 25], kind="wsd", wsd_decay_steps=10, wsd_decay_style=style)
    assert found == pytest.approx([PEAK, LOW + (PEAK - LOW) * half, LOW, LOW], rel=1e-5)


@pytest.mark.parametrize(("style", "half"), [("linear", 0.5), ("exponential", 2**0.5 - 1), ("minus_sqrt", 1 - 2**-0.5)])
def test_the_final_decay_of_wsd_is_no_longer_than_the_steps_after_the_warm_up(style, half):
    """By default it is a tenth of decay_steps: 4 of 40. After a warm-up of 38 only 2 are left, from peak to minimum."""
    given = {"kind": "wsd", "decay_steps": 40, "wsd_decay_steps": 4, "wsd_decay_style": style}
    middle = LOW + (PEAK - LOW) * half
    assert rates([36, 38, 40], **given) == pytest.approx([PEAK, middle, LOW], rel=1e-5)
    assert rates([38, 39, 40, 41], **given, warmup_steps=38) == pytest.approx([PEAK, middle, LOW, LOW], rel=1e-5)


def test_inverse_sqrt_falls_with_the_root_of_the_step_but_not_below_the_minimum():
    # peak * sqrt(warm-up / step); a hundredth of the peak would be below the minimum.
    found = rates([4, 9, 16, 100], kind="inverse_sqrt", decay_steps=1000)
    assert found == pytest.approx([1e-3, 1e-3 * 2 / 3, 5e-4, 2e-4], rel=1e-5)
    assert rates([40000], kind="inverse_sqrt", decay_steps=10**6) == pytest.approx([LOW])


@pytest.mark.parametrize(
    ("kind", "lowest"), [("linear", 1e-4), ("cosine", 1e-4), ("wsd", 1e-4), ("inverse_sqrt", 1e-5)]
)
def test_the_minimum_that_nobody_set_is_a_tenth_of_the_peak_and_of_an_inverse_root_zero(kind, lowest):
    given = {"kind": kind, "learning_rate": PEAK, "warmup_steps": 4, "decay_steps": 40000, "wsd_decay_steps": 9}
    schedule = make_schedule(ScheduleConfig.model_validate(given))
    assert float(schedule(40000)) == pytest.approx(lowest, rel=1e-5)  # of the root: peak * sqrt(4 / 40000)


def test_without_warm_up_the_decay_starts_at_once():
    assert rates([1, 6, 12, 13], kind="linear", warmup_steps=0, decay_steps=12) == pytest.approx(
        [9.25e-4, 5.5e-4, 1e-4, 1e-4], rel=1e-5
    )
    assert rates([1, 4, 16], kind="inverse_sqrt", warmup_steps=0) == pytest.approx([1e-3, 5e-4, 2.5e-4], rel=1e-5)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_the_minimum_is_reached_at_decay_steps_and_kept(kind):
    assert rates([24, 25, 10**5], kind=kind, wsd_decay_steps=5) == pytest.approx([LOW] * 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_without_a_minimum_the_rate_ends_at_zero(kind):
    assert rates([24, 30], kind=kind, min_learning_rate=0.0, wsd_decay_steps=5) == pytest.approx([0, 0], abs=1e-12)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd", "inverse_sqrt"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_by_default_no_step_has_a_learning_rate_of_zero(kind, warmup):
    """Warm-up counts from step 1, and a decay ends at a tenth of the peak."""
    found = [PEAK / 10] if kind in ("linear", "cosine", "wsd") else []
    settings = {"kind": kind, "learning_rate": PEAK, "warmup_steps": warmup, "decay_steps": 24, "wsd_decay_steps": 5}
    schedule = make_schedule(ScheduleConfig.model_validate(settings))
    steps = [float(schedule(step)) for step in range(1, 25)]
    assert min(steps) > 0
    assert steps[0] == pytest.approx(PEAK / 4) if warmup else steps[0] > 0.9 * PEAK
    assert steps[-1:] == pytest.approx(found or steps[-1:], rel=1e-5)


def test_a_delayed_schedule_begins_at_rate_zero_as_megatrons_does():
    assert rates([1, 2, 5], kind="linear", delay_steps=1) == pytest.approx([0, PEAK / 4, PEAK])
    assert rates([1, 2], kind="linear", warmup_steps=0, delay_steps=1)[0] == pytest.approx(PEAK)


class Power:
    class Settings(Section):
        power: float = 1.0

    def __init__(self, schedule, settings):
        self.peak, self.power = schedule.learning_rate, settings.power

    def __call__(self, step):
        return self.peak / (step + 1.0) ** self.power


@pytest.mark.parametrize(("settings", "power"), [({}, 1), ({"power": 2}, 2)])
def test_an_extension_gets_its_settings_and_the_steps_after_the_warm_up(monkeypatch, settings, power):
    monkeypatch.setitem(SCHEDULES, "test_power", LearningRateSchedule("test_power", rate=Power))
    found = rates([2, 4, 5, 9], kind="test_power", settings=settings)
    assert found == pytest.approx([PEAK / 2, PEAK, PEAK / 2**power, PEAK / 6**power], rel=1e-5)


@pytest.mark.parametrize(
    ("rate", "sentence"),
    [
        (lambda schedule: lambda step: schedule.learning_rate / (step + 1), None),
        (lambda schedule: schedule.learning_rate, "is no function of the section whose result is a function of a step"),
        (lambda schedule, steps: lambda step: 1e-3, "is no function of the section"),
        (lambda schedule: lambda: 1e-3, "is no function of the section"),
        (lambda schedule: lambda step: 1e-3 if step < 2 else 0.0, "asks .* in Python: write jnp.where in place of if"),
        (lambda schedule: lambda step: math.exp(-step), "asks .* in Python: .* jnp's functions in place of math's"),
        (type("Few", (Power,), {"__init__": lambda self, schedule: None}), "is no function of the section and its set"),
        (lambda schedule: lambda step: jnp.ones(2), r"gives \[1. 1.\] after 0 steps: return one rate of 0 or more"),
        (
            lambda schedule: lambda step: 1e-3 * (9 - step),
            "gives -0.011\\d* after 20 steps: return one rate of 0 or more",
        ),
        (lambda schedule: lambda step: jnp.log(-1.0 - step), "gives nan after 0 steps"),
    ],
)
def test_an_extension_without_rates_is_a_sentence(monkeypatch, rate, sentence):
    monkeypatch.setitem(SCHEDULES, "test_rate", LearningRateSchedule("test_rate", rate=rate))
    config = ScheduleConfig.model_validate({"kind": "test_rate", "learning_rate": PEAK, "decay_steps": 20})
    if sentence is None:
        return check_schedule(config, 20)
    with pytest.raises(ConfigError, match=f"the schedule test_rate {sentence}"):
        check_schedule(config, 20)
