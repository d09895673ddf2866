"""Moments in BF16 and int8 against plain NumPy, and on meshes."""

import zlib
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mesh_models import EXPERT_MODELS, MODELS
from single_device import make_config, train, weights_of

from megajax.mesh import AXES, build_mesh
from megajax.optim.blocks import block_of
from megajax.optim.forms import from_blocks, to_blocks
from megajax.optim.update import Update
from megajax.options.optimizers import FORMS, OPTIMIZERS
from megajax.sharding import place
from megajax.step_plan import StepPlan
from megajax.training.step import TrainProgram

ONE = dict.fromkeys(AXES, 1)
NAME, SHAPE = "blocks.dense.mlp.up", (2, 6, 16)


def mixed(x: np.ndarray) -> np.ndarray:
    """The finaliser of MurmurHash3."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def numpy_bits(field: str, step: int) -> np.ndarray:
    """The random bits of the parameter's moment at a step."""
    name = np.array([zlib.crc32(f".{field}['{NAME}']".encode())], np.uint32)
    seed = mixed(name ^ mixed(np.array([step], np.uint32)))
    layer = mixed(seed ^ mixed(np.arange(1, 1 + SHAPE[0], dtype=np.uint32)))
    index = np.arange(np.prod(SHAPE[1:]), dtype=np.uint32).reshape(SHAPE[1:])
    return mixed(layer[:, None, None] ^ index)


def numpy_bfloat16(x: np.ndarray, bits: np.ndarray) -> np.ndarray:
    """FP32 numbers, each one of the two BF16 numbers around `x`."""
    low = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    high = (low.view(np.uint32) + np.uint32(0x10000)).view(np.float32)
    position = (x.astype(np.float64) - low) / (high.astype(np.float64) - low)
    return np.where(position + (bits >> np.uint32(16)) / 2**16 >= 1, high, low)


def test_each_optimizer_of_a_checkpoint_names_the_parameters_of_the_others():
    """As optax's states do: without arrays."""
    config = make_config(MODELS["llama"], optimizer={"kind": "muon"})
    program = TrainProgram.build(config, build_mesh(ONE, jax.devices()[:1]))
    tree, _ = program.update.slots.on_disk(program.abstract_state.optimizer)
    held = dict[str, list[str]]()
    for kind, inner in tree["inner_states"].items():
        slots = inner["inner_state"]
        for named in (slots[0] if isinstance(slots, tuple) else slots).values():
            if isinstance(named, dict):
                assert named.keys() == program.placements.keys(), kind
                held[kind] = [name for name, x in named.items() if not isinstance(x, optax.MaskedNode)]
    assert sorted(name for names in held.values() for name in names) == sorted(program.placements)
    assert len(held) == 2 and "blocks.dense.mlp.up" in held["muon"] and "final_norm" not in held["muon"]


def test_adamw_in_bfloat16_is_that_of_numpy():
    sizes = ONE | {"fsdp": 4}  # D = 6 is padded to 8
    placement = place(SHAPE, ("layers", "embed", "mlp"), sizes, layers=(1, 0))
    config = make_config(MODELS["llama"], optimizer={"state": "bfloat16", "weight_decay": 0.0})
    parameter = SimpleNamespace(axes=placement.axes, role="matrix")
    mesh = build_mesh(sizes, jax.devices()[:4])
    adamw = Update.build(StepPlan.of(config, mesh), {NAME: parameter}, {NAME: placement}, mesh)
    random, zeros = np.random.default_rng(0), {NAME: jnp.zeros(placement.stored_shape)}
    state, update = adamw.first(zeros).optimizer, jax.jit(adamw.directions)
    mean, square = np.zeros(SHAPE, np.float32), np.zeros(SHAPE, np.float32)
    for step in range(1, 6):
        g = random.standard_normal(SHAPE).astype(np.float32)
        directions, state = update({NAME: jnp.pad(g[::-1], ((0, 0), (0, 2), (0, 0)))}, state, zeros)
        mean = np.float32(0.9) * mean + np.float32(0.1) * g
        square = np.float32(0.95) * square + np.float32(0.05) * g * g
        expected = mean / (1 - 0.9**step) / (np.sqrt(square / (1 - 0.95**step)) + 1e-8)
        np.testing.assert_allclose(directions[NAME][::-1, :6], expected, rtol=2e-2)
        kept = {}
        for field, exact in (("mu", mean), ("nu", square)):
            stored = np.asarray(state.slots["adamw"][field][NAME], np.float32)
            assert not stored[:, 6:].any()
            kept[field] = stored[::-1, :6]
            own = numpy_bfloat16(exact, numpy_bits(field, step))
            assert np.mean(own == kept[field]) > 0.98  # others are at the limit between two numbers
        mean, square = kept["mu"], kept["nu"]


