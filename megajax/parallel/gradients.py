"""Loss and gradients of one global batch: the part of the step that is local to a device.

One shard_map, manual over all six axes, holds forward, backward and gradient reduction: weights are gathered, the
microbatches run one after the other or through the stages of a pipeline, gradients accumulate in FP32 and are reduced
once.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.config import Config
from megajax.model.transformer import COUNTS
from megajax.parallel.local import Batch, LocalModel, Params
from megajax.parallel.pipeline.pipeline import Pipeline
from megajax.parallel.stack.layers import NO_STATE
from megajax.parallel.weights.exchange import global_norm, sum_over_all, summed_dtype
from megajax.parallel.weights.scaling import History
from megajax.sharding import BATCH_SPEC


def gradient_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(parameters, FP8 history, batch, step, loss scale, layer state) → (sums, gradients, norm, history, metrics).

    Parameters and their gradients are as stored. Batch fields are `[M, B, S]`, the norm is the gradients' over all
    devices. `sums` holds `loss` (the language-model loss per valid token), `z_loss` and `tokens`; `metrics` of the MoE
    layers, `[L, ...]`, are means over the microbatches, COUNTS sums. The gradients are those of `loss + z_loss`
    and of the routers' losses, whatever the loss scale. The layer state, `[L, ...]`, is theirs too.
    """
    specs = {name: placement.spec for name, placement in local.placements.items()}
    config = local.config
    pipeline = Pipeline(local) if local.sizes["pipeline"] > 1 else None
    only_microbatch = config.batch.num_microbatches == 1 and pipeline is None

    def compute(params: Params, history: History, batch: Batch, step, loss_scale: jax.Array, state: Params):
        ends, weight_amax = local.gather_ends(params), local.layers.weight_amax(params)
        scaling = local.layers.scaling
        scales = scaling.scales(local.layers.all.of_stage(history), weight_amax, loss_scale)
        layers = local.layers.gather_once(params, scales, state)
        tokens, (batch, imbalance) = local.valid_tokens(batch), local.add_places(batch)
        scale, balance_scale = loss_scale / tokens, local.balance_scale(loss_scale)
        key = local.random_key(step)

        def microbatch(end_gradients, index, fields: Batch):
            inputs = local.inputs(fields, index, key, balance_scale)
            x = local.embedding.forward(ends, fields, inputs)
            x, residuals, metrics = local.layers.forward(layers, x, inputs)
            loss, z_loss, dx, end_gradients = local.head.losses_and_gradients(
                ends, x, fields["targets"].reshape(-1), fields["loss_mask"].reshape(-1), scale, end_gradients
            )
            dx, layer_gradients, amax = local.layers.backward(layers, residuals, dx, inputs, only_microbatch)
            end_gradients = local.embedding.backward(end_gradients, ends, fields, inputs, dx)
            return end_gradients, layer_gradients, ({"loss": loss, "z_loss": z_loss}, metrics), amax

        if pipeline is None:
            zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), ends)
            end_gradients, layer_gradients, (sums, metrics), amax = _accumulate(microbatch, zeros, batch)
        else:
            end_gradients, layer_gradients, (sums, metrics), amax = pipeline.gradients(
                ends, layers, batch, key, scale, balance_scale
            )

        gradients = local.reduce_ends(end_gradients)
        gradients |= local.layers.collect(layer_gradients, only_microbatch)
        gradients = {name: gradients[name] / loss_scale for name in params}
        if imbalance is not None:  # a mean over the devices, by the way of the sums
            sums["attention_imbalance"] = imbalance * tokens / mesh.size
        sums = {name: total / tokens for name, total in sum_over_all(sums, local.sizes).items()} | {"tokens": tokens}
        norm = global_norm(gradients, local.placements, local.sizes)
        if history:
            newest = local.layers.all.of_all_layers((weight_amax, local.layers.collect_amax(amax)))
            history = scaling.record(history, *newest, loss_scale)
            # An infinity saturates when it is quantised: only the amax tells that the step went bad.
            norm = jnp.where(all_finite(history), norm, jnp.nan)
        metrics = local.layers.collect_metrics(metrics)
        for name in [name for name in metrics if name not in COUNTS]:
            metrics[name] /= config.batch.num_microbatches
        return sums, gradients, norm, history, metrics

    mapped = jax.shard_map(
        _at_full_precision(compute, config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC, P(), P(), P()),
        out_specs=(P(), specs, P(), P(), P()),
        check_vma=False,
    )

    def gradients(*arguments, state: Params = NO_STATE):
        return mapped(*arguments, state)

    return gradients


