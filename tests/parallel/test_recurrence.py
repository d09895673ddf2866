"""A sublayer with a state between tokens, from the docs: against a loop, and with documents on four devices."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import MODELS
from single_device import make_config

from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError, InputError
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.kernel_choice import Kernels
from megajax.layout.kinds import KINDS, LayerKind
from megajax.mesh import AXES, build_mesh
from megajax.model import LayerContext
from megajax.model.comm import Comm, TokenPositions
from megajax.model.recurrent import RecurrentTokens, rows
from megajax.model.sublayer import BlockInputs
from megajax.ops import PackedDocuments, short_convolution
from megajax.parallel.mesh_comm import MeshComm
from megajax.step_plan import Collectives
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

MODEL = MODELS["llama"] | {"num_layers": 2, "block_pattern": ["dense", "recurrent"]}
PACKED = {"data": {"reset_attention": True, "synthetic_documents": 3}}


@pytest.fixture(scope="module", autouse=True)
def extension():
    import_extensions(["docs/examples/recurrence.py"])


def test_it_is_a_loop_over_tokens():
    """Two documents in the first sequence, padding at the end of the second."""
    make = KINDS["recurrent"]["recurrence"]
    config = make_config(MODEL).model
    D, F, (B, S), rng = config.hidden_size, config.ffn_hidden_size, (2, 6), np.random.default_rng(0)
    w = {"value": rng.standard_normal((D, F)), "decay": rng.standard_normal(F), "output": rng.standard_normal((F, D))}
    index = np.tile(np.arange(S), (B, 1))  # positions for RoPE do not begin again
    starts = np.array([[0, 0, 0, 3, 3, 3], [0] * S])
    is_real = np.array([[True] * 6, [True] * 4 + [False] * 2])
    x = rng.standard_normal((B, S, D)).astype(np.float32)
    h, expected = np.zeros((B, F)), np.zeros((B, S, F))
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_epsilon)
    for t in range(S):
        new = (t > starts[:, t])[:, None] / (1 + np.exp(-w["decay"])) * h + normed[:, t] @ w["value"]
        h = np.where(is_real[:, t, None], new, h)
        expected[:, t] = h
    own = TokenPositions(jnp.asarray(index), PackedDocuments(jnp.asarray(starts)), is_real=jnp.asarray(is_real))
    ctx = LayerContext(Comm(), BlockInputs(jnp.asarray(index), own, jnp.arange(B * S), None), 0, LayerKind("r", None))
    weights = {name: a.astype(np.float32) for name, a in w.items()} | {"norm": np.ones(D, np.float32)}
    y, metrics = jax.jit(lambda weights, x: make(config).apply(weights, x, ctx))(weights, x.reshape(-1, D))
    np.testing.assert_allclose(y, (expected @ w["output"]).reshape(-1, D), rtol=1e-4, atol=1e-4)
    assert metrics == {}


def test_tokens_beyond_both_ends_of_a_sequence_are_zeros():
    """From another position in each row, as generation keeps the newest tokens of each prompt."""
    x, first = 1 + np.arange(2 * 4 * 3).reshape(2, 4, 3), np.array([0, -2, 3])
    found = rows(jnp.asarray(x[[0, 1, 0]]), jnp.asarray(first), 3)
    padded = np.pad(x, ((0, 0), (2, 3), (0, 0)))
    expected = [padded[row, 2 + start : 5 + start] for row, start in zip((0, 1, 0), first, strict=True)]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("by_channel", [False, True])
def test_a_device_goes_on_from_the_tokens_and_states_of_all_before_it(by_channel):
    """Of four devices: each has a map of the state, a matrix or a factor of each channel, and a convolution."""
    devices, B, S, C, rng = 4, 2, 6, 3, np.random.default_rng(1)
    x, weight = rng.standard_normal((B, devices * S, C)), rng.standard_normal((4, C))
    transitions = rng.standard_normal((devices, B, 2, C) if by_channel else (devices, B, 2, C, C))
    finals, index = rng.standard_normal((devices, B, 2, C, 5)), np.tile(np.arange(devices * S), (B, 1))
    comm = MeshComm(dict.fromkeys(AXES, 1) | {"context": devices}, Kernels(), Collectives(consecutive=True), False)

    def rule(transition, final, state_before, **_):
        return state_before(transition, final), final

    @jax.jit
    @partial(jax.vmap, axis_name="context")
    def local(x, index, transition, final):
        inputs = BlockInputs(index, TokenPositions(index), index.reshape(-1), None)
        tokens = RecurrentTokens(LayerContext(comm, inputs, 0, LayerKind("r", None)))
        channels, *_ = tokens.joined((x, slice(0, C)))
        [convolved] = tokens.convolved(channels, (C,), jnp.float32(weight))
        return convolved, tokens.recur(rule, rule, transition, final)

    parts = [np.stack(np.split(a, devices, axis=1)) for a in (np.float32(x), index)]
    convolved, found = local(*parts, np.float32(transitions), np.float32(finals))
    whole = jax.jit(lambda x, index: short_convolution(x, jnp.float32(weight), index))(np.float32(x), index)
    np.testing.assert_allclose(np.concatenate(convolved, axis=1), whole, rtol=1e-5, atol=1e-6)
    state = np.zeros_like(finals[0])
    for device in range(devices):
        np.testing.assert_allclose(found[device], state, rtol=1e-5, atol=1e-5)
        map_of = transitions[device]
        state = (map_of[..., None] * state if by_channel else map_of @ state) + finals[device]


def make(table, mesh, microbatches=1, model=None, **sections):
    model = MODEL | (model or {})
    return table.make_config(model, mesh, microbatches=microbatches, steps=2, optimizer="sgd", **sections)


def build(config):
    devices = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))


def first_steps(table, program):
    """(loss and norm of each step, last weights)."""
    state, steps = table.first_state(program, table.weights_of(program.config)), []
    for fields in table.make_batches(program.config):
        state, metrics = program.train_step(state, to_global(program, fields))
        steps.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return np.array(steps), table.canonical(program, state.params)


@pytest.mark.long
def test_four_devices_of_context_have_the_states_of_one(table):
    """With documents that cross the devices' tokens; `test_testing.py` has the other meshes."""
    found, expected = (first_steps(table, build(make(table, mesh, **PACKED))) for mesh in ({"context": 4}, {}))
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5)
    for name, w in expected[1].items():
        np.testing.assert_allclose(found[1][name], w, rtol=1e-4, atol=1e-5, err_msg=name)


def test_what_it_cannot_do_is_refused(table):
    """Drafts that are not accepted stay in its state; in a pipeline prediction modules get pieces of sequences."""
    config = table.make_config(MODEL | {"mtp_layers": 1}, {})
    weights = jax.device_put(table.weights_of(config))
    language_model = LanguageModel(config, weights, {}, build_mesh({}, jax.devices()[:1]), speculate=1)
    with pytest.raises(InputError, match=r"drafts.*Recurrence \(block recurrent\).*SUPPORTS"):
        Generator(language_model)
    with pytest.raises(ConfigError, match=r"mtp_layers=1.*mesh.pipeline=1 or model.mtp_layers=0"):
        check_mesh(make(table, {"pipeline": 2}, 2, {"mtp_layers": 1}), 2)
