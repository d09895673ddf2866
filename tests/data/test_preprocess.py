"""The preprocess command from JSON lines to token files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megajax.data import preprocess as preprocess_module
from megajax.data.indexed import IndexedDataset
from megajax.data.preprocess import main, preprocess
from megajax.errors import InputError

TEXTS = ["first", "zweites: äöü", "", "the\nfourth", "x" * 5000, "last"]


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def read(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.document(d).tolist() for d in range(dataset.num_documents)]


@pytest.mark.smoke
def test_documents_are_the_encoded_lines_in_order(tmp_path, capsys):
    inputs = [write_lines(tmp_path / "a.jsonl", TEXTS[:4]), write_lines(tmp_path / "b.jsonl", TEXTS[4:])]
    command = ["--input", *inputs, "--output-prefix", str(tmp_path / "out" / "p"), "--tokenizer", "byte"]
    assert main(command) == 0
    prefix = f"{tmp_path}/out/p_text_document"
    assert read(prefix) == [list(text.encode()) for text in TEXTS]
    assert IndexedDataset(prefix).dtype == np.uint16
    tokens = sum(len(text.encode()) for text in TEXTS)
    assert capsys.readouterr() == (f"{prefix}.bin/.idx: 6 documents, {tokens:,} tokens\n", "")


def test_append_eod_ends_every_document_with_text(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", TEXTS, key="content")
    prefix, documents, tokens = preprocess([source], str(tmp_path / "p"), "byte", append_eod=True, json_key="content")
    assert prefix == f"{tmp_path}/p_content_document"
    assert read(prefix) == [[*text.encode(), 256] if text else [] for text in TEXTS]
    assert (documents, tokens) == (6, sum(len(text.encode()) + 1 for text in TEXTS if text))


@pytest.mark.parametrize("range_bytes", [1, 7, 64, 5000])
def test_documents_do_not_depend_on_where_the_input_is_cut(tmp_path, monkeypatch, range_bytes):
    source = tmp_path / "a.jsonl"
    write_lines(source, TEXTS)
    source.write_text("\n" + source.read_text() + "  \n" + '{"text": "without newline"}')
    monkeypatch.setattr(preprocess_module, "RANGE_BYTES", range_bytes)
    prefix, _, _ = preprocess([str(source)], str(tmp_path / "p"), "byte")
    assert read(prefix) == [list(text.encode()) for text in [*TEXTS, "without newline"]]


def test_one_and_two_workers_write_identical_bytes(tmp_path):
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(32, 1000, size))) for size in generator.integers(0, 4000, 600)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    assert Path(source).stat().st_size > 3 * preprocess_module.RANGE_BYTES
    for workers in ("1", "2"):
        command = [sys.executable, "-m", "megajax.data.preprocess", "--input", source, "--tokenizer", "byte"]
        command += ["--output-prefix", str(tmp_path / workers), "--workers", workers, "--append-eod"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    for suffix in ("bin", "idx"):
        one, two = (Path(tmp_path, f"{workers}_text_document.{suffix}").read_bytes() for workers in "12")
        assert one == two
    assert read(tmp_path / "2_text_document") == [[*text.encode(), 256] if text else [] for text in texts]


BAD_LINES = {
    b"{oops": "is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1))",
    b'"text"': "is not a JSON object",
    b'{"body": "x"}': 'has no key "text"',
    b'{"text": 3}': 'holds int instead of text under "text"',
    b'{"text": "\xff"}': "is not UTF-8",
    b'{"text": "\\ud800"}': "holds half of a surrogate pair, which is no text",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_named_and_nothing_is_left_behind(tmp_path, capsys, monkeypatch, line):
    monkeypatch.setattr(preprocess_module, "RANGE_BYTES", 40)
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "good"}\n' * 9 + b"\n" + line + b'\n{"text": "good"}\n')
    assert main(["--input", str(source), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte"]) == 2
    assert capsys.readouterr() == ("", f"{source}, line 11 {BAD_LINES[line]}: mend the line.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_bad_line_under_workers_keeps_the_old_output(tmp_path):
    prefix, _, _ = preprocess([write_lines(tmp_path / "a.jsonl", TEXTS)], str(tmp_path / "p"), "byte")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "new"}\n' * 100_000 + "[]\n")
    with pytest.raises(InputError) as caught:
        preprocess([str(bad)], str(tmp_path / "p"), "byte", workers=2)
    assert str(caught.value) == f"{bad}, line 100001 is not a JSON object: mend the line."
    assert read(prefix) == [list(text.encode()) for text in TEXTS]
    assert not list(tmp_path.glob("*.partial"))


def test_bad_arguments_are_refused_with_one_sentence(tmp_path, capsys):
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "words.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}}'
    )
    cases = [
        ("no.jsonl", "byte", "--input: no.jsonl does not exist or is not a file; correct the path."),
        (
            source,
            "gpt2",
            'gpt2 is no tokenizer: use "byte", a tokenizer.json or a SentencePiece .model file.',
        ),
        (
            source,
            f"{tmp_path}/words.json",
            f"--append-eod: {tmp_path}/words.json has no end-of-document token; leave the option out.",
        ),
    ]
    for path, tokenizer, sentence in cases:
        command = [
            "--input",
            path,
            "--output-prefix",
            str(tmp_path / "p"),
            "--tokenizer",
            tokenizer,
            "--append-eod",
        ]
        assert main(command) == 2
        assert capsys.readouterr() == ("", sentence + "\n")
