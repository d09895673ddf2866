"""Objectives against `jax.grad` of the plain model with an unchunked head, on one device and on meshes."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from megajax.config import Config, load_config
from megajax.config.checks import check, check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError, InputError
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind
from megajax.model.comm import Comm
from megajax.options.registered import OBJECTIVES as REGISTERED
from megajax.schema.fields import Section
from megajax.step.head import LossHead
from megajax.step.objective import (
    Elementwise,
    Hidden,
    HiddenSegment,
    Logits,
    NextToken,
    Segment,
    register_objective,
)
from megajax.training.batches import batches, to_global
from megajax.training.loop import Trainer
from megajax.training.step import TrainProgram

TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.1, "ffn_hidden_size": 24}
TINY |= {"block_pattern": ["mlp"]}  # which compile in half the time of all layers
REFERENCE = TINY | {"num_layers": 1, "num_heads": 4, "norm": "layernorm", "scale_head": True, "block_pattern": None}
ROWS, LENGTH = 8, 12
MEANS = 4  # two microbatches on two devices of `fsdp`, consecutive rows each


@register_objective("test_focal")
class Focal(Elementwise):
    FIELDS = {"importance": jnp.float32}

    class Settings(Section):
        gamma: float = 2.0

    def loss(self, log_probs, fields):
        # Not finite in padding, whose fields are zero.
        return -((1 - jnp.exp(log_probs)) ** self.settings.gamma) * log_probs / (1 / fields["importance"])

    def count(self, fields):
        return fields["importance"] * fields["loss_mask"]


import_extensions([str(Path(__file__).parents[2] / "docs/examples/dpo.py")])
DPO: Any = REGISTERED["dpo"]


@register_objective("test_pairs")
class Pairs(DPO):
    FIELDS = {"reference": (jnp.float32, 2)}  # in two terms, beside the teacher's

    def loss(self, log_probs, fields):
        return super().loss(log_probs - fields["reference"].sum(1), fields)


OBJECTIVES = {
    "smoothed": {"label_smoothing": 0.1},
    "means": {"label_smoothing": 0.1, "average": "microbatches"},
    "test_focal": {"kind": "test_focal", "settings": {"gamma": 1.5}},
    "test_pairs": {"kind": "test_pairs", "settings": {"beta": 0.5}},
}


def make(table, name, mesh, **model) -> Config:
    batch = {"global_size": ROWS, "sequence_length": LENGTH}
    sections = {"batch": batch, "objective": OBJECTIVES[name], "kernels": {"loss_chunk_tokens": 5}}
    sections |= {"teacher": {"model": REFERENCE}} if name == "test_pairs" else {}
    return table.make_config(TINY | model, mesh, microbatches=2, steps=1, optimizer="sgd", **sections)


def fields_of(name):
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 50, (ROWS, LENGTH + 1))
    mask = ((rng.random((ROWS, LENGTH)) < 0.8) * rng.uniform(0.5, 1.5, (ROWS, LENGTH))).astype(np.float32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}
    batch["positions"] = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    if name == "means":
        batch["loss_mask"] *= 0.01  # together below 1 in a microbatch, and in the step
    shape = (ROWS, LENGTH)
    if name == "test_focal":
        batch["importance"] = rng.uniform(0.5, 2, shape)
    if name == "test_pairs":
        batch["reference"] = rng.uniform(-2, -1.5, (*shape, 2))
        batch["segments"] = np.broadcast_to(np.arange(ROWS)[:, None] % (ROWS // 2), shape).copy()
        batch["segments"][:, ::5] = -1  # counted by the mask, but in no segment
    return batch


def expected_loss(name, logits, batch, of_reference=None):
    """The whole batch's loss, from its definition."""
    log_p = jax.nn.log_softmax(logits)
    own, mask = jnp.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0], batch["loss_mask"]
    if name == "plain":
        return -(mask * own).sum() / mask.sum()
    if name == "smoothed":
        return -(mask * (0.9 * own + 0.1 * log_p.mean(-1))).sum() / mask.sum()
    if name == "means":
        sums, counts = (a.reshape(MEANS, -1).sum(1) for a in (mask * (0.9 * own + 0.1 * log_p.mean(-1)), mask))
        return -jnp.mean(sums / counts)
    if name == "test_focal":
        weight = mask * batch["importance"]
        return -(weight * (1 - jnp.exp(own)) ** 1.5 * own).sum() / weight.sum()
    chosen, rejected = rewards(logits, batch, of_reference)
    return jnp.mean(jnp.log1p(jnp.exp(rejected - chosen)))


