"""Distillation from a frozen teacher of another size, against `jax.grad` of the plain models with unchunked heads."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trainers import QuickTrainer

import megajax
from megajax.checkpoint.description import describe_model
from megajax.checkpoint.manager import save_weights
from megajax.config.checks import check_mesh
from megajax.config.extensions import import_extensions
from megajax.errors import ConfigError
from megajax.estimate.costs import flops_per_token, parameter_count
from megajax.estimate.memory import estimate_memory
from megajax.layout.kinds import KINDS
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind
from megajax.model.lora import is_adapter
from megajax.model.mlp import MLP
from megajax.schema.objective import ObjectiveConfig, TeacherConfig
from megajax.sharding import to_canonical
from megajax.training.batches import to_global
from megajax.training.loop import Trainer
from megajax.training.step import TrainProgram

ROWS, LENGTH = 8, 12
TINY = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 50, "init_std": 0.1, "ffn_hidden_size": 24}
TEACHER = {**TINY, "num_layers": 3, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "tie_embeddings": True}
TEACHER |= {"num_experts": 4, "first_dense_layers": 1, "expert_ffn_hidden_size": 16, "logit_softcap": 4.0}
TEACHER |= {"norm": "layernorm"}
# In each layer; a stage has an empty slot. Attention of a teacher: test_objectives.py
WITH_EXPERTS = {"teacher": {"model": TEACHER | {"first_dense_layers": 0, "block_pattern": ["experts"]}}}


@pytest.fixture(scope="module", autouse=True)
def example():
    import_extensions(["docs/examples/distillation.py"])


def make(table, mesh, **changes):
    sections = {
        "batch": {"global_size": ROWS, "sequence_length": LENGTH},
        "objective": {"kind": "distillation", "settings": {"temperature": 2.0}},
        "teacher": {"model": TEACHER},
        "kernels": {"loss_chunk_tokens": 5},
    }
    model = changes.pop("model", TINY)
    return table.make_config(model, mesh, **{"microbatches": 2, "steps": 1, "optimizer": "sgd", **sections, **changes})


def fields():
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 50, (ROWS, LENGTH + 1))
    mask = (rng.random((ROWS, LENGTH)) < 0.8).astype(np.float32)
    positions = np.broadcast_to(np.arange(LENGTH), (ROWS, LENGTH))
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask, "positions": positions}


@pytest.fixture(scope="module")
def expected(table):
    """(loss, gradients) of the plain models."""
    config, batch = make(table, {}, **WITH_EXPERTS), fields()
    weights = table.weights_with_teacher(config)
    own = {n.removeprefix("teacher."): w for n, w in weights.items() if n.startswith("teacher.")}

    def loss(student):
        target = jax.nn.softmax(bind(Transformer(config.teacher.model), own)(batch["tokens"]) / 2)
        log_p = jax.nn.log_softmax(bind(Transformer(config.model), student)(batch["tokens"]) / 2)
        mask = batch["loss_mask"]
        return -(mask * (target * log_p).sum(-1)).sum() / mask.sum()

    with jax.default_matmul_precision("highest"):
        student = {n: w for n, w in weights.items() if not n.startswith("teacher.")}
        return jax.jit(jax.value_and_grad(loss))(student)


def test_loss_and_gradients_are_those_of_the_plain_models(table, expected):
    mesh, (loss, gradients) = {"pipeline": 2, "tensor": 2}, expected
    config = make(table, mesh, microbatches=4, **WITH_EXPERTS)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    state, batch = table.first_state(program, table.weights_with_teacher(config)), to_global(program, fields())
    before = {name: np.asarray(w) for name, w in state.frozen.items()}
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    assert float(sums["loss"] / number) == pytest.approx(float(loss), rel=table.PLAIN_VALUE)
    state = table.check_first_step(program, state, batch, float(loss), gradients)
    assert before.keys() == state.frozen.keys() and all(np.array_equal(before[n], w) for n, w in state.frozen.items())


def with_base(table, mesh, **changes):
    """A config whose teacher is the base of adapters."""
    adapters = {"lora": {"rank": 2, "alpha": 6.0}, "checkpoint": {"init_from": "a run"}}
    return make(table, mesh, **(adapters | changes | {"teacher": {"base": True}}))


def test_the_base_of_adapters_is_a_teacher_without_weights_of_its_own(table):
    """Adapters are not zero, and each stage holds half of the base's layers."""
    config = with_base(table, {"pipeline": 2}, model=TINY | {"block_pattern": ["mlp"]})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    weights, batch = table.weights_of(config), to_global(program, fields())
    own, low_rank = {n: w for n, w in weights.items() if not is_adapter(n)}, [n for n in weights if is_adapter(n)]
    state = table.first_state(program, weights)
    assert state.frozen.keys() == own.keys() and state.params.keys() == {*low_rank}

    def logits(weights):
        return bind(Transformer(config.model), weights)(fields()["tokens"]) / 2

    def loss(trained):
        log_p, mask = jax.nn.log_softmax(logits(table.merged(weights | trained, 3.0))), fields()["loss_mask"]
        return -(mask * (jax.nn.softmax(logits(own)) * log_p).sum(-1)).sum() / mask.sum()

    with jax.default_matmul_precision("highest"):
        total, gradients = jax.jit(jax.value_and_grad(loss))({name: weights[name] for name in low_rank})
    sums, number = program.eval_step(state.weights, state.layer_state, batch)
    assert float(sums["loss"] / number) == pytest.approx(float(total), rel=table.PLAIN_VALUE)
    table.check_first_step(program, state, batch, float(total), gradients)


