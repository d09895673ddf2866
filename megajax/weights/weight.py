"""A weight of the step on its way from storage to use, and its gradient on the way back, inside the step's shard_map.

The axes of PER_STEP_AXES (outside the blocks `pipeline` too) gather and reduce once per step, `fsdp` once per layer and
pass. `fsdp` gathers three kinds of weights less often: those outside the blocks and those of `gathered_slots` once per
step, those of the last remat group of an unrolled stack once for both passes. A token embedding that is looked up in
its shards is not gathered at all (embedding.py).

The share-of-the-loss rule: each device differentiates its own share of the loss. So a gradient is complete after a
reduce-scatter over the axes that store its weight in shards and a sum over the other axes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P

from megajax.model import block
from megajax.ops import fp8
from megajax.ops.barriers import not_before
from megajax.ops.fp8 import Fp8Weight
from megajax.parallel import collectives
from megajax.parallel.collectives import gather_tiles, sum_over_all
from megajax.sharding import Placement

Used = jax.Array | Fp8Weight


class WeightDtypes(NamedTuple):
    """The dtypes of a step's weights and gradients."""

    compute: Any  # of matmuls
    gradients: Any  # of reductions of gradients
    sums: Any = jnp.float32  # of gradients over microbatches


@dataclass(frozen=True)
class Weight:
    """A weight that the step computes with: one stored parameter, or several side by side.

    Arrays may lack the leading `layers` dimension of the placement, because dimensions are counted from the last.
    """

    name: str  # canonical, such as blocks.dense.attention.qkv
    members: Mapping[str, Placement]  # the placements of its parameters, by name within the block
    sizes: Mapping[str, int]  # of the mesh
    dtypes: WeightDtypes
    is_trained: bool = True
    is_split: bool = False  # stored as a BF16 half beside its low bits (`masters.py`)
    scope: str = ""  # the beginning of its parameters' canonical names

    @cached_property
    def placement(self) -> Placement:
        """The placement of the parameters side by side."""
        return _side_by_side([_merge_heads(member, self.sizes) for member in self.members.values()])

    @property
    def sum_dtype(self) -> jnp.dtype:
        """The dtype of the sum of gradients over microbatches: FP32 if the step computes with the weight in FP32."""
        return self.placement.dtype_in_use(self.dtypes.sums)

    # Stored <-> per step

    def gather_per_step(self, stored: jax.Array) -> jax.Array:
        """Fused FP32 shard → `fsdp` shard in the compute dtype; weights in FP8 and in COMPUTED_IN_FP32 keep theirs."""
        keep = self.placement.computes_in_fp32 or stored.dtype.itemsize == 1
        w = stored if keep else stored.astype(self.dtypes.compute)
        return gather_tiles(w, self._per_step, self._storage_dim(w)) if self._per_step else w

    def quantize_per_step(self, stored: jax.Array, scales: Mapping[str, jax.Array], gradient_dtype: Any) -> Fp8Weight:
        """`gather_per_step` in FP8, of one or several layers `[in, out]` (experts: `[E, in, out]`)."""
        scale = scales["weight"]
        of_each = scale.reshape(*scale.shape, *(1,) * (stored.ndim - scale.ndim))
        values = self.gather_per_step(fp8.quantize(stored, of_each, fp8.E4M3))
        # If it is not whole, each pass of a layer gathers and transposes.
        whole = not self.is_gathered_per_layer and not self.placement.is_padded
        transposed, others = values.swapaxes(-1, -2) if whole else None, (scales.get("input"), scales.get("gradient"))
        return Fp8Weight(values, transposed, 1 / scale, *others, None, None, gradient_dtype)

    def reduce_per_step(self, gradient: jax.Array) -> jax.Array:
        """Accumulated gradient → gradient of the stored shard, summed over the once-a-step axes that shard it."""
        if not self._per_step:
            return gradient
        dim, gradient = self._storage_dim(gradient), gradient.astype(self.dtypes.gradients)
        return collectives.psum_scatter(gradient, self._per_step, scatter_dimension=dim, tiled=True)

    def complete(self, gradient: jax.Array) -> jax.Array:
        """Gradients after `reduce_per_step`, of one layer or stacked → FP32, summed over the other axes too."""
        copies = tuple(axis for axis in self.placement.replicated_axes if self.sizes[axis] > 1)
        gradient = collectives.psum(gradient.astype(self.dtypes.gradients), copies) if copies else gradient
        return row_major(gradient.astype(jnp.float32))

    def split(self, gradient: jax.Array) -> dict[str, jax.Array]:
        """The gradient of the fused shard → gradients of the parameters' shards by name."""
        out = {}
        for member, columns in self.columns.items():
            part, placement = gradient[..., columns] if len(self.members) > 1 else gradient, self.members[member]
            out[member] = _all_kv_heads(_unmerge_heads(part, placement), placement)
        return out

    # Per step <-> used

    def gather_per_layer[Form: (jax.Array, Fp8Weight)](self, w: Form) -> Form:
        """`fsdp` shard → the weight that this device computes with."""
        if isinstance(w, Fp8Weight):
            values = self.gather_per_layer(w.values)
            transposed = values.swapaxes(-1, -2) if w.transposed is None else w.transposed
            return replace(w, values=values, transposed=transposed)
        if self.placement.storage_dim is None:
            return w
        dim = self._storage_dim(w)
        if self.is_gathered_per_layer:
            w = gather_tiles(w, ("fsdp",), dim)
        return lax.slice_in_dim(w, 0, self.placement.shape[self.placement.storage_dim], axis=dim)

    def differentiable(self, w: Used) -> Used:
        """The weight as a layer differentiates it: FP8 has an input through which the gradient returns."""
        if not isinstance(w, Fp8Weight):
            return w
        zeros = jnp.zeros(w.values.shape, self.dtypes.compute)
        return replace(w, gradient=zeros, amax=jnp.zeros(2, jnp.float32))

    def reduce_per_layer(self, gradient: jax.Array) -> jax.Array:
        """Gradient of a weight from `gather_per_layer` → gradient of its `fsdp` shard, summed over `fsdp`."""
        placement = self.placement
        if placement.storage_dim is None:
            return gradient
        dim = self._storage_dim(gradient)
        padding = placement.stored_shape[placement.storage_dim] - placement.shape[placement.storage_dim]
        if padding:
            gradient = jnp.pad(gradient, [(0, padding if d == dim else 0) for d in range(gradient.ndim)])
        if self.is_gathered_per_layer:
            gradient = gradient.astype(self.dtypes.gradients)
            gradient = collectives.psum_scatter(gradient, "fsdp", scatter_dimension=dim, tiled=True)
        return gradient

    # Facts

    @property
    def is_stored_for_use(self) -> bool:
        """Whether it is stored as the step computes with it: frozen weights, and halves of master weights."""
        return not self.is_trained or self.is_split

    @property
    def stored_dtype(self) -> jnp.dtype:
        return self.placement.dtype_in_use(self.dtypes.compute if self.is_stored_for_use else jnp.float32)

    @property
    def is_gathered_per_step(self) -> bool:
        """Whether `gather_per_step` communicates."""
        return bool(self._per_step)

    @property
    def is_gathered_per_layer(self) -> bool:
        """Whether `gather_per_layer` and `reduce_per_layer` communicate; not if `fsdp` divides the experts."""
        return self.sizes["fsdp"] > 1 and "fsdp" in self.placement.storage_axes

    @cached_property
    def columns(self) -> dict[str, slice]:
        """The columns of each parameter in this device's share of the weight."""
        out, start = {}, 0
        for member, placement in self.members.items():
            merged = _merge_heads(placement, self.sizes)
            width = merged.shape[-1] // (1 if merged.spec[-1] is None else self.sizes["tensor"])
            out[member] = slice(start, start + width)
            start += width
        return out

    def column_ids(self) -> jax.Array:
        """The index of each column of this device's share in the whole weight, uint32."""
        start, out = 0, []
        for placement in self.members.values():
            is_head = placement.axes[-1] == "head"
            width, devices = math.prod(placement.shape[-2:]) if is_head else placement.shape[-1], self.sizes["tensor"]
            if placement.kv_groups > 1:
                count = placement.shape[-1]
                first = kv_head(placement) * count
            else:
                divided = devices > 1 and placement.spec[-2 if is_head else -1] == "tensor"
                count = width // devices if divided else width
                first = lax.axis_index("tensor") * count if divided else 0
            out.append(start + first + jnp.arange(count))
            start += width
        return jnp.concatenate(out).astype(jnp.uint32)

    @property
    def _per_step(self) -> tuple[str, ...]:
        """The axes over which the weight is gathered once per step, in the order of its shards."""
        return tuple(axis for axis in self.placement.storage_axes if axis != "fsdp" and self.sizes[axis] > 1)

    def _storage_dim(self, x: jax.Array) -> int:
        """The dimension that storage divides in `x`, which may lack leading dimensions of the placement."""
        assert self.placement.storage_dim is not None
        return self.placement.storage_dim - (len(self.placement.shape) - x.ndim)


