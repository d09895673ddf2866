"""`all_to_all`: every assignment's row is sent to its expert's device, where rows are sorted by expert (Lepikhin et al.
2020).

The all-to-all has blocks of equal size, with `ROOM` times an even share of the k·T rows, and is repeated until
the rows of the fullest pair of devices have been sent. With balanced devices that is once: ROOM·k·T·(n - 1)/n rows. The
buffer of arrived rows has room for the worst case, all assignments to one device, or for the experts' capacity. Rows of
dropped assignments are not sent.

Why not `lax.ragged_all_to_all`, which sends the k·T·(n - 1)/n rows at once: docs/records/log.md, 2026-11-25.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import experts as ops
from megajax.options.dispatch import ROOM
from megajax.parallel import collectives
from megajax.parallel.experts.contract import ExpertParallel

Axes = tuple[str, ...]
Arrays = tuple[jax.Array, ...]


class Exchanged(ExpertParallel):
    def apply(self, activation, x, experts, weights, matrices, capacity) -> jax.Array:
        (T, k), local, axes, size = experts.shape, matrices.num_experts, self.axes, self.devices
        room = math.ceil(min(1, ROOM / size) * T * k)
        permutation = ops.sort_by_expert(experts, local * size, T * k)
        routes = routes_of(
            axes, permutation.group_sizes, size, room, (T * k, ops.most_rows(size * T, k, local, capacity))
        )
        permutation, routes = jax.tree.map(lambda a: checkpoint_name(a, "routing"), (permutation, routes))

        def send(source: RowRanges, target: RowRanges, *arrays: jax.Array) -> Arrays:
            return exchange(axes, room, routes.rounds, source, target, arrays)

        own_weights: jax.Array = ops.permute(weights.reshape(-1), permutation)
        rows: jax.Array = ops.dispatch(x, permutation, k)
        sent = [rows, own_weights[:, None]]
        if matrices.token_ids is not None:  # as numbers that can be differentiated
            ids = ops.assignment_ids(matrices.token_ids, k)[permutation.order]
            sent.append(jnp.stack([ids >> 16, ids & 0xFFFF], axis=1).astype(jnp.float32))
        received, row_weights, *halves = send(routes.sent, routes.arrived, *sent)
        received, row_weights = checkpoint_name(received, "dispatched"), checkpoint_name(row_weights, "routing")[:, 0]
        if halves:
            halves = checkpoint_name(lax.stop_gradient(halves[0]), "routing").astype(jnp.uint32)
            matrices = matrices.with_ids(halves[:, 0] << 16 | halves[:, 1])
        y: jax.Array = ops.expert_mlp(self.mlp(activation), received, row_weights, matrices, routes.group_sizes)
        (y,) = send(routes.arrived, routes.sent, y)
        return ops.combine(y, permutation, k)


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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
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


def _exchange_forward(axes, room, rounds, source, target, arrays):
    return exchange(axes, room, rounds, source, target, arrays), (rounds, source, target)


def _exchange_backward(axes, room, residuals, dy):
    rounds, source, target = residuals
    return None, None, None, exchange(axes, room, rounds, target, source, dy)


exchange.defvjp(_exchange_forward, _exchange_backward)
