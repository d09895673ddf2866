"""What the tests of parallelism share: the mesh table's code, and traces kept for several tests."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/mesh_table.py"


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """scripts/mesh_table.py."""
    spec = importlib.util.spec_from_file_location("mesh_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def reference(table) -> Callable:
    """The single-device trace that a config is held to, made once."""
    traces = {}

    def of(config):
        config = table.reference_config(config)
        key = config.to_yaml()
        if key not in traces:
            traces[key] = table.train(config)
        return traces[key]

    return of


@pytest.fixture
def difference(table, reference) -> Callable:
    """How far a config's run is from its single-device reference; both start from the reference's weights."""

    def of(config):
        expected = reference(config)
        return table.compare(table.train(config, expected.initial), expected)

    return of
