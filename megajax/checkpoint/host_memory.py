"""Pinned host memory for asynchronous saves, and copies of what is there already."""

from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megajax import cluster

PINNED = "pinned_host"


def reserve(tree: Any) -> None:
    """Let this process allocate the pinned host memory that a save of `tree` needs; jax keeps it for later copies.

    `tree` has arrays or `ShapeDtypeStruct`s with shardings. CUDA pins about 2 GB/s and no kernel starts meanwhile, so
    this belongs before the first step and not into the first save. Only on GPUs.
    """
    copies = []
    for number, array in enumerate(jax.tree.leaves(tree)):
        holders: dict[str, list[Any]] = {}
        for device, index in array.sharding.devices_indices_map(array.shape).items():
            holders.setdefault(str(index), []).append(device)
        empty = np.zeros(array.sharding.shard_shape(array.shape), array.dtype)
        for replicas in holders.values():  # orbax divides their copies among the replicas
            device = replicas[number % len(replicas)]
            if device.process_index == cluster.current().rank and _has_pinned_memory(device):
                copies.append(jax.device_put(empty, SingleDeviceSharding(device, memory_kind=PINNED)))
    jax.block_until_ready(copies)


def own_copies(tree: Any) -> Any:
    """The tree with copies of its arrays in pinned host memory (`optimizer.offload`), and its other arrays themselves.

    A save reads such an array where it is, and while it does a GPU refuses the step to which the array is given.
    """

    def copied(array: jax.Array) -> jax.Array:
        if array.sharding.memory_kind != PINNED:
            return array
        shards = [copy_of(shard) for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)

    return jax.tree.map(copied, tree)


def copy_of(shard: Any) -> jax.Array:
    """A copy of a shard of an array in pinned host memory, which a device writes when it gets there."""
    return jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=PINNED), may_alias=False)


def _has_pinned_memory(device: Any) -> bool:
    return device.platform == "gpu" and any(memory.kind == PINNED for memory in device.addressable_memories())
