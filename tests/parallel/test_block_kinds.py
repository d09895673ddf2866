"""A kind of block from outside the package, one class and one line, trains on any mesh as on one device."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from mesh_models import MIXTRAL, MODELS

from megajax.checkpoint import Checkpoints
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError, InputError
from megajax.estimate.costs import active_parameter_count, flops_per_token
from megajax.estimate.memory import estimate_memory
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.layout.kinds import KINDS, LayerKind, expert_layers
from megajax.mesh import build_mesh
from megajax.model import (
    EVERYTHING,
    LayerContext,
    Sublayer,
    Transformer,
    bind,
    declare,
    init_parameters,
    register_block,
)
from megajax.model.attention import Attention
from megajax.model.block import Block, dropout_key
from megajax.model.comm import Comm, TokenPositions
from megajax.model.mlp import MLP
from megajax.model.moe import MoE
from megajax.model.sublayer import BlockInputs, RealTokens
from megajax.schema.fields import Count, Section, check_attributes
from megajax.step.graph import ADAPTERS, JITTER
from megajax.step.nodes import Field, Results
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram
from megajax.training.summary import summary

STEPS = 3


class Squared(Sublayer):
    """(x · up)² · down, divided by 1 + a running mean of its output.

    `up` is wider than a dense MLP's of the same name. What it gives is measured, and is a loss.
    """

    NAME = "mlp"
    SUPPORTS = EVERYTHING  # no token depends on another one
    LINEAR = ("up", "down")
    METRICS = LOSSES = ("power",)

    def __init__(self, config):
        self.config = config
        self.up = declare((config.hidden_size, 2 * config.ffn_hidden_size), ("embed", "mlp"))
        self.gain = declare((config.hidden_size,), ("norm",), "norm")
        self.down = declare((2 * config.ffn_hidden_size, config.hidden_size), ("mlp", "embed"))

    def apply(self, w, x, ctx):
        comm = ctx.comm
        y = comm.row_linear(jnp.square(comm.column_linear(x, w["up"])), w["down"])
        y = y * w["gain"] / (1 + ctx.state["mean_power"])
        power = ctx.share_of_mean(jnp.sum(jnp.square(y), axis=-1))
        return y.astype(x.dtype), {"power": power} if ctx.inputs.has_metrics else {}

    def layer_state(self):
        return {"mean_power": jax.ShapeDtypeStruct((), jnp.float32)}

    def updated_state(self, state, metrics):
        return {"mean_power": 0.5 * state["mean_power"] + 0.5 * metrics["power"]}


class Mean(Sublayer):
    """The mean of each token's value and those before it: mixes tokens like attention, with nothing of its own."""

    NAME = "mean"
    SUPPORTS = frozenset({"tensor"})
    LINEAR = ("value", "output")

    def __init__(self, config):
        D, F = config.hidden_size, config.ffn_hidden_size
        self.config = config
        self.value, self.output = declare((D, F), ("embed", "mlp")), declare((F, D), ("mlp", "embed"))

    def apply(self, w, x, ctx):
        comm, (B, S) = ctx.comm, ctx.inputs.positions.shape
        total = jnp.cumsum(comm.column_linear(x, w["value"]).reshape(B, S, -1), axis=1)
        mean = total / jnp.arange(1, S + 1)[:, None]
        return comm.row_linear(mean.reshape(B * S, -1), w["output"]), {}


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    own = {"squared": (Squared,), "again": (Attention, Squared), "mean": (Mean, MLP), "both": (Mean, Squared)}
    for name, parts in own.items():
        monkeypatch.setitem(KINDS, name, {part.NAME: part for part in parts})


