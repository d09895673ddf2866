"""A traced function as a function again, for a loop that must know the shapes of its results before."""

from collections.abc import Callable
from typing import Any

import jax

from megajax.jax_internals import ClosedJaxpr, jaxpr_as_fun


def replayed(jaxpr: ClosedJaxpr, shapes: Any) -> Callable:
    """The function of which `jax.make_jaxpr(function, return_shape=True)` gave these; its Python code never runs again.

    With `jax.eval_shape`, which throws the trace away, loops in loops would double the tracing time each.
    """
    flat, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(shapes)
    return lambda *arguments: jax.tree.unflatten(structure, flat(*jax.tree.leaves(arguments)))
