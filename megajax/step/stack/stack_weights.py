"""The weights of a stage's layers: gathers once a step and in each remat group, and the way back of gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layout.kinds import LayerKind
from megajax.layout.segments import LayerSegment
from megajax.model.block import Block
from megajax.ops.barriers import not_before, not_merged
from megajax.options.remat import RematPolicy
from megajax.parallel.mesh_comm import MeshComm
from megajax.sharding import below
from megajax.step.stack.layer_index import LayerIndex
from megajax.step_plan import StepPlan
from megajax.weights.block_weights import BlockWeights
from megajax.weights.scaling import Scales, Scaling
from megajax.weights.table import block_scope
from megajax.weights.weight import Weight, fuse, in_turn, row_major

LayerState = Mapping[str, Mapping[str, jax.Array]]  # by kind of block and name: `[L, ...]` of its layers
type ByGroup[T] = Sequence[Sequence[T]]  # by segment and remat group of its body
GroupWeights = tuple[dict[str, Any], ...]  # of a group's layers, by name: weights, and state that is no parameter
Amax = dict[str, jax.Array]  # by linear layer: the largest magnitudes of its input and its output gradient
GroupMetrics = tuple[dict[str, jax.Array], ...]  # of a group's layers, by name


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


@dataclass(frozen=True)
class GroupProgram:
    """Everything that a group's computation depends on: groups with equal programs are traced and lowered once."""

    kinds: tuple[LayerKind, ...]  # of its layers
    stay_gathered: tuple[bool, ...]  # for each layer, whether its weights stay gathered over `fsdp`
    policy: RematPolicy
    fp8: bool
    stacked: bool  # whether its residuals are copied into the stacked array of a loop, or a pipeline's buffer
    looped: bool
    adds_images: bool = False  # `StepPlan.image_slots`


