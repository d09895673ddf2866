"""Numbers of elements of the weights on one device: as stored, and after the gathers of a step."""

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megajax.layout.kinds import extra_kind, extra_layers
from megajax.model.block import Block, linear_layers
from megajax.runtime import LAYER_BYTES
from megajax.sharding import BLOCKS, PER_STEP_AXES, TEACHER, is_in_layer
from megajax.step.embedding import TOKENS
from megajax.step_plan import StepPlan


@dataclass(frozen=True)
class Elements:
    """Numbers of elements of some weights on one device; `per_step_bytes` and `gathered_bytes` are bytes."""

    stored: int = 0
    per_step: int = 0  # after the once-a-step gather
    whole: int = 0  # after the gather over `fsdp` too, as used in matmuls
    per_step_bytes: int = 0  # of `per_step` in the format that a step keeps: the compute dtype, or FP8
    before_loops_bytes: int = (
        0  # of the part of `per_step_bytes` that is gathered once a step or in FP8: not cast in loops
    )
    gathered_bytes: int = 0  # of the part of `whole` that `fsdp` gathers when a layer needs it, in that format
    reduced: int = 0  # part of `whole` whose gradients are reduced right after their layer
    stack_bytes: int = 0  # of the gradients as a loop stacks them: after the reduction over `fsdp` only
    left: int = 0  # part of `stored` whose gradients are not, and stay in the compute dtype until the end

    def __add__(self, other: "Elements") -> "Elements":
        return Elements(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, count: int) -> "Elements":
        return Elements(*(count * number for number in vars(self).values()))


