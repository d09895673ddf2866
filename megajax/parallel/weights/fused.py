"""Stored parameters of a block ↔ fused weights for the step's matmuls, on one device's shards.

Query, key and value are side by side in one weight, and so are gate and up: one matmul, one gather, one reduction.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.model.block import fuse
from megajax.parallel import collectives
from megajax.sharding import Placement


class FusedWeights:
    """Fuses shards of a block's parameters and splits their gradients, inside the step's shard_map.

    `placements` are those of the parameters `[L, ...]` of one kind of block, by name within the block; `groups` are the
    parameters to fuse (`Block.fused`). Arrays may lack the leading `layers` dimension or have others instead.
    """

    def __init__(
        self,
        placements: Mapping[str, Placement],
        groups: Mapping[str, tuple[str, ...]],
        sizes: Mapping[str, int],
    ):
        self.stored, self.groups, self.sizes = placements, groups, sizes
        self.axes = {name: placement.axes for name, placement in placements.items()}
        fused = {part for parts in groups.values() for part in parts}
        present = {name: [p for p in parts if p in placements] for name, parts in groups.items()}
        self.parts: dict[str, list[str]] = {name: parts for name, parts in present.items() if parts}
        self.parts |= {name: [name] for name in placements if name not in fused}
        # The placements of the fused weights.
        self.placements = {
            name: _side_by_side([_merge_heads(placements[part], sizes) for part in parts])
            for name, parts in self.parts.items()
        }

    def fuse(self, stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Stored shards by name → shards of the fused weights."""
        own = {name: self._own_kv_head(w, self.stored[name]) for name, w in stored.items()}
        return fuse(own, self.axes, self.groups)

    def split(self, name: str, gradient: jax.Array) -> dict[str, jax.Array]:
        """The gradient of a fused shard → gradients of the stored shards by name."""
        out = {}
        for part, columns in self.columns(name).items():
            own = gradient[..., columns] if len(self.parts[name]) > 1 else gradient
            out[part] = self._all_kv_heads(_unmerge_heads(own, self.stored[part]), self.stored[part])
        return out

    def columns(self, name: str) -> dict[str, slice]:
        """The columns of each parameter in this device's share of a fused weight."""
        out, start = {}, 0
        for part in self.parts[name]:
            merged = _merge_heads(self.stored[part], self.sizes)
            width = merged.shape[-1] // (1 if merged.spec[-1] is None else self.sizes["tensor"])
            out[part] = slice(start, start + width)
            start += width
        return out

    def _own_kv_head(self, w: jax.Array, placement: Placement) -> jax.Array:
        if placement.kv_groups == 1:
            return w
        return lax.dynamic_slice_in_dim(w, self._kv_head(placement), 1, w.ndim - 2)

    def _all_kv_heads(self, gradient: jax.Array, placement: Placement) -> jax.Array:
        """The gradient of the own KV head → the gradient of all KV heads, summed over `tensor`."""
        if placement.kv_groups == 1:
            return gradient
        shape = (*gradient.shape[:-2], placement.shape[-2], gradient.shape[-1])
        zeros = jnp.zeros(shape, gradient.dtype)
        placed = lax.dynamic_update_slice_in_dim(zeros, gradient, self._kv_head(placement), gradient.ndim - 2)
        return collectives.psum(placed, "tensor")

    def _kv_head(self, placement: Placement) -> jax.Array:
        return lax.axis_index("tensor") // placement.kv_groups


def _head_dim(placement: Placement) -> int | None:
    """The index of the head width, counted from the end; None if there is none."""
    return placement.axes.index("head") - len(placement.axes) if "head" in placement.axes else None


def _merge_heads(placement: Placement, sizes: Mapping[str, int]) -> Placement:
    """The placement with heads and head width as one dimension; replicated KV heads count once per device."""
    head = _head_dim(placement)
    if head is None:
        return placement
    at = len(placement.axes) + head - 1  # of the heads
    heads = sizes["tensor"] if placement.kv_groups > 1 else placement.shape[at]

    def merge(shape: Sequence[int]) -> tuple[int, ...]:
        return (*shape[:at], heads * placement.shape[at + 1], *shape[at + 2 :])

    storage = placement.storage_dim
    return Placement(
        shape=merge(placement.shape),
        axes=(*placement.axes[:at], "heads", *placement.axes[at + 2 :]),
        spec=P(*placement.spec[:at], "tensor", *placement.spec[at + 2 :]),
        stored_shape=merge(placement.stored_shape),
        storage_dim=storage if storage is None or storage < at else storage - 1,
        kv_groups=1,
    )


def _unmerge_heads(gradient: jax.Array, placement: Placement) -> jax.Array:
    head = _head_dim(placement)
    if head is None:
        return gradient
    width, after = placement.shape[head], -1 - head  # dimensions after the head width
    lead = gradient.shape[: gradient.ndim - after - 1]
    return gradient.reshape(*lead, -1, width, *gradient.shape[gradient.ndim - after :])


def _side_by_side(parts: Sequence[Placement]) -> Placement:
    """The placement of weights next to each other along their last dimension."""
    first, width = parts[0], sum(part.shape[-1] for part in parts)
    if len(parts) == 1:
        return first
    stored = (*first.stored_shape[:-1], width)
    return Placement((*first.shape[:-1], width), first.axes, first.spec, stored, first.storage_dim, 1)