class StackWeights:
    """The edges of the chain (`megajax.weights`) for all layers of a stage.

    For each kind of block with n layer slots, a stage stores R·n rows of every weight (`LayerIndex`). A segment's body
    has the weights of its layers: of one layer `[...]`, in a loop or with several virtual stages `[R·loops, ...]`.
    """

    def __init__(
        self,
        plan: StepPlan,
        comm: MeshComm,
        blocks: Mapping[str, Block],
        weights: Mapping[str, Mapping[str, Weight]],
        can_reduce_in_backward: bool,
        prefix: str = "",
    ):
        """`weights` by kind of block and name; `prefix` is that of the names of the model's parameters.

        `can_reduce_in_backward`: gradients are not summed over microbatches, so each layer's can be reduced at once.
        """
        self.plan, self.comm, self.blocks, self.weights = plan, comm, blocks, weights
        self.slots, self.segments, table = plan.layer_slots, plan.segments, plan.layer_table
        self.scaling, self.can_reduce_in_backward = Scaling(plan), can_reduce_in_backward
        self.block_weights = BlockWeights(plan, comm.max_over_devices)
        self.scopes = {kind: block_scope(kind, prefix) for kind in blocks}
        self.all = LayerIndex(table, range(len(self.slots)))
        slots = {kind: [j for j, slot in enumerate(self.slots) if slot.block == kind] for kind in blocks}
        self.kinds = {kind: LayerIndex(table, own) for kind, own in slots.items()}
        # A layer's state that is not a parameter; it is passed among its group's weights.
        self.state_names = {kind: {*block.layer_state, *block.is_real_layer_names} for kind, block in blocks.items()}

    # Stored -> per step

    @jax.named_scope("weights")
    def gather_per_step(
        self, params: Mapping[str, jax.Array], scales: Scales, state: LayerState
    ) -> list[tuple[GroupWeights, ...]]:
        """Stored shards `[R·slots, ...]` by canonical name → for each segment its groups' `fsdp` shards.

        `scales` are the linear layers' FP8 scales, `[R·slots]` each; `state` is the layers' state, `[L, ...]`.
        """
        state, stored, out = self._state_of_stage(state), self._by_kind(params), []
        for segment in self.segments:
            layers = [
                self._gather_layer_per_step(segment, j, stored, scales, state)
                for j in range(segment.layers_per_iteration)
            ]
            size = segment.group_size
            out.append(tuple(tuple(layers[start : start + size]) for start in range(0, len(layers), size)))
        return out

    def _gather_layer_per_step(
        self,
        segment: LayerSegment,
        j: int,
        stored: Mapping[str, Mapping[str, jax.Array]],
        scales: Scales,
        state: LayerState,
    ) -> dict[str, Any]:
        """The weights and the state of the j-th layer of a segment's body, in all iterations of its loop."""
        slot = segment.start + j
        kind = self.slots[slot].block
        weights, rows, out = self.weights[kind], self.kinds[kind], dict[str, Any]()
        in_fp8 = {name for name in weights if segment.fp8 and self.scaling.quantises(name)}
        for name, weight in weights.items():
            if name not in in_fp8 and self.kept_in_stack(weight, segment, slot):
                parts = {member: stored[kind][member] for member in weight.members}
                out[name] = StackedWeight(parts, kind, *rows.first_row(segment, j))
        in_stack = {member for name in out for member in weights[name].members}
        own = {name: rows.layer_of(w, segment, j) for name, w in stored[kind].items() if name not in in_stack}
        for name, w in fuse(weights, own).items():
            if name in in_fp8:
                of_layer = {tensor: self.all.layer_of(scale, segment, j) for tensor, scale in scales[name].items()}
                out[name] = weights[name].quantize_per_step(w, of_layer, self.scaling.gradient_dtype)
            else:
                out[name] = weights[name].gather_per_step(w)
        if slot in self.plan.gathered_slots:
            out = {name: weights[name].gather_per_layer(w) for name, w in out.items()}
        return out | {name: rows.layer_of(a, segment, j) for name, a in state[kind].items()}

    def kept_in_stack(self, weight: Weight, segment: LayerSegment, slot: int) -> bool:
        """Whether a weight is kept in its stack, and each pass of the layer casts and fuses it (`StackedWeight`)."""
        in_each_pass = segment.iterations > 1 or (weight.is_stored_for_use and slot not in self.plan.gathered_slots)
        return self.all.stages == 1 and in_each_pass and not weight.is_gathered_per_step

    def _by_kind(self, params: Mapping[str, jax.Array]) -> dict[str, dict[str, jax.Array]]:
        """Stored parameters by kind of block and name within it."""
        return {kind: below(params, scope) for kind, scope in self.scopes.items()}

    # Per step -> used

    def select_group(self, group: GroupWeights, segment: LayerSegment, index: Any, after: Any = None) -> GroupWeights:
        """The weights of a group in iteration `index` of its segment's loop, which is 0 without a loop.

        `after`, for a backward pass that gathers them again: no weight is fused from its stack (`tie_stacked`) or
        gathered (`tie_gather`) before this array is available.
        """
        if after is not None and segment.iterations == 1:
            group = tie_stacked(group, after)
        selected = tuple(
            {name: self._select_weight(name, w, segment, index) for name, w in layer.items()} for layer in group
        )
        return selected if after is None else self.tie_gather((selected, after))[0]  # only the weights wait

    def _select_weight(self, name: str, w: Any, segment: LayerSegment, index: Any) -> Any:
        if isinstance(w, StackedWeight):
            row, weight = w.row + w.step * index, self.weights[w.kind][name]
            # In their storage layout: XLA would transpose the whole stack into the layout of the gather.
            parts = {n: row_major(lax.dynamic_index_in_dim(a, row, keepdims=False)) for n, a in w.parts.items()}
            return weight.gather_per_step(fuse({name: weight}, parts)[name])
        if segment.iterations == 1:
            return w
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), w)

    @jax.named_scope("weights")
    def gather_per_layer(self, group: GroupWeights, program: GroupProgram, backward: bool) -> GroupWeights:
        """The weights of a group as its blocks compute with them."""
        layers = zip(program.kinds, group, program.stay_gathered, strict=True)
        if program.looped:
            backward = backward and not program.policy.keeps_input  # else the backward pass starts with the forward
            return tuple(self._gather_in_turn(kind.block, layer, backward) for kind, layer, _ in layers)
        return tuple(
            {name: self._gather_weight(kind.block, name, w, stays_gathered) for name, w in layer.items()}
            for kind, layer, stays_gathered in layers
        )

    def _gather_in_turn(self, kind: str, layer: dict[str, Any], backward: bool) -> dict[str, Any]:
        """`gather_per_layer` in a loop: a layer hides its own gathers, so the weight that it uses first is first."""
        block, weights = self.blocks[kind], self.weights[kind]
        first = block.used_last if backward else block.used_first
        hidden = [n for n in layer if n in weights and n != first and weights[n].is_gathered_per_layer]
        groups = {n: w for n, w in layer.items() if n not in hidden}, {n: layer[n] for n in hidden}
        return in_turn(groups, lambda name, w: self._gather_weight(kind, name, w, False))

    def _gather_weight(self, kind: str, name: str, w: Any, stays_gathered: bool) -> Any:
        """A layer's weight of this name as its block takes it; state as it is."""
        if name in self.state_names[kind]:
            return w
        weight = self.weights[kind][name]
        return weight.differentiable(w if stays_gathered else weight.gather_per_layer(w))

    def stay_gathered(self, segment: LayerSegment, u: int) -> list[bool]:
        """For each layer of group `u` whether its weights stay gathered for the step.

        `fsdp` then reduces its gradients once a step too.
        """
        return [slot in self.plan.gathered_slots for slot in self._slots_of(segment, u)]

    def tie_gather(self, values: Any) -> Any:
        """`values` behind a barrier: none is available before all are, so a gather of one waits for the others."""
        return not_before(values) if self.plan.sizes["fsdp"] > 1 else values

    # The way back

    @jax.named_scope("gradients")
    def reduce_group(self, gradient: GroupWeights, segment: LayerSegment, u: int) -> GroupWeights:
        """The gradients of group `u`, summed over `fsdp`, and over the once-a-step axes too if `reduces_in_backward`.

        Gradients of layers that stay gathered are not summed over `fsdp` here, but in `complete_gradients`.
        """
        reduce_layer = self._reduce_in_turn if segment.iterations > 1 else self._reduce_layer
        layers = zip(self._kinds_of(segment, u), gradient, self.stay_gathered(segment, u), strict=True)
        reduced = tuple(own if stays_gathered else reduce_layer(kind, own) for kind, own, stays_gathered in layers)
        reduced = self._reduce_group_per_step(reduced, segment, u) if self.reduces_in_backward(segment) else reduced
        # In their storage layout: XLA would stack them in another layout and transpose the whole stack.
        return jax.tree.map(row_major, reduced) if segment.iterations > 1 else reduced

    @jax.named_scope("gradients")
    def complete_gradients(self, gradients: ByGroup[GroupWeights]) -> dict[str, jax.Array]:
        """Gradients from `reduce_group`, summed over microbatches → complete FP32 gradients of stored shards."""
        parts: dict[tuple[str, str], list[jax.Array]] = {}
        reduced = list[Sequence[GroupWeights]]()
        for segment, groups in zip(self.segments, gradients, strict=True):
            if not self.reduces_in_backward(segment):
                groups = [self._reduce_gathered(group, segment, u) for u, group in enumerate(groups)]
                groups = [self._reduce_group_per_step(group, segment, u) for u, group in enumerate(groups)]
            reduced.append(groups)
        for segment, groups in self._without_cuts(reduced):
            for kind, layers in self.by_kind(segment, groups):
                for name in layers[0]:
                    stacked = self.kinds[kind].stack([layer[name] for layer in layers], segment)
                    weight = self.weights[kind][name]
                    for member, gradient in weight.split(weight.complete(stacked)).items():
                        parts.setdefault((kind, member), []).append(gradient)
        joined = {(kind, member): self.kinds[kind].join(found) for (kind, member), found in parts.items()}
        return {self.scopes[kind] + member: self.kinds[kind].without_empty(g) for (kind, member), g in joined.items()}

    def _without_cuts(self, gradients: Sequence[Any]) -> list[tuple[LayerSegment, list[Any]]]:
        """Segments and their groups; consecutive ones without loops are one, so that their layers are stacked once."""
        merged: list[tuple[LayerSegment, list[Any]]] = []
        for segment, groups in zip(self.segments, gradients, strict=True):
            if merged and self.all.copies(segment) == self.all.copies(merged[-1][0]) == 1:
                before, found = merged[-1]
                count = before.layers_per_iteration + segment.layers_per_iteration
                merged[-1] = replace(before, layers_per_iteration=count), [*found, *groups]
            else:
                merged.append((segment, [*groups]))
        return merged

    def reduces_in_backward(self, segment: LayerSegment) -> bool:
        """Whether each group's gradients are fully reduced during the backward pass; not inside loops over layers."""
        return self.can_reduce_in_backward and segment.iterations == 1

    def zero_gradients(self, gradients: ByGroup[GroupWeights]) -> list[tuple[GroupWeights, ...]]:
        """Zeros in the shapes of gradients from `reduce_group` of all groups, in the dtype of their sums."""
        segments = zip(self.segments, gradients, strict=True)
        return [tuple(self.zeros_of(own, segment, u) for u, own in enumerate(groups)) for segment, groups in segments]

    def zeros_of(
        self, gradient: GroupWeights, segment: LayerSegment, u: int, lead: tuple[int, ...] = ()
    ) -> GroupWeights:
        """`zero_gradients` of group `u`, with the dimensions `lead` in front of the gradients' own."""
        return tuple(
            {name: jnp.zeros((*lead, *g.shape), self.weights[kind][name].sum_dtype) for name, g in layer.items()}
            for kind, layer in zip(self._kinds_of(segment, u), gradient, strict=True)
        )

    def _reduce_layer(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        return {name: self.weights[kind][name].reduce_per_layer(g) for name, g in gradient.items()}

    def _reduce_in_turn(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        """`_reduce_layer` in a loop: the backward pass of the first part hides the reductions of the other parts."""
        first, *_ = self.blocks[kind].parts.items()
        groups: tuple[dict[str, Any], ...] = ({}, {}, {})
        for name, g in gradient.items():
            last = name == f"{first[0]}.{first[1].used_last()}"
            groups[0 if not name.startswith(f"{first[0]}.") else 1 if last else 2][name] = g
        return in_turn(groups, lambda name, g: self.weights[kind][name].reduce_per_layer(g))

    def _reduce_gathered(self, gradient: GroupWeights, segment: LayerSegment, u: int) -> GroupWeights:
        """Accumulated gradients of group `u` with those of layers that stay gathered summed over `fsdp`."""
        layers = zip(self._kinds_of(segment, u), gradient, self.stay_gathered(segment, u), strict=True)
        return tuple(self._reduce_layer(kind, own) if stays else own for kind, own, stays in layers)

    def _reduce_group_per_step(self, gradient: GroupWeights, segment: LayerSegment, u: int) -> GroupWeights:
        return tuple(
            {name: self.weights[kind][name].reduce_per_step(g) for name, g in layer.items()}
            for kind, layer in zip(self._kinds_of(segment, u), gradient, strict=True)
        )

    # FP8

    @jax.named_scope("weights")
    def weight_amax(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The amax of each linear layer's weight, `[R·slots]`, over all devices; empty without FP8."""
        if not self.scaling.settings.chosen.has_kernels:
            return {}
        stored, local = self._by_kind(params), {}
        for name in self.scaling.layers:
            found = {}
            for kind, weights in self.weights.items():
                if name in weights:
                    parts = [stored[kind][member] for member in weights[name].members]
                    amax = jnp.stack([jnp.abs(w).max(axis=range(1, w.ndim)) for w in parts]).max(axis=0)
                    found[kind] = amax.astype(jnp.float32)
            local[name] = self._over_slots(found)
        return self.comm.max_over_devices(local)

    def _over_slots(self, found: Mapping[str, jax.Array]) -> jax.Array:
        """By kind of block `[R·n]` → `[R·slots]`; zeros for kinds that are not in `found`."""
        if len(self.kinds) == 1 and found:
            (own,) = found.values()
            return own
        out = jnp.zeros((self.all.virtual_stages, len(self.slots)), jnp.float32)
        for kind, own in found.items():
            out = out.at[:, np.array(self.kinds[kind].slots)].set(own.reshape(self.all.virtual_stages, -1))
        return out.reshape(-1)

    def history_of_stage(self, history: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Amax histories of the train state `[layers, length]` → those of this stage's slots `[R·slots, length]`."""
        first, last = int(self.all.layers[0]), int(self.all.layers[-1])
        return self.all.of_stage({name: a[first : last + 1] for name, a in history.items()})

    # Layers and slots

    def by_kind(self, segment: LayerSegment, groups: Sequence[tuple[dict, ...]]) -> Iterator[tuple[str, list[dict]]]:
        """The layers of each kind in a segment's body, kind by kind."""
        layers = [layer for group in groups for layer in group]
        for kind, rows in self.kinds.items():
            if indices := rows.indices_in_body(segment):
                yield kind, [layers[j] for j in indices]

    def _slots_of(self, segment: LayerSegment, u: int) -> range:
        start = segment.start + u * segment.group_size
        return range(start, start + segment.group_size)

    def _kinds_of(self, segment: LayerSegment, u: int) -> list[str]:
        """The kinds of blocks of group `u`."""
        return [self.slots[slot].block for slot in self._slots_of(segment, u)]

    def _state_of_stage(self, state: LayerState) -> dict[str, dict[str, jax.Array]]:
        """The layers' state, `[L, ...]` → `[R·n, ...]` of this stage; `is_real_layer` if the kind has empty slots."""
        out = {}
        for kind, rows in self.kinds.items():
            out[kind] = rows.of_stage(dict(state.get(kind, {})))
            if not rows.is_real_layer.all():
                is_real_layer = jnp.asarray(rows.is_real_layer)[lax.axis_index("pipeline")]
                out[kind] |= {name: is_real_layer for name in self.blocks[kind].is_real_layer_names}
        return out


def tie_stacked[Weights](weights: Weights, until: Any) -> Weights:
    """A group's weights with those in stacks behind a barrier: none is fused before `until` is available.

    Else XLA would keep the forward pass's copies for the backward pass.
    """
    leaves, structure = jax.tree.flatten(weights, is_leaf=lambda w: isinstance(w, StackedWeight))
    stacks = {i: w for i, w in enumerate(leaves) if isinstance(w, StackedWeight)}
    if stacks:
        stacks, _ = not_merged((stacks, until))
    return jax.tree.unflatten(structure, [stacks.get(i, w) for i, w in enumerate(leaves)])
