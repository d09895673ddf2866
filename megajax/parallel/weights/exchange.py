"""Weights between storage and compute: gathers before use, reductions of their gradients after.

The axes of ONCE_AXES (outside the blocks `pipeline` too) gather and reduce once per step, `fsdp` once per layer and
pass. `fsdp` gathers three kinds of weights less often: those outside the blocks and those of `gathered_slots` once per
step, those of the last remat group of an unrolled stack once for both passes. A token embedding that is looked up in
its shards is not gathered at all (embedding.py).

The share-of-the-loss rule: each device differentiates its own share of the loss. So a gradient is complete after a
reduce-scatter over the axes that store its weight in shards and a sum over the other axes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from megajax.mesh import AXES
from megajax.parallel import collectives
from megajax.sharding import Placement


class WeightExchange:
    """Gathers and reductions of weights by name, inside the step's shard_map.

    Arrays may lack the leading `layers` dimension of their placement, because dimensions are counted from the last.
    """

    def __init__(
        self, placements: Mapping[str, Placement], sizes: Mapping[str, int], compute, gradients, sums=jnp.float32
    ):
        """Dtypes: of matmuls, of reductions of gradients, and of their sums over microbatches."""
        self.placements, self.sizes = placements, sizes
        self.compute, self.gradients, self._sums = compute, gradients, jnp.dtype(sums)

    def sum_dtype(self, name: str) -> jnp.dtype:
        """The dtype of the sum of a weight's gradients over microbatches: FP32 if the step computes with it in FP32."""
        return jnp.dtype(jnp.float32) if self.placements[name].computes_in_fp32 else self._sums

    def gather_once(self, name: str, stored: jax.Array) -> jax.Array:
        """Stored FP32 shard → `fsdp` shard in the compute dtype; norms, routers, sinks and FP8 keep their dtype."""
        placement = self.placements[name]
        keep = placement.computes_in_fp32 or stored.dtype.itemsize == 1
        w = stored if keep else stored.astype(self.compute)
        once = self._once(placement)
        if not once:
            return w
        assert placement.storage_dim is not None
        return gather_tiles(w, once, _dim(placement.storage_dim, w, placement))

    def gather_layer(self, name: str, w: jax.Array) -> jax.Array:
        """`fsdp` shard → the weight that this device computes with."""
        placement = self.placements[name]
        if placement.storage_dim is not None:
            dim = _dim(placement.storage_dim, w, placement)
            if self._layer_by_layer(placement):
                w = gather_tiles(w, ("fsdp",), dim)
            w = lax.slice_in_dim(w, 0, placement.shape[placement.storage_dim], axis=dim)
        return w

    def reduce_layer(self, name: str, gradient: jax.Array) -> jax.Array:
        """Gradient of a weight from `gather_layer` → gradient of its `fsdp` shard, summed over `fsdp`."""
        placement = self.placements[name]
        if placement.storage_dim is None:
            return gradient
        dim = _dim(placement.storage_dim, gradient, placement)
        padding = placement.stored_shape[placement.storage_dim] - placement.shape[placement.storage_dim]
        if padding:
            gradient = jnp.pad(gradient, [(0, padding if d == dim else 0) for d in range(gradient.ndim)])
        if self._layer_by_layer(placement):
            gradient = gradient.astype(self.gradients)
            gradient = collectives.psum_scatter(gradient, "fsdp", scatter_dimension=dim, tiled=True)
        return gradient

    def reduce_once(self, name: str, gradient: jax.Array) -> jax.Array:
        """Accumulated gradient → FP32 gradient of the stored shard, complete over all devices."""
        return self.complete(name, self.scatter_once(name, gradient))

    def scatter_once(self, name: str, gradient: jax.Array) -> jax.Array:
        """Accumulated gradient → gradient of the stored shard, summed over the once-a-step axes that shard it."""
        placement = self.placements[name]
        once = self._once(placement)
        if not once:
            return gradient
        assert placement.storage_dim is not None
        dim = _dim(placement.storage_dim, gradient, placement)
        return collectives.psum_scatter(gradient.astype(self.gradients), once, scatter_dimension=dim, tiled=True)

    def complete(self, name: str, gradient: jax.Array) -> jax.Array:
        """Gradients after `scatter_once`, of one layer or stacked → FP32, summed over the other axes too."""
        rest = tuple(axis for axis in self.placements[name].replicated_axes if self.sizes[axis] > 1)
        gradient = collectives.psum(gradient.astype(self.gradients), rest) if rest else gradient
        return row_major(gradient.astype(jnp.float32))

    def is_gathered_once(self, name: str) -> bool:
        """Whether `gather_once` communicates."""
        return bool(self._once(self.placements[name]))

    def is_gathered_by_layer(self, name: str) -> bool:
        """Whether `gather_layer` and `reduce_layer` communicate."""
        return self._layer_by_layer(self.placements[name])

    def is_whole(self, name: str) -> bool:
        """Whether `gather_once` returns the whole weight, so that `gather_layer` has nothing to do."""
        return not self._layer_by_layer(self.placements[name]) and not self.placements[name].is_padded

    def tie_gather(self, values: Any) -> Any:
        """`values` behind a barrier: none is available before all are, so a gather of one waits for the others."""
        return lax.optimization_barrier(values) if self.sizes["fsdp"] > 1 else values

    def _layer_by_layer(self, placement: Placement) -> bool:
        """Whether a weight is gathered over `fsdp`; not if that axis divides the experts."""
        return self.sizes["fsdp"] > 1 and "fsdp" in placement.storage_axes

    def _once(self, placement: Placement) -> tuple[str, ...]:
        """The axes over which a weight is gathered once per step, in the order of its shards."""
        return tuple(axis for axis in placement.storage_axes if axis != "fsdp" and self.sizes[axis] > 1)


