"""The model on one device inside the step's shard_map: its layers, the parts outside them, and their inputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from megajax.config import Config
from megajax.config.kinds import MTP
from megajax.config.sentences import format_keys, listed
from megajax.errors import InputError
from megajax.model.lora import is_trained
from megajax.model.parts import BlockInputs, RealTokens
from megajax.model.transformer import Transformer
from megajax.parallel.comm import MeshComm
from megajax.parallel.context.token_order import add_token_positions, token_positions_of
from megajax.parallel.non_block import NonBlock
from megajax.parallel.pipeline.shared_tokens import SharedTokens
from megajax.parallel.prediction import ModuleArrays, MultiTokenPrediction, Predicted
from megajax.parallel.stack.layers import LayerStack
from megajax.parallel.stack.weights import ByGroup, GroupWeights, of_block
from megajax.parallel.weights.exchange import WeightExchange, sum_over_all
from megajax.parallel.weights.fused import FusedWeights
from megajax.sharding import BLOCKS, Placement
from megajax.step_plan import StepPlan

# Folded into the step's key for jitter and for adapters; dropout of layers and branches uses smaller numbers.
JITTER, ADAPTERS = 2**31, 2**31 + 1
# Fields of a batch with padding, for `RealTokens`: `[M, B]`, `[M]`, `[M]`.
REAL_COUNTS = ("real_lengths", "real_tokens", "real_sequences")
Params = Mapping[str, jax.Array]
Batch = Mapping[str, jax.Array]


class StepArrays(NamedTuple):
    """Arrays shared by all microbatches of a step."""

    non_block: dict[str, jax.Array]  # gathered weights outside the blocks
    layers: ByGroup[GroupWeights]  # weights of the layers, from `StackWeights.gather_once`
    key: jax.Array | None = None  # for dropout and jitter
    scale: jax.Array | None = None  # factor of the summed loss before differentiation; None: forward pass only
    layer_loss_scale: jax.Array | None = None  # factor of the layers' losses of one microbatch
    modules: ModuleArrays | None = None  # of the prediction modules


def check_names(plan: StepPlan, batch: Iterable[str], needed: Iterable[str]) -> None:
    """Raise InputError if the fields of a batch are not those that are `needed`."""
    found, fields = {*batch}, [*needed]
    found -= {"is_real"} - {*fields}  # allowed for any data
    wrong = sorted(found.symmetric_difference(fields))
    if not wrong:
        return
    name = wrong[0]
    key = plan.batch_fields.get(name) or ("data.reset_attention" if name == "segment_ids" else "")
    setting = f" and {format_keys(plan.config, key)}" if key else ""
    problem = f"the batch {'has' if name in found else 'has no'} {name}{setting}"
    raise InputError(f"{problem}: give {listed(fields, 'and')}, and no other fields.")


@dataclass(frozen=True)
class LocalModel:
    """The model on one device inside the step's shard_map."""

    plan: StepPlan
    placements: Mapping[str, Placement]  # of the stored parameters
    comm: MeshComm
    exchange: WeightExchange
    layers: LayerStack
    non_block: NonBlock
    prediction: MultiTokenPrediction | None = None

    @classmethod
    def build(cls, plan: StepPlan, model: Transformer, placements: Mapping[str, Placement]):
        config, sizes = plan.config, plan.sizes
        frozen = config.lora.rank is not None
        comm = MeshComm(sizes, plan.kernels, plan.collectives, config.run.deterministic, frozen)
        compute, gradients = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.gradients)
        fused = {
            kind: FusedWeights(of_block(placements, kind), block.fused, sizes) for kind, block in model.blocks.items()
        }
        computed = {n: p for n, p in placements.items() if not n.startswith(BLOCKS)}
        for kind, own in fused.items():
            computed |= {f"{BLOCKS}{kind}.{name}": placement for name, placement in own.placements.items()}
        exchange = WeightExchange(computed, sizes, compute, gradients, plan.accumulation)
        of_modules, prediction = fused.pop(MTP, None), None
        if of_modules is not None:
            shared = SharedTokens(comm, plan) if plan.is_pipelined else comm
            prediction = MultiTokenPrediction(plan, shared, model.blocks[MTP], exchange, of_modules)
        layers = LayerStack(plan, comm, {kind: model.blocks[kind] for kind in fused}, exchange, fused)
        return cls(plan, placements, comm, exchange, layers, NonBlock(plan, comm, exchange), prediction)

    @property
    def stacks(self) -> tuple[LayerStack, ...]:
        """The layers, and the prediction modules if there are any."""
        return (self.layers, self.prediction.stack) if self.prediction else (self.layers,)

    @property
    def config(self) -> Config:
        return self.plan.config

    @property
    def trained(self) -> list[str]:
        """The names of the stored parameters that have gradients."""
        return [name for name in self.placements if is_trained(self.config.lora, name)]

    @property
    def sizes(self) -> Mapping[str, int]:
        return self.plan.sizes

    def inputs(self, batch: Batch, microbatch: jax.Array | int, arrays: StepArrays | None = None) -> BlockInputs:
        """The blocks' inputs for one microbatch; `arrays` in training only."""
        key, layer_loss_scale = (arrays.key, arrays.layer_loss_scale) if arrays else (None, None)
        B, S = batch["tokens"].shape
        shards = self.config.batch_shards(self.sizes)
        sequences = (microbatch * B * shards + self.comm.sequence_ids(B)).astype(jnp.uint32)
        positions = token_positions_of(batch, self.sizes["context"])
        token_ids = (sequences[:, None] * (S * self.sizes["context"]) + positions.index.astype(jnp.uint32)).reshape(-1)
        model, real = self.config.model, None
        if positions.is_real is not None:
            own = self.comm.own_tokens(positions.is_real.reshape(-1))
            real = RealTokens(own, *(batch[name] for name in REAL_COUNTS))
        return BlockInputs(
            batch["positions"],
            positions,
            self.comm.own_tokens(token_ids),
            dropout_key=key if model.dropout > 0 else None,
            jitter_key=None if key is None or not model.router.jitter else jax.random.fold_in(key, JITTER),
            adapter_key=None if key is None or not self.config.lora.dropout else jax.random.fold_in(key, ADAPTERS),
            layer_loss_scale=layer_loss_scale,
            real=real,
        )

    def add_derived_fields(self, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """`token_order.add_token_positions` for this device's fields `[M, B, S]`; if some are padding, REAL_COUNTS."""
        self.check_fields(batch)
        fields, imbalance = add_token_positions(batch, self.sizes["context"])
        if "is_real" in batch:
            lengths = self.comm.sum_over_context(batch["is_real"].sum(-1, dtype=jnp.int32))
            sequences = jnp.stack([lengths, jnp.minimum(lengths, 1)]).sum(-1)
            counts = lengths, *self.comm.sum_over_batch(sequences)
            fields |= {name: jnp.maximum(a, 1) for name, a in zip(REAL_COUNTS, counts, strict=True)}
        return fields, imbalance

    def check_fields(self, batch: Batch) -> None:
        """Raise ValueError for a batch that lacks a field of `StepPlan.batch_fields`, or has another one."""
        check_names(self.plan, batch, self.plan.batch_fields)

    def layer_loss_scale(self, loss_scale: jax.Array) -> jax.Array | None:
        """The factor of the layers' losses of one microbatch before differentiation: the microbatches' mean counts.

        None if no layer has metrics.
        """
        measures = any(block.measures for block in self.layers.blocks.values())
        return loss_scale / self.config.batch.num_microbatches if measures else None

    def random_key(self, step: jax.Array) -> jax.Array | None:
        """The key of a step's dropout and jitter, if there are any."""
        config = self.config
        if not any((config.model.dropout, config.model.router.jitter, config.lora.rank and config.lora.dropout)):
            return None
        return jax.random.fold_in(jax.random.key(config.run.seed + 1), step)

    def valid_tokens(self, batch: Batch) -> dict[str, jax.Array]:
        """The number of tokens of each loss over all devices and microbatches, at least 1.

        `loss` is that of the loss mask, `mtp_loss` `[depth]` those of the prediction modules, if there are any.
        """
        copies = self.sizes["tensor"] * self.sizes["pipeline"]  # devices that hold the same tokens
        counts = {"loss": batch["loss_mask"].astype(jnp.float32).sum() / copies}
        if self.prediction is not None:
            counts["mtp_loss"] = batch["mtp_mask"].astype(jnp.float32).sum((0, 1, 2)) / copies
        return {name: jnp.maximum(count, 1) for name, count in sum_over_all(counts, self.sizes).items()}

    def predict(
        self,
        arrays: StepArrays,
        x: jax.Array,
        dx: jax.Array,
        fields: Batch,
        inputs: BlockInputs,
        non_block_gradients: dict[str, jax.Array],
        only_microbatch: bool,
    ) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array], list[Predicted]]:
        """Run the prediction modules on the output `x` of the layers, whose gradient is `dx` so far.

        Returns (dx, gradients outside the blocks, sums, the modules' results); without modules nothing changes.
        """
        if self.prediction is None or arrays.modules is None:
            return dx, non_block_gradients, {}, []
        dx, non_block_gradients, losses, predicted = self.prediction.losses_and_gradients(
            arrays.modules, arrays.non_block, x, dx, fields, inputs, non_block_gradients, only_microbatch
        )
        return dx, non_block_gradients, {"mtp_loss": losses}, [predicted]