def rewards(logits, batch, of_reference):
    """Of the chosen and the rejected answers of test_pairs, from their definition."""
    own, reference = (
        jnp.take_along_axis(jax.nn.log_softmax(each), batch["targets"][..., None], -1)[..., 0]
        for each in (logits, of_reference)
    )
    inside = batch["loss_mask"] * (batch["segments"] >= 0)
    return 0.5 * (inside * (own - batch["reference"].sum(-1) - reference)).sum(1).reshape(-1, 2).T


@pytest.fixture(scope="module")
def expected(table):
    """((loss that is logged, loss of evaluation, other metrics), gradients of what a step minimises)."""

    @cache
    def of(name):
        config, batch = make(table, name, {}), fields_of(name)
        model, reference, others = Transformer(config.model), None, {}
        if teacher := config.teacher.model:
            network, tokens = Transformer(teacher), batch["tokens"]
            reference = jax.jit(lambda w: bind(network, w)(tokens))(table.weights_of(config.of_teacher))

        def losses(weights):
            logits = bind(model, weights)(batch["tokens"])
            kinds = name, "smoothed", "plain"
            own, smoothed, plain = (expected_loss(kind, logits, batch, reference) for kind in kinds)
            logged = smoothed if name == "means" else own
            if name == "test_pairs":
                chosen, rejected = rewards(logits, batch, reference)
                others.update(chosen_reward=chosen.mean(), rejected_reward=rejected.mean())
                others.update(accuracy=(chosen > rejected).mean(), margin=(chosen - rejected).mean())
            return own, (logged, plain if name in ("smoothed", "means") else own, others)  # smoothing: only training

        with jax.default_matmul_precision("highest"):
            gradients, own = jax.jit(jax.grad(losses, has_aux=True))(table.weights_of(config))
        return own, gradients

    return of


THREE = {"fsdp": 2, "tensor": 2, "context": 2}
# test_plain_model.py has the mean over tokens in both forms of the step.
CASES = [("means", THREE), pytest.param("smoothed", THREE, marks=pytest.mark.long)]
CASES += [pytest.param("test_focal", THREE, marks=pytest.mark.long)]
# One that needs whole sequences, and several chunks of them on devices and stages that share the vocabulary.
CASES += [("test_pairs", {"pipeline": 2, "context": 2, "tensor": 2})]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_a_plain_head(table, expected, name, mesh):
    config = make(table, name, mesh)
    count = int(np.prod([*mesh.values(), 1]))
    program = TrainProgram.build(config, build_mesh(check_mesh(config, count), jax.devices()[:count]))
    state = table.first_state(program, table.weights_with_teacher(config))
    batch, ((loss, evaluated, others), gradients) = to_global(program, fields_of(name)), expected(name)
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    others = {name: float(value) for name, value in others.items()}
    found = {name: float(total / number) for name, total in sums.items()}
    assert found == pytest.approx({"loss": float(evaluated), **others}, rel=table.PLAIN_VALUE)
    assert name != "test_pairs" or (0 < others["accuracy"] < 1 and others["margin"])
    table.check_first_step(program, state, batch, float(loss), gradients, **others)


