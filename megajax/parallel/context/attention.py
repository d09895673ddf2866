"""Attention over the `context` axis: a device has some chunks of each sequence (token_order.py), and its queries see
keys of other devices. Three strategies (`kernels.context`):

- `ring` (Liu et al. 2023): keys and values are sent around the ring; each device computes attention to the keys that it
  has while the next keys arrive.
- `all_gather` (Llama 3): keys and values of the whole sequence on every device.
- `all_to_all` (DeepSpeed Ulysses): during attention the devices share the heads instead of the sequence.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
    merge,
)
from megajax.parallel.context.token_order import chunk_order, key_ranges, sequence_ranges

UNROLLED_STEPS = 7  # with more steps around the ring they run in a loop


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
) -> jax.Array:
    """Causal attention of this device's queries: `q [B, S / context, N, H]`, `k` and `v` `[B, S / context, K, H]`.

    With the reference kernel values may have another width. `sinks [N]` are the same on all devices; each device
    returns its share of their gradient.
    """
    if strategy == "all_to_all":
        return _all_to_all(context, scores, window, q, k, v, positions, sinks)
    return _distributed(
        _Strategy(strategy, context, scores, window, positions.chunks is None), q, k, v, positions, sinks
    )


# Over the heads


def _all_to_all(
    context: int, scores: Scores, window: int | None, q, k, v, positions: TokenPositions, sinks
) -> jax.Array:
    copies = context // np.gcd(context, k.shape[2])
    if copies > 1:  # fewer KV heads than devices: some devices have the same head
        k, v = (jnp.repeat(a, copies, axis=2) for a in (k, v))

    # The remat policies that keep matmuls keep arrays with this name too.
    def to_heads(a: jax.Array) -> jax.Array:
        a = lax.all_to_all(a, "context", split_axis=2, concat_axis=1, tiled=True)
        return checkpoint_name(_to_sequence(a, context), "exchanged")

    starts = positions.document_starts
    if starts is not None:
        starts = _to_sequence(lax.all_gather(starts, "context", axis=1, tiled=True), context)
    q, k, v = (to_heads(a) for a in (q, k, v))
    if sinks is not None:  # select those of this device's heads
        own = q.shape[2]
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index("context") * own, own)
    out = ops.attention(q, k, v, window=window, document_starts=starts, sinks=sinks, **vars(scores))
    out = lax.all_to_all(_to_stored(out, context), "context", split_axis=1, concat_axis=2, tiled=True)
    return checkpoint_name(out, "exchanged")


def _to_sequence(a: jax.Array, context: int) -> jax.Array:
    """`[B, S, ...]` in the devices' order → in the order of the sequence."""
    return _take_chunks(a, np.argsort(chunk_order(context)))


def _to_stored(a: jax.Array, context: int) -> jax.Array:
    return _take_chunks(a, chunk_order(context))


def _take_chunks(a: jax.Array, chunks: np.ndarray) -> jax.Array:
    pieces = jnp.split(a, len(chunks), axis=1)
    return jnp.concatenate([pieces[chunk] for chunk in chunks], axis=1)


# Over the sequence


@dataclass(frozen=True)
class _Strategy:
    name: str
    context: int
    scores: Scores
    window: int | None
    zigzag: bool  # whether each device has one early and one late chunk


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _distributed(strategy: _Strategy, q, k, v, positions: TokenPositions, sinks: jax.Array | None) -> jax.Array:
    return _distributed_forward(strategy, q, k, v, positions, sinks)[0]


def _distributed_forward(strategy: _Strategy, q, k, v, positions: TokenPositions, sinks: jax.Array | None):
    forward = {"ring": _ring, "all_gather": _gathered}[strategy.name]
    out, lse = forward(strategy, q, k, v, positions)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # The remat policies that keep attention keep these residuals by name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(q.dtype), lse))
    return out, (q, k, v, positions, sinks, out, lse)


