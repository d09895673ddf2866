"""AdamW (Loshchilov and Hutter 2019); weight decay is added for all optimizers alike."""

import optax

from megajax.optim.optimizer import COUNT, OptaxOptimizer, Slot


class AdamW(OptaxOptimizer):
    SLOTS = (COUNT, Slot("mu"), Slot("nu", non_negative=True))
    STATE = optax.ScaleByAdamState

    def transformation(self) -> optax.GradientTransformation:
        settings = self.plan.optimizer
        return optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon)

    @property
    def first_moment(self) -> tuple[str, float]:
        return "mu", 1 - self.plan.optimizer.beta1
