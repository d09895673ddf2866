"""`all_to_all+ring` (Fang & Zhao 2024): neighbours on `context` share the heads, and keys go around among the groups.

Group j of h neighbours has the chunks of device j of `context` / h devices: its tokens are those of a longer chunk in
zig-zag, or of chunks that were distributed by work. So an all-to-all inside each group, then a ring of the devices that
have the same heads, are attention to all keys.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.model.comm import TokenPositions
from megajax.parallel import collectives
from megajax.parallel.context.heads import among_heads
from megajax.parallel.context.ring_attention import Ring
from megajax.parallel.context.strategy import Attended, ContextAttention
from megajax.parallel.context.token_order import as_sequence, as_stored, chunk_starts, take_by_sequence


@dataclass(frozen=True)
class HeadsAndRing(ContextAttention):
    """Each device attends to the tokens of its group, and to those of all others, with a part of the heads."""

    group: int = 1  # devices that share the heads; it divides the heads, the KV heads and `devices`

    def attend(self, q, k, v, positions, sinks=None, bias_table=None, bias_distance=0) -> Attended:
        heads = q.shape[2]
        chunks, order = positions.chunks, None
        if chunks is not None:
            chunks = jax.vmap(chunk_starts)(chunks.reshape(-1, self.group, *chunks.shape[1:]))  # [groups, B, chunks]
            own = lax.dynamic_index_in_dim(chunks, lax.axis_index("context") // self.group, keepdims=False)
            order = jnp.argsort(own, axis=1)
        of_group = replace(self._of_group(positions, order), chunks=chunks)
        q, k, v = (self._to_heads(a, order) for a in (q, k, v))
        first = lax.axis_index("context") % self.group * q.shape[2]  # of this device's heads
        if sinks is not None:
            sinks = lax.dynamic_slice_in_dim(sinks, first, q.shape[2])
        around = self.devices // self.group
        ring = Ring(around, self.scores, self.window, self.zigzag, self.causal, stride=self.group)
        out, largest = ring.attend(q, k, v, of_group, sinks, bias_table)
        out = as_stored(out, self.group) if order is None else take_by_sequence(out, jnp.argsort(order, axis=1))
        out = self._exchange(out, split_axis=1, concat_axis=2)
        return checkpoint_name(out, "exchanged"), among_heads(largest, first, heads)

    def _to_heads(self, a: jax.Array, order: jax.Array | None) -> jax.Array:
        """`[B, S / context, N, H]` of this device's tokens → `[B, group · S / context, N / group, H]` of its heads."""
        # The remat policies that keep matmuls keep arrays with this name too.
        return checkpoint_name(self._in_order(self._exchange(a, split_axis=2, concat_axis=1), order), "exchanged")

    def _of_group(self, positions: TokenPositions, order: jax.Array | None) -> TokenPositions:
        """The positions of the group's tokens, in the order of the sequence."""

        def gathered(a: jax.Array) -> jax.Array:
            whole = collectives.all_gather(a, "context", axis=1, tiled=True, axis_index_groups=self._groups)
            return self._in_order(whole, order)

        by_token = positions.index, positions.documents, positions.is_real, positions.two_sided_ends
        index, documents, is_real, ends = jax.tree.map(gathered, by_token)
        return replace(positions, index=index, documents=documents, is_real=is_real, two_sided_ends=ends)

    def _in_order(self, a: jax.Array, order: jax.Array | None) -> jax.Array:
        """The group's tokens in the devices' order → in the order of the sequence."""
        return as_sequence(a, self.group) if order is None else take_by_sequence(a, order)

    def _exchange(self, a: jax.Array, split_axis: int, concat_axis: int) -> jax.Array:
        to = {"split_axis": split_axis, "concat_axis": concat_axis, "tiled": True, "axis_index_groups": self._groups}
        return collectives.all_to_all(a, "context", **to)

    @property
    def _groups(self) -> list[list[int]]:
        return [list(range(first, first + self.group)) for first in range(0, self.devices, self.group)]