def make(table, mesh, microbatches=1, model=None, **sections):
    model = MODELS["llama"] | {"num_layers": 4, "block_pattern": ["dense", "squared"]} | (model or {})
    return table.make_config(model, mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


def build(config, devices):
    return TrainProgram.build(config, build_mesh(check_mesh(config, devices), jax.devices()[:devices]))


def train(table, program):
    """(metrics of each step, last weights, last layer state)."""
    state, steps = table.first_state(program, table.weights_of(program.config)), []
    for fields in table.make_batches(program.config):
        state, metrics = program.train_step(state, to_global(program, fields))
        steps.append({name: float(value) for name, value in metrics.items()})
    return steps, table.canonical(program, state.params), state


# Alone they compile in half the time; with larger weights, so that their loss and state count without attention too
SQUARED = {"num_layers": 2, "block_pattern": ["squared"], "init_std": 0.18}


@pytest.fixture(scope="module")
def expected(table):
    patch = pytest.MonkeyPatch()
    patch.setitem(KINDS, "squared", {"mlp": Squared})
    yield train(table, build(make(table, {}, model=SQUARED), 1))
    patch.undo()


def test_it_trains_as_on_one_device(table, expected, tmp_path):
    lockstep = {"schedule": "gpipe"}  # the metrics of idle operations do not count
    program = build(make(table, {"pipeline": 2}, 2, SQUARED, run={"dir": str(tmp_path)}, pipeline=lockstep), 2)
    steps, weights, state = train(table, program)
    for found, wanted in zip(steps, expected[0], strict=True):
        assert found.keys() == wanted.keys() >= {"loss", "grad_norm", "power"}
        for name, value in wanted.items():
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for name, w in expected[1].items():
        np.testing.assert_allclose(weights[name], w, rtol=1e-4, atol=1e-5, err_msg=name)
    kept = {"squared": {"mlp.mean_power": expected[2].layer_state["squared"]["mlp.mean_power"]}}
    assert kept["squared"]["mlp.mean_power"].shape == (2,) and np.all(kept["squared"]["mlp.mean_power"] > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.layer_state, kept)

    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=None)
    StateSaver(program).save(checkpoints, STEPS, state)
    checkpoints.wait()
    restored = StateSaver(program).restore(checkpoints, STEPS)
    checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, restored.layer_state, state.layer_state)


