"""Padding counts nowhere: in no loss, count, capacity, bias or maximum, and real tokens train as without it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import MIXTRAL, UNPACKED
from single_device import first_state, make_batches, make_config, weights_of

from megajax.config.checks import check_mesh
from megajax.layout.kinds import LayerKind
from megajax.mesh import build_mesh
from megajax.model.comm import Comm, TokenPositions
from megajax.model.moe import MoE
from megajax.model.sublayer import BlockInputs, LayerContext, RealTokens
from megajax.ops import AttentionSettings, documents_of, router
from megajax.ops.partial_attention import Scores
from megajax.parallel.context.strategy import ContextAttention
from megajax.tools.verify.runs import canonical
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

S, D, E, K = 256, 16, 8, 2
LENGTHS = np.array([99, 256, 0, 1])  # of sequences of S tokens
IS_REAL = (np.arange(S) < LENGTHS[:, None]).reshape(-1)
SEQUENCE = np.repeat(np.arange(len(LENGTHS)), S)[IS_REAL]


@pytest.fixture(scope="module")
def tokens() -> tuple[np.ndarray, np.ndarray]:
    """Inputs of the router, the same for all padding, and its weight."""
    rng = np.random.default_rng(4)
    h, weight = rng.standard_normal((len(IS_REAL), D)), rng.standard_normal((D, E))
    return np.where(IS_REAL[:, None], h, h[-1]).astype(np.float32), weight.astype(np.float32)


def route(settings: dict, h: np.ndarray, weight: np.ndarray, training: bool = True):
    """(the part, then of `MoE.route`: experts and weights of each token, metrics)."""
    part = MoE(make_config(MIXTRAL | {"hidden_size": D, "router": settings}).model)

    @jax.jit
    def run(weight, h):
        at, ids = jnp.tile(jnp.arange(S), (len(LENGTHS), 1)), jnp.arange(len(IS_REAL))
        real = RealTokens(jnp.asarray(IS_REAL), *map(jnp.int32, (np.maximum(LENGTHS, 1), LENGTHS.sum(), 3)))
        scale = jnp.float32(1) if training else None
        inputs = BlockInputs(at, TokenPositions(at), ids, None, layer_loss_scale=scale, real=real)
        return part.route({"router": weight}, h, LayerContext(Comm(), inputs, 0, LayerKind("moe", None)))

    return part, *jax.device_get(run(weight, h))


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_losses_and_counts_are_those_of_the_real_tokens(tokens):
    settings = {"global_loss": 1.0, "z_loss": 1.0, "expert_bias": True, "bias_update_rate": 0.25}
    part, experts, weights, metrics = route(settings, *tokens)
    logits = (np.float64(tokens[0]) @ tokens[1])[IS_REAL]
    best = np.argsort(-logits, axis=-1)[:, :K]
    assert np.array_equal(experts[IS_REAL], best)
    assert np.all(experts[~IS_REAL] == E), "padding goes to no expert"
    np.testing.assert_allclose(weights[IS_REAL], softmax(np.take_along_axis(logits, best, 1)), rtol=1e-4)

    p, chosen = softmax(logits), (best[..., None] == np.arange(E)).sum(1)
    assert np.array_equal(metrics["expert_counts"], chosen.sum(0))
    switch = E * np.sum(chosen.mean(0) / K * p.mean(0))
    np.testing.assert_allclose(metrics["aux_loss"], switch, rtol=1e-5)
    z = np.mean(np.log(np.exp(logits).sum(-1)) ** 2)
    np.testing.assert_allclose(metrics["router_z_loss"], z, rtol=1e-5)
    np.testing.assert_allclose(metrics["router_entropy"], -np.sum(p * np.log(p)) / len(p), rtol=1e-5)
    state = jax.jit(part.updated_state)({"expert_bias": np.zeros(E, np.float32)}, metrics)
    assert np.array_equal(state["expert_bias"], 0.25 * np.sign(chosen.sum(0).mean() - chosen.sum(0)))

    part, *_, metrics = route({"sequence_loss": 1.0}, *tokens)
    for settings, expected in (
        ({"sequence_loss": 1.0}, ("aux_loss",)),
        ({"global_loss": 1.0}, ("aux_loss",)),
        ({"z_loss": 1.0}, ("router_z_loss",)),
        ({"sequence_loss": 1.0, "z_loss": 1.0}, ("aux_loss", "router_z_loss")),
        ({}, ()),
    ):
        own, *_, of_training = route(settings, *tokens)
        assert own.losses() == expected and {*own.LOSSES} & of_training.keys() == {*expected}
    rows = [(chosen[SEQUENCE == b].mean(0) / K, p[SEQUENCE == b].mean(0)) for b in (0, 1, 3)]
    np.testing.assert_allclose(metrics["aux_loss"], np.mean([E * np.sum(f * q) for f, q in rows]), rtol=1e-5)


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_padding_takes_no_capacity(tokens, policy):
    experts, weights, metrics = route({"capacity_factor": 1.0, "drop_policy": policy}, *tokens)[1:]
    best = np.argsort(-(tokens[0] @ tokens[1]), axis=-1)[:, :K]
    ranks = -np.asarray(weights).astype(np.float16) if policy == "probability" else 0 * np.asarray(weights)
    expected = np.full(best.shape, E)
    for expert in range(E):
        rows = [(ranks[t, i], t, i) for t, i in np.argwhere(best == expert) if IS_REAL[t]]
        for _, t, i in sorted(rows)[: int(LENGTHS.sum()) * K // E]:
            expected[t, i] = expert
    assert np.array_equal(experts, expected)
    dropped = (expected[IS_REAL] == E).sum()
    assert 0 < dropped == metrics["dropped_tokens"]


def test_the_share_of_an_expert_is_exact_on_the_device():
    for factor, tokens, k, experts in ((1.0, 900, 4, 60), (1.1, 40, 2, 8), (1.25, 99, 2, 8), (0.75, 1 << 19, 6, 64)):
        from_fraction = -(-round(factor * 100) * tokens * k // (100 * experts))
        for number in (tokens, jnp.int32(tokens)):
            assert router.expert_capacity(factor, number, k, experts) == from_fraction


def test_sinkhorn_evens_out_the_real_tokens_of_training(tokens):
    """In an evaluation a token's experts do not depend on others."""
    h, weight = tokens
    settings = {"sinkhorn": True, "pre_softmax": True, "normalise": False}
    experts, evaluated = (route(settings, h, weight, training)[1] for training in (True, False))
    cost, by_expert = softmax((np.float64(h) @ weight)[IS_REAL]), np.ones(E)
    for _ in range(20):
        by_token = 1 / (len(cost) * (cost @ by_expert) + 1e-8)
        by_expert = 1 / (E * (by_token @ cost) + 1e-8)
    assert np.array_equal(experts[IS_REAL], np.argsort(-cost * by_expert, axis=-1)[:, :K])
    best = np.argsort(-cost, axis=-1)[:, :K]
    assert np.array_equal(evaluated[IS_REAL], best) and not np.array_equal(experts[IS_REAL], best)


