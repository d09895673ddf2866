"""Loss and gradients of one global batch: the part of the step that is local to a device.

One shard_map, manual over all six axes, holds forward, backward and gradient reduction: weights are gathered, the
microbatches run one after the other, gradients accumulate in FP32 and are reduced once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax import ops
from megajax.config import Config
from megajax.mesh import BATCH_AXES, mesh_sizes
from megajax.model.transformer import BlockInputs, Transformer
from megajax.ops import fp8
from megajax.parallel.comm import MeshComm
from megajax.parallel.fused import FusedWeights
from megajax.parallel.head import LossHead
from megajax.parallel.layers import PREFIX, LayerStack
from megajax.parallel.scaling import History
from megajax.parallel.weights import WeightExchange, global_norm, row_major, sum_over_all
from megajax.sharding import BATCH_SPEC, Placement

Params = Mapping[str, jax.Array]
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class LocalModel:
    """The model as one device sees it inside the step's shard_map."""

    config: Config
    sizes: Mapping[str, int]
    placements: Mapping[str, Placement]  # of the stored parameters
    comm: MeshComm
    exchange: WeightExchange
    layers: LayerStack
    head: LossHead

    @classmethod
    def build(
        cls,
        config: Config,
        model: Transformer,
        placements: Mapping[str, Placement],
        mesh: Mesh,
        attention: ops.Implementation,
        kernels: fp8.Implementation,
    ):
        sizes, platform = mesh_sizes(mesh), mesh.devices.flat[0].platform
        comm = MeshComm(
            sizes, attention, config.run.deterministic, kernels, "pallas" if platform == "gpu" else "reference"
        )
        compute, gradients = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.gradients)
        blocks = {n.removeprefix(PREFIX): p for n, p in placements.items() if n.startswith(PREFIX)}
        fused = FusedWeights(blocks, sizes)
        computed = {n: p for n, p in placements.items() if not n.startswith(PREFIX)}
        computed |= {PREFIX + n: p for n, p in fused.placements.items()}
        exchange = WeightExchange(computed, sizes, compute, gradients)
        layers = LayerStack(config, model, comm, exchange, fused, platform)
        return cls(config, sizes, placements, comm, exchange, layers, LossHead(config, comm, platform))

    @jax.named_scope("weights")
    def gather_ends(self, params: Params) -> dict[str, jax.Array]:
        """The weights outside the blocks, ready to compute with; they are gathered over `fsdp` once a step too."""
        ends = {name: w for name, w in params.items() if not name.startswith(PREFIX)}
        gathered = {name: self.exchange.gather_once(name, w) for name, w in ends.items()}
        return {name: row_major(self.exchange.gather_layer(name, w)) for name, w in gathered.items()}

    def inputs(self, batch: Batch, microbatch: jax.Array | int, dropout_key: jax.Array | None) -> BlockInputs:
        """What the blocks read of one microbatch, `[B, S]` each."""
        B, S = batch["tokens"].shape
        shards = math.prod(self.sizes[axis] for axis in BATCH_AXES)
        sequences = (microbatch * B * shards + self.comm.sequence_ids(B)).astype(jnp.uint32)
        token_ids = (sequences[:, None] * S + jnp.arange(S, dtype=jnp.uint32)).reshape(-1)
        if "segment_ids" in batch:
            raise ValueError("packed documents are not available yet: leave segment_ids out of the batch.")
        return BlockInputs(batch["positions"], None, self.comm.own_tokens(token_ids), dropout_key)

    @jax.named_scope("embedding")
    def embed(self, ends: Params, batch: Batch, inputs: BlockInputs) -> jax.Array:
        """Tokens and positions `[B, S]` → residual stream `[T / tensor, D]`."""
        rows, ours = self._vocabulary_rows(ends, batch["tokens"])
        x = self.comm.leave(jnp.where(ours, ends["embedding.tokens"][rows], 0))
        if "embedding.positions" in ends:
            x = x + ends["embedding.positions"][self.comm.own_tokens(batch["positions"].reshape(-1))]
        return self._embedding_dropout(x, inputs)

    @jax.named_scope("embedding")
    def embed_backward(self, gradients: Params, ends: Params, batch: Batch, inputs: BlockInputs, dx) -> dict:
        """`gradients` with the embedding's added: a scatter-add into the accumulator, in place."""
        out = dict(gradients)
        (dx,) = jax.vjp(partial(self._embedding_dropout, inputs=inputs), dx)[1](dx)
        rows, ours = self._vocabulary_rows(ends, batch["tokens"])
        updates = jnp.where(ours, self.comm.enter(dx), 0).astype(jnp.float32)
        # Behind a barrier, or XLA would scatter into the layout of the reduction after all.
        table = row_major(out["embedding.tokens"].at[rows].add(updates))
        out["embedding.tokens"] = lax.optimization_barrier(table)
        if "embedding.positions" in ends:
            own = self.comm.own_tokens(batch["positions"].reshape(-1))
            out["embedding.positions"] = out["embedding.positions"].at[own].add(dx.astype(jnp.float32))
        return out

    def valid_tokens(self, batch: Batch) -> jax.Array:
        """The number of tokens that count in the loss, over all devices and microbatches; at least 1."""
        count = batch["loss_mask"].astype(jnp.float32).sum() / self.comm.tensor_size
        return jnp.maximum(sum_over_all(count, self.sizes), 1)

    def _vocabulary_rows(self, ends: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Each token's row in this device's part of the vocabulary `[T]`, and whether it is there `[T, 1]`."""
        size = ends["embedding.tokens"].shape[0]
        rows = tokens.reshape(-1) - self.comm.vocabulary_start(size)
        ours = (rows >= 0) & (rows < size)
        return jnp.where(ours, rows, 0), ours[:, None]

    def _embedding_dropout(self, x: jax.Array, inputs: BlockInputs) -> jax.Array:
        if inputs.dropout_key is None:
            return x
        key = jax.random.fold_in(inputs.dropout_key, 0)
        return ops.dropout(x, self.config.model.dropout, key, inputs.token_ids)


def gradient_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(stored parameters, FP8 history, batch, step, loss scale) → (sums, gradients of the parameters, norm, history).

    Batch fields are `[M, B, S]`, the norm is the gradients' over all devices. `sums` holds `loss` (the language-model
    loss per valid token), `z_loss` and `tokens`.
    The gradients are those of `loss + z_loss`, whatever the loss scale.
    """
    specs = {name: placement.spec for name, placement in local.placements.items()}
    config = local.config
    only_microbatch = config.batch.num_microbatches == 1

    def compute(params: Params, history: History, batch: Batch, step: jax.Array, loss_scale: jax.Array):
        ends, weight_amax = local.gather_ends(params), local.layers.weight_amax(params)
        scaling = local.layers.scaling
        layers = local.layers.gather_once(params, scaling.scales(history, weight_amax, loss_scale))
        tokens = local.valid_tokens(batch)
        scale = loss_scale / tokens
        key = None
        if config.model.dropout > 0:
            key = jax.random.fold_in(jax.random.key(config.run.seed + 1), step)

        def microbatch(end_gradients, index, fields: Batch):
            inputs = local.inputs(fields, index, key)
            x = local.embed(ends, fields, inputs)
            x, residuals = local.layers.forward(layers, x, inputs)
            loss, z_loss, dx, end_gradients = local.head.losses_and_gradients(
                ends, x, fields["targets"].reshape(-1), fields["loss_mask"].reshape(-1), scale, end_gradients
            )
            dx, layer_gradients, amax = local.layers.backward(layers, residuals, dx, inputs, only_microbatch)
            end_gradients = local.embed_backward(end_gradients, ends, fields, inputs, dx)
            return end_gradients, layer_gradients, {"loss": loss / tokens, "z_loss": z_loss / tokens}, amax

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), ends)
        end_gradients, layer_gradients, sums, amax = _accumulate(microbatch, zeros, batch)

        end_gradients = {n: local.exchange.reduce_layer(n, g) for n, g in end_gradients.items()}
        gradients = {n: local.exchange.reduce_once(n, g) for n, g in end_gradients.items()}
        gradients |= local.layers.collect(layer_gradients, only_microbatch)
        gradients = {name: gradients[name] / loss_scale for name in params}
        sums = sum_over_all(sums, local.sizes) | {"tokens": tokens}
        norm = global_norm(gradients, local.placements, local.sizes)
        if history:
            history = scaling.record(history, weight_amax, local.layers.collect_amax(amax), loss_scale)
            # An infinity saturates when it is quantised: only the amax tells that the step went bad.
            norm = jnp.where(all_finite(history), norm, jnp.nan)
        return sums, gradients, norm, history

    return jax.shard_map(
        _at_full_precision(compute, config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC, P(), P()),
        out_specs=(P(), specs, P(), P()),
        check_vma=False,
    )


