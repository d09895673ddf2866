"""A remat policy from outside the package keeps what it says; test_registered_options.py trains with it."""

import ast
from pathlib import Path
from typing import Any, cast

import jax
import pytest
from mesh_models import MODELS
from test_hlo_facts import residual_shapes

import megajax
from megajax.config import Keep, RematPolicy, load_config, register_remat
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.estimate.memory import estimate_memory
from megajax.mesh import build_mesh
from megajax.model.sublayer import Sublayer
from megajax.options.remat import ATTENTION, POLICIES
from megajax.training.step import TrainProgram

EXTENSION = """\
from megajax.config import RematPolicy, register_remat

register_remat(RematPolicy("attention_outputs", keep=("attention",)))
"""
LAYERS = 4


@pytest.fixture
def registered():
    register_remat(RematPolicy("attention_outputs", keep=("attention",)))
    yield
    POLICIES.pop("attention_outputs", None)


def make(table, mesh, policy="attention_outputs"):
    model = MODELS["llama"] | {"num_layers": LAYERS}
    return table.make_config(model, mesh, steps=2, optimizer="sgd", remat={"policy": policy})


def test_it_keeps_the_inputs_of_groups_and_the_outputs_of_attention(table, registered):
    def kept(policy):
        config = make(table, {}, policy=policy)
        return residual_shapes(TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1])))

    config = make(table, {})
    m, tokens = config.model, config.batch.global_size * config.batch.sequence_length
    layer = [shape[1:] for shape in kept("attention_outputs") if shape[0] == LAYERS]
    assert (tokens, m.hidden_size) in layer
    assert [s for s in layer if s[-2:] == (m.num_heads, m.head_dim)] == [
        (config.batch.global_size, config.batch.sequence_length, m.num_heads, m.head_dim)
    ]
    widths = {s[-1] for s in layer}
    assert not widths & {m.ffn_hidden_size, 2 * m.ffn_hidden_size} and len(layer) < len(kept("none"))


def subclasses(kind: type) -> set[type]:
    own = {each for each in kind.__subclasses__() if each.__module__.startswith("megajax.")}
    return own.union(*map(subclasses, own))


def test_the_names_that_sublayers_save_are_those_of_arrays():
    """By the calls of `checkpoint_name`: a name that no array has would save nothing, without a word."""
    named = set()
    for path in Path(megajax.__file__).parent.rglob("*.py"):
        if "checkpoint_name(" in (text := path.read_text(encoding="utf-8")):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            names = [call.args[1] for call in calls if ast.unparse(call.func) == "checkpoint_name"]
            named |= {ATTENTION if isinstance(name, ast.Name) else ast.literal_eval(name) for name in names}
    assert named == {name for kind in subclasses(Sublayer) for name in kind.SAVED}


def test_its_estimate_is_between_full_and_save_matmuls(table, registered):
    def activations(policy):
        config = make(table, {}, policy=policy)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
        return estimate_memory(program.plan.on_gpus()).activations

    found = {policy: activations(policy) for policy in ("full", "attention_outputs", "save_matmuls")}
    assert found["full"] < found["attention_outputs"] < found["save_matmuls"], found


def test_a_name_is_known_after_its_extension_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ext_remat.py").write_text(EXTENSION)
    base = "model: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 32}\nrun: {steps: 1}\n"
    base += "batch: {global_size: 2, sequence_length: 8}\ndata: {kind: synthetic}\n"
    (tmp_path / "x.yaml").write_text(base)
    with pytest.raises(ConfigError, match="remat.policy=attention_outputs.*: use none, .*offload, .*run.extensions"):
        load_config("x.yaml", ["remat.policy=attention_outputs"])
    try:
        config = load_config("x.yaml", ["remat.policy=attention_outputs", "run.extensions=[ext_remat.py]"])
        assert config.remat.chosen == RematPolicy("attention_outputs", ("attention",))
    finally:
        POLICIES.pop("attention_outputs", None)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (RematPolicy("full", Keep.ALL), "full exists already: choose another name"),
        (RematPolicy("two words", Keep.ALL), "'two words' is not a name"),
        (RematPolicy("nothing", ()), "nothing has keep=.*Keep.INPUT"),
        (RematPolicy("letters", cast(Any, "attention")), "letters has keep='attention': use names in a tuple"),
        (RematPolicy("numbers", cast(Any, ("attention", 1))), "numbers has keep=.*use names in a tuple"),
        (RematPolicy("of_jax", cast(Any, jax.checkpoint_policies.dots_saveable)), "of_jax has keep=.*use names in a"),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_wrong_registration_is_a_sentence(policy, problem):
    before = dict(POLICIES)
    with pytest.raises(ConfigError, match=problem):
        register_remat(policy)
    assert before == POLICIES


def test_names_that_no_block_has_are_a_sentence():
    with pytest.raises(ConfigError, match="remat.policy=mine keeps attn, which no block .*: use attention"):
        RematPolicy("mine", ("attn",)).check_names({"attention", "output"})
    with pytest.raises(ConfigError, match="remat.policy=mine keeps attn"):
        RematPolicy("mine", cast(Any, ["attn"])).check_names({"attention", "output"})
