"""Mixtures of experts train on any mesh as on one device: also their losses and, exactly, the counts of assignments."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import EXPERT_MODELS, MIXTRAL, PADDED, UNEVEN, UNPACKED, uneven_weights

from megajax.checkpoint import Checkpoints
from megajax.config import AXES
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.model import bind
from megajax.parallel.experts.exchanged import exchange, routes_of
from megajax.training.batches import to_global
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

STEPS = 2
ONE_LAYER = MIXTRAL | {"num_layers": 1}
SINKHORN = ONE_LAYER | {"activation": "relu2", "router": {"sinkhorn": True, "pre_softmax": True, "normalise": False}}
CAPACITY = ONE_LAYER | {"router": MIXTRAL["router"] | {"capacity_factor": 0.75}}
POSITION = ONE_LAYER | {"router": CAPACITY["router"] | {"drop_policy": "position"}}
GPT_OSS = ONE_LAYER | {
    "activation": "clamped_swiglu",
    "attention_bias": True,
    "attention_sinks": True,
    "mlp_bias": True,
    "sliding_window": 5,
    "router": {"logit_bias": True, "capacity_factor": 1.5},
}
MODELS = EXPERT_MODELS | {"gpt_oss": GPT_OSS} | {"sinkhorn": SINKHORN, "capacity": CAPACITY, "position": POSITION}
MODELS["uneven"] = {**UNEVEN, "num_layers": 1, "mlp_bias": True}
# test_plain_model.py has dropout on meshes with experts; its masks take half of compiling.
MODELS["deepseek"] |= {"dropout": 0.0}

# model, mesh, microbatches, other sections
CASES = [
    pytest.param(
        "sinkhorn",
        {"context": 2, "tensor": 2, "fsdp": 2},
        1,
        {"remat": {"policy": "selective"}, "data": UNPACKED},
        marks=pytest.mark.smoke,
    ),
    (
        "mixtral",
        {"expert": 4, "fsdp": 2},
        2,
        {"communication": {"experts": "all_gather"}, "kernels": {"scan_unroll": 2}},
    ),
    ("mixtral", {"expert": 2, "pipeline": 2}, 2, {"pipeline": {"schedule": "zero_bubble"}, "data": PADDED}),
    # Folded: experts over several axes, with their width whole or over `tensor`; three: `uneven` below.
    (
        "deepseek",
        {"expert": 2, "tensor": 2, "experts_over": ("expert", "tensor")},
        2,
        {"remat": {"policy": "full"}, "communication": {"experts": "all_to_all"}},
    ),
    ("mixtral", {"data": 2, "context": 2, "fsdp": 2, "experts_over": ("fsdp", "data", "context")}, 2, {}),
    (
        "position",
        {"expert": 2, "context": 2, "data": 2},
        1,
        {"communication": {"experts": "all_gather"}, "data": UNPACKED},
    ),
]


def name_of(value) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "plain"
    return None


def make(table, model, mesh, microbatches, sections):
    return table.make_config(MODELS[model], mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


@pytest.mark.parametrize(("model", "mesh", "microbatches", "sections"), CASES, ids=name_of)
def test_experts_train_on_a_mesh_as_on_one_device(table, reference, model, mesh, microbatches, sections):
    config = make(table, model, mesh, microbatches, sections)
    expected = reference(config)
    difference = table.compare(found := table.train(config, expected.initial), expected)
    assert not difference.problems(), difference
    of_steps = [fields.get("is_real", np.ones_like(fields["tokens"])).sum() for fields in table.make_batches(config)]
    tokens = np.array(of_steps)[:, None] * config.model.experts_per_token
    assert (found.router["expert_counts"].sum(axis=-1) == tokens).all()


@pytest.fixture(scope="module")
def biased(table, reference):
    """The reference's trace of GPT-OSS's layers, with large biases."""
    config, rng = make(table, "gpt_oss", {}, 2, {}), np.random.default_rng(2)
    weights = table.weights_of(config)
    for name in [name for name in weights if name.endswith(("_bias", "sinks"))]:
        weights[name] = rng.standard_normal(weights[name].shape).astype(np.float32)
    return reference(config, weights)


def test_experts_with_biases_train_on_a_mesh_as_on_one_device(table, biased):
    """Also where tokens are dropped by their router's weight."""
    assert biased.router["dropped_tokens"].all()
    mesh = {"expert": 2, "tensor": 2, "fsdp": 2}
    config = make(table, "gpt_oss", mesh, 2, {"communication": {"experts": "all_to_all"}})
    difference = table.compare(table.train(config, biased.initial), biased)
    assert not difference.problems(), difference


def test_one_expert_may_take_every_token_and_others_none(table, reference):
    """A bias before the router that one column of it agrees with, and three do not. Experts over three axes."""
    mesh = {"expert": 2, "context": 2, "tensor": 2, "experts_over": ("expert", "context", "tensor")}
    sections = {"remat": {"policy": "save_matmuls"}, "communication": {"experts": "all_to_all"}, "data": PADDED}
    config = make(table, "uneven", mesh, 2, sections)
    weights = uneven_weights(table.weights_of(config))
    expected = reference(config, weights)
    counts = expected.router["expert_counts"][0]
    tokens = next(table.make_batches(config))["is_real"].sum()
    assert (counts[:, 0] == tokens).all() and not counts[:, 5:].any(), counts
    difference = table.compare(table.train(config, weights), expected)
    assert not difference.problems(), difference


def test_what_is_above_an_experts_capacity_is_dropped(table, reference):
    router = reference(make(table, "position", {}, 1, {})).router
    capacity = 0.75 * 32 * 16 * 2 / 8
    above = np.maximum(router["expert_counts"] - capacity, 0).sum(axis=-1)
    assert (router["dropped_tokens"] == above).all() and above.all()


