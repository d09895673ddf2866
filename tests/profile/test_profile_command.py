"""`megajax profile` on virtual CPU devices: a config is traced, its folder read again, and mistakes are sentences."""

import contextlib
import os
import re
import shutil
from pathlib import Path

import pytest

from megajax.tools.profile.__main__ import main

CONFIG = """
run: {name: small, steps: 9}
model: {num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 2, vocab_size: 129}
mesh: {pipeline: 2, tensor: 2, data: -1}
batch: {global_size: 8, sequence_length: 32, num_microbatches: 2}
data: {kind: synthetic}
precision: {compute: float32}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of two traced steps, with the text of the command in report.txt."""
    place = tmp_path_factory.mktemp("profile")
    (place / "small.yaml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch, open(place / "report.txt", "w") as report:
        patch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # restored afterwards
        with contextlib.redirect_stdout(report):
            assert main([str(place / "small.yaml"), "run.seed=3", "--steps=2", f"--save={place / 'traced'}"]) == 0
    return place


def rows(text: str) -> dict[str, list[str]]:
    """The cells of the table's rows by their first one."""
    table = text.split("\n\n")[1].splitlines()
    return {cells[0]: cells[1:] for cells in ([c.strip() for c in line.split("|")[1:-1]] for line in table)}


def test_a_traced_config_has_rows_that_add_up_to_the_step(folder):
    text = (folder / "report.txt").read_text()
    assert text.startswith("small, pipeline 2 × data 2 × tensor 2, 8 × cpu, 2 traced steps\n")
    found = rows(text)
    assert {"matmuls", "attention", "head and loss", "optimizer", "pipeline bubble"} <= found.keys()
    assert "exposed collectives over tensor" in found
    times = {row: float(cells[0].replace(",", "")) for row, cells in found.items() if row not in ("", "---")}
    assert sum(ms for row, ms in times.items() if row != "step") == pytest.approx(times["step"], abs=0.1)
    assert len(re.findall(r"^CPU \d: ", text, re.M)) == 8
    assert "The planner has no rates of cpu" in text and "Virtual CPU devices share" in text
    assert "The largest gap: " in text


def test_a_folder_is_read_again_with_a_prediction_and_its_parts(folder, capsys):
    assert main([str(folder / "traced"), "--device=h200", "--parts", "--operations=3"]) == 0
    text = capsys.readouterr().out
    written = rows((folder / "report.txt").read_text())
    read = rows(text)
    assert read[""][2:] == ["predicted, H200", "difference"]
    assert read["matmuls"][:2] == written["matmuls"], "the same trace"
    assert float(read["matmuls"][0]) - float(read["matmuls"][2]) == pytest.approx(float(read["matmuls"][3]), abs=0.02)
    assert text.count("\n| --- |") == 3, "the tables of rows, parts and operations"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("profile/plugins", "has no trace (no *.xplane.pb)"),
        ("profile/trace.json", "trace.json is missing, which megajax writes with a trace"),
        ("config.yaml", "config.yaml is missing"),
    ],
)
def test_a_folder_without_a_part_of_the_trace_is_a_sentence(folder, tmp_path, capsys, change, sentence):
    copy = Path(shutil.copytree(folder / "traced", tmp_path / "copy"))
    path = copy / change
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(SystemExit) as stopped:
        main([str(copy)])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert sentence in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(b"no trace", "is no trace of jax.profiler"), (b"", "has no operation of a device")],
)
def test_a_damaged_trace_is_a_sentence(folder, tmp_path, capsys, content, sentence):
    copy = Path(shutil.copytree(folder / "traced", tmp_path / "copy"))
    for path in copy.rglob("*.xplane.pb"):
        path.write_bytes(content)
    with pytest.raises(SystemExit):
        main([str(copy)])
    printed = capsys.readouterr().err
    assert printed.startswith("megajax: error: ") and sentence in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nowhere"], "config file nowhere does not exist"),
        (["{config}", "--steps=0"], "--steps=0 is below 1: give 1 or more."),
        (["{config}", "--operations=-1"], "--operations=-1 is below 0: give 0 or more."),
        (["{place}/traced", "--save={place}/new"], "has a trace already: leave --save out."),
        (["{config}", "mesh.data=3"], "mesh.data=3"),
        (["{config}", "--save={place}"], "--save={place} exists: give a new folder"),
        (["{config}", "--save={place}/new", "--device=abacus"], "--device=abacus is not known"),
        (["{config}", "--save={place}/new", "--rates={config}"], "the planner has no rates of cpu that the file could"),
        (["{place}", "run.seed=4"], "run.seed=4 cannot change the trace in"),
        (["{place}/traced", "--device=abacus"], "--device=abacus is not known"),
        (["{place}/traced", "--rates={config}"], "the planner has no rates of cpu that the file could change"),
    ],
)
def test_mistakes_are_a_sentence(folder, arguments, sentence, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    names = {"config": folder / "small.yaml", "place": folder}
    with pytest.raises(SystemExit) as stopped:
        main([argument.format(**names) for argument in arguments])
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith("megajax: error: ") and sentence.format(**names) in printed.err
    assert not (folder / "new").exists()
