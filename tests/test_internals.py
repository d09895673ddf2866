"""Private names of jax and of orbax have one file each, and so has XLA's barrier."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# What no other file may name → the file.
RULES = {
    r"jax\._src|jax\.extend|jaxlib": "megajax/jax_internals.py",
    r"orbax\..*\._": "megajax/checkpoint/orbax_internals.py",
    r"(jax\.)?lax\.optimization_barrier": "megajax/ops/barriers.py",
    r"jax\.process_(index|count)|jax\.experimental\.multihost_utils": "megajax/inference/generation.py",  # of arrays
}


def names(source: str) -> Iterator[str]:
    """The dotted names that a file imports or reads."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("from jax._src import core", 0),
        ("from jax import _src", 0),
        ("def f():\n    import jaxlib.mlir.ir", 0),
        ("x = jax.extend.core.Var", 0),
        ("from orbax.checkpoint._src.path import gcs_utils", 1),
        ("y = lax.optimization_barrier(x)", 2),
        ("from jax.lax import optimization_barrier as b", 2),
        ("jax.process_index()", 3),
    ],
)
def test_the_rules_see_each_form(source, rule):
    assert WORDS.search(source)
    assert any(re.match(list(RULES)[rule], name) for name in names(source))


# A source without any of these words has none of the names; to parse all sources takes seconds.
WORDS = re.compile("_src|extend|jaxlib|orbax|optimization_barrier|process_index|process_count|multihost|plan.config")


@cache
def names_by_file() -> dict[str, set[str]]:
    paths = [path for folder in ("megajax", "scripts", "dev") for path in (ROOT / folder).rglob("*.py")]
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}
    return {path: {*names(text)} if WORDS.search(text) else set() for path, text in texts.items()}


@pytest.mark.parametrize("rule", RULES, ids=RULES.values())
def test_one_file_has_them(rule):
    found = {path for path, own in names_by_file().items() if any(re.match(rule, name) for name in own)}
    assert found == {RULES[rule]}


@pytest.mark.parametrize(
    ("file", "package"),
    [("megajax/jax_internals.py", "jax"), ("megajax/checkpoint/orbax_internals.py", "orbax-checkpoint")],
)
def test_each_private_name_has_a_reason_and_was_tried_with_the_installed_version(file, package):
    """After an upgrade try them again; what is public then leaves the file."""
    version = re.search(rf"^{package}==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert version
    text = (ROOT / file).read_text()
    blocks = [block for block in text.split("\n\n") if re.search("^from (jax|orbax)", block, re.MULTILINE)]
    assert blocks
    for block in blocks:
        reason = [line for line in block.splitlines() if line.startswith("# ")]
        assert len(" ".join(reason)) > 50 and reason[-1].endswith(f" [{version[1]}]"), block


def test_the_step_and_the_optimizer_read_no_config():
    """They ask the plan, whose values are what the step computes; import rules cannot see that they read its config."""
    folders = tuple(f"megajax/{name}/" for name in ("step", "weights", "parallel", "optim"))
    own = {path: names for path, names in names_by_file().items() if path.startswith(folders)}
    assert len(own) > 60
    assert not [
        f"{path}: {name}" for path, names in own.items() for name in names if re.search(r"\bplan\.config\b", name)
    ]
