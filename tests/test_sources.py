"""Sources of weights: another program's layout in one file outside the package, and which source a path has."""

import importlib.util
import textwrap

import jax
import numpy as np
import pytest
from mesh_models import MODELS
from single_device import make_config

import megajax
from megajax import sources
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError, InputError
from megajax.inference.load import load_model
from megajax.model import Transformer, parameters
from megajax.sharding import to_canonical
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

TOY = """
import contextlib
import numpy as np
from megajax.sources import WeightSource, register_source

@register_source
class Transposed(WeightSource):
    '''A .npz file whose arrays are transposed, with / in their names.'''

    @classmethod
    def matches(cls, path):
        return path.suffix == ".npz"

    @contextlib.contextmanager
    def open(self, model):
        with np.load(self.path) as file:
            yield {name.replace("/", "."): file[name].T for name in file}
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A layout that a file from outside has registered."""
    monkeypatch.setattr(sources, "SOURCES", [*sources.SOURCES])
    (tmp_path / "toy.py").write_text(textwrap.dedent(TOY))
    spec = importlib.util.spec_from_file_location("toy_source", tmp_path / "toy.py")
    assert spec and spec.loader
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    return tmp_path / "toy.npz"


def saved(file, model, **changes):
    """Random weights of a model, by canonical name, which the file has in the toy's layout."""
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=p.shape).astype(np.float32) for n, p in parameters(Transformer(model)).items()}
    np.savez(file, **{n.replace(".", "/"): w.T for n, w in (weights | changes).items()})
    return weights


def test_a_run_starts_from_a_layout_of_ones_own(toy):
    config = make_config(MODELS["llama"], {"fsdp": 2, "tensor": 2}, checkpoint={"init_from": str(toy)})
    weights = saved(toy, config.model)
    program = TrainProgram.build(config, megajax.build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    saver = StateSaver(program)
    state = saver.first_state()
    for name, weight in weights.items():
        np.testing.assert_array_equal(to_canonical(state.params[name], program.placements[name]), weight)


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("text", "the source text is no class of megajax.sources.WeightSource"),
        (type("Lacking", (sources.WeightSource,), {}), "Lacking does not define matches"),
        (type("Lacking", (sources.WeightSource,), {"matches": classmethod(lambda cls, path: True)}), "not define open"),
        (
            type("Few", (sources.WeightSource,), {"matches": lambda: True, "open": lambda self, model: {}}),
            r"matches\(path\)",
        ),
        (
            type(
                "Few", (sources.WeightSource,), {"matches": classmethod(lambda c, path: True), "open": lambda self: {}}
            ),
            r"Few.open .*write open\(self, model\)",
        ),
    ],
)
def test_a_layout_is_checked_when_it_is_registered(layout, sentence):
    before = [*sources.SOURCES]
    with pytest.raises(ConfigError, match=sentence):
        sources.register_source(layout)
    assert before == sources.SOURCES


def test_what_a_layout_lacks_or_has_beside_the_model_is_said_with_its_path(toy):
    config = make_config(MODELS["llama"], {}, checkpoint={"init_from": str(toy)})
    saved(toy, config.model, **{"final_norm": np.zeros(3)})
    program = TrainProgram.build(config, megajax.build_mesh({}, jax.devices()[:1]))
    with pytest.raises(InputError, match=r"checkpoint\.init_from=.*toy\.npz.*\[3\] for final_norm \[64\]"):
        StateSaver(program).restore_weights(str(toy))
    saved(toy, config.model, **{"blocks.dense.mlp.bias": np.zeros(3), "blocks.mtp.final_norm": np.zeros(64)})
    with pytest.raises(InputError, match=r"toy\.npz.* gives blocks\.dense\.mlp\.bias, but the model has no such array"):
        StateSaver(program).restore_weights(str(toy))
    with pytest.raises(InputError, match=r"path=.*toy\.npz.*no config"):
        load_model(toy)


@pytest.mark.parametrize(("size", "fits"), [(256, False), (257, True), (300, True)])
def test_a_tokenizer_may_have_as_many_tokens_as_the_model(tmp_path, size, fits):
    config = make_config(
        MODELS["llama"] | {"vocab_size": size}, {}, data={"kind": "text", "tokenizer": "byte", "train": "a"}
    )
    if fits:
        assert sources.find_tokenizer(config, tmp_path).vocab_size == 257
        return
    with pytest.raises(InputError, match="the tokenizer byte has 257 tokens, but the model has 256"):
        sources.find_tokenizer(config, tmp_path)
