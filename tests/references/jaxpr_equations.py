"""The equations of a jaxpr."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those inside other equations too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            yield from equations(inner) if hasattr(inner, "eqns") else ()
