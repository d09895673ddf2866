"""The dense MLP."""

from dataclasses import replace

import jax
from jax.ad_checkpoint import checkpoint_name

from megajax.config import ModelConfig
from megajax.layout.kinds import is_gated
from megajax.layout.sublayers import EVERYTHING
from megajax.model.parameters import declare
from megajax.model.sublayer import (
    LayerContext,
    Metrics,
    Sublayer,
    Weights,
    add_bias,
    declare_norm,
    normalise,
    residual_scale,
)


class MLP(Sublayer):
    """Gated or plain MLP with the norm before it: `[T, D]` → `[T, D]`."""

    NAME = "mlp"
    SUPPORTS = EVERYTHING
    FUSED = {"gate_up": ("gate", "up"), "gate_up_bias": ("gate_bias", "up_bias")}
    LINEAR = ("gate_up", "down")
    SAVED = ("gate_up", "output")

    def __init__(self, config: ModelConfig):
        D, F = config.hidden_size, config.ffn_hidden_size
        gated = is_gated(config)
        self.config = config
        self.norm, self.norm_bias = declare_norm(config, config.norm_placement != "after")
        self.gate = declare((D, F), ("embed", "mlp")) if gated else None
        self.up = declare((D, F), ("embed", "mlp"))
        self.down = declare((F, D), ("mlp", "embed"), scale=residual_scale(config))
        self.gate_bias = declare((F,), ("mlp",), "bias") if gated and config.mlp_bias else None
        self.up_bias = declare((F,), ("mlp",), "bias") if config.mlp_bias else None
        self.down_bias = declare((D,), ("residual",), "bias") if config.mlp_bias else None

    @jax.named_scope("mlp")
    def apply(self, w: Weights, x: jax.Array, ctx: LayerContext) -> tuple[jax.Array, Metrics]:
        if "norms" in ctx.recompute:
            kept = jax.checkpoint_policies.save_only_these_names("gate_up")
            keeping = replace(ctx, recompute=())
            return jax.checkpoint(lambda w, x: self.apply(w, x, keeping), prevent_cse=False, policy=kept)(w, x)
        h = normalise(self.config, x, w.get("norm"), w.get("norm_bias"))
        y = ctx.comm.column_activation_row(self.config.activation, h, w["gate_up"], w.get("gate_up_bias"), w["down"])
        return add_bias(checkpoint_name(y, "output"), w.get("down_bias")), {}