@pytest.mark.parametrize(("kind", "moments"), [("adamw", 2), ("muon", 1), ("lion", 1)])
def test_the_numbers_whose_largest_is_a_scale_are_used_for_that_alone(kind, moments):
    """They are computed a second time for the codes: else XLA writes them, 4 bytes each, between both passes."""
    config = make_config(MODELS["llama"], optimizer={"kind": kind, "state": "int8"})
    mesh, placement = build_mesh(ONE, jax.devices()[:1]), place(SHAPE, ("layers", "embed", "mlp"), ONE)
    parameter = SimpleNamespace(axes=placement.axes, role="matrix", muon=True)
    update = Update.build(StepPlan.of(config, mesh), {NAME: parameter}, {NAME: placement}, mesh)
    zeros = {NAME: jnp.zeros(SHAPE)}
    traced = jax.make_jaxpr(update.directions)(zeros, update.first(zeros).optimizer, zeros)
    needed, equations = {*map(id, traced.jaxpr.outvars)}, []
    for equation in reversed(traced.eqns):
        if needed & {*map(id, equation.outvars)}:
            needed |= {*map(id, equation.invars)}
            equations.append(equation)
    made_by = {var: equation for equation in equations for var in equation.outvars}
    users = Counter(var for equation in equations for var in {*map(id, equation.invars)})
    largest = [equation.invars[0] for equation in equations if equation.primitive.name == "reduce_max"]
    assert len(largest) == moments
    for var in largest:
        while made_by[var].primitive.name in ("reshape", "abs"):
            assert users[id(var)] == 1
            var = made_by[var].invars[0]
        assert users[id(var)] == 1 and made_by[var].primitive.name == "add"


@pytest.mark.parametrize("second", [False, True])
def test_int8_is_right_on_average_and_keeps_small_second_moments(second):
    random = np.random.default_rng(1)
    x = (random.standard_normal((3, 64)) * 1e-4).astype(np.float32)
    x = np.square(x) if second else x
    x[0, 0], x[1] = 0, 0
    x[2, 0] = 1e-16 if second else x[2, 0]  # below the least code of its block
    draws = random.integers(0, 2**32, (1500, *x.shape), dtype=np.uint32)
    once = lambda bits: from_blocks(to_blocks(jnp.asarray(x), jnp.asarray(x), (1, 16), second, bits), (1, 16), second)  # noqa: E731
    values = np.asarray(jax.jit(jax.vmap(once))(draws), np.float64)
    scale = np.repeat(np.abs(x).reshape(3, 4, 16).max(-1), 16, axis=1)
    assert not values[:, x == 0].any()
    if second:
        inside = x > scale * 2.0**-21
        assert not inside[2, 0] and np.allclose(values[:, 2, 0], scale[2, 0] * 2 ** (-254 / 12), rtol=1e-5)
        assert (values[:, x > 0] > 0).all()
        width = x * (2 ** (1 / 12) - 1)  # of the interval around x, at most
    else:
        inside, width = x != 0, scale * 2 / 127
    error, spread = values.mean(0) - x, width / 2 / np.sqrt(len(draws))
    assert (np.abs(error)[inside] < 5 * spread[inside]).all()
    assert (np.abs(values - x)[:, inside] <= 1.0001 * width[inside]).all()


