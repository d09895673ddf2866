"""Loss and gradients of one global batch: the part of the step that is local to a device.

One shard_map, manual over all six axes, contains forward, backward and gradient reduction. Weights are gathered. The
microbatches run one after the other, or through the stages of a pipeline. Their gradients are summed
(`weights/sums.py`); the axes of ONCE_AXES reduce the sums once per step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.config import Config
from megajax.config.sentences import format_keys
from megajax.model.parts import add_metrics, is_maximum
from megajax.parallel.local import Batch, LocalModel, Params, StepArrays
from megajax.parallel.pipeline.pipeline import Pipeline
from megajax.parallel.prediction import ModuleArrays
from megajax.parallel.stack.layers import LayerStack
from megajax.parallel.stack.weights import LayerState
from megajax.parallel.traced import traced
from megajax.parallel.weights.exchange import global_norm, sum_over_all
from megajax.parallel.weights.scaling import FP8
from megajax.parallel.weights.sums import added
from megajax.sharding import BATCH_SPEC


def gradient_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(parameters, layer state, batch, step, loss scale) → (sums, gradients, norm, new layer state, metrics).

    Parameters and gradients are in stored form, gradients those of `LocalModel.trained`, batch fields are `[M, B, S]`,
    the norm is that of the gradients over all devices. `sums` holds `loss` (the language-model loss per valid token),
    `z_loss`, `tokens`, and with prediction modules `mtp_loss [depth]`, their losses. The layer state is all state
    besides parameters, by kind of block and name `[L, ...]`, and the amax histories under the key FP8. `metrics` of the
    layers, by kind and name `[L, ...]`, are means over the microbatches; counts are sums, `max_...` are maxima.
    Gradients are those of `loss + z_loss` plus the layers' losses and the modules' mean times `model.mtp_loss_weight`,
    without the loss scale.
    """
    specs = {name: placement.spec for name, placement in local.placements.items()}
    config, stacks, scaling = local.config, local.stacks, local.layers.weights.scaling
    pipeline = Pipeline(local) if local.plan.is_pipelined else None
    only_microbatch = config.batch.num_microbatches == 1 and pipeline is None

    def compute(params: Params, state: LayerState, batch: Batch, step, loss_scale: jax.Array):
        _check_microbatches(config, len(batch["tokens"]))
        history, weight_amax = state.get(FP8, {}), [stack.weights.weight_amax(params) for stack in stacks]
        non_block = local.non_block.gather(params)

        def gather_once(stack: LayerStack, amax: Mapping[str, jax.Array]):
            scales = scaling.scales(stack.weights.history_of_stage(history), amax, loss_scale)
            return stack.weights.gather_once(params, scales, state)

        layers, *modules = map(gather_once, stacks, weight_amax)
        counts, (batch, imbalance) = local.valid_tokens(batch), local.add_derived_fields(batch)
        tokens, layer_loss_scale = counts["loss"], local.layer_loss_scale(loss_scale)
        arrays = StepArrays(non_block, layers, local.random_key(step), loss_scale / tokens, layer_loss_scale)
        if local.prediction is not None:
            scales = local.prediction.weight * loss_scale / counts["mtp_loss"]
            arrays = arrays._replace(modules=ModuleArrays(modules[0], scales))

        run = pipeline.gradients if pipeline is not None else partial(_over_microbatches, local)
        non_block_gradients, layer_gradients, (sums, metrics), amax = run(arrays, batch)

        gradients = local.non_block.reduce(non_block_gradients)
        for stack, own in zip(stacks, layer_gradients, strict=True):
            gradients |= stack.weights.collect(own, only_microbatch)
        gradients = {name: gradients[name] / loss_scale for name in local.trained}
        if imbalance is not None:  # becomes the mean over the devices when `sums` are summed and divided
            sums["attention_imbalance"] = imbalance * tokens / mesh.size
        sums = {name: total / counts.get(name, tokens) for name, total in sum_over_all(sums, local.sizes).items()}
        norm = global_norm(gradients, local.placements, local.sizes)
        metrics, state = _collect_metrics(local, metrics), dict(state)
        for stack in stacks:
            state = stack.updated_state(state, metrics)
        if history:
            state[FP8] = scaling.record(dict(history), *_newest_amax(stacks, weight_amax, amax), loss_scale)
            # Quantisation clips infinities, so only the amax shows that a value was not finite.
            norm = jnp.where(all_finite(state[FP8]), norm, jnp.nan)
        return sums | {"tokens": tokens}, gradients, norm, state, metrics

    return jax.shard_map(
        _at_full_precision(compute, config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC, P(), P()),
        out_specs=(P(), {name: specs[name] for name in local.trained}, P(), P(), P()),
        check_vma=False,
    )


def _check_microbatches(config: Config, count: int) -> None:
    if count != config.batch.num_microbatches:
        needed = format_keys(config, "batch.num_microbatches")
        cure = "cut the batch into that number, or call the program of its size (TrainProgram.by_size)"
        raise ValueError(f"the batch has {count} microbatches, but {needed}: {cure}.")


