"""`all_gather`: every device gets all tokens of its group and computes the assignments to its own experts.

The sums are reduce-scattered. A device sends its T tokens to each of the n - 1 others.
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.parallel import collectives
from megajax.parallel.collectives import gather_tiles
from megajax.parallel.experts.contract import ExpertParallel


class GatheredExperts(ExpertParallel):
    def apply(self, activation, x, experts, weights, matrices, capacity) -> jax.Array:
        local = matrices.num_experts
        x, experts, weights = (gather_tiles(a, self.axes, 0) for a in (x, experts, weights))
        if matrices.token_ids is not None:
            matrices = matrices.with_ids(gather_tiles(matrices.token_ids, self.axes, 0))
        own = experts - lax.axis_index(self.axes) * local
        own = jnp.where((own >= 0) & (own < local), own, local)  # `local`: an expert of another device
        y = super().apply(activation, x, own, weights, matrices, capacity)
        return collectives.psum_scatter(y, self.axes, scatter_dimension=0, tiled=True)
