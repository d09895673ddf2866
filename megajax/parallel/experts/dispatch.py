"""Experts on several devices: tokens are sent to the devices of their experts, and the results back.

The experts are divided over one or several mesh axes, `mesh.experts_over`; each group of devices along them has all
experts.

- `all_gather`: every device gets all tokens of its group and computes the assignments to its own experts; the sums are
  reduce-scattered. A device sends its T tokens to each of the n - 1 others.
- `all_to_all`: every assignment's row is sent to its expert's device, where rows are sorted by expert (Lepikhin et al.
  2020). The all-to-all has blocks of equal size, with `ROOM` times an even share of the k·T rows, and is repeated until
  the rows of the fullest pair of devices have been sent. With balanced devices that is once: ROOM·k·T·(n - 1)/n rows.

No assignment is dropped here: the buffer of arrived rows has room for the worst case, all assignments to one device, or
for the experts' capacity. Assignments that the router has dropped have the expert index E: their rows are not sent and
add nothing.

Why not `lax.ragged_all_to_all`, which sends the k·T·(n - 1)/n rows at once: docs/log.md, 2026-11-25.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import experts as ops
from megajax.ops.expert_mlp import num_experts
from megajax.parallel import collectives
from megajax.parallel.weights.exchange import gather_tiles
from megajax.step_plan import Collectives

Axes = tuple[str, ...]
ROOM = 1.25  # rows for another device in one all-to-all, as a multiple of an even share


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's experts, divided over the axes `experts_over`."""

    collectives: Collectives
    kernels: ops.ExpertKernels
    max_over_devices: ops.MaxOverDevices

    def apply(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        """Own tokens `x [T, D]`, their `experts` and `weights` `[T, k]`, own experts' parameters → `[T, D]`."""
        distributed = self._gathered if self.collectives.dispatch == "all_gather" else self._exchanged
        strategy = distributed if self.collectives.expert_shards > 1 else self._on_device
        return strategy(activation, x, experts, weights, w_up, w_down, capacity, biases)

    def _on_device(self, *arguments) -> jax.Array:
        return ops.apply_experts(*arguments, kernels=self.kernels, max_over_devices=self.max_over_devices)

    def _gathered(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        local, axes = num_experts(w_up), self.collectives.experts_over
        x, experts, weights = (gather_tiles(a, axes, 0) for a in (x, experts, weights))
        own = experts - lax.axis_index(axes) * local
        own = jnp.where((own >= 0) & (own < local), own, local)  # `local`: an expert of another device
        y = self._on_device(activation, x, own, weights, w_up, w_down, capacity, biases)
        return collectives.psum_scatter(y, axes, scatter_dimension=0, tiled=True)

    def _exchanged(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        (T, k), local, size = experts.shape, num_experts(w_up), self.collectives.expert_shards
        axes, room = self.collectives.experts_over, math.ceil(min(1, ROOM / size) * T * k)
        permutation = ops.sort_by_expert(experts, local * size, T * k)
        routes = plan(axes, permutation.group_sizes, size, room)
        permutation, routes = jax.tree.map(lambda a: checkpoint_name(a, "routing"), (permutation, routes))
        max_rows = ops.most_rows(size * T, k, local, capacity)

        def to_experts(rows: jax.Array) -> jax.Array:
            return exchange(axes, max_rows, room, routes.rounds, routes.sent, routes.arrived, rows)

        received = checkpoint_name(to_experts(ops.dispatch(x, permutation, k)), "dispatched")
        own_weights: jax.Array = ops.permute(weights.reshape(-1), permutation)
        row_weights = checkpoint_name(to_experts(own_weights[:, None]), "routing")[:, 0]
        arguments = activation, self.kernels, received, row_weights, w_up, w_down, routes.group_sizes
        y: jax.Array = ops.expert_mlp(*arguments, self.max_over_devices, biases)
        y = exchange(axes, T * k, room, routes.rounds, routes.arrived, routes.sent, y)
        return ops.combine(y, permutation, k)


class Segments(NamedTuple):
    """Where a device has the rows that it exchanges with each of n devices for each of that pair's L experts.

    The rows of one pair and expert are together. A pair's rows are sent in the order of their experts.
    """

    starts: jax.Array  # [n, L]
    sizes: jax.Array

    @property
    def before(self) -> jax.Array:
        """Number of the pair's rows for its experts before each, `[n, L]`."""
        return jnp.cumsum(self.sizes, axis=1) - self.sizes

    def of_pairs(self, numbers: jax.Array) -> jax.Array:
        """The rows of each pair with these `numbers [N]` in the order of sending → `[n, N]`; any row past its last."""
        ends = self.before + self.sizes
        expert = jnp.sum(numbers[None, :, None] >= ends[:, None, :], axis=2)
        expert = jnp.minimum(expert, ends.shape[1] - 1)
        return numbers + jnp.take_along_axis(self.starts - self.before, expert, axis=1)

    def of_rows(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """For each row of `[rows]`: the pair's device, and the row's number in the order of sending, or -1."""
        starts, sizes = self.starts.reshape(-1), self.sizes.reshape(-1)
        order = jnp.argsort(2 * starts + (sizes > 0))  # a segment with rows is after the empty ones at its start
        row = jnp.arange(rows)
        segment = order[jnp.searchsorted(starts[order], row, side="right", method="scan_unrolled") - 1]
        offset = row - starts[segment]
        number = jnp.where(offset < sizes[segment], offset + self.before.reshape(-1)[segment], -1)
        return segment // self.starts.shape[1], number


class Routes(NamedTuple):
    """Rows sorted by expert on every device ↔ rows on their experts' devices, sorted by expert, then by sender."""

    sent: Segments  # own assignments
    arrived: Segments  # those of own experts
    rounds: jax.Array  # number of all-to-alls: the same on all devices of a group
    group_sizes: jax.Array  # number of rows received for each own expert


def plan(axes: Axes, counts: jax.Array, size: int, room: int) -> Routes:
    """The routes of this device's `counts [E]` rows for each expert; `size` devices have E / size experts each.

    An all-to-all has `room` rows for each pair of devices.
    """
    rank = lax.axis_index(axes)
    counts = collectives.all_gather(counts, axes).reshape(size, size, -1)  # [senders, receivers, own experts]
    sent = counts[rank]
    starts = (jnp.cumsum(sent) - sent.reshape(-1)).reshape(sent.shape)
    arrived = counts[:, rank]
    by_expert = arrived.T.reshape(-1)
    arrives_at = (jnp.cumsum(by_expert) - by_expert).reshape(arrived.T.shape).T
    rounds = -(-jnp.max(counts.sum(axis=2)) // room)
    return Routes(Segments(starts, sent), Segments(arrives_at, arrived), rounds, arrived.sum(axis=0))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(
    axes: Axes, rows: int, room: int, rounds: jax.Array, source: Segments, target: Segments, x: jax.Array
) -> jax.Array:
    """Send the rows of `x [R, D]` from the segments `source` to `target` → `[rows, D]`, zeros in other rows.

    `rounds` all-to-alls send `room` rows from each device to each other.
    """
    device, number = target.of_rows(rows)

    def sent(first: jax.Array | int, y: jax.Array) -> jax.Array:
        """`y` with the rows whose numbers are from `first` to `first + room - 1`."""
        blocks = x.at[source.of_pairs(first + jnp.arange(room)).reshape(-1)].get(mode="clip")
        blocks = collectives.all_to_all(blocks, axes, 0, 0, tiled=True)
        arrived = blocks.at[device * room + number - first].get(mode="clip")
        now = (number >= first) & (number < first + room)
        return jnp.where(now[:, None], arrived, y)

    y = sent(0, jnp.zeros((rows, *x.shape[1:]), x.dtype))
    return lax.fori_loop(1, rounds, lambda number, y: sent(number * room, y), y)


def _exchange_forward(axes, rows, room, rounds, source, target, x):
    return exchange(axes, rows, room, rounds, source, target, x), (rounds, source, target, x.shape[0])


def _exchange_backward(axes, rows, room, residuals, dy):
    rounds, source, target, sent = residuals
    return None, None, None, exchange(axes, sent, room, rounds, target, source, dy)


exchange.defvjp(_exchange_forward, _exchange_backward)
