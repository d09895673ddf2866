"""AdEMAMix (Pagliardini et al. 2024): Adam with a second, slow mean of the gradients."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from megajax.optim.optimizer import COUNT, OptaxOptimizer, Slot


class Ademamix(OptaxOptimizer):
    """Gradients → (m1 / (1 - beta1^t) + alpha·m2) / (√(nu / (1 - beta2^t)) + epsilon); m2 is the slow mean.

    alpha and the decay rate of m2 rise until `optimizer.ademamix.warmup_steps`.
    """

    SLOTS = (COUNT, Slot("count_m2", "scalar"), Slot("m1"), Slot("m2"), Slot("nu", non_negative=True))
    STATE = optax.contrib.ScaleByAdemamixState

    def transformation(self) -> optax.GradientTransformation:
        own, settings = self.plan.optimizer, self.plan.optimizer.ademamix
        steps = self.plan.steps if settings.warmup_steps is None else settings.warmup_steps
        return optax.contrib.scale_by_ademamix(
            own.beta1,
            own.beta2,
            _after_updates(lambda share: _decay_rate(own.beta1, settings.beta3, share), steps),
            _after_updates(lambda share: settings.alpha * share, steps),
            own.epsilon,
        )

    @property
    def first_moment(self) -> tuple[str, float]:
        return "m1", 1 - self.plan.optimizer.beta1


def _after_updates(value: Callable[[jax.Array], jax.Array], steps: int) -> optax.Schedule:
    """`value` of the share of the warm-up that is done; optax gives the number of earlier updates."""
    return lambda count: value(jnp.minimum((count + 1) / max(steps, 1), 1.0))


def _decay_rate(first: float, last: float, share: jax.Array) -> jax.Array:
    """From `first` to `last` in equal steps of 1 / ln(rate), so of the half-life; `last` exactly at `share` 1."""
    begin = 1 / math.log(first) if first > 0 else 0.0
    rising = jnp.exp(1 / ((1 - share) * begin + share / math.log(last)))
    return jnp.where(share < 1, jnp.minimum(rising, last), last)
