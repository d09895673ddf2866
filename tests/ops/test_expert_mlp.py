"""The MLP of experts in FP8 against NumPy in float64 with the same roundings."""

from functools import partial

import grouped_matmul_bench
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.ops import Biases, ExpertMatrices, ExpertMlp, Route, SortedRoute, apply_experts
from megajax.ops.expert_mlp import ExpertKernels, expert_mlp
from megajax.ops.fp8 import Fp8Weight
from megajax.parallel.experts import gathered_tokens
from megajax.tools.plan.compile import compiled, no_gpu_needed

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
R, D, F, SIZES = 180, 32, 48, (20, 0, 131, 5)
USED = sum(SIZES)


def rounded(x, dtype):
    return np.asarray(x, np.float32).astype(dtype).astype(np.float64)


bf16 = partial(rounded, dtype=jnp.bfloat16)


class Quantised:
    """A tensor, rounded to FP8 by a given scale, or by one that takes its amax times `room` to the largest number."""

    def __init__(self, x, scale, dtype, room):
        self.amax = np.abs(x).max()
        scale = np.float32(LARGEST[dtype] / (self.amax * room)) if scale is None else scale
        self.values = rounded(np.clip(x * scale, -LARGEST[dtype], LARGEST[dtype]), dtype) / scale


def of_groups(function, *arrays):
    """function(e, rows of group e...) of each group, in the order of rows."""
    ends = np.cumsum(SIZES)
    parts = [[a[end - size : end] for a in arrays] for end, size in zip(ends, SIZES, strict=True)]
    return [function(e, *rows) for e, rows in enumerate(parts)]


def multiplied(x, w):
    return bf16(np.concatenate(of_groups(lambda e, rows: rows @ w[e], x)))


def activation_and_slopes(kind, up):
    if kind == "gelu":
        u = 2.0 * np.sqrt(2.0 / np.pi) * (up + 0.044715 * up**3)
        opening, slope = 1.0 / (1.0 + np.exp(-u)), 2.0 * np.sqrt(2.0 / np.pi) * (1.0 + 3.0 * 0.044715 * up**2)
        return up * opening, opening + up * opening * (1.0 - opening) * slope
    gate, up = np.split(up, 2, axis=-1)
    opening = 1.0 / (1.0 + np.exp(-gate))
    act, slope = gate * opening * up, opening + gate * opening * (1.0 - opening)
    return act, np.stack([up * slope, gate * opening], axis=1)


def in_float64(kind, scales, dtype, room, x, weights, w_up, w_down, dy):
    """(y, dx, dweights, (dw_up, its amaxes), (dw_down, its amaxes)) with the roundings of the layer."""
    quantised, between = partial(Quantised, room=room), (lambda a: a) if kind == "swiglu" else bf16
    weights = weights[:, None]
    q_x = quantised(x, scales["up input"], E4M3)
    up = multiplied(q_x.values, w_up)
    act, slopes = activation_and_slopes(kind, up)
    q_act = quantised(between(act * weights), scales["down input"], E4M3)
    q_dy = quantised(dy, scales["down gradient"], dtype)
    dact = multiplied(q_dy.values, np.swapaxes(w_down, 1, 2))
    dup = (dact[:, None] * slopes).reshape(USED, -1) if kind == "swiglu" else dact * slopes
    q_dup = quantised(between(dup * weights), scales["up gradient"], dtype)

    def gradient(a, b):
        return np.stack(of_groups(lambda e, a, b: a.T @ b, a.values, b.values)), [a.amax, b.amax]

    dx = multiplied(q_dup.values, np.swapaxes(w_up, 1, 2))
    return multiplied(q_act.values, w_down), dx, (act * dact).sum(axis=1), gradient(q_x, q_dup), gradient(q_act, q_dy)


def fp8_weight(w, scales, name, dtype):
    """An Fp8Weight of w [E, in, out], and what its values stand for."""
    scale = np.float32(448.0 / np.abs(w).max())
    values = np.asarray(w * scale, np.float32).astype(E4M3)
    given = [None if s is None else np.float32(s) for s in (scales[f"{name} input"], scales[f"{name} gradient"])]
    weight = Fp8Weight(
        values=values,
        transposed=np.swapaxes(values, 1, 2),
        inverse_scale=np.float32(1 / scale),
        input_scale=given[0],
        gradient_scale=given[1],
        gradient=np.zeros(w.shape, jnp.bfloat16),
        amax=np.zeros(2, np.float32),
        gradient_dtype=dtype,
    )
    return weight, values.astype(np.float64) / scale


GIVEN = {"up input": 60.0, "up gradient": 900.0, "down input": 40.0, "down gradient": 3000.0}
CURRENT = dict.fromkeys(GIVEN)


