"""The weights of a stage's blocks: gathers for each remat group, and reductions of their gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layout.kinds import LayerKind
from megajax.layout.segments import LayerSegment
from megajax.model.block import Block
from megajax.model.lora import is_trained
from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight
from megajax.options.remat import RematPolicy
from megajax.parallel.comm import MeshComm
from megajax.parallel.weights.exchange import WeightExchange, in_turn, row_major
from megajax.parallel.weights.fused import FusedWeights
from megajax.parallel.weights.masters import is_split
from megajax.parallel.weights.scaling import Scales, Scaling
from megajax.sharding import BLOCKS
from megajax.step.stack.loops import StackedWeight
from megajax.step.stack.rows import Rows
from megajax.step_plan import StepPlan

LayerState = Mapping[str, Mapping[str, jax.Array]]  # by kind of block and name: `[L, ...]` of its layers
type ByGroup[T] = Sequence[Sequence[T]]  # by segment and remat group of its body
GroupWeights = tuple[dict[str, Any], ...]  # the fused weights of a group's layers, by name: arrays or Fp8Weights
Amax = dict[str, jax.Array]  # by linear layer: the largest magnitudes of its input and its output gradient
Metrics = tuple[dict[str, jax.Array], ...]  # of a group's layers, by name


@dataclass(frozen=True)
class GroupProgram:
    """Everything that a group's computation depends on: groups with equal programs are traced and lowered once."""

    kinds: tuple[LayerKind, ...]  # of its layers
    gathered: tuple[bool, ...]  # for each layer, whether its weights stay gathered over `fsdp`
    policy: RematPolicy
    fp8: bool
    stacked: bool  # whether its residuals are copied into the stacked array of a loop, or a pipeline's buffer
    looped: bool


