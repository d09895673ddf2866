"""Copies of what the next step is given."""

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.checkpoint.host_memory import own_copies


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_a_save_has_copies_of_arrays_in_pinned_memory():
    """A GPU refuses a step that is given an array which a save reads; jax on CPUs makes a copy of its own."""
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
    divided, replicated = P("fsdp"), P()
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    offloaded = {
        name: jax.device_put(numbers, NamedSharding(mesh, spec, memory_kind="pinned_host"))
        for name, spec in {"divided": divided, "replicated": replicated}.items()
    }
    on_devices = jax.device_put(numbers, NamedSharding(mesh, divided))
    copies = own_copies({"moments": offloaded, "weights": on_devices})
    assert copies["weights"] is on_devices
    for name, array in offloaded.items():
        copy = copies["moments"][name]
        assert copy.sharding == array.sharding
        assert not {*pointers(copy)} & {*pointers(array)}
        np.testing.assert_array_equal(copy, numbers)
