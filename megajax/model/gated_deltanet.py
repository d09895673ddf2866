"""Gated DeltaNet (Yang et al., arXiv 2412.06464), as in Qwen3-Next."""

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import GATED_DELTANET
from megajax.layout.sublayers import supported
from megajax.model.comm import Comm
from megajax.model.delta_rule import DeltaHeads, DeltaRule
from megajax.model.parameters import declare
from megajax.model.recurrent import initial_decay_bias
from megajax.model.sublayer import Weights


class GatedDeltaNet(DeltaRule):
    """The gated delta rule with a decay for each head, and gates from the layer's input."""

    NAME = GATED_DELTANET
    SUPPORTS = supported(GATED_DELTANET)
    FUSED = {
        "projections": ("query", "key", "value", "gate"),
        "rates": ("strength", "decay"),
        "convolution": DeltaRule.CONVOLUTION,
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, heads = config.hidden_size, self.heads(config)
        group = heads.values // heads.keys
        self.gate = declare((D, heads.keys, heads.group_width), ("embed", "heads", "head"))
        self.strength = declare((D, heads.keys, group), ("embed", "rank", "rank"), muon=False)
        self.decay = declare((D, heads.keys, group), ("embed", "rank", "rank"), muon=False)
        self.decay_bias = declare((heads.values,), ("decays",), "bias", initial=initial_decay_bias)

    @staticmethod
    def heads(config: ModelConfig) -> DeltaHeads:
        c = config.linear_attention
        return DeltaHeads(c.num_key_heads, c.num_value_heads, c.key_head_dim, c.value_head_dim, c.conv_kernel)

    def local_rates(self, comm: Comm, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        heads = self.heads(self.config)
        both = jnp.moveaxis(rates.reshape(len(rates), heads.keys, 2, -1), 0, -1)  # [K, (strength, decay), group, T]
        strength, decay = jnp.moveaxis(comm.local_heads(both), 1, 0).reshape(2, -1, len(rates))
        return decay.T, strength.T

    def steps(self, w: Weights, of_decays: jax.Array) -> jax.Array:
        return of_decays.astype(jnp.float32)

    def gated(self, comm: Comm, w: Weights, out: jax.Array, projected: jax.Array, rates: jax.Array) -> jax.Array:
        norm, first = ops.GatedNorm(self.config.norm_epsilon, gate_first=False), projected.shape[1] - out.shape[1]
        return ops.gated_norm(out, projected, w["output_norm"][None], norm, first, comm.elementwise)