ROUTER = MIXTRAL["router"] | {"expert_bias": True, "capacity_factor": 1.0}
MODEL = MIXTRAL | {"num_layers": 1, "router": ROUTER, "qk_clip": 2.0, "mtp_layers": 1}
REAL = 12  # tokens of each sequence


def step(length: int, data: dict):
    """(weights, layer state and metrics of a step, its loss in an evaluation before)."""
    config = make_config(
        MODEL, steps=1, optimizer="sgd", batch={"global_size": 8, "sequence_length": length}, data=data
    )
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    weights = weights_of(config)
    state = first_state(program, {n: 3 * w if n.endswith(("query", "key")) else w for n, w in weights.items()})
    [fields] = make_batches(make_config(MODEL, steps=1, batch={"global_size": 8, "sequence_length": REAL}))
    fields = {name: np.pad(field, ((0, 0), (0, length - REAL))) for name, field in fields.items()}
    if data:
        fields["is_real"] = np.tile(np.arange(length) < REAL, (8, 1))
    batch = to_global(program, fields)
    sums, _ = program.eval_step(state.params, state.layer_state, batch)
    state, metrics = program.train_step(state, batch)
    return canonical(program, state.params), state.layer_state, jax.tree.map(np.asarray, metrics), float(sums["loss"])


