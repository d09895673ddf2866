"""The choice of jax-linear-attention's kernels, and what is given to them; they run on Hopper GPUs only (dev/)."""

import copy
import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import jla_kernels
import numpy as np
import pytest
from jax import lax
from mesh_models import HYBRID
from models_in_use import build

from megajax.config import load_config
from megajax.errors import ConfigError
from megajax.kernel_choice import HOPPER, Hardware, Kernels, choose_linear_attention
from megajax.ops.delta_rule import gated_delta_rule, recurrent_gated_delta_rule
from megajax.ops.state_space import recurrent_state_space, state_space
from megajax.schema.fields import AXES

KINDS = {
    "gated_deltanet": (recurrent_gated_delta_rule, ("g", "beta")),
    "kda": (recurrent_gated_delta_rule, ("g", "beta")),
    "simple_gla": (recurrent_state_space, ("g",)),
}
BF16 = 8e-3  # relative error of a number
RULES = {gated_delta_rule: recurrent_gated_delta_rule, state_space: recurrent_state_space}
EACH_RULE = pytest.mark.parametrize(
    ("rule", "by_channel"),
    [(gated_delta_rule, False), (gated_delta_rule, True), (state_space, False)],
    ids=["gated_delta_rule", "gated_delta_rule by channel", "state_space"],
)


@pytest.fixture
def installed(monkeypatch):
    """A module `jla.ops` with their contract: a document is where the number changes, the state goes on before it."""

    def linear_attention(kind, q, k, v, *, impl, scale, initial_state, output_final_state, segment_ids, **gates):
        assert (impl, scale, output_final_state) == ("mosaic_gpu", 1, True)
        assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
        rule, names = KINDS[kind]
        assert (gates["g"].shape == q.shape) == (kind == "kda")
        starts = None if segment_ids is None else jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0

        def kernel(*arguments):
            return rule(*arguments, starts, initial_state, **gates)

        if kind == "kda":  # its forward pass for a gradient is another function than the one without
            plain, kernel = kernel, jax.custom_vjp(kernel)
            kernel.defvjp(partial(jax.vjp, plain), lambda pull, cotangents: pull(cotangents), optimize_remat=True)
        return kernel(q, k, v, *(gates.pop(name) for name in names))

    def run(q, k, v, *, delta, beta, grouped_key_grads, **others):
        assert (delta, beta, grouped_key_grads) == (False, None, True)
        return linear_attention("simple_gla", q, k, v, impl="mosaic_gpu", **others)

    functions = {"jla": {}, "jla.ops": {"linear_attention": linear_attention}}
    functions |= {"jla.ops.mosaic_gpu": {}} | {f"jla.ops.mosaic_gpu.{n}": m for n, m in jla_kernels.MODULES.items()}
    functions["jla.ops.mosaic_gpu.scalar_gate"] |= {"run": run}
    for name, held in functions.items():
        module = ModuleType(name)
        module.__dict__.update(held, __spec__=sys.__spec__)
        monkeypatch.setitem(sys.modules, name, module)
        if "." in name:
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def drawn(rule, rng, by_channel, B=2, S=9, K=2, N=4, d=4, w=3):
    """Numbers that BF16 has."""
    q, k = rng.integers(-3, 4, (2, B, S, K, d)) / 4
    decay, strength = -rng.exponential(size=(B, S, N, d) if by_channel else (B, S, N)), rng.uniform(size=(B, S, N))
    rates = [decay, strength][: 1 + (rule is gated_delta_rule)]
    values = rng.integers(-3, 4, (B, S, N, w)) / 2
    return [np.asarray(a, np.float32) for a in (q, k, values, *rates, rng.normal(size=(B, N, d, w)))]


