"""The contract of a dispatch: tokens are sent to the devices of their experts, and the results back.

The experts are divided over one or several mesh axes, `mesh.experts_over`; each group of devices along them has all
experts. No assignment is dropped here. Assignments that the router has dropped have the expert index E and add nothing.
"""

import math
from dataclasses import dataclass

import jax

from megajax import ops
from megajax.ops.block_matmul import MaxOverDevices
from megajax.ops.expert_mlp import Route
from megajax.ops.experts import SortedRoute, most_rows


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's experts, divided over `axes`; here over one device, in a subclass over several."""

    axes: tuple[str, ...]
    devices: int  # along them
    kernels: ops.ExpertKernels
    max_over_devices: MaxOverDevices
    defers: bool = False  # as `Collectives.defers`
    room: float = math.inf  # as `Dispatch.room`

    def apply(
        self, activation: str, x, experts, weights, matrices: ops.ExpertMatrices, capacity: int | None
    ) -> jax.Array:
        """Own tokens `x [T, D]`, their `experts` and `weights` `[T, k]`, own experts' `matrices` → `[T, D]`."""
        mlp = ops.ExpertMlp(activation, self.kernels, self.max_over_devices, self.defers)
        return ops.apply_experts(mlp, self.route(experts, matrices.num_experts, capacity), x, weights, matrices)

    def route(self, experts: jax.Array, num_experts: int, capacity: int | None) -> Route:
        """The way of own tokens, with `experts [T, k]`, to their experts, `num_experts` on each device."""
        return SortedRoute.of(experts, num_experts, capacity)

    def rows(self, tokens: int, k: int, num_experts: int, capacity: int | None) -> int:
        """The rows of own experts for which a device with that many tokens has room; by default for the worst case."""
        return most_rows(self.devices * tokens, k, num_experts, capacity)
