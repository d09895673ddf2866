"""Forward and backward pass of one remat group: one layer, or `remat.group` of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from megajax.layout.segments import LayerSegment
from megajax.model.block import Block
from megajax.model.sublayer import BlockInputs, LayerContext
from megajax.model.vision import add_image_features
from megajax.ops.barriers import not_merged
from megajax.ops.fp8 import Fp8Weight
from megajax.ops.numerics import added
from megajax.parallel.mesh_comm import MeshComm
from megajax.step.stack.stack_weights import GroupMetrics, GroupProgram, GroupWeights, StackWeights
from megajax.step.stack.vjp import ResidualLayout, Residuals, SplitBackward, with_policy
from megajax.step_plan import StepPlan
from megajax.weights.adapters import adapted


class StreamGradients(NamedTuple):
    """The gradients of the streams that layers read."""

    x: Any  # of the residual stream, [T / tensor, D]; in `pairs.py` two
    streams: dict[str, Any] = {}  # of the other streams: sums over the layers so far, in FP32


@partial(jax.tree_util.register_dataclass, data_fields=["layers"], meta_fields=["program"])
@dataclass(frozen=True)
class Group:
    """One remat group in one iteration of its segment's loop."""

    program: GroupProgram
    layers: Any  # the index of its first layer; if its layers are not consecutive, the index of each `[group_size]`