def loss_function(local: LocalModel, mesh: Mesh) -> Callable:
    """(stored parameters, FP8 history, batch) → (summed loss, valid tokens), forward pass only, without dropout."""
    specs = {name: placement.spec for name, placement in local.placements.items()}

    def compute(params: Params, history: History, batch: Batch):
        scales = local.layers.scaling.scales(history, local.layers.weight_amax(params))
        ends, layers = local.gather_ends(params), local.layers.gather_once(params, scales)

        def microbatch(loss, fields: Batch):
            inputs = local.inputs(fields, 0, None)
            x = local.embed(ends, fields, inputs)
            x, _ = local.layers.forward(layers, x, inputs, save=False)
            targets, mask = fields["targets"].reshape(-1), fields["loss_mask"].reshape(-1)
            return loss + local.head.losses(ends, x, targets, mask), None

        loss, _ = lax.scan(microbatch, jnp.zeros((), jnp.float32), dict(batch))
        return sum_over_all(loss, local.sizes), local.valid_tokens(batch)

    return jax.shard_map(
        _at_full_precision(compute, local.config),
        mesh=mesh,
        in_specs=(specs, P(), BATCH_SPEC),
        out_specs=(P(), P()),
        check_vma=False,
    )


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

    Gradients of the ends accumulate in place from `zeros`, those of the layers and the sums are added up in FP32, and
    of the amaxes the largest is kept.
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
    carry = (zeros, *jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.float32), shapes))
    carry, _ = lax.scan(body, carry, loops)
    return carry
