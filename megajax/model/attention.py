"""Grouped-query attention."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.sublayers import EVERYTHING
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.sublayer import (
    MAX_SCORE,
    RELATIVE_BIAS,
    LayerContext,
    Metrics,
    State,
    Sublayer,
    Weights,
    add_bias,
    clip_factor,
    declare_norm,
    declare_norm_weight,
    normalise,
    residual_scale,
    rotate,
)
from megajax.ops import AttentionSettings

PARTS = ("query", "key", "value", "gate")


class Attention(Sublayer):
    """Grouped-query self-attention (Ainslie et al. 2023) with the norm before it: `[T, D]` → `[T, D]`."""

    NAME = "attention"
    SUPPORTS = EVERYTHING
    FUSED = {"qkv": PARTS, "qkv_bias": tuple(f"{part}_bias" for part in PARTS)}
    LINEAR = ("qkv", "output")
    SAVED = ("qkv", "attention", "exchanged", "output")

    def __init__(self, config: ModelConfig):
        D, N, K, H = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.query = declare((D, N, H), ("embed", "heads", "head"))
        self.key = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.value = declare((D, K, H), ("embed", "kv_heads", "head"))
        self.gate = declare((D, N, H), ("embed", "heads", "head")) if config.attention_gate else None
        self.output = declare((N, H, D), ("heads", "head", "embed"), scale=residual_scale(config))
        together = config.qk_norm == "all_heads"
        self.query_norm = declare_norm_weight(config, N * H if together else H) if config.qk_norm else None
        self.key_norm = declare_norm_weight(config, K * H if together else H) if config.qk_norm else None
        biased = config.qk_norm == "layernorm"
        self.query_norm_bias = declare((H,), ("norm",), "bias") if biased else None
        self.key_norm_bias = declare((H,), ("norm",), "bias") if biased else None
        self.sinks = declare((N,), ("sinks",), "bias") if config.attention_sinks else None
        bias = config.attention_bias
        self.query_bias = declare((N, H), ("heads", "head"), "bias") if bias else None
        self.key_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.value_bias = declare((K, H), ("kv_heads", "head"), "bias") if bias else None
        self.gate_bias = declare((N, H), ("heads", "head"), "bias") if bias and config.attention_gate else None
        self.output_bias = declare((D,), ("residual",), "bias") if bias is True else None

    @jax.named_scope("attention")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Projections → positions → core → output."""
        comm = ctx.comm
        projected = checkpoint_name(self.project(w, x, ctx), "qkv")

        def core(projected):
            q, k, v = self.heads(w, projected, ctx)
            c, window, positions = self.config, ctx.kind.window, ctx.inputs.token_positions
            if window is not None and ctx.inputs.windows is not None:
                window, positions = None, ctx.inputs.windows
            settings = AttentionSettings(
                window,
                c.attention_softcap,
                c.attention_scale,
                sinks=w.get("sinks"),
                wants_largest=c.qk_clip is not None and ctx.inputs.has_metrics,
                causal=c.causal,
                bias_table=ctx.inputs.streams.get(RELATIVE_BIAS),
                bias_distance=c.relative_max_distance,
            )
            return comm.attend(q, k, v, positions, settings)

        core = jax.checkpoint(core) if "attention" in ctx.recompute else core
        out, largest = core(projected)
        out = checkpoint_name(out, "attention").reshape(-1, out.shape[-2] * out.shape[-1])
        if self.config.attention_gate:
            out = gated(out, projected[:, -out.shape[-1] :])
        y = checkpoint_name(comm.row_linear(out, w["output"]), "output")
        metrics = {} if largest is None else {MAX_SCORE: comm.padded_to_all_heads(largest, self.config.num_heads)}
        return add_bias(y, w.get("output_bias")), metrics

    def project(self, w: Weights, x: jax.Array, ctx: LayerContext) -> jax.Array:
        """`[T / tensor, D]` → `[T, (N + 2K)·H]`: queries, keys and values of this device's heads, side by side.

        With gates `[T, (2N + 2K)·H]`.
        """

        def compute(x, norm, norm_bias, weight):
            return ctx.comm.column_linear(normalise(self.config, x, norm, norm_bias), weight)

        compute = jax.checkpoint(compute, prevent_cse=False) if "norms" in ctx.recompute else compute
        return add_bias(compute(x, w.get("norm"), w.get("norm_bias"), w["qkv"]), w.get("qkv_bias"))

    def heads(self, w: Weights, projected: jax.Array, ctx: LayerContext):
        """Output of `project` → queries `[B, S, N, H]`, keys and values `[B, S, K, H]`, with rotary positions."""
        c, comm, (B, S) = self.config, ctx.comm, ctx.inputs.positions.shape
        qkv = projected.reshape(B, S, -1, c.head_dim)
        K = max(1, c.num_kv_heads // comm.size("tensor"))
        N = (qkv.shape[2] - 2 * K) // (2 if c.attention_gate else 1)
        q, k, v = jnp.split(qkv[:, :, : N + 2 * K], (N, N + K), axis=2)
        if c.qk_norm:
            q, k = (self.normalise_heads(w, f"{name}_norm", a, comm) for a, name in ((q, "query"), (k, "key")))
        q, k = rotate(c, ctx.kind, ctx.inputs, comm.sequence_length(S), q, k)
        return q, k, v

    def normalise_heads(self, w: Weights, name: str, x: jax.Array, comm: Comm) -> jax.Array:
        """Queries or keys `[B, S, heads, H]`, normalised: each head, or the heads of all devices together."""
        c, weight = self.config, w[name]
        if c.qk_norm == "layernorm":
            return ops.layer_norm(x, weight, w[f"{name}_bias"], c.norm_epsilon, c.norm_zero_centred)
        if c.qk_norm != "all_heads":
            return ops.rms_norm(x, weight, c.norm_epsilon, c.norm_zero_centred)
        own = comm.local_heads(weight.reshape(-1, c.head_dim)).reshape(-1)
        flat = x.reshape(*x.shape[:2], -1)
        return ops.rms_norm(flat, own, c.norm_epsilon, c.norm_zero_centred, comm.mean_over_heads).reshape(x.shape)

    def streams(self) -> tuple[str, ...]:
        return (RELATIVE_BIAS,) if self.config.position == "relative" else ()

    def has_metrics(self) -> bool:
        return self.config.qk_clip is not None

    def rescaled(self, metrics: State) -> dict[str, jax.Array]:
        """Queries and keys by √γ. Heads that share keys have the smallest γ of them, as in Megatron."""
        if MAX_SCORE not in metrics:
            return {}
        K = self.config.num_kv_heads
        shared = jnp.sqrt(
            clip_factor(self.config, metrics[MAX_SCORE]).reshape(-1, K, self.config.num_heads // K).min(-1)
        )
        of_heads = {"query": jnp.repeat(shared, self.config.num_heads // K, axis=1), "key": shared}
        biases = {f"{name}_bias": f[:, :, None] for name, f in of_heads.items() if self.config.attention_bias}
        return {name: f[:, None, :, None] for name, f in of_heads.items()} | biases


@jax.checkpoint
def gated(out: jax.Array, gate: jax.Array) -> jax.Array:
    """out · sigmoid(gate)."""
    return (out * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(out.dtype)