def _distributed_backward(strategy: _Strategy, saved, dout):
    q, k, v, positions, sinks, out, lse = saved
    backward = {"ring": _ring_backward, "all_gather": _gathered_backward}[strategy.name]
    gradients, dsinks = backward_with_sinks(partial(backward, strategy, q, k, v, positions), sinks, (out, lse), dout)
    return *(g.astype(q.dtype) for g in gradients), None, dsinks


_distributed.defvjp(_distributed_forward, _distributed_backward)


# The ring


@dataclass(frozen=True)
class _Block:
    """One block of scores: this device's queries and another device's keys; half of each, or all (None)."""

    q_half: jax.Array | int | None  # 0: the early chunk, 1: the late chunk
    k_half: jax.Array | int | None

    @staticmethod
    def of(scores: Scores, rank: jax.Array, other: jax.Array) -> "tuple[_Block, ...]":
        """The blocks of a device's queries with the keys of another device.

        With cuDNN a query sees all keys of a block. In zig-zag a late chunk sees every early chunk. Besides, an early
        chunk sees the early chunk of an earlier device, and a late chunk sees the late chunk of a later device. So the
        work is the same for every device.
        """
        if scores.implementation != "cudnn":
            return (_Block(None, None),)
        half = (other > rank).astype(jnp.int32)
        return _Block(1, 0), _Block(half, half)


def _half(tree: Any, half: jax.Array | int | None) -> Any:
    """One of the two chunks of `[B, 2c, ...]`; both if `half` is None."""
    if half is None:
        return tree

    def one(a: jax.Array) -> jax.Array:
        early, late = jnp.split(a, 2, axis=1)
        if isinstance(half, int):
            return (early, late)[half]
        return jnp.where(half == 0, early, late)

    return jax.tree.map(one, tree)


def _in_half(part: jax.Array, half: jax.Array | int | None, axis: int = 1, empty: float = 0) -> jax.Array:
    """`part` of one chunk → both chunks, with `empty` in the other one."""
    if half is None:
        return part
    return jnp.concatenate([jnp.where(half == h, part, empty) for h in (0, 1)], axis)


