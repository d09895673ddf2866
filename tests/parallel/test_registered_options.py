"""A context strategy, a dispatch, an activation and a remat policy from outside train on a mesh as one device does."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from mesh_models import MIXTRAL

from megajax.config import Fp8Recipe, RematPolicy, load_config, register_fp8, register_remat
from megajax.errors import ConfigError
from megajax.model.comm import TokenPositions
from megajax.ops.mlp_activation import FUNCTIONS, Gated, register_activation
from megajax.options.activations import ACTIVATIONS
from megajax.options.context import STRATEGIES, ContextStrategy
from megajax.options.dispatch import DISPATCHES, Dispatch
from megajax.options.remat import POLICIES
from megajax.parallel import collectives, context, experts
from megajax.parallel.context import IMPLEMENTATIONS as ATTENTION
from megajax.parallel.context import ContextAttention
from megajax.parallel.experts import IMPLEMENTATIONS as EXPERTS
from megajax.parallel.experts.contract import ExpertParallel


class Everything(ContextAttention):
    """Attention of all queries on each device, which keeps the rows of its own."""

    calls = 0

    def attend(self, q, k, v, positions, sinks=None):
        Everything.calls += 1

        def gather(a):
            return collectives.all_gather(a, "context", axis=1, tiled=True)

        order = jnp.argsort(gather(positions.index), axis=1)

        def whole(a):
            return None if a is None else jnp.take_along_axis(gather(a), order.reshape(*order.shape, 1, 1), axis=1)

        out, largest = super().attend(*map(whole, (q, k, v)), TokenPositions(jnp.sort(order, axis=1)), sinks)
        return jnp.take_along_axis(out, positions.index[:, :, None, None], axis=1), largest


class OneByOne(ExpertParallel):
    """Each device gets the tokens of one other device after the other, and sends their outputs back."""

    calls = 0

    def apply(self, activation, x, experts, weights, matrices, capacity):
        OneByOne.calls += 1
        n, local, total = self.devices, matrices.num_experts, jnp.zeros_like(x)
        first = local * lax.axis_index(self.axes)

        def send(a, by):
            return collectives.ppermute(a, self.axes, [(rank, (rank + by) % n) for rank in range(n)])

        for by in range(n):
            tokens, chosen, factors = (send(a, by) for a in (x, experts, weights))
            own = jnp.where((chosen >= first) & (chosen < first + local), chosen - first, local)
            y = super().apply(activation, tokens, own, factors, matrices, capacity)
            total += send(y, -by)
        return total


@pytest.fixture
def registered():
    context.register_context(ContextStrategy("everything"), Everything)
    experts.register_dispatch(Dispatch("one_by_one", gathers_tokens=True), OneByOne)
    register_remat(RematPolicy("attention_outputs", keep=("attention",)))
    register_activation("reglu", Gated(jax.nn.relu))
    yield
    for options in (ACTIVATIONS, FUNCTIONS):
        del options["reglu"]
        options.pop("test_relu", None)
    del POLICIES["attention_outputs"]
    for options in (STRATEGIES, ATTENTION):
        options.pop("everything")
    for options in (DISPATCHES, EXPERTS):
        options.pop("one_by_one")


def test_they_train_as_one_device_does(table, reference, registered):
    sections = {"communication": {"context": "everything", "experts": "one_by_one"}}
    sections["remat"] = {"policy": "attention_outputs"}
    config = table.make_config(
        MIXTRAL | {"num_layers": 1, "activation": "reglu", "router": {}},
        {"context": 2, "expert": 2},
        steps=1,
        optimizer="sgd",
        **sections,
    )
    expected = reference(config)
    assert Everything.calls == OneByOne.calls == 0 and expected.gradients
    difference = table.compare(table.train(config, expected.initial), expected)
    assert not difference.problems(), difference
    assert Everything.calls and OneByOne.calls


def test_each_option_has_its_computation():
    assert STRATEGIES.keys() == ATTENTION.keys() and DISPATCHES.keys() == EXPERTS.keys()
    assert {name: option.is_gated for name, option in ACTIVATIONS.items()} == {
        name: isinstance(function, Gated) for name, function in FUNCTIONS.items()
    }


@pytest.mark.parametrize(
    ("key", "choices"),
    [
        ("communication.context", "auto, ring, all_gather, all_to_all, all_to_all+ring or dynamic"),
        ("communication.experts", "auto, all_to_all or all_gather"),
    ],
)
def test_a_name_that_is_not_registered_is_a_sentence(key, choices):
    said = f"{key}=everything is not a choice .*: use {re.escape(choices)}, or name .*extensions"
    with pytest.raises(ConfigError, match=said):
        load_config("llama3_1b", [f"{key}=everything"])


@pytest.mark.parametrize(
    ("register", "option", "problem"),
    [
        (context.register_context, ContextStrategy("ring"), "the context strategy ring exists already"),
        (experts.register_dispatch, Dispatch("auto"), "the dispatch auto exists already"),
        (register_activation, "swiglu", "the activation swiglu exists already"),
    ],
)
def test_a_name_that_is_taken_is_a_sentence(register, option, problem):
    with pytest.raises(ConfigError, match=problem):
        register(option, abs)


def test_a_function_of_other_arguments_is_a_sentence():
    for function in (lambda: 0, lambda x, y: x, "relu", Gated(jax.nn.relu, lambda: 0)):
        with pytest.raises(ConfigError, match="the activation wrong has a function that does not take one array"):
            register_activation("wrong", function)
    assert "wrong" not in ACTIVATIONS
    with pytest.raises(
        ConfigError, match=r"`rounded` of the FP8 recipe wrong does not take .*: write rounded\(x, operand\)"
    ):
        register_fp8(Fp8Recipe("wrong", rounded=lambda x: x))  # pyright: ignore


def test_another_extensions_computation_under_a_taken_name_is_refused(registered):
    """The same one again takes the place of the first, as from a cell of a notebook that runs twice."""

    def other(x):
        return x

    for register, option, own in (
        (context.register_context, ContextStrategy("everything"), Everything),
        (experts.register_dispatch, Dispatch("one_by_one", gathers_tokens=True), OneByOne),
        (register_activation, "test_relu", jax.nn.relu),
    ):
        register(option, own)
        register(option, own)
        with pytest.raises(ConfigError, match="exists already"):
            register(option, other)
