"""Lengths that are passes over data: `run.epochs`, and evaluations of whole sets, against counts and losses by hand."""

import json
import math
from collections.abc import Iterable

import jax
import numpy as np
import plain_model
import pytest

from megajax.config import load_config
from megajax.config.load import with_steps
from megajax.data.describe import describe_data
from megajax.data.epochs import resolve_epochs
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.loader import open_datasets
from megajax.errors import ConfigError, InputError
from megajax.files import CONFIG
from megajax.training.loop import Trainer

S, ROWS = 16, 8  # of the tiny model's batch


def write_documents(path, documents: list[list[int]]) -> str:
    with IndexedWriter(str(path), np.uint16) as writer:
        for document in documents:
            writer.add_document(document)
    return str(path)


def tokens_of(prefix: str) -> np.ndarray:
    return np.asarray(IndexedDataset(prefix).tokens[:])


@pytest.fixture
def with_epochs(make_config):
    """(epochs, overrides...) → a config with them instead of the tiny model's steps."""
    return lambda epochs, *overrides: make_config("run.steps=null", f"run.epochs={epochs}", *overrides)


def steps_of(config) -> int:
    return resolve_epochs(config, open_datasets(config)["train"]).run.steps


def test_a_run_of_epochs_is_the_run_of_their_steps_bit_for_bit_and_is_resumed_and_prolonged(
    tmp_path, make_config, with_epochs, text, read_metrics, capsys
):
    steps = math.ceil(math.ceil(0.2 * len(tokens_of(text)) / S) / ROWS)
    assert steps > 4

    whole_dir, parts_dir = ((f"run.dir={tmp_path / name}", "schedule.kind=cosine") for name in ("whole", "parts"))

    def run(config):
        trainer = Trainer(config, jax.devices()[:1])
        assert trainer.run() == 0
        return trainer

    whole = run(make_config(*whole_dir, f"run.steps={steps}"))
    assert run(with_epochs(0.1, *parts_dir, f"schedule.decay_steps={steps}")).step < steps
    capsys.readouterr()
    parts = run(with_epochs(0.2, *parts_dir))  # resumes
    assert f"{steps} steps = 0.2 epochs of data.train" in capsys.readouterr().out
    assert parts.config.run.steps == parts.config.schedule.decay_steps == parts.step == steps
    numbers = ("loss", "grad_norm", "learning_rate", "tokens")
    assert read_metrics(tmp_path / "parts", *numbers) == read_metrics(tmp_path / "whole", *numbers)
    for name, weight in whole.state.params.items():
        np.testing.assert_array_equal(weight, parts.state.params[name], err_msg=name)

    record = tmp_path / "parts" / CONFIG
    recorded = load_config(record, run_dir=record.parent).run
    assert (recorded.epochs, recorded.steps) == (0.2, steps)
    with pytest.raises(ConfigError, match=rf"run.epochs=0.2 and run.steps={steps} .*: remove one"):
        load_config(record)
    capsys.readouterr()
    run(with_epochs(0.2, *parts_dir))
    assert "nothing to do" in (out := capsys.readouterr().out) and "raise run.epochs" in out
    with pytest.raises(InputError, match=r"another size of the batch, so run.epochs=0.3 .*batch.schedule"):
        Trainer(with_epochs(0.3, *parts_dir, "batch.global_size=4"), jax.devices()[:1])


def test_epochs_are_counted_in_samples_of_all_sources(tmp_path, with_epochs):
    """Two passes over 100 + 45 tokens in samples of 16 are 18.125, so 19 samples and 10 steps of 2."""
    prefixes = [write_documents(tmp_path / str(size), [[1] * (size - 5), [2] * 5]) for size in (100, 45)]
    both = (f"data.train=[{', '.join(prefixes)}]", "batch.global_size=2")
    assert steps_of(with_epochs(2, *both)) == 10
    ramp = ("batch.schedule={0: 1, 64: 2}", "batch.num_microbatches=2")  # 4 steps of one sequence, then 15 samples in 8
    assert steps_of(with_epochs(2, *both, *ramp)) == 12
    one = (f"data.train={prefixes[0]}", "batch.global_size=1")
    assert [steps_of(with_epochs(epochs, *one)) for epochs in (0.16, 0.48, 0.49)] == [1, 3, 4]  # 0.48 is rounded up
    packed = (
        *one,
        "data.packing=first_fit",
        "data.reset_attention=true",
    )  # their rows have the token after the last too
    assert steps_of(with_epochs(1.7, *packed)) == 10
    with pytest.raises(InputError, match=r"run.epochs=1e\+12 .* steps"):
        steps_of(with_epochs(1.0e12, *both))


def test_epochs_of_chats_are_counted_in_sequences(tmp_path, with_epochs):
    config = with_epochs(3, *chats(tmp_path / "chats.jsonl", "train"), "batch.global_size=4")
    assert steps_of(config) == math.ceil(3 * len(CHATS) / 4)


def test_what_depends_on_the_number_of_steps_is_checked_once_the_data_is_open(with_epochs):
    config = with_epochs(1, "schedule.kind=cosine", "schedule.warmup_steps=30")
    assert yaml_run(config) == {"epochs": 1.0, "steps": None}
    with pytest.warns(UserWarning, match=r"warmup_steps=30 is more than run.steps=20") as warned:
        resolved = with_steps(config, 20)
    assert len(warned) == 1
    assert resolved.schedule.decay_steps == 31
    assert resolved.where("run.steps") == config.where("run.epochs")
    assert resolved.where("schedule.kind") == "the command line: schedule.kind=cosine"
    wsd = with_steps(with_epochs(1, "schedule.kind=wsd"), 20).schedule
    assert (wsd.decay_steps, wsd.wsd_decay_steps) == (20, 2)
    for steps in (20, 10_000):  # fewer than the data has, and more
        other = resolved.model_copy(update={"run": resolved.run.model_copy(update={"steps": steps})})
        with pytest.raises(InputError, match=f"run.epochs=1 .* is .* steps, but run.steps={steps}"):
            steps_of(other)


