"""Which layers lie on which virtual stage of the pipeline, and in which of its slots.

All virtual stages run the same program over the same number of slots, a place for one layer each. One with fewer layers
leaves slots empty. Virtual stages stand in the model's order: stage 0 .. P-1 of round 0, then of round 1, and so on.
"""

import itertools
from collections.abc import Sequence

from megajax.config.schema import Config


def virtual_stages(config: Config, stages: int) -> tuple[range, ...]:
    """The layers of each virtual stage: `stages * pipeline.rounds` ranges, or all layers in one for a single stage.

    For a config that `checks.check_mesh` lets pass with this many stages.
    """
    if stages == 1:
        return (range(config.model.num_layers),)
    count = stages * config.pipeline.rounds
    ends = itertools.accumulate(config.pipeline.layout or even_layout(config.model.num_layers, count), initial=0)
    return tuple(range(start, end) for start, end in itertools.pairwise(ends))


def slots(config: Config, stages: int) -> int:
    """Slots of every virtual stage: the layers of the largest."""
    return max(len(layers) for layers in virtual_stages(config, stages))


def first_slots(config: Config, stages: int) -> tuple[int, ...]:
    """The slot of each virtual stage's first layer.

    The first virtual stage fills its last slots, so that a pattern of layers that begins in it goes on in step in the
    next; every other fills its first slots.
    """
    return _first_slots([len(layers) for layers in virtual_stages(config, stages)])


def even_layout(layers: int, count: int, unit: int = 1) -> tuple[int, ...]:
    """Layers of each of `count` virtual stages, as even as whole slots allow.

    There are as few slots as possible, a multiple of `unit`. Empty slots go to the last and the first virtual stage in
    turn while these keep a layer, then to the pair next to them, inwards; inner ones keep a multiple of `unit`.
    Of one or two virtual stages too many, the last and the first are left empty. Where there are too few layers for
    any of this, the sum is not `layers`.
    """
    if layers < count <= layers + 2:
        return (1 if count == layers + 1 else 0, *[1] * (count - 2), 0)
    size = unit * -(-layers // (count * unit))
    counts = [size] * count
    empty = size * count - layers
    inner = max(0, -(-(empty - 2 * (size - 1)) // unit))  # units that the two at the ends cannot spare
    for low in range(1, (count + 1) // 2):
        inner -= _take(counts, low, inner, unit)
    _take(counts, 0, sum(counts) - layers, 1)
    return tuple(counts)


def in_step(layout: Sequence[int], period: int) -> bool:
    """Whether a slot has the same place in a pattern of `period` layers on all virtual stages of `layout`."""
    starts = itertools.accumulate(layout[:-1], initial=0)
    return len({(start - first) % period for start, first in zip(starts, _first_slots(layout), strict=True)}) == 1


def layout_in_step(layers: int, count: int, period: int) -> tuple[int, ...] | None:
    """A layout that keeps a pattern of `period` layers in step over `count` virtual stages, if one is found."""
    if layers < count:
        return None
    full = period * -(-layers // (count * period))
    candidates = [even_layout(layers, count, period)]
    if count == 2:  # a full one keeps the other in step
        candidates.append((full, layers - full))
    for layout in candidates:
        if sum(layout) == layers and min(layout) > 0 and in_step(layout, period):
            return layout
    return None


def _first_slots(layout: Sequence[int]) -> tuple[int, ...]:
    return (max(layout) - layout[0], *(0 for _ in layout[1:]))


def _take(counts: list[int], low: int, wanted: int, unit: int) -> int:
    """Takes up to `wanted` units in turn from the virtual stage `low` from the end and from the start; how many."""
    high = len(counts) - 1 - low
    room = counts[high] // unit - 1
    taken = min(wanted, room if low == high else 2 * room)
    if low == high:
        counts[low] -= taken * unit
    else:
        counts[high] -= (taken + 1) // 2 * unit
        counts[low] -= taken // 2 * unit
    return taken
