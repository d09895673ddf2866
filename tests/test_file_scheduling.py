"""A test run goes on after the crash of a worker: tests/references/file_scheduling.py."""

from types import SimpleNamespace
from typing import Any

import pytest
from file_scheduling import FileScheduling


class Worker:
    """Runs its tests in order, the last one only when it knows that no other follows, as xdist's workers do."""

    def __init__(self, scheduling: FileScheduling, tests: list[str]):
        self.scheduling, self.tests, self.shutting_down = scheduling, tests, False
        self.queue, self.done = list[int](), list[str]()
        self.gateway = SimpleNamespace(id="worker")
        scheduling.add_node(self)  # type: ignore[arg-type]
        scheduling.add_node_collection(self, tests)  # type: ignore[arg-type]
        if scheduling.collection_is_completed:
            scheduling.schedule()

    def send_runtest_some(self, indices: list[int]) -> None:
        self.queue += indices

    def shutdown(self) -> None:
        self.shutting_down = True

    def run(self, tests: int = 100) -> None:
        for _ in range(tests):
            if len(self.queue) > (0 if self.shutting_down else 1):
                index = self.queue.pop(0)
                self.done.append(self.tests[index])
                node: Any = self
                self.scheduling.mark_test_complete(node, index)


@pytest.mark.parametrize("finished", range(9))
@pytest.mark.parametrize("other_goes_on", [True, False])
def test_after_a_crash_every_other_test_runs_once(finished, other_goes_on):
    """The lost worker has finished some tests and files; the other one has ended before the new one starts, or not."""
    files = {"a": 3, "b": 1, "c": 1, "d": 2, "e": 1, "f": 4}
    tests = [f"{file}.py::test_{i}" for file, count in files.items() for i in range(count)]
    config: Any = SimpleNamespace(getvalue=lambda _: ["2*popen"], option=SimpleNamespace(loadscopereorder=False))
    scheduling = FileScheduling(config)
    lost, other = Worker(scheduling, tests), Worker(scheduling, tests)
    lost.run(finished)
    if not other_goes_on:
        other.run()
    node: Any = lost
    crashed = scheduling.remove_node(node)
    if other_goes_on:
        other.run()
    new = Worker(scheduling, tests)
    new.run()
    other.run()
    assert crashed == (tests[lost.queue[0]] if lost.queue else None)
    assert sorted([*lost.done, *other.done, *new.done, *([crashed] if crashed else [])]) == sorted(tests)
