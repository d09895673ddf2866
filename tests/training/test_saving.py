"""Allowed changes between a checkpoint and the run that resumes from it, and their messages."""

import json
import re
import threading
import warnings
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from trainers import QuickTrainer

from megajax.checkpoint import Checkpoints
from megajax.checkpoint.description import SettingDifference, refuse_changes
from megajax.config.checks import check_mesh
from megajax.data.samples import Samples
from megajax.errors import InputError, LostReaderError
from megajax.mesh import build_mesh
from megajax.sources import refuse_not_finite
from megajax.training.batches import batches, to_global
from megajax.training.logs import closing_line, nothing_line
from megajax.training.loop import Trainer
from megajax.training.saving import StateSaver
from megajax.training.step import INITIAL_LOSS_SCALE, TrainProgram

SHORT = ("run.steps=2", "run.eval_steps=0")


def trainer_of(config, devices=1, kind=Trainer):
    return kind(config, devices=jax.devices()[:devices])


@pytest.fixture
def trained(make_config, tmp_path):
    """The overrides of a run whose checkpoint of step 2 is on disk."""
    overrides = [f"run.dir={tmp_path / 'run'}", *SHORT]
    assert trainer_of(make_config(*overrides)).run() == 0
    return overrides


def test_a_run_that_goes_on_in_float16_starts_with_a_fresh_loss_scale(make_config, trained):
    before = trainer_of(make_config(*trained))
    old = replace(before.state, scale_age=before.state.scale_age + 1999)  # it was float16 earlier
    before.saver.save(before.checkpoints, 3, old)
    before.checkpoints.close()
    trainer = trainer_of(make_config(*trained, "precision.compute=float16"))
    for step in (2, 3):
        state = trainer.saver.restore(trainer.checkpoints, step)
        assert (float(state.loss_scale), int(state.scale_age)) == (INITIAL_LOSS_SCALE, 0)
    trainer.checkpoints.close()


def test_a_later_stage_may_change_on_resume(make_config, trained, text):
    later = f"data.stages=[{{from_step: 2, train: {text}}}]"  # has not begun
    trainer = trainer_of(make_config(*trained, "run.steps=3", later))
    trainer.checkpoints.close()
    (begun,) = trainer.saver.description(3)["data"]["stages"]
    assert begun == [2 * trainer.config.batch.global_size, {"from_step": 2, "train": str(text)}]
    smaller = make_config(*trained, "run.steps=4", "batch.global_size=4", later)
    program = TrainProgram.build(smaller, build_mesh(check_mesh(smaller, 1), jax.devices()[:1]))
    with pytest.raises(InputError, match="at which data.stages .* begin: keep the size"):
        StateSaver(program).compare(trainer.saver.description(3, 24), "the checkpoint")
    older = {key: of for key, of in trainer.saver.description(3, 24).items() if key not in ("lora", "objective")}
    assert trainer.saver.compare(older, "a checkpoint of before these keys")[1] == []


def refusal(config) -> tuple[str, set[str]]:
    """The error of a resume: its sentence, and its lines of changed settings."""
    with pytest.raises(InputError) as caught:
        trainer_of(config)
    sentence, *lines = str(caught.value).splitlines()
    assert "was saved with other settings: restore them, " in sentence and "choose another run.dir" in sentence
    return sentence, {line.strip() for line in lines}


def test_changes_that_matter_are_refused_all_at_once_unless_they_are_named(make_config, trained, text, capsys):
    changes = ("data.order=sequential", "run.seed=7", "model.norm_epsilon=0.001", "batch.sequence_length=32")
    lines = {
        "data.order=shuffled, but this run has sequential",
        "run.seed=1234, but this run has 7",
        "model.norm_epsilon=1.0e-05, but this run has 0.001",
        "batch.sequence_length=16, but this run has 32",
    }
    sentence, found = refusal(make_config(*trained, *changes))
    assert found == lines and sentence.endswith(", or name those that are meant in checkpoint.allow_changes.")
    _, found = refusal(make_config(*trained, *changes, "checkpoint.allow_changes=[model, data, batch.sequence_length]"))
    assert found == {"run.seed=1234, but this run has 7"}
    names = "checkpoint.allow_changes=[model.norm_epsilon, data, batch.sequence_length, run.seed]"
    trainer = trainer_of(make_config(*trained, *changes, names, "run.steps=3"), kind=QuickTrainer)
    capsys.readouterr()
    assert trainer.run() == 0
    start = "let through by checkpoint.allow_changes: "
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(start)]
    # 2 steps of 8 samples
    length, tokens = "batch.sequence_length=16, but this run has 32", f"is {2 * 8 * 32} and not {2 * 8 * 16}"
    counted = f"{length}; it goes on at sample 16, so its count of tokens, also for batch.schedule, {tokens}"
    assert {line.removeprefix(start) for line in printed} == lines - {length} | {counted}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer_of(make_config(*trained, *changes, "run.steps=3"))  # the new checkpoint has the new settings


