"""The placement of all arrays: one table from logical axes to mesh axes, and the functions that read it.

Weights are stored sharded over every axis that divides the batch or the sequence. In a spec `fsdp` comes first, because
it is gathered layer by layer, and the axes that are gathered once a step come last. So after the once-a-step gather a
device holds one contiguous `fsdp` shard of a weight.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from megajax.config import Config
from megajax.errors import ConfigError
from megajax.layout.stages import layer_slots, slot_kinds, virtual_stages
from megajax.mesh import AXES
from megajax.schema.fields import BATCH_AXES

PER_STEP_AXES = ("expert", "context", "data")  # gathered and reduced once a step
STORAGE_AXES = ("fsdp", *PER_STEP_AXES)
NON_BLOCK_AXES = (*STORAGE_AXES, "pipeline")  # for weights outside the blocks, which every stage needs
# A model in use has no stages and no batch of its own: these axes divide a weight's width D, whatever they are for in
# training, and the sequences where their number allows it.
SHARED_AXES = ("pipeline", "data", "fsdp", "context", "expert")
EXPERT_AXES = ("expert", "tensor")  # over which a model in use divides its experts
BATCH_SPEC = P(None, BATCH_AXES, "context")  # [M, B, S]
# The last axis of weights that are not cast to the compute dtype
COMPUTED_IN_FP32 = ("norm", "router", "sinks", "decays", "outputs")
EMPTY = -1  # instead of a layer, for an empty slot
BLOCKS = "blocks."  # prefix of the names of block parameters; the kind of block comes next
ENCODER = "encoder."  # prefix of the names of an encoder's parameters
VISION = "vision."  # prefix of the names of a vision tower's parameters, its projector's included
TEACHER = "teacher."  # prefix of the names of a teacher's parameters
OBJECTIVE = "objective."  # prefix of the names of an objective's parameters

LOGICAL_TO_MESH: dict[str, str | tuple[str, ...] | None] = {
    "layers": "pipeline",  # stage by stage: `stored_layers`
    "modules": None,  # layers that all stages compute, as they do the head: those after the model's, a teacher's
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",  # replicated where there are fewer KV heads than devices on `tensor`
    "sinks": "tensor",  # a logit for each query head, in FP32
    "decays": "tensor",  # numbers of each head's decay, in FP32
    "mlp": "tensor",
    "experts": "expert",  # by default: `mesh.experts_over`
    "expert_mlp": "tensor",  # whole if `tensor` divides the experts themselves
    "router": None,  # the router's E dimension: every device scores all experts, in FP32
    "outputs": None,  # of an objective's own head, in FP32
    "embed": STORAGE_AXES,  # the D dimension of matrices, in storage only (NON_BLOCK_AXES outside the blocks)
    "head": None,
    "whole": None,  # any other dimension that no axis divides
    "rank": None,  # of a low-rank projection: every device has all of it (`replicated_linear`)
    "positions": None,
    "norm": None,  # vectors of width D or H are too small to shard; those of norms compute in FP32
    "residual": None,  # biases of width D, added to the residual stream in its dtype
}


@dataclass(frozen=True)
class Placement:
    """The placement of one parameter on the mesh."""

    shape: tuple[int, ...]  # canonical global shape
    axes: tuple[str, ...]
    spec: P
    stored_shape: tuple[int, ...]  # `shape` with the storage dimension padded and the layers as stored
    storage_dim: int | None  # the dimension sharded over STORAGE_AXES or NON_BLOCK_AXES
    kv_groups: int  # devices on `tensor` that share a KV head whose dimension is replicated; 1: none do
    layers: tuple[int, ...] | None = None  # of a block's parameter: the model's layer in each stored row, or EMPTY

    @property
    def is_padded(self) -> bool:
        """Whether its storage dimension is longer than the weight's."""
        dim = self.storage_dim
        return dim is not None and self.shape[dim] != self.stored_shape[dim]

    @property
    def computes_in_fp32(self) -> bool:
        """Whether the step computes with this weight in FP32 (COMPUTED_IN_FP32)."""
        return self.axes[-1] in COMPUTED_IN_FP32

    def dtype_in_use(self, compute: Any) -> Any:
        """The dtype in which the step uses this weight, if it computes in `compute`."""
        return jnp.dtype(jnp.float32 if self.computes_in_fp32 else compute)

    @property
    def is_canonical(self) -> bool:
        """Whether the stored form is that of checkpoints."""
        return not self.is_padded and not self.reordered

    @property
    def reordered(self) -> bool:
        """Whether the stored rows differ from the layers in the model's order."""
        return self.layers is not None and list(self.layers) != self.canonical_layers

    @property
    def canonical_layers(self) -> list[int]:
        """The model's layer in each row of the canonical shape."""
        return sorted(set(self.layers or ()) - {EMPTY})

    @cached_property
    def storage_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard the weight in storage only, in the order of its shards."""
        return () if self.storage_dim is None else mesh_axes(self.spec[self.storage_dim])

    @cached_property
    def replicated_axes(self) -> tuple[str, ...]:
        """Mesh axes that the stored weight is not sharded over."""
        used = {axis for entry in self.spec for axis in mesh_axes(entry)}
        return tuple(axis for axis in AXES if axis not in used)


def stored_layers(config: Config, stages: int) -> np.ndarray:
    """The layer in each slot of each stage and of its R virtual stages, `[P, R, slots]`; EMPTY for empty slots."""
    per_stage = config.pipeline.virtual_stages if stages > 1 else 1
    layers = np.full((stages, per_stage, len(slot_kinds(config, stages))), EMPTY)
    held_and_filled = zip(virtual_stages(config, stages), layer_slots(config, stages), strict=True)
    for v, (held, filled) in enumerate(held_and_filled):
        layers[v % stages, v // stages, list(filled)] = held
    return layers


def stored_rows(config: Config, stages: int) -> dict[str, tuple[int, ...]]:
    """For each kind of block the layer in each row of its stored parameters; EMPTY for empty slots."""
    layers, kinds = stored_layers(config, stages), [kind.block for kind in slot_kinds(config, stages)]
    slots_of = {block: [j for j, kind in enumerate(kinds) if kind == block] for block in sorted(set(kinds))}
    return {block: tuple(layers[:, :, slots].ravel().tolist()) for block, slots in slots_of.items()}


def place(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    sizes: Mapping[str, int],
    layers: tuple[int, ...] | None = None,
    experts_over: tuple[str, ...] = ("expert",),
) -> Placement:
    """The placement of a weight whose dimensions have the logical names `axes`, on a mesh of `sizes`.

    `layers` are the layers of the stored rows, by default in order; the mesh axes `experts_over` divide the experts. A
    stored dimension that the mesh does not divide is padded, so storage never excludes a mesh.
    """
    spec, stored, kv_groups = [], list(shape), 1
    in_block = axes[0] == "layers"
    storage = STORAGE_AXES if in_block else NON_BLOCK_AXES
    table = _rules(axes, storage, experts_over)
    layers = (layers or tuple(range(shape[0]))) if in_block else None

    def indivisible(axis: str, *mesh_axes: str) -> ConfigError:
        over = ", ".join(f"mesh.{name}={sizes[name]}" for name in mesh_axes)
        problem = f"{over} does not divide the dimension {axis} of a parameter {[*shape]} with the axes {axes}"
        return ConfigError(f"{problem}: give it another size, or the axis whole.")

    for dim, (size, axis) in enumerate(zip(shape, axes, strict=True)):
        entry = table[axis]
        if axis == "kv_heads" and sizes["tensor"] > size:
            if sizes["tensor"] % size:
                raise indivisible(axis, "tensor")
            entry, kv_groups = None, sizes["tensor"] // size
        if axis == "embed":
            shards = math.prod(sizes[name] for name in mesh_axes(entry))
            stored[dim] = -(-size // shards) * shards
        elif axis == "layers":
            assert layers is not None and len(layers) % sizes["pipeline"] == 0, (layers, sizes)
            stored[dim] = len(layers)
        else:
            if size % math.prod(sizes[name] for name in mesh_axes(entry)):
                raise indivisible(axis, *mesh_axes(entry))
        spec.append(entry)
    storage_dim = axes.index("embed") if "embed" in axes else None
    return Placement(shape, axes, P(*spec), tuple(stored), storage_dim, kv_groups, layers)


def place_in_use(shape: tuple[int, ...], axes: tuple[str, ...], sizes: Mapping[str, int]) -> P:
    """The spec of a weight of a model in use: by the same table, D over the axes of SHARED_AXES that are left.

    A dimension that an axis does not divide is whole on its devices.
    """
    table = _rules(axes, (), EXPERT_AXES) | {"layers": None}
    entries = [dividing(size, mesh_axes(table[axis]), sizes) for size, axis in zip(shape, axes, strict=True)]
    if "embed" in axes:
        used = {axis for entry in entries for axis in entry}
        left = tuple(axis for axis in SHARED_AXES if axis not in used)
        entries[axes.index("embed")] = dividing(shape[axes.index("embed")], left, sizes)
    return P(*(entry or None for entry in entries))


def dividing(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes, in order, that together divide `size`."""
    chosen: tuple[str, ...] = ()
    for axis in axes:
        if sizes[axis] > 1 and size % math.prod(sizes[a] for a in (*chosen, axis)) == 0:
            chosen = (*chosen, axis)
    return chosen


