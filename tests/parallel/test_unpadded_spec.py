"""Shardings of canonical arrays while they are saved from a mesh that does not divide them."""

import pytest
from jax.sharding import PartitionSpec as P

from megajax.mesh import AXES
from megajax.sharding import place, unpadded_spec


def spec(shape, axes, **sizes):
    sizes = dict.fromkeys(AXES, 1) | sizes
    return unpadded_spec(place(shape, axes, sizes), sizes)


@pytest.mark.smoke
def test_axes_that_do_not_divide_the_stored_dimension_go_to_another_one():
    up = ("layers", "embed", "mlp")
    every = ("fsdp", "expert", "context", "data")
    assert spec((4, 32, 64), up, fsdp=4, data=2) == P("pipeline", every, "tensor")
    # 36 is a multiple of 4, not of 8: data goes to the layers.
    assert spec((4, 36, 64), up, fsdp=4, data=2) == P(("pipeline", "data"), ("fsdp", "expert", "context"), "tensor")
    # Nothing but the vocabulary divides by 96.
    embedding = spec((960, 4096), ("vocab", "embed"), data=96)
    assert embedding == P(("tensor", "data"), ("fsdp", "expert", "context", "pipeline"))
    # Nothing divides: a copy everywhere.
    assert spec((5, 7, 11), up, data=96) == P("pipeline", ("fsdp", "expert", "context"), "tensor")