def loss_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(parameters, FP8 history, batch, layer state) → (summed loss, valid tokens), forward pass only, not random."""
    specs = {name: placement.spec for name, placement in local.placements.items()}
    pipeline = Pipeline(local) if local.sizes["pipeline"] > 1 else None

    def compute(params: Params, history: History, batch: Batch, state: Params):
        scales = local.layers.scaling.scales(local.layers.all.of_stage(history), local.layers.weight_amax(params))
        ends, layers = local.gather_ends(params), local.layers.gather_once(params, scales, state)
        tokens, (batch, _) = local.valid_tokens(batch), local.add_places(batch)
        if pipeline is not None:
            return sum_over_all(pipeline.loss(ends, layers, batch), local.sizes), tokens

        def microbatch(loss, fields: Batch):
            inputs = local.inputs(fields, 0, None)
            x = local.embedding.forward(ends, fields, inputs)
            x, _, _ = local.layers.forward(layers, x, inputs, save=False)
            targets, mask = fields["targets"].reshape(-1), fields["loss_mask"].reshape(-1)
            return loss + local.head.losses(ends, x, targets, mask), None

        loss, _ = lax.scan(microbatch, jnp.zeros((), jnp.float32), dict(batch))
        return sum_over_all(loss, local.sizes), tokens

    mapped = jax.shard_map(
        _at_full_precision(compute, local.config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC, P()),
        out_specs=(P(), P()),
        check_vma=False,
    )

    def loss(*arguments, state: Params = NO_STATE):
        return mapped(*arguments, state)

    return loss


def all_finite(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Whether every number of some arrays is finite."""
    return jnp.stack([jnp.isfinite(array).all() for array in arrays.values()]).all()


def _at_full_precision(compute: Callable, config: Config) -> Callable:
    """`compute`, with FP32 matmuls in FP32: GPUs would round their inputs to TF32."""
    if config.precision.compute != "float32":
        return compute

    def full(*args):
        with jax.default_matmul_precision("highest"):
            return compute(*args)

    return full


def _accumulate(microbatch: Callable, zeros: dict[str, jax.Array], batch: Batch):
    """Run the microbatches; a single one is no loop and adds to nothing, so its gradients stay values.

    Gradients of the ends accumulate in place from `zeros`, those of the layers and the sums are added up (in FP32,
    counts as they are), and of the amaxes the largest is kept.
    """
    count = batch["tokens"].shape[0]
    if count == 1:
        return microbatch(zeros, 0, {name: field[0] for name, field in batch.items()})

    def body(carry, loop):
        end_gradients, layer_gradients, sums, amax = carry
        end_gradients, new, new_sums, new_amax = microbatch(end_gradients, *loop)
        layer_gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), layer_gradients, new)
        sums, amax = jax.tree.map(jnp.add, sums, new_sums), jax.tree.map(jnp.maximum, amax, new_amax)
        return (end_gradients, layer_gradients, sums, amax), None

    loops = (jnp.arange(count), dict(batch))
    _, *shapes = jax.eval_shape(microbatch, zeros, *jax.tree.map(lambda a: a[0], loops))
    carry = (zeros, *jax.tree.map(lambda s: jnp.zeros(s.shape, summed_dtype(s.dtype)), shapes))
    carry, _ = lax.scan(body, carry, loops)
    return carry
