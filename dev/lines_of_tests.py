"""A plugin of pytest: which tests reach each line of megajax. `dev/planted_errors.py --lines` runs the suite with it.

With the variable LINES_OF_TESTS, a folder, each of pytest's processes writes a JSON file there: `seconds` of each test,
and for each "file:line" the tests that reach it. What a test runs in processes of its own is not seen, and of values
that tests share the first test is the one that made them.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PACKAGE = f"{Path(__file__).parents[1] / 'megajax'}/"
ROOT = len(PACKAGE) - len("megajax/")
monitoring = sys.monitoring

reached: dict[str, list[str]] = {}
seconds: dict[str, float] = {}
lines: set[tuple[str, int]] | None = None  # of the test that runs


def _reach(code: Any, line: int) -> Any:
    found = lines  # a thread of a test may still run when the test ends
    if found is not None and code.co_filename.startswith(PACKAGE):
        found.add((code.co_filename[ROOT:], line))
    return monitoring.DISABLE  # until the next test


def pytest_configure(config: pytest.Config) -> None:
    monitoring.use_tool_id(monitoring.PROFILER_ID, "lines of tests")
    monitoring.register_callback(monitoring.PROFILER_ID, monitoring.events.LINE, _reach)
    monitoring.set_events(monitoring.PROFILER_ID, monitoring.events.LINE)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    global lines
    lines = set()
    monitoring.restart_events()
    start = time.monotonic()
    try:
        return (yield)
    finally:
        seconds[item.nodeid] = time.monotonic() - start
        found, lines = lines, None
        for file, line in found.copy():
            reached.setdefault(f"{file}:{line}", []).append(item.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if folder := os.environ.get("LINES_OF_TESTS"):
        file = Path(folder) / f"{os.environ.get('PYTEST_XDIST_WORKER', 'main')}.json"
        file.write_text(json.dumps({"reached": reached, "seconds": seconds}), encoding="utf-8")