def test_the_bias_follows_the_counts_and_survives_a_checkpoint(table, tmp_path):
    """What a run on one mesh saves, one on another loads."""
    config = make(table, "deepseek", {"expert": 2}, 2, {"run": {"dir": str(tmp_path)}})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    state = table.first_state(program, reference_weights(program))
    fields = next(table.make_batches(config))
    state, metrics = program.train_step(state, to_global(program, fields))
    counts = np.asarray(metrics["expert_counts"])
    bias = 0.05 * np.sign(counts.mean(axis=1, keepdims=True) - counts)
    kept = state.layer_state["moe"]["moe.expert_bias"]
    np.testing.assert_allclose(kept, bias, rtol=1e-6)

    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=None)
    StateSaver(program).save(checkpoints, 1, state)
    checkpoints.wait()
    other = make(table, "deepseek", {"pipeline": 2}, 2, {"run": {"dir": str(tmp_path)}})
    elsewhere = TrainProgram.build(other, build_mesh(check_mesh(other, 2), jax.devices()[:2]))
    saver, zeros = StateSaver(elsewhere), {name: 0 * w for name, w in reference_weights(elsewhere).items()}
    restored = saver.restore(checkpoints, 1)
    checkpoints.close()
    begun = saver.with_weights(
        table.first_state(elsewhere, zeros), saver.restore_weights(str(tmp_path))
    )  # by init_from
    np.testing.assert_array_equal(begun.layer_state["moe"]["moe.expert_bias"], kept)
    np.testing.assert_array_equal(restored.layer_state["moe"]["moe.expert_bias"], kept)
    for name, w in table.canonical(elsewhere, restored.params).items():
        np.testing.assert_array_equal(w, table.canonical(program, state.params)[name])


def test_logits_follow_the_experts_bias(table):
    """As generated text does: those of the plain model have the loss of an evaluation, with a bias that decides."""
    config = make(table, "deepseek", {}, 1, {})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    weights = reference_weights(program)
    weights["blocks.moe.moe.down"] *= 10
    state = table.first_state(program, weights)
    bias = {"moe": {"moe.expert_bias": jnp.asarray(np.random.default_rng(1).normal(size=(2, 8)), jnp.float32)}}
    fields = next(table.make_batches(config))
    loss, _ = program.eval_step(state.params, bias, to_global(program, fields))

    @jax.jit
    def expected(bias):
        logits = bind(program.model, state.params)(fields["tokens"], state=bias)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), fields["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * fields["loss_mask"])

    assert float(loss) == pytest.approx(float(expected(bias)), rel=1e-6)
    assert float(loss) != pytest.approx(float(expected({"moe": {"moe.expert_bias": jnp.zeros((2, 8))}})), rel=1e-5)


def reference_weights(program):
    """Small numbers, quickly made."""
    rng = np.random.default_rng(0)
    return {n: 0.1 * rng.standard_normal(p.shape).astype(np.float32) for n, p in program.placements.items()}


def test_what_is_kept_is_neither_routed_nor_exchanged_again(table):
    def operations(policy):
        sections = {"communication": {"experts": "all_to_all"}, "remat": {"policy": policy}}
        config = make(table, "capacity", {"expert": 4}, 1, sections)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
        text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
        return {name: text.count(name) for name in ("stablehlo.sort", "top_k", "stablehlo.all_gather")}

    assert operations("save_matmuls") == operations("none") != operations("full")


def test_rows_arrive_in_the_order_of_their_experts_in_however_many_rounds_they_are_sent():
    """Of 4 devices with 2 experts each: the rows of an expert by sender, and back to where they came from."""
    counts = np.array([[3, 0, 1, 7, 0, 0, 2, 0], [0, 0, 0, 0, 0, 0, 0, 9], [1] * 8, [0, 5, 0, 0, 4, 0, 0, 1]])
    rows = np.zeros((4, 13), np.float32)  # of each device, with numbers that rise with expert, sender and row
    for sender, own in enumerate(counts):
        rows[sender, : own.sum()] = 1 + 1000 * np.repeat(np.arange(8), own) + 100 * sender + np.arange(own.sum())

    def run(room, counts, rows):
        routes = routes_of(("expert",), counts[0], 4, room, (13, 24))
        arrays = jnp.tile(rows[0, :, None], 3), -rows[0, :, None]  # as tokens and their weights
        there = exchange(("expert",), room, routes.rounds, routes.sent, routes.arrived, arrays)
        back = exchange(("expert",), room, routes.rounds, routes.arrived, routes.sent, there)
        return jax.tree.map(lambda a: a[None], ((there, back), routes.group_sizes, routes.rounds))

    mesh, spec = build_mesh({axis: 4 if axis == "expert" else 1 for axis in AXES}, jax.devices()[:4]), jax.P("expert")
    for room, rounds in ((3, 3), (13, 1)):
        mapped = jax.shard_map(partial(run, room), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        ((there, weights), (back, weights_back)), sizes, sent = jax.jit(mapped)(counts, rows)
        np.testing.assert_array_equal(sent, rounds)
        np.testing.assert_array_equal(back, np.repeat(rows[..., None], 3, axis=2))
        np.testing.assert_array_equal(weights_back, -rows[..., None])
        np.testing.assert_array_equal(weights, -there[..., :1])
        np.testing.assert_array_equal(sizes, counts.sum(axis=0).reshape(4, 2))
        for device, arrived in enumerate(np.asarray(there[..., 0])):
            own = np.sort(rows[(rows > 1000 * 2 * device) & (rows < 1000 * 2 * (device + 1))])
            np.testing.assert_array_equal(arrived, np.pad(own, (0, 24 - len(own))))
