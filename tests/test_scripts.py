"""`--help` of every script shows its purpose and changes nothing."""

import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*ROOT.glob("scripts/*.py"), *ROOT.glob("dev/*.py")])
SCRIPTS = [
    path
    for path in FILES
    if "__main__" in (text := path.read_text("utf-8")) and ("ArgumentParser(" in text or "parser_of(" in text)
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_help_shows_the_usage_and_changes_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    documented = {path: path.stat().st_mtime_ns for path in ROOT.glob("docs/**/*")}
    with mock.patch.dict(os.environ), pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(script), run_name="__main__")
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("usage: ") and len(printed.splitlines()) > 3
    assert not list(tmp_path.iterdir())
    assert {path: path.stat().st_mtime_ns for path in ROOT.glob("docs/**/*")} == documented
