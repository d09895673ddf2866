"""`all_to_all` (DeepSpeed Ulysses): during attention the devices share the heads instead of the sequence."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.parallel import collectives
from megajax.parallel.context.strategy import Attended, ContextAttention
from megajax.parallel.context.token_order import as_sequence, as_stored


class OverHeads(ContextAttention):
    """Each device attends to all tokens, with a part of the heads. Without `zigzag` it holds consecutive tokens."""

    def attend(self, q, k, v, positions, sinks=None, bias_table=None, bias_distance=0) -> Attended:
        heads, copies = q.shape[2], self.devices // np.gcd(self.devices, k.shape[2])
        if copies > 1:  # fewer KV heads than devices: some devices have the same head
            k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))
        documents, ends = jax.tree.map(self._of_sequence, (positions.documents, positions.two_sided_ends))
        is_real = positions.is_real if self.scores.wants_largest else None
        is_real = jax.tree.map(self._of_sequence, is_real)
        q, k, v = (self._to_heads(a) for a in (q, k, v))
        first = lax.axis_index("context") * q.shape[2]  # of this device's heads
        sinks, bias_table = (
            a if a is None else lax.dynamic_slice_in_dim(a, first, q.shape[2]) for a in (sinks, bias_table)
        )
        positions = replace(positions, documents=documents, is_real=is_real, two_sided_ends=ends)
        out, largest = super().attend(q, k, v, positions, sinks, bias_table, bias_distance)
        if self.zigzag:
            out = as_stored(out, self.devices)
        out = collectives.all_to_all(out, "context", split_axis=1, concat_axis=2, tiled=True)
        return checkpoint_name(out, "exchanged"), among_heads(largest, first, heads)

    def _to_heads(self, a: jax.Array) -> jax.Array:
        """`[B, S / context, N, H]` of this device's tokens → `[B, S, N / context, H]` of its heads."""
        a = collectives.all_to_all(a, "context", split_axis=2, concat_axis=1, tiled=True)
        # The remat policies that keep matmuls keep arrays with this name too.
        return checkpoint_name(self._as_sequence(a), "exchanged")

    def _of_sequence(self, a: jax.Array) -> jax.Array:
        return self._as_sequence(collectives.all_gather(a, "context", axis=1, tiled=True))

    def _as_sequence(self, a: jax.Array) -> jax.Array:
        """`[B, S, ...]` in the devices' order → in the order of the sequence."""
        return as_sequence(a, self.devices) if self.zigzag else a


def among_heads(largest: jax.Array | None, first: jax.Array | int, heads: int) -> jax.Array | None:
    """`largest_score` of a device's heads, the first of which is `first` → of all `heads`, 0 for the others."""
    return None if largest is None else lax.dynamic_update_slice_in_dim(jnp.zeros(heads), largest, first, 0)
