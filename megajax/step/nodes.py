"""The nodes of a step, and everything that passes between them.

A step is a short list of nodes. *Inner* nodes (the embedding, a stack of layers) turn streams into streams: forward in
order, backward in reverse order. *Terminal* nodes (the objective, prediction modules) run between the two passes: loss
and gradients in one pass, so that their activations do not outlive them. `microbatches.py` runs the list,
`pipeline/pipeline.py` schedules the same list.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from megajax.errors import ConfigError
from megajax.model.sublayer import BlockInputs, add_metrics
from megajax.ops.numerics import added
from megajax.step.stack.stack_weights import Amax, ByGroup, GroupMetrics, GroupWeights

HIDDEN = "hidden"  # the residual stream, [T / tensor, D]
Arrays = Mapping[str, jax.Array]
Streams = dict[str, jax.Array]  # or their gradients
Table = dict[str, jax.Array]  # weights outside the stacks, or sums of their gradients, by canonical name


class Field(NamedTuple):
    """A field of the batch, `[M, B, S, *extra]`."""

    dtype: Any
    setting: str = ""  # the key of the config that needs it; "": all batches have it
    extra: tuple[int, ...] = ()
    derived: bool = False  # `training.batches.to_global` makes it from the other fields
    optional: bool = False  # a batch may lack it
    limit: int | None = None  # values are integers below it, from `least` on
    least: int = 0
    length: int | None = None  # instead of S, that of an encoder's sequences, in order over `context`
    of_row: bool = False  # by default the number of its sequence in the microbatch


def joined_fields(*declared: Mapping[str, Field]) -> dict[str, Field]:
    """The fields of all nodes; the first declaration of a name counts.

    Raises ConfigError for a later one with another dtype or shape.
    """
    fields: dict[str, Field] = {}
    for name, field in (each for fields_of_node in declared for each in fields_of_node.items()):
        known = fields.setdefault(name, field)
        found = [f"{jnp.dtype(each.dtype)}{[*each.extra]}" for each in (field, known)]
        if found[0] != found[1]:
            problem = f"{field.setting} declares the batch field {name} as {found[0]}, but it is {found[1]}"
            raise ConfigError(f"{problem}: give that field another name.")
    return fields


class Microbatch(NamedTuple):
    """One microbatch on one device."""

    fields: Arrays  # [B, S, ...]; in a terminal node those that it declares, [T, ...] of the tokens that it computes
    inputs: BlockInputs
    sequences: jax.Array | None = None  # [B], the index of each in the global batch
    factors: Arrays = {}  # by terminal node that of `StepArrays.loss_factors`, where microbatches differ
    streams: Mapping[str, jax.Array] = {}  # in a pipeline those of the nodes that run before the ticks


class StepArrays(NamedTuple):
    """Arrays that all microbatches of a step share."""

    table: Table  # gathered weights outside the stacks
    stacks: Mapping[str, ByGroup[GroupWeights]]  # weights of each stack, from `StackWeights.gather_per_step`
    key: jax.Array | None = None  # of this step's random numbers; None if it has none
    layer_loss_scale: jax.Array | None = None  # factor of the layers' losses of one microbatch
    loss_factors: Arrays = {}  # by terminal node that of its summed loss before differentiation; empty in evaluation
    # By stack the gradients of earlier microbatches, to which its backward pass adds those of each layer in place
    sums: Mapping[str, ByGroup[GroupWeights]] = {}

    @property
    def is_training(self) -> bool:
        """Whether a backward pass follows."""
        return bool(self.loss_factors)


class Results(NamedTuple):
    """The results of nodes for one microbatch or for several, besides gradients of the table."""

    # Of each stack, for all these microbatches; of a stack in `StepArrays.sums` the new sums, with the earlier ones
    gradients: Mapping[str, ByGroup[GroupWeights]] = {}
    losses: dict[str, jax.Array] = {}  # this device's shares of the summed losses
    metrics: Mapping[str, ByGroup[GroupMetrics]] = {}  # of each stack
    amax: Mapping[str, ByGroup[tuple[Amax, ...]]] = {}  # of each stack

    def joined(self, other: "Results") -> "Results":
        """The results of both; each name is in one of them."""
        pairs: Any = zip(self, other, strict=True)
        return Results(*({**mine, **theirs} for mine, theirs in pairs))

    def plus(self, new: "Results", in_place: Collection[str] = ()) -> "Results":
        """Those of one more microbatch added: gradients in the dtype of these sums, maxima of the amaxes.

        The stacks `in_place` have added their gradients to these.
        """
        pairs = ((name, own, new.gradients[name]) for name, own in self.gradients.items())
        gradients = {name: one if name in in_place else jax.tree.map(added, own, one) for name, own, one in pairs}
        losses, metrics = add_metrics((self.losses, self.metrics), (new.losses, new.metrics))
        return Results(gradients, losses, metrics, jax.tree.map(jnp.maximum, self.amax, new.amax))


def plus(gradients: Streams, new: Streams) -> Streams:
    """Gradients of streams from several nodes, added."""
    return gradients | {name: gradients[name] + dx if name in gradients else dx for name, dx in new.items()}


def plus_weights(table: Table, gradients: Arrays) -> Table:
    """`table` plus the gradients of some of its weights."""
    return table | {name: added(table[name], gradient) for name, gradient in gradients.items()}


class InnerNode(Protocol):
    """Turns streams into streams."""

    @property
    def NAME(self) -> str: ...

    @property
    def PLACE(self) -> str:
        """In a pipeline: "stage", the chain that the schedule divides; "first", on its first virtual stage; "before",
        before the first tick, each stage for 1/P of the microbatches; "own ticks", before them too, through the stages.
        """
        ...

    def fields(self) -> dict[str, Field]:
        """The batch fields that it reads."""
        ...

    def forward(self, arrays: StepArrays, streams: Streams, batch: Microbatch, save: bool) -> tuple[Streams, Any]:
        """(the streams that it gives, what `backward` needs; None if not `save`)."""
        ...

    def backward(
        self, arrays: StepArrays, saved: Any, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        """Gradients of the streams from later nodes → (those of the streams that it took, `table` plus its weights',
        its results).
        """
        ...


class TerminalNode(Protocol):
    """Computes losses from streams, with their gradients in the same pass.

    In a pipeline all stages compute it, each for its share of the tokens that leave the last virtual stage; its weights
    are whole on every stage.
    """

    @property
    def NAME(self) -> str: ...

    @property
    def EVALUATED(self) -> tuple[str, ...]:
        """The names of the sums of `evaluate`."""
        ...

    @property
    def reads(self) -> tuple[str, ...]:
        """The streams that it reads besides the residual stream, at the same tokens."""
        ...

    @property
    def reads_positions(self) -> bool:
        """Whether it reads `Microbatch.inputs`; in a pipeline each stage then has 1/P of every sequence."""
        ...

    def fields(self) -> dict[str, Field]:
        """The batch fields that it reads."""
        ...

    def derived_fields(self, fields: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Those of its fields that are `derived`, from the others `[rows, S, ...]`, on the host."""
        ...

    def counts(self, batch: Arrays) -> dict[str, jax.Array]:
        """By loss the number that its sum is divided by: this device's share, from the fields `[M, B, S]` alone."""
        ...

    def loss_factor(self, loss_scale: jax.Array, counts: Arrays) -> jax.Array:
        """Its entry of `StepArrays.loss_factors`; `counts` are those of all devices and microbatches."""
        ...

    def turn(
        self, arrays: StepArrays, streams: Streams, gradients: Streams, batch: Microbatch, table: Table
    ) -> tuple[Streams, Table, Results]:
        """(`gradients` of the streams plus its own, `table` plus its weights', its losses and other results)."""
        ...

    def evaluate(self, arrays: StepArrays, streams: Streams, batch: Microbatch) -> dict[str, jax.Array]:
        """This device's shares of the sums that evaluation reports; forward pass only."""
        ...

    def metrics(self, losses: Arrays) -> dict[str, jax.Array]:
        """The losses of a step, divided by their counts → the metrics that are logged."""
        ...
