"""Sequence classifiers of transformers: their scores, folders that are read and written, and what is none."""

import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megajax
from megajax.config import ModelConfig
from megajax.config.extensions import import_extensions
from megajax.errors import InputError
from megajax.hf.__main__ import main
from megajax.hf.classifiers import ARCHITECTURES, with_own_head
from megajax.hf.convert import FAMILIES, check_export, read_model

FILES = Path(__file__).parents[1] / "data_files"
NEAR = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def example():
    import_extensions(["docs/examples/value_head.py"])


@pytest.fixture
def folder(tmp_path):
    with zipfile.ZipFile(FILES / "classifier.zip") as archive:
        archive.extractall(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture(scope="module")
def stored():
    return np.load(FILES / "classifier.npz")


def trainer_of(folder: Path, tokens: np.ndarray, labels, **sections) -> megajax.Trainer:
    """A run from a folder on `tokens`, whose last ones have the `labels`."""
    rows, length = tokens.shape
    last = np.zeros((rows, length))
    last[:, -1] = 1
    columns = {"tokens": tokens, "targets": np.zeros_like(tokens), "loss_mask": last}
    columns |= {"positions": np.broadcast_to(np.arange(length), tokens.shape)}
    columns |= {"labels": np.broadcast_to(np.asarray(labels)[:, None], tokens.shape)}
    values = {
        "run": {"steps": 1, "eval_steps": 0, "dir": str(folder.parent / "run")},
        "model": read_model(folder) | {"vocab_multiple": 64},
        "objective": {"kind": "value_head", "settings": {"outputs": 3}},
        "precision": {"compute": "float32"},
        "batch": {"global_size": rows, "sequence_length": length},
        "data": {"kind": "synthetic"},
        "checkpoint": {"init_from": str(folder)},
        "logging": {"tensorboard": False},
    }
    config = megajax.Config.model_validate(values | sections)
    one = jax.devices()[:1]
    return megajax.Trainer(config, devices=one, batch_of=lambda n: {k: v[n % rows] for k, v in columns.items()})


def test_its_loss_and_its_folder_are_those_of_transformers(folder, stored, tmp_path):
    """The head comes from the folder and goes back, with the names of the classes; the embedding is tied to none."""
    labels = np.array([2, 0, 1, 1])
    trainer = trainer_of(folder, stored["tokens"], labels)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(stored["logits"])), labels[:, None], axis=1)
    trainer.save()
    trainer.checkpoints.wait()
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    sums, count = trainer.program.eval_step(trainer.state.weights, {}, trainer.next_batch())
    np.testing.assert_allclose(float(sums["loss"] / count), -chosen.mean(), **NEAR)
    theirs, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    beside_adapters = {
        "lora": {"rank": 2, "targets": ["query"]},
        "run": {"steps": 1, "eval_steps": 0, "dir": str(tmp_path / "lora")},
    }
    adapted = trainer_of(folder, stored["tokens"], labels, **beside_adapters).state.params
    np.testing.assert_array_equal(adapted["objective.score"].T, theirs["score.weight"])
    given, written = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    for key in ("architectures", "id2label", "label2id", "model_type", "pad_token_id"):
        assert written[key] == given[key], key


def test_a_classifier_of_other_classes_is_a_sentence_and_of_none_has_new_ones(folder, stored):
    settings = {"objective": {"kind": "value_head", "settings": {"outputs": 2}}}
    with pytest.raises(InputError, match=r"score.weight has the shape \[3, 16\], but by .* it has \[2, 16\]"):
        trainer_of(folder, stored["tokens"], [0] * 4, **settings).next_batch()
    tensors = load_file(folder / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, folder / "model.safetensors")
    trainer = trainer_of(folder, stored["tokens"], [0] * 4, **settings)
    assert np.asarray(trainer.state.params["objective.score"]).shape == (16, 2)
    np.testing.assert_array_equal(np.asarray(trainer.state.params["final_norm"]), tensors["model.norm.weight"])


def test_a_head_that_no_classifier_has_is_a_sentence_and_not_left_out(folder):
    """With a tied embedding the folder would be a whole language model without it."""
    with pytest.raises(InputError, match="objective.other, objective.score in place of a head.*megajax.load_weights"):
        with_own_head([], ["objective.score", "objective.other"], "qwen2")
    with pytest.raises(InputError, match="no classifier of model_type=mamba2"):
        with_own_head([], ["objective.score"], "mamba2")
    assert with_own_head([], ["head"], "mamba2") == []
    model = ModelConfig(**read_model(folder))  # at the start of a run that exports
    check_export(model, ["objective.score"], "none")
    with pytest.raises(InputError, match="has objective.other in place of a head"):
        check_export(model, ["objective.other"], "none")
    assert ARCHITECTURES.keys() <= FAMILIES.keys()


# Of transformers 5.24, the classes of families here whose only new parameter is `score`
CLASSES = """GPT2 Llama Mistral Mixtral Qwen2 Qwen3 Qwen3Moe Qwen3Next Qwen3_5Text DeepseekV2 DeepseekV3 GptOss Gemma2
    Gemma3Text Phi3 Olmo2 Nemotron SmolLM3"""


def test_the_classifiers_are_those_of_transformers():
    expected = {name.replace("_", "").lower(): f"{name}ForSequenceClassification" for name in CLASSES.split()}
    assert {model_type.replace("_", ""): name for model_type, name in ARCHITECTURES.items()} == expected
