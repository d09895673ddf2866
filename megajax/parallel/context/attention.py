"""Attention over the `context` axis: a device has some chunks of each sequence (token_order.py), and its queries see
keys of other devices. Three strategies (`kernels.context`):

- `ring` (Liu et al. 2023): keys and values are sent around the ring; each device computes attention to the keys that it
  has while the next keys arrive.
- `all_gather` (Llama 3): keys and values of the whole sequence on every device.
- `all_to_all` (DeepSpeed Ulysses): during attention the devices share the heads instead of the sequence.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax import ops
from megajax.model.comm import TokenPositions
from megajax.ops.partial_attention import (
    Part,
    Ranges,
    Scores,
    add_sinks,
    attend,
    attend_backward,
    backward_with_sinks,
    largest_score,
    merge,
)
from megajax.parallel import collectives
from megajax.parallel.context.ring import Block, Strategy, Work, go_round, half_of, in_half
from megajax.parallel.context.token_order import chunk_order, key_ranges, sequence_ranges


def attention(
    strategy: str,
    context: int,
    scores: Scores,
    window: int | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    positions: TokenPositions,
    sinks: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Causal attention of this device's queries: `q [B, S / context, N, H]`, `k` and `v` `[B, S / context, K, H]`.

    Values may have another width, except with "pallas". `sinks [N]` are the same on all devices; each device
    returns its share of their gradient. The second result is `largest_score`, 0 for heads of other devices.
    """
    if strategy == "all_to_all":
        return _all_to_all(context, scores, window, q, k, v, positions, sinks)
    return _distributed(
        Strategy(strategy, context, scores, window, positions.chunks is None), q, k, v, positions, sinks
    )


Keys = tuple[jax.Array, jax.Array]  # keys and values
Sent = tuple[jax.Array, jax.Array]  # the same, or latents and rotary keys


# Over the heads


def _all_to_all(
    context: int, scores: Scores, window: int | None, q, k, v, positions: TokenPositions, sinks
) -> tuple[jax.Array, jax.Array | None]:
    heads, copies = q.shape[2], context // np.gcd(context, k.shape[2])
    if copies > 1:  # fewer KV heads than devices: some devices have the same head
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))

    # The remat policies that keep matmuls keep arrays with this name too.
    def to_heads(a: jax.Array) -> jax.Array:
        a = collectives.all_to_all(a, "context", split_axis=2, concat_axis=1, tiled=True)
        return checkpoint_name(_to_sequence(a, context), "exchanged")

    def of_sequence(a: jax.Array | None) -> jax.Array | None:
        return a if a is None else _to_sequence(collectives.all_gather(a, "context", axis=1, tiled=True), context)

    starts = of_sequence(positions.document_starts)
    is_real = of_sequence(positions.is_real) if scores.measured else None
    q, k, v = (to_heads(a) for a in (q, k, v))
    first = lax.axis_index("context") * q.shape[2]  # of this device's heads
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, first, q.shape[2])
    settings = {"window": window, "document_starts": starts, "sinks": sinks, "is_real": is_real, **vars(scores)}
    out, largest = ops.measured_attention(q, k, v, **settings)
    out = collectives.all_to_all(_to_stored(out, context), "context", split_axis=1, concat_axis=2, tiled=True)
    return checkpoint_name(out, "exchanged"), among_heads(largest, first, heads)


def among_heads(largest: jax.Array | None, first: jax.Array | int, heads: int) -> jax.Array | None:
    """`largest_score` of a device's heads, the first of which is `first` → of all `heads`, 0 for the others."""
    return None if largest is None else lax.dynamic_update_slice_in_dim(jnp.zeros(heads), largest, first, 0)


def _to_sequence(a: jax.Array, context: int) -> jax.Array:
    """`[B, S, ...]` in the devices' order → in the order of the sequence."""
    return _take_chunks(a, np.argsort(chunk_order(context)))


def _to_stored(a: jax.Array, context: int) -> jax.Array:
    return _take_chunks(a, chunk_order(context))


def _take_chunks(a: jax.Array, chunks: np.ndarray) -> jax.Array:
    pieces = jnp.split(a, len(chunks), axis=1)
    return jnp.concatenate([pieces[chunk] for chunk in chunks], axis=1)


# Over the sequence


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distributed(strategy: Strategy, q, k, v, positions: TokenPositions, sinks: jax.Array | None):
    return _distributed_forward(strategy, q, k, v, positions, sinks)[0]


def _distributed_forward(strategy: Strategy, q, k, v, positions: TokenPositions, sinks: jax.Array | None):
    forward = {"ring": _ring, "all_gather": _gathered}[strategy.name]
    out, lse = forward(strategy, q, k, v, positions)
    largest = largest_score(strategy.scores, lse, positions.is_real)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # The remat policies that keep attention keep these residuals by name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(q.dtype), lse))
    return (out, largest), (q, k, v, positions, sinks, out, lse)


