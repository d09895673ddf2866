"""The preprocess command from JSON lines to token files."""

import bz2
import contextlib
import gzip
import json
import lzma
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import yaml
import zstandard
from pyarrow import parquet
from terminal import Terminal

from megajax.data import json_lines
from megajax.data.indexed import IndexedDataset
from megajax.data.json_lines import Limits
from megajax.data.preprocess import main, preprocess
from megajax.data.progress import show_progress
from megajax.errors import InputError

TEXTS = ["first", "zweites: äöü", "", "the\nfourth", "x" * 5000, "last"]


HELP = "python -m megajax.data.preprocess --help lists the arguments."


@pytest.fixture
def error_of(tmp_path, capsys):
    """(arguments) → the error's sentence; output and tokenizer are added to the arguments."""

    def error_of(arguments):
        with pytest.raises(SystemExit) as caught:
            main(["--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte", *arguments])
        out, err = capsys.readouterr()
        assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
        return err.removeprefix("megajax: error: ").removesuffix("\n")

    return error_of


def write_lines(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return str(path)


def read(prefix):
    dataset = IndexedDataset(prefix)
    return [dataset.document(d).tolist() for d in range(dataset.num_documents)]


@pytest.mark.smoke
def test_documents_are_the_encoded_lines_in_order(tmp_path, capsys):
    write_lines(tmp_path / "a.jsonl", TEXTS[:3]), write_lines(tmp_path / "b.jsonl", TEXTS[3:4])
    inputs = [str(tmp_path / "[ab].jsonl"), write_lines(tmp_path / "0.jsonl", TEXTS[4:])]  # a glob's files by name
    command = ["--input", *inputs, "--output-prefix", str(tmp_path / "out" / "p"), "--tokenizer", "byte"]
    assert main(command) == 0
    prefix = f"{tmp_path}/out/p_text_document"
    assert read(prefix) == [list(text.encode()) for text in TEXTS]
    assert IndexedDataset(prefix).dtype == np.uint16
    tokens = sum(len(text.encode()) for text in TEXTS)
    out, err = capsys.readouterr()
    assert out.startswith(f"{prefix}.bin/.idx: 6 documents, {tokens:,} tokens in ") and err == ""
    assert yaml.safe_load("\n".join(out.splitlines()[2:])) == {"data": {"train": prefix, "tokenizer": "byte"}}


def test_append_eod_ends_every_document_with_text(tmp_path):
    source = write_lines(tmp_path / "a.jsonl", TEXTS, key="a/b")
    prefix, documents, tokens = preprocess([source], str(tmp_path / "p"), "byte", append_eod=True, json_key="a/b")
    assert prefix == f"{tmp_path}/p_a_b_document"
    assert read(prefix) == [[*text.encode(), 256] if text else [] for text in TEXTS]
    assert (documents, tokens) == (6, sum(len(text.encode()) + 1 for text in TEXTS if text))


@pytest.mark.parametrize("block_bytes", [1, 7, 64, 5000])
def test_documents_do_not_depend_on_where_the_input_is_cut(tmp_path, monkeypatch, block_bytes):
    source = tmp_path / "a.jsonl"
    write_lines(source, TEXTS)
    source.write_text("\n" + source.read_text() + "  \n" + '{"text": "without newline"}')
    monkeypatch.setattr(json_lines, "LIMITS", Limits(block_bytes=block_bytes))
    prefix, _, _ = preprocess([str(source)], str(tmp_path / "p"), "byte")
    assert read(prefix) == [list(text.encode()) for text in [*TEXTS, "without newline"]]


def test_one_and_two_workers_write_identical_bytes(tmp_path, capfd):
    generator = np.random.default_rng(0)
    texts = ["".join(map(chr, generator.integers(32, 1000, size))) for size in generator.integers(0, 4000, 600)]
    source = write_lines(tmp_path / "a.jsonl", texts)
    lines = Path(source).read_bytes().splitlines(keepends=True)
    for i, line in enumerate(BAD_LINES):  # in different blocks
        lines.insert(100 * i, line + b"\n")
    Path(source).write_bytes(b"".join(lines))
    assert Path(source).stat().st_size > 3 * Limits().block_bytes
    errors = {}
    for workers in ("1", "2"):
        command = ["--input", source, "--tokenizer", "byte"]
        command += ["--output-prefix", str(tmp_path / workers), "--workers", workers, "--append-eod"]
        assert main(command) == 0
        errors[workers] = capfd.readouterr().err
    assert errors["1"] == errors["2"] and len(errors["1"].splitlines()) == len(BAD_LINES) + 1
    for suffix in ("bin", "idx"):
        one, two = (Path(tmp_path, f"{workers}_text_document.{suffix}").read_bytes() for workers in "12")
        assert one == two
    assert read(tmp_path / "2_text_document") == [[*text.encode(), 256] if text else [] for text in texts]


@pytest.mark.parametrize("compression", [gzip, bz2, lzma, zstandard])
def test_compressed_input_is_read(tmp_path, monkeypatch, compression):
    plain = Path(write_lines(tmp_path / "a.jsonl", TEXTS)).read_bytes()
    packed = tmp_path / "named as you like"
    packed.write_bytes(compression.compress(plain[:99]) + compression.compress(plain[99:]))
    monkeypatch.setattr(json_lines, "LIMITS", Limits(block_bytes=64))
    prefix, _, _ = preprocess([str(packed)], str(tmp_path / "p"), "byte")
    assert read(prefix) == [list(text.encode()) for text in TEXTS]
    packed.write_bytes(compression.compress(plain)[:-9])
    with pytest.raises(InputError, match="cannot be read beyond line .*: it is damaged or incomplete"):
        preprocess([str(packed)], str(tmp_path / "p"), "byte")


FORM = 'write each document on a line of its own, as {"text": "its text"}'
BAD_LINES = {
    b"{oops": f"is not JSON (Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): {FORM}",
    b'"text"': f"is not a JSON object: {FORM}",
    b'{"body": "x", "id": 1}': 'has no key "text" (its keys: body, id): name the key of the text with --json-key',
    b'{"text": 3}': f'has int instead of text under "text": {FORM}',
    b'{"text": "\xff"}': "is not UTF-8: convert the file to UTF-8",
    b'{"text": "\\ud800"}': "contains half of a surrogate pair, which cannot be encoded: correct the text",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_the_first_bad_line_stops_a_strict_run_and_nothing_is_left_behind(tmp_path, error_of, line):
    source = tmp_path / "a.jsonl"
    good = b'{"pad": "%s", "text": "good"}\n' % (b"x" * Limits().block_bytes)  # a block
    source.write_bytes(good * 2 + b'{"text": "good"}\n' * 7 + b"\n" + line + b'\n{"text": "good"}\n')
    assert error_of(["--input", str(source), "--strict"]) == f"{source}, line 11 {BAD_LINES[line]}."
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


@pytest.mark.long
def test_a_bad_line_under_workers_keeps_the_old_output(tmp_path):
    prefix, _, _ = preprocess([write_lines(tmp_path / "a.jsonl", TEXTS)], str(tmp_path / "p"), "byte")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "new"}\n' * 100_000 + "[]\n")
    with pytest.raises(InputError) as caught:
        preprocess([str(bad)], str(tmp_path / "p"), "byte", workers=2, strict=True)
    assert str(caught.value) == f"{bad}, line 100001 is not a JSON object: {FORM}."
    assert read(prefix) == [list(text.encode()) for text in TEXTS]
    assert not list(tmp_path.glob("*.partial"))


def test_bad_lines_are_left_out_counted_and_named(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    good = b'{"pad": "%s", "text": "3 4"}' % (b"x" * Limits().block_bytes)  # a block
    source.write_bytes(b"".join(line + b"\n" + good + b"\n" for line in [*BAD_LINES, b'{"text": "3 four"}']))
    assert main(["--input", str(source), "--output-prefix", str(tmp_path / "p"), "--tokenizer", "null:9"]) == 0
    assert read(tmp_path / "p_text_document") == [[3, 4]] * 7
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "megajax: warning: 7 bad lines left out; --strict stops at the first."
    named = list(BAD_LINES.values())[:5]
    assert lines == [f"  {source}, line {2 * i + 1} {named[i]}." for i in range(5)] + ["  and 2 more"]


def test_parquet_rows_are_documents(tmp_path, monkeypatch, error_of, capsys):
    source = str(tmp_path / "named as you like")
    table = pyarrow.table({"id": range(7), "text": [*TEXTS, None]})
    parquet.write_table(table, source, row_group_size=3)
    assert main(["--input", source, "--output-prefix", str(tmp_path / "rows"), "--tokenizer", "byte"]) == 0
    assert read(tmp_path / "rows_text_document") == [list(text.encode()) for text in TEXTS]
    assert f"  {source}, row 7 has NoneType instead of text" in capsys.readouterr().err
    assert error_of(["--input", source, "--json-key", "body"]) == (
        f'{source} has no column "body" (its columns: id, text): name the column of the text with --json-key.'
    )
    with monkeypatch.context() as patch:
        patch.setattr(json_lines, "LIMITS", Limits(rows=2))
        blocks = [*json_lines.read_blocks([source])]
    assert len(blocks) == 4 and sum(block.stored_bytes for block in blocks) == Path(source).stat().st_size
    Path(source).write_bytes(Path(source).read_bytes()[:-9])
    assert "cannot be read beyond row 0 " in error_of(["--input", source])
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # import raises ModuleNotFoundError
    assert error_of(["--input", source]) == (
        f"{source}, a Parquet file, needs pyarrow, which is not installed: pip install 'megajax[parquet]'."
    )


MISTAKES = {
    "--input org/name": "org/name does not exist or is not a file: correct the path; nothing is downloaded.",
    "--input no.jsonl": "no.jsonl does not exist or is not a file: correct the path.",
    "--input dir": "dir is a directory; name the files in it, such as dir/*.jsonl.",
    "--input empty.jsonl": "--input: empty.jsonl has no documents; nothing is written.",
    "--input blank.jsonl": "--input: blank.jsonl has no documents; nothing is written.",
    "--input hollow.jsonl": '--input: hollow.jsonl has only empty text under "text"; nothing is written.',
    "--input a.zip": "a.zip is a ZIP archive: unpack it first, with `unzip a.zip`.",
    "--input a.zst": "a.zst cannot be read beyond line 1 (zstd decompressor error: Data corruption detected): "
    "it is damaged or incomplete; copy or download it again.",
    "--input a.jsonl --json-key body": "every line is bad, 6 in all; nothing is written. The first: a.jsonl, "
    'line 1 has no key "body" (its keys: id, text): name the key of the text with --json-key.',
    "--input a.jsonl --tokenizer null:9 --strict": "a.jsonl, line 1: 'first' is not a token id of null:9: write "
    "integers from 0 to 9 with spaces between, or use another tokenizer.",
    "--input a.jsonl --output-prefix dir/": "--output-prefix dir/ is a directory; add a name, such as dir/my.",
    "--input a.jsonl --output-prefix a.jsonl/p": "a.jsonl/p_text_document.bin and .idx cannot be written (File exists):"
    " choose another directory (--output-prefix, or data.index_cache).",
    "--input a.jsonl --tokenizer no.json": 'no.json does not exist: correct the path of the tokenizer, or use "byte".',
    "--input a.jsonl --workers 0": f"argument --workers: 0 is not a number of processes (1 or more); {HELP}",
    "--input a.jsonl --workers two": f"argument --workers: two is not a number of processes (1 or more); {HELP}",
    "--input a.jsonl --worker 2": f"--worker is not an option: did you mean --workers? {HELP}",
    "": f"the following arguments are required: --input; {HELP}",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_answered_with_one_sentence(tmp_path, monkeypatch, error_of, arguments):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dir").mkdir()
    write_lines(tmp_path / "a.jsonl", TEXTS)
    write_lines(tmp_path / "hollow.jsonl", [""])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text("\n \n")
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"x" * 500)[:9] + b"\xff" * 20)
    (tmp_path / "a.zip").write_bytes(b"PK\3\4")
    assert error_of(arguments.split()) == MISTAKES[arguments]
    assert not list(tmp_path.rglob("*.bin*"))


def test_named_tokens_are_around_documents_and_in_the_printed_config(tmp_path, capsys):
    vocabulary = {"?": 0, "<stop>": 1, "a": 2, "<go>": 3}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "?"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<go>"}')
    command = ["--input", write_lines(tmp_path / "a.jsonl", ["a", ""]), "--tokenizer", str(tmp_path)]
    assert main([*command, "--output-prefix", f"{tmp_path}/p", "--eod-token", "<stop>", "--prepend-bos"]) == 0
    data = yaml.safe_load("\n".join(capsys.readouterr().out.splitlines()[2:]))["data"]
    assert read(data["train"]) == [[3, 2, 1], []]
    assert (data["tokenizer"], data["end_of_document"], data["begin_of_document"]) == (str(tmp_path), "<stop>", True)


def as_soon_as(condition, act):
    """Starts a thread that waits for the condition, then acts."""

    def wait():
        while not condition():
            time.sleep(0.001)
        act()

    threading.Thread(target=wait).start()


def test_a_worker_that_dies_is_one_sentence(tmp_path, error_of):
    """As the kernel ends one if memory runs out."""
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    as_soon_as(multiprocessing.active_children, lambda: multiprocessing.active_children()[0].kill())
    sentence = error_of(["--input", source, "--workers", "2"])
    assert "a worker process was killed" in sentence and "use fewer workers" in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_an_interrupt_ends_with_a_sentence_and_leaves_nothing(tmp_path, capsys):
    """After the first tokens are written; the input is far longer than what is read until then."""
    source = write_lines(tmp_path / "a.jsonl", TEXTS * 100)
    tokens = tmp_path / "p_text_document.bin.partial"
    as_soon_as(lambda: tokens.exists() and tokens.stat().st_size, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit) as stopped:
        main(["--input", *[source] * 2000, "--output-prefix", str(tmp_path / "p"), "--tokenizer", "byte"])
    assert stopped.value.code == 130
    assert capsys.readouterr() == ("", "megajax: error: interrupted.\n")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_log_shows_progress_in_lines(capsys):
    with show_progress(total_bytes=500, line_seconds=0) as progress:
        for _ in range(5):
            progress.advance(stored_bytes=100, documents=2, tokens=16)
    lines = capsys.readouterr().err.splitlines()
    assert lines[1].startswith("40%: 4 documents, 32 tokens, ") and lines[1].endswith(" s left")
    assert lines[4].startswith("100%: 10 documents, 80 tokens, ")


def test_a_terminal_shows_progress_as_a_bar(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    source = write_lines(tmp_path / "a.jsonl", ["12345678"] * 10)
    with contextlib.redirect_stderr(Terminal()) as terminal:
        preprocess([source], str(tmp_path / "p"), "byte")
    bar = terminal.getvalue()
    assert "100%" in bar and "10 documents, 80 tokens, " in bar and " left" not in bar


def test_padding_and_truncation_of_a_tokenizer_change_no_document(tmp_path):
    """One text at a time and many together give the same tokens, all of them."""
    model = {"type": "WordLevel", "vocab": {"?": 0, "a": 1, "b": 2}, "unk_token": "?"}
    content: dict = {"version": "1.0", "model": model, "pre_tokenizer": {"type": "Whitespace"}}
    content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "?"}
    (tmp_path / "t.json").write_text(json.dumps(content))
    source = write_lines(tmp_path / "a.jsonl", ["a b a b", "b"])
    prefix, _, _ = preprocess([source], str(tmp_path / "p"), str(tmp_path / "t.json"))
    assert read(prefix) == [[1, 2, 1, 2], [2]]
