"""A ring over `context`: keys go around while each device works with those that it has.

See attention.py and latents.py, which say what goes around.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.ops.partial_attention import Scores
from megajax.parallel import collectives

UNROLLED_STEPS = 7  # with more steps around the ring they run in a loop


@dataclass(frozen=True)
class Strategy:
    """How attention is divided over `context`."""

    name: str
    context: int
    scores: Scores
    window: int | None
    zigzag: bool  # whether each device has one early and one late chunk


@dataclass(frozen=True)
class Block:
    """One block of scores: this device's queries and another device's keys; half of each, or all (None)."""

    q_half: jax.Array | int | None  # 0: the early chunk, 1: the late chunk
    k_half: jax.Array | int | None

    @staticmethod
    def of(scores: Scores, rank: jax.Array, other: jax.Array) -> "tuple[Block, ...]":
        """The blocks of a device's queries with the keys of another device.

        With cuDNN a query sees all keys of a block. In zig-zag a late chunk sees every early chunk. Besides, an early
        chunk sees the early chunk of an earlier device, and a late chunk sees the late chunk of a later device. So the
        work is the same for every device.
        """
        if scores.implementation != "cudnn":
            return (Block(None, None),)
        half = (other > rank).astype(jnp.int32)
        return Block(1, 0), Block(half, half)


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


def _sweeps(strategy: Strategy, length: int) -> list[tuple[int, int]]:
    """(direction, steps) of the keys around the ring: all the way, or a few steps in both directions for a window."""
    C, window = strategy.context, strategy.window
    if window is None or not strategy.zigzag:
        return [(1, C - 1)]
    near = -(-(window - 1) // (length // 2))  # number of chunks before a query's own chunk that it may see
    return [(1, C - 1)] if 2 * near >= C - 1 else [(direction, near) for direction in (1, -1) if near]


@dataclass(frozen=True)
class Work:
    """A device's work while keys and values are sent around the ring.

    `moving` arrays go around with the keys, and every device updates them; `local` arrays stay on their device.
    """

    own: Callable  # () → results for the device's own keys
    start: Callable  # results → (moving, local)
    compute: Callable  # (owner of the keys, keys) → results
    combine: Callable  # (owner of the keys, results, moving, local) → (moving, local)


def go_round(strategy: Strategy, length: int, fixed: Any, work: Work) -> Any:
    """`(moving, local)` at the end, with `moving` back on its own device; `fixed` are this device's keys and values.

    At step i of a sweep a device has the arrays of the device i ranks before it, or after it. Without the barriers XLA
    starts transfers too late for the attention that hides them.

    Each step sends one message: GPUs start kernels in launch order, so attention after a second message would wait for
    the end of the first one.
    """
    C, rank = strategy.context, lax.axis_index("context")
    sweeps = _sweeps(strategy, length)

    def send(message: jax.Array, by: int) -> jax.Array:
        return collectives.ppermute(message, "context", [(r, (r + by) % C) for r in range(C)])

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
