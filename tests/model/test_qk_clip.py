"""QK-clip (Kimi K2) against plain NumPy on one device, and on meshes against one device."""

import math
from functools import cache

import jax
import numpy as np
import pytest
from mesh_models import LATENT, LATENT_MODELS, MIXTRAL, MODELS, PADDED, UNPACKED
from single_device import first_state, make_batches, make_config, weights_of

from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.mesh import AXES, build_mesh
from megajax.model.attention import Attention
from megajax.sharding import EMPTY
from megajax.tools.verify.runs import canonical
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram, rescaling

SCORE = "max_attention_score"
WITHOUT_ROPE = {"num_layers": 1, "rope_pattern": ["none"]}
CASES = {
    "grouped": MODELS["llama"] | WITHOUT_ROPE | {"attention_bias": True},
    "latent": LATENT | WITHOUT_ROPE | {"rope_scaling": None},
    "sinks": MODELS["llama"]
    | {
        "num_layers": 2,
        "num_kv_heads": 2,
        "attention_sinks": True,
        "sliding_window": 5,
    },
    "mixtral": MIXTRAL,
    "predicting": LATENT_MODELS["dense"] | {"num_layers": 3, "num_heads": 6, "mtp_layers": 1},
}


def make(model, mesh=None, threshold: float | None = 3.5, microbatches=1, steps=2, **sections):
    settings = CASES[model] | ({"qk_clip": threshold} if threshold else {})
    return make_config(settings, mesh, microbatches=microbatches, steps=steps, optimizer="sgd", **sections)


def steep(config):
    """Weights with larger scores than those of a first step."""
    weights = weights_of(config)
    return {name: 3 * w if name.endswith(("attention.query", "attention.key")) else w for name, w in weights.items()}


def run(config):
    """(weights after the last step, the logged score of each step)."""
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, scores = first_state(program, steep(config)), []
    for fields in make_batches(config):
        state, metrics = program.train_step(state, to_global(program, fields))
        scores.append(float(metrics.get(SCORE, 0.0)))
    return canonical(program, state.weights), scores


# Data by name, for the cache
DATA = {"whole": {"kind": "synthetic"}, "packed": PADDED, "padded": UNPACKED}


@cache
def on_one_device(model, microbatches=1, threshold: float | None = 3.5, steps=2, data="whole"):
    return run(make(model, None, threshold, microbatches, steps, data=DATA[data]))


def rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon) * weight


def bounds(config, w, tokens, is_real=True):
    """The log-sum-exp of the scores of each head, its largest over all real tokens: `[N]`, in float64."""
    prefix = "blocks.dense.attention."
    layer = {name.removeprefix(prefix): np.float64(a[0]) for name, a in w.items() if name.startswith(prefix)}
    x = rms_norm(np.float64(w["embedding.tokens"])[tokens], layer["norm"], config.model.norm_epsilon)
    if config.model.is_latent:
        q = rms_norm(x @ layer["query_down"], layer["query_norm"], 1e-6)
        q = np.einsum("bsd,dnh->bsnh", q, layer["query"])
        latent = rms_norm(x @ layer["key_value_down"], layer["key_value_norm"], 1e-6)
        k = np.einsum("bsd,dnh->bsnh", latent, layer["key"])
        rotary = np.broadcast_to((x @ layer["rotary_key"])[:, :, None], (*k.shape[:3], 4))
        k = np.concatenate([rotary, k], axis=-1)
    else:
        q, k = (np.einsum("bsd,dnh->bsnh", x, layer[n]) + layer[f"{n}_bias"] for n in ("query", "key"))
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = np.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(q.shape[-1])
    visible = np.tril(np.ones(scores.shape[-2:], bool))
    lse = np.log(np.where(visible, np.exp(scores), 0).sum(-1))
    return np.where(np.atleast_3d(is_real).swapaxes(1, 2), lse, 0).max(axis=(0, 2))


