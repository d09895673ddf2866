"""A stage's blocks, forward and backward, with what is saved between the two chosen by the remat policy.

The backward pass is written by hand: the forward pass of a group (one layer, or `remat.group` of them) keeps the
residuals of its `jax.vjp` less the weights, which the backward pass gathers again. So gathered weights live no longer
than a group (the last one's until they are used again, where there are no loops), and the pipeline's schedules run the
two passes at different ticks (pipeline.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config.segments import Segment
from megajax.model.parts import BlockInputs
from megajax.model.transformer import Transformer
from megajax.ops.fp8 import Fp8Weight
from megajax.parallel.comm import MeshComm
from megajax.parallel.stack.loops import loop_over_layers
from megajax.parallel.stack.residuals import Residuals, Saved
from megajax.parallel.stack.weights import (
    Amax,
    GroupProgram,
    GroupWeights,
    LayerState,
    Metrics,
    StackWeights,
    reduced_on_the_way,
)
from megajax.parallel.weights.exchange import WeightExchange
from megajax.parallel.weights.fused import FusedWeights
from megajax.sharding import EMPTY
from megajax.step_plan import StepPlan


class LayerStack:
    """All layers of one device's pipeline stage: R rounds of the same segments.

    A slot has room for a layer of one kind. An empty slot holds zeros, and a block of zeros adds nothing to the
    residual stream.
    """

    def __init__(
        self,
        plan: StepPlan,
        comm: MeshComm,
        model: Transformer,
        exchange: WeightExchange,
        fused: Mapping[str, FusedWeights],
    ):
        self.plan, self.comm, self.blocks = plan, comm, dict(model.blocks)
        self.slots, self.table, self.segments = plan.slots, plan.layer_table, plan.segments
        self.weights = StackWeights(plan, comm, self.blocks, exchange, fused)
        # With sinks, cuDNN's call is one step of an operation whose result has a name.
        self.attention_is_fused = comm.attention_is_fused and not plan.config.model.attention_sinks
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

    def collect_amax(self, amaxes: Sequence[tuple[tuple[Amax, ...], ...]]) -> dict[str, jax.Array]:
        """Amaxes from `backward`, largest over the microbatches → by linear layer `[R·slots, 2]`, over all devices."""
        out: dict[str, list[jax.Array]] = {}
        for segment, groups in zip(self.segments, amaxes, strict=True):
            layers, copies = [layer for group in groups for layer in group], self.weights.all.copies(segment)
            zeros = jnp.zeros((copies, 2) if copies > 1 else 2, jnp.float32)
            for name in self.weights.scaling.layers:
                out.setdefault(name, []).append(self.weights.all.stack([a.get(name, zeros) for a in layers], segment))
        return self.comm.max_over_devices({name: self.weights.all.join(parts) for name, parts in out.items()})

    def collect_metrics(self, metrics: Sequence[tuple[Metrics, ...]]) -> dict[str, dict[str, jax.Array]]:
        """Metrics from `forward`, summed over the microbatches → by kind and name `[L, ...]`, over all devices."""
        out: dict[str, dict[str, list[jax.Array]]] = {}
        rows = self.weights.kinds
        for segment, groups in zip(self.segments, metrics, strict=True):
            for kind, layers in self.weights.by_kind(segment, groups):
                for name in layers[0]:
                    stacked = rows[kind].stack([layer[name] for layer in layers], segment)
                    out.setdefault(kind, {}).setdefault(name, []).append(stacked)
        joined = {
            kind: {n: self.weights.kinds[kind].join(parts) for n, parts in own.items()} for kind, own in out.items()
        }
        if not joined:
            return {}
        summed = self.comm.sum_over_tokens(joined)
        return {kind: rows[kind].of_all_layers(own) for kind, own in summed.items()}

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
                    group, first = self.weights.group_at(group, segment, index), segment.start + segment.unroll * index
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
            on_the_way = reduced_on_the_way(segment, only_microbatch)

            def body(dx, loop, s=s, segment=segment, groups=groups, on_the_way=on_the_way):
                index, saved = loop
                first = segment.start + segment.unroll * index
                above: GroupWeights | None = None
                entered, reduced, amax = dx, [], []
                for u in reversed(range(len(groups))):
                    group = self.weights.group_at(groups[u], segment, index)
                    at_the_turn = (s, u) == (last, len(groups) - 1) and segment.loops == 1
                    if not at_the_turn or segment.policy == "full":
                        group, _ = self.weights.exchange.tie_gather((group, entered))
                    entered, kept = dx, saved[u]
                    if segment.loops > 1:
                        kept = self.kept(group, dx, inputs, segment, first, u).residuals(kept)
                    dx, gradient, largest = self.group_backward(group, kept, dx, inputs, segment, first, u)
                    amax.append(largest)
                    if above is not None:
                        above = self.weights.reduce(above, segment, u + 1, on_the_way)
                        if (s, u) != (0, 0) or segment.loops > 1:
                            dx, gradient, above = self.weights.exchange.tie_reduction((dx, gradient, above), on_the_way)
                        else:
                            gradient, above = self.weights.exchange.tie_reduction((gradient, above), on_the_way)
                        reduced.append(above)
                    above = gradient
                assert above is not None
                return dx, ((self.weights.reduce(above, segment, 0, on_the_way), *reduced[::-1]), tuple(amax[::-1]))

            dx, out = loop_over_layers(body, dx, (saved,), segment, reverse=True)
            gradients.append(out[0])
            amaxes.append(out[1])
        return dx, gradients[::-1], amaxes[::-1]

    def group_forward(self, group: GroupWeights, x, inputs, segment: Segment, first, u: int, save: bool):
        """GroupWeights `u` of a body whose first layer is `first` → (y, residuals; None if not `save`, metrics)."""
        program, layers = self._program(segment, u), _layers_from(first, u * segment.group_size, segment.group_size)
        return self._forward(group, x, inputs, layers, program=program, save=save)

    def _group_forward(self, group: GroupWeights, x, inputs: BlockInputs, layers, *, program: GroupProgram, save: bool):
        weights, run = self.weights.gather(group, program, backward=False), self._runner(inputs, layers, program)
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
        weights = self.weights.gather(group, program, backward=True)
        if program.policy == "full":
            x, dy = lax.optimization_barrier((saved, dy))  # or the recomputation would be merged with the forward pass
            _, pull, _ = jax.vjp(self._runner(inputs, layers, program), weights, x, has_aux=True)
        else:
            pull = saved.pull((weights, inputs))
        has_losses = any(self.blocks[kind.block].losses for kind in program.kinds)
        gradient, dx = pull((dy, inputs.layer_loss_scale if has_losses else None))
        gradient = tuple(
            {n: g for n, g in layer.items() if n not in self.weights.state_names[kind.block]}
            for kind, layer in zip(program.kinds, gradient, strict=True)
        )
        amax = tuple({n: g.amax for n, g in layer.items() if isinstance(g, Fp8Weight)} for layer in gradient)
        gradient = tuple(
            {n: g.gradient if isinstance(g, Fp8Weight) else g for n, g in layer.items()} for layer in gradient
        )
        return dx, gradient, amax

    def _program(self, segment: Segment, u: int) -> GroupProgram:
        start = segment.start + u * segment.group_size
        kinds = self.slots[start : start + segment.group_size]
        stacked = segment.loops > 1 or len(self.table) > 1
        stay = tuple(self.weights.stay_gathered(segment, u))
        return GroupProgram(kinds, stay, segment.policy, segment.fp8, stacked, segment.loops > 1)

    def _runner(self, inputs: BlockInputs, layers, program: GroupProgram) -> Callable:
        """(a group's weights, x) → ((y, the layers' losses), metrics); `layers` is the group's first, or all of them.

        The losses are this device's share, None where there are none. They are an output, because their gradient begins
        here, whatever becomes of y.
        """

        def run(weights: GroupWeights, x: jax.Array):
            metrics = []
            for i, (kind, layer_weights) in enumerate(zip(program.kinds, weights, strict=True)):
                state = self.weights.state_names[kind.block]
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


def _layers_from(first, offset: int, count: int):
    """Layers of a body from `offset` on: `first` is the first of consecutive layers, or all of them `[unroll]`."""
    return first[offset : offset + count] if jnp.ndim(first) else first + offset
