"""A function traced once, for a loop that must know the shapes of its results before."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


def traced(function: Callable, *arguments: Any) -> tuple[Callable, Any]:
    """`function` for arguments like these, and the shapes of its results; its Python code runs now and never again.

    Other than `jax.eval_shape`, which would throw the trace away: loops in loops would double the tracing time each.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
    flat, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, flat(*jax.tree.leaves(arguments))), shapes
