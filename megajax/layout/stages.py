"""The layers of each virtual stage of the pipeline, and their layer slots.

All virtual stages run the same program over the same layer slots; a slot holds one layer of one kind. On a virtual
stage without a layer for a slot the slot is empty. Virtual stages are in the model's order: the first of each of the
stages 0 .. P-1, then the second of each, and so on.
"""

import functools
import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from megajax.layout.kinds import LayerKind, attention_kinds, deepstack_count, is_mixed, layer_kinds
from megajax.schema.config import Config
from megajax.schema.fields import cached
from megajax.schema.model import ModelConfig

FEWEST_KEPT = 4  # layers of a pass whose first and last `fsdp` gathers and reduces once per step


def virtual_stages(config: Config, stages: int) -> tuple[range, ...]:
    """The layers of each virtual stage: one range for each, or all layers in one for a single stage.

    The config must have passed `checks.check_mesh` with this number of stages.
    """
    if stages == 1:
        return (range(config.model.num_layers),)
    return _ranges(config.pipeline.layout or default_layout(config.model, stages * config.pipeline.virtual_stages))


def slot_kinds(config: Config, stages: int) -> tuple[LayerKind, ...]:
    """The kind of layer in each slot, the same on every virtual stage."""
    return _slot_kinds(config.model, virtual_stages(config, stages))


def image_slots(config: Config, stages: int) -> range:
    """The slots, on any virtual stage, of the layers that add image features (DeepStack), and those between them."""
    count = deepstack_count(config.model)
    layers = zip(virtual_stages(config, stages), layer_slots(config, stages), strict=True) if count else ()
    slots = [slot for own, filled in layers for layer, slot in zip(own, filled, strict=True) if layer < count]
    return range(min(slots), max(slots) + 1) if slots else range(0)


def gathered_slots(passes: Iterable[range]) -> tuple[int, ...]:
    """Slots whose layers `fsdp` gathers and reduces once per step: the first and last of each long pass.

    `passes` are the slots of each pass in an operation of a pipeline. Otherwise these layers' gathers and reductions
    would run between operations, where no other layer's computation hides them.
    """
    ends = {slot for slots in passes if len(slots) >= FEWEST_KEPT for slot in (slots[0], slots[-1])}
    return tuple(sorted(ends))


def count_layer_slots(config: Config, stages: int) -> int:
    """Number of slots: the layers of the largest virtual stage, or more where stages need slots of different kinds."""
    return len(slot_kinds(config, stages))


def layer_slots(config: Config, stages: int) -> tuple[tuple[int, ...], ...]:
    """The slot of each layer of each virtual stage."""
    ranges, kinds = virtual_stages(config, stages), layer_kinds(config.model)
    if is_mixed(config.model):
        pattern = _slot_kinds(config.model, ranges)
        return tuple(_first_positions([kinds[layer] for layer in layers], pattern) for layers in ranges)
    starts = _first_slots([len(layers) for layers in ranges])
    return tuple(tuple(range(start, start + len(layers))) for start, layers in zip(starts, ranges, strict=True))


@cached
def default_layout(model: ModelConfig, count: int) -> tuple[int, ...]:
    """Number of layers of each of `count` virtual stages: even; with layers of two kinds, the fewest slots.

    A slot for one of the dense layers at the start exists on all virtual stages. So in the candidate layouts the first
    virtual stages have only a few of these layers, and the next one has the rest; the other layers are spread evenly.
    Ties go to the layout with fewer MoE slots.
    """
    even = even_layout(model.num_layers, count)
    if not is_mixed(model):
        return even
    kinds = layer_kinds(model)
    best, least = even, (model.num_layers + 1, 0)
    for layout in _layouts_of_mixed(model, count):
        counts = [Counter(kinds[layer] for layer in layers) for layers in _ranges(layout)]
        if functools.reduce(operator.or_, counts).total() > least[0]:
            continue  # the slots for the largest count of each kind are already too many
        pattern = _slot_kinds(model, _ranges(layout))
        cost = len(pattern), sum(kind.has_experts for kind in pattern)
        if cost < least:
            best, least = layout, cost
    return best


@cached
def layouts_to_try(model: ModelConfig, count: int) -> tuple[tuple[int, ...], ...]:
    """Legal layouts of `count` virtual stages that may be the fastest, `default_layout` first if it is legal.

    All stages run the slots of the largest, empty or not, and share the embedding and the head. So the time depends on
    the slots only, and fewer layers on some stages than the default has cost more slots on all of them. With layers of
    two kinds no layout has fewer slots of each kind; with a pattern of layers the slots have it on all stages.
    """
    default, period = default_layout(model, count), len(attention_kinds(model))
    if sum(default) != model.num_layers or 0 in default[1:-1]:
        return ()
    if not is_mixed(model):
        layout = default if in_step(default, period) else layout_in_step(model.num_layers, count, period)
        return () if layout is None else (layout,)
    slots = {layout: Counter(_slot_kinds(model, _ranges(layout))) for layout in _layouts_of_mixed(model, count)}
    found = {frozenset(slots[default].items()): default}
    for layout, own in slots.items():
        if not any(other < own for other in slots.values()):  # a part of its slots
            found.setdefault(frozenset(own.items()), layout)
    return tuple(found.values())


