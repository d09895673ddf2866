"""What a step logs, its gradients and the evaluation are those of the plain model, on one device and on meshes."""

import itertools
import math
from functools import cache

import jax
import numpy as np
import plain_model
import pytest
from mesh_models import GPT2, MIXTRAL, UNPACKED

from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.sharding import EMPTY, stored_rows
from megajax.tools.verify.runs import canonical, first_gradients
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

# GPT-2's layers, every loss of a router, dropped assignments, and a shared expert with a gate.
GPT2_MOE = (
    MIXTRAL
    | GPT2
    | {
        "num_layers": 2,
        "first_dense_layers": 1,
        "expert_ffn_hidden_size": 24,
        "shared_expert_ffn_hidden_size": 16,
        "shared_expert_gate": True,
        "dropout": 0.2,
        "z_loss": 0.01,
        "mlp_bias": False,  # a shared expert has none; test_mesh_table.py has GPT-2's
        "logit_softcap": 3.0,
        "qk_norm": "layernorm",
        "norm_zero_centred": True,
        "router": {"global_loss": 0.3, "sequence_loss": 0.2, "z_loss": 0.1, "jitter": 0.3, "capacity_factor": 1.0}
        # losses that count other experts than those that get a token, because of the groups alone
        | {"num_groups": 2, "loss_counts": "top_scores"},
    }
)
DEEPSEEK_ROUTER = {
    "score_function": "sigmoid",
    "scaling_factor": 2.5,
    "num_groups": 4,
    "groups_per_token": 2,
    "jitter": 0.3,
    "expert_bias": True,
    "bias_update_rate": 0.05,
    "sequence_loss": 0.2,
    "loss_counts": "top_scores",
    "z_loss": 0.1,
}
MODELS = {
    "softmax": GPT2_MOE,
    # With prediction modules, and scores that are measured and clipped.
    "sigmoid": MIXTRAL
    | {
        "num_layers": 2,
        "first_dense_layers": 1,
        "expert_ffn_hidden_size": 24,
        "dropout": 0.2,
        "z_loss": 0.01,
        "mtp_layers": 2,
        "qk_clip": 0.5,
        "router": DEEPSEEK_ROUTER,
    },
}
DOCUMENTS = {"kind": "synthetic", "reset_attention": True, "reset_positions": True}
DATA = {"softmax": UNPACKED, "sigmoid": DOCUMENTS}
ROWS, LENGTH, SEED = 8, 16, 7
CASES = [
    pytest.param("softmax", {"expert": 2, "context": 2, "tensor": 2}, {}, marks=pytest.mark.smoke),
    # The first stage has no layer with experts.
    ("sigmoid", {"pipeline": 2, "fsdp": 2, "expert": 2}, {}),
]
# Sums of FP32 numbers in another order, after two layers; the worst found was 2e-7.
VALUE, GRADIENT = 1e-6, 1e-5


def make(table, name, mesh, **pipeline):
    sections = {"batch": {"global_size": ROWS, "sequence_length": LENGTH}, "run": {"steps": 2, "seed": SEED}}
    sections["pipeline"] = pipeline
    return table.make_config(MODELS[name], mesh, microbatches=2, optimizer="sgd", data=DATA[name], **sections)


