"""Merged token files are those of the joined input."""

import json
from pathlib import Path

import numpy as np
import pytest

from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.merge import main
from megajax.data.preprocess import preprocess

TEXTS = ["one", "", "three", "vier äöü", "", "six" * 100]


def test_merged_files_are_those_of_the_joined_input(tmp_path, capsys):
    prefixes = {}
    for name, texts in {"a": TEXTS[:2], "b": TEXTS[2:5], "c": TEXTS[5:], "whole": TEXTS}.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prefixes[name] = preprocess([str(source)], str(tmp_path / name), "byte")[0]
    parts = [prefixes[name] for name in "abc"]
    assert main(["--input", *parts, "--output-prefix", str(tmp_path / "new" / "merged")]) == 0
    for ending in ("bin", "idx"):
        merged = Path(tmp_path, "new", f"merged.{ending}").read_bytes()
        assert merged == Path(f"{prefixes['whole']}.{ending}").read_bytes()
    tokens = sum(len(text.encode()) for text in TEXTS)
    assert capsys.readouterr().out == f"{tmp_path}/new/merged.bin/.idx: 6 documents, {tokens} tokens\n"


def test_files_of_more_tokens_than_are_copied_together_are_merged(tmp_path):
    large, small = np.arange(17_000_000).astype(np.uint16), np.arange(3, dtype=np.uint16)
    for name, tokens in (("large", large), ("small", small)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document(tokens)
    main(["--input", *(str(tmp_path / name) for name in ("large", "small")), "--output-prefix", str(tmp_path / "m")])
    assert (tmp_path / "m.bin").read_bytes() == large.tobytes() + small.tobytes()


def test_sequences_and_modes_are_merged(tmp_path):
    for name, tokens in (("a", [1, 2, 3]), ("b", [4, 5, 6, 7])):
        with IndexedWriter(tmp_path / name, np.int32, multimodal=True) as writer:
            writer.add_document(tokens, lengths=[1, len(tokens) - 1], modes=[0, len(tokens)])
    main(["--input", str(tmp_path / "b"), str(tmp_path / "a"), "--output-prefix", str(tmp_path / "m")])
    merged = IndexedDataset(tmp_path / "m")
    assert [merged[i].tolist() for i in range(4)] == [[4], [5, 6, 7], [1], [2, 3]]
    assert merged.boundaries.tolist() == [0, 2, 4]
    assert merged.modes is not None and merged.modes.tolist() == [0, 4, 0, 3]


def test_files_that_cannot_be_merged_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, dtype, modes in (
        ("a", np.uint16, None),
        ("b", np.int32, None),
        ("c", np.uint16, 1),
        ("d", np.uint16, None),
    ):
        with IndexedWriter(name, dtype, multimodal=modes is not None) as writer:
            writer.add_document([1, 2], modes=modes)
    before = sorted(tmp_path.iterdir())
    mistakes = {
        "--output-prefix m": "the following arguments are required: --input; python -m "
        "megajax.data.merge --help lists the arguments.",
        "--input a b --output-prefix m": "--input: b.bin has int32 tokens, a.bin uint16: write one of them again, with "
        "the other's tokenizer.",
        "--input a c --output-prefix m": "--input: only one of a.idx and c.idx has modes (of multimodal data): merge "
        "files of one kind.",
        "--input a --output-prefix ./a": "--output-prefix ./a is also an --input: choose another output prefix.",
        "--input a d --output-prefix ./d": "--output-prefix ./d is also an --input: choose another output prefix.",
        "--input a --output-prefix m/": "--output-prefix m/ is a directory; add a name, such as m/merged.",
        "--input a no --output-prefix m": "no.idx does not exist: correct the prefix, or write it with `python -m "
        "megajax.data.preprocess`.",
    }
    for arguments, sentence in mistakes.items():
        with pytest.raises(SystemExit) as stopped:
            main(arguments.split())
        assert (stopped.value.code, capsys.readouterr().err) == (2, f"megajax: error: {sentence}\n")
    assert sorted(tmp_path.iterdir()) == before