def test_another_run_may_start_from_the_weights_with_a_change_that_is_named(make_config, trained, tmp_path):
    overrides = (*SHORT, f"run.dir={tmp_path / 'longer'}", f"checkpoint.init_from={tmp_path / 'run'}")
    with pytest.raises(InputError) as caught:
        trainer_of(make_config(*overrides, "model.rope_theta=500.0"))
    sentence, line = str(caught.value).splitlines()
    assert line == "  model.rope_theta=10000.0, but this run has 500.0"
    assert sentence.endswith(", or name those that are meant in checkpoint.allow_changes.")
    named = make_config(*overrides, "model.rope_theta=500.0", "checkpoint.allow_changes=[model.rope_theta]")
    with pytest.warns(UserWarning, match=r"let through by checkpoint.allow_changes: model.rope_theta=10000.0, but"):
        weights = trainer_of(named).state.params
    for name, weight in trainer_of(make_config(*trained)).state.params.items():
        np.testing.assert_array_equal(weights[name], weight)


def test_a_change_that_gives_the_state_other_arrays_is_refused_though_it_is_named(make_config, trained):
    named = "checkpoint.allow_changes=[model, optimizer, data]"
    sentence, lines = refusal(make_config(*trained, "model.num_layers=3", "optimizer.kind=lion", named))
    assert sentence.endswith(": restore them, or choose another run.dir.")
    other = "checkpoint.allow_changes can't let it through"
    assert lines == {
        f"model.num_layers=1, but this run has 3 ({other}: the model's arrays have other shapes)",
        f"optimizer.kind=adamw, but this run has lion ({other}: the optimizer has other moments)",
    }


def test_of_two_lists_of_files_only_the_difference_is_named():
    a, b, c = (["a.jsonl", 7], ["b.jsonl", 8], ["c.jsonl", 9])
    for saved, mine, shown in (
        ([a, c], [a, b], "[[c.jsonl, 9]], but this run has [[b.jsonl, 8]]"),
        ([a], [b, a], "[], but this run has [[b.jsonl, 8]]"),
        ([a, b], [b, a], "[[a.jsonl, 7], [b.jsonl, 8]], but this run has [[b.jsonl, 8], [a.jsonl, 7]]"),
    ):
        assert str(SettingDifference("data.train.files", saved, mine)) == f"files of data.train={shown}"


@pytest.mark.smoke
def test_sgd_gets_and_loses_no_moments_on_resume(make_config):
    """Its momentum has an array of the weights' shapes; without it there is none."""
    for saved, mine in ((0.9, 0.0), (0.0, 0.9)):
        own = (f"optimizer.beta1={mine}", "optimizer.kind=sgd", "checkpoint.allow_changes=[optimizer]")
        with pytest.raises(InputError, match="optimizer.beta1=.*can't let it through"):
            refuse_changes([SettingDifference("optimizer.beta1", saved, mine)], make_config(*own), "the checkpoint")


def test_padded_adapters_are_saved_and_read_without_their_base(make_config, tmp_path):
    """A hidden size of 36 is padded over eight devices."""
    shape = ("model.block_pattern=null", "model.hidden_size=36", "model.num_heads=2", "mesh.fsdp=8")
    config = make_config(*shape, "lora.rank=2", "lora.targets=[query]", "checkpoint.init_from=base")
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 8), jax.devices()[:8]))
    state, saver = program.random_state(), StateSaver(program)
    checkpoints = Checkpoints(tmp_path, keep=1, keep_every=None)
    saver.save(checkpoints, 3, state)
    outcome = checkpoints.outcome(wait=True)
    assert outcome is not None and not outcome.error
    found = saver.restore(checkpoints, 3)
    checkpoints.close()
    assert state.frozen and not found.frozen and found.params.keys() == state.params.keys()
    for name, array in found.params.items():
        assert array.sharding == state.params[name].sharding
        np.testing.assert_array_equal(array, state.params[name])


