"""Groups of parameters, layer-wise decay of the rate and µP, against plain NumPy, on meshes too."""

import math

import jax
import numpy as np
import pytest
from mesh_models import MIXTRAL, MODELS
from muon import Muon, random_gradients, run_optimizer
from single_device import make_batches, make_config, weights_of

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.optim.groups import rates
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

RATE, DECAY, STEPS, LAYERS = 1e-3, 0.1, 3, 5
LLAMA = MODELS["llama"] | {"num_layers": LAYERS}


def make(mesh=None, model=LLAMA, optimizer=None, **sections):
    settings = {"kind": "adamw", "weight_decay": DECAY, "clip_norm": 0.0} | (optimizer or {})
    schedule = {"kind": "constant", "learning_rate": RATE}
    return make_config(model, mesh, optimizer=settings, schedule=schedule, **sections)


def build(config):
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def updated(config, gradients):
    return run_optimizer(build(config), weights_of(config), gradients)


class AdamW(Muon):
    """AdamW of the reference for every parameter, with a rate for each row."""

    def __init__(self, weight, decay):
        super().__init__("plain", weight, {}, decay)


def expected(config, gradients, rate_of, decay_of):
    """Weights after AdamW with the rate `rate_of(name)`, a number or an array, and the decay of each parameter."""
    out = {}
    for name, weight in weights_of(config).items():
        own = AdamW(weight, decay_of(name))
        for t, each in enumerate(gradients, 1):
            own.step(each[name], RATE * rate_of(name), t)
        out[name] = own.weight
    return out


def assert_equal(found, expected):
    for name, weight in expected.items():
        np.testing.assert_allclose(found[name], weight, rtol=2e-5, atol=2e-6, err_msg=name)


def of_layers(name, decay):
    if name.startswith("blocks."):
        return (decay ** np.arange(LAYERS, 0, -1)).reshape(-1, *(1,) * (weights_rank(name) - 1))
    return decay ** (LAYERS + 1) if name.startswith("embedding.") else 1.0


def weights_rank(name):
    return weights_of(make())[name].ndim


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 2}, {"pipeline": 2, "data": 2}], ids=str)
def test_rates_and_decay_of_groups_and_layers(mesh):
    groups = [
        {"parameters": ["*.mlp.down", "head"], "learning_rate": 0.5, "weight_decay": 0.0},
        {"parameters": ["blocks.dense.mlp.*"], "learning_rate": 2.0},
        {"parameters": ["embedding.*"], "weight_decay": 3.0},
    ]
    settings = {"groups": groups, "layer_decay": 0.8, "decay_norms": True}
    config = make(mesh, optimizer=settings, batch={"num_microbatches": 4 if "pipeline" in mesh else 1})
    gradients = [random_gradients(weights_of(config), seed) for seed in range(STEPS)]

    def rate(name):
        own = 0.5 if name.endswith("mlp.down") or name == "head" else 2.0 if ".mlp." in name else 1.0
        return own * of_layers(name, 0.8)

    def decay(name):
        zero = name.endswith("mlp.down") or name == "head"
        return 0.0 if zero else 3 * DECAY if name.startswith("embedding.") else DECAY

    assert_equal(updated(config, gradients), expected(config, gradients, rate, decay))


def test_learned_positions_are_as_far_from_the_output_as_tokens():
    program = build(make(model=LLAMA | {"position": "learned"}, optimizer={"layer_decay": 0.5}))
    found = rates(program.plan, program.plan.declared, program.update.slots)
    assert found["embedding.positions"] == found["embedding.tokens"] == 0.5 ** (LAYERS + 1)


def test_a_group_is_clipped_to_its_own_norm_and_the_others_together():
    groups = [{"parameters": ["*.attention.*"], "clip_norm": 2.0}, {"parameters": ["head"], "clip_norm": 0.0}]
    groups += [{"parameters": ["*.mlp.*"], "learning_rate": 2.0}]  # clipped with those of no group
    plain = {"kind": "sgd", "beta1": 0.0, "weight_decay": 0.0}
    config = make({"fsdp": 2, "tensor": 2}, optimizer=plain | {"groups": groups, "clip_norm": 3.0})
    weights = weights_of(config)
    gradients = random_gradients(weights, 0)
    found = updated(config, [gradients])
    attention = [name for name in weights if ".attention." in name]
    rest = [name for name in weights if name not in attention and name != "head"]
    scales = {"head": 1.0}
    for names, limit in ((attention, 2.0), (rest, 3.0)):
        norm = math.sqrt(sum(float(np.square(gradients[name], dtype=np.float64).sum()) for name in names))
        assert norm > limit
        scales |= dict.fromkeys(names, limit / norm)
    moved = {name: RATE * scales[name] * (2 if ".mlp." in name else 1) for name in weights}
    assert_equal(found, {name: w - moved[name] * gradients[name] for name, w in weights.items()})


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        ([{"parameters": ["blocks.*.mlp.gates"]}], "'blocks.*.mlp.gates', which matches no trained parameter"),
        ([{"parameters": ["*"]}, {"parameters": ["head"]}], "are in groups before it"),
        ([{"parameters": ["head"]}, {"parameters": ["hea?"]}], "are in groups before it"),
    ],
)
def test_groups_without_parameters_are_refused(groups, sentence):
    with pytest.raises(ConfigError) as error:
        build(make(optimizer={"groups": groups}))
    assert sentence in str(error.value)


