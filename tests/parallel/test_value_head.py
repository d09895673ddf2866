"""A value, a class and a reward head (docs/examples), against `jax.grad` of the plain model's output."""

import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.checkpoint import Checkpoints
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError, InputError
from megajax.estimate.costs import flops_per_token, parameter_count
from megajax.estimate.memory import estimate_memory
from megajax.inference.load import for_inference
from megajax.mesh import AXES, build_mesh
from megajax.model import Transformer, bind
from megajax.options.registered import OBJECTIVES
from megajax.tools.explain_weight import lines
from megajax.training.batches import to_global
from megajax.training.in_memory import export_weights
from megajax.training.logs import closing_line
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

ROWS, LENGTH = 8, 12
TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.1, "ffn_hidden_size": 24}
PAIRS = {"objective": {"kind": "reward_model", "settings": {}}}
SEGMENTS = np.array([0, 1, 1, 0, 0, -1, 0, 1])  # of rows, two a microbatch; a pair that lacks its second member
MLP = {"block_pattern": ["mlp"]}  # layers that compile in half the time; no folder has them
PLAIN = {"objective": {"kind": "next_token", "settings": {}}}
D, V = TINY["hidden_size"], 128  # of the padded vocabulary


@pytest.fixture(scope="module", autouse=True)
def example():
    import_extensions(["docs/examples/value_head.py", "docs/examples/reward_model.py"])


def make(table, mesh, outputs=1, **changes):
    sections = {
        "batch": {"global_size": ROWS, "sequence_length": LENGTH},
        "objective": {"kind": "value_head", "settings": {"outputs": outputs}},
    }
    model = TINY | changes.pop("model", {})
    return table.make_config(model, mesh, **{"microbatches": 2, "steps": 1, "optimizer": "sgd", **sections, **changes})


def built(config):
    count = math.prod(getattr(config.mesh, axis) for axis in AXES)
    return TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))


def fields(outputs):
    rng = np.random.default_rng(5)
    tokens, labels = rng.integers(0, 50, (ROWS, LENGTH + 1)), rng.normal(size=(ROWS, LENGTH))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    batch["loss_mask"] = (rng.random((ROWS, LENGTH)) < 0.6).astype(np.float32)
    if outputs > 1:  # classes of whole sequences, at their last token
        batch["loss_mask"] = np.zeros((ROWS, LENGTH), np.float32)
        batch["loss_mask"][:, -1], labels = 1, rng.integers(0, outputs, (ROWS, LENGTH))
    positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    return {**batch, "labels": labels.astype(np.float32), "positions": positions}


def fields_of_pairs():
    batch = fields(1)
    del batch["labels"]
    return {**batch, "segments": np.broadcast_to(SEGMENTS[:, None], (ROWS, LENGTH))}


def weights_of(table, config):
    rng, outputs = np.random.default_rng(6), config.objective.settings.get("outputs", 1)
    own = {"objective.score": rng.normal(size=(D, outputs))}
    model = {name: w for name, w in table.weights_of(config).items() if name != "head"}
    return model | {name: w.astype(np.float32) for name, w in own.items()}


@pytest.fixture(scope="module")
def expected(table):
    """((loss, metrics), gradients) from the plain model; with the identity as head its logits are the hidden states.

    Of a number of outputs, or of pairs: None.
    """

    @cache
    def of(outputs):
        config = make(table, {}, outputs or 1, model=MLP)
        batch = fields(outputs) if outputs else fields_of_pairs()

        def loss(weights):
            own = {name: w for name, w in weights.items() if not name.startswith("objective.")}
            hidden = bind(Transformer(config.model), own | {"head": jnp.eye(D, V)})(batch["tokens"])[..., :D]
            found = jnp.einsum("bsd,dk->bsk", hidden, weights["objective.score"])
            if outputs is None:
                # The last token of an answer follows the last position whose target is one.
                last = [min(max(np.flatnonzero(row)) + 1, LENGTH - 1) for row in batch["loss_mask"]]
                scores = found[np.arange(ROWS), np.array(last), 0]
                better, worse = (jnp.where(SEGMENTS == n, scores, 0).reshape(4, 2).sum(1) for n in (0, 1))
                margins = (better - worse)[jnp.array([0, 1, 3])]
                metrics = {"margin": margins.mean(), "accuracy": (margins > 0).mean()}
                return jnp.log1p(jnp.exp(-margins)).mean(), metrics
            if outputs == 1:
                losses = (found[..., 0] - batch["labels"]) ** 2
            else:
                losses = -(jax.nn.one_hot(batch["labels"].astype(int), outputs) * jax.nn.log_softmax(found)).sum(-1)
            return (batch["loss_mask"] * losses).sum() / batch["loss_mask"].sum(), {}

        weights = weights_of(table, config)
        with jax.default_matmul_precision("highest"):
            return jax.jit(jax.value_and_grad(loss, has_aux=True))(weights)

    return of