@pytest.mark.parametrize(
    ("kind", "scales", "dtype", "room"),
    [("swiglu", GIVEN, E5M2, 1), ("swiglu", CURRENT, E4M3, 1.5), ("gelu", CURRENT, E5M2, 1)],
    ids=["given scales", "current scaling", "plain activation"],
)
def test_value_and_gradients(rng, error, kind, scales, dtype, room):
    x, dy, weights = rng.normal(size=(R, D)), rng.normal(size=(R, D)), rng.random(R)
    w_up = rng.normal(size=(len(SIZES), D, 2 * F if kind == "swiglu" else F)) / 6
    w_down = rng.normal(size=(len(SIZES), F, D)) / 6
    up, w_up = fp8_weight(w_up, scales, "up", dtype)
    down, w_down = fp8_weight(w_down, scales, "down", dtype)
    used = [bf16(x[:USED]), rounded(weights[:USED], np.float32), w_up, w_down, bf16(dy[:USED])]
    expected = in_float64(kind, scales, dtype, room, *used)
    for a in (x, dy, weights):
        a[USED:] = np.nan  # rows of no group, which nothing was written to

    @jax.jit
    def run(x, weights, up, down, sizes, dy):
        run = partial(expert_mlp, ExpertMlp(kind, max_over_devices=lambda amax: room * amax), Route(sizes))
        y, pull = jax.vjp(lambda x, weights, *w: run(x, weights, ExpertMatrices(*w)), x, weights, up, down)
        return y, *pull(dy)

    x, dy = (np.asarray(a, jnp.bfloat16) for a in (x, dy))
    found = run(x, np.asarray(weights, np.float32), up, down, np.array(SIZES, np.int32), dy)
    y, dx, dweights, dup, ddown = jax.device_get(found)
    assert y.dtype == dx.dtype == dup.gradient.dtype == jnp.bfloat16
    for found, wanted in zip((y, dx, dweights), expected, strict=False):
        # FP8's own error is ten times as large.
        assert error(found[:USED], wanted) < 4e-3
        np.testing.assert_array_equal(np.asarray(found[USED:], np.float32), 0)
    for found, (gradient, amax) in zip((dup, ddown), expected[3:], strict=True):
        assert error(found.gradient, gradient) < 4e-3
        assert not np.any(found.gradient[1])  # of a group without rows
        np.testing.assert_allclose(found.amax, amax, rtol=1e-6)  # the maximum of the same FP32 numbers


def test_tokens_go_through_experts_in_fp8(rng, error):
    x, weights = np.asarray(rng.normal(size=(40, D)), jnp.bfloat16), np.asarray(rng.random((40, 2)), np.float32)
    experts = np.stack([rng.permutation(4)[:2] for _ in range(40)])
    w_up, w_down = rng.normal(size=(4, D, 2 * F)) / 6, rng.normal(size=(4, F, D)) / 6
    (up, w_up), (down, w_down) = (fp8_weight(w, CURRENT, n, E5M2) for w, n in ((w_up, "up"), (w_down, "down")))
    biases = Biases(np.asarray(rng.normal(size=(4, 2 * F)), jnp.bfloat16), np.ones((4, D), jnp.bfloat16))

    @jax.jit
    def run(x, up, down, biases):
        def apply(x, weights, biases):
            route = SortedRoute.of(experts, 4, None)
            return apply_experts(ExpertMlp("swiglu"), route, x, weights, ExpertMatrices(up, down, biases))

        y, pull = jax.vjp(apply, x, weights, biases)
        return y, *jax.tree.leaves(pull(y))

    found = run(x, up, down, biases)
    w_up, w_down, *biases32 = (np.asarray(w, np.float32) for w in (w_up, w_down, *biases))
    expected = run(x.astype(np.float32), w_up, w_down, Biases(*biases32))
    for one, other, limit in zip(found, expected, (0.06, *(0.12,) * 4), strict=True):  # gradients have fewer bits
        assert 1e-3 < error(one, other) < limit