STARTS = np.zeros((2, 9), bool)  # NumPy's: jax would compile while tests are collected
STARTS[[0, 0, 1, 1], [3, 8, 0, 8]] = True


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one", "documents"])
@EACH_RULE
def test_the_kernels_get_the_definitions_arguments(installed, rng, rule, by_channel, starts):
    """An initial state is not seen by a document that begins with the first token."""
    *arguments, initial = drawn(rule, rng, by_channel)

    @jax.jit
    def both(*arguments):
        return rule(*arguments, starts, initial, implementation="jla"), RULES[rule](*arguments, starts, initial)

    for a, b in zip(*both(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("starts", [None, STARTS], ids=["one", "documents"])
@pytest.mark.parametrize(
    ("rule", "by_channel"), [(gated_delta_rule, True), (state_space, False)], ids=["by channel", "state_space"]
)
def test_a_device_sends_its_map_of_the_state(installed, rng, rule, by_channel, starts):
    """The map applied to the state before is the final state, and the outputs are those of the definition."""
    *arguments, initial = drawn(rule, rng, by_channel)

    @jax.jit
    def run(initial, *arguments):
        maps = []

        def state_before(transition, final):
            maps[:] = transition, final
            return initial

        found = rule(*arguments, starts, None, state_before, implementation="jla")
        return found, maps, RULES[rule](*arguments, starts, initial)

    found, (transition, final), expected = jax.device_get(run(initial, *arguments))
    after = transition @ initial if transition.ndim == 4 else transition[..., None] * initial
    for a, b in zip((*found, after + final), (*expected, expected[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@EACH_RULE
def test_gradients_of_outputs_that_two_policies_recompute(installed, rng, rule, by_channel):
    """The final state is not read; a layer keeps matmuls, and the rule in it nothing."""
    *arguments, _ = drawn(rule, rng, by_channel)

    def loss(run, *arguments):
        return jnp.sum(jnp.sin(run(lambda *own: rule(*own, implementation="jla")[0])(*arguments)))

    def recomputed(*arguments):
        layer = partial(loss, jax.checkpoint)
        return jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(*arguments)

    def gradients(*arguments):
        both = recomputed, partial(loss, lambda run: run)
        return [jax.grad(f, range(len(arguments)))(*arguments) for f in both]

    for a, b in zip(*jax.jit(gradients)(*arguments), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


DEVICES = 3


def before(transition, final):
    transitions, finals = (lax.all_gather(a, "context") for a in (transition, final))
    state, index = jnp.zeros_like(final), lax.axis_index("context")
    for device in range(DEVICES):
        state = jnp.where(device < index, transitions[device] @ state + finals[device], state)
    return state


def on_device(starts, weights, *arguments):
    return jnp.sum(gated_delta_rule(*arguments, starts, None, before, implementation="jla")[0] * weights)


def on_one(starts, weights, *arguments):
    return jnp.sum(recurrent_gated_delta_rule(*arguments, starts)[0] * weights)


# All cases share both programs.
with_gradients = [jax.value_and_grad(of, range(2, 7)) for of in (on_device, on_one)]
with_gradients = jax.jit(jax.vmap(with_gradients[0], axis_name="context")), jax.jit(with_gradients[1])


@pytest.mark.parametrize("starts", [(), (4, 7, 67), (70, 71, 140)], ids=["one", "documents", "border"])
def test_devices_exchange_states_between_the_kernels(installed, rng, starts):
    """The gated delta rule of three devices and its gradients are those of one; each has two pieces of its tokens."""
    B, S = 2, 210
    *arguments, _ = drawn(gated_delta_rule, rng, False, S=S)
    weights = np.asarray(rng.integers(-2, 3, arguments[2].shape), np.float32)
    first, starts = starts, np.zeros((B, S), bool)
    starts[0, list(first)] = starts[1, [*first, *([S - 1] if first else [])]] = True
    cut = [a.reshape(B, DEVICES, -1, *a.shape[2:]).swapaxes(0, 1) for a in (starts, weights, *arguments)]
    losses, gradients = with_gradients[0](*cut)
    loss, expected = with_gradients[1](starts, weights, *arguments)
    np.testing.assert_allclose(np.sum(losses), loss, atol=1e-4)  # of 720 numbers
    for found, correct, tolerance in zip(gradients, expected, (*[BF16] * 3, 1e-4, 1e-4), strict=True):  # BF16, FP32
        found = np.asarray(found).swapaxes(0, 1).reshape(correct.shape)
        assert np.linalg.norm(found - correct) < tolerance * np.linalg.norm(correct)


@pytest.mark.long
def test_prompts_of_generation_use_them_on_each_devices_sequences_and_heads(installed):
    """And no kernel, which would fail on CPUs, where XLA divides the arrays."""
    model, tokens = build(HYBRID | {"num_layers": 2}, {"fsdp": 2, "tensor": 2}), np.arange(44).reshape(4, 11)
    expected = np.asarray(model(tokens))
    with_kernels = copy.copy(model)
    del with_kernels._logits  # the compiled program
    with_kernels.kernels = replace(model.kernels, linear_attention="jla", elementwise="pallas")
    found = np.asarray(with_kernels(tokens))
    assert 0 < np.linalg.norm(found - expected) / np.linalg.norm(expected) < 0.03, "they round to BF16"


def test_auto_takes_them_on_hopper_in_bf16(installed):
    for requested, implementation, reason in (
        ("auto", "jla", "fit this model"),
        ("jla", "jla", "kernels.linear_attention=jla"),
        ("reference", "reference", "kernels.linear_attention=reference"),
    ):
        chosen, why = choose_linear_attention(requested, HOPPER, jnp.bfloat16, {"key": 128, "value": 64})
        assert chosen == implementation and reason in why


CANNOT = {
    "platform": (Hardware("cpu"), jnp.bfloat16, {}, "cpu"),
    "older": (Hardware("gpu", "8.0"), jnp.bfloat16, {}, "8.0"),
    "newer": (Hardware("gpu", "10.0"), jnp.bfloat16, {}, "10.0"),
    "dtype": (HOPPER, jnp.float32, {}, "precision.compute"),
    "width": (HOPPER, jnp.bfloat16, {"model.mamba2.head_dim": 96}, "model.mamba2.head_dim=96"),
}


@pytest.mark.parametrize(("hardware", "dtype", "widths", "named"), CANNOT.values(), ids=CANNOT)
def test_an_explicit_choice_that_cannot_run_is_refused(installed, hardware, dtype, widths, named):
    implementation, reason = choose_linear_attention("auto", hardware, dtype, widths)
    assert implementation == "reference" and reason
    with pytest.raises(
        ConfigError, match=r"kernels\.linear_attention=jla.*kernels\.linear_attention=reference"
    ) as error:
        choose_linear_attention("jla", hardware, dtype, widths)
    assert named in str(error.value)


def test_kda_needs_channels_in_128s_on_each_device(installed):
    overrides = ["model.kda.num_heads=4", "model.kda.head_dim=64", "kernels.linear_attention=jla"]
    config = load_config("kda_2b", overrides)
    assert Kernels.choose(config, {**dict.fromkeys(AXES, 1), "tensor": 2}, HOPPER).linear_attention == "jla"
    with pytest.raises(ConfigError, match=r"multiple of 128 channels .* 64 there: change model\.kda\.num_heads"):
        Kernels.choose(config, {**dict.fromkeys(AXES, 1), "tensor": 4}, HOPPER)


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(ConfigError, match=r"pip install 'megajax\[linear-attention\]'"):
        choose_linear_attention("jla", replace(HOPPER, has_jla=False), jnp.bfloat16, {})
