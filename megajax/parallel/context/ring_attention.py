"""`ring` (Liu et al. 2023): keys and values are sent around the ring; each device computes attention to the keys that
it has while the next keys arrive.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.model.comm import LatentKeys, TokenPositions
from megajax.ops.barriers import not_before
from megajax.ops.partial_attention import Kind, Mask, Part, Ranges, Scores, attend, attend_backward, merge
from megajax.options.context import UNROLLED_STEPS
from megajax.parallel import collectives
from megajax.parallel.context.strategy import Keys, Sent, ToParts, heads_of, latent_gradients
from megajax.parallel.context.token_order import key_ranges

Gradients = tuple[jax.Array, jax.Array, jax.Array]  # dq, dk and dv


@dataclass(frozen=True)
class ScoreBlock:
    """One block of scores: this device's queries and another device's keys; half of each, or all (None)."""

    q_half: jax.Array | int | None  # 0: the early chunk, 1: the late chunk
    k_half: jax.Array | int | None

    @staticmethod
    def of(scores: Scores, causal: bool, rank: jax.Array, other: jax.Array) -> "tuple[ScoreBlock, ...]":
        """The blocks of a device's queries with the keys of another device.

        With cuDNN a query sees all keys of a block. In causal attention in zig-zag a late chunk sees every early chunk.
        Besides, an early chunk sees the early chunk of an earlier device, and a late chunk sees the late chunk of a
        later device. So the work is the same for every device.
        """
        if scores.implementation != "cudnn" or not causal:
            return (ScoreBlock(None, None),)
        half = (other > rank).astype(jnp.int32)
        return ScoreBlock(1, 0), ScoreBlock(half, half)

    def add(self, total: Gradients, of_block: Gradients) -> Gradients:
        """`total` with the gradients of this block."""
        dq, dk, dv = (
            whole + in_half(g, half).astype(whole.dtype)
            for whole, g, half in zip(total, of_block, (self.q_half, self.k_half, self.k_half), strict=True)
        )
        return dq, dk, dv


def half_of(tree: Any, half: jax.Array | int | None) -> Any:
    """One of the two chunks of `[B, 2c, ...]`; both if `half` is None."""
    if half is None:
        return tree

    def one(a: jax.Array) -> jax.Array:
        early, late = jnp.split(a, 2, axis=1)
        if isinstance(half, int):
            return (early, late)[half]
        return jnp.where(half == 0, early, late)

    return jax.tree.map(one, tree)


def in_half(part: jax.Array, half: jax.Array | int | None, axis: int = 1, empty: float = 0) -> jax.Array:
    """`part` of one chunk → both chunks, with `empty` in the other one."""
    if half is None:
        return part
    return jnp.concatenate([jnp.where(half == h, part, empty) for h in (0, 1)], axis)


@dataclass(frozen=True)
class RingWork:
    """A device's work while keys and values are sent around the ring.

    `moving` arrays go around with the keys, and every device updates them; `local` arrays stay on their device.
    """

    own: Callable  # () → results for the device's own keys
    start: Callable  # results → (moving, local)
    compute: Callable  # (owner of the keys, keys) → results
    combine: Callable  # (owner of the keys, results, moving, local) → (moving, local)


@dataclass(frozen=True)
class Ring(ToParts):
    """`stride` rings of `devices` devices each; those of a ring are `stride` apart on `context`."""

    stride: int = 1

    def forward(self, q, kv, positions) -> Part:
        return self._forward(q, kv, lambda kv: kv, positions)

    def forward_latent(self, linear, q, keys, positions) -> Part:
        def heads(sent: Sent) -> Keys:
            return heads_of(linear, keys, sent, keys.up)

        return self._forward(q, (keys.latent, keys.rotary), heads, positions)

    def _forward(self, q, sent: Sent, heads: Callable[[Sent], Keys], positions: TokenPositions) -> Part:
        """Attention to the keys of all devices; `sent` goes around, and `heads` makes keys and values of it."""
        scores, rank, ranges = self.scores, self._rank, self._ranges(positions)

        def start(part):
            return None, (part[0].astype(part[1].dtype), part[1])

        def compute(other, sent):
            kv, seen, parts = heads(sent), ranges(other), []
            for block in self._blocks(rank, other):
                keys, values = half_of(kv, block.k_half)
                parts.append(attend(scores, Mask("full", seen), half_of(q, block.q_half), keys, values))
            return parts

        def combine(other, parts, moving, whole):
            for block, (out, lse) in zip(self._blocks(rank, other), parts, strict=True):
                whole = merge(whole, (in_half(out, block.q_half), in_half(lse, block.q_half, 2, -jnp.inf)))
            return moving, whole

        def own():
            keys, values = heads(sent)
            return attend(scores, Mask(self._own_kind, ranges(rank)), q, keys, values)

        sweeps = self._sweeps(positions)
        return self.go_round(sweeps, sent, RingWork(own, start, compute, combine))[1]

    def backward(self, q, kv, positions, whole, dout) -> tuple[jax.Array, Keys]:
        scores, rank, ranges = self.scores, self._rank, self._ranges(positions)

        def start(gradients):
            dq, dk, dv = (g.astype(whole[1].dtype) for g in gradients)
            return (dk, dv), dq

        def compute(other, kv):
            return self._block_gradients(other, ranges(other), q, kv, whole, dout)

        def combine(other, gradients, dkv, dq):
            dk, dv = dkv
            for block, one in zip(self._blocks(rank, other), gradients, strict=True):
                dq, dk, dv = block.add((dq, dk, dv), one)
            return (dk, dv), dq

        own = partial(attend_backward, scores, Mask(self._own_kind, ranges(rank)), q, *kv, whole, dout)
        dkv, dq = self.go_round(self._sweeps(positions), kv, RingWork(own, start, compute, combine))
        return dq, dkv

    def backward_latent(self, linear, q, keys, positions, whole, dout) -> tuple[jax.Array, LatentKeys]:
        scores, rank, ranges = self.scores, self._rank, self._ranges(positions)
        dtype, sent = whole[1].dtype, (keys.latent, keys.rotary)
        heads = partial(heads_of, linear, keys)

        def own():
            kv, pull = jax.vjp(heads, sent, keys.up)
            dq, *dkv = attend_backward(scores, Mask(self._own_kind, ranges(rank)), q, *kv, whole, dout)
            return dq, *pull(tuple(g.astype(a.dtype) for g, a in zip(dkv, kv, strict=True)))

        def start(gradients):
            dq, dsent, dup = jax.tree.map(lambda g: g.astype(dtype), gradients)
            return dsent, (dq, dup)

        def compute(other, sent):
            kv, pull = jax.vjp(heads, sent, keys.up)
            total: Any = tuple(jnp.zeros(a.shape, dtype) for a in (q, *kv))
            of_blocks = self._block_gradients(other, ranges(other), q, kv, whole, dout)
            for block, one in zip(self._blocks(rank, other), of_blocks, strict=True):
                total = block.add(total, one)
            dq, *dkv = total
            return dq, *pull(tuple(g.astype(a.dtype) for g, a in zip(dkv, kv, strict=True)))

        def combine(other, gradients, moving, local):
            dq, dsent, dup = gradients
            return jax.tree.map(lambda total, g: total + g.astype(dtype), (moving, local), (dsent, (dq, dup)))

        work = RingWork(own, start, compute, combine)
        dsent, (dq, dup) = self.go_round(self._sweeps(positions), sent, work)
        return dq, latent_gradients(keys, dsent, dup)

    def _block_gradients(self, other, seen: Ranges | None, q, kv: Keys, whole: Part, dout) -> list[Gradients]:
        """The gradients of each block of scores with the keys and values of the device `other`."""
        scores, gradients = self.scores, []
        lse = whole[1].swapaxes(1, 2)  # [B, 2c, N]
        for block in self._blocks(self._rank, other):
            queries, outs, lses, douts = half_of((q, whole[0], lse, dout), block.q_half)
            keys, values = half_of(kv, block.k_half)
            part = outs, lses.swapaxes(1, 2)
            gradients.append(attend_backward(scores, Mask("full", seen), queries, keys, values, part, douts))
        return gradients

    @property
    def _rank(self) -> jax.Array:
        """This device's place in its ring."""
        return lax.axis_index("context") // self.stride

    @property
    def _own_kind(self) -> Kind:
        """The mask of this device's queries and its own keys."""
        return "causal" if self.causal else "full"

    def _blocks(self, rank: jax.Array, other: jax.Array) -> tuple[ScoreBlock, ...]:
        return ScoreBlock.of(self.scores, self.causal, rank, other)

    def _ranges(self, positions: TokenPositions) -> Callable[[jax.Array], Ranges | None]:
        """Device of `context` → the range of its keys that each query here sees; None with cuDNN's blocks."""
        if self.scores.implementation == "cudnn":
            return lambda rank: None
        return partial(key_ranges, positions, self.window, self.devices, self.causal)

    def go_round(self, sweeps: Sequence[tuple[int, int]], fixed: Any, work: RingWork) -> Any:
        """`(moving, local)` at the end, with `moving` back on its own device; `fixed` are its own keys and values.

        At step i of a sweep a device has the arrays of the device i ranks before it, or after it. Without the barriers
        XLA starts transfers too late for the attention that hides them.

        Each step sends one message: GPUs start kernels in launch order, so attention after a second message would wait
        for the end of the first one.
        """
        C, rank = self.devices, self._rank

        def send(message: jax.Array, by: int) -> jax.Array:
            devices = C * self.stride
            moves = [(device, (device + by * self.stride) % devices) for device in range(devices)]
            return collectives.ppermute(message, "context", moves)

        own_message = _words(fixed)
        first, own = not_before(([send(own_message, direction) for direction, _ in sweeps], work.own()))
        moving, local = work.start(own)
        for keys, (direction, steps) in zip(first, sweeps, strict=True):

            def step(state, i, direction=direction, last=False):
                keys, moving, local = state
                outgoing = keys[:0] if last else keys
                message = send(jnp.concatenate([outgoing, _words(moving)]), direction)
                other = (rank - direction * i) % C
                message, results = not_before((message, work.compute(other, _arrays(keys, fixed))))
                next_keys, arrived = jnp.split(message, [outgoing.size])
                return (next_keys, *work.combine(other, results, _arrays(arrived, moving), local)), None

            unroll = max(steps - 1, 1) if steps <= UNROLLED_STEPS else 1
            state, _ = lax.scan(step, (keys, moving, local), jnp.arange(1, steps), unroll=unroll)
            (_, moving, local), _ = step(state, steps, last=True)
            moving = _arrays(send(_words(moving), -direction * steps), moving)
        return moving, local

    def _sweeps(self, positions: TokenPositions) -> list[tuple[int, int]]:
        """(direction, steps) of the keys around the ring: all the way, or a few both ways for a window."""
        C, window, length = self.devices, self.window, positions.index.shape[1]
        if window is None or not self.zigzag or positions.two_sided_ends is not None:
            return [(1, C - 1)]
        near = -(-(window - 1) // (length // 2))  # number of chunks beside a query's own chunk that it may see
        return [(1, C - 1)] if 2 * near >= C - 1 else [(direction, near) for direction in (1, -1) if near]


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
