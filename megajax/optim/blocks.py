"""Numbers of a stored parameter by their logical index: blocks that share a scale, and random bits.

Both are functions of the parameter's logical shape, and not of the mesh.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from megajax.ops.numerics import mix
from megajax.sharding import LOGICAL_TO_MESH, Placement, mesh_axes

Kind = Literal["float32", "bfloat16", "int8"]
BLOCK = 256  # numbers with one scale, at most
SHARDS = 8  # blocks do not cross the shards of a dimension over `tensor`, up to this size
_NOT_BLOCKED = ("layers", "modules", "experts", "embed")  # dimensions that a mesh may divide into single indices


def block_of(placement: Placement) -> tuple[int, int]:
    """(dimension, size) of a parameter's blocks; they depend on its logical shape only.

    The size is the largest divisor up to BLOCK; along a dimension over `tensor` one of an eighth of it; 1 if a mesh may
    divide all dimensions into single indices.
    """
    dims = [dim for dim, axis in enumerate(placement.axes) if axis not in _NOT_BLOCKED]
    if not dims:
        return len(placement.axes) - 1, 1
    dim = max(dims, key=lambda dim: (LOGICAL_TO_MESH[placement.axes[dim]] is None, placement.shape[dim]))
    size = placement.shape[dim]
    whole = size if LOGICAL_TO_MESH[placement.axes[dim]] is None else size // math.gcd(size, SHARDS)
    return dim, max(n for n in range(1, min(BLOCK, whole) + 1) if whole % n == 0)


def scales_of(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """The placement of the scales: sharded like the parameter, but whole where its mesh axes do not divide them."""
    dim, size = block_of(placement)
    if size == 1:
        return placement
    spec, entry = list(placement.spec), placement.spec[dim]
    count = placement.shape[dim] // size
    spec[dim] = entry if count % math.prod(sizes[axis] for axis in mesh_axes(entry)) == 0 else None

    def changed(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:dim], count, *shape[dim + 1 :])

    shapes = {"shape": changed(placement.shape), "stored_shape": changed(placement.stored_shape)}
    return replace(placement, spec=P(*spec), **shapes)


def random_bits(placement: Placement, seed: jax.Array) -> jax.Array:
    """32 random bits for each number in the stored shape: a hash of the seed and of the logical index."""
    shape, lead = placement.stored_shape, int(placement.layers is not None)
    if placement.layers is not None:
        rows = jnp.asarray(np.array(placement.layers).astype(np.uint32)).reshape(-1, *(1,) * (len(shape) - 1))
        seed = mix(seed ^ mix(rows + jnp.uint32(1)))
    index = jnp.zeros((), jnp.uint32)
    for dim in range(lead, len(shape)):
        index = index * jnp.uint32(placement.shape[dim]) + jax.lax.broadcasted_iota(jnp.uint32, shape, dim)
    return mix(index ^ seed)