@pytest.mark.parametrize(
    ("model", "threshold", "data"),
    [pytest.param("grouped", 25.0, "whole", marks=pytest.mark.long), ("latent", 5.0, "padded")],
)
def test_weights_of_heads_above_the_threshold_are_rescaled(model, threshold, data):
    plain, _ = on_one_device(model, 1, None, 1, data)
    clipped, scores = on_one_device(model, 1, threshold, 1, data)
    config = make(model, steps=1, data=DATA[data])
    [fields] = make_batches(config)
    largest = bounds(config, steep(config), fields["tokens"], fields.get("is_real", True))
    of_padding = bounds(config, steep(config), fields["tokens"]) > largest
    assert of_padding.any() == (data == "padded"), "some heads have larger scores in the padding"
    np.testing.assert_allclose(scores, largest.max(), rtol=1e-5)
    assert largest.min() < threshold < largest.max(), "some heads are clipped, and some are not"
    factor, expected = np.minimum(1, threshold / largest), dict(plain)
    query, key = "blocks.dense.attention.query", "blocks.dense.attention.key"
    if model == "latent":  # four rotated elements, then those without positions
        expected[query] = plain[query] * np.sqrt(factor)[:, None]
        expected[query][..., :4] = plain[query][..., :4] * factor[:, None]
        expected[key] = plain[key] * np.sqrt(factor)[:, None]
    else:  # two query heads share a key
        shared = np.sqrt(factor.reshape(-1, 2).min(axis=1))
        for bias in ("", "_bias"):
            expected[query + bias] = plain[query + bias] * np.repeat(shared, 2)[:, None]
            expected[key + bias] = plain[key + bias] * shared[:, None]
    for name, weight in expected.items():
        np.testing.assert_allclose(clipped[name], weight, rtol=2e-5, atol=1e-7, err_msg=name)


def test_heads_that_share_keys_have_the_smallest_factor_of_them():
    """Four pairs of heads, with scores up to 5 allowed."""
    scores = np.float32([[20.0, 5.0, 2.0, 1.0, 5.0, 10.0, 80.0, 20.0]])
    rescaled = jax.jit(Attention(make("grouped", threshold=5.0).model).rescaled)
    factors = jax.device_get(rescaled({SCORE: scores}))
    of_keys = np.sqrt([1 / 4, 1, 1 / 2, 1 / 16])
    for name, expected in {"key": of_keys, "query": of_keys.repeat(2)}.items():
        np.testing.assert_allclose(factors[name][0, 0, :, 0], expected, rtol=1e-6, err_msg=name)
        np.testing.assert_allclose(factors[f"{name}_bias"][0, :, 0], expected, rtol=1e-6, err_msg=name)


def test_each_stored_layer_of_a_pipeline_has_its_own_factor():
    """The scores of layer l are 4^l times the threshold, so its queries and keys have a factor of 1 / 2^l each."""
    model, rounds = CASES["sinks"] | {"num_layers": 3, "qk_clip": 1.0}, {"virtual_stages": 2}
    config = make_config(model, {"pipeline": 2}, microbatches=2, steps=1, optimizer="sgd", pipeline=rounds)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    heads, name = config.model.num_heads, "blocks.dense.attention.query"
    factors = rescaling(program, {"dense": {SCORE: 4.0 ** np.arange(3, dtype=np.float32).repeat(heads).reshape(3, -1)}})
    order = program.placements[name].layers  # with an empty slot
    assert order != tuple(sorted(order)) and len(order) == 4
    expected = [0 if layer == EMPTY else 0.5**layer for layer in order]
    np.testing.assert_allclose(factors[name][:, 0, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "mesh", "microbatches", "communication", "data"),
    [
        ("sinks", {"context": 2, "tensor": 4}, 1, {"context": "ring"}, "packed"),  # twice as many devices as KV heads
        pytest.param(
            *("mixtral", {"expert": 2, "context": 2}, 2, {"context": "all_gather"}, "whole"), marks=pytest.mark.long
        ),
        # An empty slot; stages share the tokens of the module, but do not divide a device's heads
        pytest.param(
            *("predicting", {"pipeline": 2, "context": 2}, 2, {"context": "all_to_all"}, "padded"),
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_mesh_rescales_as_one_device_does(model, mesh, microbatches, communication, data):
    of_experts = microbatches if model == "mixtral" else 1  # their losses are those of a microbatch
    expected, its_scores = on_one_device(model, of_experts, data=data)
    found, scores = run(make(model, mesh, microbatches=microbatches, communication=communication, data=DATA[data]))
    np.testing.assert_allclose(scores, its_scores, rtol=1e-5)
    assert its_scores[0] > its_scores[1], "the first step clips"
    for name, weight in expected.items():
        assert np.linalg.norm(found[name] - weight) <= 1e-6 * np.linalg.norm(weight), name


@pytest.mark.parametrize(
    ("model", "sections", "other"),
    [
        ({"qk_norm": True}, {}, "model.qk_norm=true"),
        ({"attention_softcap": 30.0}, {}, "model.attention_softcap=30"),
        ({}, {"lora": {"rank": 4}}, "lora.rank=4"),
    ],
)
def test_what_bounds_or_freezes_the_scores_is_refused(model, sections, other):
    with pytest.raises(ConfigError) as error:
        make_config(CASES["mixtral"] | {"qk_clip": 100.0} | model, **sections)
    assert f"model.qk_clip=100.0 cannot be combined with {other}" in str(error.value)
