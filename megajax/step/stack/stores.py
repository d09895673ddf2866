"""Stores: they store the results of a layer stack's groups, as values or in a pipeline's buffers.

`LayerStack` opens a store for each iteration of a loop over layers. The pipeline's stores are in
`pipeline/buffers.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.model.sublayer import BlockInputs
from megajax.ops.barriers import not_repeated
from megajax.ops.numerics import added
from megajax.step.stack.remat_groups import Group, RematGroups, StreamGradients
from megajax.step.stack.stack_weights import Amax, GroupMetrics, GroupWeights


@dataclass
class Stores:
    """Where one pass of a stack stores the results of its groups."""

    # Opens the store of an iteration, with the index of the segment: `(s, iteration, state)` → one as ForwardValues, or
    # `(s, iteration, state, residuals)` → one as BackwardValues
    open: Callable[..., Any]
    states: list[Any]  # by segment that of the first iteration; after the pass that of the last one
    first_layer: Any = 0  # the layer index of the first slot, or of every slot if the layers are not consecutive
    segments: Sequence[int] | None = None  # the indices of those that a backward pass runs; None: all


class ForwardValues:
    """Stores the results of the groups in one iteration of a forward pass: as values; in a loop they are stacked."""

    def __init__(self, segment: LayerSegment):
        self.segment, self.saved, self.metrics = segment, list[Any](), list[GroupMetrics]()

    def save(self, u: int, saved: Any, metrics: GroupMetrics) -> None:
        """Store residuals and metrics of group `u`, as `RematGroups.forward` returns them."""
        if self.segment.iterations > 1:
            # Without the barrier XLA would repeat a matmul to write its result into the stacked array.
            saved = not_repeated(saved)
        self.saved.append(saved)
        self.metrics.append(metrics)

    def close(self) -> tuple[Any, Any]:
        """(state for the next iteration, a pair of outputs, which the loop stacks: residuals and metrics)."""
        return (), (tuple(self.saved), tuple(self.metrics))


class BackwardValues:
    """Reads residuals and stores gradients and amaxes in one iteration of a backward pass: as `ForwardValues`."""

    def __init__(self, groups: RematGroups, saved: Sequence[Any]):
        self.groups, self.saved = groups, saved
        self.gradients: dict[int, GroupWeights] | list[GroupWeights] = {}
        self.amax: dict[int, tuple[Amax, ...]] | list[tuple[Amax, ...]] = {}

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: StreamGradients, inputs: BlockInputs):
        """(dx, gradients of the weights) of group `u`."""
        dx, gradient, self.amax[u] = self.groups.backward(at, weights, self.saved[u], dx, inputs)
        return dx, gradient

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        """Reduced gradients of group `u` → the gradients to `put`, added to the stored ones if there are any."""
        return gradient

    def put(self, u: int, gradient: GroupWeights) -> None:
        """Store the result of `add`; `LayerStack` ties it to the group below first."""
        self.gradients[u] = gradient

    def close(self) -> tuple[Any, Any]:
        """As in `ForwardValues`, with gradients and amaxes."""
        return (), tuple(tuple(each[u] for u in range(len(each))) for each in (self.gradients, self.amax))


class BackwardSums(BackwardValues):
    """Adds the gradients of each group to sums over microbatches."""

    def __init__(self, groups: RematGroups, saved: Sequence[Any], segment: LayerSegment, loop: Any, sums: Any):
        super().__init__(groups, saved)
        self.segment, self.loop, self.gradients = segment, loop, list[GroupWeights](sums)

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        return accumulate(self.gradients[u], gradient, self.segment, self.loop)

    def close(self):
        return tuple(self.gradients), ((), tuple(self.amax[u] for u in range(len(self.amax))))


def accumulate(
    totals: GroupWeights, gradient: GroupWeights, segment: LayerSegment, loop: jax.Array | int
) -> GroupWeights:
    """Sums of gradients, with one more microbatch's added in a loop's rows."""
    return combine(lambda _, *two: added(*two), totals, gradient, segment, loop)


def combine(
    operation: Callable, totals: GroupWeights, values: GroupWeights, segment: LayerSegment, loop: jax.Array | int
) -> GroupWeights:
    """Totals after `operation(name, total, value)` at iteration `loop`; totals without a value are unchanged."""

    def one(name: str, total: jax.Array, value: jax.Array) -> jax.Array:
        if segment.iterations == 1:
            return operation(name, total, value)
        new = operation(name, lax.dynamic_index_in_dim(total, loop, keepdims=False), value)
        return lax.dynamic_update_index_in_dim(total, new, loop, 0)

    return tuple(
        {name: one(name, total, value[name]) if name in value else total for name, total in layer.items()}
        for layer, value in zip(totals, values, strict=True)
    )