def test_weights_of_the_base_are_gathered_once_more_and_not_kept_until_the_models_pass(table):
    one = TINY | {"num_layers": 1, "block_pattern": ["mlp"]}
    config = with_base(table, {"fsdp": 2}, model=one, microbatches=1, kernels={"scan_unroll": 1})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    state = program.abstract_state
    text = program.eval_step.lower(state.weights, state.layer_state, program.abstract_batch).compile().as_text()
    assert len(re.findall(r"f32\[24,16\]\S* all-gather\(", text)) == 2


def test_a_teacher_draws_nothing(table):
    """Dropout and jitter of the training that it comes from are no part of the step."""
    drawing = {"dropout": 0.5, "router": {"jitter": 0.3}}
    experts = {"num_experts": 2, "experts_per_token": 1, "expert_ffn_hidden_size": 8, "dropout": 0.2}
    student = TINY | experts | {"num_layers": 1, "router": {"jitter": 0.1, "pre_softmax": True}}
    plain, steps = TEACHER | {"num_layers": 1, "first_dense_layers": 0}, []
    for teacher in (plain, plain | drawing):
        config = make(table, {}, model=student, teacher={"model": teacher}, microbatches=1)
        program = TrainProgram.build(config, build_mesh(check_mesh(config, 1), jax.devices()[:1]))
        steps.append(program.train_step.lower(program.abstract_state, program.abstract_batch).as_text())
    assert steps[0] == steps[1]


