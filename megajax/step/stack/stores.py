"""Stores: they store the results of a layer stack's groups, as values or in a pipeline's buffers.

`LayerStack` makes a store for each iteration of a loop over layers. The pipeline's stores are in
`pipeline/buffers.py`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from megajax.layout.segments import LayerSegment
from megajax.model.sublayer import BlockInputs
from megajax.ops.barriers import not_repeated
from megajax.step.stack.remat_groups import Group, RematGroups, StreamGradients
from megajax.step.stack.stack_weights import Amax, GroupWeights, Metrics


class ForwardStore(Protocol):
    """Stores the results of the groups in one iteration of a forward pass."""

    def save(self, u: int, saved: Any, metrics: Metrics) -> None:
        """Store residuals and metrics of group `u`, as `RematGroups.forward` returns them."""
        ...

    def close(self) -> tuple[Any, Any]:
        """(state for the next iteration, this iteration's output, which the loop stacks)."""
        ...


class BackwardStore(Protocol):
    """Reads residuals and stores gradients in one iteration of a backward pass."""

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: StreamGradients, inputs: BlockInputs) -> Any:
        """(dx, gradients of the weights) of group `u`."""
        ...

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        """Reduced gradients of group `u` → the gradients to `put`, added to the stored ones if there are any."""
        ...

    def put(self, u: int, gradient: GroupWeights) -> None:
        """Store the gradients of group `u`."""
        ...

    def close(self) -> tuple[Any, Any]:
        """As in `ForwardStore`."""
        ...


class ForwardValues:
    """Keeps residuals and metrics as values; in a loop they are stacked."""

    def __init__(self, segment: LayerSegment):
        self.segment, self.saved, self.metrics = segment, list[Any](), list[Metrics]()

    def save(self, u: int, saved: Any, metrics: Metrics) -> None:
        if self.segment.iterations > 1:
            # Without the barrier XLA would repeat a matmul to write its result into the stacked array.
            saved = not_repeated(saved)
        self.saved.append(saved)
        self.metrics.append(metrics)

    def close(self):
        return (), (tuple(self.saved), tuple(self.metrics))


class BackwardValues:
    """Keeps gradients and amaxes as values; in a loop they are stacked."""

    def __init__(self, groups: RematGroups, saved: Sequence[Any]):
        self.groups, self.saved = groups, saved
        self.gradients: dict[int, GroupWeights] = {}
        self.amax: dict[int, tuple[Amax, ...]] = {}

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: StreamGradients, inputs: BlockInputs):
        dx, gradient, self.amax[u] = self.groups.backward(at, weights, self.saved[u], dx, inputs)
        return dx, gradient

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        return gradient

    def put(self, u: int, gradient: GroupWeights) -> None:
        self.gradients[u] = gradient

    def close(self):
        return (), tuple(tuple(each[u] for u in range(len(each))) for each in (self.gradients, self.amax))
