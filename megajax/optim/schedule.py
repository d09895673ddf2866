"""Learning rate schedules, each with a linear warm-up."""

import jax
import jax.numpy as jnp
import optax

from megajax.config import ScheduleConfig


def make_schedule(config: ScheduleConfig) -> optax.Schedule:
    """The learning rate of a step, counted from 1: warm-up ends at `warmup_steps`, the minimum is reached at
    `decay_steps` and kept.

    inverse_sqrt is Vaswani et al. 2017, cosine Loshchilov and Hutter 2017, wsd (warm-up, stable, linear decay) Hu et
    al. 2024.
    """
    peak, low, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    decay = max(config.decay_steps - warmup, 1)
    if config.kind == "constant":
        after = optax.constant_schedule(peak)
    elif config.kind == "linear":
        after = optax.linear_schedule(peak, low, decay)
    elif config.kind == "cosine":
        after = optax.cosine_decay_schedule(peak, decay, alpha=low / peak)
    elif config.kind == "wsd":
        assert config.wsd_decay_steps is not None
        final = min(config.wsd_decay_steps, decay)
        after = optax.linear_schedule(peak, low, final, transition_begin=decay - final)
    else:

        def after(count: jax.Array) -> jax.Array:
            start = max(warmup, 1)
            return jnp.maximum(peak * jnp.sqrt(start / (start + count)), low)

    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])