def _layouts_of_mixed(model: ModelConfig, count: int) -> list[tuple[int, ...]]:
    """Legal layouts of a model with layers of two kinds: even, or with the dense layers at the start by themselves."""
    L, interval = model.num_layers, model.moe_layer_interval
    layouts = [even_layout(L, count), even_layout(L, count, interval)]
    start = model.first_dense_layers // interval * interval  # the kinds repeat from this layer on
    for dense in range(1, start + 1):
        alone = -(-start // dense) - 1
        if alone < count:
            first, *others = even_layout(L - start, count - alone, interval)
            layouts.append((*[dense] * alone, first + start - dense * alone, *others))
    return [layout for layout in layouts if sum(layout) == L and 0 not in layout[1:-1]]


def even_layout(layers: int, count: int, multiple: int = 1) -> tuple[int, ...]:
    """Number of layers of each of `count` virtual stages, as even as possible.

    The number of slots is the smallest one that fits and is divisible by `multiple`. Empty slots go alternately to the
    last and the first virtual stage until these have one layer, then to the next pair inwards; the number of layers of
    inner stages is divisible by `multiple`. With one or two virtual stages more than layers, the last and the first are
    empty. With still fewer layers the sum is not `layers`.
    """
    if layers < count <= layers + 2:
        return (1 if count == layers + 1 else 0, *[1] * (count - 2), 0)
    size = multiple * -(-layers // (count * multiple))
    counts = [size] * count
    empty = size * count - layers
    inner = max(0, -(-(empty - 2 * (size - 1)) // multiple))  # units that the first and the last stage cannot give
    for low in range(1, (count + 1) // 2):
        inner -= _take(counts, low, inner, multiple)
    _take(counts, 0, sum(counts) - layers, 1)
    return tuple(counts)


def in_step(layout: Sequence[int], period: int) -> bool:
    """Whether each slot has the same position in a pattern of `period` layers on all virtual stages of `layout`."""
    starts = itertools.accumulate(layout[:-1], initial=0)
    return len({(start - first) % period for start, first in zip(starts, _first_slots(layout), strict=True)}) == 1


def layout_in_step(layers: int, count: int, period: int) -> tuple[int, ...] | None:
    """A layout of `count` virtual stages for which `in_step` holds, if one is found."""
    if layers < count:
        return None
    full = period * -(-layers // (count * period))
    candidates = [even_layout(layers, count, period)]
    if count == 2:  # the second starts at the pattern's beginning
        candidates.append((full, layers - full))
    for layout in candidates:
        if sum(layout) == layers and min(layout) > 0 and in_step(layout, period):
            return layout
    return None


def _ranges(layout: Iterable[int]) -> tuple[range, ...]:
    ends = itertools.accumulate(layout, initial=0)
    return tuple(range(start, end) for start, end in itertools.pairwise(ends))


@cached
def _slot_kinds(model: ModelConfig, ranges: tuple[range, ...]) -> tuple[LayerKind, ...]:
    """Slot kinds that hold the layers of every virtual stage in order; the number is small, not always minimal."""
    kinds = layer_kinds(model)
    sequences = dict.fromkeys(tuple(kinds[layer] for layer in layers) for layers in ranges)
    return functools.reduce(_merged, sequences) if is_mixed(model) else max(sequences, key=len)


def _merged[Kind](a: Sequence[Kind], b: Sequence[Kind]) -> tuple[Kind, ...]:
    """A shortest common supersequence of `a` and `b`; ties take the next item of `a` first."""
    # A common start or end belongs to every shortest one; the table below covers only the rest.
    start = _common(a, b)
    end = _common(a[start:][::-1], b[start:][::-1])
    head, tail = a[:start], a[len(a) - end :]
    a, b = a[start : len(a) - end], b[start : len(b) - end]
    lengths = {(i, len(b)): len(a) - i for i in range(len(a) + 1)} | {(len(a), j): len(b) - j for j in range(len(b))}
    for i, j in itertools.product(reversed(range(len(a))), reversed(range(len(b)))):
        both = lengths[i + 1, j + 1] if a[i] == b[j] else len(a) + len(b)
        lengths[i, j] = 1 + min(both, lengths[i + 1, j], lengths[i, j + 1])
    merged, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        if a[i] == b[j]:
            merged.append(a[i])
            i, j = i + 1, j + 1
        elif lengths[i + 1, j] <= lengths[i, j + 1]:
            merged.append(a[i])
            i += 1
        else:
            merged.append(b[j])
            j += 1
    return (*head, *merged, *a[i:], *b[j:], *tail)


def _common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The number of equal items at the start of both."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _first_positions[Kind](sequence: Iterable[Kind], pattern: Sequence[Kind]) -> tuple[int, ...]:
    """The position in `pattern` of each item of `sequence`, in increasing order."""
    positions, start = [], 0
    for kind in sequence:
        positions.append(pattern.index(kind, start))
        start = positions[-1] + 1
    return tuple(positions)


def _first_slots(layout: Sequence[int]) -> tuple[int, ...]:
    """The slot of each virtual stage's first layer, if all layers have the same parameters.

    The first virtual stage fills its last slots, so that a pattern of layers continues on the next stage at the right
    slot; the other stages fill their first slots.
    """
    return (max(layout) - layout[0], *(0 for _ in layout[1:]))


def _take(counts: list[int], low: int, wanted: int, multiple: int) -> int:
    """Takes up to `wanted` units alternately from stage `low` from the end and from the start; the number taken."""
    high = len(counts) - 1 - low
    room = counts[high] // multiple - 1
    taken = min(wanted, room if low == high else 2 * room)
    if low == high:
        counts[low] -= taken * multiple
    else:
        counts[high] -= (taken + 1) // 2 * multiple
        counts[low] -= taken // 2 * multiple
    return taken
