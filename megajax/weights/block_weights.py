"""The linear layers' weights as the communication points take them with an FP8 or FP4 recipe in blocks."""

import zlib
from collections.abc import Mapping
from typing import Any

import jax
from jax import lax

from megajax.model.sublayer import BlockInputs
from megajax.ops.block_formats import Implementation
from megajax.ops.block_matmul import BlockWeight, MaxOverDevices, RoundingNoise
from megajax.ops.block_recipes import block_recipe
from megajax.step_plan import StepPlan
from megajax.weights.weight import Weight


class BlockWeights:
    """Makes them of a plan's weights; none without such a recipe."""

    def __init__(self, plan: StepPlan, max_over_devices: MaxOverDevices):
        self.recipe, self.max_over_devices = block_recipe(plan.fp8.chosen), max_over_devices
        chosen = plan.kernels.fp8
        self.implementation: Implementation = chosen if chosen == "cudnn" or chosen == "pallas" else "emulated"

    def of(self, used: Mapping[str, jax.Array], weights: Mapping[str, Weight], inputs: BlockInputs, layer: Any):
        """The weights `used` of linear layers by name, of the layer with this index, as `BlockWeight`s."""
        return {name: self._of(name, w, weights[name], inputs, layer) for name, w in used.items()}

    def _of(self, name: str, w: jax.Array, weight: Weight, inputs: BlockInputs, layer: Any) -> Any:
        if self.recipe is None:
            return w
        noise = None
        if self.recipe.is_stochastic and inputs.rounding_key is not None:
            key = jax.random.fold_in(jax.random.fold_in(inputs.rounding_key, layer), zlib.crc32(name.encode()))
            noise = RoundingNoise(jax.random.bits(key, (2,)), inputs.token_ids, weight.column_ids())
        used = BlockWeight(w, None, noise, self.recipe, self.implementation)
        return used.with_amax(lax.stop_gradient(w), self.max_over_devices)
