"""What an optimizer declares and computes. Each optimizer is a class in a module of its own; `update.py` runs them all.

An optimizer is written for one device. It never sees the mesh, the form of its moments between steps, or the host.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from megajax.errors import ConfigError, shown
from megajax.schema.fields import Section
from megajax.step_plan import StepPlan

Named = dict[str, jax.Array]  # arrays by the names of parameters
Slots = dict[str, Any]  # arrays by slot: a scalar, or arrays by the names of parameters


@dataclass(frozen=True)
class Slot:
    """An array that an optimizer keeps between steps, for each of its parameters; the first value is zero.

    Its shape is `like` the parameter, or a `scalar` of all parameters (int32). A slot of a matrix has the two
    dimensions of its array for each matrix of the parameter, which one device keeps whole.
    """

    name: str
    shape: Literal["like", "scalar"] | tuple[int, int] = "like"
    non_negative: bool = False  # second moments; int8 has another code for them
    exact: bool = False  # FP32 with every `optimizer.state`

    def __post_init__(self):
        sizes = self.shape if isinstance(self.shape, tuple) else ()
        is_matrix = len(sizes) == 2 and all(isinstance(size, Integral) and size > 0 for size in sizes)
        if self.shape not in ("like", "scalar") and not is_matrix:
            cure = "use like, scalar, or two sizes in slots_of_matrices of a MatrixOptimizer, (rows, 1)"
            raise ConfigError(f"the slot {self.name} has the shape {shown(self.shape)}: {cure}.")


COUNT = Slot("count", "scalar")  # the number of updates


class Optimizer:
    """From gradients to directions, element by element, so that each device has its shards of all arrays."""

    class Settings(Section):
        """The keys of `optimizer.settings`, of an extension's optimizer."""

    SLOTS: ClassVar[tuple[Slot, ...]] = ()
    in_chain = False  # whether checkpoints have its slots as an item of a chain of optax
    update_tolerance = 1e-2  # relative difference of an update that rounding of the gradients explains, for `verify`
    others_rate = 1.0  # learning rate of parameters that it leaves to AdamW, as a multiple of the schedule's

    def __init__(self, plan: StepPlan, settings: Any = None):
        self.plan, self.settings = plan, settings

    def slots(self) -> tuple[Slot, ...]:
        return self.SLOTS

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        """(directions, new slots), FP32: a step subtracts the learning rate times the direction and weight decay."""
        raise NotImplementedError

    @property
    def first_moment(self) -> tuple[str, float] | None:
        """A slot that is the first gradient times a factor after the first step, and the factor, for `verify`."""
        return None

    def width_factor(self, ratio: float) -> float:
        """By µP the factor of the learning rate of a matrix whose width is `ratio` times that of the tuned one."""
        return 1 / ratio


class OptaxOptimizer(Optimizer):
    """An optax transformation whose state is a NamedTuple with the slots as fields."""

    STATE: ClassVar[Any]

    def transformation(self) -> optax.GradientTransformation:
        raise NotImplementedError

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        check_state(type(self), slots)
        directions, after = self.transformation().update(gradients, self.STATE(**slots))
        return directions, after._asdict()  # type: ignore[union-attr]


def check_state(optimizer: type[OptaxOptimizer], slots: Collection[str]) -> None:
    """Raise ConfigError unless the fields of an optimizer's STATE are its `slots`."""
    state: Any = getattr(optimizer, "STATE", None)
    if (fields := getattr(state, "_fields", None)) is None:
        raise ConfigError(
            f"{optimizer.__name__}.STATE={state} is no NamedTuple: set it to the class of the transformation's state."
        )
    if {*fields} != {*slots}:
        ours, theirs = (", ".join(names) or "none" for names in (slots, fields))
        raise ConfigError(
            f"{optimizer.__name__} has the slots {ours}, and its STATE {state.__name__} has the fields {theirs}: give "
            "SLOTS a slot for each field, with its name."
        )


def check_slots(optimizer: type[Optimizer], slots: Sequence[Slot], of_matrices: Sequence[Slot] = ()) -> None:
    """Raise ConfigError unless the names differ, and a slot has sizes where it is one `of_matrices`, only there."""
    own, where = optimizer.__name__, f"{optimizer.__name__}.slots_of_matrices"
    if not isinstance(of_matrices, Sequence) or not all(isinstance(slot, Slot) for slot in of_matrices):
        raise ConfigError(f"{where} returns {shown(repr(of_matrices))}: return a tuple of Slots.")
    names = [slot.name for slot in (*slots, *of_matrices)]
    if again := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{own} has the slot {again[0]} twice: rename one.")
    for slot in slots:
        if not isinstance(slot.shape, str):
            cure = "use like or scalar there; slots_of_matrices of a MatrixOptimizer have sizes"
            raise ConfigError(f"{own}.SLOTS has the slot {slot.name} of the shape {slot.shape}: {cure}.")
    for slot in of_matrices:
        if isinstance(slot.shape, str):
            cure = "give two sizes, or declare it in SLOTS"
            raise ConfigError(f"{where} has the slot {slot.name} of the shape {slot.shape}: {cure}.")


class MatrixOptimizer(Optimizer):
    """From gradients of the layers' matrices to directions; AdamW updates all other parameters.

    First `direction` computes with all elements in their shards; by default it changes nothing. Then whole matrices
    come to one device each, for `of_matrices`.
    """

    # Without slots of matrices alone:
    turns = False  # whether matrices are turned, so that R ≤ C
    per_head = False  # whether each head of queries, keys and values is a matrix by itself

    def slots_of_matrices(self, rows: int, columns: int) -> tuple[Slot, ...]:
        """Slots of a parameter whose matrices are [R, C], such as `Slot("factor", (R, R))`."""
        return ()

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        return gradients, slots

    def of_matrices(self, matrices: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
        """(directions [k, R, C], new slots) of k matrices; `slots` has scalars and, for each matrix, its slots.

        Each matrix is computed by itself, and zeros give zeros.
        """
        raise NotImplementedError

    @property
    def dtype(self) -> Any:
        """The dtype in which matrices come and go."""
        return jnp.float32

    def scale(self, inputs: int, outputs: int) -> float:
        """The factor of the directions of matrices [inputs, outputs] of a parameter."""
        return 1.0

    def operations(self, rows: int, columns: int) -> float:
        """Operations of a step for one matrix, as matmuls in `dtype`, for the planner."""
        return 0.0


class OptimizerState(NamedTuple):
    """The slots of an optimizer's parameters and of those that AdamW updates beside it."""

    rounded: Any  # int32, the number of updates so far; None: all moments are FP32
    slots: Mapping[str, Slots]  # by the kind of optimizer


class Updated(NamedTuple):
    """What an update changes, by the names of parameters; fields as in the train state."""

    params: Any
    ema: Any
    optimizer: OptimizerState
    master_low_bits: Any

    def each_slot(self, change: Callable[[str, Any, str], Any]) -> "Updated":
        """`change(slot, its arrays or scalar, kind of optimizer)` of each slot, of averages and of low bits too."""
        by_kind = self.optimizer.slots.items()
        slots = {kind: {slot: change(slot, x, kind) for slot, x in by.items()} for kind, by in by_kind}
        low_bits, ema = (change(slot, getattr(self, slot), "") for slot in ("master_low_bits", "ema"))
        return Updated(self.params, ema, self.optimizer._replace(slots=slots), low_bits)
