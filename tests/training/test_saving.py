"""Allowed changes between a checkpoint and the run that resumes from it, and their messages."""

import json
import warnings

import jax
import numpy as np
import pytest

from megajax.data.samples import Samples
from megajax.errors import InputError
from megajax.training.batches import batches, to_global
from megajax.training.loop import Trainer
from megajax.training.step import INITIAL_LOSS_SCALE

SHORT = ("run.steps=2", "run.eval_steps=0")


def trainer_of(config, devices=1):
    return Trainer(config, devices=jax.devices()[:devices])


@pytest.fixture
def trained(make_config, tmp_path):
    """The overrides of a run whose checkpoint of step 2 is on disk."""
    overrides = [f"run.dir={tmp_path / 'run'}", *SHORT]
    assert trainer_of(make_config(*overrides)).run() == 0
    return overrides


def test_a_run_that_goes_on_in_float16_starts_with_a_fresh_loss_scale(make_config, trained):
    trainer = trainer_of(make_config(*trained, "precision.compute=float16"))
    assert trainer.step == 2
    assert float(trainer.state.loss_scale) == INITIAL_LOSS_SCALE
    trainer.checkpoints.close()


def test_other_data_on_resume_is_said_and_the_same_is_not(make_config, trained, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        later = f"data.stages=[{{from_step: 2, train: {text}}}]"  # has not begun
        trainer = trainer_of(make_config(*trained, "run.steps=3", later))
    trainer.checkpoints.close()
    (begun,) = trainer.saver.description(3)["data"]["stages"]
    assert begun == [2 * trainer.config.batch.global_size, {"from_step": 2, "train": str(text)}]
    with pytest.warns(UserWarning, match="other data, or with another order"):
        trainer_of(make_config(*trained, "data.order=sequential")).checkpoints.close()


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
    stages = ("data.order=shuffled", f"data.stages=[{{from_step: 3, train: {text}}}]")
    for batch, cure in ((smaller, keep), (larger, write)):
        with pytest.raises(InputError, match=f"at which data.stages .* begin{cure}"):
            trainer_of(make_config(*batch, "run.steps=4", *stages))
    unweighted = f"data.train=[{text}, {text}]"
    with pytest.raises(InputError, match=f"data.train .* have no weights, so each has one epoch{keep}"):
        trainer_of(make_config(*smaller, "run.steps=4", unweighted))
    synthetic = trainer_of(make_config(*smaller, "run.steps=4", "data.kind=synthetic", *stages[1:]))
    assert synthetic.sizes.samples_before(4) == 24


def test_other_files_of_a_text_are_other_data(make_config, tmp_path):
    def resumed():
        return trainer_of(make_config(*overrides, f"data.train={tmp_path}/*.jsonl"))

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
    with pytest.warns(UserWarning, match="was saved by a run with other data"):
        resumed()


def test_momentum_that_is_not_in_the_checkpoint_is_refused_in_a_sentence(make_config, tmp_path):
    overrides = [f"run.dir={tmp_path / 'run'}", *SHORT, "optimizer.kind=sgd"]
    assert trainer_of(make_config(*overrides, "optimizer.beta1=0.0")).run() == 0
    with pytest.raises(InputError, match="optimizer.beta1=zero, but this run has above zero: set optimizer.beta1=zero"):
        trainer_of(make_config(*overrides, "optimizer.beta1=0.9"))


def test_a_token_outside_the_vocabulary_far_into_the_data_is_refused(make_config, tmp_path):
    trainer = trainer_of(make_config(f"run.dir={tmp_path / 'run'}", *SHORT))

    class Text(Samples):
        """Sample 40 on holds an id that the model does not have."""

        def __getitem__(self, index):
            return np.full(17, 125 if index >= 40 else 3, np.int32)

    source = batches(trainer.program, "train", Text())
    for _ in range(5):
        next(source)
    with pytest.raises(InputError, match="data.train holds token id 125, but model.vocab_size=125"):
        next(source)
    trainer.checkpoints.close()


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_whose_segment_ids_do_not_fit_the_config_is_refused(make_config, tmp_path, packed):
    config = make_config(f"run.dir={tmp_path / 'run'}", *SHORT, f"data.reset_attention={str(packed).lower()}")
    trainer = trainer_of(config)
    batch = trainer.next_batch() | {"segment_ids": trainer.next_batch()["positions"]}
    if packed:
        del batch["segment_ids"]
    with pytest.raises(ValueError, match="segment_ids and data.reset_attention=" + str(packed).lower()):
        trainer.train_step(batch)
    trainer.checkpoints.close()


def test_rows_become_the_global_batch_in_their_order(make_config, tmp_path):
    config = make_config(f"run.dir={tmp_path / 'run'}", *SHORT, "batch.num_microbatches=2", "mesh.data=4")
    trainer = trainer_of(config, devices=4)
    program = trainer.program
    rows = np.arange(8)[:, None] * 100 + np.arange(16)
    made = to_global(program, dict.fromkeys(("tokens", "targets", "loss_mask", "positions"), rows))
    assert np.array_equal(made["tokens"], rows.reshape(2, 4, 16))
    trainer.checkpoints.close()
