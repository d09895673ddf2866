"""The contract of a dispatch: tokens are sent to the devices of their experts, and the results back.

The experts are divided over one or several mesh axes, `mesh.experts_over`; each group of devices along them has all
experts. No assignment is dropped here. Assignments that the router has dropped have the expert index E and add nothing.
"""

from dataclasses import dataclass

import jax

from megajax import ops
from megajax.ops.block_matmul import MaxOverDevices


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's experts, divided over `axes`; here over one device, in a subclass over several."""

    axes: tuple[str, ...]
    devices: int  # along them
    kernels: ops.ExpertKernels
    max_over_devices: MaxOverDevices

    def apply(
        self, activation: str, x, experts, weights, matrices: ops.ExpertMatrices, capacity: int | None
    ) -> jax.Array:
        """Own tokens `x [T, D]`, their `experts` and `weights` `[T, k]`, own experts' `matrices` → `[T, D]`."""
        return ops.apply_experts(self.mlp(activation), x, experts, weights, matrices, capacity)

    def mlp(self, activation: str) -> ops.ExpertMlp:
        return ops.ExpertMlp(activation, self.kernels, self.max_over_devices)
