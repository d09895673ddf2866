"""Mixtures of experts train on any mesh as on one device: also their losses and, exactly, the counts of assignments."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import DEEPSEEK, MIXTRAL, PADDED, QWEN3_VL, UNEVEN, UNPACKED, uneven_weights

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.mesh import build_mesh
from megajax.model import bind
from megajax.step.stack.pairs import PairedGroups
from megajax.step.stack.remat_groups import StreamGradients
from megajax.training.batches import to_global
from megajax.training.step import TrainProgram

STEPS = 2
ONE_LAYER = MIXTRAL | {"num_layers": 1}
SINKHORN = ONE_LAYER | {"activation": "relu2", "router": {"sinkhorn": True, "pre_softmax": True, "normalise": False}}
CAPACITY = ONE_LAYER | {"router": MIXTRAL["router"] | {"capacity_factor": 0.75}}
GPT_OSS = ONE_LAYER | {
    "activation": "clamped_swiglu",
    "attention_bias": True,
    "attention_sinks": True,
    "mlp_bias": True,
    "sliding_window": 5,
    "router": {"logit_bias": True, "capacity_factor": 1.5},
}
# Their own jitter and losses in each microbatch
ROUTER = DEEPSEEK | {"num_layers": 1, "dropout": 0.0}
ROUTER |= {"router": DEEPSEEK["router"] | {"capacity_factor": 0.75, "drop_policy": "position"}}
TOWER = QWEN3_VL | {"num_experts": 4, "experts_per_token": 2}
PAIRS = {"experts": "all_to_all", "overlap_experts": True}
MODELS = {
    "router": ROUTER,
    "tower": TOWER,
    "deepseek": DEEPSEEK,
    "gpt_oss": GPT_OSS,
    "sinkhorn": SINKHORN,
    "capacity": CAPACITY,
}
MODELS["uneven"] = {**UNEVEN, "num_layers": 1, "block_pattern": ["experts"], "mlp_bias": True}

# model, mesh, microbatches, other sections
CASES = [
    pytest.param(
        "sinkhorn",
        {"context": 2, "tensor": 2, "fsdp": 2},
        1,
        {"remat": {"policy": "selective"}, "data": UNPACKED},
        marks=pytest.mark.long,
    ),
    # Tokens are dropped by their position in the batch, of which a device has a part. Two pairs of microbatches.
    # `test_one_expert_may_take_every_token_and_others_none` has `all_to_all`.
    pytest.param(
        "router",
        {"expert": 2, "context": 2, "data": 2},
        4,
        {"communication": PAIRS | {"experts": "all_gather"}, "data": UNPACKED},
        marks=pytest.mark.smoke,
    ),
    pytest.param(
        "deepseek",
        {"expert": 2, "fsdp": 2, "tensor": 2},
        2,
        {"communication": PAIRS, "remat": {"policy": "full"}},
        marks=pytest.mark.long,
    ),
    pytest.param("tower", {"expert": 2, "fsdp": 2}, 4, {"communication": PAIRS}, marks=pytest.mark.long),
]


def name_of(value) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{key}{size}" for key, size in value.items()) or "plain"
    return None


def make(table, model, mesh, microbatches, sections):
    return table.make_config(MODELS[model], mesh, microbatches=microbatches, steps=STEPS, optimizer="sgd", **sections)


@pytest.mark.parametrize(("model", "mesh", "microbatches", "sections"), CASES, ids=name_of)
def test_experts_train_on_a_mesh_as_on_one_device(table, reference, model, mesh, microbatches, sections, monkeypatch):
    """Also if not all rows have room at once."""
    choose = Config.dispatch
    monkeypatch.setattr(Config, "dispatch", lambda *arguments: replace(choose(*arguments), room=0.5))
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


@pytest.mark.long
def test_experts_with_biases_train_on_a_mesh_as_on_one_device(table, biased):
    """Also where tokens are dropped by their router's weight."""
    assert biased.router["dropped_tokens"].all()
    mesh = {"expert": 2, "tensor": 2, "fsdp": 2}
    config = make(table, "gpt_oss", mesh, 2, {"communication": {"experts": "all_to_all"}})
    difference = table.compare(table.train(config, biased.initial), biased)
    assert not difference.problems(), difference


