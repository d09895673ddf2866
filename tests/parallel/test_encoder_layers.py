"""T5: an encoder of layers, cross-attention and a bias of scores, on meshes against megajax/reference.py."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import ops
from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError, InputError
from megajax.estimate.costs import flops_per_token
from megajax.mesh import build_mesh
from megajax.model.comm import Comm
from megajax.model.encoder_layers import EncoderLayers
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

ROWS, LENGTH, SOURCE = 8, 12, 16
T5 = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 4,
    "head_dim": 6,
    "ffn_hidden_size": 20,
    "vocab_size": 50,
    "vocab_multiple": 4,
    "norm": "layernorm",
    "activation": "geglu",
    "position": "relative",
    "relative_buckets": 8,
    "relative_max_distance": 10,
    "attention_scale": 1.0,
    "tie_embeddings": True,
    "scale_head": True,
    "dropout": 0.1,
    "init_std": 0.2,
    "encoder": {"kind": "layers", "num_layers": 2, "sequence_length": SOURCE},
}
# Masks take half of compiling; the gradient of a bias of several layers is the decoder's.
PACKED = {"data": {"reset_attention": True}, "model": {"dropout": 0.0, "encoder": T5["encoder"] | {"num_layers": 1}}}


def make(table, mesh, model=None, microbatches=1, **sections) -> Config:
    batch = {"global_size": ROWS, "sequence_length": LENGTH}
    sections |= {"microbatches": microbatches, "steps": 1, "optimizer": "sgd"}
    return table.make_config(T5 | (model or {}), mesh, batch=batch, **sections)


def fields(packed: bool) -> dict[str, np.ndarray]:
    """Pairs of sequences; if packed, three of them in a row, of which the second has no source, and padding."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 50, (ROWS, LENGTH + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((ROWS, LENGTH), np.float32)}
    batch["positions"] = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    batch["encoder_tokens"] = rng.integers(0, 50, (ROWS, SOURCE))
    if packed:
        batch["segment_ids"] = np.sort(rng.integers(0, 3, (ROWS, LENGTH)), axis=1)
        ids = np.sort(2 * rng.integers(0, 2, (ROWS, SOURCE)), axis=1)
        batch["encoder_segment_ids"] = np.where(np.arange(SOURCE) < rng.integers(8, SOURCE + 1, (ROWS, 1)), ids, -1)
    return batch


@pytest.fixture(scope="module")
def expected(table):
    """Whether sequences are packed → (loss, gradients) by megajax/reference.py."""

    @cache
    def of(packed: bool):
        config = make(table, {}, **(PACKED if packed else {}))
        losses, gradients = table.expected_gradients(config, table.weights_of(config), fields(packed))
        return losses["loss"], gradients

    return of


