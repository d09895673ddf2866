"""lax's collectives, each in a named scope with its axes, such as `over_fsdp`: traces and Nsight Systems show it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.mesh import AXES


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


def as_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`move(x)` for a collective that only moves numbers; FP8 is sent as bytes."""
    if x.dtype.itemsize > 1:
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def gather_tiles(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The shards of `x` on all devices of `axes`, side by side along `dim`."""
    return as_bytes(lambda x: all_gather(x, axes, axis=dim, tiled=True), x)


def sum_over_all(x: Any, sizes: Mapping[str, int]) -> Any:
    """Sum of a pytree over all devices of the mesh."""
    axes = tuple(axis for axis in AXES if sizes[axis] > 1)
    return psum(x, axes) if axes else x
