"""JSON is read in one place: limits of bytes, depth and digits, a type, and one sentence with the file for the rest."""

import ast
import bz2
import errno
import gzip
import json
import math
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megajax import json_files, metrics_file
from megajax.checkpoint.storage import read_description
from megajax.data.journal import Journal
from megajax.data.model_files import read_json
from megajax.errors import InputError, UserError, reading, shown
from megajax.files import read_gzip, read_text
from megajax.json_files import Count, Damaged, Finite
from megajax.status import status
from megajax.tools.plan.rates import H200, read_rates
from megajax.tools.plot import read_records
from megajax.training.expert_load import read_loads
from megajax.training.logs import drop_lines_after
from megajax.training.rollbacks import Rollback
from megajax.training.run_lock import read_owner

PACKAGE = Path(__file__).parents[1] / "megajax"
STEP = {"step": 1, "time": 1.0, "loss": 2.0, "tokens": 100, "expert_load": [1.0, 2.0]}
ROLLBACK = [{"number": 1, "step": 2, "samples": 3, "bad_step": 4, "bad_loss": 1, "loss_median": None}]
RECORD: dict[str, Any] = {"settings": {"a": 1}, "position": [0, 3, 20], "bad": [0, []], "finishing": False}
SUMS = {"stored_bytes": 20, "documents": 2, "tokens": 5}

# JSON that no reader accepts, and a word of the reason.
HOSTILE = {
    "deep": ("[" * 10_000, "recursion limit"),
    "digits": ("9" * 5_000, "out of range"),
    "not UTF-8": (b'{"a\xe9": 1}', "unicode"),
    "cut": ('{"', "EOF"),
    "NUL": (b'{"a":\0 1}', "at column 6"),
    "surrogate": (r'"\ud800"', "hex escape"),
    "empty": ("", "EOF"),
}


