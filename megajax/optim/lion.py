"""Lion (Chen et al. 2023)."""

import optax

from megajax.optim.optimizer import COUNT, OptaxOptimizer, Slot


class Lion(OptaxOptimizer):
    SLOTS = (COUNT, Slot("mu"))
    STATE = optax.ScaleByLionState
    update_tolerance = 0.1  # two steps of 256 entries differ by this much if rounding chooses two signs

    def transformation(self) -> optax.GradientTransformation:
        return optax.scale_by_lion(self.plan.optimizer.beta1, self.plan.optimizer.beta2)

    @property
    def first_moment(self) -> tuple[str, float]:
        return "mu", 1 - self.plan.optimizer.beta2
