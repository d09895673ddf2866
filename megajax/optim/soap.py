"""SOAP (Vyas et al. 2024): Adam in the eigenbases of each matrix's second moments GGᵀ and GᵀG.

The first step makes the bases and changes nothing else, as the authors' code does. Every `precondition_frequency` steps
a step of subspace iteration, a product and a QR decomposition, refreshes them. All products are in full FP32.
"""

from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.optim.optimizer import COUNT, MatrixOptimizer, Named, Slot, Slots

Side = Literal["rows", "columns"]
AXES: dict[Side, int] = {"rows": -2, "columns": -1}
Sides = Mapping[Side, jax.Array]  # [k, N, N] of the rows, of the columns, or of both


class Soap(MatrixOptimizer):
    SLOTS = (COUNT,)
    update_tolerance = 0.1  # eigenvectors of small eigenvalues, or of close ones, are those of rounding

    def slots_of_matrices(self, rows: int, columns: int) -> tuple[Slot, ...]:
        largest = self.plan.optimizer.soap.max_dimension
        sizes: dict[Side, int] = {"rows": rows, "columns": columns}
        factors = [
            Slot(f"{side}_{kind}", (size, size), exact=True)
            for side, size in sizes.items()
            if size <= largest
            for kind in ("factor", "basis")
        ]
        return (Slot("mean", (rows, columns)), Slot("square", (rows, columns), non_negative=True), *factors)

    def direction(self, gradients: Named, slots: Slots) -> tuple[Named, Slots]:
        return gradients, slots | {"count": slots["count"] + 1}

    def of_matrices(self, matrices: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
        settings, t = self.plan.optimizer, slots["count"] - 1  # the first step is number 0
        bases: dict[Side, jax.Array] = {side: slots[f"{side}_basis"] for side in AXES if f"{side}_basis" in slots}
        projected = _rotated(matrices, bases)
        mean = settings.beta1 * slots["mean"] + (1 - settings.beta1) * matrices
        square = settings.beta2 * slots["square"] + (1 - settings.beta2) * projected**2
        denominator = jnp.sqrt(square / (1 - settings.beta2**t)) + settings.epsilon
        directions = _rotated(_rotated(mean, bases) / (1 - settings.beta1**t) / denominator, bases, back=True)
        directions, mean, square = (jnp.where(t > 0, x, 0) for x in (directions, mean, square))
        sides: Sides = {"rows": matrices, "columns": matrices.mT}
        outer = {side: _product(sides[side], sides[side].mT) for side in bases}
        factors = {s: settings.beta2 * slots[f"{s}_factor"] + (1 - settings.beta2) * outer[s] for s in bases}
        refreshes = t % settings.soap.precondition_frequency == 0
        branch = jnp.where(t == 0, 2, refreshes.astype(jnp.int32))
        bases, square = lax.switch(branch, (_kept, _refreshed, _first), factors, bases, square)
        found = {"mean": mean, "square": square}
        found |= {f"{side}_factor": factor for side, factor in factors.items()}
        return directions, found | {f"{side}_basis": basis for side, basis in bases.items()}

    def operations(self, rows: int, columns: int) -> float:
        """Three rotations and both factors in each step; a product and a QR of each side now and then."""
        sides = [size for size in (rows, columns) if size <= self.plan.optimizer.soap.max_dimension]
        always = sum(8 * size * rows * columns for size in sides)
        refresh = sum((2 + 8 / 3) * size**3 for size in sides)
        return always + refresh / self.plan.optimizer.soap.precondition_frequency


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")


def _rotated(x: jax.Array, bases: Sides, back: bool = False) -> jax.Array:
    """Matrices in the bases, QᵀXQ, or `back` from them; a side without a basis stays."""
    if "rows" in bases:
        x = _product(bases["rows"] if back else bases["rows"].mT, x)
    if "columns" in bases:
        x = _product(x, bases["columns"].mT if back else bases["columns"])
    return x


def _kept(factors: Sides, bases: Sides, square: jax.Array) -> tuple[Sides, jax.Array]:
    return bases, square


def _refreshed(factors: Sides, bases: Sides, square: jax.Array) -> tuple[Sides, jax.Array]:
    """The Q of FQ for each factor F and basis Q, whose vectors are first sorted by their estimated eigenvalues."""
    found = {}
    for side, basis in bases.items():
        product = _product(factors[side], basis)
        order = jnp.argsort(-jnp.sum(basis * product, axis=-2), axis=-1)
        found[side], _ = jnp.linalg.qr(jnp.take_along_axis(product, order[:, None, :], axis=-1))
        square = jnp.take_along_axis(square, jnp.expand_dims(order, -3 - AXES[side]), axis=AXES[side])
    return found, square


def _first(factors: Sides, bases: Sides, square: jax.Array) -> tuple[Sides, jax.Array]:
    """The eigenvectors of each factor by falling eigenvalues.

    A gradient of lower rank leaves directions whose eigenvectors are arbitrary, so that rounding would choose them, on
    each mesh others. The unit vectors, in their order and without their part in the other directions, take their place.
    """
    found = {}
    for side, factor in factors.items():
        size = factor.shape[-1]
        values, vectors = (jnp.flip(x, axis=-1) for x in jnp.linalg.eigh(factor))
        is_clear = values > values[:, :1] * size * jnp.finfo(jnp.float32).eps
        clear = vectors * is_clear[:, None, :]
        uncovered = jnp.eye(size) - _product(clear, clear.mT)
        index = jnp.maximum(jnp.arange(size) - jnp.sum(is_clear, axis=-1, keepdims=True), 0)
        uncovered = jnp.take_along_axis(uncovered, index[:, None, :], axis=-1)
        found[side], _ = jnp.linalg.qr(jnp.where(is_clear[:, None, :], clear, uncovered))
    return found, square
