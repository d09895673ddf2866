"""lax's collectives, each in a named scope with its axes, such as `over_fsdp`: traces and Nsight Systems show it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax


def scope(axes: str | Sequence[str]) -> str:
    """The scope of a collective over these axes."""
    return "_".join(["over", *([axes] if isinstance(axes, str) else axes)])


def _in_scope[**P](collective: Callable[P, Any]) -> Callable[P, Any]:
    """The same function, whose second argument is the axes, in their scope."""

    def run(*args: P.args, **settings: P.kwargs) -> Any:
        axes: Any = args[1]
        with jax.named_scope(scope(axes)):
            return collective(*args, **settings)

    return run


all_gather = _in_scope(lax.all_gather)
all_to_all = _in_scope(lax.all_to_all)
pmax = _in_scope(lax.pmax)
ppermute = _in_scope(lax.ppermute)
psum = _in_scope(lax.psum)
psum_scatter = _in_scope(lax.psum_scatter)
