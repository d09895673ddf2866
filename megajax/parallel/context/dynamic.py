"""`dynamic`: attention inside groups of devices, which each microbatch has of its own sizes.

A group's documents are on its devices alone (`layout/context_groups.py`), so its keys are gathered there alone; a group
of one device sends nothing. The program has a branch for each size. All devices of a group take the same branch, others
at the same time another one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.model.comm import LatentKeys, TokenPositions
from megajax.ops.partial_attention import Part
from megajax.parallel.context.gathered_keys import GatheredContext
from megajax.parallel.context.strategy import Keys, ToParts


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

    def _in_group(self, run: Callable[[GatheredContext], Any], positions: TokenPositions) -> Any:
        """`run` with the attention of this device's group."""
        whole = GatheredContext(self.devices, self.scores, self.window, False, self.causal)
        sizes = [1 << power for power in range(self.devices.bit_length())]
        groups = [replace(whole, devices=size, groups=self.devices // size) for size in sizes]
        assert positions.group_size is not None
        power = jnp.searchsorted(jnp.array(sizes), positions.group_size, method="compare_all")
        return lax.switch(power, [partial(run, group) for group in groups])
