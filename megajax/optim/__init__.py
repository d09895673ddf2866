"""Optimizers, the forms of their moments, and learning rate schedules."""

from dataclasses import replace

from megajax.errors import ConfigError, check_methods
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

UNDEFINED = (Optimizer.direction, MatrixOptimizer.of_matrices)


def register_optimizer(kind: OptimizerKind, optimizer: type[Optimizer]) -> None:
    """Register an extension's optimizer for `optimizer.kind`. Raises ConfigError for a name that is taken."""
    missing = [name for name in ("direction", "of_matrices") if getattr(optimizer, name, None) in UNDEFINED]
    if missing:
        raise ConfigError(f"{optimizer.__name__} does not define {missing[0]}: see megajax.optim.Optimizer.")
    check_methods(optimizer, MatrixOptimizer if issubclass(optimizer, MatrixOptimizer) else Optimizer)
    names = [slot.name for slot in optimizer.SLOTS]
    if again := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{optimizer.__name__}.SLOTS has {again[0]} twice: rename one.")
    options.OPTIMIZERS.add(replace(kind, made=optimizer))
    OPTIMIZER_CLASSES[kind.name] = optimizer


def register_form(declared: MomentForm, form: type[Form]) -> None:
    """Register an extension's form of moments for `optimizer.state`. Raises ConfigError for a name that is taken."""
    options.FORMS.add(declared, form)
    FORM_CLASSES[declared.name] = form
