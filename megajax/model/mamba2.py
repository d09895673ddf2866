"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as in Nemotron-H."""

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import MAMBA2
from megajax.layout.sublayers import supported
from megajax.model.comm import Comm
from megajax.model.parameters import declare
from megajax.model.recurrent import (
    Kept,
    Recurrent,
    initial_convolution,
    initial_decay_bias,
    initial_decay_rate,
    recurrent_tokens,
)
from megajax.model.sublayer import LayerContext, Weights, declare_norm, residual_scale


class Mamba2(Recurrent):
    """State space duality of convolved values, keys (B) and queries (C), with the norm before it: `[T, D]` → `[T, D]`.

    The weights' heads are groups: each has a key, a query and several heads of values, which `tensor` does not divide.
    """

    NAME = MAMBA2
    SUPPORTS = supported(MAMBA2)
    FUSED = {
        "projections": ("gate", "value", "key", "query"),
        "convolution": ("value_convolution", "key_convolution", "query_convolution"),
        "convolution_bias": ("value_bias", "key_bias", "query_bias"),
    }
    RATES = "step"

    def __init__(self, config: ModelConfig):
        D, c = config.hidden_size, config.mamba2
        groups, heads = c.num_groups, c.num_heads // c.num_groups
        widths = {"value": heads * c.head_dim, "key": c.state_dim, "query": c.state_dim}
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.gate = declare((D, groups, widths["value"]), ("embed", "heads", "head"))
        for name, width in widths.items():
            setattr(self, name, declare((D, groups, width), ("embed", "heads", "head")))
            axes, shape = ("whole", "heads", "head"), (c.conv_kernel, groups, width)
            setattr(self, f"{name}_convolution", declare(shape, axes, "bias", initial=initial_convolution))
            setattr(self, f"{name}_bias", declare((groups, width), ("heads", "head"), "bias"))
        # A number for each head
        self.step = declare((D, groups, heads), ("embed", "rank", "rank"), muon=False)
        self.decay_rate = declare((c.num_heads,), ("decays",), "bias", initial=initial_decay_rate)
        self.step_bias = declare((c.num_heads,), ("decays",), "bias", initial=initial_decay_bias)
        self.skip = declare((c.num_heads,), ("decays",), "norm")
        normed = c.output_norm != "none"
        self.output_norm = declare((groups, widths["value"]), ("heads", "norm"), "norm") if normed else None
        self.output = declare((groups, widths["value"], D), ("heads", "head", "embed"), scale=residual_scale(config))

    def mix(
        self, ctx: LayerContext, w: Weights, projected: jax.Array, rates: jax.Array, earlier: Kept | None
    ) -> tuple[jax.Array, Kept]:
        c, comm, (B, S) = self.config.mamba2, ctx.comm, ctx.inputs.positions.shape
        tokens, devices, wide = recurrent_tokens(ctx, earlier), comm.size("tensor"), jnp.float32
        groups, N = c.num_groups // devices, c.num_heads // devices
        widths = N * c.head_dim, groups * c.state_dim, groups * c.state_dim
        inputs = projected.reshape(B, S, -1), slice(widths[0], widths[0] + sum(widths))
        inputs, steps = tokens.joined(inputs, comm.local_heads(rates.T).T.reshape(B, S, N))
        length = steps.shape[1]
        x, k, q = tokens.convolved(inputs, widths, w["convolution"], w["convolution_bias"])
        x, k, q = (a.reshape(B, length, count, -1) for a, count in ((x, N), (k, groups), (q, groups)))
        steps = jax.nn.softplus(steps.astype(wide) + w["step_bias"])
        steps = tokens.where_real(jnp.maximum(steps, c.min_step))
        arguments = q, k, steps[..., None] * x, -jnp.exp(w["decay_rate"]) * steps
        out = tokens.recur(ops.state_space, ops.recurrent_state_space, *arguments)
        out = tokens.new(out + w["skip"][:, None] * x).astype(x.dtype)
        return comm.in_order(out, back=True).reshape(B * S, -1), tokens.kept

    def gated(self, comm: Comm, w: Weights, out: jax.Array, projected: jax.Array, rates: jax.Array) -> jax.Array:
        """`out [T, N·w]` times silu(gate), with the norm of each group; the gates are the first of `projected`."""
        order = self.config.mamba2.output_norm
        if order == "none":
            return _opened(out, projected[:, : out.shape[1]])
        norm = ops.GatedNorm(self.config.norm_epsilon, gate_first=order == "after_gate")
        return ops.gated_norm(out, projected, w["output_norm"], norm, 0, comm.elementwise)


@jax.checkpoint
def _opened(out: jax.Array, gate: jax.Array) -> jax.Array:
    """out · silu(gate)."""
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)
