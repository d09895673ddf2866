"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name, checkpoint_policies

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.sublayers import EVERYTHING
from megajax.model.comm import LatentKeys
from megajax.model.parameters import declare
from megajax.model.sublayer import (
    MAX_SCORE,
    LayerContext,
    Metrics,
    State,
    Sublayer,
    Weights,
    clip_factor,
    declare_norm,
    declare_norm_weight,
    normalise,
    residual_scale,
    rotate,
)
from megajax.ops import AttentionSettings

EPSILON = 1e-6  # of the latents' norms, whatever `model.norm_epsilon` is, as in the authors' code


class LatentAttention(Sublayer):
    """Causal self-attention whose keys and values are computed from a latent: `[T, D]` → `[T, D]`.

    A query and a key are R rotated elements, then those without positions; the paper has them in the other order. All
    heads share the rotated part of the key. Without positions, as in Kimi Linear, it is shared too, but not rotated.
    The down-projections run on a device's own tokens, so the collective over `tensor` sends latents instead of the
    residual stream.
    """

    NAME = "attention"
    SUPPORTS = EVERYTHING
    FUSED = {
        "down": ("query_down", "key_value_down", "rotary_key"),
        "key_value": ("key", "value"),
    }
    LINEAR = ("down", "query", "key_value", "output")
    SAVED = ("latents", "queries", "keys_values", "attention", "exchanged", "output")

    def __init__(self, config: ModelConfig):
        D, N, H = config.hidden_size, config.num_heads, config.head_dim
        latent, of_queries = config.kv_lora_rank, config.q_lora_rank
        nope, rotary, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        assert latent and nope and rotary and value
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.query_down = declare((D, of_queries), ("embed", "rank")) if of_queries else None
        self.key_value_down = declare((D, latent), ("embed", "rank"))
        self.rotary_key = declare((D, rotary), ("embed", "rank"))
        self.query_norm = declare_norm_weight(config, of_queries) if of_queries else None
        self.key_value_norm = declare_norm_weight(config, latent)
        self.query = declare((of_queries or D, N, H), ("embed", "heads", "head"))
        self.key = declare((latent, N, nope), ("embed", "heads", "head"))
        self.value = declare((latent, N, value), ("embed", "heads", "head"))
        self.output = declare((N, value, D), ("heads", "head", "embed"), scale=residual_scale(config))

    @jax.named_scope("attention")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Down-projections → latents → queries, keys and values → core → output.

        To recompute "attention" means the up-projections: the latents and the core's output are kept.
        """
        comm = ctx.comm
        query_input, down = self.project(w, x, ctx)

        def core(query_input, down):
            q, keys = self.heads(w, query_input, down, ctx)
            settings = AttentionSettings(
                ctx.kind.window,
                self.config.attention_softcap,
                self.score_scale(),
                wants_largest=self.config.qk_clip is not None and ctx.inputs.has_metrics,
                causal=self.config.causal,
            )
            out, largest = comm.attend_latent(q, keys, ctx.inputs.token_positions, settings)
            return checkpoint_name(out, "attention"), largest

        if "attention" in ctx.recompute:
            core = jax.checkpoint(core, policy=checkpoint_policies.save_only_these_names("attention"))
        out, largest = core(query_input, down)
        y = comm.row_linear(out.reshape(-1, out.shape[-2] * out.shape[-1]), w["output"])
        metrics = {} if largest is None else {MAX_SCORE: comm.padded_to_all_heads(largest, self.config.num_heads)}
        return checkpoint_name(y, "output"), metrics

    def project(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, jax.Array]:
        """`[T / tensor, D]` → (input of the queries' projection, latents and rotary key side by side), own tokens.

        The first is the queries' latent, or `[T / tensor, D]` without one.
        """
        c = self.config

        def compute(x, norm, norm_bias, weight):
            h = normalise(c, x, norm, norm_bias)
            return h, ctx.comm.replicated_linear(h, weight)

        compute = jax.checkpoint(compute, prevent_cse=False) if "norms" in ctx.recompute else compute
        h, down = compute(x, w.get("norm"), w.get("norm_bias"), w["down"])
        down = checkpoint_name(down, "latents")
        return (h, down) if c.q_lora_rank is None else (down[:, : c.q_lora_rank], down[:, c.q_lora_rank :])

    def heads(self, w: Weights, query_input, down, ctx: LayerContext) -> tuple[jax.Array, LatentKeys]:
        """Outputs of `project` → queries `[B, S, N, H]` and the keys, with rotary positions."""
        c, comm, (B, S) = self.config, ctx.comm, ctx.inputs.positions.shape
        assert c.kv_lora_rank is not None
        latent, rotary = jnp.split(down, (c.kv_lora_rank,), axis=-1)
        if c.q_lora_rank is not None:
            query_input = self._normalise(query_input, w["query_norm"])
        q = checkpoint_name(comm.column_linear(query_input, w["query"]), "queries").reshape(B, S, -1, c.head_dim)
        rotary = comm.all_gather_tokens(rotary).reshape(B, S, 1, -1)
        q, rotary = rotate(c, ctx.kind, ctx.inputs, comm.sequence_length(S), q, rotary)
        assert c.qk_nope_head_dim is not None
        latent = self._normalise(latent, w["key_value_norm"])
        return q, LatentKeys(latent, rotary[:, :, 0], w["key_value"], c.qk_nope_head_dim, c.value_dim)

    def score_scale(self) -> float:
        """Factor of the scores."""
        c = self.config
        scaling = c.rope_scaling.model_dump() if c.rope_scaling else None
        return c.attention_scale or c.head_dim**-0.5 * ops.rope_score_factor(scaling)

    def has_metrics(self) -> bool:
        return self.config.qk_clip is not None

    def rescaled(self, metrics: State) -> dict[str, jax.Array]:
        """Queries and keys by √γ; the rotated part of queries by γ, because all heads share that of the key."""
        if MAX_SCORE not in metrics:
            return {}
        factor = clip_factor(self.config, metrics[MAX_SCORE])[:, None, :, None]
        rotated = jnp.arange(self.config.head_dim) < (self.config.qk_rope_head_dim or 0)
        return {"query": jnp.where(rotated, factor, jnp.sqrt(factor)), "key": jnp.sqrt(factor)}

    def _normalise(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        return ops.rms_norm(x, weight, EPSILON, self.config.norm_zero_centred)
