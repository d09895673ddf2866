"""Shared by the processes that read or tokenise data for another one."""

import multiprocessing
import os

from megajax import threads


def end_with_parent() -> None:
    """Runs in a worker process: end it when its parent ends, also if the parent is killed and cannot stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threads.start("the wait for the end of the trainer", wait)
