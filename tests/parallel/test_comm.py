"""Communication points and weight exchange against NumPy, with values that identify their device and position."""

import math
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from single_device import stored

from megajax.errors import ConfigError
from megajax.kernel_choice import Kernels
from megajax.mesh import AXES, build_mesh, mesh_sizes
from megajax.ops import AttentionSettings
from megajax.parallel.collectives import sum_over_all
from megajax.parallel.mesh_comm import MeshComm
from megajax.parallel.tensor.ring import TensorRing
from megajax.sharding import place, to_canonical
from megajax.step_plan import Collectives
from megajax.weights.weight import Weight, WeightDtypes, global_norm

MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"fsdp": 2, "expert": 2, "context": 2},
    {"data": 2, "expert": 2, "context": 2},
    {"data": 4, "context": 2},
    {"data": 2, "expert": 2, "tensor": 2},
    {"fsdp": 8},
    {},
]
PARAMETERS = {
    "up": ((3, 16, 8), ("layers", "embed", "mlp")),
    "down": ((16, 16), ("mlp", "embed")),
    "padded": ((13, 8), ("embed", "mlp")),
    "tokens": ((8, 16), ("vocab", "embed")),
    "positions": ((5, 16), ("positions", "embed")),
    "bias": ((3, 8), ("layers", "mlp")),
    "norm": ((16,), ("norm",)),
}
KEY = ((3, 16, 2, 2), ("layers", "embed", "kv_heads", "head"))
# Fewer KV heads than devices on `tensor`, twice; test_fused.py has the weights that they share.
KV_MESHES = [{"tensor": 8}, {"tensor": 4, "fsdp": 2}, {"tensor": 2, "data": 2, "fsdp": 2}]


def mesh_id(sizes) -> str:
    return "-".join(f"{axis}{size}" for axis, size in sizes.items()) or "one"


over_meshes = pytest.mark.parametrize("sizes", MESHES, ids=mesh_id)


def make_mesh(sizes):
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    return sizes, build_mesh(sizes, jax.devices()[: math.prod(sizes.values())])


def make_comm(sizes) -> MeshComm:
    return MeshComm(make_mesh(sizes)[0], Kernels(), Collectives(), deterministic=False)


def on_devices(sizes, functions, *values):
    """`functions` on every device of a mesh, of its entries of `values` `[*mesh, ...]` → their results, `[*mesh, ...]`.

    One, or several by name, each of a value: one program of all takes less time than one of each.
    """
    _, mesh = make_mesh(sizes)

    def local(*blocks):
        own = [block.reshape(block.shape[len(AXES) :]) for block in blocks]
        if callable(functions):
            out = functions(*own)
        else:
            out = {name: function(value) for (name, function), value in zip(functions.items(), own, strict=True)}
        return jax.tree.map(lambda a: a[(None,) * len(AXES)], out)

    run = jax.shard_map(local, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES), check_vma=False)
    return jax.device_get(jax.jit(run)(*values))


def coded(sizes, *shape):
    """Values `[*mesh, *shape]` that identify position and device, in sums too: bit r stands for device r."""
    mesh_shape = tuple(sizes.get(axis, 1) for axis in AXES)
    count = math.prod(mesh_shape)
    places = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    devices = 2.0 ** np.arange(count).reshape(mesh_shape + (1,) * len(shape))
    return (256 * places + devices).astype(np.float32)


def devices_of(values):
    return list(np.ndindex(values.shape[: len(AXES)]))


def over(index, values, *axes):
    """The entries of `values` on the devices that differ from `index` along `axes`, the last axis fastest."""
    sizes = dict(zip(AXES, values.shape, strict=False))
    for moved in np.ndindex(*(sizes[axis] for axis in axes)):
        device = dict(zip(AXES, index, strict=True)) | dict(zip(axes, moved, strict=True))
        yield values[tuple(device[axis] for axis in AXES)]


def position(index, sizes, *axes):
    """The index of a device along several axes taken as one, the last axis fastest."""
    out = 0
    for axis in axes:
        out = out * sizes.get(axis, 1) + index[AXES.index(axis)]
    return out