def loss_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(parameters, layer state, batch) → (summed loss, valid tokens); forward pass only, without dropout and jitter."""
    specs = {name: placement.spec for name, placement in local.placements.items()}
    stack, pipeline = local.layers, Pipeline(local) if local.plan.is_pipelined else None

    def compute(params: Params, state: LayerState, batch: Batch):
        history = stack.weights.history_of_stage(state.get(FP8, {}))
        scales = stack.weights.scaling.scales(history, stack.weights.weight_amax(params))
        arrays = StepArrays(local.non_block.gather(params), stack.weights.gather_once(params, scales, state))
        tokens, (batch, _) = local.valid_tokens(batch), local.add_derived_fields(batch)
        run = pipeline.loss if pipeline is not None else partial(_loss_over_microbatches, local)
        return sum_over_all(run(arrays, batch), local.sizes), tokens["loss"]

    return jax.shard_map(
        _at_full_precision(compute, local.config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC),
        out_specs=(P(), P()),
        check_vma=False,
    )


def _newest_amax(stacks: Sequence[LayerStack], weight_amax: Sequence[Any], amax: Sequence[Any]) -> tuple[Any, Any]:
    """This step's amaxes of all layers' weights, and of their inputs and gradients, for `Scaling.record`."""
    pairs = zip(stacks, weight_amax, amax, strict=True)
    newest = [stack.weights.all.of_all_layers((own, stack.collect_amax(a))) for stack, own, a in pairs]
    return newest[0] if len(newest) == 1 else jax.tree.map(lambda *rows: jnp.concatenate(rows), *newest)


def _collect_metrics(local: LocalModel, metrics: Sequence[Any]) -> dict[str, dict[str, jax.Array]]:
    """Metrics of all stacks, summed over the microbatches → over all devices, by kind and name `[L, ...]`.

    Counts remain sums, and maxima remain maxima; the others become means over the microbatches.
    """
    collected: dict[str, dict[str, jax.Array]] = {}
    for stack, own in zip(local.stacks, metrics, strict=True):
        collected |= stack.collect_metrics(own)
    count = local.config.batch.num_microbatches

    def mean(name: str, a: jax.Array) -> jax.Array:
        return a if is_maximum(name) or jnp.issubdtype(a.dtype, jnp.integer) else a / count

    return {kind: {name: mean(name, a) for name, a in own.items()} for kind, own in collected.items()}


def all_finite(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Whether all numbers of the arrays are finite."""
    return jnp.stack([jnp.isfinite(array).all() for array in arrays.values()]).all()


def _at_full_precision(compute: Callable, config: Config) -> Callable:
    """`compute` with FP32 matmuls in full precision: by default GPUs round their inputs to TF32."""
    if config.precision.compute != "float32":
        return compute

    def full(*args):
        with jax.default_matmul_precision("highest"):
            return compute(*args)

    return full


def _over_microbatches(local: LocalModel, arrays: StepArrays, batch: Batch):
    """Run the microbatches; a single one runs without a loop and without accumulation of its layers' gradients.

    Returns (gradients outside the blocks, gradients of the layers, (sums, metrics), amaxes), those of layers as tuples
    by stack. Gradients outside the blocks accumulate in place. Gradients of the layers, losses and metrics are summed.
    Amaxes are maxima.
    """
    count, scale = batch["tokens"].shape[0], arrays.scale
    assert scale is not None

    def microbatch(non_block_gradients, index, fields: Batch):
        inputs = local.inputs(fields, index, arrays)
        x = local.non_block.forward(arrays.non_block, fields, inputs)
        x, residuals, metrics = local.layers.forward_values(arrays.layers, x, inputs)
        sums, dx, non_block_gradients = local.non_block.losses_and_gradients(
            arrays.non_block, x, *_targets(fields), scale, non_block_gradients
        )
        dx, non_block_gradients, mtp_sums, predicted = local.predict(
            arrays, x, dx, fields, inputs, non_block_gradients, count == 1
        )
        dx, layer_gradients, amax = local.layers.backward_values(arrays.layers, residuals, dx, inputs, count == 1)
        non_block_gradients = local.non_block.backward(non_block_gradients, arrays.non_block, fields, inputs, dx)
        gradients, metrics, amax = zip((layer_gradients, metrics, amax), *predicted, strict=True)
        return non_block_gradients, gradients, (sums | mtp_sums, metrics), amax

    zeros = local.non_block.zero_gradients(arrays.non_block)
    if count == 1:
        return microbatch(zeros, 0, {name: field[0] for name, field in batch.items()})

    loops = (jnp.arange(count), dict(batch))
    run, (_, shapes, *others) = traced(microbatch, zeros, *jax.tree.map(lambda a: a[0], loops))

    def body(carry, loop):
        non_block_gradients, layer_gradients, sums, amax = carry
        non_block_gradients, new, new_sums, new_amax = run(non_block_gradients, *loop)
        layer_gradients = jax.tree.map(added, layer_gradients, new)
        sums, amax = add_metrics(sums, new_sums), jax.tree.map(jnp.maximum, amax, new_amax)
        return (non_block_gradients, layer_gradients, sums, amax), None

    stacks = zip(local.stacks, shapes, strict=True)
    of_layers = tuple(stack.weights.zero_gradients(own) for stack, own in stacks)
    carry = (zeros, of_layers, *jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), others))
    carry, _ = lax.scan(body, carry, loops)
    return carry


def _loss_over_microbatches(local: LocalModel, arrays: StepArrays, batch: Batch) -> jax.Array:
    """This device's share of the summed loss, without dropout."""

    def microbatch(loss, fields: Batch):
        inputs = local.inputs(fields, 0)
        x = local.non_block.forward(arrays.non_block, fields, inputs)
        x, _, _ = local.layers.forward_values(arrays.layers, x, inputs, save=False)
        return loss + local.non_block.losses(arrays.non_block, x, *_targets(fields)), None

    return lax.scan(microbatch, jnp.zeros((), jnp.float32), dict(batch))[0]


def _targets(fields: Batch) -> tuple[jax.Array, jax.Array]:
    """Targets and mask of a microbatch, `[T]`."""
    return fields["targets"].reshape(-1), fields["loss_mask"].reshape(-1)