def _rules(
    axes: tuple[str, ...], storage: tuple[str, ...], experts_over: tuple[str, ...]
) -> dict[str, str | tuple[str, ...] | None]:
    """LOGICAL_TO_MESH for a weight; the axes that do not divide its experts shard them in storage."""
    if "experts" not in axes:
        return LOGICAL_TO_MESH | {"embed": storage}
    left = tuple(axis for axis in storage if axis not in experts_over)
    width = None if "tensor" in experts_over else "tensor"
    return LOGICAL_TO_MESH | {"embed": left, "experts": experts_over, "expert_mlp": width}


def place_all(
    parameters: Mapping[str, Any],
    sizes: Mapping[str, int],
    rows: Mapping[str, tuple[int, ...]] | None = None,
    experts_over: tuple[str, ...] = ("expert",),
) -> dict[str, Placement]:
    """Placements by name of declared parameters (`model.parameters`).

    `rows` are `stored_rows`, by default the layers of each kind of block in order.
    """

    def layers(name: str, parameter: Any) -> tuple[int, ...] | None:
        if not name.startswith(BLOCKS):
            return None
        return rows.get(name.split(".")[1]) if rows else parameter.layers

    return {name: place(tuple(p.shape), p.axes, sizes, layers(name, p), experts_over) for name, p in parameters.items()}


