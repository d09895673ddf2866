"""Gated DeltaNet (Yang et al., arXiv 2412.06464), as in Qwen3-Next."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import GATED_DELTANET
from megajax.layout.sublayers import supported
from megajax.model.parameters import declare
from megajax.model.recurrent import (
    Kept,
    initial_convolution,
    initial_decay_bias,
    initial_decay_rate,
    project_with_rates,
    recurrent_tokens,
)
from megajax.model.sublayer import LayerContext, Metrics, Sublayer, Weights, declare_norm, residual_scale
from megajax.options.remat import ATTENTION

EPSILON = 1e-6  # of the norms of queries and keys


class GatedDeltaNet(Sublayer):
    """The gated delta rule of convolved queries, keys and values, with the norm before it: `[T, D]` → `[T, D]`.

    The weights' heads are those of the keys: each has a group of value heads, which `tensor` does not divide.
    """

    NAME = GATED_DELTANET
    SUPPORTS = supported(GATED_DELTANET)
    IN_ORDER = True
    FUSED = {
        "projections": ("query", "key", "value", "gate"),
        "rates": ("strength", "decay"),
        "convolution": ("query_convolution", "key_convolution", "value_convolution"),
    }
    LINEAR = ("projections", "output")
    SAVED = ("projections", "rates", ATTENTION, "output")

    def __init__(self, config: ModelConfig):
        D, c = config.hidden_size, config.linear_attention
        K, group = c.num_key_heads, c.num_value_heads // c.num_key_heads
        width, tokens = group * c.value_head_dim, c.conv_kernel
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.query = declare((D, K, c.key_head_dim), ("embed", "heads", "head"))
        self.key = declare((D, K, c.key_head_dim), ("embed", "heads", "head"))
        self.value = declare((D, K, width), ("embed", "heads", "head"))
        self.gate = declare((D, K, width), ("embed", "heads", "head"))
        # Two numbers for each value head. They are small, and computed for a device's own tokens before these are sent.
        self.strength = declare((D, K, group), ("embed", "rank", "rank"), muon=False)
        self.decay = declare((D, K, group), ("embed", "rank", "rank"), muon=False)
        of_convolution = {"axes": ("whole", "heads", "head"), "role": "bias", "initial": initial_convolution}
        self.query_convolution = declare((tokens, K, c.key_head_dim), **of_convolution)
        self.key_convolution = declare((tokens, K, c.key_head_dim), **of_convolution)
        self.value_convolution = declare((tokens, K, width), **of_convolution)
        self.decay_rate = declare((c.num_value_heads,), ("decays",), "bias", initial=initial_decay_rate)
        self.decay_bias = declare((c.num_value_heads,), ("decays",), "bias", initial=initial_decay_bias)
        self.output_norm = declare((c.value_head_dim,), ("norm",), "norm")
        self.output = declare((K, width, D), ("heads", "head", "embed"), scale=residual_scale(config))

    @jax.named_scope("gated_deltanet")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Projections → convolution → delta rule → norm and gate → output."""
        comm = ctx.comm
        projected, rates = self.project(w, x, ctx)
        # The delta rule keeps its inputs only: within chunks it has many times as many numbers.
        out, kept = jax.checkpoint(partial(self.mix, ctx))(w, projected, rates, comm.earlier())
        comm.keep(kept)
        out = checkpoint_name(out, ATTENTION)
        norm = ops.GatedNorm(self.config.norm_epsilon, gate_first=False)
        F, weight = out.shape[1], w["output_norm"]
        weights, first = jnp.broadcast_to(weight, (F // len(weight), len(weight))), projected.shape[1] - F
        y = comm.row_linear(ops.gated_norm(out, projected, weights, norm, first, comm.elementwise), w["output"])
        return checkpoint_name(y, "output"), {}

    def project(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, jax.Array]:
        """`[T / tensor, D]` → (queries, keys, values, gates `[T, F]`, all heads' rates `[T, K, 2N / K]`)."""
        projected, rates = project_with_rates(self.config, w, x, ctx, "rates")
        return projected, rates.reshape(len(rates), *w["rates"].shape[1:])

    def mix(self, ctx: LayerContext, w: Weights, projected: jax.Array, rates: jax.Array, earlier: Kept | None):
        """Outputs of `project` → (the delta rule's output `[T, N·w]`, what generation keeps)."""
        c, comm, (B, S) = self.config.linear_attention, ctx.comm, ctx.inputs.positions.shape
        tokens, devices = recurrent_tokens(ctx, earlier), comm.size("tensor")
        K, N = c.num_key_heads // devices, c.num_value_heads // devices
        rates = jnp.moveaxis(comm.local_heads(jnp.moveaxis(rates, 1, 0)), 0, 1).reshape(B, S, -1, 2, N // K)
        key_width, value_width = K * c.key_head_dim, N * c.value_head_dim
        inputs = projected.reshape(B, S, -1), slice(0, 2 * key_width + value_width)
        inputs, rates = tokens.joined(inputs, rates)
        length = rates.shape[1]
        q, k, v = tokens.convolved(inputs, (key_width, key_width, value_width), w["convolution"])
        q, k = (a.reshape(B, length, -1, c.key_head_dim) for a in (q, k))
        v, wide = v.reshape(B, length, N, -1), jnp.float32
        strength, steps = (rates[:, :, :, i].reshape(B, length, N).astype(wide) for i in range(2))
        strength = tokens.where_real(jax.nn.sigmoid(strength))
        decay = tokens.where_real(-jnp.exp(w["decay_rate"]) * jax.nn.softplus(steps + w["decay_bias"]))
        rules = ops.gated_delta_rule, ops.recurrent_gated_delta_rule
        out = tokens.new(tokens.recur(*rules, q, k, v, decay, strength, prepare=_normalised))
        return comm.in_order(out.astype(v.dtype), back=True).reshape(B * S, -1), tokens.kept


def _normalised(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys `[..., d]` with norm 1, queries times d^-1/2, in FP32."""
    q, k = (x.astype(jnp.float32) for x in (q, k))
    q, k = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k