BF16 = {"precision": {"compute": "bfloat16"}}
LORA = {"lora": {"rank": 2}, "checkpoint": {"init_from": "x"}}
BAD = {
    "base of nothing": ({"teacher": {"base": True}}, "teacher.base=true needs .*lora.rank=null.*set lora.rank"),
    "base and model": (LORA | {"teacher": {"base": True, "model": TINY}}, "teacher.base=true .*with teacher.model"),
    "base and source": (LORA | {"teacher": {"base": True, "source": "x"}}, "teacher.base=true .*with teacher.source=x"),
    "no reader of the base": (
        LORA | {"teacher": {"base": True}, "objective": {"kind": "next_token", "settings": {}}},
        "reads no teacher, but teacher.base is set.*remove teacher",
    ),
    "base with a bias of the scores": (
        LORA | {"teacher": {"base": True}, "model": TINY | {"position": "relative"}},
        "model.position cannot be combined with teacher.base",
    ),
    "adapters without a teacher": (LORA | {"teacher": {}}, "set teacher.model, or teacher.base=true"),
    "no teacher": ({"teacher": {}}, "objective.kind=distillation reads what a teacher.*set teacher.model"),
    "no reader": ({"objective": {"kind": "next_token", "settings": {}}}, "reads no teacher.*remove teacher"),
    "vocabulary": ({"teacher": {"model": {**TEACHER, "vocab_size": 51}}}, "teacher.model.vocab_size=51, but .*=50"),
    "experts": (
        {"teacher": {"model": {**TEACHER, "experts_per_token": 9}}},
        "^teacher: model.experts_per_token=9 is more than model.num_experts=4",
    ),
    "source alone": (
        {"teacher": {"source": "x"}, "objective": {"kind": "next_token", "settings": {}}},
        "teacher.source=x needs teacher.model",
    ),
    "kernel": (
        {"teacher": {"model": {**TEACHER, "attention_softcap": 5.0}}, "kernels": {"attention": "cudnn"}} | BF16,
        "^teacher: kernels.attention=cudnn .*model.attention_softcap=5.0.*auto",
    ),
    "mesh": (
        {"teacher": {"model": {**TEACHER, "num_heads": 1, "num_kv_heads": 1}}},
        "^teacher: mesh.tensor=2 does not",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_run_is_a_sentence(table, case):
    changes, sentence = BAD[case]
    with pytest.raises(ConfigError, match=sentence):
        make(table, {"tensor": 2}, **changes)


# Settings of a model that a teacher's step would not read.
UNREAD = {
    "mtp_layers": {"mtp_layers": 1},
    "position": {"position": "relative"},
    "prediction_head": {"prediction_head": True},
    "encoder": {"encoder": {"kind": "layers", "num_layers": 1, "sequence_length": 8}, "block_pattern": ["decoder"]},
    "router.expert_bias": {"num_experts": 4, "router": {"expert_bias": True}},
    "vision": {"vision": {"image_token": 1, "num_layers": 1, "hidden_size": 16, "num_heads": 2}},
    "prefix_lm": {"prefix_lm": True},
}


@pytest.mark.parametrize("key", UNREAD)
def test_a_part_of_the_teacher_that_would_not_run_is_refused(table, key):
    with pytest.raises(ConfigError, match=rf"^teacher\.model\.{key} is set.*remove it from teacher\.model"):
        make(table, {}, teacher={"model": TINY | UNREAD[key]})


@pytest.mark.parametrize("heads", [4, 3, 2, 1])
def test_two_devices_of_context_cannot_share_an_odd_number_of_the_teachers_heads(table, heads):
    teacher = TINY | {"num_heads": heads, "num_kv_heads": heads, "head_dim": 8}
    config = make(table, {"context": -1}, teacher={"model": teacher}, communication={"context": "all_to_all"})
    sentence = f"^teacher: communication.context=all_to_all .*mesh.context=2 .*model.num_heads={heads}"
    with pytest.raises(ConfigError, match=sentence) if heads % 2 else nullcontext():
        check_mesh(config, 2)


def test_a_block_of_the_teacher_that_no_axis_may_divide_is_refused_when_the_devices_are_known(table, monkeypatch):
    class Whole(MLP):
        NAME, SUPPORTS = "whole", frozenset()

    monkeypatch.setitem(KINDS, "mine", {"whole": Whole})
    for size, refused in ((2, True), (1, False)):
        config = make(table, {"context": -1}, teacher={"model": TINY | {"block_pattern": ["mine"]}})
        with pytest.raises(ConfigError, match="teacher: mesh.context=2 .*needs context") if refused else nullcontext():
            check_mesh(config, size)


def test_rules_about_the_objective_and_the_mesh_are_the_trained_models(table):
    """The teacher has neither: it may see both sides, and be dense where `mesh.experts_over` divides experts."""
    student = TINY | {"causal": False, "num_experts": 4, "expert_ffn_hidden_size": 16}
    teacher = TINY | {"causal": False}
    make(table, {"data": 2, "experts_over": ("data",)}, model=student, teacher={"model": teacher})


def test_a_run_reads_the_teachers_weights(table, tmp_path, monkeypatch):
    """A checkpoint of the student has none of the teacher, which another run saved. The run does not learn."""
    monkeypatch.chdir(tmp_path)
    wider = {**TINY, "num_layers": 1, "num_heads": 4, "tie_embeddings": True}
    of_teacher = table.make_config(wider)
    weights = table.weights_of(of_teacher)
    description = {"format": 1, "step": 0, "model": describe_model(of_teacher.model)}
    save_weights(Path("teacher"), jax.tree.map(jnp.asarray, weights), {}, description)
    config = make(
        table,
        {"fsdp": 2},
        run={"name": "student", "dir": "student", "steps": 1, "log_interval": 1, "eval_steps": 0},
        model={**TINY, "num_layers": 1},
        microbatches=1,
        teacher={"model": wider, "source": "teacher"},
        data={"kind": "synthetic"},
        logging={"norms_interval": 0},
    )
    trained = QuickTrainer(config, jax.devices()[:2])
    trained.run()
    frozen = trained.state.frozen
    assert frozen.keys() == {f"teacher.{name}" for name in weights}
    for teacher in (True, False):
        shapes = jax.eval_shape(lambda teacher=teacher: trained.program.random_state(teacher=teacher))
        assert shapes.frozen.keys() == (frozen.keys() if teacher else set())
    for name, w in frozen.items():
        found = to_canonical(np.asarray(w), trained.program.placements[name])
        np.testing.assert_array_equal(found, weights[name.removeprefix("teacher.")], err_msg=name)
    assert not [name for name in megajax.load_weights("student") if name.startswith("teacher.")]


def test_a_run_needs_a_source(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = make(table, {}, data={"kind": "synthetic"})
    with pytest.raises(ConfigError, match="teacher.model is set, but teacher.source names no weights"):
        Trainer(config, jax.devices()[:1])


def test_flops_and_memory_count_it(table):
    """Its matmuls forward only; its frozen weights; over fsdp one layer of it, and what is outside its layers."""
    config = make(table, {})
    none = {"teacher": {}, "objective": {"kind": "next_token", "settings": {}}}
    plain = make(table, {}, **none)
    more = flops_per_token(config) - flops_per_token(plain)
    assert more == pytest.approx(flops_per_token(config.of_teacher) / 3)
    programs = [TrainProgram.build(each, build_mesh({}, jax.devices()[:1])) for each in (config, plain)]
    with_teacher, without = (estimate_memory(p.plan.on_gpus()) for p in programs)
    assert with_teacher.parameters - without.parameters == 4 * parameter_count(programs[0].plan.teacher.transformer)
    assert with_teacher.weights == without.weights
    assert with_teacher.activations - without.activations == 4 * (ROWS // 2) * LENGTH * 32
    mesh = build_mesh({"fsdp": 2}, jax.devices()[:2])
    divided, alone = (
        estimate_memory(p.plan.on_gpus())
        for p in (
            TrainProgram.build(each, mesh) for each in (make(table, {"fsdp": 2}), make(table, {"fsdp": 2}, **none))
        )
    )
    attention, experts = 32 * 8 * (4 + 2 + 2 + 4), 4 * 3 * 32 * 16
    layers = 3 * attention + 3 * 32 * 24 + 2 * (experts + 32 * 4)
    assert divided.weights - alone.weights == 4 * layers // 3 + 4 * 128 * 32


@pytest.mark.parametrize("pipeline", [1, 2])
def test_of_a_base_its_pass_and_its_output_are_counted_but_no_weights(table, pipeline):
    def program_of(config):
        return TrainProgram.build(config, build_mesh({"pipeline": pipeline}, jax.devices()[:pipeline]))

    config = with_base(table, {"pipeline": pipeline})
    alone = config.model_copy(update={"teacher": TeacherConfig(), "objective": ObjectiveConfig()})
    with_teacher, without = (estimate_memory(program_of(each).plan.on_gpus()) for each in (config, alone))
    output = 4 * ROWS * LENGTH * TINY["hidden_size"] // (2 if pipeline == 1 else 1)
    assert replace(with_teacher, activations=with_teacher.activations - output) == without
    separate = make(table, {}, teacher={"model": TINY})
    assert flops_per_token(config) - flops_per_token(alone) == flops_per_token(separate.of_teacher) / 3


@pytest.mark.parametrize("microbatches", [2, 4])
def test_all_stages_hold_the_teachers_outputs_of_all_microbatches(table, microbatches):
    config = make(table, {"pipeline": 2}, microbatches=microbatches)
    program = TrainProgram.build(config, build_mesh({"pipeline": 2}, jax.devices()[:2]))
    alone = program.plan.config.model_copy(update={"teacher": config.teacher.model_copy(update={"model": None})})
    plans = [program.plan.on_gpus(), replace(program.plan, config=alone).on_gpus()]
    with_teacher, without = (estimate_memory(plan) for plan in plans)
    assert with_teacher.activations - without.activations == 4 * ROWS * LENGTH * TEACHER["hidden_size"]
