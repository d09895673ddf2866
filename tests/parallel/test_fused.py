"""A block's stored parameters and the fused weights computed with, against NumPy, from storage to compute and back."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from single_device import stored

from megajax.config import ModelConfig
from megajax.mesh import AXES, build_mesh
from megajax.model.block import Block
from megajax.sharding import place, to_canonical
from megajax.weights.table import side_by_side
from megajax.weights.weight import Weight, WeightDtypes, fuse

MESHES = [
    {},
    {"tensor": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    # Two KV heads for four and for eight devices.
    {"tensor": 4},
    {"tensor": 4, "fsdp": 2},
    {"data": 2, "tensor": 4},
    {"tensor": 8},
]
EVERY = ("fsdp", "expert", "context", "data")


def block(width=16):
    """A block's parameters: 3 layers of 8 heads and 2 KV heads of width 2, and an MLP of width 24."""
    heads, kv_heads = ("heads", "head"), ("kv_heads", "head")
    one_layer = {
        "attention.norm": ((width,), ("norm",)),
        "attention.query": ((width, 8, 2), ("embed", *heads)),
        "attention.key": ((width, 2, 2), ("embed", *kv_heads)),
        "attention.value": ((width, 2, 2), ("embed", *kv_heads)),
        "attention.output": ((8, 2, width), (*heads, "embed")),
        "attention.query_norm": ((2,), ("norm",)),
        "attention.query_bias": ((8, 2), heads),
        "attention.key_bias": ((2, 2), kv_heads),
        "attention.value_bias": ((2, 2), kv_heads),
        "attention.output_bias": ((width,), ("residual",)),
        "mlp.gate": ((width, 24), ("embed", "mlp")),
        "mlp.up": ((width, 24), ("embed", "mlp")),
        "mlp.down": ((24, width), ("mlp", "embed")),
        "mlp.gate_bias": ((24,), ("mlp",)),
        "mlp.up_bias": ((24,), ("mlp",)),
    }
    return {name: ((3, *shape), ("layers", *axes)) for name, (shape, axes) in one_layer.items()}


# Written by hand, independent of the code: the parameters in each fused weight.
PARTS = {
    "attention.qkv": ["attention.query", "attention.key", "attention.value"],
    "attention.qkv_bias": ["attention.query_bias", "attention.key_bias", "attention.value_bias"],
    "mlp.gate_up": ["mlp.gate", "mlp.up"],
    "mlp.gate_up_bias": ["mlp.gate_bias", "mlp.up_bias"],
}
WHOLE = ["attention.norm", "attention.output", "attention.query_norm", "attention.output_bias", "mlp.down"]
FUSED = {**PARTS, **{name: [name] for name in WHOLE}}


def mesh_id(sizes) -> str | None:
    return None if isinstance(sizes, int) else "-".join(f"{axis}{size}" for axis, size in sizes.items()) or "one"


# An odd width is padded on every second mesh.
over_meshes = pytest.mark.parametrize(
    ("sizes", "width"), [(mesh, (16, 13)[i % 2]) for i, mesh in enumerate(MESHES)], ids=mesh_id
)


def build(sizes, parameters):
    """(the weights by name, the placements of their parameters, mesh)."""
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    mesh = build_mesh(sizes, jax.devices()[: math.prod(sizes.values())])
    placements = {name: place(shape, axes, sizes) for name, (shape, axes) in parameters.items()}
    groups = side_by_side(placements, {name: tuple(parts) for name, parts in PARTS.items()})
    dtypes = WeightDtypes(jnp.dtype("float32"), jnp.dtype("float32"))
    return {name: Weight(name, members, sizes, dtypes) for name, members in groups.items()}, placements, mesh


def whole_numbers(parameters):
    """Canonical parameters by name; no number occurs twice."""
    ends = np.cumsum([math.prod(shape) for shape, _ in parameters.values()]).tolist()
    return {
        name: np.arange(end - math.prod(shape), end, dtype=np.float32).reshape(shape)
        for end, (name, (shape, _)) in zip(ends, parameters.items(), strict=True)
    }