@pytest.mark.parametrize(("scales", "defers"), [(None, True), (GIVEN, False)], ids=["unquantised", "given scales"])
def test_rows_in_several_rounds_give_the_numbers_of_one_round(rng, error, scales, defers, monkeypatch):
    """Each round has a part of the rows; FP8's amaxes are those of all."""
    dtype = jnp.float32 if scales is None else jnp.bfloat16
    x, dy = (np.asarray(rng.normal(size=(40, D)), dtype) for _ in range(2))
    weights, experts = (
        np.asarray(rng.random((40, 2)), np.float32),
        np.stack([rng.permutation(5)[:2] for _ in range(40)]),
    )
    up, down = (np.asarray(rng.normal(size=size) / 6, np.float32) for size in ((4, D, 2 * F), (4, F, D)))
    if scales is not None:
        up, down = (fp8_weight(w, scales, name, E5M2)[0] for w, name in ((up, "up"), (down, "down")))

    def of_rooms(first, later):
        monkeypatch.setattr(gathered_tokens, "LATER_ROOM", later)

        @jax.jit
        @partial(jax.shard_map, mesh=Mesh(jax.devices()[:1], "x"), in_specs=P(), out_specs=P(), check_vma=False)
        def run(x, weights, up, down):
            dispatched = gathered_tokens.GatheredExperts(("x",), 1, ExpertKernels(), lambda a: a, room=first)
            route = dispatched.route(experts, 4, None)

            def mlp(x, weights, *matrices):
                return apply_experts(ExpertMlp("swiglu", defers=defers), route, x, weights, ExpertMatrices(*matrices))

            y, pull = jax.vjp(mlp, x, weights, up, down)
            dx, dweights, *dws = pull(dy)
            dws = dws if scales is None else [a for dw in dws for a in (dw.gradient, dw.amax)]
            return (y, dx, dweights, *dws), 1 if route.rounds is None else route.rounds

        return jax.device_get(run(x, weights, up, down))

    used = np.count_nonzero(experts < 4)
    found, rounds = of_rooms(0.25, 0.125)
    assert rounds == 1 + -(-(used - 20) // 10) > 4
    expected, rounds = of_rooms(1, 1)
    assert rounds == 1
    for one, other in zip(found, expected, strict=True):
        # A sum over rounds in BF16 is rounded once more for each round.
        assert error(one, other) < (1e-6 if scales is None else 4e-3)
        if scales is not None and one.shape == (2,):
            np.testing.assert_array_equal(one, other)


def biased_loss(x, experts, weights, matrices, biases, dy):
    """Σ dy · Σ weight · expert(x), one token and one expert at a time."""

    def of_one(t, k):
        e = jnp.asarray(experts)[t, k]
        gate, up = jnp.split(x[t] @ matrices[0][e] + biases[0][e], 2)
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        out = (gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)) @ matrices[1][e] + biases[1][e]
        return weights[t, k] * jnp.sum(out * dy[t])

    return jnp.sum(jax.vmap(of_one)(*np.indices(experts.shape).reshape(2, -1)))


def test_biases_and_their_gradients_are_those_of_single_tokens_and_experts(rng, error):
    """One expert has no tokens, and one assignment goes to no expert."""
    T, E = 9, 4
    x, dy, weights = rng.normal(size=(T, D)), rng.normal(size=(T, D)), rng.random((T, 2))
    experts = np.stack([rng.permutation(E - 1)[:2] for _ in range(T)])
    matrices = rng.normal(size=(E, D, 2 * F)) / 6, rng.normal(size=(E, F, D)) / 6
    biases = 4 * rng.normal(size=(E, 2 * F)), rng.normal(size=(E, D))
    x, dy, weights, matrices, biases = jax.tree.map(np.float32, (x, dy, weights, matrices, biases))
    sent = weights.copy()
    sent[4, 1] = 0
    by_loop = jax.value_and_grad(biased_loss, argnums=(0, 2, 3, 4))
    total, expected = jax.device_get(jax.jit(lambda *a: by_loop(a[0], experts, *a[1:]))(x, sent, matrices, biases, dy))
    of_weights = np.array(expected[1])
    of_weights[4, 1] = 0
    expected = expected[0], of_weights, *expected[2:]

    def loss(x, weights, matrices, biases):
        chosen, given = jnp.asarray(experts).at[4, 1].set(E), ExpertMatrices(*matrices, Biases(*biases))
        y = apply_experts(ExpertMlp("clamped_swiglu"), SortedRoute.of(chosen, E, None), x, weights, given)
        return jnp.sum(y * dy)

    value, found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3)))(x, weights, matrices, biases)
    assert error(value, total) < 1e-5
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert error(one, other) < 1e-5


@pytest.mark.long
def test_it_compiles_for_hopper(h200_store):
    """By the GPU's compiler, without a GPU: the widths of Qwen3 30B-A3B with all its experts."""
    title = "FP8 current MLP, 128 experts 131072x2048x768"
    (section,) = [each for each in grouped_matmul_bench.layer_sections(tiny=False) if each.title == title]
    with no_gpu_needed():
        ((_, _, lowered),) = grouped_matmul_bench.lowered_for_h200(section)
        text, _ = compiled(lowered, h200_store)
    assert text.count('custom_call_target="mosaic_gpu') >= 6, "three matmuls of each of the two weights"