def _distributed_backward(strategy: Strategy, saved, gradients_of):
    dout, _ = gradients_of
    q, k, v, positions, sinks, out, lse = saved
    backward = {"ring": _ring_backward, "all_gather": _gathered_backward}[strategy.name]
    gradients, dsinks = backward_with_sinks(partial(backward, strategy, q, k, v, positions), sinks, (out, lse), dout)
    return *(g.astype(q.dtype) for g in gradients), None, dsinks


_distributed.defvjp(_distributed_forward, _distributed_backward)


# The ring


def _ring(strategy: Strategy, q, k, v, positions: TokenPositions) -> Part:
    return ring_attention(strategy, q, (k, v), lambda kv: kv, positions)


def ring_attention(strategy: Strategy, q, sent: Sent, heads: Callable[[Sent], Keys], positions: TokenPositions) -> Part:
    """Attention to the keys of all devices; `sent` goes around, and `heads` makes keys and values of it."""
    scores, rank, ranges = strategy.scores, lax.axis_index("context"), visible_ranges(strategy, positions)

    def start(part):
        return None, (part[0].astype(part[1].dtype), part[1])

    def compute(other, sent):
        kv, seen, parts = heads(sent), ranges(other), []
        for block in Block.of(scores, rank, other):
            keys, values = half_of(kv, block.k_half)
            parts.append(attend(scores, "full", half_of(q, block.q_half), keys, values, seen))
        return parts

    def combine(other, parts, moving, whole):
        for block, (out, lse) in zip(Block.of(scores, rank, other), parts, strict=True):
            whole = merge(whole, (in_half(out, block.q_half), in_half(lse, block.q_half, 2, -jnp.inf)))
        return moving, whole

    def own():
        return attend(scores, "causal", q, *heads(sent), ranges(rank))

    return go_round(strategy, q.shape[1], sent, Work(own, start, compute, combine))[1]


def _ring_backward(strategy: Strategy, q, k, v, positions: TokenPositions, whole: Part, dout):
    scores, rank, ranges = strategy.scores, lax.axis_index("context"), visible_ranges(strategy, positions)

    def start(gradients):
        dq, dk, dv = (g.astype(whole[1].dtype) for g in gradients)
        return (dk, dv), dq

    def compute(other, kv):
        return block_gradients(strategy, other, ranges(other), q, kv, whole, dout)

    def combine(other, gradients, dkv, dq):
        dk, dv = dkv
        for block, one in zip(Block.of(scores, rank, other), gradients, strict=True):
            dq, dk, dv = (
                total + in_half(g, half).astype(total.dtype)
                for total, g, half in zip((dq, dk, dv), one, (block.q_half, block.k_half, block.k_half), strict=True)
            )
        return (dk, dv), dq

    own = partial(attend_backward, scores, "causal", q, k, v, ranges(rank), whole, dout)
    (dk, dv), dq = go_round(strategy, q.shape[1], (k, v), Work(own, start, compute, combine))
    return dq, dk, dv


def block_gradients(
    strategy: Strategy, other, seen: Ranges | None, q, kv: Keys, whole: Part, dout
) -> list[tuple[jax.Array, jax.Array, jax.Array]]:
    """(dq, dk, dv) of each block of scores with the keys and values of the device `other`."""
    scores, gradients = strategy.scores, []
    lse = whole[1].swapaxes(1, 2)  # [B, 2c, N]
    for block in Block.of(scores, lax.axis_index("context"), other):
        queries, outs, lses, douts = half_of((q, whole[0], lse, dout), block.q_half)
        keys, values = half_of(kv, block.k_half)
        part = outs, lses.swapaxes(1, 2)
        gradients.append(attend_backward(scores, "full", queries, keys, values, seen, part, douts))
    return gradients


def visible_ranges(strategy: Strategy, positions: TokenPositions) -> Callable[[jax.Array], Ranges | None]:
    """Device of `context` → the range of its keys that each of this device's queries sees; None with cuDNN's blocks."""
    if strategy.scores.implementation == "cudnn":
        return lambda rank: None
    return lambda rank: key_ranges(positions, strategy.window, rank, strategy.context)


# All keys on every device


def _gathered(strategy: Strategy, q, k, v, positions: TokenPositions) -> Part:
    return attend_to_all(strategy, q, (k, v), _gather(strategy, (k, v), positions), positions)


