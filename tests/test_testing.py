"""`megajax.testing.check_sublayer`: it passes what is right and names what is wrong."""

import os

import jax
import jax.numpy as jnp
import pytest

from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError
from megajax.layout.kinds import KINDS
from megajax.model import declare
from megajax.model.mlp import MLP
from megajax.testing import check_sublayer


@pytest.fixture(scope="module")
def recurrence():
    import_extensions(["docs/examples/recurrence.py"])
    return KINDS["recurrent"]["recurrence"]


@pytest.mark.long
def test_the_recurrence_of_the_docs_is_what_it_declares(recurrence):
    assert [line.partition(":")[0] for line in check_sublayer(recurrence)] == [
        "cost",
        "no token depends on a later one",
        "no token depends on another document",
        "token by token",
        "tensor 2, context 2, fsdp 2",
        "remat.policy=full",
        "remat.policy=save_matmuls",
        "pipeline 2, batch.num_microbatches=2, model.num_layers=3, data.reset_attention=True",
        "context 2, batch.num_microbatches=2, model.num_layers=3, data.reset_attention=True",
    ]
    assert not [kind for kind in KINDS if kind.startswith("checked")]


class Backwards(MLP):
    """Each token sees the next one."""

    def apply(self, w, x, ctx):
        B, S = ctx.inputs.positions.shape
        rolled = jnp.roll(x.reshape(B, S, -1), -1, axis=1)
        return super().apply(w, rolled.reshape(x.shape), ctx)


class Across(MLP):
    """Each token sees the one before, of whatever document."""

    def apply(self, w, x, ctx):
        B, S = ctx.inputs.positions.shape
        before = jnp.pad(x.reshape(B, S, -1), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return super().apply(w, x + before.reshape(x.shape), ctx)


class AcrossUnlessPositionsBegin(MLP):
    """It takes the position 0 for the first token of a document, as it is with data.reset_positions alone."""

    def apply(self, w, x, ctx):
        B, S = ctx.inputs.positions.shape
        before = jnp.pad(x.reshape(B, S, -1), ((0, 0), (1, 0), (0, 0)))[:, :-1]
        return super().apply(w, x + jnp.where(ctx.inputs.positions[..., None] > 0, before, 0).reshape(x.shape), ctx)


class OfOneSequence(Across):
    """It has no cache, and with context a device's first token has none before it."""

    SUPPORTS = frozenset({"decoding"})


class OnlyOnOneDevice(Across):
    SUPPORTS = frozenset({"context"})


class WithoutMatmul(MLP):
    def apply(self, w, x, ctx):
        return x, {}


@pytest.mark.parametrize(("sublayer", "needed"), [(OfOneSequence, 2), (OnlyOnOneDevice, 4)])
def test_it_needs_the_devices_of_the_axes_that_the_class_declares(sublayer, needed, monkeypatch):
    """On fsdp 2, and on context 2 with it."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with pytest.raises(AssertionError, match=f"need {needed} devices, and here are 1: .*device_count={needed} before"):
        check_sublayer(sublayer)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (((3, 8), (None, "mlp")), ("(3, 8)", "(None, 'mlp')", "whole", "embed")),
        (((8,), ("embed", "mlp")), ("(8,)", "each dimension")),
        (((8,), ("norm",), "gain"), ("role gain", "matrix, embedding, norm, bias")),
    ],
)
def test_a_wrong_declaration_is_a_sentence(given, words):
    with pytest.raises(ConfigError) as error:
        declare(*given)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (WithoutMatmul, "WithoutMatmul multiplies by no weight"),
        (Backwards, "Backwards: a token depends on a later token"),
        (AcrossUnlessPositionsBegin, "AcrossUnlessPositionsBegin: a token depends on another document"),
        pytest.param(OfOneSequence, "OfOneSequence token by token: ", marks=pytest.mark.long),
        pytest.param(OnlyOnOneDevice, "OnlyOnOneDevice on context 2, fsdp 2: the gradient of ", marks=pytest.mark.long),
    ],
)
def test_what_is_wrong_is_named(wrong, sentence, monkeypatch):
    monkeypatch.delenv("NPROC")
    with pytest.raises(AssertionError, match=sentence):
        check_sublayer(wrong)
    assert int(os.environ["NPROC"]) >= 4 * jax.device_count(), "devices would wait for threads"
