"""The two parts of a stage's backward pass, where `1f1b` gives a stage one operation a tick (docs/pipeline.md).

A tick holds a forward operation or one part. A layer's backward pass takes about twice as long as its forward pass, so
two equal parts take as long as a forward operation each.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megajax.layout.kinds import block_layers
from megajax.layout.stages import count_layer_slots
from megajax.layout.sublayers import takes_order
from megajax.schema.config import Config

PARTS = 2
BACKWARD, RECOMPUTED = 2, 3  # the time of a layer's backward pass in forward passes, without and with recomputation
LARGEST_LOSS = 0.02  # of the time of all operations: with a larger one stages run in lockstep
WIDE = 1024  # numbers per token on a device; pieces go around a ring of `tensor` beside layers three times as wide


class BackwardParts(NamedTuple):
    """The slots of each part, from the last slots to the first; none: stages run in lockstep, for this reason."""

    slots: tuple[range, ...] = ()
    lockstep_because: str = ""

    @property
    def edges(self) -> tuple[int, ...]:
        """Where segments of layers end besides those that follow from the slots."""
        return tuple(part.start for part in self.slots if part.start)


def backward_parts(config: Config, sizes: Mapping[str, int], platform: str = "gpu") -> BackwardParts:
    """The parts of the backward pass of each stage, on a mesh of `sizes`; no parts and no reason without stages."""
    if sizes["pipeline"] == 1:
        return BackwardParts()
    pipeline, remat, count = config.pipeline, config.remat, count_layer_slots(config, sizes["pipeline"])
    if pipeline.schedule != "1f1b":
        return BackwardParts(lockstep_because=f"pipeline.schedule={pipeline.schedule}")
    if pipeline.virtual_stages > 1:
        return BackwardParts(lockstep_because=f"pipeline.virtual_stages={pipeline.virtual_stages}")
    if platform == "cpu" and (axis := _permuted_axis(config, sizes)):
        why = f"on CPUs the layers' permutations over mesh.{axis} need all stages at once"
        return BackwardParts(lockstep_because=why)
    covered = count if remat.layers is None else remat.layers
    recomputed = covered if remat.chosen.keeps_input else 0
    if recomputed == count:
        return BackwardParts(lockstep_because=f"remat.policy={remat.policy} keeps little of each microbatch")
    costs = [RECOMPUTED if slot < recomputed else BACKWARD for slot in range(count)]
    starts = [slot for slot in range(1, count) if slot >= covered or slot % remat.group == 0]
    if not starts:
        return BackwardParts(
            lockstep_because="a stage has one layer slot" if count == 1 else "a stage has one remat group"
        )
    start, largest = min(((s, max(sum(costs[:s]), sum(costs[s:]))) for s in starts), key=lambda found: found[1])
    lost = (PARTS + 1) * max(largest, count) / (count + sum(costs)) - 1
    if lost > LARGEST_LOSS:
        return BackwardParts(lockstep_because=f"{count} layer slots have no equal halves")
    return BackwardParts((range(start, count), range(start)))


def _permuted_axis(config: Config, sizes: Mapping[str, int]) -> str | None:
    """An axis over which layers may permute arrays: on CPUs all devices of the mesh take part in a permutation.

    On GPUs only those of a stage do (`runtime.xla_flags`).
    """
    model = config.model
    if sizes["tensor"] > 1 and max(model.hidden_size, model.ffn_hidden_size) >= WIDE * sizes["tensor"]:
        return "tensor"
    in_order = any(map(takes_order, block_layers(model)))
    return "context" if sizes["context"] > 1 and (in_order or config.context_strategy(sizes).permutes) else None
