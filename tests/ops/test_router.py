"""The router against plain NumPy: choice, weights, balancing losses, Sinkhorn's iteration, the bias."""

import itertools
import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax import ops
from megajax.ops import router
from megajax.ops.experts import most_rows

TOKENS, EXPERTS = 24, 8
choose = jax.jit(router.choose, static_argnums=(1, 2, 3, 4))


@pytest.fixture
def logits() -> np.ndarray:
    return 2 * np.random.default_rng(3).standard_normal((TOKENS, EXPERTS)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("k", [1, 2, 8])
def test_the_best_experts_are_chosen_in_their_order(logits, k):
    assert np.array_equal(choose(logits, k), np.argsort(-logits, axis=-1, kind="stable")[:, :k])


def test_logits_of_bf16_tokens_are_those_of_fp32():
    """The weight has all 24 bits of FP32: with BF16 weights the error would be 2e-3."""
    random = np.random.default_rng(5)
    x = np.asarray(random.standard_normal((TOKENS, 64)), jnp.bfloat16)
    weight, d = (random.standard_normal(shape).astype(np.float32) for shape in ((64, EXPERTS), (TOKENS, EXPERTS)))

    @jax.jit
    def run(x, weight, d):
        logits, pull = jax.vjp(lambda x, w: router.router_logits(x, w, "pallas"), x, weight)
        return logits, *pull(d)

    logits, of_x, of_weight = run(x, weight, d)
    exact, *wide = np.asarray(x, np.float64), *(np.asarray(a, np.float64) for a in (weight, d))
    np.testing.assert_allclose(logits, exact @ wide[0], rtol=1e-6, atol=1e-6 * 64**0.5)
    np.testing.assert_allclose(of_weight, exact.T @ wide[1], rtol=1e-6, atol=1e-6 * TOKENS**0.5)
    assert of_x.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(of_x, np.float64), wide[1] @ wide[0].T, rtol=2**-8, atol=2**-14)


