"""FP8 scales of the linear layers, and the amax histories of delayed scaling (Micikevicius et al. 2022).

With current scaling every tensor is scaled by its own amax. With delayed scaling the scale follows from the amaxes of
earlier steps, as in NVIDIA's Transformer Engine: no pass over the tensor before it is quantised. Amaxes are over all
devices and microbatches of a step, so they do not depend on the mesh.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from megajax.config import Config
from megajax.model.transformer import LINEAR
from megajax.ops import fp8

TENSORS = ("input", "weight", "gradient")  # of a linear layer; the gradient is its output's
Scales = Mapping[str, Mapping[str, jax.Array]]  # by linear layer and tensor: [L]
History = dict[str, jax.Array]  # by "layer.tensor": [L, length], newest first


class Scaling:
    """Scales and histories of one config."""

    def __init__(self, config: Config):
        self.settings, self.num_layers = config.precision.fp8, config.model.num_layers
        self.gradient_dtype = fp8.E5M2 if self.settings.format == "hybrid" else fp8.E4M3
        # Where a history is still empty: a guess, within some powers of two of what comes.
        tokens = config.batch.global_size * config.batch.sequence_length
        self.first_amax = {"input": 8.0, "weight": 8 * config.model.init_std, "gradient": 1 / tokens}

    @property
    def names(self) -> list[str]:
        """The names of the histories."""
        return [f"{layer}.{tensor}" for layer in LINEAR for tensor in TENSORS]

    def first_history(self) -> History:
        """Empty histories, for delayed scaling; for other recipes there are none."""
        if self.settings.recipe != "delayed":
            return {}
        shape = (self.num_layers, self.settings.amax_history_length)
        return {name: jnp.zeros(shape, jnp.float32) for name in self.names}

    def scales(self, history: Mapping[str, jax.Array], weight_amax: Mapping[str, jax.Array]) -> Scales:
        """Scales by linear layer; what is scaled by its own amax in the layer has none here."""
        if not history:
            return {layer: {"weight": fp8.scale_for(amax, fp8.E4M3)} for layer, amax in weight_amax.items()}
        return {layer: {t: self._scale(history[f"{layer}.{t}"], t) for t in TENSORS} for layer in LINEAR}

    def record(self, history: History, weight_amax: Mapping[str, jax.Array], amax: Mapping[str, jax.Array]) -> History:
        """The histories after a step: its amaxes in front, the oldest ones dropped.

        `weight_amax` is `[L]` by linear layer, `amax` `[L, 2]`: of inputs and of output gradients.
        """
        if not history:
            return {}
        newest = {"weight": dict(weight_amax)}
        for i, tensor in enumerate(("input", "gradient")):
            newest[tensor] = {layer: values[:, i] for layer, values in amax.items()}

        def pushed(old: jax.Array, amax: jax.Array) -> jax.Array:
            # An infinity saturates when it is quantised, and the step may be good: its amax would spoil later scales.
            amax = jnp.where(jnp.isfinite(amax), amax, old[:, 0])
            return jnp.roll(old, 1, axis=1).at[:, 0].set(amax)

        names = [(layer, tensor, f"{layer}.{tensor}") for layer in LINEAR for tensor in TENSORS]
        return {name: pushed(history[name], newest[tensor][layer]) for layer, tensor, name in names}

    def _scale(self, history: jax.Array, tensor: str) -> jax.Array:
        largest, newest = history.max(axis=1), history[:, 0]
        amax = newest if self.settings.amax_algorithm == "most_recent" else largest
        amax = jnp.where(amax > 0, amax, largest)  # a step of zeros, all of whose tokens were masked, says nothing
        amax = jnp.where(amax > 0, amax, self.first_amax[tensor])
        dtype = self.gradient_dtype if tensor == "gradient" else fp8.E4M3
        return fp8.scale_for(amax, dtype, self.settings.margin)