def _sweeps(strategy: _Strategy, length: int) -> list[tuple[int, int]]:
    """(direction, steps) of the keys around the ring: all the way, or a few steps in both directions for a window."""
    C, window = strategy.context, strategy.window
    if window is None or not strategy.zigzag:
        return [(1, C - 1)]
    near = -(-(window - 1) // (length // 2))  # number of chunks before a query's own chunk that it may see
    return [(1, C - 1)] if 2 * near >= C - 1 else [(direction, near) for direction in (1, -1) if near]


@dataclass(frozen=True)
class _Work:
    """A device's work while keys and values are sent around the ring.

    `moving` arrays go around with the keys, and every device updates them; `local` arrays stay on their device.
    """

    own: Callable  # () → results for the device's own keys
    start: Callable  # results → (moving, local)
    compute: Callable  # (owner of the keys, keys) → results
    combine: Callable  # (owner of the keys, results, moving, local) → (moving, local)


def _go_round(strategy: _Strategy, length: int, fixed: Any, work: _Work) -> Any:
    """`(moving, local)` at the end, with `moving` back on its own device; `fixed` are this device's keys and values.

    At step i of a sweep a device has the arrays of the device i ranks before it, or after it. Without the barriers XLA
    starts transfers too late for the attention that hides them.

    Each step sends one message: GPUs start kernels in launch order, so attention after a second message would wait for
    the end of the first one.
    """
    C, rank = strategy.context, lax.axis_index("context")
    sweeps = _sweeps(strategy, length)

    def send(message: jax.Array, by: int) -> jax.Array:
        return lax.ppermute(message, "context", [(r, (r + by) % C) for r in range(C)])

    own_message = _words(fixed)
    first, own = lax.optimization_barrier(([send(own_message, direction) for direction, _ in sweeps], work.own()))
    moving, local = work.start(own)
    for keys, (direction, steps) in zip(first, sweeps, strict=True):

        def step(state, i, direction=direction, last=False):
            keys, moving, local = state
            outgoing = keys[:0] if last else keys
            message = send(jnp.concatenate([outgoing, _words(moving)]), direction)
            other = (rank - direction * i) % C
            message, results = lax.optimization_barrier((message, work.compute(other, _arrays(keys, fixed))))
            next_keys, arrived = jnp.split(message, [outgoing.size])
            return (next_keys, *work.combine(other, results, _arrays(arrived, moving), local)), None

        unroll = max(steps - 1, 1) if steps <= UNROLLED_STEPS else 1
        state, _ = lax.scan(step, (keys, moving, local), jnp.arange(1, steps), unroll=unroll)
        (_, moving, local), _ = step(state, steps, last=True)
        moving = _arrays(send(_words(moving), -direction * steps), moving)
    return moving, local


def _words(tree: Any) -> jax.Array:
    """All numbers of the arrays as one array of 16-bit words."""
    words = [lax.bitcast_convert_type(a, jnp.uint16).reshape(-1) for a in jax.tree.leaves(tree)]
    return jnp.concatenate([*words, jnp.zeros(0, jnp.uint16)])


def _arrays(words: jax.Array, like: Any) -> Any:
    """Inverse of `_words`: arrays with the shapes and dtypes of `like`."""
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([a.size * a.dtype.itemsize // 2 for a in leaves]).tolist()
    parts = [words[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def one(part: jax.Array, a: jax.Array) -> jax.Array:
        each = a.dtype.itemsize // 2
        return lax.bitcast_convert_type(part.reshape(a.shape if each == 1 else (*a.shape, each)), a.dtype)

    return jax.tree.unflatten(treedef, [one(part, a) for part, a in zip(parts, leaves, strict=True)])


def _ring(strategy: _Strategy, q, k, v, positions: TokenPositions) -> Part:
    scores, rank, ranges = strategy.scores, lax.axis_index("context"), _ranges(strategy, positions)

    def start(part):
        return None, (part[0].astype(part[1].dtype), part[1])

    def compute(other, kv):
        seen, parts = ranges(other), []
        for block in _Block.of(scores, rank, other):
            keys, values = _half(kv, block.k_half)
            parts.append(attend(scores, "full", _half(q, block.q_half), keys, values, seen))
        return parts

    def combine(other, parts, moving, whole):
        for block, (out, lse) in zip(_Block.of(scores, rank, other), parts, strict=True):
            whole = merge(whole, (_in_half(out, block.q_half), _in_half(lse, block.q_half, 2, -jnp.inf)))
        return moving, whole

    own = partial(attend, scores, "causal", q, k, v, ranges(rank))
    return _go_round(strategy, q.shape[1], (k, v), _Work(own, start, compute, combine))[1]


def _ring_backward(strategy: _Strategy, q, k, v, positions: TokenPositions, whole: Part, dout):
    scores, rank, ranges = strategy.scores, lax.axis_index("context"), _ranges(strategy, positions)
    lse = whole[1].swapaxes(1, 2)  # [B, 2c, N]

    def start(gradients):
        dq, dk, dv = (g.astype(lse.dtype) for g in gradients)
        return (dk, dv), dq

    def compute(other, kv):
        seen, gradients = ranges(other), []
        for block in _Block.of(scores, rank, other):
            queries, outs, lses, douts = _half((q, whole[0], lse, dout), block.q_half)
            keys, values = _half(kv, block.k_half)
            part = outs, lses.swapaxes(1, 2)
            gradients.append(attend_backward(scores, "full", queries, keys, values, seen, part, douts))
        return gradients

    def combine(other, gradients, dkv, dq):
        dk, dv = dkv
        for block, one in zip(_Block.of(scores, rank, other), gradients, strict=True):
            dq, dk, dv = (
                total + _in_half(g, half).astype(total.dtype)
                for total, g, half in zip((dq, dk, dv), one, (block.q_half, block.k_half, block.k_half), strict=True)
            )
        return (dk, dv), dq

    own = partial(attend_backward, scores, "causal", q, k, v, ranges(rank), whole, dout)
    (dk, dv), dq = _go_round(strategy, q.shape[1], (k, v), _Work(own, start, compute, combine))
    return dq, dk, dv


def _ranges(strategy: _Strategy, positions: TokenPositions) -> Callable[[jax.Array], Ranges | None]:
    """Device of `context` → the range of its keys that each of this device's queries sees; None with cuDNN's blocks."""
    if strategy.scores.implementation == "cudnn":
        return lambda rank: None
    return lambda rank: key_ranges(positions, strategy.window, rank, strategy.context)


# All keys on every device


def _gathered(strategy: _Strategy, q, k, v, positions: TokenPositions) -> Part:
    scores, (k_all, v_all) = strategy.scores, _gather(strategy, (k, v), positions)
    if scores.implementation != "cudnn":
        return attend(scores, "prefix", q, k_all, v_all, sequence_ranges(positions, strategy.window))
    # Each chunk attends to its own keys, and to the keys before it.
    (q, k, v), (k_all, v_all) = _by_chunk((q, k, v)), _for_both((k_all, v_all))
    one = attend(scores, "causal", q, k, v, None)
    out, lse = merge(one, attend(scores, "prefix", q, k_all, v_all, _before_chunk(positions)))
    B, c, N, H = q.shape
    lse = lse.reshape(B // 2, 2, N, c).swapaxes(1, 2)
    return out.reshape(B // 2, 2 * c, N, H), lse.reshape(B // 2, N, 2 * c)


def _gathered_backward(strategy: _Strategy, q, k, v, positions: TokenPositions, whole: Part, dout):
    scores, (k_all, v_all) = strategy.scores, _gather(strategy, (k, v), positions)

    def to_owners(g: jax.Array) -> jax.Array:
        g = _as_stored(strategy, g.astype(whole[1].dtype), positions)
        return lax.psum_scatter(g, "context", scatter_dimension=1, tiled=True)

    if scores.implementation != "cudnn":
        ranges = sequence_ranges(positions, strategy.window)
        dq, dk, dv = attend_backward(scores, "prefix", q, k_all, v_all, ranges, whole, dout)
        return dq, to_owners(dk), to_owners(dv)
    (q, k, v, dout), (k_all, v_all) = _by_chunk((q, k, v, dout)), _for_both((k_all, v_all))
    out, lse = whole
    lse = lse.reshape(*lse.shape[:2], 2, -1).transpose(0, 2, 1, 3).reshape(len(q), -1, q.shape[1])
    seen = _by_chunk(out), lse
    own = attend_backward(scores, "causal", q, k, v, None, seen, dout)
    before = attend_backward(scores, "prefix", q, k_all, v_all, _before_chunk(positions), seen, dout)
    dq = (own[0].astype(lse.dtype) + before[0]).reshape(dout.shape[0] // 2, -1, *dout.shape[2:])
    gradients = []
    for ours, theirs in zip(own[1:], before[1:], strict=True):
        both = theirs.reshape(len(theirs) // 2, 2, *theirs.shape[1:]).sum(1, dtype=lse.dtype)
        gradients.append(to_owners(both) + ours.reshape(len(ours) // 2, -1, *ours.shape[2:]))
    return dq, *gradients


def _gather(strategy: _Strategy, arrays: Any, positions: TokenPositions) -> Any:
    """This device's keys and values `[B, S / context, ...]` → those of whole sequences, in the sequence's order."""
    C = strategy.context

    def one(a: jax.Array) -> jax.Array:
        a = lax.all_gather(a, "context", axis=1, tiled=True)
        if strategy.zigzag:
            return _to_sequence(a, C)
        return _take_by_sequence(a, jnp.argsort(_chunk_starts(positions), axis=1))

    return jax.tree.map(one, arrays)


def _as_stored(strategy: _Strategy, a: jax.Array, positions: TokenPositions) -> jax.Array:
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