def tensor_share(name, whole, axes, rank, tensor):
    """What rank `rank` of `tensor` computes with of a parameter: its heads, or the KV head of its query heads."""
    for dim, axis in enumerate(axes):
        if axis in ("heads", "kv_heads", "mlp"):
            size = whole.shape[dim]
            first = rank * size // tensor
            whole = np.take(whole, range(first, first + max(size // tensor, 1)), dim)
    if "head" in axes:
        at = axes.index("head")
        whole = whole.reshape(*whole.shape[: at - 1], -1, *whole.shape[at + 1 :])
    return whole


def fused_share(name, values, parameters, rank, tensor):
    """A rank's share of a fused weight, of `values` by parameter."""
    shares = [tensor_share(part, values[part], parameters[part][1], rank, tensor) for part in FUSED[name]]
    return np.concatenate(shares, axis=-1)


def devices(mesh):
    return list(np.ndindex(mesh.devices.shape))


def stored_arrays(placed, mesh, values):
    return {
        name: jax.device_put(stored(w, placed[name], w.dtype), NamedSharding(mesh, placed[name].spec))
        for name, w in values.items()
    }


@over_meshes
def test_a_device_computes_with_its_share_of_each_parameter_side_by_side(sizes, width):
    parameters, tensor = block(width), sizes.get("tensor", 1)
    weights, placements, mesh = build(sizes, parameters)
    values = whole_numbers(parameters)

    def local(shards):
        gathered = {name: weights[name].gather_per_step(w) for name, w in fuse(weights, shards).items()}
        return {n: weights[n].gather_per_layer(w)[(None,) * len(AXES)] for n, w in gathered.items()}

    specs = {name: placement.spec for name, placement in placements.items()}
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(*AXES), check_vma=False)
    found = {name: np.asarray(w) for name, w in jax.jit(run)(stored_arrays(placements, mesh, values)).items()}
    assert set(found) == set(FUSED)
    for name, shares in found.items():
        for index in devices(mesh):
            expected = fused_share(name, values, parameters, index[AXES.index("tensor")], tensor)
            assert np.array_equal(shares[index], expected), (name, index)


@over_meshes
def test_a_column_has_its_index_in_the_whole_weight_on_each_device(sizes, width):
    """Random rounding of gradients depends on it; devices that share a KV head have its columns."""
    parameters, tensor = block(width), sizes.get("tensor", 1)
    weights, _, mesh = build(sizes, parameters)
    matrices = ["attention.qkv", "attention.output", "mlp.gate_up", "mlp.down"]
    run = jax.shard_map(
        lambda: {name: weights[name].column_ids()[(None,) * len(AXES)] for name in matrices},
        mesh=mesh,
        in_specs=(),
        out_specs=P(*AXES),
        check_vma=False,
    )
    for name, found in jax.device_get(jax.jit(run)()).items():
        columns, start = {}, 0
        for part in FUSED[name]:
            shape, axes = parameters[part]
            own = shape[-2:] if axes[-1] == "head" else shape[-1:]
            columns[part] = np.broadcast_to(start + np.arange(math.prod(own)).reshape(own), shape)
            start += math.prod(own)
        for index in devices(mesh):
            share = fused_share(name, columns, parameters, index[AXES.index("tensor")], tensor)
            assert np.array_equal(found[index], share[0, 0]), (name, index)


@over_meshes
def test_a_gradient_comes_back_where_its_parameter_lies_summed_over_all_that_used_it(sizes, width):
    """Each device's gradient identifies its position and, in separate bits that survive sums, the device."""
    parameters, tensor = block(width), sizes.get("tensor", 1)
    weights, placements, mesh = build(sizes, parameters)
    expected = {name: np.zeros(shape, np.float32) for name, (shape, _) in parameters.items()}
    places = {name: np.arange(math.prod(shape)).reshape(shape) for name, (shape, _) in parameters.items()}
    gradients = {}
    for name, parts in FUSED.items():
        shape = fused_share(name, places, parameters, 0, tensor).shape
        gradients[name] = np.zeros((*mesh.devices.shape, *shape), np.float32)
        for number, index in enumerate(devices(mesh)):
            coded = 256 * np.arange(math.prod(shape)).reshape(shape) + 2**number
            gradients[name][index] = coded
            rank, start = index[AXES.index("tensor")], 0
            for part in parts:
                where = tensor_share(part, places[part], parameters[part][1], rank, tensor)
                share = coded[..., start : start + where.shape[-1]]
                start += where.shape[-1]
                np.add.at(expected[part].reshape(-1), where, share)

    def local(gradients):
        out = {}
        for name, gradient in gradients.items():
            weight = weights[name]
            gradient = weight.reduce_per_layer(gradient.reshape(gradient.shape[len(AXES) :]))
            out |= weight.split(weight.complete(weight.reduce_per_step(gradient)))
        return out

    specs = {name: placement.spec for name, placement in placements.items()}
    run = jax.shard_map(local, mesh=mesh, in_specs=P(*AXES), out_specs=specs, check_vma=False)
    found = jax.device_get(jax.jit(run)(gradients))
    assert set(found) == set(parameters)
    for name, placement in placements.items():
        assert found[name].shape == placement.stored_shape, name
        assert np.array_equal(to_canonical(found[name], placement), expected[name]), name


@pytest.mark.parametrize("layers", [1, slice(0, 2)], ids=["one", "two"])
def test_all_or_some_layers_are_fused_and_split_in_the_same_way(layers):
    weights, placements, mesh = build({"tensor": 4, "fsdp": 2}, block())

    def split(gradients):
        return {part: g for name, w in gradients.items() for part, g in weights[name].split(w).items()}

    def local(shards):
        some, every = fuse(weights, {name: w[layers] for name, w in shards.items()}), fuse(weights, shards)
        cut_after = jax.tree.map(lambda w: w[layers], (every, split(every)))
        return (some, split(some)), cut_after

    specs = {name: placement.spec for name, placement in placements.items()}
    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(AXES), check_vma=False)
    found, expected = jax.jit(run)(stored_arrays(placements, mesh, whole_numbers(block())))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.smoke
def test_devices_that_share_a_kv_head_take_it_and_sum_its_gradient():
    """Hand-worked: two KV heads, four devices; rank r's gradient of its head is 1, 10, 100, 1000."""
    parameters = {name: block()[name] for name in ("attention.key", "attention.output")}
    weights, placements, mesh = build({"tensor": 4}, parameters)
    key = np.stack([np.full((3, 16, 2), value, np.float32) for value in (5, 7)], axis=2)
    output = np.zeros((3, 8, 2, 16), np.float32)

    def local(key, output):
        own = fuse(weights, {"attention.key": key, "attention.output": output})["attention.qkv"]
        gradient = 10.0 ** jax.lax.axis_index("tensor") * jnp.ones_like(own)
        return own, weights["attention.qkv"].split(gradient)["attention.key"]

    specs = tuple(placements[name].spec for name in ("attention.key", "attention.output"))
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(None, None, "tensor"), P()), check_vma=False)
    own, gradient = jax.device_get(jax.jit(run)(key, output))
    assert own[0, 0].tolist() == [5, 5, 5, 5, 7, 7, 7, 7], "two numbers of a head on each device"
    assert gradient.shape == (3, 16, 2, 2)
    np.testing.assert_allclose(gradient, np.broadcast_to([[11.0, 11.0], [1100.0, 1100.0]], gradient.shape), rtol=1e-6)


