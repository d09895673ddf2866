"""The names of the package's classes."""

import ast
from pathlib import Path

import pytest

from dev.code_counts import repeated_classes

PACKAGE = Path(__file__).parents[1] / "megajax"


@pytest.mark.smoke
def test_a_public_class_name_means_one_class():
    """So a search for a name finds one class. Private classes, `_Name`, may repeat."""
    modules = {str(path.relative_to(PACKAGE)): ast.parse(path.read_bytes()) for path in PACKAGE.rglob("*.py")}
    assert "schema/config.py" in modules
    assert not repeated_classes(modules)
    modules["second.py"] = ast.parse("class Config: ...\nclass _Own: ...\nclass Another: ...")
    assert repeated_classes(modules) == {"Config": ["schema/config.py", "second.py"]}
