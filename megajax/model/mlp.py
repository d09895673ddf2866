"""The dense MLP."""

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
        def compute(x, norm, norm_bias, gate_up, bias, down):
            h = normalise(self.config, x, norm, norm_bias)
            return ctx.comm.column_activation_row(self.config.activation, h, gate_up, bias, down)

        if "norms" in ctx.recompute:
            kept = jax.checkpoint_policies.save_only_these_names("gate_up")
            compute = jax.checkpoint(compute, prevent_cse=False, policy=kept)
        norms, weights = ("norm", "norm_bias"), ("gate_up", "gate_up_bias", "down")
        y = compute(x, *(w.get(name) for name in (*norms, *weights)))
        return add_bias(checkpoint_name(y, "output"), w.get("down_bias")), {}
