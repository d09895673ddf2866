"""The weights of a step: those of each kind of block, and those outside the layers in one table by canonical name.

Each node takes its weights from the table and adds their gradients to the table's sums, so two nodes may share a
weight: a tied head is the embedding's table, and prediction modules use the model's head.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from megajax.model.block import Block
from megajax.sharding import BLOCKS, Placement, below, is_in_layer
from megajax.step_plan import StepPlan
from megajax.weights.masters import is_split
from megajax.weights.sums import Arrays
from megajax.weights.weight import Weight, WeightDtypes, row_major


def table_weights(plan: StepPlan, dtypes: WeightDtypes) -> dict[str, Weight]:
    """The weights outside the layers, by canonical name."""
    outside = {name: placement for name, placement in plan.placements.items() if not is_in_layer(name)}
    return {name: _weight(plan, name, {name: placement}, dtypes) for name, placement in outside.items()}


def block_weights(
    plan: StepPlan, blocks: Mapping[str, Block], dtypes: WeightDtypes, prefix: str = ""
) -> dict[str, dict[str, Weight]]:
    """The weights of each kind of block, by name within the block: fused ones, then the others.

    `plan` is that of the step, `prefix` that of the names of a teacher's parameters.
    """
    out: dict[str, dict[str, Weight]] = {}
    for kind, block in blocks.items():
        scope = block_scope(kind, prefix)
        groups = side_by_side(below(plan.placements, scope), block.fused)
        out[kind] = {name: _weight(plan, name, members, dtypes, scope) for name, members in groups.items()}
    return out


def _weight(
    plan: StepPlan, name: str, members: Mapping[str, Placement], dtypes: WeightDtypes, scope: str = ""
) -> Weight:
    trained, (first, *_) = plan.is_trained(scope + name), members.values()
    return Weight(scope + name, members, plan.sizes, dtypes, trained, trained and is_split(plan, first), scope)


def side_by_side(
    stored: Mapping[str, Placement], fused: Mapping[str, tuple[str, ...]]
) -> dict[str, dict[str, Placement]]:
    """The parameters of each weight of a block that has the `stored` ones; `fused` as in `Block`."""
    groups = {name: {m: stored[m] for m in members if m in stored} for name, members in fused.items()}
    members = {member for members_of_group in fused.values() for member in members_of_group}
    groups |= {name: {name: placement} for name, placement in stored.items() if name not in members}
    return {name: members_of_group for name, members_of_group in groups.items() if members_of_group}


def block_scope(kind: str, prefix: str = "") -> str:
    """The beginning of the canonical names of a kind of block's parameters."""
    return f"{prefix}{BLOCKS}{kind}."


class WeightTable:
    """Gathers the table once a step, and reduces its gradients once."""

    def __init__(self, weights: Mapping[str, Weight], as_stored: Collection[str]):
        """`as_stored` are used in their FP32 shards, without a gather."""
        self.weights, self.as_stored = weights, as_stored

    @jax.named_scope("weights")
    def gather(self, params: Arrays) -> dict[str, jax.Array]:
        """Stored shards of all parameters → gathered weights of the table; `fsdp` gathers them once per step too."""
        own = {name: (self.weights[name], w) for name, w in params.items() if not is_in_layer(name)}
        used = {name: w for name, (_, w) in own.items()}
        gathered = {n: (weight, weight.gather_per_step(w)) for n, (weight, w) in own.items() if n not in self.as_stored}
        return used | {name: row_major(weight.gather_per_layer(w)) for name, (weight, w) in gathered.items()}

    def zero_gradients(self, used: Arrays) -> dict[str, jax.Array]:
        """Zeros in the shapes of the gathered weights that have gradients, in the dtype of their sums."""
        trained = {name: w for name, w in used.items() if self.weights[name].is_trained}
        return {name: jnp.zeros(w.shape, self.weights[name].sum_dtype) for name, w in trained.items()}

    def complete_gradients(self, gradients: Arrays) -> dict[str, jax.Array]:
        """Gradients of the weights from `gather_per_step` → complete FP32 gradients of the stored shards."""
        out = {}
        for name, gradient in gradients.items():
            weight = self.weights[name]
            if name not in self.as_stored:
                gradient = weight.reduce_per_step(weight.reduce_per_layer(gradient))
            out[name] = weight.complete(gradient)
        return out
