"""What the tests of parallelism share: runs held to megajax/reference.py, and its traces kept for several tests."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import single_device


@pytest.fixture(scope="session")
def compiled_steps(h200_store) -> list[str]:
    """Options of scripts that compile for H200s: what they have compiled is kept in `h200_store`."""
    return ["--store", str(h200_store)] if h200_store else []


@pytest.fixture(scope="session")
def table() -> ModuleType:
    """tests/references/single_device.py, which the mesh tables are made of too."""
    return single_device


@pytest.fixture(scope="session")
def reference(table) -> Callable:
    """The trace by megajax/reference.py that a config is held to, from `weights_of` or other weights, made once."""
    traces = {}

    def of(config, weights=None):
        config = table.reference_config(config)
        key = config.to_yaml(), weights and tuple((name, np.asarray(w).tobytes()) for name, w in weights.items())
        if key not in traces:
            traces[key] = table.expected(config, table.weights_of(config) if weights is None else weights)
        return traces[key]

    return of


@pytest.fixture
def difference(table, reference) -> Callable:
    """How far a config's run is from its reference; both start from the reference's weights."""

    def of(config):
        expected = reference(config)
        return table.compare(table.train(config, expected.initial), expected)

    return of