@pytest.mark.parametrize("bad", ["head", "moe.router.bias", "fp8.mlp.up"])
def test_first_weights_that_are_not_finite_are_named_also_in_the_state_of_layers(bad):
    arrays = {name: np.ones(3, np.float32) for name in ("head", "moe.router.bias", "fp8.mlp.up")}

    def refuse():
        state = {kind: {name: arrays[f"{kind}.{name}"]} for kind, name in (("moe", "router.bias"), ("fp8", "mlp.up"))}
        refuse_not_finite(({"head": arrays["head"]}, state), "KEY=run")

    refuse()
    for value in (np.nan, np.inf):
        arrays[bad] = np.float32([1, value, 1])
        with pytest.raises(InputError, match=f"KEY=run: {re.escape(bad)} has NaN or Inf"):
            refuse()


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.9, "0:00"), (59, "0:59"), (61, "1:01"), (3599, "59:59"), (3661, "1:01:01"), (90_000, "25:00:00")],
)
def test_the_last_line_has_the_duration(make_config, seconds, shown):
    assert f"done: at step 2 after {shown}, written to" in closing_line(make_config(), 2, 16, seconds)


@pytest.mark.parametrize(
    ("settings", "advised", "works", "fails"),
    [
        ([], "raise run.steps", ["run.steps=5"], None),
        (
            ["data.order=megatron", "data.train_samples=40"],
            "raise run.steps by at most 3,",
            ["run.steps=5"],
            ["run.steps=6", "data.train_samples=48"],
        ),
        (
            ["data.order=megatron"],
            "raise run.steps with checkpoint.allow_changes=[data.train_samples] (",
            ["run.steps=5", "checkpoint.allow_changes=[data.train_samples]"],
            ["run.steps=5"],
        ),
        (
            ["data.order=megatron", "data.train_samples=16"],
            "raise run.steps and data.train_samples with checkpoint.allow_changes=[data.train_samples] (",
            ["run.steps=5", "data.train_samples=40", "checkpoint.allow_changes=[data.train_samples]"],
            ["run.steps=5", "data.train_samples=40"],
        ),
    ],
)
def test_the_last_line_says_how_to_train_longer(make_config, tmp_path, settings, advised, works, fails):
    settings = [*settings, f"run.dir={tmp_path / 'run'}", "run.eval_steps=0"]
    trainer = trainer_of(make_config(*settings, "run.steps=2"))
    trainer.step = 2
    trainer.save()
    trainer.close()
    for line in (closing_line(trainer.config, 2, 16, 1.0), nothing_line(trainer.config, 2, 16)):
        assert f"; to train longer, {advised}" in line
    if fails:
        with pytest.raises(
            InputError, match=r"checkpoint\.allow_changes.*\n.*data\.train_samples=\d+, but .* if named"
        ):
            trainer_of(make_config(*settings, *fails))
    resumed = trainer_of(make_config(*settings, *works))
    assert (resumed.step, resumed.config.run.steps) == (2, 5)
    resumed.next_batch()


