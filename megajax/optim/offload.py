"""`optimizer.offload`: moments and averages in pinned memory of the host, which pass through the device in an update.

The parameters with such arrays are updated one after another. While one is computed, the arrays of the next one arrive
and those of the last one return, so a device holds those of a few parameters at a time. The numbers are the same as
without offloading. A step takes longer by about the bytes divided by the bandwidth of the link, because the gradients'
norm, which clipping needs, is known only after the backward pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from megajax.ops.barriers import not_before

Space = jax.memory.Space

HOST = "pinned_host"
OFFLOADED = ("matrix", "embedding")  # roles of the parameters whose moments and averages are moved
AHEAD = 2  # updates whose arrays may be on the device at the same time


def largest_share[Key](sizes: Mapping[Key, float], share: float) -> set[Key]:
    """The arrays, from the largest to the smallest, that fit into `share` of the sum of their `sizes`."""
    room, chosen = share * sum(sizes.values()) * (1 + 1e-9), set[Key]()
    for key, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if size <= room:
            room -= size
            chosen.add(key)
    return chosen


def on_host(sharding: NamedSharding) -> NamedSharding:
    """The same sharding in pinned memory of the hosts."""
    return NamedSharding(sharding.mesh, sharding.spec, memory_kind=HOST)


def on_device(tree: Any) -> Any:
    """A copy on the device of what is in the host's memory, inside a jitted function; the rest as it is."""

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, Space.Device) if jax.typeof(x).memory_space == Space.Host else x

    return jax.tree.map(move, tree)


def in_turn(
    update: Callable[[Any, Any], Any], states: Sequence[Any], inputs: Sequence[Any], on_host: Sequence[Any]
) -> list[Any]:
    """`update(state, input)`, which returns the new state, of each part; `on_host` says which arrays of it move.

    They come to the device when those of the second part before it are back.
    """
    done: list[Any] = []
    for index, (before, given, moves) in enumerate(zip(states, inputs, on_host, strict=True)):
        if index >= AHEAD:
            before, done[index - AHEAD] = not_before((before, done[index - AHEAD]))
        after = update(_moved(before, moves, Space.Device), given)
        done.append(_moved(after, moves, Space.Host))
    return done


def _moved(tree: Any, which: Any, to: Space) -> Any:
    return jax.tree.map(lambda x, moves: jax.device_put(x, to) if moves else x, tree, which)
