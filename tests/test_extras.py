"""Optional packages: every extra of pyproject.toml is imported by one function, which names it where it is missing."""

import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from megajax.errors import ConfigError, InputError
from megajax.extras import EXTRAS, require

ROOT = Path(__file__).parents[1]
OTHERS = {"cuda12", "cuda13", "h200", "tools", "dev"}  # jax's own plugins, and the tools of developers


def test_every_extra_of_the_package_is_listed():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == EXTRAS.keys() | OTHERS
    for extra, (_, module) in EXTRAS.items():
        (requirement, *_) = extras[extra]
        assert requirement.startswith(EXTRAS[extra][0]) or module.replace("_", "-") in requirement


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_package_is_imported_where_it_is_and_named_where_it_is_not(extra, monkeypatch):
    module = EXTRAS[extra][1]
    if find_spec(module) is not None and extra != "te":  # te loads CUDA's libraries
        assert require(extra, "KEY=1").__name__ == module
    monkeypatch.setitem(sys.modules, module, None)  # import raises ModuleNotFoundError
    with pytest.raises(InputError) as missing:
        require(extra, "KEY=1", "set KEY=0")
    assert str(missing.value).startswith("KEY=1 needs ")
    assert str(missing.value).endswith(f"pip install 'megajax[{extra}]', or set KEY=0.")


@pytest.mark.parametrize("problem", ["import {}", "raise ModuleNotFoundError('{}')", "raise OSError('{}')"])
def test_a_package_that_does_not_load_is_named_with_the_reason(problem, monkeypatch, tmp_path):
    (tmp_path / "s3fs.py").write_text(problem.format("no_such_module_of_its_own"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "s3fs", raising=False)
    with pytest.raises(ConfigError, match="KEY=1 cannot load s3fs .*no_such_module_of_its_own.*: repair its"):
        require("s3", "KEY=1", error=ConfigError)
