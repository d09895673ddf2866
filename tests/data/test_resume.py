"""Preprocessing that is stopped at any moment: nothing loads by halves, and --resume writes the same bytes.

As a script this file kills a real process at each of its writes; see `main`.
"""

import contextlib
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from terminal import Terminal

from megajax.console import user_errors
from megajax.data import journal, json_lines
from megajax.data.encoding import BadLines, Encoded
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.journal import Journal, Point
from megajax.data.json_lines import Limits, TextPosition, read_blocks
from megajax.data.preprocess import main as preprocess_main
from megajax.data.preprocess import preprocess
from megajax.errors import InputError

TEXTS = [f"document {i} " + "x" * (i % 7) for i in range(12)]
FILE_EVENTS = ("open", "os.rename", "os.remove", "os.truncate")


def write_inputs(folder: Path) -> list[str]:
    """A plain and a compressed file, with an empty document and bad lines."""
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in [*TEXTS[:4], "", *TEXTS[4:]]]
    (folder / "a.jsonl").write_bytes(b"".join(lines[:7]) + b"[]\n")
    (folder / "b.gz").write_bytes(gzip.compress(b"{oops\n" + b"".join(lines[7:])))
    return [str(folder / "a.jsonl"), str(folder / "b.gz")]


def pair(prefix: Path | str) -> list[bytes]:
    return [Path(f"{prefix}.{ending}").read_bytes() for ending in ("bin", "idx")]


def in_small_blocks(inputs, output_prefix, **options):
    small = patch.object(json_lines, "LIMITS", Limits(block_bytes=64))
    with small, patch.object(journal, "RECORD_SECONDS", 0.0):
        return preprocess(inputs, output_prefix, "byte", **options)


