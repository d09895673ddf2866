"""Learning rate schedules, each with a linear warm-up."""

import jax.numpy as jnp
import optax

from megajax.config import ScheduleConfig


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """The learning rate of a step, counted from 1.

    Warm-up ends at `warmup_steps`; the rate reaches its minimum at `decay_steps` and stays there. inverse_sqrt ignores
    `decay_steps`: it falls with the root of the step down to the minimum. cosine is Loshchilov and Hutter 2017, wsd
    (warm-up, stable, linear decay) Hu et al. 2024, inverse_sqrt Vaswani et al. 2017.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    after = _after_warmup(config)
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def _after_warmup(config: ScheduleConfig) -> optax.Schedule:
    """The learning rate as a function of the number of steps after the warm-up."""
    peak, low, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    decay = max(config.decay_steps - warmup, 1)
    if config.kind == "constant":
        return optax.constant_schedule(peak)
    if config.kind == "linear":
        return optax.linear_schedule(peak, low, decay)
    if config.kind == "cosine":
        return optax.cosine_decay_schedule(peak, decay, alpha=low / peak)
    if config.kind == "wsd":
        assert config.wsd_decay_steps is not None
        final = min(config.wsd_decay_steps, decay)
        return optax.linear_schedule(peak, low, final, transition_begin=decay - final)
    assert config.kind == "inverse_sqrt"
    return lambda count: jnp.maximum(peak * jnp.sqrt(max(warmup, 1) / jnp.maximum(warmup + count, 1)), low)
