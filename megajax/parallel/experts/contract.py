"""The contract of a dispatch: tokens are sent to the devices of their experts, and the results back.

The experts are divided over one or several mesh axes, `mesh.experts_over`; each group of devices along them has all
experts. No assignment is dropped here. Assignments that the router has dropped have the expert index E and add nothing.
"""

from dataclasses import dataclass

import jax

from megajax.ops import experts as ops


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's experts, divided over `axes`; here over one device, in a subclass over several."""

    axes: tuple[str, ...]
    devices: int  # along them
    kernels: ops.ExpertKernels
    max_over_devices: ops.MaxOverDevices

    def apply(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        """Own tokens `x [T, D]`, their `experts` and `weights` `[T, k]`, own experts' parameters → `[T, D]`."""
        arguments = activation, x, experts, weights, w_up, w_down, capacity, biases
        return ops.apply_experts(*arguments, kernels=self.kernels, max_over_devices=self.max_over_devices)