@pytest.mark.long
def test_a_padded_batch_trains_as_its_tokens_do_without_padding():
    """Weights after a step, experts' biases, all metrics, and the loss of an evaluation."""
    (weights, biases, metrics, loss), (w, b, m, expected) = step(16, UNPACKED), step(REAL, {})
    assert loss == pytest.approx(expected, rel=1e-6)
    assert metrics.keys() == m.keys() and m["dropped_tokens"].all() and m["max_attention_score"] > 2
    for name, value in m.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, biases, b)
    for name, value in w.items():
        assert np.linalg.norm(weights[name] - value) <= 1e-6 * np.linalg.norm(value), name


def test_a_batch_with_padding_may_follow_one_without():
    """Its step is that of a program that has seen no other batch."""
    model = MIXTRAL | {"num_layers": 2, "block_pattern": ["experts"]}
    config = make_config(model, steps=1, optimizer="sgd", batch={"global_size": 2, "sequence_length": 8})
    mesh = build_mesh(check_mesh(config, 1), jax.devices()[:1])
    used, fresh = TrainProgram.build(config, mesh), TrainProgram.build(config, mesh)
    whole = used.abstract_batch
    padded = whole | {"is_real": whole["loss_mask"].update(dtype=jnp.bool_)}
    used.train_step.trace(used.abstract_state, whole)
    steps = [each.train_step.trace(each.abstract_state, padded).jaxpr for each in (used, fresh)]
    assert str(steps[0]) == str(steps[1])


def test_a_row_of_padding_is_no_sequence():
    """Neither of a microbatch's mean loss of sequences nor of its tokens; by hand."""
    config = make_config(MODEL, batch={"global_size": 8}, data=UNPACKED)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    [fields] = make_batches(make_config(MODEL, steps=1, batch={"global_size": 8}))
    fields["is_real"] = np.arange(fields["tokens"].shape[1]) < np.array([[3], [0], [0], [1], [0], [2], [4], [0]])
    found, _ = program.graph.add_derived_fields(to_global(program, fields))
    counts = [np.asarray(found[name]).ravel().tolist() for name in ("real_lengths", "real_tokens", "real_sequences")]
    assert counts == [[3, 1, 1, 1, 1, 2, 4, 1], [10], [4]]


def test_a_batch_that_does_not_say_what_is_padding_is_refused():
    config = make_config(MODEL, batch={"global_size": 8}, data=UNPACKED)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    [fields] = make_batches(make_config(MODEL, steps=1, batch={"global_size": 8}))
    with pytest.raises(ValueError, match="no is_real and data.kind=chat: give .*is_real"):
        program.train_step.lower(program.abstract_state, to_global(program, fields))


@pytest.mark.parametrize("attends", ["in one layer", "over context"])
def test_a_token_attends_to_its_document_in_both_directions_and_the_largest_score_is_of_real_tokens(attends):
    """On one device. The last token is padding, a document, with large scores."""
    ids, is_real = np.array([0, 0, 0, 1, 1, 2]), np.arange(6) < 5
    rng, index = np.random.default_rng(2), jnp.arange(6)[None]
    q, k, v = (rng.normal(size=(1, 6, 1, 4)).astype(np.float32) for _ in range(3))
    q[0, 5] = 50 * k[0, 5]
    positions = TokenPositions(index, documents_of(jnp.asarray(ids[None])), is_real=jnp.asarray(is_real[None]))
    arrays = *map(jnp.asarray, (q, k, v)), positions
    if attends == "in one layer":
        found, largest = Comm().attend(*arrays, AttentionSettings(causal=False, wants_largest=True))
    else:
        scores = Scores(0.5, None, "reference", wants_largest=True)
        found, largest = ContextAttention(1, scores, None, False, causal=False).attend(*arrays)
    weights = np.exp(q[0, :5, 0] @ k[0, :5, 0].T / 2) * (ids[:5, None] == ids[:5])
    np.testing.assert_allclose(np.asarray(found)[0, :5, 0], weights / weights.sum(1, keepdims=True) @ v[0, :5, 0], 1e-5)
    np.testing.assert_allclose(largest, [np.log(weights.sum(1)).max()], 1e-5)
