"""The model as one device sees it inside the step's shard_map: weights gathered, embedding, layers, head."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from megajax import ops
from megajax.config import Config
from megajax.config.kinds import layer_windows
from megajax.config.segments import plan_segments
from megajax.config.sentences import said
from megajax.config.stages import slot_kinds
from megajax.mesh import BATCH_AXES, mesh_sizes, within_processes
from megajax.model.parts import BlockInputs
from megajax.model.transformer import Transformer
from megajax.ops import fp8
from megajax.parallel.comm import MeshComm
from megajax.parallel.context.token_order import add_places, place_of
from megajax.parallel.embedding import MeshEmbedding
from megajax.parallel.head import LossHead
from megajax.parallel.stack.layers import LayerStack, of_block
from megajax.parallel.weights.exchange import WeightExchange, row_major, sum_over_all
from megajax.parallel.weights.fused import FusedWeights
from megajax.runtime import permutations_are_copied
from megajax.sharding import BLOCKS, Placement

JITTER = 2**31  # folded into the step's key; below it: layers and branches of dropout
Params = Mapping[str, jax.Array]
Batch = Mapping[str, jax.Array]


@dataclass(frozen=True)
class Kernels:
    """Which implementation of an operation was chosen where there are several, and why."""

    attention: ops.Implementation
    attention_reason: str
    grouped_matmul: ops.GroupedImplementation  # unused without experts
    grouped_matmul_reason: str
    fp8: fp8.Implementation  # unused without FP8

    @classmethod
    def choose(cls, config: Config, mesh: Mesh) -> "Kernels":
        """Raises ConfigError for a kernel that cannot run."""
        device, model, settings = mesh.devices.flat[0], config.model, config.precision.fp8
        capability = getattr(device, "compute_capability", None)
        attention = ops.choose_attention(
            config.kernels.attention,
            platform=device.platform,
            capability=capability,
            dtype=config.precision.compute,
            head_dim=model.head_dim,
            softcap=model.attention_softcap,
            packed=config.data.reset_attention,
            sequence_length=config.batch.sequence_length,
            parts_with=_unknown_to_parts(config, mesh),
        )
        grouped: tuple[ops.GroupedImplementation, str] = "reference", "no experts"
        if model.num_experts:
            assert model.expert_ffn_hidden_size is not None
            whole = "tensor" in config.mesh.experts_over
            width = model.expert_ffn_hidden_size // (1 if whole else mesh_sizes(mesh)["tensor"])
            grouped = ops.choose_grouped_matmul(
                config.kernels.grouped_matmul,
                platform=device.platform,
                capability=capability,
                dtype=config.precision.compute,
                widths=(model.hidden_size, width),
                fp8=settings.recipe != "none",
            )
        quantised = settings.recipe != "none"
        kernels = fp8.choose(settings.backend, device.platform, capability) if quantised else "reference"
        return cls(*attention, *grouped, kernels)


def _unknown_to_parts(config: Config, mesh: Mesh) -> tuple[str, ...]:
    """Settings that cuDNN's attention to a part of the keys (`ops/partial_attention.py`) does not know."""
    if mesh_sizes(mesh)["context"] == 1 or config.kernels.context == "all_to_all":
        return ()
    windows = [window for window in layer_windows(config.model) if window is not None]
    settings = {
        f"model.sliding_window={config.model.sliding_window}": min(windows, default=math.inf)
        < config.batch.sequence_length,
        # Equal calls of its deterministic backward pass fail at run time, as `MeshComm.attend` says.
        "run.deterministic": config.run.deterministic,
    }
    return tuple(name for name, present in settings.items() if present)


