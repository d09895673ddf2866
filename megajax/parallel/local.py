"""The model as one device sees it inside the step's shard_map: weights gathered, embedding, layers, head."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from megajax.config import Config
from megajax.config.sentences import format_keys
from megajax.model.parts import BlockInputs
from megajax.model.transformer import Transformer
from megajax.parallel.comm import MeshComm
from megajax.parallel.context.token_order import add_token_positions, token_positions_of
from megajax.parallel.embedding import MeshEmbedding
from megajax.parallel.head import LossHead
from megajax.parallel.stack.layers import LayerStack
from megajax.parallel.stack.weights import of_block
from megajax.parallel.weights.exchange import WeightExchange, row_major, sum_over_all
from megajax.parallel.weights.fused import FusedWeights
from megajax.sharding import BLOCKS, Placement
from megajax.step_plan import StepPlan

JITTER = 2**31  # folded into the step's key; below it: layers and branches of dropout
Params = Mapping[str, jax.Array]
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class LocalModel:
    """The model as one device sees it inside the step's shard_map."""

    plan: StepPlan
    placements: Mapping[str, Placement]  # of the stored parameters
    comm: MeshComm
    exchange: WeightExchange
    layers: LayerStack
    embedding: MeshEmbedding
    head: LossHead

    @classmethod
    def build(cls, plan: StepPlan, model: Transformer, placements: Mapping[str, Placement]):
        config, sizes = plan.config, plan.sizes
        comm = MeshComm(sizes, plan.kernels, plan.collectives, config.run.deterministic)
        compute, gradients = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.gradients)
        fused = {
            kind: FusedWeights(of_block(placements, kind), block.fused, sizes) for kind, block in model.blocks.items()
        }
        computed = {n: p for n, p in placements.items() if not n.startswith(BLOCKS)}
        for kind, own in fused.items():
            computed |= {f"{BLOCKS}{kind}.{name}": placement for name, placement in own.placements.items()}
        exchange = WeightExchange(computed, sizes, compute, gradients)
        layers = LayerStack(plan, comm, model, exchange, fused)
        non_block = MeshEmbedding(plan, comm), LossHead(plan, comm)
        return cls(plan, placements, comm, exchange, layers, *non_block)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.plan.sizes

    @jax.named_scope("weights")
    def gather_non_block(self, params: Params) -> dict[str, jax.Array]:
        """The weights outside the blocks, ready to compute with, gathered over `fsdp` once a step too.

        But for a token embedding whose rows travel: that stays its FP32 shard.
        """
        non_block = {name: w for name, w in params.items() if not name.startswith(BLOCKS)}
        gather = [name for name in non_block if name not in self.embedding.as_stored]
        gathered = {name: self.exchange.gather_once(name, non_block[name]) for name in gather}
        return non_block | {name: row_major(self.exchange.gather_layer(name, w)) for name, w in gathered.items()}

    def reduce_non_block(self, gradients: Params) -> dict[str, jax.Array]:
        """Gradients of what `gather_non_block` gave → complete FP32 gradients of the stored shards."""
        return {
            name: self.exchange.complete(name, g)
            if name in self.embedding.as_stored
            else self.exchange.reduce_once(name, self.exchange.reduce_layer(name, g))
            for name, g in gradients.items()
        }

    def inputs(
        self,
        batch: Batch,
        microbatch: jax.Array | int,
        key: jax.Array | None,
        layer_loss_scale: jax.Array | None = None,
    ) -> BlockInputs:
        """What the blocks read of one microbatch; `key` and `layer_loss_scale` in training only."""
        B, S = batch["tokens"].shape
        shards = self.config.batch_shards(self.sizes)
        sequences = (microbatch * B * shards + self.comm.sequence_ids(B)).astype(jnp.uint32)
        positions = token_positions_of(batch, self.sizes["context"])
        token_ids = (sequences[:, None] * (S * self.sizes["context"]) + positions.index.astype(jnp.uint32)).reshape(-1)
        model = self.config.model
        return BlockInputs(
            batch["positions"],
            positions,
            self.comm.own_tokens(token_ids),
            dropout_key=key if model.dropout > 0 else None,
            jitter_key=None if key is None or not model.router.jitter else jax.random.fold_in(key, JITTER),
            layer_loss_scale=layer_loss_scale,
        )

    def add_token_positions(self, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """`token_order.add_token_positions` of this device's fields `[M, B, S]`."""
        if ("segment_ids" in batch) != self.config.data.reset_attention:
            problem = "has" if "segment_ids" in batch else "has no"
            raise ValueError(
                f"the batch {problem} segment_ids and {format_keys(self.config, 'data.reset_attention')}: "
                "give them with data.reset_attention=true, and only then."
            )
        return add_token_positions(batch, self.sizes["context"])

    def layer_loss_scale(self, loss_scale: jax.Array) -> jax.Array | None:
        """The factor of the layers' losses of one microbatch in what is differentiated: their mean counts.

        None where no layer measures anything.
        """
        measures = any(block.measures for block in self.layers.blocks.values())
        return loss_scale / self.config.batch.num_microbatches if measures else None

    def random_key(self, step: jax.Array) -> jax.Array | None:
        """The key of a step's dropout and jitter, if there are any."""
        config = self.config
        if not config.model.dropout and not config.model.router.jitter:
            return None
        return jax.random.fold_in(jax.random.key(config.run.seed + 1), step)

    def valid_tokens(self, batch: Batch) -> jax.Array:
        """The number of tokens that count in the loss, over all devices and microbatches; at least 1."""
        copies = self.sizes["tensor"] * self.sizes["pipeline"]  # devices that hold the same tokens
        count = batch["loss_mask"].astype(jnp.float32).sum() / copies
        return jnp.maximum(sum_over_all(count, self.sizes), 1)
