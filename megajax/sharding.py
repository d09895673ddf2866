"""Where everything lies: one table from logical axes to mesh axes, and what reads it.

Weights are stored sharded over every axis that carries the batch or the sequence. `fsdp` comes first in a spec because
it is gathered layer by layer, the axes gathered once a step come last: after the once-a-step gather, what is left of a
weight is one contiguous `fsdp` shard.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.mesh import AXES, BATCH_AXES

ONCE_AXES = ("expert", "context", "data")  # gathered and reduced once a step
STORAGE_AXES = ("fsdp", *ONCE_AXES)
BATCH_SPEC = P(None, BATCH_AXES, "context")  # [M, B, S]

LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "layers": "pipeline",
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",  # replicated where there are fewer KV heads than devices on `tensor`
    "mlp": "tensor",
    "embed": STORAGE_AXES,  # the D dimension of matrices: only how they are stored
    "head": None,
    "positions": None,
    "norm": None,  # vectors of width D or H are too small to shard; those of norms compute in FP32
    "residual": None,  # biases of width D, added to the residual stream in its dtype
}


@dataclass(frozen=True)
class Placement:
    """How one parameter lies on the mesh."""

    shape: tuple[int, ...]  # canonical global shape
    axes: tuple[str, ...]
    spec: P
    stored_shape: tuple[int, ...]  # `shape`, the storage dimension padded to a multiple of its shards
    storage_dim: int | None  # the dimension sharded over STORAGE_AXES
    kv_groups: int  # devices on `tensor` that share a KV head whose dimension is replicated; 1: none do

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes that the stored weight is not sharded over."""
        used = {axis for entry in self.spec for axis in _axes(entry or ())}
        return tuple(axis for axis in AXES if axis not in used)


def place(shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int]) -> Placement:
    """The placement of a weight whose dimensions carry the logical names `axes`, on a mesh of `sizes`.

    A stored dimension that does not divide is padded: storage alone never refuses a mesh.
    """
    spec, stored, kv_groups = [], list(shape), 1
    for dim, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        entry = LOGICAL_TO_MESH[axis]
        if axis == "kv_heads" and sizes["tensor"] > size:
            assert sizes["tensor"] % size == 0
            entry, kv_groups = None, sizes["tensor"] // size
        if axis == "embed":
            stored[dim] = -(-size // _storage_shards(sizes)) * _storage_shards(sizes)
        elif isinstance(entry, str):
            assert size % sizes[entry] == 0, (axis, size, entry, sizes[entry])
        spec.append(entry)
    storage_dim = axes.index("embed") if "embed" in axes else None
    return Placement(shape, axes, P(*spec), tuple(stored), storage_dim, kv_groups)


def place_all(parameters: Mapping[str, object], sizes: Mapping[str, int]) -> dict[str, Placement]:
    """Placements by name of declared parameters (`model.parameters`)."""
    return {name: place(tuple(p.shape), p.axes, sizes) for name, p in parameters.items()}  # type: ignore[attr-defined]


def shardings(placements: Mapping[str, Placement], mesh: Mesh) -> dict[str, NamedSharding]:
    """The stored weights' shardings by name."""
    return {name: NamedSharding(mesh, p.spec) for name, p in placements.items()}


def pad_to_storage(x: jax.Array, placement: Placement) -> jax.Array:
    """Canonical shape → stored shape, zeros appended."""
    widths = [(0, stored - size) for size, stored in zip(placement.shape, placement.stored_shape, strict=True)]
    return jax.numpy.pad(x, widths) if placement.shape != placement.stored_shape else x


def strip_padding(x: jax.Array, placement: Placement) -> jax.Array:
    """Stored shape → canonical shape."""
    return x[tuple(slice(size) for size in placement.shape)] if placement.shape != placement.stored_shape else x


def unpadded_spec(placement: Placement, sizes: Mapping[str, int]) -> P:
    """Where the canonical shape lies while it is saved or restored.

    As the stored one where the mesh divides it; a storage axis that does not divide D goes to the first dimension that
    it divides, and only where there is none does every device hold a copy.
    """
    entries = [_axes(entry or ()) for entry in placement.spec]
    if placement.storage_dim is not None:
        entries[placement.storage_dim] = ()
        dims = sorted(range(len(entries)), key=lambda dim: dim != placement.storage_dim)
        for axis in STORAGE_AXES:
            for dim in dims:
                if placement.shape[dim] % math.prod(sizes[a] for a in (*entries[dim], axis)) == 0:
                    entries[dim] = (*entries[dim], axis)
                    break
    return P(*(entry or None for entry in entries))


def _axes(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


def _storage_shards(sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in STORAGE_AXES)
