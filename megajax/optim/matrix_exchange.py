"""Whole matrices of the layers for an optimizer that needs them: an all-to-all there and one back.

A matrix is stored in shards: its rows over the axes of storage, its columns over `tensor`, or the other way round. The
devices that store a matrix distribute the matrices among themselves: an all-to-all gives each device some of them
whole, in the compute dtype, and a second one returns the results to the shards. Where devices hold copies of a shard,
each computes a part of the matrices and gathers the others. So each matrix is on one device only, and its result does
not depend on the mesh. docs/optimizers.md counts the bytes.

An optimizer may keep arrays for each matrix, such as its factors. They stay on the device that owns the matrix: which
one follows from the parameter alone, so each parameter with such arrays is exchanged by itself.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.mesh import mesh_sizes
from megajax.ops.barriers import not_before, not_repeated
from megajax.sharding import EMPTY, Placement, mesh_axes

Slots = dict[str, jax.Array]  # arrays [k, ...] of k matrices
Compute = Callable[[jax.Array, Slots], tuple[jax.Array, Slots]]  # of matrices [k, rows, columns] and their slots

ROWS_OF_MATRICES = ("layers", "modules", "experts")  # leading logical axes: each row has matrices of its own
HEADS = ("heads", "kv_heads")
OWNED = ("layers", "residual", "residual")  # logical axes of arrays with a row for each matrix
CHUNK = 2**26  # elements that a device makes orthogonal at once; more small matrices fill the GPU


@dataclass(frozen=True)
class Shape:
    """How matrices lie over the mesh: their whole size, and the axes of size above one that divide rows and columns."""

    rows: int
    columns: int
    over_rows: tuple[str, ...]
    over_columns: tuple[str, ...]
    copies_over: tuple[str, ...]  # axes whose devices have copies of the shards


@dataclass(frozen=True)
class MatrixLayout:
    """The matrices of one stored parameter.

    `inputs` and `outputs` are their true size, without the padding of storage. `transposed`: they are turned.
    """

    inputs: int
    outputs: int
    shape: Shape
    count: int  # matrices of which a device has shards
    transposed: bool
    placement: Placement
    _heads: int | None  # the dimension of heads that are matrices by themselves

    @classmethod
    def of(cls, placement: Placement, sizes: Mapping[str, int], per_head: bool, turns: bool) -> "MatrixLayout":
        """The layout of a parameter; `per_head`: heads of a projection's output are matrices by themselves.

        `turns`: matrices with more rows than columns are turned; a square one, so that storage divides its rows.
        """
        axes, first = placement.axes, _batch_dims(placement.axes)
        heads = next((dim for dim, axis in enumerate(axes) if axis in HEADS), None)
        alone = heads if per_head and heads is not None and heads > first else None
        divided, stored, true = [], [], []  # of the matrix's two dimensions
        for dim in range(first, len(axes)):
            over = tuple(axis for axis in mesh_axes(placement.spec[dim]) if sizes[axis] > 1)
            if dim == alone:
                continue
            if dim - 1 == heads and alone is None:  # heads and their width are one dimension
                stored[-1] *= placement.stored_shape[dim]
                true[-1] *= placement.shape[dim]
                continue
            divided.append(over)
            stored.append(placement.stored_shape[dim])
            true.append(placement.shape[dim])
        assert len(true) == 2, (axes, "is not a matrix")
        stores_columns = placement.storage_dim is not None and placement.storage_dim == len(axes) - 1
        transposed = turns and (stored[0], stores_columns) > (stored[1], False)
        order = (1, 0) if transposed else (0, 1)
        copies = tuple(axis for axis in placement.replicated_axes if sizes[axis] > 1)
        rows, columns = order
        shape = Shape(stored[rows], stored[columns], divided[rows], divided[columns], copies)
        whole = [*placement.stored_shape[:first], *([placement.shape[alone]] if alone else [])]
        shards = math.prod(sizes[axis] for axis in sizes if axis not in (*divided[0], *divided[1], *copies))
        return cls(true[0], true[1], shape, math.prod(whole) // shards, transposed, placement, alone)

    def matrices(self, shard: jax.Array) -> jax.Array:
        """A device's shard → its shards of matrices, `[m, rows, columns]`."""
        first = _batch_dims(self.placement.axes)
        if self._heads is not None:
            shard, first = jnp.moveaxis(shard, self._heads, first), first + 1
        elif shard.ndim - first > 2:  # heads and their width
            heads = next(dim for dim, axis in enumerate(self.placement.axes) if axis in HEADS)
            shard = shard.reshape(*shard.shape[:heads], -1, *shard.shape[heads + 2 :])
        matrices = shard.reshape(-1, *shard.shape[first:])
        return matrices.mT if self.transposed else matrices

    def shard(self, matrices: jax.Array, like: tuple[int, ...]) -> jax.Array:
        """The inverse of `matrices`: the shard with the shape `like`."""
        matrices = matrices.mT if self.transposed else matrices
        if self._heads is None:
            return matrices.reshape(like)
        first = _batch_dims(self.placement.axes)
        moved = (*like[:first], like[self._heads], *like[first : self._heads], *like[self._heads + 1 :])
        return jnp.moveaxis(matrices.reshape(moved), first, self._heads)

    def owner_axes(self, sizes: Mapping[str, int]) -> tuple[str, ...]:
        """All mesh axes of size above one, in the order of the devices that own matrices: first those of their rows."""
        divided = (*self.shape.copies_over, *self.shape.over_rows, *self.shape.over_columns)
        apart = (axis for entry in self.placement.spec for axis in mesh_axes(entry))
        return (*(axis for axis in apart if sizes[axis] > 1 and axis not in divided), *divided)

    def owned(self, shape: tuple[int, int], sizes: Mapping[str, int]) -> Placement:
        """The placement of an array with the `shape` for each matrix: a row for each, on the device that owns it.

        Its canonical form has the matrices in the model's order.
        """
        first, axes = _batch_dims(self.placement.axes), self.owner_axes(sizes)
        stored = self.placement.stored_shape[:first]
        layers, each = np.array(self.placement.layers or range(*stored[:1] or (1,)))[:, None], math.prod(stored[1:])
        index = np.where(layers == EMPTY, EMPTY, layers * each + np.arange(each))
        # Rows by the mesh axes that divide layers and experts, then those of a device: its matrices.
        sides, over = list[int](), list[str]()
        for size, entry in zip(stored, self.placement.spec, strict=False):
            dividing = [axis for axis in mesh_axes(entry) if sizes[axis] > 1]
            sides += [*(sizes[axis] for axis in dividing), size // math.prod(sizes[axis] for axis in dividing)]
            over += [*dividing, ""]
        order = sorted(range(len(over)), key=lambda dim: over[dim] == "")
        local = index.reshape(sides).transpose(order).reshape(-1, self.count)
        number, each_round = rounds(self.shape, sizes, self.count)
        devices = math.prod(sizes[axis] for axis in axes) // len(local)
        padded = np.pad(local, ((0, 0), (0, number * devices * each_round - self.count)), constant_values=EMPTY)
        rows = padded.reshape(-1, number, devices, each_round).swapaxes(1, 2).ravel()
        whole = (int((index != EMPTY).sum()), *shape)
        return Placement(whole, OWNED, P(axes or None, None, None), (len(rows), *shape), None, 1, tuple(rows.tolist()))


def on_whole_matrices(
    compute: Compute, layouts: Mapping[str, MatrixLayout], mesh: Mesh, dtype: Any
) -> Callable[[dict[str, jax.Array], dict[str, Slots]], tuple[dict[str, jax.Array], dict[str, Slots]]]:
    """(stored arrays by name, their slots by name) → `compute` of their matrices in `dtype`, in stored form, and slots.

    `compute` keeps shapes and dtypes, treats each matrix by itself, and maps zeros to zeros; the storage's padding is
    zeros, and so are the rows of empty layer slots. Matrices with slots come without padding.
    """
    sizes = mesh_sizes(mesh)

    def local(shards: dict[str, jax.Array], slots: dict[str, Slots]) -> tuple[dict[str, jax.Array], dict[str, Slots]]:
        out: dict[str, jax.Array] = {}
        new_slots: dict[str, Slots] = {}
        done = None
        for shape, names in groups(layouts, slots):
            layout, held = layouts[names[0]], slots.get(names[0], {})
            matrices = [layouts[name].matrices(shards[name]).astype(dtype) for name in names]
            if done is not None:  # independent collectives must not overlap: devices may order them differently
                matrices, held, done = not_before((matrices, held, done))
            if held:
                done, new_slots[names[0]] = _group(_unpadded(compute, layout), shape, sizes, matrices[0], held)
            else:
                done, _ = _group(compute, shape, sizes, jnp.concatenate(matrices), {})
            parts = jnp.split(done, [*accumulate(len(m) for m in matrices)][:-1])
            for name, part in zip(names, parts, strict=True):
                out[name] = layouts[name].shard(part, shards[name].shape)
        return out, new_slots

    def whole(arrays: dict[str, jax.Array], slots: dict[str, Slots]) -> Any:
        specs = {name: layout.placement.spec for name, layout in layouts.items()}
        owned = {name: dict.fromkeys(held, P(layouts[name].owner_axes(sizes) or None)) for name, held in slots.items()}
        both = specs, owned
        return jax.shard_map(local, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)(arrays, slots)

    return whole


def groups(layouts: Mapping[str, MatrixLayout], alone: Collection[str] = ()) -> list[tuple[Shape, list[str]]]:
    """The names of parameters whose matrices are computed together: those of one shape, but some `alone`."""
    found: dict[tuple[Shape, str], list[str]] = {}
    for name, layout in layouts.items():
        found.setdefault((layout.shape, name if name in alone else ""), []).append(name)
    return [(shape, names) for (shape, _), names in found.items()]


def rounds(shape: Shape, sizes: Mapping[str, int], count: int) -> tuple[int, int]:
    """(rounds, matrices per device and round) for `count` matrices of a shape."""
    devices = math.prod(sizes[axis] for axis in (*shape.over_rows, *shape.over_columns, *shape.copies_over))
    number = -(-count // (devices * max(1, CHUNK // (shape.rows * shape.columns))))
    return number, -(-count // (devices * number))


def _unpadded(compute: Compute, layout: MatrixLayout) -> Compute:
    """`compute` of matrices without the padding of storage."""

    def of(matrices: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
        _, rows, columns = matrices.shape
        out, slots = compute(matrices[:, : layout.inputs, : layout.outputs], slots)
        return jnp.pad(out, ((0, 0), (0, rows - layout.inputs), (0, columns - layout.outputs))), slots

    return of


def _group(
    compute: Compute, shape: Shape, sizes: Mapping[str, int], matrices: jax.Array, slots: Slots
) -> tuple[jax.Array, Slots]:
    """`compute` of the matrices of one shape, from and to this device's shards `[m, rows, columns]`.

    In each round every device computes k matrices, while the next round's arrive and the last round's return. Its slots
    are `[rounds · k, ...]`.
    """
    exchange = _Exchange(shape, sizes)
    count, devices = len(matrices), exchange.devices * exchange.copies
    number, each = rounds(shape, sizes, count)
    padding = number * each * devices - count
    # Behind a barrier: XLA's CPU compiler makes an all-to-all of constants and others that its own verifier refuses.
    rounded = not_repeated(jnp.pad(matrices, ((0, padding), (0, 0), (0, 0))))
    rounded = rounded.reshape(number, devices * each, *matrices.shape[1:])
    if number == 1:
        whole, slots = compute(exchange.there(rounded[0]), slots)
        return exchange.back(whole)[:count], slots
    by_round = {name: x.reshape(number, each, *x.shape[1:]) for name, x in slots.items()}
    if devices == 1:
        whole, by_round = lax.map(lambda both: compute(*both), (rounded, by_round))
        returned = whole.reshape(-1, *matrices.shape[1:])[:count]
        return returned, {name: x.reshape(slots[name].shape) for name, x in by_round.items()}

    def body(carry, given):
        (whole, computed), (following, slots_of_round) = carry, given
        returned = exchange.back(computed)
        following, returned = not_before((following, returned))
        computed, slots_of_round = compute(whole, slots_of_round)
        return (exchange.there(following), computed), (returned, slots_of_round)

    first = exchange.there(rounded[0])
    # The first round returns zeros, and the last one receives the first round's matrices again: both are dropped.
    following = jnp.roll(rounded, -1, axis=0)
    (_, last), (returned, by_round) = lax.scan(body, (first, jnp.zeros_like(first)), (following, by_round))
    returned = jnp.concatenate([returned[1:], exchange.back(last)[None]])
    returned = returned.reshape(-1, *matrices.shape[1:])[:count]
    return returned, {name: x.reshape(slots[name].shape) for name, x in by_round.items()}


class _Exchange:
    """Moves shards of `devices · copies · k` matrices to k whole matrices on each device, and back."""

    def __init__(self, shape: Shape, sizes: Mapping[str, int]):
        self.axes, self.copies_over = (*shape.over_rows, *shape.over_columns), shape.copies_over
        self.rows = math.prod(sizes[axis] for axis in shape.over_rows)
        self.columns = math.prod(sizes[axis] for axis in shape.over_columns)
        self.devices = self.rows * self.columns
        self.copies = math.prod(sizes[axis] for axis in shape.copies_over)

    def there(self, shards: jax.Array) -> jax.Array:
        """`[devices · copies · k, rows / n, columns / n']` → this device's k matrices, whole."""
        if self.copies > 1:
            share = len(shards) // self.copies
            shards = lax.dynamic_slice_in_dim(shards, lax.axis_index(self.copies_over) * share, share)
        if self.devices == 1:
            return shards
        received = lax.all_to_all(shards, self.axes, 0, 0, tiled=True)
        _, rows, columns = shards.shape
        tiles = received.reshape(self.rows, self.columns, -1, rows, columns)
        return tiles.transpose(2, 0, 3, 1, 4).reshape(-1, self.rows * rows, self.columns * columns)

    def back(self, whole: jax.Array) -> jax.Array:
        """The inverse of `there`."""
        shards = whole
        if self.devices > 1:
            count, rows, columns = whole.shape
            tiles = whole.reshape(count, self.rows, rows // self.rows, self.columns, columns // self.columns)
            tiles = tiles.transpose(1, 3, 0, 2, 4).reshape(-1, rows // self.rows, columns // self.columns)
            shards = lax.all_to_all(tiles, self.axes, 0, 0, tiled=True)
        if self.copies > 1:
            shards = lax.all_gather(shards, self.copies_over, axis=0, tiled=True)
        return shards


def _batch_dims(axes: Sequence[str]) -> int:
    """The number of leading dimensions whose rows are matrices by themselves."""
    return next(dim for dim, axis in enumerate(axes) if axis not in ROWS_OF_MATRICES)
