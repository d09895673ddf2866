"""Whole matrices and the arrays that an optimizer keeps for each: which device has them changes nothing."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from single_device import stored

from megajax.mesh import AXES, build_mesh
from megajax.optim.matrix_exchange import MatrixLayout, on_whole_matrices
from megajax.sharding import EMPTY, LOGICAL_TO_MESH, place, to_canonical

# Several matrices a device, so that their order shows; each with axes that divide rows, columns, or hold copies.
PARAMETERS = {
    "key": ((6, 8, 1, 4), ("layers", "embed", "kv_heads", "head")),  # one KV head: copies over tensor
    "down": ((6, 8, 6), ("layers", "embed", "rank")),  # copies over tensor, padding where 3 or 4 devices divide D
    "up": ((6, 8, 12), ("layers", "embed", "mlp")),
    "experts": ((3, 4, 8, 12), ("layers", "experts", "embed", "expert_mlp")),
    "modules": ((2, 8, 12), ("modules", "embed", "mlp")),  # on all stages
}
MESHES = [{}, {"data": 2, "tensor": 4}, {"fsdp": 3, "tensor": 2}, {"expert": 2, "context": 2, "tensor": 2}]
MESHES += [{"pipeline": 3, "tensor": 2}]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_matrix_meets_its_own_array_on_every_mesh(name, mesh):
    (shape, axes), sizes = PARAMETERS[name], {axis: mesh.get(axis, 1) for axis in AXES}
    devices = build_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    count, layers = shape[0], None
    if "pipeline" in mesh:  # as with virtual stages, some of which have no layer
        layers = (*range(0, count, 2), EMPTY, EMPTY, EMPTY, *range(1, count, 2))
    placement = place(shape, axes, sizes, layers)
    layout = MatrixLayout.of(placement, sizes, per_head=False, turns=False)
    owned = layout.owned((layout.inputs, layout.outputs), sizes)

    def on_mesh(x, own):
        return jax.device_put(stored(x, own, x.dtype), NamedSharding(devices, own.spec))

    rng = np.random.default_rng(0)
    x = rng.integers(1, 1000, shape).astype(np.float32)
    matrices = x.reshape(-1, layout.inputs, layout.outputs)
    kept = rng.integers(1, 1000, matrices.shape).astype(np.float32)  # in the model's order
    compute = on_whole_matrices(
        lambda m, slots: (m + 2000 * slots["kept"], {"kept": slots["kept"] + 3 * m}), {name: layout}, devices, "float32"
    )
    slots = {name: {"kept": on_mesh(kept, owned)}}
    rows = {shard.data.shape[0] for shard in slots[name]["kept"].addressable_shards}
    assert rows == {owned.stored_shape[0] // devices.size}  # each device stores its own only
    out, slots = jax.jit(compute)({name: on_mesh(x, placement)}, slots)
    assert placement.spec[0] == LOGICAL_TO_MESH[axes[0]]
    np.testing.assert_array_equal(
        to_canonical(np.asarray(out[name]), placement).reshape(matrices.shape), matrices + 2000 * kept
    )
    np.testing.assert_array_equal(to_canonical(np.asarray(slots[name]["kept"]), owned), kept + 3 * matrices)


@pytest.mark.parametrize(
    ("shape", "axes", "turned"),
    [
        ((8, 12), ("mlp", "embed"), False),
        ((12, 8), ("embed", "mlp"), True),
        ((8, 8), ("embed", "rank"), False),
        ((8, 8), ("rank", "embed"), True),  # so that storage divides its rows
    ],
)
def test_a_matrix_is_turned_where_it_has_more_rows_than_columns(shape, axes, turned):
    sizes = dict.fromkeys(AXES, 1)
    layout = MatrixLayout.of(place((2, *shape), ("layers", *axes), sizes), sizes, per_head=False, turns=True)
    assert (layout.transposed, layout.shape.rows, layout.shape.columns) == (turned, 8, max(shape))


@pytest.mark.parametrize(
    ("shape", "axes", "whole", "per_head"),  # (inputs, outputs, number of matrices)
    [
        ((3, 8, 4, 6), ("layers", "embed", "heads", "head"), (8, 24, 3), (8, 6, 12)),
        ((3, 8, 2, 6), ("layers", "embed", "kv_heads", "head"), (8, 12, 3), (8, 6, 6)),
        ((3, 5, 4, 6), ("layers", "rank", "heads", "head"), (5, 24, 3), (5, 6, 12)),
        ((3, 4, 6, 8), ("layers", "heads", "head", "embed"), (24, 8, 3), (24, 8, 3)),  # heads are its inputs
        ((3, 8, 12), ("layers", "embed", "mlp"), (8, 12, 3), (8, 12, 3)),
    ],
)
def test_a_head_of_a_projections_output_may_be_a_matrix_by_itself(shape, axes, whole, per_head):
    sizes = dict.fromkeys(AXES, 1)
    for alone, expected in ((False, whole), (True, per_head)):
        layout = MatrixLayout.of(place(shape, axes, sizes), sizes, per_head=alone, turns=False)
        assert (layout.inputs, layout.outputs, layout.count) == expected
