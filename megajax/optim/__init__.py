"""Optimizers, the forms of their moments, and learning rate schedules."""

from dataclasses import replace

from megajax.optim.forms import Form, StateArray
from megajax.optim.optimizer import COUNT, MatrixOptimizer, OptaxOptimizer, Optimizer, Slot
from megajax.optim.schedule import make_schedule
from megajax.optim.slots import FORM_CLASSES, OPTIMIZER_CLASSES
from megajax.options import optimizers as options
from megajax.options.optimizers import MomentForm, OptimizerKind

__all__ = [
    "COUNT",
    "Form",
    "MatrixOptimizer",
    "MomentForm",
    "OptaxOptimizer",
    "Optimizer",
    "OptimizerKind",
    "Slot",
    "StateArray",
    "make_schedule",
    "register_form",
    "register_optimizer",
]


def register_optimizer(kind: OptimizerKind, optimizer: type[Optimizer]) -> None:
    """Register an extension's optimizer for `optimizer.kind`. Raises ConfigError for a name that is taken."""
    options.OPTIMIZERS.add(replace(kind, made=optimizer))
    OPTIMIZER_CLASSES[kind.name] = optimizer


def register_form(declared: MomentForm, form: type[Form]) -> None:
    """Register an extension's form of moments for `optimizer.state`. Raises ConfigError for a name that is taken."""
    options.FORMS.add(declared)
    FORM_CLASSES[declared.name] = form
