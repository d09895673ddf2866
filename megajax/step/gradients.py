"""Loss and gradients of one global batch: the part of the step that is local to a device.

One shard_map, manual over all six axes, contains forward, backward and gradient reduction. Weights are gathered. The
microbatches run one after the other, or through the stages of a pipeline. Their gradients are summed
(`weights/sums.py`); the axes of PER_STEP_AXES reduce the sums once per step.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.model.sublayer import is_maximum
from megajax.parallel.collectives import sum_over_all
from megajax.sharding import BATCH_SPEC
from megajax.step import microbatches
from megajax.step.graph import Graph
from megajax.step.nodes import Arrays, StepArrays
from megajax.step.pipeline import pipeline
from megajax.step.stack.layers import LayerStack
from megajax.step.stack.stack_weights import LayerState
from megajax.step_plan import StepPlan
from megajax.weights.scaling import FP8
from megajax.weights.weight import global_norm


class StepGradients(NamedTuple):
    """The results of a batch's forward and backward pass, the same on all devices but for the gradients' shards."""

    # Of the terminal nodes, each divided by its count: `loss` (the language-model loss per valid token), `z_loss`, with
    # layers after the model's theirs `[depth]`; and the number of `tokens`
    losses: Any
    gradients: Any  # of `Graph.trained` in stored form, FP32: of the losses with their weights, without the loss scale
    norm: Any  # of the gradients over all devices; NaN if FP8 has met a number that is not finite
    # All state besides parameters after the step, by kind of block and name `[L, ...]`; amax histories under FP8
    layer_state: Any
    # By kind of block and name `[L, ...]`: means over the microbatches; integers are sums, `max_...` are maxima
    layer_metrics: Any


def gradient_function(graph: Graph, mesh: Mesh) -> Callable:
    """(parameters, layer state, batch, step, loss scale) → `StepGradients`; batch fields are `[M, B, S]`."""
    specs = {name: placement.spec for name, placement in graph.plan.placements.items()}
    stacks, scaling = graph.stacks, graph.layers.weights.scaling

    def compute(params: Arrays, state: LayerState, batch: Arrays, step, loss_scale: jax.Array):
        history, weight_amax = state.get(FP8, {}), [stack.weights.weight_amax(params) for stack in stacks]
        table = graph.table.gather(params)

        def gather_stack(stack: LayerStack, amax: Mapping[str, jax.Array]):
            scales = scaling.scales(stack.weights.history_of_stage(history), amax, loss_scale)
            return stack.weights.gather_per_step(params, scales, state)

        weights = {stack.NAME: gather_stack(stack, amax) for stack, amax in zip(stacks, weight_amax, strict=True)}
        weights |= {stack.NAME: stack.weights.gather_per_step(params, {}, {}) for stack in graph.frozen}
        counts, (batch, of_layout) = graph.divisors(batch), graph.add_derived_fields(batch)
        batch = graph.add_factors(batch, counts)
        tokens, layer_loss_scale, key = counts["loss"], graph.layer_loss_scale(loss_scale), graph.random_key(step)
        factors = {node.NAME: node.loss_factor(loss_scale, counts) for node in graph.terminal}
        arrays = StepArrays(table, weights, key, layer_loss_scale, factors)

        run = pipeline if graph.plan.is_pipelined else microbatches
        table_gradients, results = run.train(graph, arrays, batch)

        gradients = graph.table.complete_gradients(table_gradients)
        for stack in stacks:
            gradients |= stack.weights.complete_gradients(results.gradients[stack.NAME])
        gradients = {name: gradients[name] / loss_scale for name in graph.trained}
        # The layout's metrics become means over the devices when they are summed and divided as the losses are.
        shares = results.losses | {name: value * tokens / mesh.size for name, value in of_layout.items()}
        losses = {name: total / counts.get(name, tokens) for name, total in sum_over_all(shares, graph.sizes).items()}
        norm = global_norm(gradients, graph.plan.placements, graph.sizes)
        metrics, state = _collect_metrics(graph, results.metrics), dict(state)
        for stack in stacks:
            state = stack.updated_state(state, metrics)
        if history:
            state[FP8] = scaling.record(dict(history), *_newest_amax(graph, weight_amax, results.amax), loss_scale)
            # Quantisation clips infinities, so only the amax shows that a value was not finite.
            finite = jnp.stack([jnp.isfinite(amaxes).all() for amaxes in state[FP8].values()]).all()
            norm = jnp.where(finite, norm, jnp.nan)
        return StepGradients(losses | {"tokens": tokens}, gradients, norm, state, metrics)

    return jax.shard_map(
        _at_full_precision(compute, graph.plan),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC, P(), P()),
        out_specs=StepGradients(P(), {name: specs[name] for name in graph.trained}, P(), P(), P()),
        check_vma=False,
    )


def loss_function(graph: Graph, mesh: Mesh) -> Callable:
    """(parameters, layer state, batch) → (sums of the loss and of the objective's METRICS by name, what they count).

    Forward pass only, without dropout and jitter.
    """
    specs = {name: placement.spec for name, placement in graph.plan.placements.items()}
    stack = graph.layers

    def compute(params: Arrays, state: LayerState, batch: Arrays):
        history = stack.weights.history_of_stage(state.get(FP8, {}))
        scales = stack.weights.scaling.scales(history, stack.weights.weight_amax(params))
        table = graph.table.gather(params)
        weights = {stack.NAME: stack.weights.gather_per_step(params, scales, state)}
        others = (*graph.before, *graph.frozen)
        weights |= {other.NAME: other.weights.gather_per_step(params, {}, {}) for other in others}
        arrays = StepArrays(table, weights)
        counts, (batch, _) = graph.counts(batch), graph.add_derived_fields(batch)
        run = pipeline if graph.plan.is_pipelined else microbatches
        return sum_over_all(run.evaluate(graph, arrays, batch), graph.sizes), counts["loss"]

    return jax.shard_map(
        _at_full_precision(compute, graph.plan),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC),
        out_specs=(P(), P()),
        check_vma=False,
    )


def _newest_amax(graph: Graph, weight_amax: list[Any], amax: Mapping[str, Any]) -> tuple[Any, Any]:
    """This step's amaxes of all layers' weights, and of their inputs and gradients, for `Scaling.record`."""
    pairs = zip(graph.stacks, weight_amax, strict=True)
    newest = [stack.weights.all.of_all_layers((own, stack.collect_amax(amax[stack.NAME]))) for stack, own in pairs]
    return jax.tree.map(lambda *rows: jnp.concatenate(rows), *newest)


def _collect_metrics(graph: Graph, metrics: Mapping[str, Any]) -> dict[str, dict[str, jax.Array]]:
    """Metrics of all stacks, summed over the microbatches → over all devices, by kind and name `[L, ...]`.

    Counts remain sums, and maxima remain maxima; the others become means over the microbatches.
    """
    collected: dict[str, dict[str, jax.Array]] = {}
    for stack in graph.stacks:
        collected |= stack.collect_metrics(metrics[stack.NAME])
    count = graph.plan.num_microbatches

    def mean(name: str, a: jax.Array) -> jax.Array:
        return a if is_maximum(name) or jnp.issubdtype(a.dtype, jnp.integer) else a / count

    return {kind: {name: mean(name, a) for name, a in own.items()} for kind, own in collected.items()}


def _at_full_precision(compute: Callable, plan: StepPlan) -> Callable:
    """`compute` with FP32 matmuls in full precision: by default GPUs round their inputs to TF32."""
    if plan.compute != jnp.float32:
        return compute

    def full(*args):
        with jax.default_matmul_precision("highest"):
            return compute(*args)

    return full
