"""What the tests of the config share: an empty current directory with one config file."""

from pathlib import Path

import pytest


@pytest.fixture
def base_config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an empty directory the current one, and writes the module's BASE to x.yaml in it."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(request.module.BASE)
