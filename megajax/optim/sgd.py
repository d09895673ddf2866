"""SGD with heavy-ball momentum; without any if `optimizer.beta1` is 0."""

import optax

from megajax.optim.optimizer import Named, OptaxOptimizer, Slot, Slots


class Sgd(OptaxOptimizer):
    STATE = optax.TraceState

    def slots(self) -> tuple[Slot, ...]:
        return (Slot("trace"),) if self.plan.optimizer.beta1 > 0 else ()

    def transformation(self) -> optax.GradientTransformation:
        return optax.trace(self.plan.optimizer.beta1)

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        return super().direction(gradients, slots) if slots else (gradients, slots)

    @property
    def first_moment(self) -> tuple[str, float] | None:
        return ("trace", 1.0) if self.slots() else None
