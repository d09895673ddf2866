"""The blocks of multi-token prediction modules (DeepSeek-AI 2024, section 2.2)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.layout.kinds import layer_kinds
from megajax.layout.prediction_modules import MTP
from megajax.model.block import BLOCK_CLASSES, Block
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.sublayer import LayerContext, Metrics, Weights, declare_norm, normalise
from megajax.sharding import below


class Join(nnx.Module):
    """Norms of both inputs of a module, and the projection of the pair: `[T, 2D]` → `[T, D]`.

    The embedding's half comes first, as in the released weights of DeepSeek-V3. The projection is not quantised.
    """

    def __init__(self, config: ModelConfig):
        D = config.hidden_size
        self.config = config
        self.embedding_norm, self.embedding_norm_bias = declare_norm(config)
        self.stream_norm, self.stream_norm_bias = declare_norm(config)
        self.projection = declare((2 * D, D), ("embed", "residual"), muon=False)

    @jax.named_scope("join")
    def __call__(self, w: Weights, pair: jax.Array, comm: Comm) -> jax.Array:
        """`pair [T / tensor, 2D]`: embedded tokens, and the output of the model or of the module before."""
        embedded, x = jnp.split(pair, 2, axis=1)
        embedded = normalise(self.config, embedded, w["embedding_norm"], w.get("embedding_norm_bias"))
        x = normalise(self.config, x, w["stream_norm"], w.get("stream_norm_bias"))
        return checkpoint_name(
            comm.replicated_linear(jnp.concatenate([embedded, x], axis=1), w["projection"]), "output"
        )


class PredictionBlock(Block):
    """A multi-token prediction module without embedding and head, which it shares with the model.

    It has the parts of the model's last layer, a projection before them, and a norm of its own after them.
    """

    ROWS = "modules"

    def __init__(self, config: ModelConfig, kind: str):
        super().__init__(config, layer_kinds(config)[-1].block)
        self.join = Join(config)
        self.final_norm, self.final_norm_bias = declare_norm(config)

    @property
    def input_width(self) -> int:
        return 2 * self.config.hidden_size

    def apply(self, weights: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """`x [T / tensor, 2D]`, the embedding beside the module's input → (its normalised output `[T / tensor, D]`,
        metrics).
        """
        x, metrics = super().apply(weights, self.join(below(weights, "join."), x, ctx.comm), ctx)
        return normalise(self.config, x, weights["final_norm"], weights.get("final_norm_bias")), metrics


BLOCK_CLASSES[MTP] = PredictionBlock