def below[Value](values: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The values whose names begin with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def is_in_layer(name: str) -> bool:
    """Whether a parameter of this name, of the model, its encoder, its tower or a teacher, is one of its layers'."""
    return name.removeprefix(TEACHER).removeprefix(ENCODER).removeprefix(VISION).startswith(BLOCKS)


def to_stored(x: jax.Array, placement: Placement) -> jax.Array:
    """Canonical form → stored form: layers in the order of the stages, zeros for empty slots and padding."""
    return pad_storage(in_stored_rows(x, placement), placement)


def in_stored_rows(x: jax.Array, placement: Placement) -> jax.Array:
    """`[L, ...]` in the model's order → the rows of a stored weight, zeros for empty slots."""
    if not placement.reordered:
        return x
    layers = np.array(placement.layers)
    empty = (layers == EMPTY).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(empty, 0, x[np.searchsorted(placement.canonical_layers, layers)])


def pad_storage(x: jax.Array, placement: Placement) -> jax.Array:
    """The stored rows of a weight with its storage dimension padded."""
    widths = [(0, stored - size) for size, stored in zip(x.shape, placement.stored_shape, strict=True)]
    return jnp.pad(x, widths) if x.shape != placement.stored_shape else x


def to_canonical(x: jax.Array, placement: Placement) -> jax.Array:
    """Stored form → canonical form: layers in the model's order, no padding."""
    if placement.reordered:
        assert placement.layers is not None
        x = x[np.array([placement.layers.index(layer) for layer in placement.canonical_layers])]
    return x[tuple(slice(size) for size in placement.shape)]


def unpadded_spec(placement: Placement, sizes: Mapping[str, int]) -> P:
    """The spec of the canonical shape while it is saved or restored.

    It is the stored spec if the mesh divides the shape. A storage axis that does not divide D goes to the first
    dimension that it divides; if there is none, every device holds a copy. If the stages hold the layers in another
    order, `pipeline` is treated like a storage axis: then each device has a share of all layers and reorders it without
    communication.
    """
    entries = [mesh_axes(entry) for entry in placement.spec]
    storage, moving = placement.storage_dim, ()
    if storage is not None:
        moving, entries[storage] = entries[storage], ()
    if placement.reordered:
        moving, entries[0] = (*moving, *entries[0]), ()
    dims = sorted(range(int(placement.reordered), len(entries)), key=lambda dim: dim != storage)
    for axis in moving:
        for dim in dims:
            if placement.shape[dim] % math.prod(sizes[a] for a in (*entries[dim], axis)) == 0:
                entries[dim] = (*entries[dim], axis)
                break
    return P(*(entry or None for entry in entries))


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a spec."""
    return (entry,) if isinstance(entry, str) else entry or ()