class StepWeights:
    """The weights of a step by name and by kind of layer."""

    def __init__(self, plan: StepPlan, blocks: Mapping[str, Block], compute: int):
        """`compute` is the number of bytes of the compute dtype."""
        self.plan, self.config, self.sizes, self.placements = plan, plan.config, plan.sizes, plan.placements
        self.blocks, self.compute = blocks, compute
        self.repeats = plan.config.batch.num_microbatches > 1 or plan.is_pipelined
        quantised = plan.config.fp8_layers and plan.config.precision.fp8.chosen.has_kernels
        self.linear = frozenset(linear_layers(plan.config.model)) if quantised else frozenset[str]()
        self._layers = dict[tuple[str, bool, bool], Elements]()
        self.fp8_slots = {j for s in plan.segments if s.fp8 for j in range(s.start, s.start + s.count)}

    def layers(self, slots: Sequence[int], trained: bool = False) -> Elements:
        """Elements of the weights in some slots; if `trained` only of those that have gradients."""
        equal = Counter(self._equal_slots[slot] for slot in slots)
        return sum((self.slot(slot, trained) * count for slot, count in equal.items()), Elements())

    @cached_property
    def _equal_slots(self) -> list[int]:
        """For each slot the first one with the same elements."""
        first: dict[tuple[str, bool, bool], int] = {}
        slots = enumerate(self.plan.layer_slots)
        return [first.setdefault((k.block, j in self.fp8_slots, j in self.plan.gathered_slots), j) for j, k in slots]

    def slot(self, slot: int, trained: bool = False) -> Elements:
        """Elements of the weights in one slot."""
        layer = self.layer(self.plan.layer_slots[slot].block, trained, slot in self.fp8_slots)
        if slot not in self.plan.gathered_slots:
            return layer
        # In FP8 with the transposed weights
        return replace(
            layer, per_step=layer.whole, per_step_bytes=self.compute * layer.whole, gathered_bytes=0, reduced=0
        )

    def layer(self, kind: str, trained: bool = False, in_fp8: bool = False) -> Elements:
        """Elements of one layer of a kind; if `trained` only of the weights that have gradients."""
        key = kind, trained, in_fp8
        if key not in self._layers:
            self._layers[key] = sum((self.elements(n, kind, in_fp8) for n in self.names_of(kind, trained)), Elements())
        return self._layers[key]

    @property
    def fuses_in_turn(self) -> bool:
        """Whether each pass of a layer fuses the weights that are stored in the compute dtype."""
        config = self.config
        halves = config.optimizer.master == "split" and not config.precision.fp8.chosen.has_kernels
        return self.plain and (config.lora.rank is not None or halves)

    def unrolled_bytes(self, slots: Sequence[int]) -> int:
        """Bytes of the weights in slots outside loops in the format that a step keeps, besides those as stored."""
        if self.config.lora.rank is not None and not self.plain:  # frozen weights are stored in the compute dtype
            return self.layers(slots).before_loops_bytes
        return self.layers(slots, trained=self.fuses_in_turn).per_step_bytes

    def fused(self, layer: Elements) -> int:
        """Bytes of the weights of a layer that `fsdp` does not gather, while the layer fuses and computes with them."""
        return self.compute * layer.whole - layer.gathered_bytes if self.fuses_in_turn else 0

    @property
    def plain(self) -> bool:
        """Whether there is no once-a-step gather and no pipeline: then loops cast their own weights."""
        return all(self.sizes[axis] == 1 for axis in (*PER_STEP_AXES, "pipeline"))

    @cached_property
    def linear_of(self) -> dict[str, int]:
        """By kind of layer the elements of the linear layers of one layer that FP8 quantises, without experts."""

        def of_kind(kind: str) -> int:
            linear = (n for n in self.names_of(kind, True) if self.fused_name(kind, n) in self.linear)
            return sum(self.elements(n, kind).whole for n in linear if "experts" not in self.placements[n].axes)

        return {kind: of_kind(kind) for kind in self.blocks}

    def names_of(self, kind: str, trained: bool) -> list[str]:
        """Names of the weights of a kind of layer; if `trained` only of those that have gradients."""
        names = (name for name in self.placements if name.startswith(f"{BLOCKS}{kind}."))
        return [name for name in names if self.plan.is_trained(name) or not trained]

    @property
    def extra_layer(self) -> Elements:
        """Elements of a layer after the model's."""
        return self.layer(extra_kind(self.config.model).block, True, self.plan.segments[-1].fp8)

    @property
    def extra_layers(self) -> Elements:
        """Elements of all of them."""
        return sum((self.extra_layer for _ in extra_layers(self.config.model)), Elements())

    @cached_property
    def non_block_by_name(self) -> dict[str, Elements]:
        """Elements of each weight outside the blocks; those of an encoder's layers are not all whole at one time."""
        found = {name: self.elements(name) for name in self.placements if not name.startswith((BLOCKS, TEACHER))}
        return {n: replace(e, whole=e.per_step) if is_in_layer(n) else e for n, e in found.items()}

    @property
    def teacher(self) -> int:
        """Bytes of a teacher's weights besides those as stored: gathered once a step, and those of one layer."""
        if (teacher := self.config.teacher.model) is None:
            return 0
        by_name = {name: self.elements(name) for name in self.placements if name.startswith(TEACHER)}
        layers = sum((e for name, e in by_name.items() if is_in_layer(name)), Elements())
        outside = sum(e.whole for name, e in by_name.items() if not is_in_layer(name) and e.whole > e.stored)
        is_gathered = any(self.sizes[axis] > 1 for axis in (*PER_STEP_AXES, "pipeline"))
        of_layer = layers.gathered_bytes // teacher.num_layers
        return layers.per_step_bytes * is_gathered + of_layer + self.compute * outside

    @property
    def non_block_as_stored(self) -> Elements:
        """Elements of the gradients outside the blocks, as stored."""
        return sum((e for name, e in self.non_block_by_name.items() if self.plan.is_trained(name)), Elements())

    @cached_property
    def non_block(self) -> Elements:
        """Elements outside the blocks that are gathered."""
        return self.gathered_outside(trained=False)

    def gathered_outside(self, trained: bool) -> Elements:
        """Elements outside the blocks without an embedding that is looked up in its shards; as in `layers`."""
        rows = self.plan.embedding_axes
        by_name = {n: e for n, e in self.non_block_by_name.items() if self.plan.is_trained(n) or not trained}
        return sum((e for name, e in by_name.items() if not (name == TOKENS and rows)), Elements())

    @cached_property
    def non_block_whole(self) -> Elements:
        """Elements of the gradients outside the blocks: those of a looked-up embedding have the size of its shard."""
        rows = self.plan.embedding_axes and self.plan.is_trained(TOKENS)
        shard = self.non_block_by_name[TOKENS].stored if rows else 0
        return self.gathered_outside(trained=True) + Elements(shard, shard, shard)

    def elements(self, name: str, kind: str | None = None, in_fp8: bool = False) -> Elements:
        """Elements of a weight on this device: of its stage's layers, or of one layer of a `kind`."""
        placement, sizes = self.placements[name], self.sizes
        shards = math.prod(n for axis, n in sizes.items() if axis not in placement.replicated_axes)
        stored = math.prod(placement.stored_shape) // shards
        if kind is not None:
            stored //= placement.stored_shape[0] // (1 if placement.layers is None else sizes["pipeline"])
        gathered = placement.storage_axes
        per_step = stored * math.prod(sizes[axis] for axis in gathered if axis != "fsdp")
        whole = per_step * (sizes["fsdp"] if "fsdp" in gathered else 1)
        number = per_step_number = self.compute
        quantised = in_fp8 and kind is not None and self.fused_name(kind, name) in self.linear
        if quantised:
            number, per_step_number = 1, 1 if whole > per_step else 2  # a weight that is whole is kept transposed too
        is_reduced = whole > (per_step if self.repeats else stored)
        in_fp32 = is_reduced or placement.storage_dim is None  # vectors are always in FP32
        return Elements(
            stored,
            per_step,
            whole,
            per_step_number * per_step,
            per_step_number * per_step if per_step > stored or quantised else 0,
            number * whole if whole > per_step else 0,
            whole if is_reduced else 0,
            per_step * (4 if whole > per_step or placement.storage_dim is None else self.compute),
            0 if in_fp32 else stored,
        )

    def fused_name(self, kind: str, name: str) -> str:
        """The name within a block of the fused weight that a parameter is a part of."""
        member = name.removeprefix(f"{BLOCKS}{kind}.")
        return next((fused for fused, members in self.blocks[kind].fused.items() if member in members), member)

    def reduced_in_backward(self, slots: Sequence[int]) -> int:
        """Elements of the gradients in these slots that are reduced in one collective, right after their layer."""
        kinds = {self.plan.layer_slots[slot].block for slot in slots if slot not in self.plan.gathered_slots}
        return max((self.most_reduced[kind] for kind in kinds), default=0)

    @cached_property
    def most_reduced(self) -> dict[str, int]:
        """By kind of layer the elements that XLA reduces in one collective: all if the results are small enough.

        Otherwise the largest fused weight.
        """
        by_kind = {kind: [self.elements(n, kind) for n in self.names_of(kind, True)] for kind in self.blocks}
        results = {kind: 4 * sum(e.per_step for e in each if e.reduced) for kind, each in by_kind.items()}
        return {
            kind: sum(e.reduced for e in each) if results[kind] <= LAYER_BYTES else self.largest[kind]
            for kind, each in by_kind.items()
        }

    @cached_property
    def largest(self) -> dict[str, int]:
        """By kind of layer the elements of the largest fused weight whose gradient is reduced right after its layer."""
        sizes = {kind: Counter[str]() for kind in self.blocks}
        for kind, counted in sizes.items():
            for name in self.names_of(kind, True):
                counted[self.fused_name(kind, name)] += self.elements(name, kind).reduced
        return {kind: max(counted.values(), default=0) for kind, counted in sizes.items()}
