"""`python -m megajax.train`: every mistake is one sentence, exit status 2, and nothing is written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from megajax import train
from megajax.config import Config, load_config
from megajax.data.indexed import IndexedWriter
from megajax.training.loop import Trainer

CONFIG = """\
run: {dir: run, steps: 2}
model:
  num_layers: 1
  hidden_size: 16
  num_heads: 4
  vocab_size: 70
batch:
  global_size: 8
  sequence_length: 16
mesh: {data: -1}
precision: {compute: float32}
data:
  train: tokens
logging: {tensorboard: false}
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working directory with a config and data that fit together."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    (tmp_path / "run.yaml").write_text(CONFIG)
    with IndexedWriter("tokens", np.uint16) as writer:
        for length in (40, 50, 60):
            writer.add_document((np.arange(length) + 20) % 70)
    return tmp_path


def everything(directory: Path) -> dict[str, bytes | None]:
    """All files but locks: those of runs that this process trained before count as its own."""
    files = sorted(path for path in directory.rglob("*") if path.name != "lock")
    return {str(path): path.read_bytes() if path.is_file() else None for path in files}


@pytest.fixture
def error_of(place, capsys):
    """(arguments...) → the error's sentence."""

    def error_of(*overrides: str) -> str:
        before = everything(place)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            train.main(["run.yaml", *overrides])
        printed = capsys.readouterr()
        assert caught.value.code == 2
        assert printed.out == ""
        sentence, *listed = printed.err.splitlines()
        assert sentence.startswith("megajax: error: ") and sentence.endswith((".", "?"))
        assert all(line.startswith("  ") for line in listed), printed.err
        assert everything(place) == before
        return printed.err

    return error_of


def says(sentence: str, *parts: str) -> bool:
    return all(part in sentence for part in parts)


