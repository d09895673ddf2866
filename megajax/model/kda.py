"""Kimi delta attention (KDA, arXiv 2510.26692), as in Kimi Linear."""

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.config import ModelConfig
from megajax.layout.kinds import KDA
from megajax.layout.sublayers import supported
from megajax.model.comm import Comm
from megajax.model.delta_rule import DeltaHeads, DeltaRule
from megajax.model.parameters import declare
from megajax.model.recurrent import initial_decay_bias
from megajax.model.sublayer import Weights


class KimiDeltaAttention(DeltaRule):
    """The gated delta rule with a decay for each channel of a head's key.

    Decays and gates are low-rank projections of the layer's input: a head's width is their rank.
    """

    NAME = KDA
    SUPPORTS = supported(KDA)
    FUSED = {
        "projections": ("query", "key", "value"),
        "rates": ("decay_down", "gate_down", "strength"),
        "convolution": DeltaRule.CONVOLUTION,
    }

    def __init__(self, config: ModelConfig):
        super().__init__(config)
        D, N, width = config.hidden_size, config.kda.num_heads, config.kda.head_dim
        self.strength = declare((D, N), ("embed", "rank"), muon=False)
        for name in ("decay", "gate"):
            setattr(self, f"{name}_down", declare((D, width), ("embed", "rank")))
            setattr(self, f"{name}_up", declare((width, N, width), ("embed", "heads", "head")))
        self.decay_bias = declare((N, width), ("decays", "norm"), "bias", initial=initial_decay_bias)

    @staticmethod
    def heads(config: ModelConfig) -> DeltaHeads:
        c = config.kda
        return DeltaHeads(c.num_heads, c.num_heads, c.head_dim, c.head_dim, c.conv_kernel)

    def local_rates(self, comm: Comm, rates: jax.Array) -> tuple[jax.Array, jax.Array]:
        width = self.config.kda.head_dim
        return rates[:, :width], comm.local_heads(rates[:, 2 * width :].T).T

    def steps(self, w: Weights, of_decays: jax.Array) -> jax.Array:
        steps = jnp.matmul(of_decays, w["decay_up"], preferred_element_type=jnp.float32)
        return steps.reshape(*of_decays.shape[:2], *w["decay_bias"].shape)

    def gated(self, comm: Comm, w: Weights, out: jax.Array, projected: jax.Array, rates: jax.Array) -> jax.Array:
        rank = self.config.kda.head_dim

        def compute(out: jax.Array, latent: jax.Array, up: jax.Array, norm: jax.Array) -> jax.Array:
            gates = jax.nn.sigmoid((latent @ up).astype(jnp.float32))
            normed = ops.rms_norm(out.reshape(len(out), -1, len(norm)), norm, self.config.norm_epsilon)
            return (normed.reshape(out.shape) * gates).astype(out.dtype)

        return jax.checkpoint(compute)(out, rates[:, rank : 2 * rank], w["gate_up"], w["output_norm"])
