"""The command line: what is printed where, and the exit status."""

import sys
from pathlib import Path

import pytest

from megajax.config import Config, load_config
from megajax.config.cli import parse_command_line, user_errors
from megajax.errors import InputError

TEXT = """\
model: {num_layers: 4, hidden_size: 64, num_heads: 8, vocab_size: 1000}
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
"""
USAGE = "python -m megajax.train CONFIG.yaml [section.key=value ...] [--print-config] [--diff [OTHER.yaml]]"
USAGE += " [--help [SECTION]]"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(TEXT)


def parse(*argv: str) -> Config:
    with user_errors():
        return parse_command_line(argv, "megajax.train")
    raise AssertionError("unreachable")


def test_config_and_overrides_give_a_config():
    assert parse("x.yaml", "run.steps=5", "mesh.fsdp=-1") == load_config("x.yaml", ["run.steps=5", "mesh.fsdp=-1"])


@pytest.mark.smoke
@pytest.mark.parametrize("argv", ["x.yaml --print-config run.steps=5", "--print-config x.yaml run.steps=5"])
def test_print_config_prints_what_runs_again_to_the_same_result(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    Path("printed.yaml").write_text(printed)
    assert load_config("printed.yaml") == load_config("x.yaml", ["run.steps=5"])
    assert load_config("printed.yaml").to_yaml() == printed


@pytest.mark.parametrize("argv", [["--help"], ["x.yaml", "--help"]])
def test_help_shows_usage_and_every_key(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    printed = capsys.readouterr().out
    assert stop.value.code == 0
    assert USAGE in printed and "  logging.profile_steps  Steps in the trace. [int, default: 3]\n" in printed


ERRORS = {
    "": f"no config is given (the command line): write {USAGE}.",
    "x.yaml --steps": "--steps is not an option (the command line): write run.steps=VALUE.",
    "x.yaml run.steps": "run.steps is not an override (the command line): write section.key=value.",
    "x.yaml run.step=5": ("run.step is not a config key (the command line: run.step=5): did you mean run.steps?"),
    "run.steps=5 x.yaml": "config file run.steps=5 does not exist: give the path of a YAML file.",
}


@pytest.mark.smoke
@pytest.mark.parametrize("argv", ERRORS)
def test_a_mistake_is_one_sentence_on_stderr_and_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv.split())
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err == f"megajax: error: {ERRORS[argv]}\n"


def test_other_user_errors_end_the_same_way_and_our_own_are_not_hidden(capsys):
    with pytest.raises(SystemExit) as stop, user_errors():
        raise InputError("file.bin is missing: make it.")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "megajax: error: file.bin is missing: make it.\n"
    with pytest.raises(ZeroDivisionError), user_errors():
        print(1 / 0, file=sys.stderr)


def test_a_warning_is_one_line_on_stderr(capsys):
    parse("x.yaml", "remat.layers=2")
    expected = (
        "megajax: warning: remat.layers=2 has no effect with remat.policy=none"
        " (the command line: remat.layers=2): remove it.\n"
    )
    assert capsys.readouterr().err == expected
