"""Muon (Jordan et al. 2024): momentum, made orthogonal by Newton–Schulz."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from megajax.ops.newton_schulz import coefficients, has_kernel, newton_schulz, operations
from megajax.optim.optimizer import MatrixOptimizer, Named, Slot, Slots
from megajax.step_plan import StepPlan


class Muon(MatrixOptimizer):
    SLOTS = (Slot("trace"),)
    turns, in_chain = True, True

    def __init__(self, plan: StepPlan, settings: Any = None):
        super().__init__(plan, settings)
        self.muon = plan.optimizer.muon
        self.per_head, self.others_rate = self.muon.per_head, self.muon.adamw_rate
        self.steps = coefficients(self.muon.coefficients, self.muon.steps)

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        momentum = optax.trace(self.muon.momentum, self.muon.nesterov)
        directions, after = momentum.update(gradients, optax.TraceState(**slots))
        return directions, after._asdict()  # type: ignore[union-attr]

    def of_matrices(self, matrices: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
        if not self._is_halved(*matrices.shape[-2:]):
            return newton_schulz(matrices, self.steps), slots
        from megajax.ops.symmetric_matmul import symmetric_matmul  # here: Mosaic takes half a second

        return newton_schulz(matrices, self.steps, symmetric_matmul), slots

    @property
    def dtype(self) -> Any:
        return jnp.float32 if self.plan.compute == jnp.float32 else jnp.bfloat16

    def scale(self, inputs: int, outputs: int) -> float:
        """`match_adamw` is Moonlight's (Liu et al. 2025): the mean square of the update is then 0.2², as AdamW's is."""
        if self.muon.scale == "spectral":
            return math.sqrt(max(1.0, outputs / inputs))
        return 0.2 * math.sqrt(max(inputs, outputs))

    def operations(self, rows: int, columns: int) -> float:
        return operations(self.steps, rows, columns, self._is_halved(rows, columns))

    def _is_halved(self, rows: int, columns: int) -> bool:
        """Whether a kernel computes half of each symmetric product."""
        kernel = self.plan.kernels.symmetric_matmul == "pallas" and self.dtype == jnp.bfloat16
        return kernel and has_kernel(rows, columns)

    @property
    def first_moment(self) -> tuple[str, float]:
        return "trace", 1.0

    def width_factor(self, ratio: float) -> float:
        return 1.0 if self.muon.scale == "spectral" else ratio**-0.5