GATHERED = {"communication": {"context": "all_gather"}, "remat": {"policy": "full"}}
CASES = [
    (True, {"context": 2, "tensor": 2}, {"microbatches": 2} | GATHERED),
    pytest.param(True, {"pipeline": 2, "tensor": 2}, {"microbatches": 4}, marks=pytest.mark.long),
    pytest.param(False, {"context": 2}, {}, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("packed", "mesh", "changes"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_the_reference(table, expected, packed, mesh, changes):
    config, (loss, gradients) = make(table, mesh, **changes, **(PACKED if packed else {})), expected(packed)
    count = int(np.prod([*mesh.values()]))
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, batch = table.first_state(program, table.weights_of(config)), to_global(program, fields(packed))
    assert {"relative_bias", "encoder.relative_bias", "encoder.final_norm"} < {*gradients}
    table.check_first_step(program, state, batch, float(loss), gradients)


def test_tokens_of_the_encoder_beyond_the_vocabulary_are_refused(table):
    program = TrainProgram.build(config := make(table, {}), build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    batch = fields(False)
    batch["encoder_tokens"] = batch["encoder_tokens"] + (batch["encoder_tokens"] == 49)
    with pytest.raises(InputError, match="holds 50 in encoder_tokens: give numbers below 50"):
        to_global(program, batch)


def test_the_encoders_dropout_has_masks_of_its_own(table):
    """Tokens of the decoder have the same numbers, and the step's key."""
    key, encoder = jax.random.key(3), EncoderLayers(make(table, {}).model)

    @jax.jit
    def run(tokens, rows):
        inputs = encoder.inputs({"encoder_tokens": tokens}, rows, Comm(), key, {})
        ids, keys = inputs.token_ids, (key, inputs.dropout_key)
        return ids, [ops.dropout(jnp.ones((2 * SOURCE, 8)), 0.5, k, ids) for k in keys]

    ids, masks = jax.device_get(run(np.zeros((2, SOURCE), np.int32), np.array([4, 5])))
    assert ids.tolist() == [*range(4 * SOURCE, 6 * SOURCE)]
    assert 0.3 < float((masks[0] == masks[1]).mean()) < 0.7


@pytest.mark.parametrize("part", [{"context": c, "tensor": t} for c in range(2) for t in range(2)], ids=str)
def test_the_encoders_masks_are_of_the_tokens_place_in_the_batch(table, part):
    """Of a device of two times two, which has half of the tokens of each of two sequences, and half of these."""

    class Device(Comm):
        def size(self, axes):
            return 2

        def index(self, axis):
            return part[axis]

    half, encoder = SOURCE // 2, EncoderLayers(make(table, {}).model)

    @jax.jit
    def run(tokens, rows):
        inputs = encoder.inputs({"encoder_tokens": tokens}, rows, Device(), None, {})
        return inputs.token_ids, inputs.positions

    ids, positions = run(np.zeros((2, half), np.int32), np.array([4, 5]))
    first = (4 + part["tensor"]) * SOURCE + part["context"] * half
    assert ids.tolist() == [*range(first, first + half)]
    assert positions.tolist() == [[*range(part["context"] * half, (part["context"] + 1) * half)]] * 2


def test_flops_are_those_of_both_stacks(table):
    """By hand, per token of the decoder: matrices, attention to both sides or before, cross-attention, head."""
    D, W, F, S, T, V = 16, 4 * 6, 20, LENGTH, SOURCE, 52
    mlp, square, pair = 3 * D * F, D * W, 2 * W  # W: of all heads
    encoder = 2 * (4 * square + mlp + T * pair) * T / S
    cross = 2 * square + 2 * square * T / S + T * pair  # keys and values of each token of the encoder
    decoder = 2 * (4 * square + mlp + S / 2 * pair + cross)
    assert flops_per_token(make(table, {})) == pytest.approx(6 * (encoder + decoder + D * V))


@pytest.mark.parametrize(
    ("model", "sections", "sentence"),
    [
        ({"num_experts": 2}, {}, "model.encoder.kind=layers cannot be combined with model.num_experts=2"),
        ({"encoder": {"kind": "layers", "sequence_length": 16}}, {}, "kind=layers needs model.encoder.num_layers"),
        ({"attention_sinks": True}, {}, "position=relative cannot be combined with model.attention_sinks=true"),
        ({}, {"communication": {"context": "ring"}, "mesh": {"context": 2}}, "use all_to_all or all_gather"),
        ({}, {"lora": {"rank": 2}}, "its layers have no adapters"),
        (
            {"num_layers": 4, "encoder": {"kind": "layers", "sequence_length": 16, "num_layers": 6}},
            {"remat": {"policy": "full", "group": 4}},
            "remat.group=4 does not divide the 6 .* of model.encoder.num_layers=6 .*: use 1 or 2",
        ),
        ({"encoder": {"kind": "none"}, "block_pattern": ["decoder"]}, {}, "set model.encoder.kind=layers, or remove"),
    ],
)
def test_what_cannot_run_is_a_sentence(table, model, sections, sentence):
    sections = dict(sections)
    mesh = sections.pop("mesh", {})
    with pytest.raises(ConfigError, match=sentence):
        check_mesh(make(table, mesh, model, **sections), math.prod(mesh.values()))


def test_tensor_need_not_divide_the_encoders_length(table):
    model = {"encoder": T5["encoder"] | {"sequence_length": 12}}
    check_mesh(make(table, {"context": 2, "tensor": 4}, model), 8)
