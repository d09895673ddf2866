"""A stage's blocks, forward and backward, with what is saved between the two chosen by the remat policy.

The backward pass is written by hand: the forward pass of a group (one layer, or `remat.group` of them) keeps the
residuals of its `jax.vjp` less the weights, which the backward pass gathers again. So gathered weights live no longer
than a group (the last one's until they are used again, where there are no loops), and the pipeline's schedules run the
two passes at different ticks (pipeline.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config.kinds import LayerKind
from megajax.config.segments import Segment
from megajax.model.parts import BlockInputs
from megajax.model.transformer import Transformer
from megajax.ops import fp8
from megajax.ops.fp8 import Fp8Weight
from megajax.parallel.comm import MeshComm
from megajax.parallel.stack.loops import Uncast, loop_over_layers
from megajax.parallel.stack.residuals import Residuals, Saved
from megajax.parallel.stack.rows import Rows
from megajax.parallel.weights.exchange import WeightExchange, in_turn, row_major
from megajax.parallel.weights.fused import FusedWeights
from megajax.parallel.weights.scaling import Scales, Scaling
from megajax.sharding import BLOCKS, EMPTY
from megajax.step_plan import StepPlan

LayerState = Mapping[str, Mapping[str, jax.Array]]  # by kind of block and name: `[L, ...]` of its layers
GroupWeights = tuple[dict[str, Any], ...]  # the fused weights of a group's layers, by name: arrays or Fp8Weights
Amax = dict[str, jax.Array]  # by linear layer: the largest magnitudes of its input and its output gradient
Metrics = tuple[dict[str, jax.Array], ...]  # of a group's layers, by name


@dataclass(frozen=True)
class GroupProgram:
    """What the computation of a group depends on: groups with equal ones are traced and lowered once."""

    kinds: tuple[LayerKind, ...]  # of its layers
    gathered: tuple[bool, ...]  # of each layer, whether its weights stay gathered over `fsdp`
    policy: str
    fp8: bool
    stacked: bool  # whether what it saves is copied into an array of several loops, or a pipeline's buffer
    looped: bool


class LayerStack:
    """All layers of one device's pipeline stage: R rounds of the same segments.

    A slot has room for a layer of one kind. For every kind a stage stores R·n rows of every weight, n the slots of that
    kind (`rows.Rows`). An empty slot holds zeros, and a block of zeros adds nothing to the residual stream.
    """

    def __init__(
        self,
        plan: StepPlan,
        comm: MeshComm,
        model: Transformer,
        exchange: WeightExchange,
        fused: Mapping[str, FusedWeights],
    ):
        config = plan.config
        self.blocks = dict(model.blocks)
        # What a layer has that is no parameter; it travels among its group's weights.
        self.state_names = {kind: {*block.layer_state, *block.needs_filled} for kind, block in self.blocks.items()}
        self.comm, self.exchange, self.fused = comm, exchange, fused
        # With sinks, cuDNN's call is one step of an operation whose result has a name.
        self.attention_is_fused = comm.attention_is_fused and not config.model.attention_sinks
        self.scaling = Scaling(config)
        self.plan, self.slots, self.table, self.segments = plan, plan.slots, plan.layer_table, plan.segments
        self.rounds = self.table.shape[1]
        self.all = Rows(self.table, range(len(self.slots)))
        self.kinds = {
            kind: Rows(self.table, [j for j, slot in enumerate(self.slots) if slot.block == kind])
            for kind in self.blocks
        }
        self.gathered = plan.gathered_slots
        # The layer that lies in each virtual stage's first slot, or would if it were not empty; [P, R]
        first = np.where(self.table == EMPTY, EMPTY - self.table.size, self.table - np.arange(len(self.slots)))
        self.first_layers = first.max(axis=2)
        # One function for all equal groups: XLA inlines its calls, but jax traces and lowers it once. Not where no two
        # calls of attention may be equal (`MeshComm.attend`).
        shared = (lambda f, **_: f) if comm.deterministic else jax.jit
        self._forward = shared(self._group_forward, static_argnames=("program", "save"))
        self._backward = shared(self._group_backward, static_argnames=("program",))
        self._kept: dict[tuple[GroupProgram, tuple[int, ...], Any], Saved] = {}
        # Whether all others follow from it: not where layers of two kinds leave slots empty between them.
        self.in_order = bool(((first == self.first_layers[..., None]) | (self.table == EMPTY)).all())

    @jax.named_scope("weights")
    def gather_once(
        self, params: Mapping[str, jax.Array], scales: Scales, state: LayerState
    ) -> list[tuple[GroupWeights, ...]]:
        """Stored `[R·slots, ...]` shards → for each segment its groups' `fsdp` shards, `[R·loops, ...]` or `[...]`.

        `scales` are the linear layers' FP8 scales, `[R·slots]` each, `state` what else the layers keep, `[L, ...]`.
        """
        state = self._state_of_stage(state)
        blocks = {kind: of_block(params, kind) for kind in self.kinds}

        def layer(segment: Segment, j: int) -> dict[str, Any]:
            kind = self.slots[segment.start + j].block
            rows, fused = self.kinds[kind], self.fused[kind]
            out: dict[str, Any] = {}
            if segment.loops > 1 and len(self.table) == 1:
                row, step = rows.first_row(segment, j)
                for name, members in fused.parts.items():
                    in_fp8 = segment.fp8 and name in self.scaling.layers
                    if not in_fp8 and not self.exchange.is_gathered_once(stored_name(kind, name)):
                        out[name] = Uncast({member: blocks[kind][member] for member in members}, kind, row, step)
            cut = {part for weight in out.values() for part in weight.parts}
            stored = {name: rows.layer_of(w, segment, j) for name, w in blocks[kind].items() if name not in cut}
            for name, w in fused.fuse(stored).items():
                if segment.fp8 and name in self.scaling.layers:
                    own = {which: self.all.layer_of(scale, segment, j) for which, scale in scales[name].items()}
                    out[name] = self._quantized(kind, name, w, own)
                else:
                    out[name] = self.exchange.gather_once(stored_name(kind, name), w)
            if segment.start + j in self.gathered:
                out = {name: self._gathered(kind, name, w) for name, w in out.items()}
            return out | {name: rows.layer_of(a, segment, j) for name, a in state[kind].items()}

        def groups(s: Segment):
            return tuple(tuple(layer(s, u + i) for i in range(s.group_size)) for u in range(0, s.unroll, s.group_size))

        return [groups(segment) for segment in self.segments]

    @jax.named_scope("weights")
    def weight_amax(self, params: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The largest magnitude of each linear layer's weight, `[R·slots]`, over all devices; none without FP8."""
        if not any(segment.fp8 for segment in self.segments):
            return {}
        blocks = {kind: of_block(params, kind) for kind in self.kinds}
        local = {}
        for name in self.scaling.layers:
            found = {}
            for kind, own in blocks.items():
                parts = [own[part] for part in self.fused[kind].parts.get(name, ())]
                if parts:
                    found[kind] = jnp.stack([jnp.abs(w).max(axis=range(1, w.ndim)) for w in parts]).max(axis=0)
            local[name] = self._over_slots(found)
        return self.comm.max_over_devices(local)

    @jax.named_scope("gradients")
    def collect(self, gradients: Sequence[tuple[GroupWeights, ...]], only_microbatch: bool) -> dict[str, jax.Array]:
        """Gradients from `backward`, summed over the microbatches → complete FP32 gradients of the stored shards."""
        parts: dict[tuple[str, str], list[jax.Array]] = {}
        for segment, groups in zip(self.segments, gradients, strict=True):
            if not _reduced_on_the_way(segment, only_microbatch):
                reduced = [self._reduce_gathered(group, segment, u) for u, group in enumerate(groups)]
                groups = [self._scatter_once(group, segment, u) for u, group in enumerate(reduced)]
            for kind, layers in self._by_kind(segment, groups):
                for name in layers[0]:
                    stacked = self.kinds[kind].stack([layer[name] for layer in layers], segment)
                    complete = self.exchange.complete(stored_name(kind, name), stacked)
                    for part, gradient in self.fused[kind].split(name, complete).items():
                        parts.setdefault((kind, part), []).append(gradient)
        joined = {(kind, part): self.kinds[kind].join(gradients) for (kind, part), gradients in parts.items()}
        return {stored_name(*key): self.kinds[key[0]].without_empty(g) for key, g in joined.items()}

    def collect_amax(self, amaxes: Sequence[tuple[tuple[Amax, ...], ...]]) -> dict[str, jax.Array]:
        """Amaxes from `backward`, largest over the microbatches → by linear layer `[R·slots, 2]`, over all devices."""
        out: dict[str, list[jax.Array]] = {}
        for segment, groups in zip(self.segments, amaxes, strict=True):
            layers, copies = [layer for group in groups for layer in group], self.all.copies(segment)
            zeros = jnp.zeros((copies, 2) if copies > 1 else 2, jnp.float32)
            for name in self.scaling.layers:
                out.setdefault(name, []).append(self.all.stack([a.get(name, zeros) for a in layers], segment))
        return self.comm.max_over_devices({name: self.all.join(parts) for name, parts in out.items()})

    def collect_metrics(self, metrics: Sequence[tuple[Metrics, ...]]) -> dict[str, dict[str, jax.Array]]:
        """Metrics from `forward`, summed over the microbatches → by kind and name `[L, ...]`, over all devices."""
        out: dict[str, dict[str, list[jax.Array]]] = {}
        for segment, groups in zip(self.segments, metrics, strict=True):
            for kind, layers in self._by_kind(segment, groups):
                for name in layers[0]:
                    stacked = self.kinds[kind].stack([layer[name] for layer in layers], segment)
                    out.setdefault(kind, {}).setdefault(name, []).append(stacked)
        joined = {kind: {n: self.kinds[kind].join(parts) for n, parts in own.items()} for kind, own in out.items()}
        if not joined:
            return {}
        summed = self.comm.sum_over_tokens(joined)
        return {kind: self.kinds[kind].of_all_layers(own) for kind, own in summed.items()}

    def updated_state(self, state: LayerState, metrics: LayerState) -> dict[str, dict[str, jax.Array]]:
        """What the layers keep after a step with these metrics, `[L, ...]` both."""
        blocks = self.blocks
        return {
            kind: blocks[kind].updated_state(own, metrics.get(kind, {})) if kind in blocks else dict(own)
            for kind, own in state.items()
        }

    def forward(
        self, weights: Sequence[tuple[GroupWeights, ...]], x: jax.Array, inputs: BlockInputs, save: bool = True
    ):
        """The residual stream through all layers → (x, residuals for `backward`, metrics for `collect_metrics`).

        If not `save`, the residuals of each group are None.
        """
        residuals, metrics = [], []
        for segment, groups in zip(self.segments, weights, strict=True):

            def body(x, loop, groups=groups, segment=segment):
                (index,), saved, measured = loop, [], []
                for u, group in enumerate(groups):
                    group, first = self.group_at(group, segment, index), segment.start + segment.unroll * index
                    x, kept, values = self.group_forward(group, x, inputs, segment, first, u, save)
                    if segment.loops > 1 and save:
                        # Behind a barrier, or XLA would run a matmul again to write its result into the stacked array.
                        kept = lax.optimization_barrier(self.kept(group, x, inputs, segment, first, u).values(kept))
                    saved.append(kept)
                    measured.append(values)
                return x, (tuple(saved), tuple(measured))

            x, (saved, measured) = loop_over_layers(body, x, (), segment)
            residuals.append(saved)
            metrics.append(measured)
        return x, residuals, metrics

    def backward(self, weights, residuals, dx: jax.Array, inputs: BlockInputs, only_microbatch: bool):
        """Gradient of the stack's output → (gradient of its input, gradients for `collect`, for `collect_amax`).

        Collectives are tied to the layer that they run beside. A group's weights are gathered during the backward pass
        of the group above (untied, the gather would be merged with the forward pass's, and the weights kept); its
        gradients are reduced during that of the group below (untied, XLA merges the reductions of distant layers and
        runs them last).
        Where there are no loops, the last group's weights are those of the forward pass, since nothing would hide their
        gather (unless the policy is to save all memory), and the first group's dx waits for no gradient of a weight.
        """
        gradients, amaxes, last = [], [], len(self.segments) - 1
        for s, (segment, groups, saved) in reversed([*enumerate(zip(self.segments, weights, residuals, strict=True))]):
            on_the_way = _reduced_on_the_way(segment, only_microbatch)

            def body(dx, loop, s=s, segment=segment, groups=groups, on_the_way=on_the_way):
                index, saved = loop
                first = segment.start + segment.unroll * index
                above: GroupWeights | None = None
                entered, reduced, amax = dx, [], []
                for u in reversed(range(len(groups))):
                    group = self.group_at(groups[u], segment, index)
                    at_the_turn = (s, u) == (last, len(groups) - 1) and segment.loops == 1
                    if not at_the_turn or segment.policy == "full":
                        group, _ = self.exchange.tie_gather((group, entered))
                    entered, kept = dx, saved[u]
                    if segment.loops > 1:
                        kept = self.kept(group, dx, inputs, segment, first, u).residuals(kept)
                    dx, gradient, largest = self.group_backward(group, kept, dx, inputs, segment, first, u)
                    amax.append(largest)
                    if above is not None:
                        above = self.reduce(above, segment, u + 1, on_the_way)
                        if (s, u) != (0, 0) or segment.loops > 1:
                            dx, gradient, above = self.exchange.tie_reduction((dx, gradient, above), on_the_way)
                        else:
                            gradient, above = self.exchange.tie_reduction((gradient, above), on_the_way)
                        reduced.append(above)
                    above = gradient
                assert above is not None
                return dx, ((self.reduce(above, segment, 0, on_the_way), *reduced[::-1]), tuple(amax[::-1]))

            dx, out = loop_over_layers(body, dx, (saved,), segment, reverse=True)
            gradients.append(out[0])
            amaxes.append(out[1])
        return dx, gradients[::-1], amaxes[::-1]

    def group_forward(self, group: GroupWeights, x, inputs, segment: Segment, first, u: int, save: bool):
        """GroupWeights `u` of a body whose first layer is `first` → (y, residuals; None if not `save`, metrics)."""
        program, layers = self._program(segment, u), _layers_from(first, u * segment.group_size, segment.group_size)
        return self._forward(group, x, inputs, layers, program=program, save=save)

    def _group_forward(self, group: GroupWeights, x, inputs: BlockInputs, layers, *, program: GroupProgram, save: bool):
        weights, run = self._gather(group, program, backward=False), self._runner(inputs, layers, program)
        if not save or program.policy == "full":
            (y, _), metrics = run(weights, x)
            return y, (x if save else None), metrics
        run = self._with_policy(run, program)
        (y, _), pull, metrics = jax.vjp(run, weights, x, has_aux=True)
        return y, Residuals.of(pull, (weights, inputs)), metrics

    def kept(self, group: GroupWeights, x, inputs, segment: Segment, first, u: int) -> Saved:
        """Which of a group's residuals are kept where they are stacked; `x` is any residual stream."""
        program, layers = self._program(segment, u), _layers_from(first, u * segment.group_size, segment.group_size)

        def forward(group, x, inputs, layers):
            return self._group_forward(group, x, inputs, layers, program=program, save=True)[1]

        # Another one for each use where no two calls of attention may be equal: it holds what it has traced.
        key = program, x.shape, x.dtype
        if self.comm.deterministic or key not in self._kept:
            self._kept[key] = Saved(forward, group, x, inputs, layers)
        return self._kept[key]

    def group_backward(self, group: GroupWeights, saved, dy, inputs, segment: Segment, first, u: int):
        """The group's output gradient → (that of its input, its weights' gradients, FP8 amaxes of its layers)."""
        program, layers = self._program(segment, u), _layers_from(first, u * segment.group_size, segment.group_size)
        return self._backward(group, saved, dy, inputs, layers, program=program)

    def _group_backward(self, group: GroupWeights, saved, dy, inputs: BlockInputs, layers, *, program: GroupProgram):
        weights = self._gather(group, program, backward=True)
        if program.policy == "full":
            x, dy = lax.optimization_barrier((saved, dy))  # or the recomputation would be merged with the forward pass
            _, pull, _ = jax.vjp(self._runner(inputs, layers, program), weights, x, has_aux=True)
        else:
            pull = saved.pull((weights, inputs))
        has_losses = any(self.blocks[kind.block].losses for kind in program.kinds)
        gradient, dx = pull((dy, inputs.layer_loss_scale if has_losses else None))
        gradient = tuple(
            {n: g for n, g in layer.items() if n not in self.state_names[kind.block]}
            for kind, layer in zip(program.kinds, gradient, strict=True)
        )
        amax = tuple({n: g.amax for n, g in layer.items() if isinstance(g, Fp8Weight)} for layer in gradient)
        gradient = tuple(
            {n: g.gradient if isinstance(g, Fp8Weight) else g for n, g in layer.items()} for layer in gradient
        )
        return dx, gradient, amax

    @jax.named_scope("gradients")
    def reduce(self, gradient: GroupWeights, segment: Segment, u: int, on_the_way: bool = False) -> GroupWeights:
        """The gradients of group `u`, summed over `fsdp`, and over the once-a-step axes too if `on_the_way`.

        Those of layers that stay gathered stay whole, for `collect`.
        """
        reduce_layer = self._reduce_in_turn if segment.loops > 1 else self._reduce_layer
        kinds, stay = self._kinds_of(segment, u), self._stay_gathered(segment, u)
        reduced = tuple(
            own if stays else reduce_layer(kind, own) for kind, own, stays in zip(kinds, gradient, stay, strict=True)
        )
        reduced = self._scatter_once(reduced, segment, u) if on_the_way else reduced
        # In the layout that they are stored in: XLA would stack them in another, and transpose the whole stack.
        return jax.tree.map(row_major, reduced) if segment.loops > 1 else reduced

    def is_gathered(self, segment: Segment, u: int) -> bool:
        """Whether nothing of group `u` is left to gather."""
        return all(self._stay_gathered(segment, u))

    def _stay_gathered(self, segment: Segment, u: int) -> list[bool]:
        """Of each layer of group `u` whether its weights are gathered, and its gradients reduced, once a step."""
        start = segment.start + u * segment.group_size
        return [slot in self.gathered for slot in range(start, start + segment.group_size)]

    def _reduce_gathered(self, gradient: GroupWeights, segment: Segment, u: int) -> GroupWeights:
        """Accumulated gradients of group `u`, those of layers that stay gathered summed over `fsdp`."""
        kinds, stay = self._kinds_of(segment, u), self._stay_gathered(segment, u)
        return tuple(
            self._reduce_layer(kind, own) if stays else own
            for kind, own, stays in zip(kinds, gradient, stay, strict=True)
        )

    def _reduce_layer(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        return {name: self.exchange.reduce_layer(stored_name(kind, name), g) for name, g in gradient.items()}

    def _reduce_in_turn(self, kind: str, gradient: dict[str, Any]) -> dict[str, Any]:
        """The same of a layer in a loop, the other parts' while the backward pass of the first hides them."""
        first, *_ = self.blocks[kind].parts.items()
        groups: tuple[dict[str, Any], ...] = ({}, {}, {})
        for name, g in gradient.items():
            last = name == f"{first[0]}.{first[1].USED_LAST}"
            groups[0 if not name.startswith(f"{first[0]}.") else 1 if last else 2][name] = g
        return in_turn(groups, lambda name, g: self.exchange.reduce_layer(stored_name(kind, name), g))

    def _scatter_once(self, gradient: GroupWeights, segment: Segment, u: int) -> GroupWeights:
        return tuple(
            {name: self.exchange.scatter_once(stored_name(kind, name), g) for name, g in layer.items()}
            for kind, layer in zip(self._kinds_of(segment, u), gradient, strict=True)
        )

    def _kinds_of(self, segment: Segment, u: int) -> list[str]:
        """The kinds of blocks of group `u`."""
        start = segment.start + u * segment.group_size
        return [slot.block for slot in self.slots[start : start + segment.group_size]]

    def group_at(self, group: GroupWeights, segment: Segment, index) -> GroupWeights:
        """The weights of a group in one of its segment's loops; of a single one they have no leading dimension."""
        if segment.loops == 1:
            return group

        def weight(name: str, w: Any) -> Any:
            if not isinstance(w, Uncast):
                return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, keepdims=False), w)
            row = w.row + w.step * index
            # As they are stored: XLA would transpose the whole stack into the layout of the gather.
            parts = {n: row_major(lax.dynamic_index_in_dim(a, row, keepdims=False)) for n, a in w.parts.items()}
            return self.exchange.gather_once(stored_name(w.kind, name), self.fused[w.kind].fuse(parts)[name])

        return tuple({name: weight(name, w) for name, w in layer.items()} for layer in group)

    def _program(self, segment: Segment, u: int) -> GroupProgram:
        start = segment.start + u * segment.group_size
        kinds = self.slots[start : start + segment.group_size]
        stacked = segment.loops > 1 or len(self.table) > 1
        stay = tuple(self._stay_gathered(segment, u))
        return GroupProgram(kinds, stay, segment.policy, segment.fp8, stacked, segment.loops > 1)

    def _runner(self, inputs: BlockInputs, layers, program: GroupProgram) -> Callable:
        """(a group's weights, x) → ((y, the layers' losses), metrics); `layers` is the group's first, or all of them.

        The losses are this device's share, None where there are none. They are an output, because their gradient begins
        here, whatever becomes of y.
        """

        def run(weights: GroupWeights, x: jax.Array):
            metrics = []
            for i, (kind, layer_weights) in enumerate(zip(program.kinds, weights, strict=True)):
                state = self.state_names[kind.block]
                x, measured = self.blocks[kind.block](
                    {name: w for name, w in layer_weights.items() if name not in state},
                    x,
                    inputs,
                    layers[i] if jnp.ndim(layers) else layers + i,
                    {name: a for name, a in layer_weights.items() if name in state},
                    comm=self.comm,
                    window=kind.window,
                    recompute=self._recomputed(program),
                )
                metrics.append(measured)
            measured = zip(program.kinds, metrics, strict=True)
            losses = [own[n] for kind, own in measured for n in self.blocks[kind.block].losses if n in own]
            return (x, sum(losses) if losses else None), tuple(metrics)

        return run

    def _with_policy(self, run: Callable, program: GroupProgram) -> Callable:
        """`run` under the group's remat policy."""
        if program.policy in ("none", "selective"):
            return run
        policies, fused = jax.checkpoint_policies, self.attention_is_fused
        saved = dict.fromkeys(name for kind in program.kinds for name in self.blocks[kind.block].saved_names)
        # Where attention is one cuDNN call, its output is among its residuals, which are kept below.
        names = [name for name in saved if not (name == "attention" and fused)]
        if program.policy == "save_matmuls":
            named = policies.save_only_these_names(*names)
        else:
            assert program.policy == "offload"
            named = policies.save_and_offload_only_these_names(
                names_which_can_be_saved=[],
                names_which_can_be_offloaded=names,
                offload_src="device",
                offload_dst="pinned_host",
            )

        def keep(prim, *args, **params):
            # cuDNN's residuals are inside its custom_vjp, out of reach of names: else its forward would run twice.
            return True if fused and "dot_product_attention_fwd" in str(prim) else named(prim, *args, **params)

        return jax.checkpoint(run, policy=keep)

    def _recomputed(self, program: GroupProgram) -> tuple[str, ...]:
        """What blocks compute again without being asked to by a policy of `jax.checkpoint`.

        Results of norms are expensive to keep where they are copied: written twice and read twice, they take longer
        than to compute again. Not so over `tensor`, where their tokens would be gathered again, and in FP8.
        """
        parts = ("attention",) if program.policy == "selective" else ()
        if program.stacked and self.comm.tensor_size == 1 and not program.fp8:
            parts = (*parts, "norms")
        return parts if program.policy in ("none", "selective") else ()

    @jax.named_scope("weights")
    def _gather(self, group: GroupWeights, program: GroupProgram, backward: bool) -> GroupWeights:
        """The weights of a group, ready for its blocks."""
        layers = zip(program.kinds, group, program.gathered, strict=True)
        if program.looped:
            backward = backward and program.policy != "full"  # which starts with the forward pass
            return tuple(self._gather_in_turn(kind.block, layer, backward) for kind, layer, _ in layers)
        return tuple(
            {name: self._gather_layer(kind.block, name, w, stays) for name, w in layer.items()}
            for kind, layer, stays in layers
        )

    def _gather_in_turn(self, kind: str, layer: dict[str, Any], backward: bool) -> dict[str, Any]:
        """The same of a layer in a loop, where nothing hides its gathers but itself: first what it uses first."""
        first, last = self.blocks[kind].used_first, self.blocks[kind].used_last
        rest = [
            name
            for name in layer
            if name not in (*self.state_names[kind], last if backward else first)
            and self.exchange.is_gathered_by_layer(stored_name(kind, name))
        ]
        groups = {n: w for n, w in layer.items() if n not in rest}, {n: layer[n] for n in rest}
        return in_turn(groups, lambda name, w: self._gather_layer(kind, name, w, False))

    def _gather_layer(self, kind: str, name: str, w: jax.Array | Fp8Weight, gathered: bool) -> jax.Array | Fp8Weight:
        """A layer's weight, or what of its state goes by its name."""
        w = w if gathered or name in self.state_names[kind] else self._gathered(kind, name, w)
        if not isinstance(w, Fp8Weight):
            return w
        zeros = jnp.zeros(w.values.shape, self.exchange.compute)
        return replace(w, gradient=zeros, amax=jnp.zeros(2, jnp.float32))

    def _gathered(self, kind: str, name: str, w: jax.Array | Fp8Weight) -> jax.Array | Fp8Weight:
        if not isinstance(w, Fp8Weight):
            return self.exchange.gather_layer(stored_name(kind, name), w)
        values = self.exchange.gather_layer(stored_name(kind, name), w.values)
        return replace(w, values=values, transposed=values.swapaxes(-1, -2) if w.transposed is None else w.transposed)

    def _state_of_stage(self, state: LayerState) -> dict[str, dict[str, jax.Array]]:
        """What the layers keep, `[L, ...]` → `[R·n, ...]` of this stage; where slots are empty `filled` too."""
        out = {}
        for kind, rows in self.kinds.items():
            out[kind] = rows.of_stage(dict(state.get(kind, {})))
            if not rows.filled.all():
                filled = jnp.asarray(rows.filled)[lax.axis_index("pipeline")]
                out[kind] |= {name: filled for name in self.blocks[kind].needs_filled}
        return out

    def _by_kind(self, segment: Segment, groups: Sequence[tuple[dict, ...]]) -> Iterator[tuple[str, list[dict]]]:
        """The layers of each kind in a segment's body, kind by kind."""
        layers = [layer for group in groups for layer in group]
        for kind, rows in self.kinds.items():
            if places := rows.indices_in_body(segment):
                yield kind, [layers[j] for j in places]

    def _over_slots(self, found: Mapping[str, jax.Array]) -> jax.Array:
        """By kind of block `[R·n]` → `[R·slots]`, zeros where a kind has nothing."""
        if len(self.kinds) == 1:
            (own,) = found.values()
            return own
        out = jnp.zeros((self.rounds, len(self.slots)), jnp.float32)
        for kind, own in found.items():
            out = out.at[:, np.array(self.kinds[kind].slots)].set(own.reshape(self.rounds, -1))
        return out.reshape(-1)

    def _quantized(self, kind: str, name: str, w: jax.Array, scales: Mapping[str, jax.Array]) -> Fp8Weight:
        """Shards of one layer `[in, out]` (experts: `[E, in, out]`), or of several, quantised and gathered once."""
        scale = scales["weight"]
        of_each = scale.reshape(*scale.shape, *(1,) * (w.ndim - scale.ndim))
        values = self.exchange.gather_once(stored_name(kind, name), fp8.quantize(w, of_each, fp8.E4M3))
        whole = self.exchange.is_whole(stored_name(kind, name))  # if not, each layer's pass gathers and transposes it
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


def _reduced_on_the_way(segment: Segment, only_microbatch: bool) -> bool:
    """Whether each group's gradients are complete when its backward pass is; not inside loops over layers."""
    return only_microbatch and segment.loops == 1


def stored_name(kind: str, name: str) -> str:
    """The name of a block's weight among all."""
    return f"{BLOCKS}{kind}.{name}"


def of_block[Value](params: Mapping[str, Value], kind: str) -> dict[str, Value]:
    """What belongs to the parameters of a kind of block, by name within it."""
    prefix = f"{BLOCKS}{kind}."
    return {n.removeprefix(prefix): w for n, w in params.items() if n.startswith(prefix)}


def _layers_from(first, offset: int, count: int):
    """Layers of a body from `offset` on: `first` is the first of consecutive layers, or all of them `[unroll]`."""
    return first[offset : offset + count] if jnp.ndim(first) else first + offset
