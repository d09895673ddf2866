"""Memory and work of the optimizer."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.mesh import AXES
from megajax.optim.forms import StateArray
from megajax.optim.matrix_exchange import groups, rounds
from megajax.optim.optimizer import MatrixOptimizer
from megajax.optim.slots import OptimizerSlots
from megajax.sharding import Placement
from megajax.step_plan import StepPlan


class StateBytes(NamedTuple):
    """Bytes of the train state on one device."""

    weights: int
    optimizer: int  # what only the update needs: slots, averages, low bits of split weights
    on_host: int  # the same in the host's memory or in files; an update moves them there and back
    largest_moved: int  # those of them that are updated together, at most


def state_bytes(plan: StepPlan, slots: OptimizerSlots) -> StateBytes:
    """Bytes on a device of the weights, and of what only the update needs; all steps keep both."""
    weights: list[StateArray] = jax.tree.leaves(slots.stored.params)
    for name, placement in plan.placements.items():
        if name not in slots.placements:  # frozen
            weights.append(StateArray(placement, placement.dtype_in_use(plan.compute)))
    on_device, moved = 0, Counter[str]()
    for array in slots.slot_arrays:
        size = _on_a_device(plan, jax.tree.leaves(array.stored(slots.sizes)))
        if array.key in slots.offloaded:
            moved[array.parameter] += size
        else:
            on_device += size
    together = max(moved.values(), default=0)
    if slots.in_files:  # a large parameter and a small one
        together += min(moved.values())
    return StateBytes(_on_a_device(plan, weights), on_device, moved.total(), together)


def _on_a_device(plan: StepPlan, arrays: Iterable[StateArray]) -> int:
    placed = ((array.bytes, array.placement) for array in arrays if array.placement is not None)
    return sum(size // shards(plan, placement) for size, placement in placed)


def shards(plan: StepPlan, placement: Placement) -> int:
    """Number of shards of a stored weight."""
    return math.prod(plan.sizes[axis] for axis in AXES if axis not in placement.replicated_axes)


def matrix_operations(slots: OptimizerSlots) -> dict[tuple[int, str], float]:
    """Operations of the optimizer's matmuls on one device in a step, by matrices' smaller dimension and dtype."""
    work = dict[tuple[int, str], float]()
    for member in slots.members:
        if not isinstance(member.optimizer, MatrixOptimizer):
            continue
        for shape, names in groups(member.layouts, member.with_slots):
            count, each = rounds(shape, slots.sizes, sum(member.layouts[name].count for name in names))
            one = member.optimizer.operations(shape.rows, shape.columns)
            key = min(shape.rows, shape.columns), jnp.dtype(member.optimizer.dtype).name
            work[key] = work.get(key, 0.0) + count * each * one
    return work
