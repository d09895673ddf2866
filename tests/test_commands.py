"""`megajax COMMAND` is `python -m megajax.COMMAND`; each says how it was called."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

from megajax import commands, console

COMMANDS = (
    "train launch preflight plan compile verify generate chat evaluate checkpoints status average schedule plot bench "
    "explain-weight profile preprocess inspect from-megatron export-megatron hf schema"
).split()
CALLS = {
    "/venv/bin/megajax": "megajax plot",
    "/src/megajax/__main__.py": "python -m megajax plot",
    "/src/megajax/tools/plot.py": "python -m megajax.tools.plot",
}


@pytest.mark.parametrize("called", CALLS)
def test_usage_names_the_program_as_it_was_called(called, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [called, "plot", "--help"])
    with pytest.raises(SystemExit) as stopped:
        commands.main()
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {CALLS[called]} [-h]")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_module_of_a_command_says_how_it_is_called(name):
    spec = importlib.util.find_spec(console.COMMANDS[name][0])
    assert spec is not None and spec.origin is not None
    words = (ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or "").split()
    called = [after.strip("`:") for word, after in zip(words, words[1:], strict=False) if word.lstrip("`") == "megajax"]
    assert name in called, called


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_has_a_line_for_each_command(arguments, capsys):
    assert commands.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "usage: megajax COMMAND ..."
    listed = [line.split()[0] for line in lines if line.startswith("  ")]
    assert listed == COMMANDS


def test_an_unknown_command_is_refused_with_the_nearest_one(capsys):
    assert commands.main(["trian", "x.yaml"]) == commands.main(["--nothing"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "megajax: error: trian is not a command of megajax: did you mean train?"
    assert second.endswith(f"choose {', '.join(COMMANDS)}.")


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("sft", "megajax train"),
        ("grpo", "GRPO"),
        ("infer", "write megajax generate"),
        ("serve", "megajax hf export"),
        ("perplexity", "write megajax evaluate"),
        ("convert", "write megajax hf import"),
        ("merge", "which merges adapters"),
        ("tokenize", "write megajax preprocess"),
        ("estimate-memory", "write megajax plan"),
        ("download", "nothing is downloaded"),
    ],
)
def test_a_command_of_another_project_is_answered_with_ours(name, cure, capsys):
    assert commands.main([name]) == 2
    assert f"{name} is not a command of megajax: " in (error := capsys.readouterr().err) and cure in error


@pytest.mark.parametrize(
    ("command", "required"),
    [("plan", "config"), ("verify", "config"), ("profile", "CONFIG_OR_RUN"), ("inspect", "PREFIX|CONFIG|RUN")],
)
def test_a_command_without_arguments_asks_for_its_config_and_not_for_overrides(command, required, capsys):
    with pytest.raises(SystemExit) as stopped:
        commands.main([command])
    assert stopped.value.code == 2
    assert f"the following arguments are required: {required}; " in capsys.readouterr().err


def test_the_exit_status_is_that_of_the_command(tmp_path):
    with pytest.raises(SystemExit) as stopped:
        commands.main(["plot", str(tmp_path)])
    assert stopped.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["launch", "x.yaml", "--processes", "-1"], "--processes=-1 is negative: give 0 or more."),
        (["launch", "x.yaml", "--max-restarts", "-1"], "--max-restarts=-1 is negative: give 0 or more."),
        (["status", "x", "--every", "0"], "--every=0 is not positive: give a number of seconds."),
        (["generate", "x", "--prompts", "p.jsonl", "--image", "a.png"], "--image belongs to --prompt: name the"),
        (
            ["generate", "x", "--chat", "--prompt", "a", "--chat-template-args", "{{a: &x 1, b: *x}}"],
            "--chat-template-args={{a: &x 1, b: *x}} has an alias, *NAME, which may stand for very many values: write",
        ),
    ],
)
def test_an_argument_that_cannot_be_is_refused(arguments, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        commands.main([argument.format(place=tmp_path) for argument in arguments])
    assert stopped.value.code == 2
    assert sentence.format(place=tmp_path) in capsys.readouterr().err


# Commands whose inputs do not exist, so that one that reads them first says so instead.
FILES = [
    "evaluate none --data none --output",
    "plan none.yaml --gpus 8 --write",
    "plan none.yaml --gpus 8 --explain tensor=2 --picture",
    "compile none.yaml --text",
    "schedule --svg",
    "from-megatron none.sh --write",
]
FOLDERS = ["profile none.yaml --save", "hf export none", "hf adapters none", "plot none --output"]


@pytest.mark.parametrize("command", [*FILES, *FOLDERS])
def test_a_place_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as stopped:
        commands.main([*command.split(), "file/x/y"])
    shown, said = capsys.readouterr()
    assert stopped.value.code == 2 and not shown
    assert "file/x" in said and "cannot be written (Not a directory): give another" in said
