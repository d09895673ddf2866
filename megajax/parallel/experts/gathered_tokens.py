"""`all_gather`: every device gets all tokens of its group and computes the assignments to its own experts.

The sums are reduce-scattered. A device sends its T tokens to each of the n - 1 others.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.experts import SortedRoute
from megajax.parallel import collectives
from megajax.parallel.collectives import gather_tiles
from megajax.parallel.experts.contract import ExpertParallel


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredRoute(SortedRoute):
    """The tokens of all devices to the rows of own experts."""

    axes: tuple[str, ...] = field(metadata={"static": True})

    def send(self, x: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        return super().send(*(gather_tiles(a, self.axes, 0) for a in (x, *numbers)))

    def back(self, rows: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        scatter = {"scatter_dimension": 0, "tiled": True}
        return tuple(collectives.psum_scatter(a, self.axes, **scatter) for a in super().back(rows, *numbers))


class GatheredExperts(ExpertParallel):
    def route(self, experts, num_experts, capacity) -> GatheredRoute:
        everyones = gather_tiles(experts, self.axes, 0)
        own = everyones - lax.axis_index(self.axes) * num_experts
        own = jnp.where((own >= 0) & (own < num_experts), own, num_experts)  # else an expert of another device
        route = SortedRoute.of(own, num_experts, capacity)
        is_routed = jnp.any(experts < num_experts * self.devices, axis=1)
        return GatheredRoute(route.group_sizes, route.permutation, is_routed, route.k, self.axes)