def test_equal_scores_choose_the_lower_index():
    assert choose(np.zeros((1, 4), np.float32), 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("score", ["sum", "max"])
@pytest.mark.parametrize(("k", "groups", "chosen"), [(2, 4, 1), (4, 4, 2), (3, 2, 1), (2, 2, 2)])
def test_groups_limit_the_choice(logits, k, groups, chosen, score):
    """The groups with the largest sum of their best k / chosen (DeepSeek-V3), or with the largest value (V2)."""
    values = sigmoid(logits)
    size = EXPERTS // groups
    choices = np.asarray(choose(values, k, groups, chosen, score))
    for token, found in zip(values, choices, strict=True):
        in_groups = token.reshape(groups, size)
        best = in_groups.max(1) if score == "max" else np.sort(in_groups, axis=1)[:, -max(k // chosen, 1) :].sum(1)
        allowed = np.argsort(-best)[:chosen]
        candidates = [(-token[e], e) for g in allowed for e in range(g * size, (g + 1) * size)]
        assert found.tolist() == [e for _, e in sorted(candidates)[:k]]


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
def test_weights_of_the_chosen(logits, function, pre_softmax, normalise):
    experts = np.asarray(choose(logits, 3))
    run = jax.jit(lambda *of_tokens: router.routing_weights(*of_tokens, function, pre_softmax, normalise, 2.5))
    found = run(logits, experts)
    chosen = np.take_along_axis(logits, experts, 1)
    if function == "softmax" and not pre_softmax:
        expected = softmax(chosen)
    else:
        expected = np.take_along_axis(softmax(logits) if function == "softmax" else sigmoid(logits), experts, 1)
        if normalise:
            expected = expected / expected.sum(-1, keepdims=True)
    np.testing.assert_allclose(found, 2.5 * expected, rtol=1e-5)


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
def test_losses_and_entropy(logits, function):
    k, sequences = 2, np.repeat(np.arange(3), TOKENS // 3)

    @jax.jit
    def found(logits):
        experts = router.choose(logits, k)
        counts, by_sequence = router.count(experts, EXPERTS), router.count_by_sequence(experts, sequences, 3, EXPERTS)
        whole = router.balance_loss(logits, counts.astype(jnp.float32), function, k, TOKENS)
        parts = router.balance_loss(logits, by_sequence[sequences], function, k, TOKENS // 3)
        numbers = whole / TOKENS, parts / TOKENS, router.z_loss(logits), router.entropy(logits, function)
        return experts, counts, by_sequence, *numbers

    experts, counts, by_sequence, whole, in_parts, z_loss, entropy = map(np.asarray, found(logits))
    p = softmax(logits) if function == "softmax" else sigmoid(logits) / sigmoid(logits).sum(-1, keepdims=True)
    chosen = (experts[..., None] == np.arange(EXPERTS)).sum(1)
    assert np.array_equal(counts, chosen.sum(0)) and counts.dtype == jnp.int32
    assert np.array_equal(by_sequence, [chosen[sequences == b].sum(0) for b in range(3)])

    expected = EXPERTS * np.sum(chosen.mean(0) / k * p.mean(0))  # Switch Transformers, equation 4
    np.testing.assert_allclose(whole, expected, rtol=1e-5)
    parts = [(chosen[sequences == b].mean(0) / k, p[sequences == b].mean(0)) for b in range(3)]
    np.testing.assert_allclose(in_parts, np.mean([EXPERTS * np.sum(f * q) for f, q in parts]), rtol=1e-5)

    np.testing.assert_allclose(z_loss, np.sum(np.log(np.exp(logits).sum(-1)) ** 2), rtol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(p * np.log(p)), rtol=1e-5)


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_an_expert_takes_its_capacity_of_all_devices_tokens(logits, policy):
    """Two devices, whose tokens stand in no order; many weights are equal."""
    k, capacity = 3, router.expert_capacity(0.5, TOKENS, 3, EXPERTS)
    assert capacity == 5  # 4.5, rounded up
    ids = np.asarray(np.random.default_rng(5).permutation(TOKENS) + 7, np.uint32)
    weights = np.round(np.abs(logits[:, :k])) if policy == "probability" else np.zeros((TOKENS, k), np.float32)
    experts, weights, ids = tokens = np.asarray(choose(logits, k)), weights, ids
    within = jax.jit(
        lambda *own: router.within_capacity(*own, EXPERTS, capacity, lambda _: jax.tree.map(jnp.asarray, tokens))
    )
    found = [within(*(a[part] for a in tokens)) for part in (slice(0, 10), slice(10, TOKENS))]
    expected = np.zeros((TOKENS, k), bool)
    for expert in range(EXPERTS):
        places = np.argwhere(experts == expert)
        for token, i in sorted(places.tolist(), key=lambda place: (-weights[*place], ids[place[0]]))[:capacity]:
            expected[token, i] = True
    assert np.array_equal(np.concatenate(found), expected) and not expected.all()


def test_the_capacity_is_the_exact_share_rounded_up():
    """Also where the product is an integer that floating-point numbers miss by a little."""
    cases = itertools.product(("0.1", "0.7", "1.0", "1.1", "1.25", "1.3", "2.3"), (10, 30, 100, 4096), (1, 2, 3, 6))
    missed = 0
    for factor, tokens, k in cases:
        for experts in (4, 6, 10, 60):
            exact = Fraction(factor) * tokens * k / experts
            missed += exact.denominator == 1 and math.ceil(tokens * (float(factor) * k / experts)) != exact
            assert router.expert_capacity(float(factor), tokens, k, experts) == math.ceil(exact), (factor, tokens, k)
    assert missed > 10
    counted = router.expert_capacity(1.1, jnp.array([10, 30, 100]), 3, 6)  # as of tokens without padding
    assert counted.tolist() == [6, 17, 55] and counted.dtype == jnp.int32


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
@pytest.mark.usefixtures("x64")
def test_identical_tokens_are_kept_by_their_position_whatever_the_last_bits_of_their_weights(dtype):
    """Twelve tokens of each of two kinds, with weights that are a few last bits of FP32 away on another mesh."""
    exact = np.tile(np.array([[0.5, 0.5], [0.7, 0.3]]), (TOKENS // 2, 1))
    experts, ids = np.tile([[0, 1]], (TOKENS, 1)), np.arange(TOKENS)

    run = jax.jit(lambda weights: router.within_capacity(experts, weights, ids, EXPERTS, 18, lambda arrays: arrays))

    def kept(error: np.ndarray) -> np.ndarray:
        return np.asarray(run(np.asarray(exact * (1 + error), dtype)))

    expected = np.ones((TOKENS, 2), bool)
    expected[12::2, 0] = False  # of expert 0 the last six of weight 0.5, of expert 1 those of 0.3
    expected[13::2, 1] = False
    for seed in range(5):
        assert np.array_equal(kept(4e-7 * np.random.default_rng(seed).uniform(-1, 1, exact.shape)), expected)


def test_weights_that_differ_by_a_part_in_500_are_told_apart():
    weights = np.float32([[1 - 2e-3], [1], [1 - 4e-3]])
    experts, ids = np.zeros((3, 1), int), np.arange(3)
    found = jax.jit(lambda w: router.within_capacity(experts, w, ids, 2, 2, lambda arrays: arrays))(weights)
    assert found.tolist() == [[True], [True], [False]]


def test_sinkhorn_evens_out_experts(logits):
    logits = logits + np.linspace(0, 6, EXPERTS, dtype=np.float32)  # the last expert's would be nearly every token's
    plain = np.bincount(np.asarray(choose(logits, 1)).ravel(), minlength=EXPERTS)
    balanced = jax.jit(lambda logits: router.sinkhorn(logits, TOKENS, lambda x: x))(logits)
    even = np.bincount(np.asarray(choose(balanced, 1)).ravel(), minlength=EXPERTS)
    assert plain.max() >= 7 and even.max() <= 4
    cost, by_expert = softmax(logits), np.ones(EXPERTS)
    for _ in range(20):
        by_token = 1 / (TOKENS * (cost @ by_expert) + 1e-8)
        by_expert = 1 / (EXPERTS * (by_token @ cost) + 1e-8)
    np.testing.assert_allclose(balanced, cost * by_expert, rtol=1e-3)


def test_the_bias_moves_towards_balance():
    """Compiled too: an expert whose count is the mean stays."""
    update = jax.jit(lambda bias, counts: router.updated_bias(bias, counts, 0.5))
    counts = np.array([[1, 4, 7], [2, 2, 3], [1, 3, 3]], np.int32)
    assert update(np.zeros((3, 3), np.float32), counts).tolist() == [
        [0.5, 0, -0.5],
        [0.5, 0.5, -0.5],
        [0.5, -0.5, -0.5],
    ]


def test_jitter_belongs_to_the_token_and_forced_balance_is_even():
    x, ids = np.ones((6, 4), np.float32), np.arange(6, dtype=np.uint32)
    jitter = jax.jit(lambda x, ids: router.jitter(x, 0.1, jax.random.key(0), ids))
    noisy = np.asarray(jitter(x, ids))
    assert np.array_equal(noisy[2:4], jitter(x[2:4], ids[2:4]))
    assert 0 < np.abs(noisy - 1).max() <= 0.1 and len(np.unique(noisy)) > 20
    counts = jax.jit(lambda ids: router.count(router.balanced_choice(ids, 2, EXPERTS), EXPERTS))
    assert np.array_equal(counts(np.arange(16, dtype=np.uint32)), [4] * EXPERTS)


@pytest.mark.usefixtures("x64")
def test_experts_are_a_weighted_sum_of_mlps_with_its_gradients():
    """Against every expert on every token in float64, some experts without a token, one assignment to no expert."""
    T, D, F, E, k, activation = 10, 5, 6, 4, 2, "swiglu"
    random = np.random.default_rng(1)
    x, w_up, w_down, dy = (random.standard_normal(shape) for shape in ((T, D), (E, D, 2 * F), (E, F, D), (T, D)))
    weights, experts = random.random((T, k)), np.stack([np.full(T, 2), random.integers(0, 2, T)], axis=1)
    experts[3, 0] = E

    def plain(x, weights, w_up, w_down):
        each = jnp.stack([ops.activate(activation, x @ up) @ down for up, down in zip(w_up, w_down, strict=True)])
        factors = jnp.sum(jax.nn.one_hot(experts, E, dtype=x.dtype) * weights[..., None], axis=1)
        return jnp.einsum("te,etd->td", factors, each)

    def ours(x, weights, w_up, w_down):
        matrices = ops.ExpertMatrices(w_up, w_down)
        route = ops.SortedRoute.of(experts, E, None)
        return ops.apply_experts(ops.ExpertMlp(activation), route, x, weights, matrices)

    assert most_rows(T, k, E) == T * 2 and most_rows(T, k, 1) == T and most_rows(T, k, E, T // 2) == T // 2 * E

    @partial(jax.jit, static_argnums=0)
    def differentiated(function, *arguments):
        out, pull = jax.vjp(function, *arguments)
        return out, *pull(jnp.asarray(dy))

    both = (differentiated(function, x, weights, w_up, w_down) for function in (ours, plain))
    for mine, theirs in zip(*both, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("normalise", [True, False])
def test_a_single_experts_weight_is_its_score(normalise):
    """As in Megatron-LM: divided by its own sum it would be 1, and the router would have no gradient."""
    logits, experts = jnp.array([[0.5, -1.0], [-2.0, 3.0]]), jnp.array([[0], [1]])
    found = router.routing_weights(logits, experts, "sigmoid", normalise=normalise, scaling_factor=2.5)
    np.testing.assert_allclose(found, 2.5 / (1 + np.exp([[-0.5], [-3.0]])), rtol=1e-6)
