"""What a pipeline keeps of residuals between a forward and a backward operation."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

VIEWS = ("name", "reshape", "squeeze")  # primitives whose result holds the numbers of their operand


class Saved:
    """What of a unit's residuals is kept between two ticks: each array once, in however many shapes it occurs."""

    def __init__(self, forward: Callable, *arguments: Any):
        self.structure: Any = None  # known when `forward` has been traced

        def flat(*arguments):
            leaves, self.structure = jax.tree.flatten(forward(*arguments))
            return leaves

        jaxpr = jax.make_jaxpr(flat)(*arguments).jaxpr
        made_by = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

        def source(var: Any) -> Any:
            while not isinstance(var, Literal) and var in made_by and made_by[var].primitive.name in VIEWS:
                var = made_by[var].invars[0]
            return id(var)

        sources = [source(var) for var in jaxpr.outvars]
        self.first = [sources.index(key) for key in sources]  # of each leaf: the first one that holds the same numbers
        self.kept = sorted(set(self.first))
        self.shapes = [tuple(var.aval.shape) for var in jaxpr.outvars]  # type: ignore[attr-defined]

    def values(self, residuals: Any) -> list[jax.Array]:
        """Residuals → the arrays to keep."""
        leaves = jax.tree.leaves(residuals)
        return [leaves[i] for i in self.kept]

    def residuals(self, values: list[jax.Array]) -> Any:
        """The way back."""
        kept = dict(zip(self.kept, values, strict=True))
        leaves = [kept[i].reshape(shape) for i, shape in zip(self.first, self.shapes, strict=True)]
        return jax.tree.unflatten(self.structure, leaves)
