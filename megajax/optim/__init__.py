"""Optimizers, the forms of their moments, and learning rate schedules."""

from dataclasses import replace
from operator import attrgetter

from megajax.errors import ConfigError, check_methods
from megajax.optim.forms import Form, StateArray
from megajax.optim.optimizer import COUNT, MatrixOptimizer, OptaxOptimizer, Optimizer, Slot, check_slots, check_state
from megajax.optim.schedule import make_schedule
from megajax.optim.slots import FORM_CLASSES, OPTIMIZER_CLASSES
from megajax.options import optimizers as options
from megajax.options.optimizers import MomentForm, OptimizerKind
from megajax.schema.fields import check_attributes
from megajax.schema.optimizer import OptimizerConfig

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

UNDEFINED = (Optimizer.direction, MatrixOptimizer.of_matrices, OptaxOptimizer.transformation)


def register_optimizer(kind: OptimizerKind, optimizer: type[Optimizer]) -> None:
    """Register an extension's optimizer for `optimizer.kind`.

    Raises ConfigError for a name that is taken, and for declarations that cannot be.
    """
    _check_keys(kind)
    base = next(each for each in (MatrixOptimizer, OptaxOptimizer, Optimizer) if issubclass(optimizer, each))
    missing = [each.__name__ for each in UNDEFINED if getattr(optimizer, each.__name__, None) is each]
    if missing:
        raise ConfigError(f"{optimizer.__name__} does not define {missing[0]}: see megajax.optim.{base.__name__}.")
    check_methods(optimizer, base)
    check_attributes(optimizer, base)
    check_slots(optimizer, optimizer.SLOTS)
    is_by_state = optimizer.direction is OptaxOptimizer.direction
    if issubclass(optimizer, OptaxOptimizer) and is_by_state and optimizer.slots is Optimizer.slots:
        check_state(optimizer, [slot.name for slot in optimizer.SLOTS])
    options.OPTIMIZERS.add(replace(kind, made=optimizer, beside_adamw=issubclass(optimizer, MatrixOptimizer)))
    OPTIMIZER_CLASSES[kind.name] = optimizer


def _check_keys(kind: OptimizerKind) -> None:
    """Raise ConfigError unless what an extension's optimizer declares to read are keys of the section."""
    if unknown := sorted({*kind.reads} - {*options.READ_BY_SOME}):
        raise ConfigError(f"the optimizer {kind.name} reads {unknown[0]}: use {', '.join(options.READ_BY_SOME)}.")
    for key in kind.decides_arrays:
        try:
            attrgetter(key)(OptimizerConfig())
        except AttributeError:
            problem = f"the arrays of the optimizer {kind.name} depend on {key}, which is no key of optimizer"
            raise ConfigError(f"{problem}: name one, such as settings, in decides_arrays.") from None


def register_form(declared: MomentForm, form: type[Form]) -> None:
    """Register an extension's form of moments for `optimizer.state`. Raises ConfigError for a name that is taken."""
    options.FORMS.add(declared, form)
    FORM_CLASSES[declared.name] = form