def fuse(weights: Mapping[str, Weight], stored: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Stored shards of one kind of block by name → shards of its fused weights, all or some.

    Query, key and value are side by side in one weight, and so are gate and up: one matmul, one gather, one reduction.
    """
    members = {name: placement for weight in weights.values() for name, placement in weight.members.items()}
    local = {name: _own_kv_head(w, members[name]) for name, w in stored.items()}
    groups = {name: tuple(weight.members) for name, weight in weights.items() if name not in weight.members}
    return block.fuse(local, {name: members[name].axes for name in stored}, groups)


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
            group, arrived = not_before((group, arrived))
        out |= arrived
        arrived = {name: move(name, array) for name, array in group.items()}
    return out | arrived


def _own_kv_head(w: jax.Array, placement: Placement) -> jax.Array:
    if placement.kv_groups == 1:
        return w
    return lax.dynamic_slice_in_dim(w, kv_head(placement), 1, w.ndim - 2)


def _all_kv_heads(gradient: jax.Array, placement: Placement) -> jax.Array:
    """The gradient of the own KV head → the gradient of all KV heads, summed over `tensor`."""
    if placement.kv_groups == 1:
        return gradient
    shape = (*gradient.shape[:-2], placement.shape[-2], gradient.shape[-1])
    zeros = jnp.zeros(shape, gradient.dtype)
    placed = lax.dynamic_update_slice_in_dim(zeros, gradient, kv_head(placement), gradient.ndim - 2)
    return collectives.psum(placed, "tensor")


def kv_head(placement: Placement) -> jax.Array:
    """The index of this device's KV head, where devices of `tensor` share heads."""
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