def write(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def journal(path: Path) -> Any:
    """Read `path`, a record of preprocessing, beside the files that belong to it."""
    prefix = path.with_name("o")
    path.rename(f"{prefix}.resume.partial")
    np.array([2, 3], "<i4").tofile(f"{prefix}.lengths.partial")
    Path(f"{prefix}.bin.partial").write_bytes(bytes(10))
    return Journal(str(prefix), {"a": 1}, 2, resume=True).point


def description(path: Path) -> Any:
    (path.parent / "description").mkdir()
    path.rename(path.parent / "description" / "metadata")
    return read_description(path.parent)


def metrics(path: Path) -> list[tuple[bytes, Any]]:
    """The lines, or the warning about damaged ones as an error."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        lines = list(metrics_file.read(path))
    if caught:
        raise InputError(str(caught[0].message))
    return lines


READERS: dict[str, Callable[[Path], Any]] = {
    "metrics": metrics,
    "rollbacks": lambda path: json_files.read(path, list[Rollback], "cure"),
    "journal": journal,
    "description": description,
    "model folder": read_json,
    "rates": lambda path: read_rates(path, H200),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_json_that_is_none_is_a_sentence_with_the_file_and_the_reason(reader, name, tmp_path):
    content, reason = HOSTILE[name]
    if reader == "metrics":  # an incomplete last line is left out
        content = (content.encode() if isinstance(content, str) else content) + b"\n"
    with pytest.raises(InputError, match=reason) as caught:
        READERS[reader](write(tmp_path / "a.jsonl", content))
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 600


class Wrong(NamedTuple):
    reader: str
    content: Any
    named: str


READ = """time tokens loss eval_loss learning_rate grad_norm step_seconds tokens_per_second_per_device checkpoint_step
    rollback expert_load expert_load_max"""  # by plot, status and the watch of a run
DESCRIBED = """samples_consumed run optimizer batch precision schedule lora data base fp8_history optimizer_state ema
    losses"""  # of a checkpoint, beside its step and its model
WRONG = [
    Wrong("metrics", '{"loss": 1}\n', "line 1 is damaged .step is missing"),
    Wrong("metrics", '{"step": 1}\n{"step": "x"}\n', "line 2 is damaged .step=x"),
    Wrong("metrics", '{"step": 9223372036854775808}\n', "step=9223372036854775808"),
    Wrong("metrics", '{"step": 1, "expert_load": [1, {}]}\n', "expert_load.1={}"),
    Wrong("metrics", '{"step": 1, "expert_load": [1e300]}\n', "expert_load.0=1e.300"),
    Wrong("metrics", '{"step": 1, "loss": NaN}\n', "loss=nan"),
    Wrong("metrics", "[1]\n", "line 1 is damaged"),
    *(Wrong("metrics", f'{{"step": 1, "{key}": "x"}}\n', f"{key}=x") for key in READ.split()),
    Wrong("rollbacks", "[4]", "0=4"),
    Wrong("rollbacks", [ROLLBACK[0] | {"left_out_samples": 1, "samples": {}}], "0.samples={}"),
    Wrong("rollbacks", ROLLBACK, "0.left_out_samples is missing"),
    Wrong("journal", RECORD, "sums is missing"),
    Wrong("journal", RECORD | {"sums": SUMS, "settings": "\0"}, r"settings=\\x00"),
    Wrong("journal", RECORD | {"sums": SUMS, "position": "x"}, "position=x"),
    Wrong("journal", RECORD | {"sums": SUMS, "position": [-1, 3, 20]}, "position.0=-1"),
    Wrong("journal", RECORD | {"sums": SUMS, "position": [0, 3, 2**63]}, "position.2=9223372036854775808"),
    Wrong("journal", RECORD | {"sums": SUMS, "position": [0, [[1]], 20]}, "position.1="),
    Wrong("journal", RECORD | {"sums": SUMS | {"documents": 2**31}}, "2147483648 documents were recorded"),
    Wrong("journal", RECORD | {"sums": SUMS | {"tokens": "a" * 5000}}, "sums.tokens=a{197}... should"),
    Wrong("description", {"step": 1}, "model is missing"),
    Wrong("description", {"step": -1, "model": {}}, "step=-1"),
    *(Wrong("description", {"step": 1, "model": {}, key: "x"}, f"{key}=x") for key in DESCRIBED.split()),
    Wrong("description", {"step": 1, "model": {}, "losses": {"last": [1, None], "spikes": 0}}, "losses.last.1=None"),
    Wrong("description", {"step": 1, "model": {}, "losses": {"last": []}}, "losses.spikes is missing"),
    Wrong("model folder", "[1]", "should be an object|valid dictionary"),
    Wrong("rates", "[]", "should be"),
    Wrong("rates", {"bf16_flops": 1e308}, "bf16_flops=1e.308"),
    Wrong("rates", {"attention_flops": {"١٢٨": 1e14}}, "attention_flops maps widths"),
]


@pytest.mark.parametrize("case", WRONG, ids=[f"{case.reader}: {case.named}" for case in WRONG])
def test_json_of_another_form_is_a_sentence_with_the_key_and_the_value(case, tmp_path):
    with pytest.raises(InputError, match=case.named) as caught:
        READERS[case.reader](write(tmp_path / "a.jsonl", case.content))
    assert str(tmp_path) in str(caught.value) and len(str(caught.value)) < 600


def test_good_files_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    assert READERS["metrics"](write(path, json.dumps(STEP) + "\n"))[0][1] == STEP
    assert READERS["rollbacks"](write(path, [ROLLBACK[0] | {"left_out_samples": 1}])) == [
        Rollback(1, 2, 3, 4, 1.0, None, 1)
    ]
    assert journal(write(path, RECORD | {"sums": SUMS})).position == (0, 3, 20)
    assert description(write(path, {"step": 1, "model": {"a": 1}, "more": 2})) == {
        "step": 1,
        "model": {"a": 1},
        "more": 2,
    }
    assert read_json(write(path, '\ufeff{"a": 1, "a": Infinity}')) == {"a": math.inf}  # as Python's module
    assert json_files.parse("[1, 2.5]", "x", list[Finite], "y") == [1, 2.5]


def test_a_torn_last_line_is_left_out_and_a_damaged_one_is_named(tmp_path):
    path = write(tmp_path / "metrics.jsonl", '{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n{"step": 3, "lo')
    assert [line["step"] for line in read_records(tmp_path)] == [1, 2]
    write(path, '{"step": 1}\n\0\0\n{"step": 2}')
    with pytest.warns(match="1 in all; the first: .*line 2 is not JSON"):
        assert [line["step"] for _, line in metrics_file.read(path)] == [1, 2]
    write(path, b'{"step": 1}\n' + b"x" * (json_files.MOST_LINE_BYTES + 9) + b'\n{"step": 2}\n')  # longer than any
    with pytest.warns(match="the first: .*line 2 is not JSON"):
        assert [line["step"] for _, line in metrics_file.read(path)] == [1, 2]


def test_a_resumed_run_leaves_out_damaged_lines_with_a_warning(tmp_path):
    path = write(tmp_path / "metrics.jsonl", b'{"step": 1}\n\xff\n{"time": 2}\n{"step": 2}\n{"step": 3}\n{"st')
    with pytest.warns(UserWarning, match="2 in all; the first: .*line 2"):
        drop_lines_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_expert_loads_of_another_model_are_named(tmp_path):
    path = write(tmp_path / "metrics.jsonl", json.dumps(STEP) + "\n")
    assert read_loads(path, 2)[1].tolist() == [[1.0, 2.0]]
    with pytest.raises(InputError, match="2 values of expert_load at step 1, but the model has 3 layers"):
        read_loads(path, 3)


def test_a_status_reads_what_is_there(tmp_path):
    write(tmp_path / "config.yaml", "run: {steps: 3}")
    lines = [b'{"step": 1, "tokens_per_second_per_device": null}', b"\xff\0", b'{"step": "x"}', b"[" * 5000, b'{"st']
    write(tmp_path / "metrics.jsonl", b"\n".join(lines))
    assert status(tmp_path, 0.0)["step"] == 1
    for config in ("run: 3", "[]", "run: {steps: x}"):
        write(tmp_path / "config.yaml", config)
        with pytest.raises(UserError, match="config.yaml"):
            status(tmp_path, 0.0)


@pytest.mark.parametrize("content", [b"\xff", b"[" * 9999, b"3", b'{"host": 1}', b'{"process": -1}', b""])
def test_a_lock_without_an_owner_has_none(content, tmp_path):
    assert read_owner(write(tmp_path / "lock", content)) is None


def test_sizes_are_limited_before_memory_is_taken(tmp_path):
    path = write(tmp_path / "a", b"1" * 100)
    assert read_text(path, 100) == "1" * 100
    for read in (lambda: json_files.read(path, int, "cure", most=99), lambda: read_text(path, 99)):
        with pytest.raises((InputError, OSError), match="more than 99 bytes"):
            read()
    (tmp_path / "b").write_bytes(gzip.compress(bytes(10**6)))
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_gzip(tmp_path / "b", 1000)


def test_a_pipe_a_directory_and_no_file_are_sentences(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name, reason in (("pipe", "no regular file"), ("", "Is a directory"), ("none", "No such file")):
        with pytest.raises(Damaged, match=reason):
            json_files.read(tmp_path / name, dict, "cure")
    with pytest.raises(Damaged, match="File name too long"):
        json_files.read(tmp_path / ("x" * 300), dict, "cure")


def test_values_in_sentences_are_short_and_printable():
    assert shown("a" * 200) == "a" * 200 and shown("a" * 201) == "a" * 197 + "..."
    assert shown("\x1b[2J\n\ud800é") == "\\x1b[2J\\n\\ud800é"
    assert shown(10**5000) == "a number of more than 4300 digits"
    with pytest.raises(Damaged, match="should be a valid integer"):
        json_files.parse("true", "x", Count, "cure")  # type: ignore[arg-type]


# Where json.loads may stay: the text comes from megajax's own processes, or from a user's line of data.
OWN_TEXT = {
    "tools/bench.py": "the last line of its own child process",
    "data/conversation.py": "arguments of a tool call, in a line of data",
    "data/journal.py": "its own settings, written a line before",
    "data/json_array.py": "items of data, as lines of data are",
    "data/json_lines.py": "lines of data: the fast path, with the same limits",
    "data/images.py": "of this run: what the reader of lines found",
    "data/shards.py": "members of a shard and its index, with sentences of their own",
    "data/tokenizer_trial.py": "a step of a tokenizer, written by its library",
    "tools/plan/answers.py": "the last line of its own child process",
    "cluster/cluster.py": "messages of this run's processes",
    "cluster/peers.py": "messages of this run's processes",
}


def test_files_of_json_are_read_by_the_one_reader():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if re.search(r"json\s*\.|from\s+json", text) else ():
            if isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "JSONDecoder"):
                if isinstance(node.value, ast.Name) and node.value.id == "json":
                    found.add(path.relative_to(PACKAGE).as_posix())
            if isinstance(node, ast.ImportFrom) and node.module == "json":
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == OWN_TEXT.keys()


def test_a_damaged_compressed_file_is_a_sentence(tmp_path):
    whole = gzip.compress(b"x" * 1000)
    for damaged_bytes in (whole[:-5], whole[:20] + b"\xff" * 9 + whole[29:], b"", b"x"):
        path = write(tmp_path / "a.gz", damaged_bytes)
        with pytest.raises(InputError, match="a.gz is damaged"), reading(path):
            assert read_gzip(path) == b""  # an empty file holds nothing
            raise ValueError


def test_what_the_system_refuses_keeps_its_reason(tmp_path):
    """What a library says without the system's number is about the content."""
    refused = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "secret")
    with pytest.raises(InputError, match=r"secret cannot be read \(Permission denied\): correct .* its permissions"):
        with reading("a folder", "copy all of its files again"):
            raise refused
    with pytest.raises(InputError, match=r"a.bz2 is damaged .* \(OSError: Invalid data stream\): copy it again"):
        with reading("a.bz2"):
            bz2.decompress(b"no stream at all")
