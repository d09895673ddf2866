"""Learning rate schedules, each with a linear warm-up."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from megajax.errors import ConfigError, accepts, shown
from megajax.schema.schedule import ScheduleConfig


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """The learning rate of a step, counted from 1; `delay_steps` moves all of it.

    Warm-up ends at `warmup_steps`; the rate reaches its minimum at `decay_steps` and stays there. inverse_sqrt ignores
    `decay_steps`: it falls with the root of the step down to the minimum. cosine is Loshchilov and Hutter 2017, wsd
    (warm-up, stable, decay) Hu et al. 2024, inverse_sqrt Vaswani et al. 2017.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    after = (config.chosen.rate or AFTER_WARMUP[config.kind])(*_arguments(config))
    rate = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup]) if warmup else after
    delay = config.delay_steps
    return (lambda step: rate(jnp.maximum(step - delay, 0))) if delay else rate


def check_schedule(config: ScheduleConfig, steps: int) -> None:
    """Raise ConfigError unless an extension's schedule is a function whose rates are finite and 0 or more.

    `steps`: of the run, whose first and last step are tried.
    """
    if (rate := config.chosen.rate) is None:
        return
    name, given = f"the schedule {config.kind}", _arguments(config)
    if not accepts(rate, *given) or not callable(after := rate(*given)) or not accepts(after, 0):
        of = "the section and its settings" if len(given) > 1 else "the section"
        raise ConfigError(f"{name} is no function of {of} whose result is a function of a step: return one.")
    for step in (0, steps):
        try:
            found = np.asarray(jax.jit(after)(jnp.int32(step)))
        except jax.errors.ConcretizationTypeError:
            cure = "write jnp.where in place of if, and jnp's functions in place of math's"
            raise ConfigError(f"{name} asks for the value of the step in Python: {cure}.") from None
        if found.shape or not 0 <= found < np.inf:
            raise ConfigError(
                f"{name} gives {shown(found)} after {steps if step else 0} steps: return one rate of 0 or more."
            )


def _arguments(config: ScheduleConfig) -> list[Any]:
    """What a function of AFTER_WARMUP or of an extension gets: the section, and settings of its own if it has some."""
    own = getattr(config.chosen.rate, "Settings", None)
    return [config] if own is None else [config, own.model_validate(dict(config.settings))]


def _linear(config: ScheduleConfig) -> optax.Schedule:
    return optax.linear_schedule(config.learning_rate, config.min_learning_rate, _decay(config))


def _cosine(config: ScheduleConfig) -> optax.Schedule:
    alpha = config.min_learning_rate / config.learning_rate
    return optax.cosine_decay_schedule(config.learning_rate, _decay(config), alpha=alpha)


def _wsd(config: ScheduleConfig) -> optax.Schedule:
    assert config.wsd_decay_steps is not None
    decay = _decay(config)
    final = min(config.wsd_decay_steps, decay)
    peak, low, shape = config.learning_rate, config.min_learning_rate, SHAPES[config.wsd_decay_style]
    if config.wsd_decay_style == "linear":
        return optax.linear_schedule(peak, low, final, transition_begin=decay - final)
    return lambda count: low + (peak - low) * shape(jnp.clip((count - (decay - final)) / final, 0.0, 1.0))


def _inverse_sqrt(config: ScheduleConfig) -> optax.Schedule:
    peak, low, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    return lambda count: jnp.maximum(peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(warmup + count, 1)), low)


def _decay(config: ScheduleConfig) -> int:
    """The number of steps from the warm-up to the lowest rate."""
    return max(config.decay_steps - config.warmup_steps, 1)


# What is left of the learning rate above its minimum after a share of the final decay; as in Megatron-LM.
SHAPES = {
    "linear": lambda r: 1 - r,
    "exponential": lambda r: 2 * 0.5**r - 1,
    "cosine": lambda r: 0.5 * (1 + jnp.cos(jnp.pi * r)),
    "minus_sqrt": lambda r: 1 - jnp.sqrt(r),
}
# The learning rate as a function of the number of steps after the warm-up.
AFTER_WARMUP = {
    "constant": lambda config: optax.constant_schedule(config.learning_rate),
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