@pytest.mark.parametrize("outputs", [None, pytest.param(3, marks=pytest.mark.long)])
def test_loss_and_gradients_are_those_of_a_plain_model(table, expected, outputs):
    mesh, kind = {"pipeline": 2, "tensor": 2, "context": 2}, {} if outputs else PAIRS
    config = make(table, mesh, outputs, microbatches=4, pipeline={"schedule": "gpipe"}, model=MLP, **kind)
    (loss, others), gradients = expected(outputs)
    program = built(config)
    batch = to_global(program, fields(outputs) if outputs else fields_of_pairs())
    state = table.first_state(program, weights_of(table, config))
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    others = {name: float(value) for name, value in others.items()}
    found = {name: float(total / number) for name, total in sums.items()}
    assert found == pytest.approx({"loss": float(loss), **others}, rel=table.PLAIN_VALUE)
    assert outputs or (0 < others["accuracy"] < 1 and others["margin"])
    table.check_first_step(program, state, batch, float(loss), gradients, **others)


def test_its_weights_take_the_heads_place_in_checkpoints_and_estimates(table, tmp_path):
    config, other = make(table, {"fsdp": 2}), make(table, {"tensor": 2})
    program, tensor = built(config), built(other)
    assert "head" not in program.placements
    state = table.first_state(program, weights_of(table, config))
    checkpoints = Checkpoints(tmp_path, 1, None)
    StateSaver(program).save(checkpoints, 1, state)
    checkpoints.wait()
    restored = StateSaver(tensor).restore(checkpoints, 1)
    for name, w in weights_of(table, config).items():
        if name.startswith("objective."):
            np.testing.assert_array_equal(np.asarray(restored.params[name]), w)
    saved = checkpoints.describe(1)
    with pytest.raises(InputError, match="init_from=.*with objective.kind=value_head, which has .*in place of"):
        StateSaver(built(make(table, {}, **PLAIN))).restore_weights(str(tmp_path))
    exported = dict(export_weights(program, state))
    assert "lm_head.weight" not in exported
    np.testing.assert_array_equal(exported["score.weight"].T, weights_of(table, config)["objective.score"])
    with pytest.raises(InputError, match="objective.kind=value_head, but this run has null"):
        StateSaver(built(make(table, {}, **PLAIN))).compare(saved, "it")
    three = StateSaver(built(make(table, {}, 3)))
    with pytest.raises(InputError, match=r"objective.score=\[16, 1\], but this run has \[16, 3\].*other par"):
        three.compare(saved, "it")
    with pytest.raises(
        InputError, match=r"objective.score \[16, 1\], but this run has \[16, 3\]: set objective.settings to"
    ):
        three.restore_weights(str(tmp_path))
    checkpoints.close()
    plain = make(table, {}, **PLAIN)
    assert parameter_count(Transformer(plain.model)) - parameter_count(program.model) == D * V - D
    assert flops_per_token(plain) - flops_per_token(config) == 6 * (D * V - D)
    # Beside adapters the model's head has no gradient, an objective's own has.
    adapters = {"lora": {"rank": 2, "targets": ["query"]}, "checkpoint": {"init_from": "base"}}
    frozen, own = (make(table, {}, **adapters, **changes) for changes in (PLAIN, {}))
    assert flops_per_token(frozen) - flops_per_token(own) == 4 * D * V - 6 * D
    ours, theirs = (estimate_memory(p.plan.on_gpus()) for p in (built(make(table, {})), built(plain)))
    assert theirs.parameters - ours.parameters == 4 * (D * V - D)
    assert theirs.optimizer - ours.optimizer == 4 * (D * V - D) * (theirs.optimizer // theirs.parameters)
    text = "\n".join(lines(tensor.graph, "objective.score"))
    assert "objective.score: trained" in text and "canonical  [16, 1] float32" in text


@pytest.mark.parametrize("lora", [None, pytest.param(2, marks=pytest.mark.long)])
def test_a_model_that_lacks_them_gives_its_weights_to_a_run(table, tmp_path, monkeypatch, lora):
    """The objective's parameters are new then; with adapters they are trained beside them."""
    value_head: Any = OBJECTIVES["value_head"]
    losses = value_head.loss
    monkeypatch.setattr(value_head, "METRICS", ("labels",))
    with_labels = lambda self, w, hidden, fields: (losses(self, w, hidden, fields), {"labels": fields["labels"]})  # noqa: E731
    monkeypatch.setattr(value_head, "loss", with_labels)
    one = {"model": MLP | {"num_layers": 1}}
    plain = built(make(table, {}, **PLAIN, **one))
    given = table.weights_of(plain.config)
    checkpoints = Checkpoints(tmp_path, 1, None)
    StateSaver(plain).save(checkpoints, 1, table.first_state(plain, given))
    checkpoints.close()
    source = {"lora": {"rank": lora}, "checkpoint": {"init_from": str(tmp_path)}}
    program = built(make(table, {"fsdp": 2}, **source, **one))
    saver = StateSaver(program)
    state = saver.first_state()
    for name, w in given.items():
        if name != "head":
            np.testing.assert_array_equal(np.asarray(state.weights[name]), w)
    assert "objective.score" in state.params
    np.testing.assert_array_equal(state.params["objective.score"], program.random_state().params["objective.score"])
    first = np.asarray(state.params["objective.score"])
    assert 0.5 < first.std() / program.config.model.init_std < 1.5
    batch = to_global(program, fields(1))
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    state, metrics = program.train_step(state, batch)
    assert np.isfinite(metrics["loss"]) and np.abs(np.asarray(state.params["objective.score"]) - first).min() > 0
    mask, labels = fields(1)["loss_mask"], fields(1)["labels"]
    for mean in (metrics["labels"], sums["labels"] / number):
        assert float(mean) == pytest.approx((mask * labels).sum() / mask.sum(), rel=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_label_that_is_no_number_is_refused(table, value):
    """As a class it would be some number, and as a value the step were skipped; gradients are of padding too."""
    given = fields(1)
    given["labels"][2, 3], given["loss_mask"][2, 3] = value, 0
    with pytest.raises(InputError, match=f"holds {value} in labels: give finite numbers, also where loss_mask=0"):
        to_global(built(make(table, {})), given)


def test_what_needs_logits_is_refused(table):
    for changes, sentence in (
        (
            {"model": {"mtp_layers": 1}},
            "mtp_layers=1 cannot be combined with objective.kind=value_head, because it has",
        ),
        (
            {"model": {"z_loss": 0.1}},
            "model.z_loss=0.1 needs objective.kind=next_token or masked_tokens, but objective.kind=value_head",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            make(table, {}, **changes)
    with pytest.raises(InputError, match="objective.kind=value_head has parameters in place .*does not generate"):
        for_inference(make(table, {}), "float32", 0)
    data = {"data": {"kind": "synthetic", "tokenizer": "byte"}, "model": {"vocab_size": 257}}
    ours, plain = (closing_line(make(table, {}, **data, **changes), 1, 8, 1.0) for changes in ({}, PLAIN))
    assert "--prompt TEXT" in plain and "--prompt" not in ours
