"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as in Nemotron-H."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import MAMBA2
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


class Mamba2(Sublayer):
    """State space duality of convolved values, keys (B) and queries (C), with the norm before it: `[T, D]` → `[T, D]`.

    The weights' heads are groups: each has a key, a query and several heads of values, which `tensor` does not divide.
    """

    NAME = MAMBA2
    SUPPORTS = supported(MAMBA2)
    IN_ORDER = True
    FUSED = {
        "projections": ("gate", "value", "key", "query"),
        "convolution": ("value_convolution", "key_convolution", "query_convolution"),
        "convolution_bias": ("value_bias", "key_bias", "query_bias"),
    }
    LINEAR = ("projections", "output")
    SAVED = ("projections", "rates", ATTENTION, "output")

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
        # A number for each head. They are small, and computed for a device's own tokens before these are sent.
        self.step = declare((D, groups, heads), ("embed", "rank", "rank"), muon=False)
        self.decay_rate = declare((c.num_heads,), ("decays",), "bias", initial=initial_decay_rate)
        self.step_bias = declare((c.num_heads,), ("decays",), "bias", initial=initial_decay_bias)
        self.skip = declare((c.num_heads,), ("decays",), "norm")
        normed = c.output_norm != "none"
        self.output_norm = declare((groups, widths["value"]), ("heads", "norm"), "norm") if normed else None
        self.output = declare((groups, widths["value"], D), ("heads", "head", "embed"), scale=residual_scale(config))

    @jax.named_scope("mamba2")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        """Projections → convolution → recurrence → gate and norm → output."""
        comm = ctx.comm
        projected, steps = self.project(w, x, ctx)
        # The recurrence keeps its inputs only: within chunks it has many times as many numbers.
        out, kept = jax.checkpoint(partial(self.mix, ctx))(w, projected, steps, comm.earlier())
        comm.keep(kept)
        out = checkpoint_name(out, ATTENTION)
        y = comm.row_linear(self.gated(w, out, projected, comm.elementwise), w["output"])
        return checkpoint_name(y, "output"), {}

    def project(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, jax.Array]:
        """`[T / tensor, D]` → (gates, values, keys, queries `[T, F]`, the steps of all heads `[T, N]`)."""
        return project_with_rates(self.config, w, x, ctx, "step")

    def mix(self, ctx: LayerContext, w: Weights, projected: jax.Array, steps: jax.Array, earlier: Kept | None):
        """Outputs of `project` → (the recurrence's output `[T, N·w]`, what generation keeps)."""
        c, comm, (B, S) = self.config.mamba2, ctx.comm, ctx.inputs.positions.shape
        tokens, devices, wide = recurrent_tokens(ctx, earlier), comm.size("tensor"), jnp.float32
        groups, N = c.num_groups // devices, c.num_heads // devices
        widths = N * c.head_dim, groups * c.state_dim, groups * c.state_dim
        inputs = projected.reshape(B, S, -1), slice(widths[0], widths[0] + sum(widths))
        inputs, steps = tokens.joined(inputs, comm.local_heads(steps.T).T.reshape(B, S, N))
        length = steps.shape[1]
        x, k, q = tokens.convolved(inputs, widths, w["convolution"], w["convolution_bias"])
        x, k, q = (a.reshape(B, length, count, -1) for a, count in ((x, N), (k, groups), (q, groups)))
        steps = jax.nn.softplus(steps.astype(wide) + w["step_bias"])
        steps = tokens.where_real(jnp.maximum(steps, c.min_step))
        arguments = q, k, steps[..., None] * x, -jnp.exp(w["decay_rate"]) * steps
        out = tokens.recur(ops.state_space, ops.recurrent_state_space, *arguments)
        out = tokens.new(out + w["skip"][:, None] * x).astype(x.dtype)
        return comm.in_order(out, back=True).reshape(B * S, -1), tokens.kept

    def gated(
        self, w: Weights, out: jax.Array, projected: jax.Array, implementation: ops.ElementwiseImplementation
    ) -> jax.Array:
        """`out [T, N·w]` times silu(gate), with the norm of each group; the gates are the first of `projected`."""
        order = self.config.mamba2.output_norm
        if order == "none":
            return _opened(out, projected[:, : out.shape[1]])
        norm = ops.GatedNorm(self.config.norm_epsilon, gate_first=order == "after_gate")
        return ops.gated_norm(out, projected, w["output_norm"], norm, 0, implementation)


@jax.checkpoint
def _opened(out: jax.Array, gate: jax.Array) -> jax.Array:
    """out · silu(gate)."""
    return (out * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)
