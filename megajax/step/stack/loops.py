"""A loop over layers: the weights of its iterations, and its stacked outputs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.ops.barriers import not_before, not_merged
from megajax.parallel.replayed import replayed


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StackedWeight:
    """A weight in a loop over layers, still in its stack: each iteration casts and fuses its own layer.

    For weights that are not gathered once a step. A cast copy of all layers would live as long as the loop. Frozen
    weights and halves of master weights, which are stored in the compute dtype, stay in their stack without a loop too:
    both passes of a layer fuse it.
    """

    parts: dict[str, jax.Array]  # the parameters to fuse, by name: `[n, ...]`
    kind: str = field(metadata={"static": True})  # of block
    row: int = field(metadata={"static": True})  # of the first iteration
    step: int = field(metadata={"static": True})  # rows from one iteration to the next


def tie_stacked[Weights](weights: Weights, until: Any) -> Weights:
    """A group's weights with those in stacks behind a barrier: none is fused before `until` is available.

    Else XLA would keep the forward pass's copies for the backward pass.
    """
    leaves, structure = jax.tree.flatten(weights, is_leaf=lambda w: isinstance(w, StackedWeight))
    stacks = {i: w for i, w in enumerate(leaves) if isinstance(w, StackedWeight)}
    if stacks:
        stacks, _ = not_merged((stacks, until))
    return jax.tree.unflatten(structure, [stacks.get(i, w) for i, w in enumerate(leaves)])


def loop_over_layers(body: Callable, carry, xs: tuple, segment: LayerSegment, reverse: bool = False):
    """`body(carry, (index, *xs))` over a segment's loops; a single one is no loop, and its outputs are not stacked."""
    if segment.loops == 1:
        return body(carry, (0, *xs))
    if segment.policy.on_host:  # its residuals are in the host's memory
        return lax.scan(body, carry, (jnp.arange(segment.loops), *xs), reverse=reverse)

    one = jax.make_jaxpr(body, return_shape=True)(carry, (jnp.int32(0), *jax.tree.map(lambda a: a[0], xs)))
    run, (_, shapes) = replayed(*one), one[1]

    def iteration(i, state):
        carry, stacks = state
        index = segment.loops - 1 - i if reverse else i
        x = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, False), xs)
        carry, out = run(carry, (index, *x))
        return carry, jax.tree.map(lambda s, a: lax.dynamic_update_index_in_dim(s, a, index, 0), stacks, out)

    # A scan would fill its stacks with zeros, and XLA would fill those of all segments before the first one runs.
    stacks = jax.tree.map(lambda a: lax.empty((segment.loops, *a.shape), a.dtype), shapes)
    if jax.tree.leaves(stacks):  # without the barrier XLA would allocate them before they are needed
        carry, stacks = not_before((carry, stacks))
    return lax.fori_loop(0, segment.loops, iteration, (carry, stacks))