class RematGroups:
    """The passes of a device's remat groups."""

    def __init__(self, plan: StepPlan, comm: MeshComm, blocks: Mapping[str, Block], weights: StackWeights):
        self.plan, self.comm, self.blocks, self.weights = plan, comm, blocks, weights
        plan.remat.check_names({name for block in blocks.values() for name in block.saved_names})
        # With sinks, cuDNN's call is one step of an operation, and the operation's result has a checkpoint name.
        model = plan.model
        self.attention_is_fused = comm.attention_is_fused and not model.attention_sinks and model.qk_clip is None
        # All equal groups share one function: jax traces and lowers it once, XLA inlines its calls. Not if every call
        # of attention must be different (`AttentionScales`).
        shared = (lambda f, **_: f) if comm.deterministic else jax.jit
        self.forward = shared(self._forward, static_argnames=("save",))
        self.backward = shared(self._backward)
        self._traced: dict[Any, Any] = {}  # cached layouts and split backward passes

    def at(self, segment: LayerSegment, u: int, first: Any) -> Group:
        """Group `u` of a segment's body; `first` is the index of the body's first layer, or of all `[unroll]`."""
        offset, count = u * segment.group_size, segment.group_size
        start = segment.start + offset
        program = GroupProgram(
            self.plan.layer_slots[start : start + count],
            tuple(self.weights.stay_gathered(segment, u)),
            segment.policy,
            segment.fp8,
            segment.iterations > 1 or self.plan.is_pipelined,
            segment.iterations > 1,
            start in self.plan.image_slots,
        )
        return Group(program, first[offset : offset + count] if jnp.ndim(first) else first + offset)

    def layout(self, at: Group, weights: GroupWeights, x: jax.Array, inputs: BlockInputs) -> ResidualLayout:
        """The layout of a group's stacked residuals; `x` is any residual stream."""

        def residuals(*arguments):
            return self._forward(*arguments, save=True, stack=False)[1]

        arguments = at, weights, x, inputs
        return self._cached(("layout", at.program, x.shape), inputs, lambda: ResidualLayout(residuals, *arguments))

    def split(
        self, at: Group, weights: GroupWeights, saved: Any, dy: StreamGradients, inputs: BlockInputs
    ) -> SplitBackward:
        """The backward pass of a group in two parts, for the arguments `(weights, saved, dy, inputs, at.layers)`."""

        def backward(weights, saved, dy, inputs, layers):
            return self.backward(replace(at, layers=layers), weights, saved, dy, inputs)

        arguments = weights, saved, dy, inputs, at.layers
        return self._cached(("split", at.program, dy.x.shape), inputs, lambda: SplitBackward(backward, *arguments))

    def _cached(self, key: Any, inputs: BlockInputs, trace: Callable[[], Any]) -> Any:
        """A cached result of `trace`; not cached if every call of attention must be different (`AttentionScales`)."""
        key = key, jax.tree.structure(inputs)  # the next batch may have padding
        if self.comm.deterministic or key not in self._traced:
            self._traced[key] = trace()
        return self._traced[key]

    def _forward(
        self, at: Group, weights: GroupWeights, x: jax.Array, inputs: BlockInputs, save: bool, stack: bool = True
    ) -> tuple[jax.Array, Any, GroupMetrics]:
        """(y, residuals for `backward`, None if not `save`; metrics).

        Residuals are a list of arrays if they are stacked, and `stack` is not false.
        """
        program = at.program
        gathered = self.weights.gather_per_layer(weights, program, backward=False)
        trained, untrained = self._divided(gathered, program)
        run = self._runner(inputs, at.layers, program, untrained)
        if not save or program.policy.keeps_input:
            (y, _), metrics = run(trained, x, inputs.streams)
            residuals: Any = x
        else:
            names = dict.fromkeys(name for kind in program.kinds for name in self.blocks[kind.block].saved_names)
            run = with_policy(run, program.policy, names, self.attention_is_fused)
            (y, _), pull, metrics = jax.vjp(run, trained, x, inputs.streams, has_aux=True)
            residuals = Residuals.of(pull, (gathered, inputs))
        if save and stack and program.stacked:
            residuals = self.layout(at, weights, x, inputs).store(residuals)
        return y, residuals if save else None, metrics

    def _backward(
        self, at: Group, weights: GroupWeights, saved: Any, dy: StreamGradients, inputs: BlockInputs
    ) -> tuple[StreamGradients, Any, Any]:
        """Gradient of the group's output → (gradients of its input and of its weights, FP8 amaxes of its layers)."""
        program = at.program
        if program.stacked:
            saved = self.layout(at, weights, dy.x, inputs).restore(saved)
        gathered = self.weights.gather_per_layer(weights, program, backward=True)
        if program.policy.keeps_input:
            x, dy = not_merged((saved, dy))  # else XLA merges the recomputation with the forward pass
            trained, untrained = self._divided(gathered, program)
            run = self._runner(inputs, at.layers, program, untrained)
            _, pull, _ = jax.vjp(run, trained, x, inputs.streams, has_aux=True)
        else:
            pull = saved.pull((gathered, inputs))
        has_losses = any(self.blocks[kind.block].losses for kind in program.kinds)
        # The layers' losses are differentiated here, with this factor; the others' gradient is `dy`.
        gradient, dx, of_streams = pull((dy.x, inputs.layer_loss_scale if has_losses else None))
        amax = tuple({n: g.amax for n, g in layer.items() if isinstance(g, Fp8Weight)} for layer in gradient)
        return StreamGradients(dx, jax.tree.map(added, dy.streams, of_streams)), _of_weights(gradient), amax

    def like_gradients(self, gathered: GroupWeights, program: GroupProgram) -> GroupWeights:
        """Arrays with the shapes of the gradients of gathered weights, which `backward` returns."""
        return _of_weights(self._divided(gathered, program)[0])

    def _divided(self, group: GroupWeights, program: GroupProgram) -> tuple[GroupWeights, GroupWeights]:
        """(the weights that have gradients, frozen weights and layer state) of a group."""
        weights = [self.weights.weights[kind.block] for kind in program.kinds]
        layers = [*zip(group, ({n for n, w in own.items() if w.is_trained} for own in weights), strict=True)]
        trained = tuple({name: w for name, w in layer.items() if name in names} for layer, names in layers)
        return trained, tuple({n: w for n, w in layer.items() if n not in names} for layer, names in layers)

    def _runner(self, inputs: BlockInputs, layers, program: GroupProgram, untrained: GroupWeights) -> Callable:
        """(weights with gradients, x, other streams) → ((y, sum of the layers' losses), metrics).

        `untrained` as in `_divided`, `layers` as in `Group`. The losses are this device's share, None if there
        are none. They are an output beside y, because their gradient does not depend on that of y.
        """

        def run(trained: GroupWeights, x: jax.Array, streams: Mapping[str, jax.Array]):
            metrics, own_inputs = list[dict[str, jax.Array]](), replace(inputs, streams=streams)
            for i, (kind, own, fixed) in enumerate(zip(program.kinds, trained, untrained, strict=True)):
                of_state, layer = self.weights.state_names[kind.block], layers[i] if jnp.ndim(layers) else layers + i
                weights = own | {name: w for name, w in fixed.items() if name not in of_state}
                state = {name: a for name, a in fixed.items() if name in of_state}
                ctx = LayerContext(self.comm, own_inputs, layer, kind, self._recomputed(program), state)
                weights = adapted(weights, self.weights.weights[kind.block], self.plan.lora, inputs, layer)
                if program.fp8:
                    linear = self.blocks[kind.block].linear_layers
                    declared, used = self.weights.weights[kind.block], {n: weights[n] for n in linear}
                    weights |= self.weights.block_weights.of(used, declared, inputs, layer)
                x, of_layer = self.blocks[kind.block].apply(weights, x, ctx)
                x = add_image_features(self.plan.model, x, ctx) if program.adds_images else x
                metrics.append(of_layer)
            found = zip(program.kinds, metrics, strict=True)
            losses = [own[n] for kind, own in found for n in self.blocks[kind.block].losses if n in own]
            return (x, sum(losses) if losses else None), tuple(metrics)

        return run

    def _recomputed(self, program: GroupProgram) -> tuple[str, ...]:
        """The values that blocks recompute without a policy of `jax.checkpoint`.

        If residuals are copied, results of norms are written twice and read twice, which takes longer than to recompute
        them. Not with `tensor`, where their tokens would be gathered again, and not in FP8.
        """
        policy = program.policy
        norms = policy.keeps_all and program.stacked and self.comm.tensor_size == 1 and not program.fp8
        return (*policy.recomputed_by_blocks, "norms") if norms else policy.recomputed_by_blocks


def _of_weights(gradient: GroupWeights) -> GroupWeights:
    """The gradients of weights from those of `jax.vjp`, or what has their shapes from the weights themselves."""
    return tuple({n: g.gradient if isinstance(g, Fp8Weight) else g for n, g in layer.items()} for layer in gradient)