@dataclass(frozen=True)
class LocalModel:
    """The model as one device sees it inside the step's shard_map."""

    config: Config
    sizes: Mapping[str, int]
    placements: Mapping[str, Placement]  # of the stored parameters
    comm: MeshComm
    exchange: WeightExchange
    layers: LayerStack
    embedding: MeshEmbedding
    head: LossHead

    @classmethod
    def build(
        cls,
        config: Config,
        model: Transformer,
        placements: Mapping[str, Placement],
        mesh: Mesh,
        kernels: Kernels,
    ):
        sizes, platform = mesh_sizes(mesh), mesh.devices.flat[0].platform
        segments = plan_segments(config, platform, slot_kinds(config, sizes["pipeline"]), sizes)
        comm = MeshComm(
            sizes,
            kernels.attention,
            config.run.deterministic,
            config.kernels.context,
            kernels.fp8,
            "pallas" if platform == "gpu" else "reference",
            dispatch=config.dispatch(sizes),
            ragged=platform != "cpu",
            experts_over=config.mesh.experts_over,
            grouped=kernels.grouped_matmul,
            copied=platform == "gpu" and permutations_are_copied() and within_processes(mesh, "tensor"),
            # In a loop; a pipeline may compute the weights' gradients later.
            tied=sizes["fsdp"] > 1 and sizes["pipeline"] == 1 and any(segment.loops > 1 for segment in segments),
        )
        compute, gradients = jnp.dtype(config.precision.compute), jnp.dtype(config.precision.gradients)
        fused = {
            kind: FusedWeights(of_block(placements, kind), block.fused, sizes) for kind, block in model.blocks.items()
        }
        computed = {n: p for n, p in placements.items() if not n.startswith(BLOCKS)}
        for kind, own in fused.items():
            computed |= {f"{BLOCKS}{kind}.{name}": placement for name, placement in own.placements.items()}
        exchange = WeightExchange(computed, sizes, compute, gradients)
        layers = LayerStack(config, comm, model, exchange, fused, platform)
        ends = MeshEmbedding(config, comm), LossHead(config, comm, platform)
        return cls(config, sizes, placements, comm, exchange, layers, *ends)

    @jax.named_scope("weights")
    def gather_ends(self, params: Params) -> dict[str, jax.Array]:
        """The weights outside the blocks, ready to compute with, gathered over `fsdp` once a step too.

        But for a token embedding whose rows travel: that stays its FP32 shard.
        """
        ends = {name: w for name, w in params.items() if not name.startswith(BLOCKS)}
        gather = [name for name in ends if name not in self.embedding.as_stored]
        gathered = {name: self.exchange.gather_once(name, ends[name]) for name in gather}
        return ends | {name: row_major(self.exchange.gather_layer(name, w)) for name, w in gathered.items()}

    def reduce_ends(self, gradients: Params) -> dict[str, jax.Array]:
        """Gradients of what `gather_ends` gave → complete FP32 gradients of the stored shards."""
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
        """What the blocks read of one microbatch of `add_places`; `key` and `layer_loss_scale` in training only."""
        B, S = batch["tokens"].shape
        shards = math.prod(self.sizes[axis] for axis in BATCH_AXES)
        sequences = (microbatch * B * shards + self.comm.sequence_ids(B)).astype(jnp.uint32)
        place = place_of(batch, self.sizes["context"])
        token_ids = (sequences[:, None] * (S * self.sizes["context"]) + place.index.astype(jnp.uint32)).reshape(-1)
        model = self.config.model
        return BlockInputs(
            batch["positions"],
            place,
            self.comm.own_tokens(token_ids),
            dropout_key=key if model.dropout > 0 else None,
            jitter_key=None if key is None or not model.router.jitter else jax.random.fold_in(key, JITTER),
            layer_loss_scale=layer_loss_scale,
        )

    def add_places(self, batch: Batch) -> tuple[dict[str, jax.Array], jax.Array | None]:
        """`token_order.add_places` of this device's fields `[M, B, S]`."""
        if ("segment_ids" in batch) != self.config.data.reset_attention:
            problem = "has" if "segment_ids" in batch else "has no"
            raise ValueError(
                f"the batch {problem} segment_ids and {said(self.config, 'data.reset_attention')}: "
                "give them with data.reset_attention=true, and only then."
            )
        return add_places(batch, self.sizes["context"])

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