def growth(width, base, **optimizer):
    """How much the logits of the right tokens grow by three steps on one batch, and their size before them."""
    model = {"num_layers": 1, "hidden_size": width, "num_heads": width // 16, "ffn_hidden_size": 2 * width}
    model |= {"vocab_size": 250, "init_std": 0.05, "mup_base_width": base}
    program = build(make(model=model, batch={"global_size": 4}, steps=3, optimizer={"weight_decay": 0.0} | optimizer))
    state, [batch, *_] = program.init_state(), make_batches(program.config)
    tokens, right = batch["tokens"].reshape(4, -1), batch["targets"].reshape(4, -1, 1)
    logits = jax.jit(lambda params: bind(program.model, params)(tokens))
    before = logits(state.params)
    for _ in range(3):
        state, _ = program.train_step(state, to_global(program, batch))
    change = np.take_along_axis(np.asarray(logits(state.params) - before), right, axis=-1)
    return float(change.mean()), float(abs(before).mean())


OF_MATRICES = {  # settings of the optimizer and, by m, the rate of the layers' matrices (docs/optimizers.md)
    "adamw": ({"kind": "adamw"}, lambda m: 1 / m),
    "lion": ({"kind": "lion"}, lambda m: 1 / m),
    "muon": ({"kind": "muon", "muon": {"scale": "match_adamw", "adamw_rate": 1.0}}, lambda m: m**-0.5),
    "spectral": ({"kind": "muon", "muon": {"scale": "spectral", "adamw_rate": 1.0}}, lambda m: 1.0),
}


@pytest.mark.parametrize("kind", OF_MATRICES)
@pytest.mark.parametrize(("base", "m"), [(16, 4.0), (128, 0.5)], ids=["wider", "narrower"])
def test_rates_with_mup_are_those_of_its_table(kind, base, m):
    """Those of a proxy that is narrower than the tuned model are larger. AdamW updates what Muon does not."""
    optimizer, of_matrices = OF_MATRICES[kind]
    program = build(make(model=LLAMA | {"hidden_size": 64, "mup_base_width": base}, optimizer=optimizer))
    found = rates(program.plan, program.plan.declared, program.update.slots)
    for name, rate in found.items():
        norm, matrix = "norm" in name or name.startswith("embedding"), name.startswith("blocks.")
        assert rate == (1.0 if norm else of_matrices(m) if matrix else 1 / m), name


def test_a_group_multiplies_muons_rate_of_the_parameters_that_it_leaves_to_adamw():
    groups = [{"parameters": ["head", "*.mlp.up"], "learning_rate": 0.5}]
    program = build(make(optimizer={"kind": "muon", "muon": {"adamw_rate": 0.3}, "groups": groups}))
    found = rates(program.plan, program.plan.declared, program.update.slots)
    expected = {"embedding.tokens": 0.3, "final_norm": 0.3, "head": 0.5 * 0.3}
    expected |= {"blocks.dense.mlp.norm": 0.3, "blocks.dense.mlp.up": 0.5, "blocks.dense.mlp.down": 1.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("scale", "factors"), [("spectral", {"up": 2.0, "down": 1.0}), ("match_adamw", None)])
def test_the_size_of_muons_updates_is_that_of_its_scale(scale, factors):
    """An orthogonal R x C matrix has the norm min(R, C)^0.5; up is [32, 128], down [128, 32]."""
    model = LLAMA | {"num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 128}
    muon = {"scale": scale, "coefficients": "polar_express", "steps": 8}
    config = make(model=model, optimizer={"kind": "muon", "weight_decay": 0.0, "muon": muon})
    program, random = build(config), np.random.default_rng(0)
    shapes = {name: p.shape for name, p in parameters(program.model).items()}
    gradients = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    zeros = jax.tree.map(np.zeros_like, gradients)
    found, _ = jax.jit(program.update.directions)(gradients, program.update.first(zeros).optimizer, zeros)
    for name in ("up", "down"):
        factor = factors[name] if factors else 0.2 * 128**0.5
        assert np.linalg.norm(found[f"blocks.dense.mlp.{name}"]) == pytest.approx(factor * 32**0.5, rel=0.02)


@pytest.mark.parametrize(("base", "m"), [(16, 4.0), (256, 0.25)], ids=["wider", "narrower"])
def test_the_initial_std_with_mup_is_that_of_its_table(base, m):
    """1/m of head and routers, 1/√m of the matrices of layers."""
    found = {}
    for width in (None, base):
        model = MIXTRAL | {"hidden_size": 64, "mup_base_width": width}
        declared = parameters(Transformer(make(model=model).model))
        found[width] = {name: parameter.scale for name, parameter in declared.items()}
    for name, scale in found[base].items():
        output, matrix = name == "head" or name.endswith("router"), name.startswith("blocks.") and "norm" not in name
        assert scale / found[None][name] == (1 / m if output else m**-0.5 if matrix else 1.0), name


@pytest.mark.long
def test_with_mup_the_growth_does_not_grow_with_the_width():
    (small, _), (large, _) = (growth(width, None) for width in (64, 256))
    assert large / small > 2
    (small, start), (large, its_start) = (growth(width, 64) for width in (64, 256))
    assert 0.6 < large / small < 1.6
    assert 0.3 < its_start / start <= 1.1, "the logits before training shrink: the head reads a sum of random terms"


@pytest.mark.parametrize(
    ("model", "optimizer", "other"),
    [
        ({"tie_embeddings": True}, {}, "model.tie_embeddings=true"),
        ({}, {"kind": "sgd"}, "optimizer.kind=sgd"),
    ],
)
def test_mup_is_refused_where_its_table_has_no_row(model, optimizer, other):
    with pytest.raises(ConfigError) as error:
        make(model=LLAMA | {"mup_base_width": 32} | model, optimizer=optimizer)
    assert f"model.mup_base_width=32 cannot be combined with {other}" in str(error.value)
