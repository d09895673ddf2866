"""What sublayers with the gated delta rule share (gated DeltaNet and Kimi delta attention)."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.config import ModelConfig
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.recurrent import (
    Kept,
    Recurrent,
    initial_convolution,
    initial_decay_rate,
    recurrent_tokens,
)
from megajax.model.sublayer import LayerContext, Weights, declare_norm, residual_scale

EPSILON = 1e-6  # of the norms of queries and keys


class DeltaHeads(NamedTuple):
    """The heads of a sublayer."""

    keys: int  # number of queries and keys
    values: int  # number of values, a multiple; each has a state
    key_width: int
    value_width: int
    window: int  # number of tokens that the convolution sees

    @property
    def group_width(self) -> int:
        """Width of the values that share a key."""
        return self.values // self.keys * self.value_width


class DeltaRule(Recurrent):
    """The gated delta rule of convolved queries, keys and values, with the norm before it: `[T, D]` → `[T, D]`.

    The weights' heads are those of the keys: each has a group of value heads, which `tensor` does not divide. A
    subclass declares the weights of the `rates` and of the gates.
    """

    CONVOLUTION: ClassVar = ("query_convolution", "key_convolution", "value_convolution")

    def __init__(self, config: ModelConfig):
        D, heads = config.hidden_size, self.heads(config)
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        for name, width in (("query", heads.key_width), ("key", heads.key_width), ("value", heads.group_width)):
            setattr(self, name, declare((D, heads.keys, width), ("embed", "heads", "head")))
            shape, axes = (heads.window, heads.keys, width), ("whole", "heads", "head")
            setattr(self, f"{name}_convolution", declare(shape, axes, "bias", initial=initial_convolution))
        self.decay_rate = declare((heads.values,), ("decays",), "bias", initial=initial_decay_rate)
        self.output_norm = declare((heads.value_width,), ("norm",), "norm")
        of_output = (heads.keys, heads.group_width, D), ("heads", "head", "embed")
        self.output = declare(*of_output, scale=residual_scale(config))

    @staticmethod
    def heads(config: ModelConfig) -> DeltaHeads:
        """The heads of all devices."""
        raise NotImplementedError

    def local_rates(self, comm: Comm, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rates `[T, F]` → (those of decays `[T, ...]`, logits of strengths `[T, N]`) of this device's heads."""
        raise NotImplementedError

    def steps(self, w: Weights, of_decays: jax.Array) -> jax.Array:
        """The decays' rates `[B, S, ...]` → `[B, S, N]`, or `[B, S, N, d]` by channel, in FP32."""
        raise NotImplementedError

    def mix(
        self, ctx: LayerContext, w: Weights, projected: jax.Array, rates: jax.Array, earlier: Kept | None
    ) -> tuple[jax.Array, Kept]:
        heads, comm, (B, S) = self.heads(self.config), ctx.comm, ctx.inputs.positions.shape
        tokens, devices, wide = recurrent_tokens(ctx, earlier), comm.size("tensor"), jnp.float32
        widths = [heads.keys * width // devices for width in (heads.key_width, heads.key_width, heads.group_width)]
        own_rates = (a.reshape(B, S, *a.shape[1:]) for a in self.local_rates(comm, rates))
        inputs = projected.reshape(B, S, -1), slice(0, sum(widths))
        qkv, of_decays, strength = tokens.joined(inputs, *own_rates)
        q, k, v = tokens.convolved(qkv, widths, w["convolution"])
        q, k = (a.reshape(*a.shape[:2], -1, heads.key_width) for a in (q, k))
        v = v.reshape(*v.shape[:2], -1, heads.value_width)
        strength = tokens.where_real(jax.nn.sigmoid(strength.astype(wide)))
        steps = jax.nn.softplus(self.steps(w, of_decays) + w["decay_bias"])
        rate = jnp.exp(w["decay_rate"]).reshape(-1, *[1] * (steps.ndim - 3))
        rules = ops.gated_delta_rule, ops.recurrent_gated_delta_rule
        log_decay = tokens.where_real(-rate * steps)
        out = tokens.new(tokens.recur(*rules, q, k, v, log_decay, strength, prepare=_normalised))
        return comm.in_order(out.astype(v.dtype), back=True).reshape(B * S, -1), tokens.kept


def _normalised(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Queries and keys `[..., d]` with norm 1, queries times d^-1/2, in FP32."""
    q, k = (x.astype(jnp.float32) for x in (q, k))
    q, k = (x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k