def make_weights(sizes, parameters=PARAMETERS, gradients=jnp.float32):
    sizes, mesh = make_mesh(sizes)
    placements = {name: place(shape, axes, sizes) for name, (shape, axes) in parameters.items()}
    dtypes = WeightDtypes(jnp.dtype(jnp.float32), jnp.dtype(gradients))
    return {name: Weight(name, {name: p}, sizes, dtypes) for name, p in placements.items()}, placements, mesh


def reduce_per_step(weight, gradient):
    return weight.complete(weight.reduce_per_step(gradient))


# The residual stream


@pytest.fixture(scope="module")
def communicated():
    """A mesh → (values, results) by name of a communication point."""
    known = {}

    def of(sizes):
        if (key := mesh_id(sizes)) not in known:
            comm = make_comm(sizes)

            def reductions(x):
                start = jnp.full(2, comm.index("tensor") * 10, jnp.float32)
                return jnp.stack([comm.max(x, "tensor"), comm.sum(x, "tensor"), start])

            points = {
                "enter": (comm.all_gather_tokens, coded(sizes, 3, 2)),
                "leave": (comm.reduce_scatter_tokens, coded(sizes, 4, 2)),
                "own tokens": (comm.local_tokens, coded(sizes, 4, 2)),
                "sequences": (lambda _: comm.sequence_ids(3), coded(sizes)),
                "reductions": (reductions, coded(sizes, 2)),
                "sum": (lambda x: sum_over_all(x, make_mesh(sizes)[0]), coded(sizes, 2)),
            }
            functions, values = ({name: point[i] for name, point in points.items()} for i in (0, 1))
            found = on_devices(sizes, functions, *values.values())
            known[key] = {name: (value, found[name]) for name, value in values.items()}
        return known[key]

    return of


@over_meshes
def test_enter_gathers_the_tokens_in_the_order_of_tensor(communicated, sizes):
    values, found = communicated(sizes)["enter"]
    for index in devices_of(values):
        assert np.array_equal(found[index], np.concatenate(list(over(index, values, "tensor"))))


@over_meshes
def test_leave_sums_over_tensor_and_keeps_the_own_tokens(communicated, sizes):
    (values, found), tensor = communicated(sizes)["leave"], sizes.get("tensor", 1)
    for index in devices_of(values):
        own = np.split(sum(over(index, values, "tensor")), tensor)[position(index, sizes, "tensor")]
        assert np.array_equal(found[index], own)


def test_pieces_are_summed_in_fp32_on_the_device_of_their_tokens():
    """Added one by one in BF16, 256 and seven ones would stay 256."""
    sizes = {"tensor": 8}
    values = np.zeros((*make_mesh(sizes)[1].devices.shape, 8), np.float32)
    values[..., 0, :] = 256  # of rank 0 for each device's tokens
    values[..., 1:, :] = 1

    def summed(x):
        ring = TensorRing(8, copied=False)
        rank = jax.lax.axis_index("tensor")
        pieces = [x[(rank - step) % 8].astype(jnp.bfloat16)[None] for step in range(8)]
        return ring.reduce_scatter_pieces(pieces).astype(jnp.float32)

    found = on_devices(sizes, summed, values)
    assert (found == 264).all(), "263 to the nearest BF16 number"


@over_meshes
def test_own_tokens_are_those_that_leave_keeps(communicated, sizes):
    (values, found), tensor = communicated(sizes)["own tokens"], sizes.get("tensor", 1)
    for index in devices_of(values):
        assert np.array_equal(found[index], np.split(values[index], tensor)[position(index, sizes, "tensor")])


def test_positions_that_tensor_does_not_divide_are_a_sentence():
    said = (
        "mesh.tensor=2 does not divide the 9 positions of a microbatch on a device: give the sequences another length"
    )
    with pytest.raises(ConfigError, match=said):
        make_comm({"tensor": 2}).local_tokens(jnp.zeros((9, 4)))


