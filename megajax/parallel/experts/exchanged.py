"""`all_to_all`: every assignment's row is sent to its expert's device, where rows are sorted by expert (Lepikhin et al.
2020).

The all-to-all has blocks of equal size, with `ROOM` times an even share of the k·T rows, and is repeated until
the rows of the fullest pair of devices have been sent. With balanced devices that is once: ROOM·k·T·(n - 1)/n rows. The
buffer of arrived rows has room for the worst case, all assignments to one device, or for the experts' capacity. Rows of
dropped assignments are not sent.

Why not `lax.ragged_all_to_all`, which sends the k·T·(n - 1)/n rows at once: docs/records/log.md, 2026-11-25.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import experts as ops
from megajax.ops.experts import SortedRoute
from megajax.options.dispatch import ROOM
from megajax.parallel import collectives
from megajax.parallel.experts.contract import ExpertParallel

Axes = tuple[str, ...]
Arrays = tuple[jax.Array, ...]


class RowRanges(NamedTuple):
    """Where a device has the rows that it exchanges with each of n devices for each of that pair's L experts.

    The rows of one pair and expert are together. A pair's rows are sent in the order of their experts.
    """

    starts: jax.Array  # [n, L]
    sizes: jax.Array
    device: jax.Array  # [rows]: the other device
    number: jax.Array  # [rows], in the order of sending; -1 if the row is in no segment

    @classmethod
    def of(cls, starts: jax.Array, sizes: jax.Array, rows: int) -> "RowRanges":
        """The segments with these `starts` and `sizes`, both `[n, L]`, among `rows` rows."""
        first, size, row = starts.reshape(-1), sizes.reshape(-1), jnp.arange(rows)
        order = jnp.argsort(2 * first + (size > 0))  # a segment with rows is after the empty ones at its start
        segment = order[jnp.searchsorted(first[order], row, side="right", method="scan_unrolled") - 1]
        offset, before = row - first[segment], (jnp.cumsum(sizes, axis=1) - sizes).reshape(-1)
        number = jnp.where(offset < size[segment], offset + before[segment], -1)
        return cls(starts, sizes, segment // starts.shape[1], number)

    def of_pairs(self, numbers: jax.Array) -> jax.Array:
        """The rows of each pair with these `numbers [N]` in the order of sending → `[n, N]`; any row past its last."""
        ends = jnp.cumsum(self.sizes, axis=1)
        expert = jnp.sum(numbers[None, :, None] >= ends[:, None, :], axis=2)
        expert = jnp.minimum(expert, ends.shape[1] - 1)
        return numbers + jnp.take_along_axis(self.starts + self.sizes - ends, expert, axis=1)


class Routes(NamedTuple):
    """Rows sorted by expert on every device ↔ rows on their experts' devices, sorted by expert, then by sender."""

    sent: RowRanges  # own assignments
    arrived: RowRanges  # those of own experts
    rounds: jax.Array  # number of all-to-alls: the same on all devices of a group
    group_sizes: jax.Array  # number of rows received for each own expert


def routes_of(axes: Axes, counts: jax.Array, size: int, room: int, rows: tuple[int, int]) -> Routes:
    """The routes of this device's `counts [E]` rows for each expert; `size` devices have E / size experts each.

    An all-to-all has `room` rows for each pair of devices. `rows`: those of own assignments, and for those that arrive.
    """
    rank = lax.axis_index(axes)
    counts = collectives.all_gather(counts, axes).reshape(size, size, -1)  # [senders, receivers, own experts]
    sent = counts[rank]
    starts = (jnp.cumsum(sent) - sent.reshape(-1)).reshape(sent.shape)
    arrived = counts[:, rank]
    by_expert = arrived.T.reshape(-1)
    arrives_at = (jnp.cumsum(by_expert) - by_expert).reshape(arrived.T.shape).T
    rounds = -(-jnp.max(counts.sum(axis=2)) // room)
    sides = RowRanges.of(starts, sent, rows[0]), RowRanges.of(arrives_at, arrived, rows[1])
    return Routes(*sides, rounds, arrived.sum(axis=0))


def exchange(axes: Axes, room: int, rounds: jax.Array, source: RowRanges, target: RowRanges, arrays: Arrays) -> Arrays:
    """Send the rows of all `arrays [R, ...]` from the segments `source` to `target` → `[rows, ...]`, other rows zero.

    `rounds` all-to-alls of each array send `room` rows from each device to each other. The arrays share a loop because
    XLA may run independent loops at once on CPUs, and then their collectives meet each other's (docs/records/log.md).
    """
    device, number = target.device, target.number

    def sent(first: jax.Array | int, arrived: Arrays) -> Arrays:
        """`arrived` with the rows whose numbers are from `first` to `first + room - 1`."""
        rows = source.of_pairs(first + jnp.arange(room)).reshape(-1)
        place, now = device * room + number - first, (number >= first) & (number < first + room)
        done = []
        for x, y in zip(arrays, arrived, strict=True):
            blocks = collectives.all_to_all(x.at[rows].get(mode="clip"), axes, 0, 0, tiled=True)
            done.append(jnp.where(now[:, None], blocks.at[place].get(mode="clip"), y))
        return tuple(done)

    arrived = sent(0, tuple(jnp.zeros((len(number), *x.shape[1:]), x.dtype) for x in arrays))
    return lax.fori_loop(1, rounds, lambda round, arrived: sent(round * room, arrived), arrived)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangedRoute(SortedRoute):
    """Own tokens to rows sorted by expert, and these to the experts' devices."""

    routes: Routes
    axes: Axes = field(metadata={"static": True})
    room: int = field(metadata={"static": True})

    def send(self, x: jax.Array, *numbers: jax.Array) -> Arrays:
        return self._exchange(self.routes.sent, self.routes.arrived, *super().send(x, *numbers))

    def back(self, rows: jax.Array, *numbers: jax.Array) -> Arrays:
        return super().back(*self._exchange(self.routes.arrived, self.routes.sent, rows, *numbers))

    def rows(self, tokens: int) -> int:
        return len(self.routes.arrived.number)

    def _exchange(self, source: RowRanges, target: RowRanges, rows: jax.Array, *numbers: jax.Array) -> Arrays:
        arrays = rows, *(each[:, None] for each in numbers)
        rows, *numbers_there = exchange(self.axes, self.room, self.routes.rounds, source, target, arrays)
        return rows, *(each[:, 0] for each in numbers_there)


class Exchanged(ExpertParallel):
    def route(self, experts, num_experts, capacity) -> ExchangedRoute:
        (T, k), axes, size = experts.shape, self.axes, self.devices
        room = math.ceil(min(1, ROOM / size) * T * k)
        route = SortedRoute.of(experts, num_experts * size, None)
        rows = T * k, ops.most_rows(size * T, k, num_experts, capacity)
        routes = routes_of(axes, route.group_sizes, size, room, rows)
        return ExchangedRoute(routes.group_sizes, route.permutation, route.is_routed, k, routes, axes, room)