def test_one_expert_may_take_every_token_and_others_none(table, reference):
    """A bias before the router that one column of it agrees with, and three do not. Experts over three axes.

    Matmuls are batched over the experts.
    """
    mesh = {"expert": 2, "context": 2, "tensor": 2, "experts_over": ("expert", "context", "tensor")}
    sections = {"remat": {"policy": "save_matmuls"}, "communication": {"experts": "all_to_all"}, "data": PADDED}
    sections["kernels"] = {"grouped_matmul": "xla"}
    config = make(table, "uneven", mesh, 1, sections)
    weights = uneven_weights(table.weights_of(config), "experts")
    weights["blocks.experts.moe.router"] *= 0.5  # a smaller entropy would have the rounding of its terms
    expected = reference(config, weights)
    counts = expected.router["expert_counts"][0]
    tokens = next(table.make_batches(config))["is_real"].sum()
    assert (counts[:, 0] == tokens).all() and not counts[:, 5:].any(), counts
    difference = table.compare(table.train(config, weights), expected)
    assert not difference.problems(), difference


def test_logits_follow_the_experts_bias(table):
    """As generated text does: those of the plain model have the loss of an evaluation, with a bias that decides."""
    config = make(table, "router", {}, 1, {})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    weights = table.weights_of(config)
    weights["blocks.moe.moe.down"] *= 10
    state = table.first_state(program, weights)
    bias = {"moe": {"moe.expert_bias": jnp.asarray(np.random.default_rng(1).normal(size=(1, 8)), jnp.float32)}}
    fields = next(table.make_batches(config))
    sums, _ = program.eval_step(state.params, bias, to_global(program, fields))

    @jax.jit
    def expected(bias):
        logits = bind(program.model, state.params)(fields["tokens"], state=bias)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), fields["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(chosen * fields["loss_mask"])

    loss = float(sums["loss"])
    assert loss == pytest.approx(float(expected(bias)), rel=1e-6)
    assert loss != pytest.approx(float(expected({"moe": {"moe.expert_bias": jnp.zeros((1, 8))}})), rel=1e-5)


@pytest.mark.long
def test_what_is_kept_is_neither_routed_nor_exchanged_again(table):
    def operations(policy):
        sections = {"communication": {"experts": "all_to_all"}, "remat": {"policy": policy}}
        config = make(table, "capacity", {"expert": 4}, 1, sections)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
        text = program.train_step.lower(program.abstract_state, program.abstract_batch).as_text()
        return {name: text.count(name) for name in ("call @argsort", "top_k", "stablehlo.all_gather", ".all_to_all")}

    assert operations("save_matmuls") == operations("none") != operations("full")


def test_a_pair_of_microbatches_has_both_sums_and_the_largest_magnitudes_of_both():
    """Of a group's two backward passes: FP8's amaxes by layer, and gradients, which BF16 would round to 256."""
    results = {
        "one": (StreamGradients(1, {"images": 2}), jnp.bfloat16(256), ({"up": np.float32([3, 1])},)),
        "other": (StreamGradients(3, {"images": 4}), jnp.float32(1), ({"up": np.float32([2, 5])},)),
    }
    groups = SimpleNamespace(at=None, backward=lambda at, weights, saved, dy, inputs: results[saved])
    dy = StreamGradients((0, 0), {"images": (0, 0)})
    dx, gradient, [amax] = PairedGroups(groups).backward(None, {}, tuple(results), dy, (None, None))
    assert dx == StreamGradients((1, 3), {"images": (2, 4)})
    assert gradient == 257 and amax["up"].tolist() == [3, 5]
