"""scripts/prepare_text.py: real text and a tokenizer from the interpreter's own library."""

import importlib.util
import json
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from megajax.data.indexed import IndexedDataset
from megajax.data.tokenizers import load_tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_text.py"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script as a module, with a small library of 45 sources in place of the standard one."""
    spec = importlib.util.spec_from_file_location("prepare_text", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    library = tmp_path / "lib"
    for number in range(45):
        path = library / f"p{number % 3}" / f"m{number:02}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'"""Module {number}."""\n\n\ndef f{number}(x):\n    return x + {number}\n' * 3)
    for unwanted in ("test/test_a.py", "site-packages/b.py", "p0/tests/c.py", "p1/data.txt", "empty.py"):
        (library / unwanted).parent.mkdir(parents=True, exist_ok=True)
        (library / unwanted).write_text("" if unwanted == "empty.py" else "UNWANTED")
    (library / "latin.py").write_bytes(b"# \xff UNWANTED")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(library))
    return module


OPTIONS = {"python": "3", "vocab_size": 300, "site_packages": False}


def test_text_tokens_and_tokenizer_belong_together(script, tmp_path):
    out = tmp_path / "out"
    summary = script.prepare(out, OPTIONS, 1)
    tokenizer = load_tokenizer(str(out / "tokenizer.json"))
    names = []
    for split, documents in (("train", 43), ("valid", 2)):
        lines = [json.loads(line) for line in (out / f"{split}.jsonl").read_text().splitlines()]
        names.append([line["source"] for line in lines])
        dataset = IndexedDataset(out / f"{split}_text_document")
        assert len(lines) == dataset.num_documents == summary[f"{split}_documents"] == documents
        assert dataset.tokens.size == summary[f"{split}_tokens"]
        for number, line in enumerate(lines):
            ids = dataset.document(number).tolist()
            assert ids[-1] == tokenizer.end_of_document and tokenizer.decode(ids[:-1]) == line["text"]
            assert "UNWANTED" not in line["text"]
    every = sorted(names[0] + names[1])
    assert names[1] == [every[19], every[39]]
    assert tokenizer.vocab_size <= 300


def test_unigram_entropy_is_that_of_smoothed_frequencies(script):
    train, valid = [0, 0, 1], [1, 2]
    expected = -(math.log(2 / 7) + math.log(1 / 7)) / 2  # (1+1)/(3+4) and (0+1)/(3+4)
    assert script.unigram_entropy(np.array(train), np.array(valid), 4) == pytest.approx(expected, rel=1e-12)


def test_a_second_run_does_nothing_and_other_options_start_anew(script, tmp_path):
    out = tmp_path / "out"
    first = script.prepare(out, OPTIONS, 1)
    contents = {name: (out / name).read_bytes() for name in os.listdir(out)}
    times = {name: (out / name).stat().st_mtime_ns for name in contents}
    assert script.prepare(out, OPTIONS, 1) == first
    assert {name: (out / name).stat().st_mtime_ns for name in contents} == times
    other = script.prepare(out, OPTIONS | {"vocab_size": 260}, 1)
    assert other["train_tokens"] > first["train_tokens"]
    assert script.prepare(out, OPTIONS, 1) == first
    assert {name: (out / name).read_bytes() for name in contents} == contents


def test_a_missing_file_is_made_again(script, tmp_path):
    out = tmp_path / "out"
    first = script.prepare(out, OPTIONS, 1)
    (out / "valid_text_document.idx").unlink()
    assert script.prepare(out, OPTIONS, 1) == first
    assert IndexedDataset(out / "valid_text_document").num_documents == 2