def yaml_run(config) -> dict:
    run = config.model_dump(mode="json")["run"]
    return {key: run[key] for key in ("epochs", "steps")}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ("data.kind=synthetic", "data.kind"),
        ("data.order=megatron", "data.order"),
        ("data.train='0.3 a 0.7 b'", "weights of its 2 sources"),
        ("data.stages=[{from_step: 1, train: a}]", "data.stages"),
    ],
)
def test_data_without_a_number_of_passes_is_refused(with_epochs, other, named):
    with pytest.raises(ConfigError, match=rf"run.epochs=2.*{named}.*: set run.steps instead"):
        with_epochs(2, other)


# Evaluations of whole sets

CHATS = [("ab" * n, "xyz"[: 1 + n % 3] * (1 + n % 2)) for n in range(7)]  # 2 to 19 bytes


def chats(path, split: str) -> tuple[str, ...]:
    """Overrides for the chats as data of a split, one in a sequence."""
    path.write_text("".join(json.dumps({"prompt": a, "completion": b}) + "\n" for a, b in CHATS))
    model = ("model.vocab_size=257", "data.tokenizer=byte", "data.kind=chat", "data.packing=none")
    return (*model, f"data.train={path}", f"data.{split}={path}")


def plain_loss(trainer, samples: Iterable[tuple[list[int], list[bool]]]) -> float:
    """The mean of NumPy's loss per counted token; samples are (tokens, whether each counts), of any length."""
    options, total, count = trainer.config.model.model_dump(), 0.0, 0
    weights = {name: np.asarray(weight, np.float64) for name, weight in trainer.state.params.items()}
    for tokens, counted in samples:
        row, mask = np.array(tokens)[None, None], np.array(counted)[None, None, 1:]
        positions = np.arange(row.shape[2] - 1)[None, None]
        batch = {"tokens": row[..., :-1], "targets": row[..., 1:], "loss_mask": mask, "positions": positions}
        loss = plain_model.step(np, options, weights, batch, plain_model.NoDraws())[1]["loss"]
        total, count = total + loss * mask.sum(), count + mask.sum()
    return total / count


def stream(tokens: np.ndarray) -> list[tuple[list[int], list[bool]]]:
    """All tokens in samples of S+1, of which the last is shorter."""
    cut = [tokens[first : first + S + 1].tolist() for first in range(0, len(tokens) - 1, S)]
    return [(sample, [True] * len(sample)) for sample in cut]


MESHES = [{}, {"data": 2, "pipeline": 2}]
# Texts and chats, one in a sequence, share a program of each mesh.
EVALUATED = ("model.block_pattern=null", "model.num_layers=2", "model.vocab_size=257", "run.eval_steps=all")
EVALUATED += ("batch.num_microbatches=2", "batch.global_size=4")


def losses_of(make_config, *overrides) -> tuple[Trainer, list[dict[str, float]]]:
    """A Trainer on one device, and the evaluation losses by split on each mesh."""
    found, trainers = [], []
    for mesh in MESHES:
        sizes = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
        config = make_config(*EVALUATED, *overrides, *sizes)
        trainers.append(Trainer(config, jax.devices()[: math.prod(mesh.values())]))
        splits = [split for split in trainers[-1].data if split != "train"]
        found.append({split: trainers[-1].evaluate(split)["loss"] for split in splits})
    return trainers[0], found


def test_the_loss_of_whole_texts_is_that_of_each_token_once(tmp_path, make_config, text):
    own = write_documents(tmp_path / "own", [[5, 6, 7, 8], [9] * 30, [1, 2, 3] * 40])  # 154 tokens
    short = write_documents(tmp_path / "short", [[3, 1, 4, 1, 5]])  # less than a sample
    sets = f"data.valid_sets=[{{name: own, prefix: {own}}}, {{name: short, prefix: {short}}}]"
    trainer, found = losses_of(make_config, f"run.dir={tmp_path}", f"data.valid=[{text}, {own}]", sets)
    streams = {name: stream(tokens_of(prefix)) for name, prefix in (("text", text), ("own", own), ("short", short))}
    assert len(streams["text"] + streams["own"]) % 4 and len(streams["own"]) % 4
    expected = {
        "valid": plain_loss(trainer, streams["text"] + streams["own"]),
        "valid/own": plain_loss(trainer, streams["own"]),
        "valid/short": plain_loss(trainer, streams["short"]),
    }
    for losses in found:
        assert losses == pytest.approx(expected, rel=2e-6)
    lines = describe_data(trainer.config, trainer.data)
    assert any("154 tokens" in line and "an evaluation reads 154 tokens, 1 epoch" in line for line in lines)


@pytest.mark.parametrize("packing", ["balanced", "none"])
def test_the_loss_of_whole_sets_of_chats_is_that_of_each_answer_once(tmp_path, make_config, packing):
    given = (*chats(tmp_path / "chats.jsonl", "valid"), f"data.packing={packing}", f"run.dir={tmp_path}")
    trainer, found = losses_of(make_config, *given)
    samples = []
    for prompt, completion in CHATS:
        tokens = [*f"{prompt}{completion}".encode(), 256][: S + 1]
        samples.append((tokens, [index >= len(prompt) and index > 0 for index in range(len(tokens))]))
    assert len(trainer.data["valid"]) % 4  # type: ignore[arg-type]
    for losses in found:
        assert losses == pytest.approx({"valid": plain_loss(trainer, samples)}, rel=2e-6)