@pytest.mark.smoke
def test_fused_weights_lie_on_the_mesh_as_written_down():
    def placements(width, **sizes):
        weights, _, _ = build(sizes, block(width))
        found = {name: weight.placement for name, weight in weights.items()}
        return {n: (p.shape, p.stored_shape, p.spec, p.storage_dim) for n, p in found.items()}

    even = placements(16, tensor=2)
    qkv = (3, 16, (8 + 2 + 2) * 2)
    assert even["attention.qkv"] == (qkv, qkv, P("pipeline", EVERY, "tensor"), 1)
    assert even["attention.qkv_bias"] == ((3, 24), (3, 24), P("pipeline", "tensor"), None)
    assert even["attention.output"] == ((3, 16, 16), (3, 16, 16), P("pipeline", "tensor", EVERY), 2)
    assert even["mlp.gate_up"] == ((3, 16, 48), (3, 16, 48), P("pipeline", EVERY, "tensor"), 1)
    assert even["mlp.down"] == ((3, 24, 16), (3, 24, 16), P("pipeline", "tensor", EVERY), 2)
    assert even["attention.norm"] == ((3, 16), (3, 16), P("pipeline", None), None)
    # Each of four devices has a KV head of its own: it counts as often as it is computed with. 13 is stored as 14.
    shared = placements(13, tensor=4, fsdp=2)
    qkv = (3, 13, (8 + 4 + 4) * 2)
    assert shared["attention.qkv"] == (qkv, (3, 14, 32), P("pipeline", EVERY, "tensor"), 1)
    assert shared["attention.qkv_bias"] == ((3, 32), (3, 32), P("pipeline", "tensor"), None)
    assert shared["attention.output"] == ((3, 16, 13), (3, 16, 14), P("pipeline", "tensor", EVERY), 2)


@pytest.mark.smoke
def test_a_block_has_only_the_fused_weights_that_it_has_parameters_for():
    plain = {n: p for n, p in block().items() if not n.endswith("_bias") and n != "mlp.gate"}
    weights, _, _ = build({}, plain)
    assert [*weights["mlp.gate_up"].members] == ["mlp.up"], "without a gate it is `up` alone"
    assert weights["mlp.gate_up"].placement.shape == (3, 16, 24)
    biases = {"attention.qkv_bias", "mlp.gate_up_bias", "attention.output_bias"}
    assert set(weights) == set(FUSED) - biases
    assert set(fuse(weights, whole_numbers(plain))) == set(weights)


@pytest.mark.smoke
def test_on_one_device_it_is_what_the_plain_model_computes_with():
    weights, _, _ = build({}, block())
    values = whole_numbers(block())
    bias = {"attention_bias": True, "mlp_bias": True, "qk_norm": True}
    model = ModelConfig(num_layers=3, hidden_size=16, num_heads=8, num_kv_heads=2, head_dim=2, vocab_size=16, **bias)
    found, expected = fuse(weights, values), Block(model, "dense").fuse(values)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    again = {part: g for name, w in found.items() for part, g in weights[name].split(w).items()}
    jax.tree.map(np.testing.assert_array_equal, again, values)