def test_another_batch_is_refused_where_it_changes_the_order_of_the_data(make_config, text, tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", "run.eval_steps=0", "data.order=megatron"]
    trainer = trainer_of(make_config(*overrides, "run.steps=4"))
    trainer.step = 2
    trainer.save()
    trainer.close()

    smaller, larger = ([*overrides, f"batch.global_size={size}"] for size in (4, 16))
    keep, write = ": keep the size", ": write the change as batch.schedule, or keep the size"
    with pytest.raises(InputError, match="32 there and 16 here: set data.train_samples=32, or keep the size"):
        trainer_of(make_config(*smaller, "run.steps=4"))
    with pytest.raises(InputError, match=f"32 there and 64 here{write}"):
        trainer_of(make_config(*larger, "run.steps=4"))
    resumed = trainer_of(make_config(*smaller, "run.steps=4", "data.train_samples=32"))
    assert [resumed.sizes.samples_before(step) for step in (2, 4)] == [16, 24]
    with pytest.raises(InputError, match="32 .* is less than the 40 samples .* up to run.steps=8 .*: lower run.steps"):
        trainer_of(make_config(*smaller, "run.steps=8", "data.train_samples=32"))
    with pytest.raises(InputError, match="data.train_samples=32, but this run has 40"):
        trainer_of(make_config(*overrides, "run.steps=5"))  # a longer run has another order too
    named = "checkpoint.allow_changes=[data]"
    resumed = trainer_of(make_config(*smaller, "run.steps=4", named, "data.train_samples=24"))
    assert resumed.sizes.samples_before(4) == 24
    stages = (named, "data.order=shuffled", f"data.stages=[{{from_step: 3, train: {text}}}]")
    for batch, cure in ((smaller, keep), (larger, write)):
        with pytest.raises(InputError, match=f"at which data.stages .* begin{cure}"):
            trainer_of(make_config(*batch, "run.steps=4", *stages))
    unweighted = f"data.train=[{text}, {text}]"
    with pytest.raises(InputError, match=f"data.train .* have no weights, so each has one epoch{keep}"):
        trainer_of(make_config(*smaller, "run.steps=4", unweighted, named))
    synthetic = trainer_of(make_config(*smaller, "run.steps=4", "data.kind=synthetic", *stages[::2]))
    assert synthetic.sizes.samples_before(4) == 24


def test_other_files_of_a_text_are_other_data(make_config, tmp_path, monkeypatch):
    def resumed():
        return trainer_of(make_config(*overrides, "data.train='*.jsonl'"))

    monkeypatch.chdir(tmp_path)

    overrides = [f"run.dir={tmp_path / 'run'}", *SHORT, "data.kind=text", "data.tokenizer=byte", "model.vocab_size=300"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 100}))
    trainer = resumed()
    trainer.step = 1
    trainer.save()
    trainer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed()
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "b" * 100}))
    (size,) = {(tmp_path / f"{name}.jsonl").stat().st_size for name in "ab"}
    with pytest.raises(InputError, match=rf"files of data.train=\[\], but this run has \[\[b.jsonl, {size}\]\]$"):
        resumed()
    overrides.append("checkpoint.allow_changes=[data.train]")
    assert resumed().step == 1


