"""A stage's stacked arrays: which rows hold which layers, and the way from rows to layers and back."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.config.segments import Segment
from megajax.sharding import EMPTY


class Rows:
    """The layers of one kind of block, or all, in arrays `[R·n, ...]` of one stage: n rows in each of R rounds.

    `table [P, R, slots]` says which layer lies in which slot (`sharding.stored_layers`), `slots` which n of them are
    these layers'. Where a segment has one loop and the stage one round, a layer's array has no leading dimension, else
    `[R·loops, ...]`.
    """

    def __init__(self, table: np.ndarray, slots: Sequence[int]):
        self.slots, self.rounds = list(slots), table.shape[1]
        own = table[:, :, self.slots]
        self.layers = np.unique(own[own != EMPTY])
        # The row among those of these layers that lies in each slot; [P, R, n]
        self.table = np.where(own == EMPTY, EMPTY, np.searchsorted(self.layers, own))
        self.filled = (self.table != EMPTY).reshape(len(table), -1)  # [P, R·n]

    def indices_in_body(self, segment: Segment) -> list[int]:
        """Which layers of a segment's body are of these."""
        return [slot - segment.start for slot in self.slots if 0 <= slot - segment.start < segment.unroll]

    def copies(self, segment: Segment) -> int:
        """How many layers share one place in a segment's body: the length of their arrays' leading dimension."""
        return self.rounds * segment.loops

    def layer_of(self, stacked: jax.Array, segment: Segment, j: int) -> jax.Array:
        """Of `[R·n, ...]` the j-th layers of the bodies of a segment's loops, `[R·loops, ...]` or `[...]`."""
        places = self.indices_in_body(segment)
        start = sum(slot < segment.start for slot in self.slots)
        w = stacked.reshape(self.rounds, -1, *stacked.shape[1:])
        w = lax.slice_in_dim(w, start, start + segment.loops * len(places), axis=1)
        w = w.reshape(self.copies(segment), len(places), *stacked.shape[1:])[:, places.index(j)]
        return w[0] if len(w) == 1 else w

    def first_row(self, segment: Segment, j: int) -> tuple[int, int]:
        """(row, step) of one stage without rounds: the j-th layer of loop i lies in row + i · step."""
        places = self.indices_in_body(segment)
        return sum(slot < segment.start for slot in self.slots) + places.index(j), len(places)

    def stack(self, layers: Sequence[jax.Array], segment: Segment) -> jax.Array:
        """These layers of a segment's body in order → `[R · count, ...]`."""
        if self.copies(segment) == 1:
            return _stacked(layers)
        stacked = jnp.stack(layers, axis=1)
        return stacked.reshape(-1, *stacked.shape[2:])

    def join(self, segments: Sequence[jax.Array]) -> jax.Array:
        """`[R · count, ...]` of each segment that has some of these layers → `[R·n, ...]`."""
        if len(segments) == 1:
            return segments[0]
        if self.rounds == 1:  # layer by layer: of parts with several layers XLA would write a joined copy
            return _stacked([layer for part in segments for layer in part])
        rounds = [part.reshape(self.rounds, -1, *part.shape[1:]) for part in segments]
        return jnp.concatenate(rounds, axis=1).reshape(-1, *segments[0].shape[1:])

    def of_stage[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[L, ...]` of all these layers → `[R·n, ...]` of this stage's rows."""
        if len(self.table) == 1:
            return arrays
        rows = jnp.asarray(np.maximum(self.table, 0).reshape(len(self.table), -1))[lax.axis_index("pipeline")]
        return jax.tree.map(lambda a: a[rows], arrays)

    def of_all_layers[Arrays](self, arrays: Arrays) -> Arrays:
        """Arrays `[R·n, ...]` of this stage's rows, none negative → `[L, ...]` of all these layers."""
        if len(self.table) == 1:
            return arrays
        rows = jnp.asarray(self.table.reshape(len(self.table), -1))[lax.axis_index("pipeline")]
        L = len(self.layers)
        rows = jnp.where(rows == EMPTY, L, rows)  # out of bounds: dropped
        placed = jax.tree.map(lambda a: jnp.zeros((L, *a.shape[1:]), a.dtype).at[rows].set(a, mode="drop"), arrays)
        return lax.pmax(placed, "pipeline")

    def without_empty(self, gradient: jax.Array) -> jax.Array:
        """`[R·n, ...]`, zeros in empty slots: a bias there, added to the residual stream, has a gradient."""
        if self.filled.all():
            return gradient
        filled = self.filled.reshape(*self.filled.shape, *(1,) * (gradient.ndim - 1))
        return jnp.where(jnp.asarray(filled)[lax.axis_index("pipeline")], gradient, 0)


def _stacked(layers: Sequence[jax.Array]) -> jax.Array:
    """`jnp.stack`, of few layers as a selection.

    Where XLA joins up to four arrays, it makes a kernel for each of the optimizer's three results, which reads all
    inputs again, and copies one of these; from five on, and of a selection, it makes one kernel.
    """
    if not 1 < len(layers) <= 4:
        return jnp.stack(layers)
    index = jnp.arange(len(layers)).reshape(-1, *(1,) * layers[0].ndim)
    stacked = layers[0][None]
    for i, layer in enumerate(layers[1:], start=1):
        stacked = jnp.where(index < i, stacked, layer[None])
    return stacked
