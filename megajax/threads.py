"""Background threads: an error that the work of one does not expect is never unseen.

It is a line on stderr at once. If the run needs the work, `check`, which the run calls after each step, raises it too.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from megajax.errors import ThreadError, shown

_failed: list[str] = []  # sentences about work that the run needs


def start(name: str, work: Callable[..., object], *arguments: Any, needed: bool = False) -> threading.Thread:
    """Start a thread that does not keep the process from ending. `name` says what it does, for the user.

    needed: the run does not go on without it.
    """

    def guarded() -> None:
        try:
            work(*arguments)
        except Exception as error:  # the thread has nobody above it
            _report(name, error, needed)

    thread = threading.Thread(target=guarded, daemon=True, name=name)
    thread.start()
    return thread


def watched(future: Future[Any], name: str) -> None:
    """Report the error of a future that nobody asks for its result."""
    future.add_done_callback(lambda done: _report(name, done.exception(), False) if not done.cancelled() else None)


@contextmanager
def watching_others() -> Iterator[None]:
    """Report the errors of threads that libraries start, such as those of a server, as all others."""

    def report(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_type is not SystemExit:
            _report(f"the thread {failed.thread.name if failed.thread else '?'}", failed.exc_value, False)

    before, threading.excepthook = threading.excepthook, report
    try:
        yield
    finally:
        threading.excepthook = before


def check() -> None:
    """Raise a ThreadError if work that the run needs has failed."""
    if _failed:
        raise ThreadError(_failed.pop())


def _report(name: str, error: BaseException | None, needed: bool) -> None:
    if error is None:
        return
    sentence = f"{name} failed ({shown(f'{type(error).__name__}: {error}')})"
    if needed:
        sentence += ", so the run ends after this step: start the same command again to resume"
        _failed.append(f"{sentence}.")
    print(f"megajax: warning: {sentence}", file=sys.stderr, flush=True)