@pytest.mark.parametrize("sizes", [{}, {"tensor": 4}, {"data": 2, "tensor": 4}, {"tensor": 8}], ids=str)
def test_devices_have_equal_parts_of_all_heads_or_neighbours_the_same_one(sizes):
    of, tensor = {heads: coded(sizes, 8, 2)[..., :heads, :] for heads in (1, 2, 8)}, sizes.get("tensor", 1)
    found = on_devices(sizes, dict.fromkeys(of, make_comm(sizes).local_heads), *of.values())
    for heads, values in of.items():
        for index in devices_of(values):
            device, each = position(index, sizes, "tensor"), max(heads // tensor, 1)
            first = device * each if heads >= tensor else device // (tensor // heads)
            assert np.array_equal(found[heads][index], values[index][first : first + each]), heads


@over_meshes
def test_sequences_are_numbered_through_the_batch_axes(communicated, sizes):
    _, found = communicated(sizes)["sequences"]
    for index in devices_of(found):
        first = 3 * position(index, sizes, "data", "fsdp", "expert")
        assert found[index].tolist() == [first, first + 1, first + 2]


@over_meshes
def test_a_sequence_has_the_tokens_of_all_devices_of_context(sizes):
    """`tensor` divides a device's tokens between layers, but within one they are whole."""
    assert make_comm(sizes).sequence_length(24 // sizes.get("context", 1)) == 24


@over_meshes
def test_vocabulary_maxima_and_sums_run_over_tensor_alone(communicated, sizes):
    values, found = communicated(sizes)["reductions"]
    for index in devices_of(values):
        group = list(over(index, values, "tensor"))
        start = [10 * position(index, sizes, "tensor")] * 2
        assert np.array_equal(found[index], [np.max(group, axis=0), sum(group), start])


def test_a_window_is_left_out_if_it_includes_every_token_of_all_devices():
    comm, q, positions = make_comm({"context": 2}), jnp.zeros((1, 8, 1, 4)), SimpleNamespace(chunks=None)
    windows = [comm._over_context(q, positions, AttentionSettings(w)).window for w in (3, 8, 15, 16, 17)]
    assert windows == [3, 8, 15, None, None]


@over_meshes
def test_a_sum_over_all_counts_every_device_once(communicated, sizes):
    values, found = communicated(sizes)["sum"]
    assert (found == values.reshape(-1, 2).sum(axis=0)).all()


# Weights: each point by itself


@pytest.fixture(scope="module")
def exchanged():
    """A mesh → (values, results) by name of a point of the exchange of weights."""
    known = {}

    def of(sizes):
        if (key := mesh_id(sizes)) not in known:
            weights, placements, _ = make_weights(sizes)
            shard = placements["padded"].stored_shape[0] // sizes.get("fsdp", 1)
            # Without the layers' dimension
            points = {name: (weights[name].gather_per_step, coded(sizes, 2, 2)) for name in ("up", "down", "tokens")}
            points |= {
                "gather per layer": (weights["padded"].gather_per_layer, coded(sizes, shard, 2)),
                "reduce per layer": (weights["padded"].reduce_per_layer, coded(sizes, 13, 2)),
                "reduce per step": (partial(reduce_per_step, weights["up"]), coded(sizes, 8, 2)),
                "norm": (partial(reduce_per_step, weights["norm"]), coded(sizes, 16)),
            }
            functions, values = ({name: point[i] for name, point in points.items()} for i in (0, 1))
            found = on_devices(sizes, functions, *values.values())
            known[key] = {name: (value, found[name]) for name, value in values.items()}, placements
        return known[key]

    return of


@pytest.mark.smoke
@over_meshes
@pytest.mark.parametrize(("name", "dim"), [("up", 0), ("down", 1), ("tokens", 1)])
def test_gather_per_step_joins_expert_context_data_in_this_order(exchanged, sizes, name, dim):
    values, found = exchanged(sizes)[0][name]
    for index in devices_of(values):
        joined = np.concatenate(list(over(index, values, "expert", "context", "data")), axis=dim)
        assert np.array_equal(found[index], joined)


@over_meshes
def test_gather_per_layer_joins_fsdp_and_cuts_the_padding(exchanged, sizes):
    values, found = exchanged(sizes)[0]["gather per layer"]
    for index in devices_of(values):
        assert np.array_equal(found[index], np.concatenate(list(over(index, values, "fsdp")))[:13])


@over_meshes
def test_reduce_per_layer_sums_over_fsdp_and_keeps_the_own_shard(exchanged, sizes):
    points, placements = exchanged(sizes)
    padded, fsdp = placements["padded"].stored_shape[0], sizes.get("fsdp", 1)
    values, found = points["reduce per layer"]
    for index in devices_of(values):
        total = np.pad(sum(over(index, values, "fsdp")), [(0, padded - 13), (0, 0)])
        assert np.array_equal(found[index], np.split(total, fsdp)[position(index, sizes, "fsdp")])


@over_meshes
def test_reduce_per_step_sums_over_the_axes_gathered_once(exchanged, sizes):
    once = ("expert", "context", "data")
    shards = math.prod(sizes.get(axis, 1) for axis in once)
    values, found = exchanged(sizes)[0]["reduce per step"]
    for index in devices_of(values):
        total = sum(over(index, values, *once))
        assert np.array_equal(found[index], np.split(total, shards)[position(index, sizes, *once)])


@over_meshes
def test_reduce_per_step_sums_what_is_not_sharded_over_every_axis(exchanged, sizes):
    values, found = exchanged(sizes)[0]["norm"]
    assert (found == values.reshape(-1, 16).sum(axis=0)).all()


# Weights: from storage to compute and back


def own_share(placement, whole, index, sizes):
    """The part of a whole weight that a device computes with; it depends only on its index on `tensor`."""
    for dim, (size, axis) in enumerate(zip(placement.shape, placement.axes, strict=True)):
        if axis in ("heads", "mlp", "vocab"):
            tensor = sizes.get("tensor", 1)
            rank = position(index, sizes, "tensor")
            whole = np.take(whole, range(rank * size // tensor, (rank + 1) * size // tensor), dim)
    return whole


@pytest.mark.parametrize("sizes", [*MESHES, *KV_MESHES[:2]], ids=mesh_id)
def test_a_stored_weight_is_whole_when_it_is_computed_with(sizes):
    weights, placements, mesh = make_weights({"fsdp": 1, **sizes})
    whole = {n: np.arange(math.prod(p.shape), dtype=np.float32).reshape(p.shape) for n, p in placements.items()}
    specs = {name: placement.spec for name, placement in placements.items()}
    shards = {
        name: jax.device_put(stored(whole[name], p, np.dtype("float32")), NamedSharding(mesh, p.spec))
        for name, p in placements.items()
    }

    def local(shards):
        gathered = {n: weights[n].gather_per_layer(weights[n].gather_per_step(shard)) for n, shard in shards.items()}
        return {name: w[(None,) * len(AXES)] for name, w in gathered.items()}

    run = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(*AXES), check_vma=False)
    for name, found in jax.device_get(jax.jit(run)(shards)).items():
        for index in devices_of(found):
            expected = own_share(placements[name], whole[name], index, sizes)
            assert np.array_equal(found[index], expected), (name, index)


@pytest.mark.parametrize("sizes", [*MESHES, *KV_MESHES[:2]], ids=mesh_id)
def test_a_gradient_is_the_sum_of_all_devices_shares_where_its_weight_lies(sizes):
    weights, placements, mesh = make_weights({"fsdp": 1, **sizes})
    whole = {name: np.zeros(placement.shape, np.float32) for name, placement in placements.items()}
    shares, first = {}, (0,) * len(AXES)
    for name, placement in placements.items():
        index_of = np.arange(whole[name].size).reshape(placement.shape)  # where each number of a share belongs
        shares[name] = coded(sizes, *own_share(placement, index_of, first, sizes).shape)
        for index in devices_of(shares[name]):
            np.add.at(whole[name].reshape(-1), own_share(placement, index_of, index, sizes), shares[name][index])

    def local(shares):
        own = {name: share.reshape(share.shape[len(AXES) :]) for name, share in shares.items()}
        return {n: reduce_per_step(weights[n], weights[n].reduce_per_layer(share)) for n, share in own.items()}

    specs = {name: placement.spec for name, placement in placements.items()}
    run = jax.shard_map(local, mesh=mesh, in_specs=P(*AXES), out_specs=specs, check_vma=False)
    for name, found in jax.device_get(jax.jit(run)(shares)).items():
        assert found.shape == placements[name].stored_shape
        assert np.array_equal(to_canonical(found, placements[name]), whole[name]), name


@pytest.mark.parametrize("sizes", [*MESHES, *KV_MESHES], ids=mesh_id)
def test_the_global_norm_counts_every_number_once(sizes):
    _, placements, mesh = make_weights(sizes, {**PARAMETERS, "key": KEY})
    sizes = mesh_sizes(mesh)
    rng = np.random.default_rng(3)
    whole = {name: rng.normal(size=p.shape).astype(np.float32) for name, p in placements.items()}
    specs = {name: p.spec for name, p in placements.items()}
    shards = {
        name: jax.device_put(stored(g, placements[name], g.dtype), NamedSharding(mesh, specs[name]))
        for name, g in whole.items()
    }
    run = jax.shard_map(
        partial(global_norm, placements=placements, sizes=sizes),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=P(),
        check_vma=False,
    )
    expected = math.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in whole.values()))
    assert float(jax.jit(run)(shards)) == pytest.approx(expected, rel=1e-6)


def test_weights_are_gathered_in_the_compute_dtype_and_reduced_in_the_gradients():
    sizes, mesh = make_mesh({"data": 2, "fsdp": 2})
    placements = {name: place(*PARAMETERS[name], sizes) for name in ("down", "norm")}
    dtypes = WeightDtypes(jnp.dtype("bfloat16"), jnp.dtype("bfloat16"))
    own = {name: Weight(name, {name: placement}, sizes, dtypes) for name, placement in placements.items()}
    down = own["down"]

    def local(shard, norm):
        w = down.gather_per_layer(down.gather_per_step(shard))
        assert w.dtype == jnp.bfloat16
        assert own["norm"].gather_per_step(norm).dtype == jnp.float32, "norms stay exact"
        gradient = down.reduce_per_layer(w.astype(jnp.float32))
        return reduce_per_step(down, gradient.astype(jnp.float32))  # as sums over microbatches are

    spec = placements["down"].spec
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec, check_vma=False)
    arguments = [jax.ShapeDtypeStruct(PARAMETERS[name][0], jnp.float32) for name in placements]
    assert jax.eval_shape(run, *arguments).dtype == jnp.float32
    assert re.findall(r":(\w+)\[[\d,]*\] = reduce_scatter", str(jax.make_jaxpr(run)(*arguments))) == ["bf16"] * 2


