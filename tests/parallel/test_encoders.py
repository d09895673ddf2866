"""An encoder whose stream layers read by cross-attention (docs/examples), against megajax/reference.py."""

import math

import jax
import numpy as np
import pytest

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError, InputError
from megajax.estimate.costs import flops_per_token
from megajax.inference.language_model import LanguageModel
from megajax.mesh import build_mesh
from megajax.model import Encoder, Transformer, parameters, register_encoder
from megajax.options.registered import ENCODERS
from megajax.training.batches import to_global
from megajax.training.loop import Trainer
from megajax.training.step import TrainProgram

ROWS, LENGTH, SOURCE = 12, 12, 6
TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.1, "ffn_hidden_size": 24}
MODEL = {
    **TINY,
    "block_pattern": ["reads_source", "dense"],
    "encoder": {"kind": "source", "settings": {"length": SOURCE}},
}


@pytest.fixture(scope="module", autouse=True)
def examples():
    import_extensions(["docs/examples/encoder.py", "docs/examples/cross_attention.py"])


def make(table, mesh, model=None, microbatches=2, **sections) -> Config:
    batch = {"global_size": ROWS, "sequence_length": LENGTH}
    sections |= {"microbatches": microbatches, "steps": 1, "optimizer": "sgd"}
    return table.make_config(MODEL | (model or {}), mesh, batch=batch, **sections)


def fields():
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 50, (ROWS, LENGTH + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((ROWS, LENGTH), np.float32)}
    batch["positions"] = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    batch["source"] = rng.integers(0, 50, (ROWS, SOURCE))
    batch["source_mask"] = np.arange(SOURCE) < rng.integers(1, SOURCE + 1, (ROWS, 1))
    return batch


def built(config, count):
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


@pytest.fixture(scope="module")
def expected(table):
    """(loss, gradients) by megajax/reference.py."""
    config = make(table, {})
    losses, gradients = table.expected_gradients(config, table.weights_of(config), fields())
    return losses["loss"], gradients


@pytest.mark.long
def test_loss_and_gradients_are_those_of_the_reference(table, expected):
    config = make(table, {"fsdp": 2, "tensor": 2, "context": 2}, microbatches=1)
    program, (loss, gradients) = built(config, 8), expected
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields())
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    assert float(sums["loss"] / number) == pytest.approx(float(loss), rel=table.PLAIN_VALUE)
    assert any(name.startswith("encoder.") for name in gradients)
    table.check_first_step(program, state, batch, float(loss), gradients)


@pytest.mark.long
def test_a_prediction_module_reads_the_stream_too(table):
    """Its gradient of the encoder's output is added to that of the layers."""
    pattern = ["dense", "reads_source"]  # a module has the sublayers of the last layer
    config = make(table, {"fsdp": 2}, {"num_layers": 2, "block_pattern": pattern, "mtp_layers": 1}, microbatches=1)
    losses, gradients = table.expected_gradients(config, table.weights_of(config), fields())
    program = built(config, 2)
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields())
    table.check_first_step(program, state, batch, float(losses["loss"]), gradients)


def test_layers_depend_on_the_source_but_not_on_its_padding(table):
    config, batch = make(table, {}), fields()
    program = built(config, 1)
    state = table.first_state(program, table.weights_of(config))

    def loss(chosen):
        source = np.where(chosen, batch["source"] + 1, batch["source"]) % 50
        moved = to_global(program, batch | {"source": source})
        return float(program.eval_step(state.weights, state.layer_state, moved)[0]["loss"])

    before = loss(np.zeros_like(batch["source_mask"]))
    assert loss(~batch["source_mask"]) == before != loss(batch["source_mask"])
    expected = table.expected_evaluation(config, table.weights_of(config), batch)
    assert before / (ROWS * LENGTH) == pytest.approx(expected, rel=table.PLAIN_VALUE)


