"""The table from logical axes to the mesh, and the functions that read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from mesh_models import COMMON, HYBRID, KIMI, MAMBA, MODERN_BERT, TINY

from megajax.config import ModelConfig
from megajax.errors import ConfigError
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, parameters
from megajax.sharding import (
    BATCH_SPEC,
    LOGICAL_TO_MESH,
    NON_BLOCK_AXES,
    STORAGE_AXES,
    Placement,
    place,
    place_all,
    place_in_use,
    to_canonical,
    to_stored,
)

STORAGE = ("fsdp", "expert", "context", "data")
ENDS = (*STORAGE, "pipeline")


def sizes(**given):
    return dict.fromkeys(AXES, 1) | given


def test_storage_puts_the_axis_gathered_layer_by_layer_first_and_data_last():
    assert STORAGE_AXES == STORAGE
    assert NON_BLOCK_AXES == ENDS, "what lies outside the blocks is stored on every stage"


def test_a_batch_lies_over_the_batch_axes_and_its_sequence_over_context():
    assert BATCH_SPEC == P(None, ("data", "fsdp", "expert"), "context")


@pytest.mark.smoke
@pytest.mark.parametrize("layers", [(0, 2, 4, 1, 3, 5), (0, 2, 4, 1, 3, -1), (4, 0, -1, 3, 1, 2)], ids=str)
def test_layers_in_any_stored_order_become_those_of_the_model(layers):
    """Layer l has the number l + 1; an empty row is zeros."""
    count = max(layers) + 1
    stored = np.array([[layer + 1] for layer in layers], np.float32)
    placement = Placement((count, 1), ("layers", "embed"), P(), (6, 1), None, 1, layers)
    canonical = np.asarray(to_canonical(stored, placement))
    np.testing.assert_array_equal(canonical[:, 0], 1 + np.arange(count))
    np.testing.assert_array_equal(to_stored(canonical, placement), stored)


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((2, 64, 8, 4), ("layers", "embed", "heads", "head"), P("pipeline", STORAGE, "tensor", None)),
        ((2, 64, 4, 4), ("layers", "embed", "kv_heads", "head"), P("pipeline", STORAGE, "tensor", None)),
        ((2, 8, 4, 64), ("layers", "heads", "head", "embed"), P("pipeline", "tensor", None, STORAGE)),
        ((2, 64, 96), ("layers", "embed", "mlp"), P("pipeline", STORAGE, "tensor")),
        ((128, 64), ("vocab", "embed"), P("tensor", ENDS)),
        ((16, 64), ("positions", "embed"), P(None, ENDS)),
        ((2, 64), ("layers", "norm"), P("pipeline", None)),
        ((2, 96), ("layers", "mlp"), P("pipeline", "tensor")),
    ],
    ids=str,
)
def test_a_weight_lies_where_the_table_says(shape, axes, spec):
    placement = place(shape, axes, sizes(data=2, fsdp=2, tensor=4))
    assert placement.spec == spec
    assert placement.shape == placement.stored_shape == shape
    assert placement.kv_groups == 1
    used = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    assert set(placement.replicated_axes) == set(AXES) - used
    assert placement.storage_dim == (axes.index("embed") if "embed" in axes else None)


@pytest.mark.parametrize("axis", AXES)
def test_in_use_each_axis_divides_every_matrix(axis):
    """There no axis divides stages or a batch; over `tensor` heads and widths are divided, over `expert` experts."""
    matrix = place_in_use((2, 64, 96), ("layers", "embed", "mlp"), sizes(**{axis: 4}))
    assert matrix == (P(None, None, (axis,)) if axis == "tensor" else P(None, (axis,), None))
    experts = place_in_use((2, 8, 64, 96), ("layers", "experts", "embed", "expert_mlp"), sizes(**{axis: 4}))
    assert experts == (
        P(None, None, (axis,), None) if axis not in ("expert", "tensor") else P(None, (axis,), None, None)
    )


@pytest.mark.parametrize(
    ("mesh", "stored"),
    [
        ({}, 36),
        ({"fsdp": 4}, 36),
        ({"fsdp": 8}, 40),
        ({"data": 4, "fsdp": 2}, 40),
        ({"data": 2, "fsdp": 2, "expert": 2, "context": 2}, 48),
        ({"tensor": 8}, 36),
        ({"data": 96}, 96),
    ],
    ids=str,
)
def test_a_stored_dimension_is_padded_to_a_multiple_of_its_shards(mesh, stored):
    assert place((36, 64), ("embed", "mlp"), sizes(**mesh)).stored_shape == (stored, 64)


def test_padding_is_zeros_at_the_end_and_comes_off_again():
    placement = place((5, 3, 2), ("heads", "embed", "head"), sizes(data=4))
    x = jnp.arange(1.0, 31).reshape(5, 3, 2)
    stored = to_stored(x, placement)
    assert stored.shape == (5, 4, 2)
    assert not stored[:, 3].any()
    assert np.array_equal(stored[:, :3], x)
    assert np.array_equal(to_canonical(stored, placement), x)


@pytest.mark.parametrize(
    ("tensor", "groups", "entry"), [(2, 1, "tensor"), (4, 1, "tensor"), (8, 2, None), (16, 4, None)]
)
def test_fewer_key_value_heads_than_devices_are_replicated(tensor, groups, entry):
    placement = place((2, 64, 4, 8), ("layers", "embed", "kv_heads", "head"), sizes(tensor=tensor))
    assert placement.kv_groups == groups
    assert placement.spec == P("pipeline", STORAGE, entry, None)
    assert ("tensor" in placement.replicated_axes) == (groups > 1)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((64, 6, 8), ("embed", "heads", "head")),
        ((64, 6), ("embed", "mlp")),
        ((64, 3, 8), ("embed", "kv_heads", "head")),
    ],
    ids=str,
)
def test_what_computes_must_divide(shape, axes):
    cure = "mesh.tensor=4 does not divide the dimension .*: give it another size, or the axis whole"
    with pytest.raises(ConfigError, match=cure):
        place(shape, axes, sizes(tensor=4))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_no_spec_uses_a_mesh_axis_twice_and_every_matrix_is_fully_sharded(kind):
    gpt2 = {"norm": "layernorm", "position": "learned", "max_positions": 8, "attention_bias": True, "mlp_bias": True}
    config = ModelConfig.model_validate(
        {"num_layers": 2, "hidden_size": 64, "num_heads": 8, "vocab_size": 250, **(gpt2 if kind == "gpt2" else {})}
    )
    declared = parameters(Transformer(config))
    placements = place_all(declared, sizes(data=2, fsdp=2, tensor=2))
    assert placements.keys() == declared.keys()
    for name, placement in placements.items():
        used = [axis for entry in placement.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())]
        assert len(used) == len(set(used)), name
        if declared[name].role in ("matrix", "embedding"):
            assert set(STORAGE) <= set(used), name
        assert all(axis in LOGICAL_TO_MESH for axis in placement.axes)


def test_a_devices_shard_is_the_one_that_its_place_says():
    mesh = build_mesh(sizes(data=2, fsdp=2, tensor=2))
    placement = place((8, 4), ("embed", "mlp"), sizes(data=2, fsdp=2, tensor=2))
    sharding = NamedSharding(mesh, placement.spec)
    x = jax.device_put(jnp.arange(32).reshape(8, 4), sharding)
    for shard in x.addressable_shards:
        _, data, fsdp, _, _, tensor = (int(i[0]) for i in np.where(mesh.devices == shard.device))
        first = 4 * fsdp + 2 * data  # fsdp first: after data's gather a shard is contiguous
        expected = np.arange(32).reshape(8, 4)[first : first + 2, 2 * tensor : 2 * tensor + 2]
        assert np.array_equal(shard.data, expected)


def test_each_axis_divides_the_weights_of_a_model_in_use():
    """It has no stages and no batch of its own: but `tensor`, which divides as in training, all axes divide D."""
    for axis in AXES:
        expected = P(None, "tensor") if axis == "tensor" else P(axis, None)
        assert place_in_use((64, 96), ("embed", "mlp"), sizes(**{axis: 2})) == expected
    experts = ((4, 64, 96), ("experts", "embed", "expert_mlp"))
    assert place_in_use(*experts, sizes(expert=2, tensor=2, data=2)) == P(("expert", "tensor"), "data", None)
    assert place_in_use(*experts, sizes(expert=2, tensor=3)) == P("expert", None, None), "experts are whole"


FP32 = ("router", "sinks", "decay_rate", "decay_bias", "step_bias", "skip")  # and norms: small, and sensitive


@pytest.mark.parametrize("model", [HYBRID, KIMI, MAMBA, MODERN_BERT, TINY | {"attention_sinks": True}])
def test_norms_routers_sinks_and_decays_compute_in_fp32(model):
    declared = parameters(Transformer(ModelConfig.model_validate(COMMON | model)))
    for name, placement in place_all(declared, sizes()).items():
        last = name.rpartition(".")[-1]
        assert placement.computes_in_fp32 == ("norm" in last or last in FP32), name
    assert place((64, 3), ("embed", "outputs"), sizes()).computes_in_fp32  # of an objective's own head