def as_microbatches(fields):
    """Fields `[rows, S]` of a batch → the plain model's `[M, B, S]`."""
    names = {"segment_ids": "documents", "is_real": "real"}
    return {names.get(name, name): a.reshape(2, ROWS // 2, LENGTH) for name, a in fields.items()}


@pytest.fixture(scope="module")
def plain(table):
    """The plain model's numbers and gradients of the first step, and its summed loss without dropout, by name."""

    @cache
    def of(name):
        config = make(table, name, {})
        model, weights, batch = (
            config.model.model_dump(),
            table.weights_of(config),
            as_microbatches(first_batch(config)),
        )
        draws = plain_model.Draws(model, batch["tokens"].shape, SEED, 0)
        evaluated = plain_model.step(np, model | {"mtp_layers": 0}, weights, batch, plain_model.NoDraws())[1]
        return *plain_model.numbers_and_gradients(model, weights, batch, draws), evaluated["loss"]

    def first_batch(config):
        return next(table.make_batches(config))

    return of


@pytest.mark.parametrize(("name", "mesh", "pipeline"), CASES, ids=str)
def test_a_step_has_the_numbers_and_gradients_of_the_plain_model(table, plain, name, mesh, pipeline):
    config = make(table, name, mesh, **pipeline)
    count = math.prod(mesh.values())
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state, batches = table.first_state(program, table.weights_of(config)), table.make_batches(config)
    fields = next(batches)
    batch = to_global(program, fields)
    sums, tokens = program.eval_step(state.weights, state.layer_state, batch)
    state, metrics = program.train_step(state, batch)
    logged, gradients, evaluated = plain(name)

    assert tokens == fields["loss_mask"].sum()
    np.testing.assert_allclose(sums["loss"] / tokens, evaluated, VALUE)
    assert_logged(metrics, logged, config)
    norm = math.sqrt(sum((g**2).sum() for g in gradients.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, VALUE)
    found, zeros = first_gradients(program, state, norm), table.zero_gradients(config)
    assert found.keys() == gradients.keys()
    for weight, expected in gradients.items():
        limit = GRADIENT * (norm if weight in zeros else np.linalg.norm(expected))
        assert np.linalg.norm(found[weight] - expected) < limit, weight

    # The next step: other masks, other weights, and the routers' biases moved towards balance.
    biases = {}
    if config.model.router.expert_bias:
        counts = np.asarray(logged["expert_counts"], float)
        moved = 0.05 * np.sign(counts.mean(1, keepdims=True) - counts)
        biases = {"moe": moved[:1], "mtp": moved[1:]}
        for kind, expected in biases.items():
            np.testing.assert_allclose(state.layer_state[kind]["moe.expert_bias"][-len(expected) :], expected, VALUE)
        assert_empty_slots_are_zero(config, state)
    batch, model = as_microbatches(fields := next(batches)), config.model.model_dump()
    weights = canonical(program, state.params)
    draws = plain_model.Draws(model, batch["tokens"].shape, SEED, 1)
    _, metrics = program.train_step(state, to_global(program, fields))
    logged = plain_model.step(np, model, weights, batch, draws, biases)[1]
    assert_logged(metrics, logged, config)


def assert_empty_slots_are_zero(config, state):
    """Of weights and moments: a layer's dropout and noise would be another's if it were known by its slot."""
    rows = stored_rows(config, 2)
    assert rows == {"dense": (0, EMPTY), "moe": (EMPTY, 1)}
    arrays = {"params": state.params} | state.optimizer.slots["sgd"]
    for kind, empty in {"dense": 1, "moe": 0}.items():
        for name, a in ((n, a) for own in arrays.values() for n, a in own.items() if n.startswith(f"blocks.{kind}.")):
            filled = np.asarray(a)
            assert not filled[empty].any() and filled[1 - empty].any(), name


def assert_logged(metrics, expected, config):
    """Every number that a step logs, but those that the trainer counts, has its expected value."""
    without = () if config.model.qk_clip else ("max_attention_score",)
    expected = {name: value for name, value in expected.items() if name not in without}
    assert metrics.keys() - expected.keys() == {"grad_norm", "learning_rate", "skipped", "skipped_in_row"}
    for name, value in expected.items():
        np.testing.assert_allclose(np.asarray(metrics[name]), value, VALUE, err_msg=name)


def test_no_two_masks_are_equal():
    """Over the embedding, layers, branches, prediction modules, routers and steps."""
    model = {"dropout": 0.5, "hidden_size": 16, "router": {"jitter": 0.3}}
    masks = []
    for step in range(2):
        draws = plain_model.Draws(model, (1, 2, 4), SEED, step)
        masks += [draws.dropout(number) > 0 for number in range(7)]
        masks += [draws.dropout(number, module) > 0 for module in range(2) for number in (0, 7 + 2 * module)]
        masks += [draws.jitter(layer) > 1 for layer in range(3)]
    for one, other in itertools.combinations(masks, 2):
        assert 0.2 < (one != other).mean() < 0.8  # of 128 fair coins, 0.5 ± 0.044