def test_the_encoder_counts_in_parameters_and_flops(table):
    """By hand: four D × D matrices at each of the source's positions; in a layer cross-attention's four."""
    D, S = TINY["hidden_size"], LENGTH
    plain = make(table, {}, {"block_pattern": ["dense"], "encoder": {"kind": "none"}})
    more = flops_per_token(make(table, {})) - flops_per_token(plain)
    encoder = 6 * 4 * D * D * SOURCE / S
    # Queries and outputs of the tokens, keys and values of the source, scores and their sums of values
    cross = 6 * (2 * D * D + 2 * D * D * SOURCE / S + 2 * SOURCE * D)
    assert more == pytest.approx(encoder + cross)
    own = {name: p.shape for name, p in parameters(Transformer(make(table, {}).model)).items() if "encoder." in name}
    assert sum(map(math.prod, own.values())) == 50 * D + D + 4 * D * D


def test_flops_of_fields_of_several_lengths_are_those_of_the_longest(table):
    class Titled(ENCODERS["source"]):
        def fields(self):
            return super().fields() | {"title": (np.int32, 2)}

    config = make(table, {}).model
    assert Titled(config, Titled.Settings(length=SOURCE)).flops() == 6 * 4 * TINY["hidden_size"] ** 2 * SOURCE


BAD = {
    "unknown": ({"encoder": {"kind": "sauce"}}, {}, "encoder.kind=sauce .*use none.*source.*run.extensions"),
    "setting": (
        {"encoder": {"kind": "source", "settings": {"length": 6, "depth": 1}}},
        {},
        "settings.depth is no setting of SourceEncoder.*it has length",
    ),
    "missing": ({"encoder": {"kind": "source"}}, {}, "encoder.settings.length is not set"),
    "without": (
        {"encoder": {"kind": "none", "settings": {"length": 6}}},
        {},
        "encoder.settings=.* needs a registered encoder, but model.encoder.kind=none",
    ),
    "nobody gives": ({"encoder": {"kind": "none"}}, {}, "CrossAttention .block reads_source. reads the stream source"),
    "nobody reads": ({"block_pattern": ["dense"]}, {}, "no sublayer reads the stream of model.encoder.kind=source"),
    "context": (
        {"encoder": {"kind": "source", "settings": {"length": 7}}},
        {"context": 2},
        "mesh.context=2 does not divide the 7 tokens of source",
    ),
    "modules": (
        {"mtp_layers": 1, "block_pattern": ["dense", "reads_source"]},
        {"pipeline": 2},
        "mtp_layers=1, but these read the stream",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_is_a_sentence(table, case):
    model, mesh, sentence = BAD[case]
    with pytest.raises(ConfigError, match=sentence):
        check_mesh(make(table, mesh, model), int(np.prod([*mesh.values(), 1])))


def test_prediction_modules_read_the_encoders_stream_on_one_stage(table):
    model, *_ = BAD["modules"]
    check_mesh(make(table, {}, model), 1)


def test_uses_without_the_encoders_fields_are_sentences(table):
    config, batch = make(table, {}), fields()
    program = built(config, 1)
    with pytest.raises(InputError, match="has source_mask of the shape .12, 4.*give .12, 6."):
        to_global(program, batch | {"source_mask": batch["source_mask"][:, :4]})
    with pytest.raises(InputError, match="has no source and model.encoder.kind=source"):
        to_global(program, {name: field for name, field in batch.items() if name != "source"})
    with pytest.raises(ConfigError, match="model.encoder.kind=source reads the batch field source.*custom_loop"):
        Trainer(config, jax.devices()[:1])
    with pytest.raises(InputError, match="model.encoder.kind=source: .*does not generate or score"):
        LanguageModel(config, {}, {}, build_mesh({}, jax.devices()[:1]))


def test_a_name_is_registered_once():
    class Other(Encoder):
        NAME = "source"

    with pytest.raises(ConfigError, match="the encoder source is .*SourceEncoder already: register .*Other under"):
        register_encoder(Other)
    assert register_encoder(ENCODERS["source"]) is ENCODERS["source"]


def test_a_method_takes_the_arguments_that_it_is_called_with():
    class Longer(Encoder):
        NAME = "longer"

        def fields(self, length):
            return {}

    with pytest.raises(ConfigError, match=r"Longer.fields .*: write fields\(self\)"):
        register_encoder(Longer)