@pytest.mark.long
def test_two_sublayers_of_one_class_have_names_and_weights_of_their_own(table, monkeypatch):
    """Three sublayers in a layer: attention twice, then the MLP; with dropout, whose keys are per sublayer."""
    monkeypatch.setitem(KINDS, "twice", {"attention": Attention, "second": Attention, "mlp": MLP})
    model, runs = {"block_pattern": ["twice", "dense"], "num_layers": 2, "dropout": 0.1}, []
    for mesh in ({"fsdp": 2, "tensor": 2}, {}):
        runs.append(train(table, build(make(table, mesh, model=model), 4 if mesh else 1)))
    for found, wanted in zip(runs[0][0], runs[1][0], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    first, second = (runs[0][1][f"blocks.twice.{name}.query"] for name in ("attention", "second"))
    assert first.shape == second.shape and not np.allclose(first, second)


class Numbered(MLP):
    """Counts the number of its layer."""

    METRICS = ("number",)

    def apply(self, w, x, ctx):
        return super().apply(w, x, ctx)[0], {"number": jnp.int32(ctx.layer)} if ctx.inputs.has_metrics else {}


@pytest.mark.parametrize("unroll", [4, pytest.param(1, marks=pytest.mark.long)])
def test_each_layer_of_a_remat_group_knows_its_number(table, monkeypatch, unroll):
    monkeypatch.setitem(KINDS, "numbered", {"mlp": Numbered})
    remat, model = {"policy": "full", "group": 2}, {"block_pattern": ["numbered"]}
    program = build(make(table, {}, model=model, remat=remat, kernels={"scan_unroll": unroll}), 1)
    state = table.first_state(program, table.weights_of(program.config))
    metrics = program.train_step(state, to_global(program, next(table.make_batches(program.config))))[1]
    assert metrics["number"].tolist() == [0, 1, 2, 3]


def test_a_mean_over_tokens_leaves_out_padding():
    """Of three real tokens on all devices this one has two."""
    real = RealTokens(jnp.array([True, False, True]), jnp.array([3]), jnp.int32(3), jnp.int32(1))
    position = jnp.zeros((1, 3), jnp.int32)
    inputs = BlockInputs(position, TokenPositions(position), position[0], None, real=real)
    ctx = LayerContext(Comm(), inputs, 0, LayerKind("mine", None))
    assert ctx.share_of_mean(jnp.array([1.0, 7.0, 5.0])) == 2


def test_no_two_dropout_keys_coincide():
    """Kinds of one to four sublayers beside each other, the embedding, jitter, adapters, and prediction modules."""
    from megajax.step.mtp import DROPOUT  # here, since a copy of the code may have none (dev/without_mtp.py)

    key, found = jax.random.key(0), [0, JITTER, ADAPTERS, *range(DROPOUT, DROPOUT + 8)]
    found = [tuple(np.asarray(jax.random.key_data(jax.random.fold_in(key, number)))) for number in found]
    layers = jnp.arange(40)
    for count in (2, 4):  # those of one and of three are among those of four: a layer has one kind
        for branch in range(count):
            keys = jax.vmap(lambda layer, n=count, b=branch: dropout_key(key, n, layer, b))(layers)
            found += map(tuple, np.asarray(jax.random.key_data(keys)))
    assert len(set(found)) == len(found)


def test_its_state_and_its_loss_decide(table, expected):
    """The numbers above would agree if neither reached the weights."""
    steps, (first, *_) = expected[0], expected[0]
    assert first["power"] > 0.01 and steps[-1]["power"] != pytest.approx(first["power"], rel=1e-3)
    program = build(make(table, {}, model=SQUARED), 1)
    batch = to_global(program, next(table.make_batches(program.config)))
    state = table.first_state(program, table.weights_of(program.config))
    states = state.layer_state, expected[2].layer_state
    loss = [float(program.eval_step(state.params, kept, batch)[0]["loss"]) for kept in states]
    assert loss[0] != pytest.approx(loss[1], rel=1e-5)


def test_it_says_what_it_costs(table):
    """FLOPs by hand: the head, two dense layers, two of the kind; the memory of its `up` is twice a dense MLP's."""
    config = make(table, {})
    m, S = config.model, config.batch.sequence_length
    D, F, N, K, H = m.hidden_size, m.ffn_hidden_size, m.num_heads, m.num_kv_heads, m.head_dim
    attention = D * H * (2 * N + 2 * K)
    matmuls = 2 * attention + 2 * 3 * D * F + 2 * 2 * D * 2 * F + D * m.padded_vocab_size
    assert flops_per_token(config) == 6 * matmuls + 2 * 12 * S / 2 * N * H
    saved = []
    for width in (F, 2 * F):
        config = make(table, {}, model={"ffn_hidden_size": width}, kernels={"scan_unroll": 4})
        program = build(config, 1)
        saved.append(estimate_memory(program.plan.on_gpus()).activations)
    # The compute dtype's 4 bytes of each token: gate and up of two dense layers, `up` and its square of two of the kind
    tokens = config.batch.global_size * S
    assert saved[1] - saved[0] == 4 * tokens * F * (2 * 2 + 2 * 2 * 2)


def test_an_unknown_kind_is_a_sentence(table):
    model = MODELS["llama"] | {"block_pattern": ["dense", "cubed"]}
    with pytest.raises(ConfigError, match=r"block_pattern has 'cubed'.*: use .*squared.*run.extensions"):
        Transformer(table.make_config(model).model)


class Wide(Mean):
    """`Mean` with a width of its own."""

    class Settings(Section):
        width: Count
        name: str = "plain"

    def __init__(self, config, settings):
        super().__init__(config.model_copy(update={"ffn_hidden_size": settings.width}))


def test_settings_of_a_sublayer_are_keys(table, monkeypatch):
    monkeypatch.setitem(KINDS, "wide", {"wide": Wide, "mlp": MLP})

    def checked(values):
        config = make(table, {}, model={"block_pattern": ["dense", "wide"], "sublayer_settings": values})
        check_mesh(config, 1)
        return config

    config = checked({"wide": {"width": 6}})
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config  # as a run directory has it
    assert dict(Transformer(config.model).blocks)["wide"].wide.value.shape[-1] == 6
    assert config.model != checked({"wide": {"width": 8}}).model
    for values, sentence in (
        ({"wide": {"width": 0}}, "model.sublayer_settings.wide.width=0 is wrong: .*: correct it"),
        ({"wide": {"width": 6, "widht": 8}}, "wide.widht is no setting of Wide .*: it has width and name"),
        ({}, "model.sublayer_settings.wide.width is not set .*: add it"),
        ({"wide": {"width": 6}, "mlp": {"width": 8}}, "mlp.width is no setting of MLP .*: it has none"),
        ({"wide": {"width": 6}, "wider": {}}, "wider is not read: model.block_pattern names no block .*remove"),
        ({"wide": {"width": 6}, "attention": {}}, "attention is not read: model.block_pattern names no block .*remove"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            checked(values)
    monkeypatch.setattr(Wide, "Settings", type("Settings", (), {"width": 6}))
    with pytest.raises(ConfigError, match="Wide.Settings is no section: derive it from megajax.schema.fields.Section"):
        checked({})


def test_linear_layers_and_first_values_are_those_of_parameters(table, monkeypatch):
    class Misspelt(Mean):
        LINEAR = ("valeu", "output")

    class Short(Mean):
        def __init__(self, config):
            super().__init__(config)
            self.taps = declare((3, 2), ("whole", "whole"), initial=lambda key, shape: jnp.zeros(shape[0]))

    monkeypatch.setitem(KINDS, "misspelt", {"mean": Misspelt})
    model = make(table, {}, model={"block_pattern": ["misspelt"]}).model
    with pytest.raises(ConfigError, match="Misspelt.LINEAR has 'valeu', which is no parameter: declare it"):
        Transformer(model)
    monkeypatch.setitem(KINDS, "misspelt", {"mean": Short})
    with pytest.raises(ConfigError, match=r"of blocks.misspelt.mean.taps returns the shape \[3\] for \[3, 2\]: return"):
        jax.eval_shape(lambda: init_parameters(Transformer(model), 0, 0.1))


PACKED = {"reset_attention": True, "synthetic_documents": 2}
FP8 = {"compute": "bfloat16", "fp8": {"recipe": "current"}}
NEEDS = {  # (model, mesh, other sections): the ability that they need, and what the sentence names
    "context": ({}, {"context": 2}, {}, "context", "mesh.context=2"),
    "other devices": ({}, {"context": -1}, {}, "context", "mesh.context=2 (from -1)"),
    "documents": (
        {},
        {},
        {"data": {"reset_attention": True, "synthetic_documents": 2}},
        "documents",
        "reset_attention",
    ),
    "window": ({"sliding_window": 4}, {}, {}, "layer_pattern", "model.sliding_window=4"),
    "rope": ({"rope_pattern": ["rope", "none"]}, {}, {}, "layer_pattern", "model.rope_pattern"),
    "fp8": ({}, {}, {"precision": FP8}, "fp8", "precision.fp8.recipe=current"),
    "lora": ({}, {}, {"lora": {"rank": 4}, "checkpoint": {"init_from": "base"}}, "lora", "lora.rank=4"),
    "qk_clip": ({"qk_clip": 100.0}, {}, {}, "qk_clip", "model.qk_clip=100"),
    "modules": ({"mtp_layers": 1}, {"pipeline": 2}, {}, "context", "model.mtp_layers=1"),
    "empty slot": ({"num_layers": 3}, {"pipeline": 2}, {}, "empty_slots", "mesh.pipeline=2"),
}


@pytest.mark.parametrize("case", NEEDS)
def test_a_setting_that_a_part_does_not_declare_is_refused(table, monkeypatch, case):
    model, mesh, sections, ability, named = NEEDS[case]
    model = {"block_pattern": ["mean"]} | model
    devices = int(np.prod([2 if size == -1 else size for size in mesh.values()]))

    def checked():
        check_mesh(make(table, mesh, 2 if "pipeline" in mesh else 1, model, **sections), devices)

    with pytest.raises(ConfigError) as found:
        checked()
    for part in (
        named,
        f"needs {ability}, which Mean (block mean) does not declare",
        f"add '{ability}' to Mean.SUPPORTS",
    ):
        assert part in str(found.value), part
    monkeypatch.setattr(Mean, "SUPPORTS", Mean.SUPPORTS | {ability})
    checked()


@pytest.mark.long
def test_a_part_divides_its_work_over_the_axes_that_it_declares(table):
    model, runs = {"block_pattern": ["mean"]}, []
    for mesh in ({}, {"fsdp": 2, "tensor": 2}):
        runs.append(train(table, build(make(table, mesh, model=model), int(np.prod(list(mesh.values()) or [1])))))
    for found, wanted in zip(runs[1][0], runs[0][0], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)


def language_model(table, kind):
    config = table.make_config(MODELS["llama"] | {"num_layers": 2, "block_pattern": [kind]}, {})
    model = Transformer(config.model)
    weights = jax.device_put(table.weights_of(config))
    state = {"again": {"mlp.mean_power": np.float32([0.5, 2.0])}} if kind == "again" else {}
    return model, weights, state, LanguageModel(config, dict(weights), state, build_mesh({}, jax.devices()[:1]))


def test_a_part_that_depends_on_no_other_token_decodes_with_a_cache(table):
    """Greedy tokens are those of whole sequences, computed by the plain model."""
    model, weights, state, generating = language_model(table, "again")
    model = jax.jit(bind(model, weights))
    tokens = [3, 1, 4, 1, 5]
    *_, ((*found,),) = Generator(generating, Sampling(temperature=0.0)).tokens([tokens], 4)
    for _ in range(4):
        padded = np.array([[*tokens, *[0] * (12 - len(tokens))]])
        tokens.append(int(np.argmax(np.asarray(model(padded, state))[0, len(tokens) - 1])))
    assert found == tokens[5:]


def test_a_part_without_a_cache_is_evaluated_but_does_not_generate(table):
    model, weights, _, generating = language_model(table, "mean")
    model = jax.jit(bind(model, weights))
    tokens = np.array([[3, 1, 4, 1, 5]])
    np.testing.assert_allclose(generating(tokens), model(tokens), rtol=1e-4, atol=1e-5)
    with pytest.raises(InputError, match="decoding, which Mean .block mean. .* 'decoding' to Mean.SUPPORTS"):
        Generator(generating)


def test_a_registered_kind_with_experts_is_one_everywhere(table, monkeypatch):
    """Estimates, segments, stages, the summary and the load map are those of the built-in kind with the same parts."""
    monkeypatch.setitem(KINDS, "routed", {"attention": Attention, "moe": MoE})
    found = {}
    for name in ("moe", "routed"):
        model = {**MIXTRAL, "num_layers": 4, "block_pattern": ["dense", name]}
        config = table.make_config(model, {"expert": 2, "fsdp": 2})
        program = build(config, 4)
        plan, experts = (
            program.plan.on_gpus(),
            [line for line in summary(program, []).splitlines() if "experts" in line],
        )
        memory = estimate_memory(plan).total
        active = active_parameter_count(program.model)
        found[name] = expert_layers(config.model), active, memory, plan.unrolling, plan.segments, experts
    assert found["routed"] == found["moe"]
    assert found["moe"][0] == (1, 3) and found["moe"][-1]


def test_every_loss_reaches_the_metrics(table):
    """That of a part after the blocks, and one that two kinds of blocks have: each layer's state is half of its own."""

    class Half:
        NAME, EVALUATED, reads_positions = "half", (), False

        def fields(self):
            return {"loss_mask": Field(jnp.float32)}

        def derived_fields(self, fields):
            return {}

        def counts(self, batch):
            return {}

        def loss_factor(self, loss_scale, counts):
            return loss_scale

        def turn(self, arrays, streams, gradients, batch, table):
            return gradients, table, Results(losses={"half": 0.5 * batch.fields["loss_mask"].sum()})

        def evaluate(self, arrays, streams, batch):
            return {}

        def metrics(self, losses):
            return {"half": losses["half"]}

    program = build(make(table, {}, model={"num_layers": 2, "block_pattern": ["squared", "both"]}), 1)
    program.__dict__["graph"] = replace(program.graph, terminal=(*program.graph.terminal, Half()))
    state = table.first_state(program, table.weights_of(program.config))
    batch = to_global(program, next(table.make_batches(program.config)))
    state, metrics = program.train_step(state, batch)
    powers = [2 * float(state.layer_state[kind]["mlp.mean_power"][0]) for kind in ("squared", "both")]
    assert min(powers) > 0 and float(metrics["power"]) == pytest.approx(sum(powers), rel=1e-6)
    assert float(metrics["half"]) == pytest.approx(0.5, rel=1e-6)

    class Taken(Half):
        def metrics(self, losses):
            return {"grad_norm": losses["half"]}

    program = build(program.config, 1)
    program.__dict__["graph"] = replace(program.graph, terminal=(*program.graph.terminal, Taken()))
    with pytest.raises(ConfigError, match="a part has the metric grad_norm, which the step has already"):
        jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)


@pytest.mark.parametrize(
    ("axes", "role", "sentence"),
    [
        (("embed",), "matrix", r"shape \(2, 3\) was declared with .*\('embed',\): give each dimension one of"),
        (("embed", "heads", "head"), "matrix", "give each dimension one of"),
        (("embed", "width"), "matrix", "'width'.*: give each dimension one of"),
        (("embed", "mlp"), "weight", "the role weight: use matrix"),
        (("embed", "embed"), "matrix", "two of which the same mesh axes divide: call one dimension whole"),
        (("heads", "mlp"), "matrix", "two of which the same mesh axes divide"),
    ],
)
def test_a_parameter_is_checked_when_it_is_declared(axes, role, sentence):
    with pytest.raises(ConfigError, match=sentence):
        declare((2, 3), axes, role)


def test_a_shape_or_a_first_value_of_another_kind_is_a_sentence():
    for shape in (64, (64.0, 2), (0, 2), "embed"):
        with pytest.raises(ConfigError, match="declared with the shape .*: give a tuple of sizes"):
            declare(shape, ("embed", "whole"))
    with pytest.raises(ConfigError, match="declared with initial=.*: give a function of a key and a shape"):
        declare((2,), ("whole",), initial=np.ones(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(2),
        lambda: jnp.ones(2),
        lambda: nnx.Param(jnp.ones(2)),
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
    ],
)
def test_an_array_that_is_not_declared_is_a_sentence(table, monkeypatch, make):
    class Own(Squared):
        def __init__(self, config):
            super().__init__(config)
            self.own = make()

    monkeypatch.setitem(KINDS, "own", {"attention": Attention, "mlp": Own})
    with pytest.raises(ConfigError, match=r"Own has own(\.\w+)? of the type .*: write megajax.model.declare"):
        Transformer(table.make_config(MODELS["llama"] | {"block_pattern": ["own"]}, {}).model)


def test_a_part_is_checked_when_it_is_registered(table):
    class Lacking(Sublayer):
        NAME = "lacking"

    class Wrong(Squared):
        SUPPORTS = frozenset({"contxt"})

    class Same(Squared):
        NAME = "same"

    class Untold(Squared):
        METRICS, LOSSES = ("power",), ("half",)

    class Fuse(Mean):
        NAME = "fuse"  # a method of a block

    class Nameless(Sublayer):
        LINEAR, apply = Mean.LINEAR, Mean.apply

    class Few(Squared):
        def apply(self, w, x):
            return x

    class Unset(Squared):
        Settings = Section

    class Text(Squared):
        LINEAR = "up"  # without the comma of a tuple

    class Sets(Squared):
        SUPPORTS, FUSED = {"tensor"}, MappingProxyType({"both": ("up", "down")})

    check_attributes(Sets, Sublayer)
    for parts, kind, sentence in (
        ((Attention, Text), "mine", "Text.LINEAR is 'up', .*tuple: .*Sublayer"),
        ((Attention, Few), "mine", r"Few.apply .*: write apply\(self, w, x, ctx\)"),
        ((Attention, Unset), "mine", r"Unset.__init__ .*: write __init__\(self, config, settings\)"),
        ((Attention, Lacking), "mine", "Lacking does not define LINEAR and apply"),
        ((Attention, Wrong), "mine", "Wrong.SUPPORTS has 'contxt': use tensor, context"),
        ((Attention, Attention), "mine", "two sublayers of the block mine have the name .* attention: name one"),
        ((Attention, Untold), "mine", "Untold.LOSSES has 'half', which METRICS has not: add it"),
        ((Attention, Fuse), "mine", "the block mine has the name 'fuse', which it cannot have: rename"),
        ((Attention, Nameless), "mine", "Nameless does not define NAME"),
        ((Squared, Same), "mine", "two sublayers of the block mine have the name or the metric power: rename one"),
        ((Mean, MLP), "dense", "dense has attention .*Attention.* already: choose another name"),
        ((), "mine", "give a name, such as my_block, and its sublayers"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            register_block(kind, *parts)
    block = Block(table.make_config(MODELS["llama"], {}).model, "dense")
    own = {name for name in vars(block) if name.isidentifier() and not name.startswith("_")} - {*block.names}
    assert {"config", "names"} <= own
    for name in own:
        with pytest.raises(ConfigError, match=f"the block mine has the name '{name}', which it cannot have: rename"):
            register_block("mine", Attention, type("Same", (Mean,), {"NAME": name}))
    assert "mine" not in KINDS
    register_block("mean", Mean, MLP)  # again, as in a notebook
    assert KINDS["mean"] == {"mean": Mean, "mlp": MLP}


class Returns(Squared):
    """`Squared` with a changed result."""

    METRICS = LOSSES = ("power", "more")
    change: Any = None  # (term, metrics, input) → what `apply` returns

    def apply(self, w, x, ctx):
        return self.change(*super().apply(w, x, ctx), x)

    def updated_state(self, state, metrics):
        return {"mean_power": state["mean_power"].sum()}


MORE = {"more": jnp.float32(1)}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda y, metrics, x: None, "Returns.apply returns NoneType: return a term and a dictionary"),
        (lambda y, metrics, x: (y[:, :1], metrics), r"a term float32\[\d+, 1\] for x float32.*: return one as x"),
        (lambda y, metrics, x: (None, metrics), r"a term NoneType for x float32.*: return one as x"),
        (lambda y, metrics, x: (y * 1j, metrics), r"a term complex64.* for x float32.*\.astype"),
        (lambda y, metrics, x: (y, metrics and metrics | {"other": 1.0}), "the metric 'other', .*: add it there"),
        (lambda y, metrics, x: (y, metrics), "does not return the loss 'more' of LOSSES as one FP32 number"),
        (lambda y, metrics, x: (y, metrics and metrics | {"more": x[0]}), "does not return the loss 'more' of LOSSES"),
        (lambda y, metrics, x: (y, metrics and metrics | MORE), "Returns.updated_state .*: return mean_power"),
    ],
)
def test_a_part_that_returns_another_form_is_a_sentence(table, monkeypatch, change, sentence):
    monkeypatch.setattr(Returns, "change", staticmethod(change))
    monkeypatch.setitem(KINDS, "returns", {"mlp": Returns})
    with pytest.raises(ConfigError, match=sentence):
        program = build(make(table, {}, model={"block_pattern": ["returns"]}), 1)
        jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)
