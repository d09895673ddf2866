from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.ops.delta_rule import change, gated_delta_rule, recurrent_gated_delta_rule
from megajax.ops.linear_recurrence import token_by_token, unit_lower_inverse
from megajax.ops.short_convolution import short_convolution
from megajax.ops.state_space import recurrent_state_space, state_space

TOLERANCE = 1e-5  # in float32
OF_DEFINITION = {gated_delta_rule: recurrent_gated_delta_rule, state_space: recurrent_state_space}


def numpy_delta_rule(q, k, v, log_decay, strength, initial, starts=None):
    """The definition's matrices: S_t = (1 - b k kᵀ) diag(a) S + b k vᵀ; decays are of heads or of their channels."""
    (B, S, K, d), N = q.shape, v.shape[2]
    out = np.zeros(v.shape)
    for row, head in np.ndindex(B, N):
        state, shared = initial[row, head], head // (N // K)
        for t in range(S):
            key, b = k[row, t, shared], strength[row, t, head]
            if starts is not None and starts[row, t]:
                state = np.zeros_like(state)
            decay = np.diag(np.broadcast_to(np.exp(log_decay[row, t, head]), d))
            state = (np.eye(d) - b * np.outer(key, key)) @ decay @ state
            state = state + b * np.outer(key, v[row, t, head])
            out[row, t, head] = state.T @ q[row, t, shared]
    return out


def drawn(rng, S, B=2, K=2, N=4, d=8, w=6, by_channel=False):
    """Queries, keys, values, logarithms of decays, strengths and initial states; keys have norm 1."""
    q, k = rng.normal(size=(2, B, S, K, d))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    decay = -rng.exponential(0.3, size=(B, S, N, d) if by_channel else (B, S, N))
    strength = rng.uniform(size=(B, S, N))
    return q, k, rng.normal(size=(B, S, N, w)), decay, strength, rng.normal(size=(B, N, d, w))


def arguments(op, values):
    """The values that an op takes, FP32."""
    q, k, v, decay, strength, initial = (np.asarray(a, np.float32) for a in values)
    return [q, k, v, decay, *([strength] if op is gated_delta_rule else []), initial]


def borders(S):
    """Documents of several lengths in two sequences: some of one token, some that begin or end with a chunk."""
    starts = np.zeros((2, S), bool)
    starts[0, [index for index in (3, 4, 5, 40, 64, 128, S - 1) if index < S]] = True
    starts[1, :3] = True
    return starts


def in_order(op, starts=None):
    """`op` with the initial state as its last positional argument, and its output only."""
    return lambda *args: op(*args[:5], starts=starts, initial=args[5])[0]


def numpy_state_space(q, k, v, log_decay, initial, starts=None):
    """S_t = a S + k vᵀ."""
    (B, S, G, _), N = q.shape, v.shape[2]
    out = np.zeros(v.shape)
    for row, head in np.ndindex(B, N):
        state, shared = initial[row, head], head // (N // G)
        for t in range(S):
            decay = 0 if starts is not None and starts[row, t] else np.exp(log_decay[row, t, head])
            state = decay * state + np.outer(k[row, t, shared], v[row, t, head])
            out[row, t, head] = state.T @ q[row, t, shared]
    return out


@pytest.mark.parametrize("op", [recurrent_state_space, state_space])
def test_mamba_2_is_its_definition(check_op, rng, op):
    starts = np.zeros((2, 7), bool)
    starts[0, [2, 3]] = True
    q, k, v, decay, _, initial = drawn(rng, 7, d=4, w=3)
    found = lambda *args: op(*args[:4], starts=jnp.asarray(starts), initial=args[4])[0]  # noqa: E731
    check_op(found, partial(numpy_state_space, starts=starts), [q, k, v, decay, initial], thorough=False)


@pytest.mark.parametrize(
    ("op", "by_channel"),
    [
        *((recurrent_gated_delta_rule, by_channel) for by_channel in (False, True)),
        (gated_delta_rule, False),
        pytest.param(gated_delta_rule, True, marks=pytest.mark.long),  # the next test has chunks of such decays
    ],
)
def test_values_and_gradients_are_those_of_the_definition(check_op, rng, op, by_channel):
    starts = np.zeros((2, 7), bool)
    starts[0, [2, 3]] = True
    reference, args = partial(numpy_delta_rule, starts=starts), drawn(rng, 7, d=4, w=3, by_channel=by_channel)
    check_op(in_order(op, jnp.asarray(starts)), reference, args, thorough=False)


def with_gradients(op, values, cotangents, starts):
    """The output, the last state, and the gradients of all values."""

    @jax.jit
    def run(cotangents, *values):
        out, pull = jax.vjp(lambda *values: op(*values[:-1], starts=starts, initial=values[-1]), *values)
        return *out, *pull(cotangents)

    return run(cotangents, *values)


def test_strong_decays_of_some_channels_do_not_spoil_the_others(rng, error):
    """Decays of e⁻⁵ and e⁻²⁰ a token: their inverses over a chunk are no FP32 numbers. With documents."""
    q, k, v, _, strength, initial = drawn(rng, 131)
    decay = -np.array([0, 1e-3, 0.1, 1, 5, 5, 20, 20]) * rng.uniform(0.5, 1, size=(2, 131, 4, 8))
    values, starts = (q, k, v, decay, strength, initial), borders(131)
    cotangents = rng.normal(size=v.shape), rng.normal(size=initial.shape)
    found = with_gradients(gated_delta_rule, *jax.tree.map(np.float32, (values, cotangents)), starts)
    with jax.enable_x64(True):
        expected = with_gradients(recurrent_gated_delta_rule, values, cotangents, starts)
    assert error(expected[0], numpy_delta_rule(*values, starts)) < 1e-12
    for own, exact in zip(found, expected, strict=True):
        assert error(own, exact) < TOLERANCE