def test_wrong_settings_and_batches_are_sentences(table):
    def of(**objective):
        config = make(table, "smoothed", {}).model_dump(mode="json")
        config["objective"] = objective
        made = Config.model_validate(config)
        check(made)
        return made

    for objective, sentence in (
        ({"kind": "focul"}, "objective.kind=focul .*next_token, .*test_focal.*run.extensions"),
        ({"kind": "test_focal", "settings": {"gama": 1}}, "objective.settings.gama .*gamma"),
        ({"kind": "test_focal", "settings": {"gamma": "x"}}, "objective.settings.gamma=x"),
        (
            {"kind": "test_focal", "label_smoothing": 0.1},
            "label_smoothing=0.1 needs objective.kind=next_token or masked_tokens, but",
        ),
        (
            {"kind": "test_focal", "average": "microbatches"},
            "average=microbatches needs objective.kind=next_token or masked_tokens, but",
        ),
        ({"settings": {"gamma": 1}}, "objective.settings=.* needs a registered objective"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            of(**objective)
    with pytest.raises(ConfigError, match="objective next_token is .*NextToken already"):
        register_objective("next_token")(Focal)
    assert register_objective("next_token")(NextToken) is NextToken
    for base in (Elementwise, Logits, Segment, Hidden, HiddenSegment):  # those of docs/extensions.md
        lacking = "values" if "values" in vars(base) else "loss"
        with pytest.raises(ConfigError, match=f"test_wrong .* does not define (loss|{lacking}): derive a class from"):
            register_objective("test_wrong")(type("Lacking", (base,), {}))
    for wrong in (type("Lacking", (Elementwise,), {}), lambda log_probs, fields: -log_probs):
        with pytest.raises(ConfigError, match="test_wrong .* does not define loss: derive a class from .*Elementwise"):
            register_objective("test_wrong")(wrong)
    own_head = {"loss": lambda self, values, fields: values, "TEACHER": True}
    own_head["values"] = lambda self, w, hidden, fields: hidden[:, 0]
    with pytest.raises(ConfigError, match="Wrong.TEACHER .* derive it from Logits, Elementwise or Segment"):
        register_objective("test_wrong")(type("Wrong", (HiddenSegment,), own_head))
    without_values = type("Lacking", (HiddenSegment,), {"loss": lambda self, values, fields: values})
    with pytest.raises(ConfigError, match=r"test_wrong .* does not define values: derive a class from"):
        register_objective("test_wrong")(without_values)
    with pytest.raises(ConfigError, match='no name: write @register_objective."NAME"'):
        register_objective(Focal)
    for attributes, sentence in (
        ({"FIELDS": ["reward"]}, "Wrong.FIELDS is .*reward.*dictionary"),
        ({"loss": lambda self, log_probs: -log_probs}, r"Wrong.loss .*: write loss\(self, log_probs, fields\)"),
        ({"FIELDS": {"reward": "flaot32"}}, "Wrong.FIELDS has reward: 'flaot32': give a dtype"),
        ({"FIELDS": {"reward": (jnp.float32, "8")}}, "Wrong.FIELDS has reward: .*'8'.*: give a dtype"),
        ({"FIELDS": {"reward": None}}, "Wrong.FIELDS has reward: None: give a dtype"),
        ({"FIELDS": {"reward": str}}, "Wrong.FIELDS has reward: .*str.*: give a dtype"),
        *(
            ({"METRICS": (name,)}, rf"Wrong.METRICS has {name}, which a step has already: rename it")
            for name in ("loss", "z_loss", "tokens", "mtp_loss")
        ),
        ({"METRICS": "margin"}, "Wrong.METRICS is 'margin', .*tuple: .*Elementwise"),
        ({"TEACHER": "no"}, "Wrong.TEACHER is 'no', .*boolean"),
        ({"TOGETHER": 2}, "Wrong.TOGETHER is set, .* derive it from Segment or HiddenSegment"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            register_objective("test_wrong")(type("Wrong", (Focal,), attributes))
    for together in (0, -2, "2", True, 2.0):
        with pytest.raises(ConfigError, match=f"Wrong.TOGETHER is {together!r}, .*objective_bases.Segment"):
            register_objective("test_wrong")(type("Wrong", (Pairs,), {"TOGETHER": together}))
    config, batch = make(table, "test_pairs", {}), fields_of("test_pairs")
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    numbers = np.broadcast_to(np.arange(ROWS)[:, None], (ROWS, LENGTH))
    for segments, wrong in ((numbers, 7), (numbers % 4 - 2, -2)):
        with pytest.raises(InputError, match=f"holds {wrong} in segments: .* below 4, the seq.* and -1 or more"):
            to_global(program, batch | {"segments": segments})
    odd = {"batch": {"global_size": 6, "num_microbatches": 2, "sequence_length": LENGTH}}
    odd = Config.model_validate(config.model_dump(mode="json") | odd)
    with pytest.raises(ConfigError, match="has 3 sequences.*kind=test_pairs takes 2 together: .*multiple of 2"):
        assert TrainProgram.build(odd, build_mesh(check_mesh(odd, 1), jax.devices()[:1])).graph
    del batch["reference"]
    with pytest.raises(InputError, match="has no reference and objective.kind=test_pairs"):
        to_global(program, batch)
    with pytest.raises(ConfigError, match="objective.kind=test_pairs reads the batch field reference.*custom_loop"):
        Trainer(config, jax.devices()[:1])
    with pytest.raises(
        ConfigError, match=r"run.eval_steps=\d+ reads data of the config, but batch_of .* run.eval_steps=0"
    ):
        Trainer(config, jax.devices()[:1], batch_of=lambda samples: batch)


def traced(table, name):
    config = make(table, name, {}, num_layers=1)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
    return jax.eval_shape(program.train_step, program.abstract_state, program.abstract_batch)


def test_a_function_of_logits_is_given_the_targets_too():
    head: Any = SimpleNamespace(comm=Comm(), _capped=lambda logits: logits, dtype=jnp.float32)
    targets, mask, logits = jnp.array([2, 0]), jnp.ones(2), jnp.ones((2, 3))

    def loss(logits, mask, fields):
        assert fields["targets"] is targets and fields["own"] is mask
        return {"loss": logits.sum()}, 2 * logits

    sums, gradient = LossHead.of_logits(head, 0.5, loss)(logits, targets, mask, {"own": mask})
    assert sums["loss"] == 6 and np.array_equal(gradient, logits)


def test_results_of_other_shapes_are_a_sentence(table, monkeypatch):
    of_tokens, of_pairs = "tokens: return a loss for each token", "for 4 segments: return both in one shape"
    for name, method, change, sentence in (
        ("test_focal", "loss", lambda x: x.mean(), rf"Focal.loss returns float32\[\] for \d+ {of_tokens}"),
        ("test_focal", "loss", lambda x: x > 0, rf"Focal.loss returns bool\[\d+\] for \d+ {of_tokens}"),
        ("test_focal", "loss", lambda x: None, f"Focal.loss returns NoneType .*{of_tokens}"),
        ("test_focal", "count", lambda x: x.sum(), r"Focal.count returns float32\[\] for 96 tokens: .*\[tokens\]"),
        ("test_focal", "count", lambda x: None, "Focal.count returns NoneType for 96 tokens"),
        ("test_focal", "loss", lambda x: (x, {"hits": x}), "loss returns the metrics hits, but Focal.METRICS is empty"),
        ("test_focal", "loss", lambda x: (x, x), r"Focal.loss returns the metrics float32\[\d+\], but"),
        ("test_pairs", "loss", lambda x: x[0], "metrics none, but Pairs.METRICS is accuracy, margin, ch"),
        ("test_pairs", "loss", lambda x: (x[0], {**x[1], "margin": 1.0}), r"float32\[\] as the metric margin.* \[2\]"),
        ("test_pairs", "loss", lambda x: (x[0].sum(), x[1]), rf"float32\[\] and Pairs.count bool\[2\] {of_pairs}"),
        ("test_pairs", "count", lambda x: jnp.ones(4), rf"float32\[2\] and Pairs.count float32\[4\] {of_pairs}"),
    ):
        with monkeypatch.context() as patch:
            kind = {"test_focal": Focal, "test_pairs": Pairs}[name]
            own = getattr(kind, method)
            patch.setattr(kind, method, lambda self, *given, own=own, change=change: change(own(self, *given)))
            with pytest.raises(ConfigError, match=sentence):
                traced(table, name)


def test_fields_are_those_of_the_loss_in_the_count_too(table, monkeypatch):
    def count(self, fields):
        assert fields.keys() == {"targets", "loss_mask", "importance"} and fields["importance"].shape == (96, 3)
        return fields["importance"].max(1)

    monkeypatch.setattr(Focal, "FIELDS", {"importance": (jnp.float32, 3)})
    monkeypatch.setattr(Focal, "loss", lambda self, log_probs, fields: log_probs * fields["importance"].sum(1))
    monkeypatch.setattr(Focal, "count", count)
    traced(table, "test_focal")


@pytest.mark.parametrize(
    ("field", "declared", "named"),
    [
        ("tokens", jnp.bfloat16, r"bfloat16\[\], but it is int32\[\]"),
        ("loss_mask", jnp.bfloat16, r"bfloat16\[\], but it is float32\[\]"),
        ("loss_mask", (jnp.float32, 3), r"float32\[3\], but it is float32\[\]"),
    ],
)
def test_a_field_that_a_batch_has_in_another_form_is_a_sentence(table, monkeypatch, field, declared, named):
    monkeypatch.setattr(Focal, "FIELDS", {field: declared})
    with pytest.raises(ConfigError, match=rf"declares the batch field {field} as {named}: give that field another"):
        traced(table, "test_focal")


EXTENSION = """
from megajax.step.objective import Elementwise, register_objective

@register_objective("ext_square")
class Square(Elementwise):
    METRICS = ("NAME",)

    def loss(self, log_probs, fields):
        losses = log_probs**2 / fields["loss_mask"]  # not finite in padding
        return losses, {"NAME": (fields["targets"] < 10) / fields["loss_mask"]}
"""


def test_an_objective_of_a_file_trains_in_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ext_objective.py").write_text(EXTENSION.replace("NAME", "below_ten"))
    taken = EXTENSION.replace("NAME", "mfu").replace("ext_square", "ext_taken")
    (tmp_path / "ext_taken.py").write_text(taken)
    (tmp_path / "x.yaml").write_text(
        "run: {steps: 2, extensions: [ext_objective.py], log_interval: 1, eval_steps: 1, eval_interval: 2,"
        " checkpoint_interval: 2}\n"
        f"model: {TINY | {'num_layers': 1}}\noptimizer: {{kind: sgd}}\n"
        "batch: {global_size: 2, sequence_length: 8}\ndata: {kind: synthetic}\nobjective: {kind: ext_square}\n"
        "kernels: {loss_chunk_tokens: 6}\n"
    )
    best = ["checkpoint.keep_best=1", "checkpoint.best_by=highest eval_below_ten"]
    trainer = Trainer(load_config("x.yaml", best), jax.devices()[:1])
    batch = trainer.next_batch()
    metrics = trainer.train_step(batch)
    assert float(metrics["loss"]) == pytest.approx(np.log(50) ** 2, rel=0.1)
    below_ten = np.mean(np.asarray(batch["targets"]) < 10)
    assert 0 < below_ten < 1 and float(metrics["below_ten"]) == pytest.approx(below_ten, rel=1e-6)
    overrides = ["run.extensions=[ext_taken.py]", "objective.kind=ext_taken", "run.eval_steps=0"]
    with pytest.raises(ConfigError, match="metric mfu, which the line of a step has already"):
        Trainer(load_config("x.yaml", overrides), jax.devices()[:1]).run()
    wrong = ["checkpoint.best_by=lowest eval_acc", "optimizer.ema_decay=0.9"]
    with pytest.raises(ConfigError, match="best_by=.*lowest eval_acc.* of eval_loss, eval_below_ten, ema_eval_loss"):
        Trainer(load_config("x.yaml", [*best, *wrong]), jax.devices()[:1])
    assert 0 < float(metrics["grad_norm"]) < 1e3
    evaluated = next(batches(trainer.program, "valid", trainer.data["valid"]))
    below_ten = np.mean(np.asarray(evaluated["targets"]) < 10)
    assert trainer.run() == 0
    found, printed = {}, capsys.readouterr().out
    for line in (trainer.run_dir / "metrics.jsonl").read_text().splitlines():
        found |= json.loads(line)
    assert found["eval_below_ten"] == pytest.approx(below_ten, rel=1e-6)
    assert f"loss {found['loss']:.4f}  below_ten {found['below_ten']:.3g}  norm" in printed
    assert f"evaluation loss {found['eval_loss']:.4f} below_ten {below_ten:.3g}\n" in printed
    evaluations = json.loads((trainer.run_dir / "checkpoints" / "evaluations.json").read_text())
    assert evaluations == {"2": {name: found[name] for name in ("eval_loss", "eval_below_ten")}}