def append(path: str, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_an_unknown_key_is_met_with_the_nearest_one(place, error_of):
    sentence = error_of("model.hiden_size=32")
    assert says(sentence, "model.hiden_size", "model.hiden_size=32", "did you mean model.hidden_size?")
    append("run.yaml", "batches: {}\n")
    assert says(error_of(), "batches", "run.yaml, line 15")


@pytest.mark.smoke
def test_a_mesh_that_does_not_divide_names_both_keys_and_what_would(error_of):
    sentence = error_of("mesh.tensor=3")
    assert says(sentence, "mesh.tensor=3", "model.num_heads=4", "the command line: mesh.tensor=3", "1, 2 or 4")


def test_a_mesh_that_does_not_fit_the_devices_says_how_many_there_are(error_of):
    sentence = error_of("mesh.data=2")
    assert says(sentence, "mesh.data=2", "8 devices", "the command line") and "XLA_FLAGS" not in sentence
    assert says(error_of("mesh.data=16"), "there are 8", "XLA_FLAGS=--xla_force_host_platform_device_count=16")


def test_a_global_batch_that_does_not_divide_says_what_would(error_of):
    assert says(error_of("batch.global_size=12"), "mesh.data=8", "batch.global_size=12", "multiple of 8")
    sentence = error_of("batch.num_microbatches=3")
    assert says(sentence, "batch.num_microbatches=3", "batch.global_size=8")
    assert says(error_of("batch.num_microbatches=4"), "mesh.data=8", "batch.num_microbatches=4")


@pytest.mark.parametrize("kind", ["idx", "bin"])
def test_a_missing_data_file_is_named_with_its_key(error_of, kind):
    Path(f"tokens.{kind}").unlink()
    assert says(error_of(), "data.train", "run.yaml, line 13", f"tokens.{kind}", "does not exist")


def spoil(path: str, start: int, data: bytes) -> None:
    content = bytearray(Path(path).read_bytes())
    content[start : start + len(data)] = data
    Path(path).write_bytes(content)


@pytest.mark.parametrize(
    "damage, parts",
    [
        (lambda: os.truncate("tokens.idx", 20), ("tokens.idx", "truncated", "20 bytes")),
        (lambda: os.truncate("tokens.idx", 60), ("tokens.idx", "truncated", "60 bytes")),
        (lambda: spoil("tokens.idx", 0, b"MMIDIDY"), ("tokens.idx", "MMIDIDY", "not an index")),
        (lambda: os.truncate("tokens.bin", 200), ("tokens.bin", "200 bytes", "300")),
        (lambda: append("tokens.bin", "12"), ("tokens.bin", "302 bytes", "300")),
        (lambda: spoil("tokens.idx", 34, b"\x29"), ("tokens.idx",)),  # the first length, 40, is now 41
    ],
    ids=["no header", "tables cut off", "wrong magic", "bin too short", "bin too long", "wrong length"],
)
def test_a_damaged_index_is_named_with_what_is_wrong(error_of, damage, parts):
    damage()
    assert says(error_of(), "data.train", "run.yaml, line 13", *parts)


def test_a_vocabulary_larger_than_the_models_is_refused(error_of):
    assert says(error_of("model.vocab_size=60"), "model.vocab_size=60", "command line", "tokens.bin", "69")
    assert says(error_of("data.tokenizer=byte"), "data.tokenizer=byte", "model.vocab_size=70", "run.yaml, line 6")


def save_first_state() -> None:
    trainer = Trainer(load_config("run.yaml"), jax.devices())
    trainer.save()
    trainer.checkpoints.close()


def test_a_checkpoint_of_another_model_is_refused_on_resume(place, error_of):
    save_first_state()
    sentence = error_of("model.num_layers=2")
    assert says(sentence, "model.num_layers=1", "model.num_layers=1, but this run has 2", str(place / "run"))


def test_a_checkpoint_of_another_model_is_refused_as_first_weights(place, error_of):
    save_first_state()
    sentence = error_of("model.num_layers=2", "run.dir=other", "checkpoint.init_from=run")
    assert says(sentence, "checkpoint.init_from=run", "model.num_layers=1", "has 2", "the command line")


def test_first_weights_that_are_not_there_are_refused(error_of):
    assert says(error_of("checkpoint.init_from=nowhere"), "checkpoint.init_from=nowhere", "the command line")


@pytest.mark.parametrize("run_dir", ["tokens.bin/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_written_is_refused(error_of, run_dir):
    assert says(error_of(f"run.dir={run_dir}"), f"run.dir={run_dir}", "the command line", "cannot be written")


def command(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-m", "megajax.train", *arguments], capture_output=True, text=True, env=environment
    )


@pytest.mark.parametrize(
    "overrides, part",
    [
        (["model.num_leyers=2"], "did you mean model.num_layers?"),
        pytest.param(
            ["run.deterministic=true", "data.train=nothing"], "nothing.idx does not exist", marks=pytest.mark.long
        ),
    ],
    ids=["unknown key", "deterministic and missing data"],
)
def test_a_process_of_its_own_ends_with_status_2_and_one_line(place, overrides, part):
    before = everything(place)
    done = command("run.yaml", *overrides)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("megajax: error: ") and part in done.stderr
    assert everything(place) == before


def test_help_shows_every_key_with_its_meaning(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help", "all"])
    shown = capsys.readouterr().out
    assert caught.value.code == 0
    for section, field in Config.model_fields.items():
        for key, described in field.annotation.model_fields.items():
            assert f"  {section}.{key}  {described.description}" in shown
            assert len(described.description) > 8


@pytest.mark.parametrize(("index", "warned"), [(None, 1), ("0", 1), ("1", 0), ("7", 1)])
def test_the_first_process_warns_about_the_config(place, capsys, monkeypatch, index, warned):
    """With a wrong environment, such as the index 7 of 2, this process counts as the first."""
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    for name, value in (("JAX_COORDINATOR_ADDRESS", "localhost:1"), ("JAX_PROCESS_ID", index)):
        if index is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        train.main(["run.yaml", "schedule.warmup_steps=5000", "--print-config"])
    assert caught.value.code == 0 and capsys.readouterr().err.count("warning: schedule.warmup_steps=5000") == warned


def test_a_printed_config_prints_itself_again(place, capsys):
    texts = []
    shutil.copy("run.yaml", "0.yaml")
    for index, overrides in enumerate((["model.rope_theta=5e5", "data.train=[{prefix: tokens}]"], [])):
        with pytest.raises(SystemExit) as caught:
            train.main([f"{index}.yaml", *overrides, "--print-config"])
        assert caught.value.code == 0
        texts.append(capsys.readouterr().out)
        Path(f"{index + 1}.yaml").write_text(texts[-1])
    assert texts[0] == texts[1]
    assert load_config("1.yaml") == load_config("0.yaml", ["model.rope_theta=5e5", "data.train=[{prefix: tokens}]"])
    assert not Path("run").exists()
