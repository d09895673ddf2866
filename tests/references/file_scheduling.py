"""How pytest-xdist distributes test files, with what it lacks after the crash of a worker.

xdist 3.8 queues all files of the lost worker again: a new worker gets one that is finished, waits for its tests for
ever, and the run hangs. It also runs the test that crashed again, up to four times for each worker.
"""

from typing import Any

from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    def remove_node(self, node: Any) -> str | None:
        """Queues the tests that a lost worker has not begun; the name of the test that ran."""
        crashed = None
        for file, tests in self.assigned_work.pop(node).items():
            left = [name for name, finished in tests.items() if not finished]
            if left and crashed is None:
                crashed = left.pop(0)
            if left:
                self.workqueue[file] = dict.fromkeys(left, False)
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Gives files until the worker has two tests, since it runs a test only when it knows the next one."""
        super()._reschedule(node)
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)
