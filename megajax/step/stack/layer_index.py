"""A stage's stacked arrays: the layer in each row, and conversions between rows and layers."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.layout.segments import LayerSegment
from megajax.ops.barriers import not_repeated
from megajax.parallel import collectives
from megajax.sharding import EMPTY


class LayerIndex:
    """The layers of one kind of block, or all, in arrays `[R·n, ...]` of a stage with R virtual stages of n rows each.

    `layer_table [P, R, slots]` has the layer in each slot (`sharding.stored_layers`); `slots` are the n slots of these
    layers. A layer's array is `[R·loops, ...]`; with one loop and one virtual stage it has no leading dimension.
    """

    def __init__(self, layer_table: np.ndarray, slots: Sequence[int]):
        self.slots, (self.stages, self.virtual_stages) = list(slots), layer_table.shape[:2]
        own = layer_table[:, :, self.slots]
        self.layers = np.unique(own[own != EMPTY])
        # For each slot the index of its layer in `self.layers`; [P, R, n]
        self.indices = np.where(own == EMPTY, EMPTY, np.searchsorted(self.layers, own))
        self.is_real_layer = (self.indices != EMPTY).reshape(self.stages, -1)  # [P, R·n]

    def indices_in_body(self, segment: LayerSegment) -> list[int]:
        """The indices of these layers in a segment's body."""
        return [slot - segment.start for slot in self.slots if 0 <= slot - segment.start < segment.layers_per_iteration]

    def copies(self, segment: LayerSegment) -> int:
        """The number of layers at one index of a segment's body: the length of their arrays' leading dimension."""
        return self.virtual_stages * segment.iterations

    def layer_of(self, stacked: jax.Array, segment: LayerSegment, j: int) -> jax.Array:
        """`[R·n, ...]` → the j-th layer of a segment's body in all its loops, `[R·loops, ...]` or `[...]`."""
        indices = self.indices_in_body(segment)
        start = sum(slot < segment.start for slot in self.slots)
        w = stacked.reshape(self.virtual_stages, -1, *stacked.shape[1:])
        w = lax.slice_in_dim(w, start, start + segment.iterations * len(indices), axis=1)
        w = w.reshape(self.copies(segment), len(indices), *stacked.shape[1:])[:, indices.index(j)]
        return w[0] if len(w) == 1 else w

    def first_row(self, segment: LayerSegment, j: int) -> tuple[int, int]:
        """(row, step) with one stage and one virtual stage: the j-th layer of loop i is in row + i · step."""
        indices = self.indices_in_body(segment)
        return sum(slot < segment.start for slot in self.slots) + indices.index(j), len(indices)

    def stack(self, layers: Sequence[jax.Array], segment: LayerSegment) -> jax.Array:
        """These layers of a segment's body in order → `[R · count, ...]`."""
        if self.copies(segment) == 1:
            return _joined([layer[None] for layer in layers])
        stacked = jnp.stack(layers, axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    def join(self, segments: Sequence[jax.Array]) -> jax.Array:
        """`[R · count, ...]` for each segment that has any of these layers → `[R·n, ...]`."""
        if len(segments) == 1:
            return segments[0]
        if self.virtual_stages == 1:
            return _joined(segments)
        parts = [part.reshape(self.virtual_stages, -1, *part.shape[1:]) for part in segments]
        return jnp.concatenate(parts, axis=1).reshape(-1, *segments[0].shape[1:])

    def of_stage[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[L, ...]` of all these layers → `[R·n, ...]` of this stage's rows."""
        if self.stages == 1:
            return arrays
        rows = jnp.asarray(np.maximum(self.indices, 0).reshape(self.stages, -1))[lax.axis_index("pipeline")]
        return jax.tree.map(lambda a: a[rows], arrays)

    def of_all_layers[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[R·n, ...]` of this stage's rows, without negative values → `[L, ...]` of all these layers."""
        if self.stages == 1:
            return arrays
        rows = jnp.asarray(self.indices.reshape(self.stages, -1))[lax.axis_index("pipeline")]
        L = len(self.layers)
        rows = jnp.where(rows == EMPTY, L, rows)  # out of bounds: dropped
        placed = jax.tree.map(lambda a: jnp.zeros((L, *a.shape[1:]), a.dtype).at[rows].set(a, mode="drop"), arrays)
        return collectives.pmax(placed, "pipeline")

    def without_empty(self, gradient: jax.Array) -> jax.Array:
        """`[R·n, ...]` with zeros in empty slots, where a bias of the residual stream has a gradient too."""
        if self.is_real_layer.all():
            return gradient
        is_real_layer = self.is_real_layer.reshape(*self.is_real_layer.shape, *(1,) * (gradient.ndim - 1))
        return jnp.where(jnp.asarray(is_real_layer)[lax.axis_index("pipeline")], gradient, 0)


def _joined(parts: Sequence[jax.Array]) -> jax.Array:
    """`jnp.concatenate` in a form with which the optimizer's update is one kernel.

    For two to four arrays XLA makes one kernel for each of the update's three results. Each kernel reads all inputs
    again, and XLA copies one result or two. For a selection, and for five or more arrays, it makes one kernel. So a few
    layers are selected, and those of a few longer arrays are sliced at an index that XLA does not know: it would join
    neighbours from the same array again.
    """
    if not 1 < len(parts) <= 4:
        return jnp.concatenate(parts)
    rows = sum(map(len, parts))
    if rows > 4:
        zero = not_repeated(jnp.int32(0))
        layers = [lax.dynamic_slice_in_dim(part, zero + i, 1) for part in parts for i in range(len(part))]
        return jnp.concatenate(layers)
    index = jnp.arange(rows).reshape(-1, *(1,) * (parts[0].ndim - 1))
    layers = [part[i : i + 1] for part in parts for i in range(len(part))]
    joined = layers[0]
    for i, layer in enumerate(layers[1:], start=1):
        joined = jnp.where(index < i, joined, layer)
    return joined
