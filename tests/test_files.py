"""Files of a run directory: a crash while one is written leaves the old one."""

import errno
import json
from pathlib import Path

import pytest

from megajax import files
from megajax.config import Config
from megajax.data.tokenizers import keep_tokenizer
from megajax.files import replace_copy, replace_text
from megajax.hf import beside
from megajax.pictures.expert_load import NAME, write_load_map
from megajax.training.logs import drop_lines_after
from megajax.training.run_record import write_config

MODEL = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}


def config(seed: int) -> Config:
    sections = {"run": {"seed": seed}, "model": MODEL, "batch": {"global_size": 1, "sequence_length": 8}}
    return Config.model_validate(sections | {"data": {"kind": "synthetic"}})


def test_a_file_is_whole_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []
    monkeypatch.setattr(files, "sync", lambda file: synced.append((Path(file.name).read_text(), path.exists())))
    replace_text(path, "new")
    assert synced == [("new", False)] and path.read_text() == "new"
    replace_copy(path, tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "new"


@pytest.fixture
def run(tmp_path) -> Path:
    """A run directory with an older version of every file, beside a folder with newer ones."""
    source, run = tmp_path / "source", tmp_path / "run"
    for folder in (source, run):
        folder.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
            (folder / name).write_text(json.dumps({"of": folder.name}))
    (run / "hf_config.json").write_text("{}")
    lines = [{"step": step, "expert_load": [1.0, 2.0]} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / NAME).write_text("<svg/>")
    write_config(run, config(1), 0)
    return run


WRITERS = {
    "config": lambda run: write_config(run, config(2), 0),
    "metrics": lambda run: drop_lines_after(run / "metrics.jsonl", 1),
    "tokenizer": lambda run: keep_tokenizer(str(run.parent / "source" / "tokenizer.json"), run),
    "beside": lambda run: beside.keep(run.parent / "source", run),
    "picture": lambda run: write_load_map(run, [0, 1]),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_stops_leaves_the_old_files(run, monkeypatch, writer):
    def contents():
        return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def stop(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", stop)
        with pytest.raises(OSError, match="No space left"):
            WRITERS[writer](run)
    assert contents() == before
    WRITERS[writer](run)
    assert contents() != before
