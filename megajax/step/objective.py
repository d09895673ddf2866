"""The objective of training: a terminal node. `objective.kind` names it; `register_objective` adds one.

A class of your own derives from `Elementwise`, `Logits` or `Segment` (`step/objective_bases.py`), or with parameters of
its own from `Hidden` or `HiddenSegment` (`step/own_head.py`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from megajax.errors import ConfigError, check_methods
from megajax.options.registered import MASKED_TOKENS, NEXT_TOKEN, OBJECTIVES
from megajax.parallel.mesh_comm import MeshComm
from megajax.schema.fields import check_attributes
from megajax.step.head import SUMS
from megajax.step.nodes import HIDDEN, Arrays, Microbatch, Results, StepArrays, Streams, Table
from megajax.step.objective_bases import Elementwise, Logits, Objective, Segment
from megajax.step.own_head import Hidden, HiddenSegment, OwnHead
from megajax.step_plan import StepPlan


class NextToken(Objective):
    """The objective of next-token prediction; evaluation has no label smoothing."""

    def __init__(self, plan: StepPlan, comm: MeshComm):
        super().__init__(plan, comm)
        self.z_loss, self.smoothing = plan.model.z_loss, plan.objective.label_smoothing

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        loss = self.head.cross_entropy(arrays.loss_factors[self.NAME], self.smoothing)
        return self.one_pass(loss, arrays, streams, gradients, batch, table)

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        fields = self.of_tokens(arrays, batch, streams)
        return {"loss": self.head.losses(arrays.table, streams[HIDDEN], fields["targets"], fields["loss_mask"])}

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        return {"loss": losses["loss"], **({"z_loss": losses["z_loss"]} if self.z_loss else {})}


class MaskedTokens(NextToken):
    """The same for masked tokens: `targets` are the tokens themselves, `loss_mask` those hidden in `tokens`."""


TAKEN = (*SUMS, "tokens", "mtp_loss")  # sums of a step that are not an objective's METRICS
BASES: tuple[Any, ...] = (Logits, Hidden, HiddenSegment, Segment, Elementwise)
OBJECTIVE_CLASSES: dict[str, type[Objective]] = {NEXT_TOKEN: NextToken, MASKED_TOKENS: MaskedTokens}


def register_objective(name: str) -> Callable[[type[Objective]], type[Objective]]:
    """A decorator that registers an objective for `objective.kind`; in a module of `run.extensions`."""
    if not isinstance(name, str):
        raise ConfigError('an objective has no name: write @register_objective("NAME") above its class.')

    def add(objective: type[Objective]) -> type[Objective]:
        known = OBJECTIVE_CLASSES.get(name) or OBJECTIVES.get(name, objective)
        ids = [f"{each.__module__}.{each.__qualname__}" for each in (known, objective)]
        if ids[0] != ids[1]:
            raise ConfigError(f"the objective {name} is {ids[0]} already: register {ids[1]} under another name.")
        _check_class(name, objective)
        OBJECTIVES[name] = objective
        return objective

    return add


def _check_class(name: str, objective: type[Objective]) -> None:
    derived = isinstance(objective, type) and issubclass(objective, Objective) and hasattr(objective, "turn")
    base: Any = next((base for base in BASES if derived and issubclass(objective, base)), Objective)
    to_write = [name for name in ("loss", "values") if hasattr(base, name)]
    lacking = [name for name in to_write if getattr(objective, name) is getattr(base, name)]
    if lacking or not derived:
        cure = f"derive a class from {', '.join(each.__name__ for each in BASES)}"
        problem = f"the objective {name} ({objective.__name__}) does not define {lacking[0] if lacking else 'loss'}"
        raise ConfigError(f"{problem}: {cure}, with the methods that docs/extensions.md has for it.")
    check_methods(objective, base)
    check_attributes(objective, base)
    if hasattr(objective, "TOGETHER") and not issubclass(objective, Segment):
        problem = f"{objective.__name__}.TOGETHER is set, but its losses are those of tokens"
        raise ConfigError(f"{problem}: derive it from Segment or HiddenSegment, or remove TOGETHER.")
    if objective.TEACHER and issubclass(objective, OwnHead):
        problem = f"{objective.__name__}.TEACHER is set, but a head of its own is given no teacher"
        raise ConfigError(f"{problem}: derive it from Logits, Elementwise or Segment, or remove TEACHER.")
    if taken := [name for name in objective.METRICS if name in TAKEN]:
        raise ConfigError(f"{objective.__name__}.METRICS has {taken[0]}, which a step has already: rename it.")
    for field, own in objective.FIELDS.items():
        dtype, *extra = own if isinstance(own, tuple) else (own,)
        try:
            is_number = any(jnp.issubdtype(jnp.dtype(dtype), kind) for kind in (jnp.number, jnp.bool_))
            is_field = dtype is not None and is_number and all(isinstance(size, int) and size > 0 for size in extra)
        except TypeError:
            is_field = False
        if not is_field:
            problem = f"{objective.__name__}.FIELDS has {field}: {own!r}"
            raise ConfigError(f"{problem}: give a dtype, or (dtype, *sizes) for more dimensions.")


def make_objective(plan: StepPlan, comm: MeshComm) -> Any:
    """The node that `objective.kind` names."""
    return {**OBJECTIVES, **OBJECTIVE_CLASSES}[plan.objective.kind](plan, comm)
