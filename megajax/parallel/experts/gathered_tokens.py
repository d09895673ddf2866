"""`all_gather`: every device gets all tokens of its group and computes the assignments to its own experts.

The sums are reduce-scattered. A device sends its T tokens to each of the n - 1 others. Its experts' rows have `room`
times an even share of the assignments as their room; with more the experts compute the others in further rounds.
"""

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import router
from megajax.ops.experts import Permutation, SortedRoute, most_rows, sort_by_expert
from megajax.ops.grouped_rows import Rounds
from megajax.parallel import collectives
from megajax.parallel.collectives import gather_tiles
from megajax.parallel.experts.contract import ExpertParallel

LATER_ROOM = 1  # of each later round, as a multiple of an even share


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredRoute(SortedRoute):
    """The tokens of all devices to the rows of own experts: those of one round."""

    whole: Permutation | None  # of all rounds, if more than one may be needed
    largest: jax.Array | None  # the rows of the device that has most, likewise
    axes: tuple[str, ...] = field(metadata={"static": True})
    in_rounds: Rounds = field(metadata={"static": True})

    def send(self, x: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        return super().send(*(gather_tiles(a, self.axes, 0) for a in (x, *numbers)))

    def back(self, rows: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        scatter = {"scatter_dimension": 0, "tiled": True}
        return tuple(collectives.psum_scatter(a, self.axes, **scatter) for a in super().back(rows, *numbers))

    @property
    def rounds(self) -> jax.Array | None:
        return None if self.largest is None else self.in_rounds.number(self.largest)

    def round(self, index: jax.Array) -> "GatheredRoute":
        assert self.whole is not None
        part = self.whole.part(self.in_rounds.start(index), self.in_rounds.rows)
        return replace(self, group_sizes=part.group_sizes, permutation=part)


class GatheredExperts(ExpertParallel):
    def route(self, experts, num_experts, capacity) -> GatheredRoute:
        everyones = gather_tiles(experts, self.axes, 0)
        own = everyones - lax.axis_index(self.axes) * num_experts
        own = jnp.where((own >= 0) & (own < num_experts), own, num_experts)  # else an expert of another device
        (T, k), n, whole, largest = experts.shape, self.devices, None, None
        in_rounds = self.rounds(T, k, num_experts, capacity)
        permutation = sort_by_expert(own, num_experts, in_rounds.most)
        if in_rounds.first < in_rounds.most:
            permutation, whole = permutation.part(0, in_rounds.first), permutation
            largest = router.count(everyones, num_experts * n).reshape(n, -1).sum(axis=1).max()
        is_routed = jnp.any(experts < num_experts * n, axis=1)
        return GatheredRoute(permutation.group_sizes, permutation, is_routed, k, whole, largest, self.axes, in_rounds)

    def rows(self, tokens: int, k: int, num_experts: int, capacity: int | None) -> int:
        return self.rounds(tokens, k, num_experts, capacity).first

    def rounds(self, tokens: int, k: int, num_experts: int, capacity: int | None) -> Rounds:
        """The rounds of own experts' rows."""
        return Rounds.of(tokens * k, most_rows(self.devices * tokens, k, num_experts, capacity), self.room, LATER_ROOM)