def global_norm(gradients: Mapping[str, jax.Array], placements: Mapping[str, Placement], sizes: Mapping[str, int]):
    """Euclidean norm of all gradients over all devices, with one collective."""
    total = jnp.zeros((), jnp.float32)
    for name, gradient in gradients.items():
        copies = math.prod(sizes[axis] for axis in placements[name].replicated_axes)
        total += jnp.sum(jnp.square(gradient)) / copies
    return jnp.sqrt(sum_over_all(total, sizes))


def row_major(x: jax.Array) -> jax.Array:
    """`x` with its last dimension contiguous in memory.

    XLA chooses the opposite layout for arrays that it gathers or reduces along the last dimension. That suits a matmul,
    but reading and adding rows of an embedding, or updating row-major weights, then takes up to ten times as long.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def in_turn[Array](groups: Sequence[dict[str, Array]], move: Callable[[str, Array], Array]) -> dict[str, Array]:
    """Arrays by name, moved group by group: each group waits for the one before. XLA would move all at once."""
    out: dict[str, Array] = {}
    arrived: dict[str, Array] = {}
    for group in groups:
        if arrived and group:
            group, arrived = lax.optimization_barrier((group, arrived))
        out |= arrived
        arrived = {name: move(name, array) for name, array in group.items()}
    return out | arrived


def as_bytes(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """`move(x)` for a collective that only moves numbers; FP8 is sent as bytes."""
    if x.dtype.itemsize > 1:
        return move(x)
    return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype)


def gather_tiles(x: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    """The shards of `x` on all devices of `axes`, side by side along `dim`."""
    return as_bytes(lambda x: collectives.all_gather(x, axes, axis=dim, tiled=True), x)


def sum_over_all(x, sizes: Mapping[str, int]):
    """Sum of a pytree over all devices of the mesh."""
    axes = tuple(axis for axis in AXES if sizes[axis] > 1)
    return collectives.psum(x, axes) if axes else x


def _dim(dim: int, x: jax.Array, placement: Placement) -> int:
    """Dimension `dim` of the placement in `x`, which may lack leading dimensions."""
    return dim - (len(placement.shape) - x.ndim)
