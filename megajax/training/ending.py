"""The end of a training process, which several threads and signals may come to: decided once, told once.

Nothing here needs jax, since a process may end before it is imported.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megajax import threads
from megajax.config import Config
from megajax.console import INTERRUPTED, STOPPED, described
from megajax.training import events
from megajax.training.run_lock import RunLock

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
early = list[int]()  # requests from before the trainer listened, which the thread may read too late


class Ending:
    """Made before jax starts; process 0 of a run speaks for all, or process 1 if that one is lost."""

    def __init__(self, config: Config):
        self.config = config
        self.speaks = False
        self.owns_run = False  # the run directory's lock was taken
        self.step: int | None = None
        self._begun = threading.Lock()  # never released

    def begin(self) -> None:
        """The first thread that calls this ends the process; another one waits here for that end."""
        self._begun.acquire()

    def tell(self, kind: str, text: str, status: int) -> None:
        """Send the event of the end, "end", "hang" or "lost", if the run has begun to write its directory."""
        if self.speaks and events.has_target(self.config) and (self.owns_run or self._could_own_run()):
            found = events.event(self.config, kind, self.step, text, status)
            within_seconds(events.SECONDS, "logging.on_event", events.deliver, self.config, found)

    def _could_own_run(self) -> bool:
        """Whether an earlier process began the run, and none goes on with it."""
        run_dir = Path(self.config.run.dir)
        return run_dir.is_dir() and not RunLock(run_dir).is_taken()


def within_seconds(seconds: float, name: str, function: Any, *arguments: Any) -> None:
    """Call `function`, but don't wait longer: a file system or a pipe may hang, too. `name` says what it does."""
    threads.start(name, function, *arguments).join(seconds)


def read_by_a_thread(number: int, _: object) -> None:
    """Handler of the signals that a thread of `megajax.train` reads from a pipe: until the trainer has its own."""
    if number in STOP_SIGNALS:
        early.append(number)


@contextlib.contextmanager
def signals_end_the_process(ending: Ending, clean_up: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and requests to stop end the process immediately, even in a compilation, except while the trainer runs.

    Python runs a handler only between two steps of the main thread, which waits for XLA. So the signal's number comes
    through a pipe to another thread.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def wait() -> None:
        while number := os.read(reader, 1):
            if signal.getsignal(number[0]) is not read_by_a_thread:  # the trainer has it
                continue
            ending.begin()
            text, status = "stopped on request before the first step: there is nothing to save.", STOPPED
            if number[0] == signal.SIGINT:
                text, status = described(KeyboardInterrupt())
            shown = f"\nmegajax: error: {text}" if status == INTERRUPTED else f"megajax: {text}"
            print(shown, file=sys.stderr, flush=True)
            try:
                ending.tell("end", text, status)
                clean_up()
            finally:
                os._exit(status)
        os.close(reader)

    try:
        before = {number: signal.signal(number, read_by_a_thread) for number in (signal.SIGINT, *STOP_SIGNALS)}
    except ValueError:  # only the main thread may set signal handlers
        os.close(reader)
        os.close(writer)
        yield
        return
    wakeup = signal.set_wakeup_fd(writer)
    threads.start("the wait for signals", wait)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(writer)  # ends the thread
