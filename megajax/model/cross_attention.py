"""Cross-attention to an encoder's stream."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.layout.kinds import CROSS_ATTENTION, ENCODER
from megajax.layout.sublayers import supported
from megajax.model.parameters import declare
from megajax.model.sublayer import (
    LayerContext,
    Metrics,
    Sublayer,
    Weights,
    declare_norm,
    normalise,
    residual_scale,
)

# Fields of packed pairs, `[B, S]`: the keys of the encoder's sequence that each token sees (`ops.same_documents`)
FIRST_KEY, END_OF_KEYS = "encoder_first_key", "encoder_end_of_keys"


class CrossAttention(Sublayer):
    """Queries of the tokens, keys and values of the encoder's stream (Vaswani et al. 2017): `[T, D]` → `[T, D]`.

    Without positions and without a mask, but for packed pairs of sequences: each token sees its own document's source.
    """

    NAME = CROSS_ATTENTION
    SUPPORTS = supported(CROSS_ATTENTION)
    FUSED = {"key_value": ("key", "value")}
    LINEAR = ("query", "key_value", "output")
    SAVED = ("query", "key_value", "attention", "output")
    STREAMS = (ENCODER,)

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.query = declare((D, N, H), ("embed", "heads", "head"))
        self.key = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.value = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.output = declare((N, H, D), ("heads", "head", "embed"), scale=residual_scale(config))

    @jax.named_scope("cross_attention")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        comm, (B, S) = ctx.comm, ctx.inputs.positions.shape
        x = normalise(self.config, x, w.get("norm"), w.get("norm_bias"))
        q = checkpoint_name(comm.column_linear(x, w["query"]), "query").reshape(B, S, -1, self.config.head_dim)

        def keys_and_values() -> tuple[jax.Array, jax.Array]:
            both = checkpoint_name(comm.column_linear(ctx.inputs.streams[ENCODER], w["key_value"]), "key_value")
            k, v = jnp.split(
                both.reshape(B, -1, both.shape[1] // self.config.head_dim, self.config.head_dim), 2, axis=2
            )
            return k, v

        fields, scale = ctx.inputs.fields, self.config.attention_scale
        ranges = (fields[FIRST_KEY], fields[END_OF_KEYS]) if FIRST_KEY in fields else None
        out = comm.attend_to(q, *comm.of_prompt(keys_and_values), ranges, scale)
        out = checkpoint_name(out, "attention").reshape(B * S, -1)
        return checkpoint_name(comm.row_linear(out, w["output"]), "output"), {}