def killed(event: int, run) -> bool:
    """Whether `run`, in a process of its own, came to its `event`-th access to a file, where it is killed."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])
    seen = count()

    def stop(name: str = "os.fsync", arguments: tuple = ()) -> None:
        if (name == "os.fsync" or (name in FILE_EVENTS and ".json" not in str(arguments))) and next(seen) == event:
            os.kill(os.getpid(), signal.SIGKILL)

    os.fsync = lambda _: stop()  # what was written survives the process
    sys.addaudithook(stop)
    run()
    os._exit(0)


def main(folder: Path) -> None:
    """Kill a run at its 1st, 2nd, ... access to a file; each time resume it, and compare."""
    inputs = write_inputs(folder)
    os.fsync = lambda _: None
    warnings.simplefilter("ignore")
    prefix, documents, tokens = preprocess(inputs, str(folder / "whole"), "byte")
    whole, out_prefix, out = pair(prefix), str(folder / "out"), folder / "out_text_document"
    with IndexedWriter(folder / "old", np.uint16) as writer:
        writer.add_document(np.arange(tokens))  # as many tokens, in one document
    old = pair(folder / "old")
    resumed_later = 0
    for event in count():
        for ending, content in zip(("bin", "idx"), old, strict=True):
            out.with_suffix(f".{ending}").write_bytes(content)
        if not killed(event, lambda: in_small_blocks(inputs, out_prefix)):
            break
        try:
            IndexedDataset(out)
            assert pair(out) in (old, whole), event
        except InputError:
            pass
        resumed_later += Path(f"{out}.resume.partial").exists()
        if event % 4 == 0:  # and a resumed run
            assert killed(event % 7 + 3, lambda: in_small_blocks(inputs, out_prefix, resume=True))
        assert in_small_blocks(inputs, out_prefix, resume=True)[1:] == (documents, tokens)
        assert pair(out) == whole, event
        assert not list(folder.glob("out*.partial*")), event
    print(event, resumed_later)


def test_a_run_killed_at_any_moment_is_resumed_to_the_same_bytes(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # pytest's, of what this file imports
    program = [sys.executable, __file__, tmp_path]
    done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    events, resumed_later = map(int, done.stdout.split())
    assert events > 30 and resumed_later > 20


@pytest.fixture
def interrupted(tmp_path, monkeypatch, capsys):
    """(the arguments of a command that was interrupted after its third block, the files of the whole run)."""
    inputs = write_inputs(tmp_path)
    with pytest.warns(UserWarning, match="2 bad lines left out"):
        whole = pair(preprocess(inputs, str(tmp_path / "whole"), "byte")[0])
    arguments = ["--input", *inputs, "--output-prefix", str(tmp_path / "out"), "--tokenizer", "byte"]
    add, blocks = IndexedWriter.add_documents, count()

    def interrupt(*given):
        if next(blocks) == 3:
            raise KeyboardInterrupt
        add(*given)

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "add_documents", interrupt)
        with pytest.raises(SystemExit) as stopped, user_errors():
            in_small_blocks(inputs, str(tmp_path / "out"))
    kept = f"{tmp_path}/out_text_document.bin.partial is kept: the same command with --resume goes on after 7 documents"
    assert stopped.value.code == 130
    assert capsys.readouterr().err == f"megajax: warning: {kept}.\nmegajax: error: interrupted.\n"
    return arguments, whole


def test_an_interrupted_run_goes_on_and_names_all_its_bad_lines(interrupted, tmp_path, capsys):
    arguments, whole = interrupted
    assert preprocess_main([*arguments, "--resume"]) == 0
    assert pair(tmp_path / "out_text_document") == whole
    out, err = capsys.readouterr()
    assert "out_text_document.bin/.idx: 13 documents, " in out
    assert err.startswith("going on after 7 documents, ") and "2 bad lines left out" in err
    assert not list(tmp_path.glob("*.partial*"))


def test_the_progress_of_a_resumed_run_ends_at_100_percent(interrupted):
    arguments, _ = interrupted
    with contextlib.redirect_stderr(Terminal()) as terminal:
        assert preprocess_main([*arguments, "--resume"]) == 0
    assert re.findall(r"(\d+)%", terminal.getvalue())[-1] == "100"


def test_a_run_that_would_write_other_bytes_is_not_resumed(interrupted, tmp_path, capsys):
    arguments, whole = interrupted

    def sentence(*more):
        with pytest.raises(SystemExit):
            preprocess_main([*arguments, *more, "--resume"])
        return capsys.readouterr().err.removeprefix("megajax: error: ").rstrip("\n")

    way_out = "give the same again, or start without --resume."
    assert sentence("--append-eod") == (
        f"--resume: the appended token is 256, but was null in the interrupted run: {way_out}"
    )
    record = tmp_path / "out_text_document.resume.partial"
    whole_record = json.loads(record.read_text())
    changed = {f"[size, time of change] of {tmp_path}/{name}" for name in ("a.jsonl", "b.gz")}
    changed |= {"--input", "--json-key", "--strict", "--tokenizer", "the appended token", "the prepended token"}
    for name in changed:
        record.write_text(json.dumps(whole_record | {"settings": whole_record["settings"] | {name: "another"}}))
        assert f"--resume: {name} is " in sentence() and whole_record["settings"].keys() == changed, name
    gone = {"settings": whole_record["settings"] | {"the hash of tokenizer_config.json": "of a file that is gone"}}
    record.write_text(json.dumps(whole_record | gone))
    assert '--resume: the hash of tokenizer_config.json is null, but was "of a file' in sentence()
    record.write_text(json.dumps(whole_record))
    os.utime(tmp_path / "b.gz", (1, 1))
    assert f"[size, time of change] of {tmp_path}/b.gz is [" in sentence()
    partial = tmp_path / "out_text_document.bin.partial"
    record.write_text(record.read_text().replace(str(os.stat(tmp_path / "b.gz").st_mtime_ns), "0"))
    assert "is [" in sentence()
    assert preprocess_main(arguments) == 0  # from the start
    assert pair(tmp_path / "out_text_document") == whole and not partial.exists() and not record.exists()


def test_damaged_partial_files_are_not_resumed(interrupted, tmp_path, capsys):
    arguments, _ = interrupted
    partial = tmp_path / "out_text_document.bin.partial"
    size = partial.stat().st_size
    os.truncate(partial, 5)
    with pytest.raises(SystemExit):
        preprocess_main([*arguments, "--resume"])
    assert capsys.readouterr().err == (
        f"megajax: error: --resume: the partial files of {tmp_path}/out_text_document are damaged ({size} bytes of "
        f"tokens were recorded, {partial} has 5): start again without --resume.\n"
    )


def test_an_older_pair_is_not_taken_for_the_tokens_of_the_interrupted_run(interrupted, tmp_path, capsys):
    arguments, whole = interrupted
    out, partial = tmp_path / "out_text_document", tmp_path / "out_text_document.bin.partial"
    for ending, content in zip(("bin", "idx"), whole, strict=True):
        Path(f"{out}.{ending}").write_bytes(content)
    partial.unlink()
    with pytest.raises(SystemExit):
        preprocess_main([*arguments, "--resume"])
    assert capsys.readouterr().err == (
        f"megajax: error: --resume: the partial files of {out} are damaged ([Errno 2] No such file or directory: "
        f"'{partial}'): start again without --resume.\n"
    )
    assert pair(out) == whole and not partial.exists()


def test_every_file_format_is_read_on_from_every_block(tmp_path, monkeypatch):
    import bz2
    import lzma

    import pyarrow
    import zstandard
    from pyarrow import parquet

    monkeypatch.setattr(json_lines, "LIMITS", Limits(block_bytes=50, rows=3))
    read = partial(read_blocks, column="text")
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)
    paths = [str(tmp_path / name) for name in ("plain", "gzip", "bz2", "lzma", "zstandard", "parquet")]
    Path(paths[0]).write_bytes(lines)
    for path, compression in zip(paths[1:5], (gzip, bz2, lzma, zstandard), strict=True):
        Path(path).write_bytes(compression.compress(lines[:99]) + compression.compress(lines[99:]))
    parquet.write_table(pyarrow.table({"text": TEXTS}), paths[5], row_group_size=5)
    blocks = list(read(paths))
    assert len(blocks) > 20
    for i, block in enumerate(blocks):
        rest = [(each.path, each.first_line, each.text) for each in read(paths, start=block.end)]
        assert rest == [(each.path, each.first_line, each.text) for each in blocks[i + 1 :]]


def test_a_point_has_the_sums_of_all_blocks_before_it():
    """Of each number, also of the bytes that the progress of a resumed run begins with."""
    blocks = [
        Encoded(
            "a", np.arange(n), np.ones(k, int), size, BadLines(bad, [f"line {bad}"] * bad), TextPosition(0, n, size)
        )
        for n, k, size, bad in ((5, 2, 100, 0), (7, 3, 1000, 1), (11, 1, 10_000, 0))
    ]
    point = Point()
    for block in blocks:
        point = point.after(block)
    assert point == Point(TextPosition(0, 11, 10_000), 11_100, 6, 23, BadLines(1, ["line 1"]))


def test_an_interruption_between_two_records_goes_on_after_the_documents_of_the_last_one(tmp_path, monkeypatch):
    """The first run records its first block; the second one, stopped before a record, writes three more documents."""
    prefix, bad = str(tmp_path / "w"), BadLines(0, [])
    blocks = [Encoded("a", np.arange(n), np.ones(n, int), 9, bad, TextPosition(0, n, 9)) for n in (2, 3, 1)]
    for first, seconds in ((0, 0.0), (1, 3600.0)):
        monkeypatch.setattr(journal, "RECORD_SECONDS", seconds)
        with (
            pytest.warns(UserWarning, match="--resume goes on after 2 documents"),
            pytest.raises(KeyboardInterrupt),
            Journal(prefix, {}, itemsize=2, resume=first > 0) as written,
            IndexedWriter(prefix, np.uint16, lengths=written.lengths) as writer,
        ):
            for block in written.noting(blocks[first:], writer):
                if block is blocks[first + 1]:
                    raise KeyboardInterrupt
                writer.add_documents(block.tokens, block.lengths)
        assert Journal(prefix, {}, itemsize=2, resume=True).point.documents == 2


def test_lengths_of_documents_go_on_in_a_writer(tmp_path):
    """What follows the given documents in the partial file is dropped."""
    with IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer.add_documents(np.arange(9), np.array([4, 0, 5]))
    (tmp_path / "v.bin.partial").write_bytes(np.arange(7, dtype="<u2").tobytes())
    with IndexedWriter(tmp_path / "v", np.uint16, lengths=np.array([4, 0])) as writer:
        writer.add_documents(np.arange(4, 9), np.array([5]))
    assert pair(tmp_path / "v") == pair(tmp_path / "w") and writer.num_tokens == 9


if __name__ == "__main__":
    main(Path(sys.argv[1]))