def _gathered_backward(strategy: Strategy, q, k, v, positions: TokenPositions, whole: Part, dout):
    def to_owners(g: jax.Array) -> jax.Array:
        g = _as_stored(strategy, g.astype(whole[1].dtype), positions)
        return collectives.psum_scatter(g, "context", scatter_dimension=1, tiled=True)

    of_all = _gather(strategy, (k, v), positions)
    dq, own, theirs = attend_to_all_backward(strategy, q, (k, v), of_all, positions, whole, dout)
    gradients = [to_owners(g) for g in theirs]
    return dq, *(gradients if own is None else [g + ours for g, ours in zip(gradients, own, strict=True)])


def attend_to_all(strategy: Strategy, q, own: Keys, of_all: Keys, positions: TokenPositions) -> Part:
    """This device's queries to its `own` keys and values and those of whole sequences, `of_all`, in their order."""
    scores, (k, v), (k_all, v_all) = strategy.scores, own, of_all
    if scores.implementation != "cudnn":
        return attend(scores, "prefix", q, k_all, v_all, sequence_ranges(positions, strategy.window))
    # Each chunk attends to its own keys, and to the keys before it.
    (q, k, v), (k_all, v_all) = _by_chunk((q, k, v)), _for_both((k_all, v_all))
    one = attend(scores, "causal", q, k, v, None)
    out, lse = merge(one, attend(scores, "prefix", q, k_all, v_all, _before_chunk(positions)))
    B, c, N, H = q.shape
    lse = lse.reshape(B // 2, 2, N, c).swapaxes(1, 2)
    return out.reshape(B // 2, 2 * c, N, H), lse.reshape(B // 2, N, 2 * c)


def attend_to_all_backward(
    strategy: Strategy, q, own: Keys, of_all: Keys, positions: TokenPositions, whole: Part, dout
) -> tuple[jax.Array, Keys | None, Keys]:
    """(dq, gradients of `own` or None, gradients of `of_all`); those of both are added."""
    scores, (k_all, v_all) = strategy.scores, of_all
    if scores.implementation != "cudnn":
        ranges = sequence_ranges(positions, strategy.window)
        dq, dk, dv = attend_backward(scores, "prefix", q, k_all, v_all, ranges, whole, dout)
        return dq, None, (dk, dv)
    (q, k, v, dout), (k_all, v_all) = _by_chunk((q, *own, dout)), _for_both((k_all, v_all))
    out, lse = whole
    lse = lse.reshape(*lse.shape[:2], 2, -1).transpose(0, 2, 1, 3).reshape(len(q), -1, q.shape[1])
    seen = _by_chunk(out), lse
    of_own = attend_backward(scores, "causal", q, k, v, None, seen, dout)
    before = attend_backward(scores, "prefix", q, k_all, v_all, _before_chunk(positions), seen, dout)
    dq = (of_own[0].astype(lse.dtype) + before[0]).reshape(dout.shape[0] // 2, -1, *dout.shape[2:])
    dk, dv = (g.reshape(len(g) // 2, -1, *g.shape[2:]) for g in of_own[1:])
    dk_all, dv_all = (g.reshape(len(g) // 2, 2, *g.shape[1:]).sum(1, dtype=lse.dtype) for g in before[1:])
    return dq, (dk, dv), (dk_all, dv_all)


def _gather(strategy: Strategy, arrays: Any, positions: TokenPositions) -> Any:
    """This device's keys and values `[B, S / context, ...]` → those of whole sequences, in the sequence's order."""

    def one(a: jax.Array) -> jax.Array:
        return as_sequence(strategy, collectives.all_gather(a, "context", axis=1, tiled=True), positions)

    return jax.tree.map(one, arrays)


def as_sequence(strategy: Strategy, a: jax.Array, positions: TokenPositions) -> jax.Array:
    """`[B, S, ...]` in the devices' order → in the order of the sequence."""
    if strategy.zigzag:
        return _to_sequence(a, strategy.context)
    return _take_by_sequence(a, jnp.argsort(_chunk_starts(positions), axis=1))


def _as_stored(strategy: Strategy, a: jax.Array, positions: TokenPositions) -> jax.Array:
    """`[B, S, ...]` in the order of the sequence → in the devices' order."""
    if strategy.zigzag:
        return _to_stored(a, strategy.context)
    order = jnp.argsort(jnp.argsort(_chunk_starts(positions), axis=1), axis=1)
    return _take_by_sequence(a, order)


def _chunk_starts(positions: TokenPositions) -> jax.Array:
    """The first indices of all chunks of each sequence in the devices' order, `[B, chunks]`."""
    assert positions.chunks is not None
    return positions.chunks.swapaxes(0, 1).reshape(positions.index.shape[0], -1)


def _take_by_sequence(a: jax.Array, chunks: jax.Array) -> jax.Array:
    """The chunks of `[B, S, ...]` in each sequence's own order `[B, chunks]`."""
    pieces = a.reshape(*chunks.shape, -1)
    return jnp.take_along_axis(pieces, chunks[..., None], axis=1).reshape(a.shape)


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
