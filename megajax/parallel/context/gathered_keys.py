"""`all_gather` (Llama 3): keys and values of the whole sequence on every device."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from megajax import ops
from megajax.model.comm import LatentKeys, TokenPositions
from megajax.ops.partial_attention import Mask, Part, Ranges, attend, attend_backward, merge
from megajax.ops.relative_bias import relative_bias
from megajax.parallel import collectives
from megajax.parallel.context.strategy import Attended, Keys, Linear, Sent, ToParts, heads_of, latent_gradients
from megajax.parallel.context.token_order import as_sequence, as_stored, chunk_starts, sequence_ranges, take_by_sequence


class GatheredContext(ToParts):
    def attend(self, q, k, v, positions, sinks=None, bias_table=None, bias_distance=0) -> Attended:
        if bias_table is None:
            return super().attend(q, k, v, positions, sinks)
        k, v = self._gather((k, v), positions)
        bias = relative_bias(bias_table, k.shape[1], bias_distance, self.causal)
        own = bias[:, positions.index[0]]  # all sequences are divided in the same way
        return ops.attention_of_rows(q, k, v, self._ranges(positions), own, self.scores), None

    def forward(self, q, kv, positions) -> Part:
        return self._to_all(q, kv, self._gather(kv, positions), positions)

    def backward(self, q, kv, positions, whole, dout) -> tuple[jax.Array, Keys]:
        def to_owners(g: jax.Array) -> jax.Array:
            return self._sums(self._as_stored(g.astype(whole[1].dtype), positions), 1)

        dq, local, of_sequence = self._to_all_backward(q, kv, self._gather(kv, positions), positions, whole, dout)
        dk, dv = (to_owners(g) for g in of_sequence)
        return dq, (dk, dv) if local is None else (dk + local[0], dv + local[1])

    def forward_latent(self, linear, q, keys, positions) -> Part:
        local = heads_of(linear, keys, (keys.latent, keys.rotary), keys.up)
        of_sequence = self._heads_of_sequence(linear, keys, positions, self._gather_latents(keys), keys.up)
        return self._to_all(q, local, of_sequence, positions)

    def backward_latent(self, linear, q, keys, positions, whole, dout) -> tuple[jax.Array, LatentKeys]:
        dtype = whole[1].dtype
        local, pull_local = jax.vjp(partial(heads_of, linear, keys), (keys.latent, keys.rotary), keys.up)
        heads_of_sequence = partial(self._heads_of_sequence, linear, keys, positions)
        of_sequence, pull_sequence = jax.vjp(heads_of_sequence, self._gather_latents(keys), keys.up)
        dq, down, dall = self._to_all_backward(q, local, of_sequence, positions, whole, dout)
        dsent, dup = pull_sequence(tuple(g.astype(a.dtype) for g, a in zip(dall, of_sequence, strict=True)))
        latent, rotary = (self._sums(g.astype(dtype).reshape(-1, *g.shape[2:]), 0) for g in dsent)
        if down is not None:
            of_own, up = pull_local(tuple(g.astype(a.dtype) for g, a in zip(down, local, strict=True)))
            latent, rotary, dup = latent + of_own[0], rotary + of_own[1], dup.astype(dtype) + up
        return dq, latent_gradients(keys, (latent, rotary), dup)

    def _to_all(self, q, local: Keys, of_sequence: Keys, positions: TokenPositions) -> Part:
        """Queries to this device's `local` keys and values, and to `of_sequence`, those of whole sequences in order."""
        scores, (k, v), (k_all, v_all) = self.scores, local, of_sequence
        if scores.implementation != "cudnn":
            return attend(scores, Mask("prefix", self._ranges(positions)), q, k_all, v_all)
        if not self.causal:
            return attend(scores, Mask("full"), q, k_all, v_all)
        # Each chunk attends to its own keys, and to the keys before it.
        (q, k, v), (k_all, v_all) = _by_chunk((q, k, v)), _for_both((k_all, v_all))
        one = attend(scores, Mask("causal"), q, k, v)
        out, lse = merge(one, attend(scores, Mask("prefix", _before_chunk(positions)), q, k_all, v_all))
        B, c, N, _ = q.shape
        lse = lse.reshape(B // 2, 2, N, c).swapaxes(1, 2)
        return out.reshape(B // 2, 2 * c, *out.shape[2:]), lse.reshape(B // 2, N, 2 * c)

    def _to_all_backward(
        self, q, local: Keys, of_sequence: Keys, positions: TokenPositions, whole: Part, dout
    ) -> tuple[jax.Array, Keys | None, Keys]:
        """(dq, gradients of `local` or None, gradients of `of_sequence`); those of both are added."""
        scores, (k_all, v_all) = self.scores, of_sequence
        if scores.implementation != "cudnn":
            mask = Mask("prefix", self._ranges(positions))
            dq, dk, dv = attend_backward(scores, mask, q, k_all, v_all, whole, dout)
            return dq, None, (dk, dv)
        if not self.causal:
            dq, dk, dv = attend_backward(scores, Mask("full"), q, k_all, v_all, whole, dout)
            return dq, None, (dk, dv)
        (q, k, v, dout), (k_all, v_all) = _by_chunk((q, *local, dout)), _for_both((k_all, v_all))
        out, lse = whole
        lse = lse.reshape(*lse.shape[:2], 2, -1).transpose(0, 2, 1, 3).reshape(len(q), -1, q.shape[1])
        seen = _by_chunk(out), lse
        of_own = attend_backward(scores, Mask("causal"), q, k, v, seen, dout)
        before = attend_backward(scores, Mask("prefix", _before_chunk(positions)), q, k_all, v_all, seen, dout)
        dq = (of_own[0].astype(lse.dtype) + before[0]).reshape(len(q) // 2, -1, *q.shape[2:])
        dk, dv = (g.reshape(len(g) // 2, -1, *g.shape[2:]) for g in of_own[1:])
        dk_all, dv_all = (g.reshape(len(g) // 2, 2, *g.shape[1:]).sum(1, dtype=lse.dtype) for g in before[1:])
        return dq, (dk, dv), (dk_all, dv_all)

    def _ranges(self, positions: TokenPositions) -> Ranges:
        """The keys that this device's queries see, among those of the whole sequence in order."""
        return sequence_ranges(positions, self.window, self.devices, self.causal)

    def _gather(self, kv: Keys, positions: TokenPositions) -> Keys:
        """This device's keys and values `[B, S / context, ...]` → those of whole sequences, in the sequence's order."""

        def one(a: jax.Array) -> jax.Array:
            return self._as_sequence(self._all(a, 1), positions)

        return one(kv[0]), one(kv[1])

    def _gather_latents(self, keys: LatentKeys) -> Sent:
        """The latents `[context, T / tensor, R]` and rotary keys `[context, B, S / context, ...]` of all devices."""
        return self._all(keys.latent[None], 0), self._all(keys.rotary[None], 0)

    def _all(self, a: jax.Array, axis: int) -> jax.Array:
        """The arrays of all devices, one after the other along an axis."""
        return collectives.all_gather(a, "context", axis=axis, tiled=True)

    def _sums(self, a: jax.Array, axis: int) -> jax.Array:
        """Transpose of `_all`: this device's part of the sum over all devices."""
        return collectives.psum_scatter(a, "context", scatter_dimension=axis, tiled=True)

    def _heads_of_sequence(
        self, linear: Linear, keys: LatentKeys, positions: TokenPositions, sent: Sent, up: jax.Array
    ) -> Keys:
        """Output of `_gather_latents` → keys and values of whole sequences, in their order."""
        latent, rotary = sent
        C, B, S, _ = rotary.shape

        def of_sequence(x: jax.Array, w: jax.Array) -> jax.Array:
            y = linear(x.reshape(-1, x.shape[-1]), w)  # [tensor · C · T / tensor, F], by device of `tensor` first
            y = y.reshape(-1, C, x.shape[1], y.shape[-1]).swapaxes(0, 1)  # [C, tensor, T / tensor, F]
            return y.reshape(C, B, S, -1).swapaxes(0, 1).reshape(B * C * S, -1)

        whole = rotary.swapaxes(0, 1).reshape(B, C * S, -1)
        k, v = heads_of(of_sequence, keys, (latent, whole), up)
        return self._as_sequence(k, positions), self._as_sequence(v, positions)

    def _as_sequence(self, a: jax.Array, positions: TokenPositions) -> jax.Array:
        """`[B, S, ...]` in the devices' order → in the order of the sequence."""
        if self.zigzag:
            return as_sequence(a, self.devices)
        return take_by_sequence(a, jnp.argsort(self._chunk_starts(positions), axis=1))

    def _as_stored(self, a: jax.Array, positions: TokenPositions) -> jax.Array:
        """`[B, S, ...]` in the order of the sequence → in the devices' order."""
        if self.zigzag:
            return as_stored(a, self.devices)
        order = jnp.argsort(jnp.argsort(self._chunk_starts(positions), axis=1), axis=1)
        return take_by_sequence(a, order)

    def _chunk_starts(self, positions: TokenPositions) -> jax.Array:
        """The first indices of all chunks of each sequence in the devices' order, `[B, chunks]`."""
        assert positions.chunks is not None
        return chunk_starts(positions.chunks)


def _before_chunk(positions: TokenPositions) -> Ranges:
    """The ranges of all keys before each query's chunk, `[2B, c]`."""
    first = _by_chunk(positions.index)[:, :1]
    end = jnp.broadcast_to(first, _by_chunk(positions.index).shape)
    return jnp.zeros_like(end), end


def _by_chunk(tree: Any) -> Any:
    """`[B, 2c, ...]` → `[2B, c, ...]`."""
    return jax.tree.map(lambda a: a.reshape(2 * a.shape[0], a.shape[1] // 2, *a.shape[2:]), tree)


def _for_both(tree: Any) -> Any:
    """`[B, S, ...]` → `[2B, S, ...]`: each sequence for both chunks of its queries."""
    return jax.tree.map(lambda a: jnp.repeat(a, 2, axis=0), tree)
