"""Where the passes of a layer stack keep what its groups give: as values, or in a pipeline's buffers.

`LayerStack` makes a keeper for each iteration of a loop over layers. Those of pipelines are in `pipeline/buffers.py`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax import lax

from megajax.config.segments import Segment
from megajax.model.parts import BlockInputs
from megajax.parallel.stack.groups import Group, RematGroups
from megajax.parallel.stack.weights import Amax, GroupWeights, Metrics


class ForwardKeeper(Protocol):
    """Where one iteration of a forward pass keeps what its groups give."""

    def save(self, u: int, saved: Any, metrics: Metrics) -> None:
        """Residuals as `RematGroups.forward` returns them, and metrics, of group `u`."""
        ...

    def close(self) -> tuple[Any, Any]:
        """(what the next iteration starts from, what this one gives, stacked over the loops)."""
        ...


class BackwardKeeper(Protocol):
    """Where one iteration of a backward pass finds residuals and keeps gradients."""

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: jax.Array, inputs: BlockInputs) -> Any:
        """(dx, gradients of the weights) of group `u`."""
        ...

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        """Reduced gradients of group `u` → those to `put`."""
        ...

    def put(self, u: int, gradient: GroupWeights) -> None: ...

    def close(self) -> tuple[Any, Any]: ...


class ForwardValues:
    """Keeps residuals and metrics as values; in a loop they are stacked."""

    def __init__(self, segment: Segment):
        self.segment, self.saved, self.metrics = segment, list[Any](), list[Metrics]()

    def save(self, u: int, saved: Any, metrics: Metrics) -> None:
        if self.segment.loops > 1:
            # Behind a barrier, or XLA would run a matmul again to write its result into the stacked array.
            saved = lax.optimization_barrier(saved)
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

    def backward(self, u: int, at: Group, weights: GroupWeights, dx: jax.Array, inputs: BlockInputs):
        dx, gradient, self.amax[u] = self.groups.backward(at, weights, self.saved[u], dx, inputs)
        return dx, gradient

    def add(self, u: int, gradient: GroupWeights) -> GroupWeights:
        return gradient

    def put(self, u: int, gradient: GroupWeights) -> None:
        self.gradients[u] = gradient

    def close(self):
        return (), tuple(tuple(kept[u] for u in range(len(kept))) for kept in (self.gradients, self.amax))
