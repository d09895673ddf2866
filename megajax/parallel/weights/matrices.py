"""Whole matrices of the layers for an optimizer that needs them: an all-to-all there and one back.

A matrix is stored in shards: its rows over the axes of storage, its columns over `tensor`, or the other way round. The
devices that store a matrix distribute the matrices among themselves: an all-to-all gives each device some of them
whole, in the compute dtype, and a second one returns the results to the shards. Where devices hold copies of a shard,
each computes a part of the matrices and gathers the others. So each matrix is on one device only, and its result does
not depend on the mesh. docs/optimizers.md counts the bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from megajax.mesh import mesh_sizes
from megajax.sharding import Placement

ROWS_OF_MATRICES = ("layers", "modules", "experts")  # leading logical axes: each row has matrices of its own
HEADS = ("heads", "kv_heads")
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

    `inputs` and `outputs` are their true size, without the padding of storage. `transposed`: they are turned, so that
    the rows are not more than the columns; in a square matrix the rows are those that storage divides.
    """

    inputs: int
    outputs: int
    shape: Shape
    count: int  # matrices of which a device has shards
    transposed: bool
    placement: Placement
    _heads: int | None  # the dimension of heads that are matrices by themselves

    @classmethod
    def of(cls, placement: Placement, sizes: Mapping[str, int], per_head: bool) -> "MatrixLayout":
        """The layout of a parameter; `per_head`: heads of a projection's output are matrices by themselves."""
        axes, first = placement.axes, _batch_dims(placement.axes)
        heads = next((dim for dim, axis in enumerate(axes) if axis in HEADS), None)
        alone = heads if per_head and heads is not None and heads > first else None
        divided, stored, true = [], [], []  # of the matrix's two dimensions
        for dim in range(first, len(axes)):
            entry = placement.spec[dim] or ()
            over = tuple(a for a in ((entry,) if isinstance(entry, str) else entry) if sizes[a] > 1)
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
        transposed = (stored[0], stores_columns) > (stored[1], False)
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


def on_whole_matrices(
    compute: Callable[[jax.Array], jax.Array], layouts: Mapping[str, MatrixLayout], mesh: Mesh, dtype: Any
) -> Callable[[dict[str, jax.Array]], dict[str, jax.Array]]:
    """Stored arrays by name → `compute` of their matrices `[k, rows, columns]` in `dtype`, in stored form.

    `compute` keeps shape and dtype, treats each matrix by itself, and maps zeros to zeros; the storage's padding is
    zeros, and so are the rows of empty layer slots.
    """
    sizes = mesh_sizes(mesh)

    def local(shards: dict[str, jax.Array]) -> dict[str, jax.Array]:
        out: dict[str, jax.Array] = {}
        done = None
        for shape, names in groups(layouts).items():
            matrices = [layouts[name].matrices(shards[name]).astype(dtype) for name in names]
            if done is not None:  # independent collectives must not overlap: devices may order them differently
                matrices, done = lax.optimization_barrier((matrices, done))
            done = _group(compute, shape, sizes, jnp.concatenate(matrices))
            parts = jnp.split(done, [*accumulate(len(m) for m in matrices)][:-1])
            for name, part in zip(names, parts, strict=True):
                out[name] = layouts[name].shard(part, shards[name].shape)
        return out

    specs = {name: layout.placement.spec for name, layout in layouts.items()}
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)


def groups(layouts: Mapping[str, MatrixLayout]) -> dict[Shape, list[str]]:
    """Names by the shape of their matrices, which are computed together."""
    found: dict[Shape, list[str]] = {}
    for name, layout in layouts.items():
        found.setdefault(layout.shape, []).append(name)
    return found


def rounds(shape: Shape, sizes: Mapping[str, int], count: int) -> tuple[int, int]:
    """(rounds, matrices per device and round) for `count` matrices of a shape."""
    devices = math.prod(sizes[axis] for axis in (*shape.over_rows, *shape.over_columns, *shape.copies_over))
    number = -(-count // (devices * max(1, CHUNK // (shape.rows * shape.columns))))
    return number, -(-count // (devices * number))


def _group(compute: Callable, shape: Shape, sizes: Mapping[str, int], matrices: jax.Array) -> jax.Array:
    """`compute` of the matrices of one shape, from and to this device's shards `[m, rows, columns]`.

    In each round every device computes k matrices, while the next round's arrive and the last round's return.
    """
    exchange = _Exchange(shape, sizes)
    count, devices = len(matrices), exchange.devices * exchange.copies
    number, each = rounds(shape, sizes, count)
    padding = number * each * devices - count
    # Behind a barrier: XLA's CPU compiler makes an all-to-all of constants and others that its own verifier refuses.
    rounded = lax.optimization_barrier(jnp.pad(matrices, ((0, padding), (0, 0), (0, 0))))
    rounded = rounded.reshape(number, devices * each, *matrices.shape[1:])
    if number == 1:
        return exchange.back(compute(exchange.there(rounded[0])))[:count]
    if devices == 1:
        return lax.map(compute, rounded).reshape(-1, *matrices.shape[1:])[:count]

    def body(carry, following):
        whole, computed = carry
        returned = exchange.back(computed)
        following, returned = lax.optimization_barrier((following, returned))
        return (exchange.there(following), compute(whole)), returned

    first = exchange.there(rounded[0])
    # The first round returns zeros, and the last one receives the first round's matrices again: both are dropped.
    (_, last), returned = lax.scan(body, (first, jnp.zeros_like(first)), jnp.roll(rounded, -1, axis=0))
    returned = jnp.concatenate([returned[1:], exchange.back(last)[None]])
    return returned.reshape(-1, *matrices.shape[1:])[:count]


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
            own = len(shards) // self.copies
            shards = lax.dynamic_slice_in_dim(shards, lax.axis_index(self.copies_over) * own, own)
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
