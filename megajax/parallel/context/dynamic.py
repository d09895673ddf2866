"""`dynamic`: attention inside groups of devices, which each microbatch has of its own sizes.

A group's documents are on its devices alone (`layout/context_groups.py`), so its keys are gathered there alone; a group
of one device sends nothing. The program has a branch for each size. All devices of a group take the same branch, others
at the same time another one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from megajax.model.comm import LatentKeys, TokenPositions
from megajax.ops.partial_attention import Part, Ranges
from megajax.parallel import collectives
from megajax.parallel.context.gathered_keys import GatheredContext
from megajax.parallel.context.strategy import Keys, ToParts
from megajax.parallel.context.token_order import chunk_starts, sequence_ranges


class DynamicContext(ToParts):
    """`all_gather` within groups of `TokenPositions.group_size` devices: 1, 2, 4, ... up to all."""

    def forward(self, q, kv, positions) -> Part:
        return self._in_group(lambda group: group.forward(q, kv, positions), positions)

    def backward(self, q, kv, positions, whole, dout) -> tuple[jax.Array, Keys]:
        return self._in_group(lambda group: group.backward(q, kv, positions, whole, dout), positions)

    def forward_latent(self, linear, q, keys, positions) -> Part:
        return self._in_group(lambda group: group.forward_latent(linear, q, keys, positions), positions)

    def backward_latent(self, linear, q, keys, positions, whole, dout) -> tuple[jax.Array, LatentKeys]:
        return self._in_group(lambda group: group.backward_latent(linear, q, keys, positions, whole, dout), positions)

    def _in_group(self, run: Callable[["GroupOfDevices"], Any], positions: TokenPositions) -> Any:
        """`run` with the attention of this device's group."""
        whole = GroupOfDevices(self.devices, self.scores, self.window, False, self.causal, self.devices)
        sizes = [1 << power for power in range(self.devices.bit_length())]
        assert positions.group_size is not None
        power = jnp.searchsorted(jnp.array(sizes), positions.group_size, method="compare_all")
        return lax.switch(power, [partial(run, replace(whole, devices=size)) for size in sizes])


@dataclass(frozen=True)
class GroupOfDevices(GatheredContext):
    """Attention of `devices` neighbours among those of `context`, whose queries see no keys of other devices.

    Its collectives list the devices backwards. XLA's CPU runtime tells the collectives of a step apart by the devices
    in their order alone, and those in a branch may run beside others, such as a router's sums over the same devices.
    """

    context: int = 1

    def _all(self, a: jax.Array, axis: int) -> jax.Array:
        if self.devices == 1:
            return a
        return collectives.all_gather(a, "context", axis=axis, tiled=True, axis_index_groups=self._members)

    def _sums(self, a: jax.Array, axis: int) -> jax.Array:
        if self.devices == 1:
            return a
        how = {"scatter_dimension": axis, "tiled": True, "axis_index_groups": self._members}
        return collectives.psum_scatter(a, "context", **how)

    def _ranges(self, positions: TokenPositions) -> Ranges:
        first, end = sequence_ranges(positions, self.window, self.context, self.causal)
        before = self._first * positions.index.shape[1]
        return first - before, end - before

    def _chunk_starts(self, positions: TokenPositions) -> jax.Array:
        assert positions.chunks is not None
        return chunk_starts(lax.dynamic_slice_in_dim(positions.chunks, self._first, self.devices)[::-1])

    @property
    def _members(self) -> list[list[int]]:
        """The devices of each group."""
        return np.arange(self.context).reshape(-1, self.devices)[:, ::-1].tolist()

    @property
    def _first(self) -> jax.Array:
        """The first device of this device's group."""
        return lax.axis_index("context") // self.devices * self.devices