class StackWeights:
    """Gathers a remat group's weights from stored shards for `LayerStack`, and reduces their gradients.

    For each kind of block with n layer slots, a stage stores R·n rows of every weight (`rows.Rows`).
    """

    def __init__(
        self,
        plan: StepPlan,
        comm: MeshComm,
        blocks: Mapping[str, Block],
        exchange: WeightExchange,
        fused: Mapping[str, FusedWeights],
        prefix: str = "",
    ):
        """`prefix` is that of the names of the model's parameters."""
        self.plan, self.comm, self.blocks, self.exchange, self.fused = plan, comm, blocks, exchange, fused
        self.prefix = prefix
        self.slots, self.table, self.segments = plan.layer_slots, plan.layer_table, plan.segments
        self.scaling, self.gathered = Scaling(plan), plan.gathered_slots
        self.rounds = self.table.shape[1]
        self.all = Rows(self.table, range(len(self.slots)))
        self.kinds = {
            kind: Rows(self.table, [j for j, slot in enumerate(self.slots) if slot.block == kind]) for kind in blocks
        }
        # A layer's state that is not a parameter; it is passed among its group's weights.
        self.state_names = {kind: {*block.layer_state, *block.needs_filled} for kind, block in blocks.items()}
        lora = plan.lora
        self.trained = {kind: {n for n in own.parts if is_trained(lora, prefix + n)} for kind, own in fused.items()}
        # Those that are stored in the dtype of the step's matmuls.
        halves = {kind: {n for n in own.parts if is_split(plan, own.placements[n])} for kind, own in fused.items()}
        self.stored = {kind: own.parts.keys() - (self.trained[kind] - halves[kind]) for kind, own in fused.items()}

    @jax.named_scope("weights")
    def gather_once(
        self, params: Mapping[str, jax.Array], scales: Scales, state: LayerState
    ) -> list[tuple[GroupWeights, ...]]:
        """Stored `[R·slots, ...]` shards → for each segment its groups' `fsdp` shards, `[R·loops, ...]` or `[...]`.

        `scales` are the linear layers' FP8 scales, `[R·slots]` each; `state` is the layers' state, `[L, ...]`.
        """
        state = self._state_of_stage(state)
        blocks = {kind: of_block(params, kind, self.prefix) for kind in self.kinds}

        def layer(segment: LayerSegment, j: int) -> dict[str, Any]:
            kind = self.slots[segment.start + j].block
            rows, fused = self.kinds[kind], self.fused[kind]
            out: dict[str, Any] = {}
            if len(self.table) == 1:
                row, step = rows.first_row(segment, j)
                for name, members in fused.parts.items():
                    in_fp8 = segment.fp8 and name in self.scaling.layers
                    wanted = segment.loops > 1 or (name in self.stored[kind] and segment.start + j not in self.gathered)
                    if wanted and not in_fp8 and not self.exchange.is_gathered_once(self.stored_name(kind, name)):
                        out[name] = StackedWeight({member: blocks[kind][member] for member in members}, kind, row, step)
            cut = {part for weight in out.values() for part in weight.parts}
            stored = {name: rows.layer_of(w, segment, j) for name, w in blocks[kind].items() if name not in cut}
            for name, w in fused.fuse(stored).items():
                if segment.fp8 and name in self.scaling.layers:
                    own = {which: self.all.layer_of(scale, segment, j) for which, scale in scales[name].items()}
                    out[name] = self._quantized(kind, name, w, own)
                else:
                    out[name] = self.exchange.gather_once(self.stored_name(kind, name), w)
            if segment.start + j in self.gathered:
                out = {name: self._gathered(kind, name, w) for name, w in out.items()}
            return out | {name: rows.layer_of(a, segment, j) for name, a in state[kind].items()}

        def groups(s: LayerSegment):
            return tuple(tuple(layer(s, u + i) for i in range(s.group_size)) for u in range(0, s.unroll, s.group_size))

        return [groups(segment) for segment in self.segments]

    @jax.named_scope("weights")
    def weight_amax(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The amax of each linear layer's weight, `[R·slots]`, over all devices; empty without FP8."""
        if not self.scaling.settings.chosen.has_kernels:
            return {}
        blocks = {kind: of_block(params, kind, self.prefix) for kind in self.kinds}
        local = {}
        for name in self.scaling.layers:
            found = {}
            for kind, own in blocks.items():
                parts = [own[part] for part in self.fused[kind].parts.get(name, ())]
                if parts:
                    found[kind] = jnp.stack([jnp.abs(w).max(axis=range(1, w.ndim)) for w in parts]).max(axis=0)
                    found[kind] = found[kind].astype(jnp.float32)
            local[name] = self._over_slots(found)
        return self.comm.max_over_devices(local)

    def history_of_stage(self, history: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Amax histories of the train state `[layers, length]` → those of this stage's slots `[R·slots, length]`."""
        first, last = int(self.all.layers[0]), int(self.all.layers[-1])
        return self.all.of_stage({name: a[first : last + 1] for name, a in history.items()})

    @jax.named_scope("gradients")
    def collect(self, gradients: ByGroup[GroupWeights], only_microbatch: bool) -> dict[str, jax.Array]:
        """Gradients from `backward`, summed over the microbatches → complete FP32 gradients of the stored shards."""
        parts: dict[tuple[str, str], list[jax.Array]] = {}
        for segment, groups in zip(self.segments, gradients, strict=True):
            if not reduced_on_the_way(segment, only_microbatch):
                reduced = [self._reduce_gathered(group, segment, u) for u, group in enumerate(groups)]
                groups = [self._scatter_once(group, segment, u) for u, group in enumerate(reduced)]
            for kind, layers in self.by_kind(segment, groups):
                for name in layers[0]:
                    stacked = self.kinds[kind].stack([layer[name] for layer in layers], segment)
                    complete = self.exchange.complete(self.stored_name(kind, name), stacked)
                    for part, gradient in self.fused[kind].split(name, complete).items():
                        parts.setdefault((kind, part), []).append(gradient)
        joined = {(kind, part): self.kinds[kind].join(gradients) for (kind, part), gradients in parts.items()}
        return {self.stored_name(*key): self.kinds[key[0]].without_empty(g) for key, g in joined.items()}

    def zero_gradients(self, gradients: ByGroup[GroupWeights]) -> list[tuple[GroupWeights, ...]]:
        """Zeros in the shapes of gradients from `reduce` of all groups, in the dtype of their sums."""
        segments = zip(self.segments, gradients, strict=True)
        return [tuple(self.zeros_of(own, segment, u) for u, own in enumerate(groups)) for segment, groups in segments]

    def zeros_of(
        self, gradient: GroupWeights, segment: LayerSegment, u: int, lead: tuple[int, ...] = ()
    ) -> GroupWeights:
        """`zero_gradients` of group `u`, with the dimensions `lead` in front of the gradients' own."""
        dtype = self.exchange.sum_dtype
        return tuple(
            {name: jnp.zeros((*lead, *g.shape), dtype(self.stored_name(kind, name))) for name, g in layer.items()}
            for kind, layer in zip(self._kinds_of(segment, u), gradient, strict=True)
        )

    @jax.named_scope("gradients")
    def reduce(self, gradient: GroupWeights, segment: LayerSegment, u: int, on_the_way: bool = False) -> GroupWeights:
        """The gradients of group `u`, summed over `fsdp`, and over the once-a-step axes too if `on_the_way`.

        Gradients of layers that stay gathered are not summed over `fsdp` here, but in `collect`.
        """
        reduce_layer = self._reduce_in_turn if segment.loops > 1 else self._reduce_layer
        kinds, stay = self._kinds_of(segment, u), self.stay_gathered(segment, u)
        reduced = tuple(
            own if stays else reduce_layer(kind, own) for kind, own, stays in zip(kinds, gradient, stay, strict=True)
        )
        reduced = self._scatter_once(reduced, segment, u) if on_the_way else reduced
        # In their storage layout: XLA would stack them in another layout and transpose the whole stack.
        return jax.tree.map(row_major, reduced) if segment.loops > 1 else reduced

    def is_gathered(self, segment: LayerSegment, u: int) -> bool:
        """Whether all layers of group `u` stay gathered."""
        return all(self.stay_gathered(segment, u))

    def stay_gathered(self, segment: LayerSegment, u: int) -> list[bool]:
        """For each layer of group `u` whether `fsdp` gathers its weights and reduces its gradients once a step."""
        start = segment.start + u * segment.group_size
        return [slot in self.gathered for slot in range(start, start + segment.group_size)]

    def _reduce_gathered(self, gradient: GroupWeights, segment: LayerSegment, u: int) -> GroupWeights:
        """Accumulated gradients of group `u` with those of layers that stay gathered summed over `fsdp`."""
        kinds, stay = self._kinds_of(segment, u), self.stay_gathered(segment, u)
        return tuple(
            self._reduce_layer(kind, own) if stays else own
            for kind, own, stays in zip(kinds, gradient, stay, strict=True)
        )

    def _reduce_layer(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        return {name: self.exchange.reduce_layer(self.stored_name(kind, name), g) for name, g in gradient.items()}

    def _reduce_in_turn(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        """`_reduce_layer` in a loop: the backward pass of the first part hides the reductions of the other parts."""
        first, *_ = self.blocks[kind].parts.items()
        groups: tuple[dict[str, Any], ...] = ({}, {}, {})
        for name, g in gradient.items():
            last = name == f"{first[0]}.{first[1].used_last()}"
            groups[0 if not name.startswith(f"{first[0]}.") else 1 if last else 2][name] = g
        return in_turn(groups, lambda name, g: self.exchange.reduce_layer(self.stored_name(kind, name), g))

    def _scatter_once(self, gradient: GroupWeights, segment: LayerSegment, u: int) -> GroupWeights:
        return tuple(
            {name: self.exchange.scatter_once(self.stored_name(kind, name), g) for name, g in layer.items()}
            for kind, layer in zip(self._kinds_of(segment, u), gradient, strict=True)
        )

    def _kinds_of(self, segment: LayerSegment, u: int) -> list[str]:
        """The kinds of blocks of group `u`."""
        start = segment.start + u * segment.group_size
        return [slot.block for slot in self.slots[start : start + segment.group_size]]

    def group_at(self, group: GroupWeights, segment: LayerSegment, index) -> GroupWeights:
        """The weights of a group in iteration `index` of its segment's loop, which is 0 without a loop."""

        def weight(name: str, w: Any) -> Any:
            if not isinstance(w, StackedWeight):
                looped = segment.loops > 1
                return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), w) if looped else w
            row = w.row + w.step * index
            # In their storage layout: XLA would transpose the whole stack into the layout of the gather.
            parts = {n: row_major(lax.dynamic_index_in_dim(a, row, keepdims=False)) for n, a in w.parts.items()}
            return self.exchange.gather_once(self.stored_name(w.kind, name), self.fused[w.kind].fuse(parts)[name])

        return tuple({name: weight(name, w) for name, w in layer.items()} for layer in group)

    @jax.named_scope("weights")
    def gather(self, group: GroupWeights, program: GroupProgram, backward: bool) -> GroupWeights:
        """The weights of a group as its blocks compute with them."""
        layers = zip(program.kinds, group, program.gathered, strict=True)
        if program.looped:
            backward = backward and not program.policy.keeps_input  # else the backward pass starts with the forward
            return tuple(self._gather_in_turn(kind.block, layer, backward) for kind, layer, _ in layers)
        return tuple(
            {name: self._gather_layer(kind.block, name, w, stays) for name, w in layer.items()}
            for kind, layer, stays in layers
        )

    def _gather_in_turn(self, kind: str, layer: dict[str, Any], backward: bool) -> dict[str, Any]:
        """`gather` for a layer in a loop. It must hide its own gathers, so the weight that it uses first is first."""
        first, last = self.blocks[kind].used_first, self.blocks[kind].used_last
        rest = [
            name
            for name in layer
            if name not in (*self.state_names[kind], last if backward else first)
            and self.exchange.is_gathered_by_layer(self.stored_name(kind, name))
        ]
        groups = {n: w for n, w in layer.items() if n not in rest}, {n: layer[n] for n in rest}
        return in_turn(groups, lambda name, w: self._gather_layer(kind, name, w, False))

    def _gather_layer(self, kind: str, name: str, w: jax.Array | Fp8Weight, gathered: bool) -> jax.Array | Fp8Weight:
        """A layer's weight or state array of this name."""
        w = w if gathered or name in self.state_names[kind] else self._gathered(kind, name, w)
        if not isinstance(w, Fp8Weight):
            return w
        zeros = jnp.zeros(w.values.shape, self.exchange.compute)
        return replace(w, gradient=zeros, amax=jnp.zeros(2, jnp.float32))

    def _gathered(self, kind: str, name: str, w: jax.Array | Fp8Weight) -> jax.Array | Fp8Weight:
        if not isinstance(w, Fp8Weight):
            return self.exchange.gather_layer(self.stored_name(kind, name), w)
        values = self.exchange.gather_layer(self.stored_name(kind, name), w.values)
        return replace(w, values=values, transposed=values.swapaxes(-1, -2) if w.transposed is None else w.transposed)

    def _state_of_stage(self, state: LayerState) -> dict[str, dict[str, jax.Array]]:
        """The layers' state, `[L, ...]` → `[R·n, ...]` of this stage; with `filled` if the kind has empty slots."""
        out = {}
        for kind, rows in self.kinds.items():
            out[kind] = rows.of_stage(dict(state.get(kind, {})))
            if not rows.filled.all():
                filled = jnp.asarray(rows.filled)[lax.axis_index("pipeline")]
                out[kind] |= {name: filled for name in self.blocks[kind].needs_filled}
        return out

    def stored_name(self, kind: str, name: str) -> str:
        """The full name of a block's weight."""
        return f"{self.prefix}{BLOCKS}{kind}.{name}"

    def by_kind(self, segment: LayerSegment, groups: Sequence[tuple[dict, ...]]) -> Iterator[tuple[str, list[dict]]]:
        """The layers of each kind in a segment's body, kind by kind."""
        layers = [layer for group in groups for layer in group]
        for kind, rows in self.kinds.items():
            if indices := rows.indices_in_body(segment):
                yield kind, [layers[j] for j in indices]

    def _over_slots(self, found: Mapping[str, jax.Array]) -> jax.Array:
        """By kind of block `[R·n]` → `[R·slots]`; zeros for kinds that are not in `found`."""
        if len(self.kinds) == 1 and found:
            (own,) = found.values()
            return own
        out = jnp.zeros((self.rounds, len(self.slots)), jnp.float32)
        for kind, own in found.items():
            out = out.at[:, np.array(self.kinds[kind].slots)].set(own.reshape(self.rounds, -1))
        return out.reshape(-1)

    def _quantized(self, kind: str, name: str, w: jax.Array, scales: Mapping[str, jax.Array]) -> Fp8Weight:
        """Shards of one or several layers `[in, out]` (experts: `[E, in, out]`), quantised and gathered once."""
        scale = scales["weight"]
        of_each = scale.reshape(*scale.shape, *(1,) * (w.ndim - scale.ndim))
        values = self.exchange.gather_once(self.stored_name(kind, name), fp8.quantize(w, of_each, fp8.E4M3))
        # If it is not, each pass of a layer gathers and transposes.
        whole = self.exchange.is_whole(self.stored_name(kind, name))
        return Fp8Weight(
            values,
            values.swapaxes(-1, -2) if whole else None,
            1 / scale,
            scales.get("input"),
            scales.get("gradient"),
            None,
            None,
            self.scaling.gradient_dtype,
        )


def reduced_on_the_way(segment: LayerSegment, only_microbatch: bool) -> bool:
    """Whether each group's gradients are fully reduced during the backward pass; not inside loops over layers."""
    return only_microbatch and segment.loops == 1


def of_block[Value](params: Mapping[str, Value], kind: str, prefix: str = "") -> dict[str, Value]:
    """The values of one kind of block, by name within the block; `prefix` as in `StackWeights`."""
    prefix = f"{prefix}{BLOCKS}{kind}."
    return {n.removeprefix(prefix): w for n, w in params.items() if n.startswith(prefix)}
