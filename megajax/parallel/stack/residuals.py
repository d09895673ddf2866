"""What is kept of a remat group between its forward and its backward pass."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal

VIEWS = ("name", "reshape", "squeeze")  # primitives whose result holds the numbers of their operand


@jax.tree_util.register_pytree_node_class
class Residuals:
    """What a group's backward pass needs: the leaves of a `jax.vjp` function, less those that it is given again.

    These are the weights and the block's other inputs.
    """

    def __init__(self, saved: list[jax.Array], treedef: Any, sources: tuple[int, ...]):
        # sources: for each leaf its index in [*saved, *given]
        self.saved, self.treedef, self.sources = saved, treedef, sources

    @classmethod
    def of(cls, pull: Callable, given: Any) -> "Residuals":
        """Split the leaves by identity: those that are `given`, and everything else once."""
        leaves, treedef = jax.tree.flatten(pull)
        given_ids = {id(a) for a in jax.tree.leaves(given)}
        saved = {id(leaf): leaf for leaf in leaves if id(leaf) not in given_ids}
        index = {key: i for i, key in enumerate([*saved, *map(id, jax.tree.leaves(given))])}
        return cls(list(saved.values()), treedef, tuple(index[id(leaf)] for leaf in leaves))

    def pull(self, given: Any) -> Callable:
        """The vjp function again, with `given` in its place."""
        arrays = [*self.saved, *jax.tree.leaves(given)]
        return jax.tree.unflatten(self.treedef, [arrays[i] for i in self.sources])

    def tree_flatten(self):
        return self.saved, (self.treedef, self.sources)

    @classmethod
    def tree_unflatten(cls, static, saved):
        return cls(list(saved), *static)


class Saved:
    """What is kept of a group's residuals where they are copied into an array of several loops or a pipeline's buffer.

    Each array once, in however many shapes it occurs.
    """

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