@pytest.mark.parametrize(
    ("ops", "documents"),
    [((gated_delta_rule, recurrent_gated_delta_rule), True), ((state_space, recurrent_state_space), False)],
)
def test_chunks_are_the_recurrence(rng, ops, documents, error):
    """Decays by channel are those of the test above."""
    args = arguments(ops[0], drawn(rng, 131))
    starts = borders(131) if documents else None
    cotangents = [np.float32(rng.normal(size=args[i].shape)) for i in (2, -1)]
    for found, expected in zip(*(with_gradients(op, args, tuple(cotangents), starts) for op in ops), strict=True):
        assert error(found, expected) < TOLERANCE


@pytest.mark.parametrize(("op", "by_channel"), [(gated_delta_rule, True), (state_space, False)])
def test_a_device_gets_its_initial_state_from_those_before_it(rng, error, op, by_channel):
    """Two parts of a sequence, of several chunks each: the second begins with what the first one's map gives."""
    *args, initial = arguments(op, drawn(rng, 200, by_channel=by_channel))
    args[3] = args[3] / 20  # else nothing is left of a state after some chunks
    starts = borders(200)
    starts[:, 100:] = starts[1] = False
    expected, last = jax.jit(OF_DEFINITION[op])(*args, starts=starts, initial=initial)

    @jax.jit
    def run(state, starts, *own):
        maps = []

        def before(*given):
            maps.append(given)
            return state

        return op(*own, starts=starts, state_before=before), maps[0]

    found, state = [], initial
    for part in (slice(0, 100), slice(100, 200)):
        (out, final), (transition, without) = jax.device_get(run(state, starts[:, part], *(a[:, part] for a in args)))
        after = transition @ state if transition.ndim == 4 else transition[..., None] * state
        assert error(after + without, final) < TOLERANCE
        found.append(out)
        state = final
    assert error(np.concatenate(found, axis=1), expected) < TOLERANCE
    assert error(state, last) < TOLERANCE


def test_equal_keys_do_not_spoil_the_inverse(rng, error):
    """Sums of powers of this matrix have terms up to 1e18, which cancel."""
    a = np.tril(np.ones((64, 64)), -1)

    @jax.jit
    def run(a, cotangent):
        found, pull = jax.vjp(unit_lower_inverse, a)
        return found, pull(cotangent)[0]

    cotangent = rng.normal(size=a.shape)
    found, gradient = run(np.float32(a), np.float32(cotangent))
    assert error(found, np.linalg.inv(np.eye(64) + a)) < TOLERANCE
    inverse = np.linalg.inv(np.eye(64) + a)
    expected = -np.tril(inverse.T @ cotangent @ inverse.T, -1)
    assert error(gradient, expected) < TOLERANCE


def numpy_convolution(x, weight, before, position):
    tokens, W = np.concatenate([before, x], axis=1), len(weight)
    y = np.zeros_like(x)
    for t, back in np.ndindex(x.shape[1], W):
        seen = (position[:, t] >= back)[:, None]
        y[:, t] += np.where(seen, tokens[:, t + W - 1 - back] * weight[W - 1 - back], 0)
    return y / (1 + np.exp(-y))


def test_the_convolution_sees_its_document_only(check_op, rng):
    position = np.array([[5, 6, 0, 1, 2, 3, 0], [0, 0, 0, 1, 2, 3, 4]])
    args = [rng.normal(size=(2, 7, 3)), rng.normal(size=(4, 3)), rng.normal(size=(2, 3, 3))]
    check_op(
        lambda x, w, before: short_convolution(x, w, jnp.asarray(position), before),
        partial(numpy_convolution, position=position),
        args,
    )


@pytest.mark.parametrize(
    ("rule", "by_channel"),
    [(change, False), (change, True), (lambda state, k, v: v, False)],
    ids=["delta rule", "by channel", "state space"],
)
def test_a_few_tokens_leave_the_state_after_some_of_them(rng, error, rule, by_channel):
    """Of the first sequence that after no token, of the second that after two; keys that heads share.

    A program of the kernel has 16 of the values' 32 columns, and all of a key.
    """
    *tokens, initial = (np.asarray(a, np.float32) for a in drawn(rng, 3, d=32, w=32, by_channel=by_channel))
    tokens, starts = tokens[: 5 if rule is change else 4], None
    op = recurrent_gated_delta_rule if rule is change else recurrent_state_space
    assert "pallas_call" in str(jax.make_jaxpr(partial(op, implementation="pallas"))(*tokens, initial=initial))
    definition = jax.jit(op)
    expected, last = jax.device_get(definition(*tokens, initial=initial))
    two = [a.copy() for a in tokens]
    two[1][:, 2] = two[3][:, 2] = 0  # a third token without a key or a decay changes nothing
    _, after_two = jax.device_get(definition(*two, initial=initial))
    run = partial(token_by_token, rule, *tokens[:4], starts, initial, *tokens[4:])
    run = jax.jit(run, static_argnames=("implementation", "interpret"))
    for implementation in ("reference", "pallas"):
        out, state = jax.device_get(run(count=np.array([0, 2]), implementation=implementation, interpret=True))
        assert error(out, expected) < TOLERANCE
        np.testing.assert_array_equal(state[0], initial[0])
        assert error(state[1], after_two[1]) < TOLERANCE
        assert error(run(implementation=implementation, interpret=True)[1], last) < TOLERANCE