@pytest.mark.parametrize(
    ("shape", "axes", "block"),
    [
        ((2, 6, 16), ("layers", "embed", "mlp"), (2, 2)),  # an eighth of the only one
        ((2, 6, 12), ("layers", "embed", "mlp"), (2, 3)),  # in eight parts of whole blocks, or in four
        ((2, 4, 512, 3), ("layers", "heads", "head", "rank"), (2, 256)),  # at most 256 numbers
        ((2, 40, 3), ("layers", "mlp", "rank"), (2, 3)),  # not over tensor, though shorter
        ((2, 6), ("layers", "embed"), (1, 1)),
        # No block has numbers of two layers, prediction modules or experts, nor of a dimension that a mesh shards
        ((1, 6, 16), ("modules", "embed", "mlp"), (2, 2)),
        ((32, 64, 128, 16), ("layers", "experts", "embed", "expert_mlp"), (3, 2)),
    ],
)
def test_blocks_lie_along_the_longest_dimension_that_no_axis_divides(shape, axes, block):
    assert block_of(place(shape, axes, ONE)) == block


@pytest.mark.long
def test_a_mesh_rounds_as_one_device_does():
    """A number of the hash that depended on the mesh would change a moment by a unit of 2^-8, and losses with it."""
    losses = []
    model = EXPERT_MODELS["mixtral"] | {
        "num_layers": 1,
        "shared_expert_ffn_hidden_size": 16,
        "shared_expert_gate": True,
    }
    weights = weights_of(make_config(model))
    for mesh in ({}, {"fsdp": 4, "tensor": 2}):
        config = make_config(
            model, mesh, steps=3, optimizer={"kind": "muon", "state": "int8"}, schedule={"learning_rate": 1e-3}
        )
        losses.append(train(config, weights).losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("state", FORMS)
def test_exact_slots_are_fp32_and_all_others_have_the_form_of_moments(kind, state):
    """Every slot of every optimizer: SOAP's factors and bases would be useless in 8 bits."""
    placement = place(SHAPE, ("layers", "embed", "mlp"), ONE)
    parameter = SimpleNamespace(axes=placement.axes, role="matrix", muon=True)
    config = make_config(MODELS["llama"], optimizer={"kind": kind, "state": state})
    mesh = build_mesh(ONE, jax.devices()[:1])
    slots = Update.build(StepPlan.of(config, mesh), {NAME: parameter}, {NAME: placement}, mesh).slots
    declared = {slot.name: slot for slot in slots.member_of(NAME).slots_of(NAME)}
    exact = {"rows_factor", "rows_basis", "columns_factor", "columns_basis"} if kind == "soap" else set()
    assert {name for name, slot in declared.items() if slot.exact} == exact
    small = {"float32": {"float32"}, "bfloat16": {"bfloat16"}, "int8": {"int8", "uint8", "float32"}}[state]
    for name, slot in declared.items():
        leaves = jax.tree.leaves(slots.stored.optimizer.slots[kind][name][NAME])
        assert {jnp.dtype(leaf.dtype).name for leaf in leaves} <= ({"float32"} if slot.exact else small), name
        assert len(leaves) == (2 if state == "int8" and not slot.exact else 1), name
        if len(leaves) == 2:  # in the signed code small means of squares would be 0, and steps without bound
            code = "uint8" if name in ("nu", "square") else "int8"
            assert {jnp.dtype(leaf.dtype).name for leaf in leaves} == {code, "float32"}, name


@pytest.mark.parametrize("form", FORMS)
def test_the_state_of_each_optimizer_is_read_back_from_its_tree_in_a_checkpoint(form):
    mesh, placement = build_mesh(ONE, jax.devices()[:1]), place(SHAPE, ("layers", "embed", "mlp"), ONE)
    parameter = SimpleNamespace(axes=placement.axes, role="matrix", muon=True)
    for kind in OPTIMIZERS:
        plan = StepPlan.of(make_config(MODELS["llama"], optimizer={"kind": kind, "state": form}), mesh)
        update = Update.build(plan, {NAME: parameter}, {NAME: placement}, mesh)
        state = jax.eval_shape(update.first, {NAME: jnp.zeros(SHAPE)}).optimizer
        found = update.slots.from_disk(update.slots.on_disk(state))
        assert jax.tree.structure(found) == jax.tree.structure(state)
        assert jax.tree.leaves(found) == jax.tree.leaves(state)