def test_narrower_layers_are_cut_into_pieces_where_these_are_copied():
    widths = 1023, 1024, 3071, 3072
    assert [TensorRing(4, copied=False).overlaps(width) for width in widths] == [0, 0, 0, 1]
    assert [TensorRing(4, copied=True).overlaps(width) for width in widths] == [0, 1, 1, 1]
    assert not TensorRing(1, copied=True).overlaps(4096), "nothing travels"


def test_a_linear_layer_of_own_tokens_gathers_nothing():
    """A low-rank projection of each device's tokens; the gradients of its replicated weight are shares of one sum."""
    mesh = build_mesh({axis: 4 if axis == "tensor" else 1 for axis in AXES}, jax.devices()[:4])
    comm, rng = make_comm({"tensor": 4}), np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((32, 12), (12, 5), (32, 5)))

    def local(x, w, dy):
        y, pull = jax.vjp(comm.replicated_linear, x, w)
        dx, dw = pull(dy)
        return y, dx, jax.lax.psum(dw, "tensor")

    own = P("tensor")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(own, P(), own), out_specs=(own, own, P()), check_vma=False))
    for found, expected in zip(run(x, w, dy), (x @ w, dy @ w.T, x.T @ dy), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # One collective, the sum that the exchange of weights makes
    text = run.lower(x, w, dy).as_text()
    assert text.count("stablehlo.all_reduce") == 1 and "all_gather" not in text and "reduce_scatter" not in text
