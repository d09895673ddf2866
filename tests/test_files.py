"""Text is read in one way, and a crash while a file of a run directory is written leaves the old one."""

import ast
import errno
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megajax.config import Config, load_config
from megajax.data import json_lines
from megajax.data.chat_template import find_chat_template
from megajax.data.json_lines import Limits, read_blocks, texts
from megajax.data.model_files import read_json
from megajax.data.tokenizers import keep_tokenizer
from megajax.errors import InputError
from megajax.files import check_new_file, check_new_folder, check_output, replace_copy, replace_text
from megajax.hf import beside
from megajax.inference.prompts import read_prompts
from megajax.tools.plan.rates import DEVICES, read_rates
from megajax.training.expert_load import NAME, write_load_map
from megajax.training.logs import drop_lines_after
from megajax.training.run_record import write_config

ROOT = Path(__file__).parents[1]
MODEL = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}


def config(seed: int) -> Config:
    sections = {"run": {"seed": seed}, "model": MODEL, "batch": {"global_size": 1, "sequence_length": 8}}
    return Config.model_validate(sections | {"data": {"kind": "synthetic"}})


def test_a_file_is_whole_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "file", []

    def sync(number):
        if not (file := Path(f"/proc/self/fd/{number}").resolve()).is_dir():
            synced.append((file.read_text(), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
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


STOPS = [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt("^C"), ValueError("no such character")]


@pytest.mark.parametrize("error", STOPS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_that_stops_leaves_the_old_files(run, monkeypatch, writer, error):
    def contents():
        return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def stop(file):
        raise error

    before = contents()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        with pytest.raises(type(error), match=re.escape(str(error))):
            WRITERS[writer](run)
    assert contents() == before
    WRITERS[writer](run)
    assert contents() != before


YAML = (
    "model: {num_layers: 1, hidden_size: 8, num_heads: 1, vocab_size: 8}\nbatch: {global_size: 1, sequence_length: 8}\n"
)


def blend(path: Path) -> list[str]:
    sections = {
        "model": MODEL,
        "batch": {"global_size": 1, "sequence_length": 8},
        "data": {"train": {"file": str(path)}},
    }
    return [part.prefix for part in Config.model_validate(sections).data.train]


# file name: (its text, its reader)
READERS = {
    "run.yaml": (YAML + "data: {kind: synthetic}\n", lambda path: load_config(path).to_yaml()),
    "blend.txt": ("é b", blend),
    "prompts.txt": ("é\nb\n", lambda path: read_prompts(str(path))),
    "prompts.jsonl": ('{"prompt": "é"}\n', lambda path: read_prompts(str(path))),
    "config.json": ('{"é": 1}', read_json),
    "template.jinja": ("é{{ messages }}", lambda path: find_chat_template(None, path).sources["default"]),
    "rates.json": ('{"bf16_flops": 7e14}', lambda path: read_rates(path, DEVICES["h200"])),
    "data.jsonl": ('{"text": "é"}\n', lambda path: [*texts([*read_blocks([str(path)])][0], "text")]),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_and_line_ends_of_windows_are_no_text(tmp_path, name):
    text, read = READERS[name]
    path = tmp_path / name
    path.write_bytes(text.encode())
    expected = read(path)
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert read(path) == expected


def test_lines_after_a_byte_order_mark_are_those_of_the_plain_file(tmp_path, monkeypatch):
    """Compressed, in blocks, and from the end of every block on."""
    monkeypatch.setattr(json_lines, "LIMITS", Limits(block_bytes=16))
    plain, marked, packed = (str(tmp_path / name) for name in ("plain", "marked", "packed"))
    lines = "".join(json.dumps({"text": "é" * i}) + "\n" for i in range(1, 9))
    for path, content in (
        (plain, lines.encode()),
        (marked, lines.encode("utf-8-sig")),
        (packed, gzip.compress(lines.encode("utf-8-sig"))),
    ):
        Path(path).write_bytes(content)
    expected = [(f"line {i}", "é" * i) for i in range(1, 9)]
    for path in (marked, packed):
        blocks = [*read_blocks([path, plain])]
        found = [each for block in blocks for each in texts(block, "text")]
        assert [(location.rpartition(", ")[2], text) for location, text in found] == expected * 2
        for i, block in enumerate(blocks):
            after = read_blocks([path, plain], start=block.end)
            assert [rest.text for rest in after] == [rest.text for rest in blocks[i + 1 :]]


def unspecified(source: str) -> Iterator[int]:
    """The lines that open a text file in the encoding of the locale."""
    nodes = ast.walk(ast.parse(source)) if re.search(r"open|read_text|write_text", source) else ()
    for node in nodes:
        if isinstance(node, ast.Call) and "encoding" not in [keyword.arg for keyword in node.keywords]:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
            method, count = isinstance(node.func, ast.Attribute), len(node.args)
            modes = [a.value if isinstance(a, ast.Constant) else None for a in node.args[not method :][:1]] or ["r"]
            opens = name == "open" and isinstance(modes[0], str) and "b" not in modes[0]
            if opens or (method and (name, count) in (("read_text", 0), ("write_text", 1))):
                yield node.lineno


@pytest.mark.smoke
def test_every_text_file_is_opened_in_utf8():
    """Not in the encoding of the locale: by `files.read_text` what users write, else with `encoding="utf-8"`."""
    examples = [
        "open(x)",
        "p.read_text()",
        "p.write_text(a)",
        'p.open("w")',
        "p.open()",
        'open(x, "rb")',
        'p.open("rb")',
    ]
    assert [*unspecified("\n".join(examples))] == [1, 2, 3, 4, 5]
    paths = [path for folder in ("megajax", "scripts", "dev") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = [f"{path}:{line}" for path in paths for line in unspecified(path.read_text("utf-8"))]
    assert len(paths) > 200 and found == []


@pytest.mark.parametrize(
    ("path", "is_folder", "reason"),
    [
        ("new", False, ""),
        ("file", False, ""),
        ("link", False, ""),
        ("pipe", False, ""),  # nobody reads it
        ("none/new", False, "No such file or directory"),
        ("folder", False, "Is a directory"),
        ("file/new", False, "Not a directory"),
        ("x" * 256, False, "File name too long"),
        ("folder", True, ""),
        ("none/new", True, ""),
        ("file", True, "Not a directory"),
        ("file/new", True, "Not a directory"),
        ("x" * 256, True, "File name too long"),
    ],
)
def test_a_place_for_a_result_is_checked_and_left_as_it_is(tmp_path, monkeypatch, path, is_folder, reason):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("old")
    Path("link").symlink_to("gone")
    os.mkfifo("pipe")
    if reason:
        kind = "folder" if is_folder else "file"
        with pytest.raises(
            InputError, match=rf"^--out={path[:9]}.* cannot be written \({reason}\): give another {kind}\.$"
        ):
            check_output("--out", Path(path), is_folder)
    else:
        check_output("--out", Path(path), is_folder)
    assert sorted(os.listdir()) == ["file", "folder", "link", "pipe"] and Path("file").read_text() == "old"
    assert os.listdir("folder") == [] and not Path("link").exists()


@pytest.mark.parametrize(
    ("check", "taken"), [(check_new_file, "../file"), (check_new_folder, "."), (check_new_folder, "../a")]
)
def test_a_new_place_is_none_that_has_something_or_is_in_use(tmp_path, monkeypatch, check, taken):
    for folder in ("a/empty", "here"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(InputError, match=f"^--out={re.escape(taken)} exists: .*, or remove it"):
        check("--out", Path(taken))
    check("--out", Path("new"))
    check_new_folder("--out", Path("../a/empty"))
    for path in ("s3://bucket/a", "file:///a"):  # of which a Path would be a folder here
        with pytest.raises(InputError, match="^--out=.* is a URL: "):
            check_new_folder("--out", Path(path))