def test_momentum_that_is_not_in_the_checkpoint_is_refused_in_a_sentence(make_config, tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", *SHORT, "optimizer.kind=sgd"]
    assert trainer_of(make_config(*overrides, "optimizer.beta1=0.0"), kind=QuickTrainer).run() == 0
    with pytest.raises(InputError, match="optimizer.beta1=zero, but this run has above zero"):
        trainer_of(make_config(*overrides, "optimizer.beta1=0.9"))


def test_a_token_outside_the_vocabulary_far_into_the_data_is_refused(make_config, tmp_path):
    trainer = trainer_of(make_config(f"run.dir={tmp_path / 'run'}", *SHORT))

    class Text(Samples):
        """Sample 40 on holds an id that the model does not have."""

        def __getitem__(self, index):
            return np.full(17, 125 if index >= 40 else 3, np.int32)

    earlier, source = threading.enumerate(), batches(trainer.program, "train", Text())
    for _ in range(5):
        next(source)
    with pytest.raises(InputError, match="data.train holds token id 125, but model.vocab_size=125") as caught:
        next(source)
    for reader in (thread for thread in threading.enumerate() if thread not in earlier):
        reader.join(9)
        assert not reader.is_alive(), f"nothing is read ahead while a notebook holds {caught.value}"
    trainer.checkpoints.close()


@pytest.mark.parametrize("code", [-9, 1])
def test_a_reader_that_was_ended_is_told_with_its_status_whatever_it_is(make_config, code):
    """-9: killed, as by a host without memory. In grain's words, as test_monitoring.py hears them from grain."""
    program, _ = program_and_fields(make_config)

    class Text(Samples):
        def __getitem__(self, index):
            raise RuntimeError(f"Worker process was terminated unexpectedly with exit code {code}")

    with pytest.raises(LostReaderError, match=f"[(]exit code {code}[)]"):
        next(batches(program, "train", Text()))


def without(name):
    return lambda fields: {each: field for each, field in fields.items() if each != name}


def put(name, value):
    def changed(fields):
        field = fields[name].copy()
        field[1, 2] = value
        return fields | {name: field}

    return changed


WRONG = {  # of the fields of a batch
    "no positions": (without("positions"), "the batch has no positions: give tokens, positions, targets and loss_mask"),
    "no targets": (without("targets"), "the batch has no targets: give"),
    "another field": (
        lambda fields: fields | {"labels": fields["targets"]},
        "the batch has labels: .* no other fields",
    ),
    "a row": (
        lambda fields: fields | {"tokens": fields["tokens"][1:]},
        r"tokens of the shape \[7, 16\], .* give \[8, 16\]",
    ),
    "no dictionary": (lambda fields: None, "the batch is of the type NoneType: give a dictionary"),
    "a list": (lambda fields: [*fields.values()], "the batch is of the type list: give a dictionary"),
    "names": (lambda fields: dict(enumerate(fields.values())), "the batch has 0: .* no other fields"),
    "unequal rows": (lambda fields: fields | {"tokens": [[1], [1, 2]]}, "rows of unequal lengths in tokens: pad"),
    "text": (lambda fields: fields | {"tokens": np.full((8, 16), "a")}, "tokens of the type <U1: give .* numbers"),
    "padding": (
        lambda fields: fields | {"is_real": np.ones((8, 15))},
        r"is_real of the shape \[8, 15\].*give \[8, 16\]",
    ),
    "a token": (put("tokens", 125), "holds token id 125, but model.vocab_size=125: set model.vocab_size=126"),
    "a target": (put("targets", 200), "holds token id 200, but model.vocab_size=125: set model.vocab_size=201"),
    "a negative": (put("targets", -100), "holds -100 in targets: give 0 or more; loss_mask=0 leaves a target out"),
    "a position": (put("positions", -1), "holds -1 in positions"),
    "a mask": (put("loss_mask", -1), "holds -1.0 in loss_mask: give 0 or more"),
    "no number": (put("loss_mask", np.nan), "holds nan in loss_mask: give 0 or more"),
    "a fraction": (
        lambda fields: fields | {"tokens": fields["tokens"] + 0.5},
        "holds numbers with a fraction in tokens: give integers",
    ),
}


def program_and_fields(make_config, *overrides):
    config = make_config(*SHORT, "batch.global_size=8", "batch.sequence_length=16", *overrides)
    program = TrainProgram.build(config, build_mesh({}, jax.devices()[:1]))
    fields = {name: np.ones((8, 16), np.int64) for name in ("tokens", "targets", "positions")}
    return program, fields | {"loss_mask": np.ones((8, 16))}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_batch_of_your_own_is_checked(make_config, wrong):
    change, sentence = WRONG[wrong]
    program, fields = program_and_fields(make_config, "model.vocab_size=125")
    to_global(program, fields)
    with pytest.raises(InputError, match=sentence):
        to_global(program, change(fields))


def test_a_learned_position_beyond_the_table_is_refused(make_config):
    program, fields = program_and_fields(make_config, "model.position=learned", "model.max_positions=20")
    fields["positions"][3, 4] = 20
    with pytest.raises(InputError, match="holds position 20, but model.max_positions=20: set model.max_positions=21"):
        to_global(program, fields)


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_whose_segment_ids_do_not_fit_the_config_is_refused(make_config, tmp_path, packed):
    config = make_config(f"run.dir={tmp_path / 'run'}", *SHORT, f"data.reset_attention={str(packed).lower()}")
    trainer = trainer_of(config)
    batch = trainer.next_batch() | {"segment_ids": trainer.next_batch()["positions"]}
    if packed:
        del batch["segment_ids"]
    program, state = trainer.program, trainer.program.abstract_state
    evaluate = partial(program.eval_step.eval_shape, state.weights, state.layer_state)
    for step in (trainer.train_step, evaluate):
        with pytest.raises(ValueError, match="segment_ids and data.reset_attention=" + str(packed).lower()):
            step(batch)
    trainer.checkpoints.close()


def test_rows_become_the_global_batch_in_their_order(make_config, tmp_path):
    config = make_config(
        f"run.dir={tmp_path / 'run'}", *SHORT, "batch.num_microbatches=2", "mesh.data=4", "model.vocab_size=800"
    )
    trainer = trainer_of(config, devices=4)
    program = trainer.program
    rows = np.arange(8)[:, None] * 100 + np.arange(16)
    made = to_global(program, dict.fromkeys(("tokens", "targets", "loss_mask", "positions"), rows))
    assert np.array_equal(made["tokens"], rows.reshape(2, 4, 16))
    trainer.checkpoints.close()
