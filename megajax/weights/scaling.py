"""FP8 scales of the linear layers, and the amax histories of delayed scaling (Micikevicius et al. 2022).

With current scaling every tensor is scaled by its own amax. With delayed scaling the scale follows from the amaxes of
earlier steps, as in NVIDIA's Transformer Engine: no pass over the tensor before it is quantised. Amaxes are over all
devices and microbatches of a step, so they do not depend on the mesh. With fewer KV heads than devices on `tensor` they
depend on it slightly: devices that share a head quantise their parts of its gradient before the sum.
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from megajax.layout.kinds import stacked_layers
from megajax.model.block import linear_layers
from megajax.ops import fp8
from megajax.step_plan import StepPlan

FP8 = "fp8"  # key of the histories in the layer state, beside the kinds of blocks
TENSORS = ("input", "weight", "gradient")  # of a linear layer; the gradient is its output's
Scales = Mapping[str, Mapping[str, jax.Array]]  # by linear layer and tensor: [L]
History = dict[str, jax.Array]  # by "layer.tensor": [L, length], newest first


class Scaling:
    """Scales and histories of one plan."""

    def __init__(self, plan: StepPlan):
        self.settings, model = plan.fp8, plan.model
        self.num_layers = sum(map(len, stacked_layers(model).values()))
        self.layers = linear_layers(model)
        self.gradient_dtype = fp8.E5M2 if self.settings.format == "hybrid" else fp8.E4M3
        # Guesses for empty histories, too large rather than too small: saturation is worse than small values.
        self.first_amax = {"input": 16.0, "weight": 8 * model.init_std, "gradient": 64 / math.prod(plan.batch_shape)}

    def quantises(self, name: str) -> bool:
        """Whether the weight of this name is quantised with one scale in layers that are in FP8."""
        return self.settings.chosen.has_kernels and name in self.layers

    @property
    def names(self) -> list[str]:
        """The histories' names."""
        return [f"{layer}.{tensor}" for layer in self.layers for tensor in TENSORS]

    @property
    def histories(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The histories for delayed scaling, which start as zeros; other recipes have none."""
        if not self.settings.chosen.keeps_history:
            return {}
        shape = (self.num_layers, self.settings.amax_history_length)
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name in self.names}

    def scales(
        self,
        history: Mapping[str, jax.Array],
        weight_amax: Mapping[str, jax.Array],
        loss_scale: jax.Array | float = 1.0,
    ) -> Scales:
        """Scales by linear layer; with current scaling only of weights, because layers compute the other scales."""
        if not history:
            return {layer: {"weight": fp8.scale_for(amax, fp8.E4M3)} for layer, amax in weight_amax.items()}
        return {
            layer: {t: self._scale(history[f"{layer}.{t}"], t, loss_scale) for t in TENSORS} for layer in self.layers
        }

    def record(
        self,
        history: History,
        weight_amax: Mapping[str, jax.Array],
        amax: Mapping[str, jax.Array],
        loss_scale: jax.Array | float = 1.0,
    ) -> History:
        """The histories after a step: its amaxes first, the oldest dropped.

        By linear layer, `weight_amax` is `[L]`, and `amax` is `[L, 2]`: of inputs and of output gradients times
        `loss_scale`. The histories do not include this factor.
        """
        if not history:
            return {}
        newest = {"weight": dict(weight_amax)}
        for i, (tensor, factor) in enumerate((("input", 1.0), ("gradient", loss_scale))):
            newest[tensor] = {layer: values[:, i] / factor for layer, values in amax.items()}
        names = [(layer, tensor, f"{layer}.{tensor}") for layer in self.layers for tensor in TENSORS]
        return {
            name: jnp.roll(history[name], 1, axis=1).at[:, 0].set(newest[tensor][layer])
            for layer, tensor, name in names
        }

    def _scale(self, history: jax.Array, tensor: str, loss_scale: jax.Array | float) -> jax.Array:
        largest, newest = history.max(axis=1), history[:, 0]
        amax = newest if self.settings.amax_algorithm == "most_recent" else largest
        amax = jnp.where(amax > 0, amax, largest)  # ignore a step of zeros, whose tokens were all masked
        amax = jnp.where(amax > 0, amax, self.first_amax[tensor])
        if tensor == "gradient":
            return fp8.scale_for(amax * loss_scale, self.gradient_dtype, self.settings.margin)
        return fp8.scale_for(amax, fp8.E4M3, self.settings.margin)
