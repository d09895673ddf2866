"""`all_to_all`: every assignment's row is sent to its expert's device, where rows are sorted by expert (Lepikhin et al.
2020).

The all-to-all has blocks of equal size. Those of the first round have `room` times an even share of the k·T rows, so
(n - 1)/n · room·k·T rows are sent, and room·k·T have room where they arrive. With balanced devices all rows fit. Else
the experts compute the others in further, smaller rounds (`ops/expert_mlp.py`). Rows of dropped assignments are not
sent.

Why not `lax.ragged_all_to_all`, which sends the k·T·(n - 1)/n rows at once: docs/records/log.md, 2026-11-25.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.expert_mlp import Route
from megajax.ops.experts import Permutation, most_rows, rows_within, sort_by_expert, sum_of_tokens
from megajax.ops.grouped_rows import Rounds
from megajax.parallel import collectives
from megajax.parallel.experts.contract import ExpertParallel

LATER_ROOM = 0.5  # of each later round, as a multiple of an even share

Axes = tuple[str, ...]
Arrays = tuple[jax.Array, ...]


class RowRanges(NamedTuple):
    """Where a device has the rows that it exchanges with each of n devices for each of that pair's L experts.

    The rows of one pair and expert are together. A pair's rows are sent in the order of their experts.
    """

    starts: jax.Array  # [n, L]
    sizes: jax.Array

    def pairs_of(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """(the other device, the number in the order of sending) of each of `rows` rows; -1 if it is in no range."""
        first, size, row = self.starts.reshape(-1), self.sizes.reshape(-1), jnp.arange(rows)
        order = jnp.argsort(2 * first + (size > 0))  # a range with rows is after the empty ones at its start
        found = order[jnp.searchsorted(first[order], row, side="right", method="scan_unrolled") - 1]
        offset, before = row - first[found], (jnp.cumsum(self.sizes, axis=1) - self.sizes).reshape(-1)
        number = jnp.where(offset < size[found], offset + before[found], -1)
        return found // self.starts.shape[1], number

    def rows_of(self, numbers: jax.Array) -> jax.Array:
        """The rows of each pair with these `numbers [N]` in the order of sending → `[n, N]`; any row past its last."""
        ends = jnp.cumsum(self.sizes, axis=1)
        expert = jnp.sum(numbers[None, :, None] >= ends[:, None, :], axis=2)
        expert = jnp.minimum(expert, ends.shape[1] - 1)
        return numbers + jnp.take_along_axis(self.starts + self.sizes - ends, expert, axis=1)


class Assignments(NamedTuple):
    """The assignments of all devices of a group, as one of them knows them."""

    permutation: Permutation  # of its own
    is_routed: jax.Array  # [T]: whether an own token has an expert
    counts: jax.Array  # [senders, receivers, L]: how many each sender has for each expert


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExchangedRoute(Route):
    """Own assignments to rows on their experts' devices, sorted by expert, then by sender: those of one round.

    An index past the last row means that there is none.
    """

    sent: jax.Array  # [n·room]: the assignment in each row that is sent
    arrived: jax.Array  # [n·room]: which of the rows from other devices each of the experts' rows is
    sent_back: jax.Array  # [n·room]: the experts' row in each row that is sent back
    came_back: jax.Array  # [T·k]: which of the rows that come back each assignment has
    assignments: Assignments
    axes: Axes = field(metadata={"static": True})
    in_rounds: Rounds = field(metadata={"static": True})  # of the rows of a pair of devices

    @classmethod
    def of_round(
        cls, assignments: Assignments, axes: Axes, in_rounds: Rounds, start: jax.Array | int, room: int
    ) -> "ExchangedRoute":
        """`room` rows of each pair of devices, from number `start` on."""
        permutation, rank, n = assignments.permutation, lax.axis_index(axes), len(assignments.counts)
        own, here = assignments.counts[rank], assignments.counts[:, rank]
        skipped, sizes = rows_within(own, start, room)
        ranges = RowRanges((jnp.cumsum(own) - own.reshape(-1)).reshape(own.shape) + skipped, sizes)
        _, sizes = rows_within(here, start, room)
        by_expert = sizes.T.reshape(-1)
        arrivals = RowRanges((jnp.cumsum(by_expert) - by_expert).reshape(sizes.T.shape).T, sizes)

        def places(ranges: RowRanges, rows: int) -> jax.Array:
            device, number = ranges.pairs_of(rows)
            return jnp.where(number < 0, n * room, device * room + number)

        numbers = jnp.arange(room)
        return cls(
            sizes.sum(axis=0),
            permutation.order.at[ranges.rows_of(numbers).reshape(-1)].get(mode="clip"),
            places(arrivals, n * room),
            arrivals.rows_of(numbers).reshape(-1),
            places(ranges, len(permutation.order))[permutation.inverse],
            assignments,
            axes,
            in_rounds,
        )

    def send(self, x: jax.Array, *numbers: jax.Array) -> Arrays:
        k = len(self.came_back) // len(x)
        arrays = self._exchange(x[self.sent // k], *(each[self.sent] for each in numbers))
        return tuple(a.at[self.arrived].get(mode="fill", fill_value=0) for a in arrays)

    def back(self, rows: jax.Array, *numbers: jax.Array) -> Arrays:
        arrays = self._exchange(*(a.at[self.sent_back].get(mode="clip") for a in (rows, *numbers)))
        rows, *numbers_here = (a.at[self.came_back].get(mode="fill", fill_value=0) for a in arrays)
        return sum_of_tokens(rows, len(self.assignments.is_routed)), *numbers_here

    def rows(self, tokens: int) -> int:
        return len(self.arrived)

    def has_expert(self, tokens: int) -> jax.Array:
        return self.assignments.is_routed

    @property
    def rounds(self) -> jax.Array | None:
        return self.in_rounds.number(self.assignments.counts.sum(axis=2).max())

    def round(self, index: jax.Array) -> "ExchangedRoute":
        start, room = self.in_rounds.start(index), self.in_rounds.rows
        return self.of_round(self.assignments, self.axes, self.in_rounds, start, room)

    def _exchange(self, *arrays: jax.Array) -> Arrays:
        return tuple(collectives.all_to_all(a, self.axes, 0, 0, tiled=True) for a in arrays)


class Exchanged(ExpertParallel):
    def route(self, experts, num_experts, capacity) -> ExchangedRoute:
        (T, k), n = experts.shape, self.devices
        permutation = sort_by_expert(experts, num_experts * n, T * k)
        counts = collectives.all_gather(permutation.group_sizes, self.axes).reshape(n, n, num_experts)
        assignments = Assignments(permutation, jnp.any(experts < num_experts * n, axis=1), counts)
        in_rounds = self.rounds(T, k, num_experts, capacity)
        return ExchangedRoute.of_round(assignments, self.axes, in_rounds, 0, in_rounds.first)

    def rows(self, tokens: int, k: int, num_experts: int, capacity: int | None) -> int:
        return self.devices * self.rounds(tokens, k, num_experts, capacity).first

    def rounds(self, tokens: int, k: int, num_experts: int, capacity: int | None) -> Rounds:
        """The rounds of the rows of a pair of devices."""
        most = most_rows(tokens, k, num_experts, capacity)
        return Rounds.of(tokens * k / self.devices, most, self.room, LATER_ROOM)
