"""The names of the package's classes."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dev import without_mtp
from dev.code_counts import repeated_classes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megajax"


@pytest.mark.smoke
def test_a_public_class_name_means_one_class():
    """So a search for a name finds one class. Private classes, `_Name`, may repeat."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    # By the statements that begin with "class": to parse all of the package takes seconds.
    declared = re.compile(r"^class \w+", re.MULTILINE)
    modules = {name: ast.parse("\n".join(f"{c}: ..." for c in declared.findall(t))) for name, t in texts.items()}
    assert "schema/config.py" in modules
    assert not repeated_classes(modules)
    modules["second.py"] = ast.parse("class Config: ...\nclass _Own: ...\nclass Another: ...")
    assert repeated_classes(modules) == {"Config": ["schema/config.py", "second.py"]}


@pytest.mark.smoke
def test_the_files_that_comments_and_docs_name_exist():
    """As `folder/file.py`: a reader goes there."""
    files = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    pages = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    others = (
        "tests/",
        "scripts/",
        "dev/",
        "docs/",
        "examples/",
        "megatron/",
        "tools/",
    )
    named = {
        (str(page.relative_to(ROOT)), name.removeprefix("megajax/"))
        for page in pages
        for name in re.findall(r"`([a-z_]+/[a-z_0-9/]+\.py)`", page.read_text(encoding="utf-8"))
        if not name.startswith(others)
    }
    assert len(named) > 60
    missing = {(page, name) for page, name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
    assert not missing


def test_multi_token_prediction_can_still_be_deleted(tmp_path):
    """Its files, the lines that register them and its keys; configs of a copy without it load."""
    for name in ("megajax", "configs"):
        shutil.copytree(without_mtp.ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    without_mtp.delete(tmp_path)
    program = "from megajax.config import load_config; load_config('configs/llama3_1b.yaml')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=without_mtp.environment(tmp_path), check=True)
