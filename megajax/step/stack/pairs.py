"""Two microbatches side by side through a stack of layers: `communication.overlap_experts`.

Both pass a remat group before the next one, and nothing ties one to the other. So XLA's scheduler lets one compute
while tokens of the other go to their experts and back. A group's weights are gathered once for both, and its gradients
are added before they are reduced. In this file an array of a pair is a tuple of the two microbatches' arrays.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from megajax.model.sublayer import BlockInputs, add_metrics
from megajax.ops.numerics import added, wide
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.remat_groups import Group, RematGroups, StreamGradients
from megajax.step.stack.stack_weights import Amax, GroupMetrics, GroupWeights

Inputs = tuple[BlockInputs, BlockInputs]


class PairedStack(LayerStack):
    """The passes of a stack for two microbatches: its streams are pairs, `batch` is a tuple of two microbatches."""

    def __init__(self, stack: LayerStack):
        assert not stack.plan.is_pipelined
        vars(self).update(vars(stack))
        self.groups: Any = PairedGroups(stack.groups)

    def with_streams(self, batch: Any, streams: Any) -> Any:
        return tuple(super(PairedStack, self).with_streams(*own) for own in zip(batch, of_each(streams), strict=True))

    def first_gradients(self, gradients: Any, inputs: Any) -> StreamGradients:
        first = super().first_gradients
        return paired(*(first(*own) for own in zip(of_each(gradients), inputs, strict=True)))


class PairedGroups:
    """The passes of a stack's remat groups for two microbatches; their results are added, except streams."""

    def __init__(self, groups: RematGroups):
        self.groups, self.at = groups, groups.at

    def forward(
        self, at: Group, weights: GroupWeights, x: tuple[jax.Array, ...], inputs: Inputs, save: bool
    ) -> tuple[tuple[jax.Array, ...], tuple[Any, ...], GroupMetrics]:
        each = [self.groups.forward(at, weights, *own, save) for own in zip(x, inputs, strict=True)]
        x, saved, metrics = zip(*each, strict=True)
        return x, saved, add_metrics(*metrics)

    def backward(
        self, at: Group, weights: GroupWeights, saved: tuple[Any, ...], dy: StreamGradients, inputs: Inputs
    ) -> tuple[StreamGradients, GroupWeights, tuple[Amax, ...]]:
        own = [StreamGradients(x, streams) for x, streams in zip(dy.x, of_each(dy.streams), strict=True)]
        each = [self.groups.backward(at, weights, *one) for one in zip(saved, own, inputs, strict=True)]
        dx, gradients, amax = zip(*each, strict=True)
        gradient = jax.tree.map(lambda a, b: added(a.astype(wide(a.dtype)), b), *gradients)
        return paired(*dx), gradient, jax.tree.map(jnp.maximum, *amax)


def pair_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two microbatches' streams by name → pairs by name."""
    return {name: (a, other[name]) for name, a in one.items()}


def of_each(pairs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pairs of streams by name → each microbatch's streams by name."""
    return {name: a for name, (a, _) in pairs.items()}, {name: a for name, (_, a) in pairs.items()}


def paired(one: StreamGradients, other: StreamGradients) -> StreamGradients:
    """The gradients of two microbatches' streams, as pairs."""
    return StreamGradients((one.x, other.x), pair_of(one.streams, other.streams))
