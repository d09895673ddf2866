"""Requests to stop: SIGTERM, SIGUSR1, Ctrl-C and the end of `run.max_minutes`, and the step at which all stop."""

import contextlib
import signal
import sys
import threading
import time

from megajax import cluster, threads
from megajax.cluster.messages import Failure
from megajax.training import ending
from megajax.training.ending import STOP_SIGNALS, read_by_a_thread


def deadline(minutes: float | None, start_time: float) -> float | None:
    """The end of `run.max_minutes`, as of time.monotonic(); `start_time` is that of the process, as of time.time()."""
    return None if minutes is None else time.monotonic() - (time.time() - start_time) + 60 * minutes


class StopSignals:
    """SIGTERM, SIGUSR1, a first Ctrl-C and the deadline request a stop with a checkpoint while this context is open.

    After the first Ctrl-C the handler from before the context is active again.
    """

    SIGNALS = (*STOP_SIGNALS, signal.SIGINT)

    def __init__(self, step: int = 0, deadline: float | None = None):
        """`step`: number of steps so far; `deadline`: as of time.monotonic()."""
        self._step, self._deadline = step, deadline
        self._asked = False
        self.is_done = False  # the request said that the run has reached its goal
        self.at_deadline = False  # it was reached before any other request
        self._agreement: Agreement | None = None

    def __enter__(self) -> "StopSignals":
        self._before = {}
        if cluster.current().size > 1:
            self._agreement = Agreement(self._step)
        with contextlib.suppress(ValueError):  # only the main thread may set handlers; a notebook may run in another
            self._before = {s: signal.signal(s, self._handle) for s in self.SIGNALS}
            self._asked = bool(ending.early)
            self._wakeup = signal.set_wakeup_fd(-1)  # by which `megajax.train` hears of a Ctrl-C: not of the first one
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # A request during the last save changes nothing: the thread would end the process before it is complete.
            if number == signal.SIGINT or handler is not read_by_a_thread:
                signal.signal(number, handler)
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
        if self._agreement is not None:
            self._agreement.close()

    def ask(self, done: bool = False) -> None:
        """Request a stop, as a signal does; `done`, on all processes: the run has reached its goal."""
        self._asked, self.is_done = True, self.is_done or done

    def _handle(self, number: int, _: object) -> None:
        self.ask()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, self._before[signal.SIGINT])
            signal.set_wakeup_fd(self._wakeup)
            sentence = "saving and stopping; Ctrl-C again stops at once, without saving"
            print(f"\nmegajax: {sentence}", file=sys.stderr, flush=True)

    def go_back(self, step: int) -> None:
        """The run continues at an earlier `step`; all processes call this.

        A step on which they have agreed lies ahead of it. So they agree again, on one soon after `step`, if a stop was
        requested: the process that did so asks again after its next step.
        """
        if self._agreement is not None:
            self._agreement.close()
            self._agreement = Agreement(step)

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`, the last one that this process has started; the same step on all processes."""
        if self._deadline is not None and time.monotonic() >= self._deadline and not self._asked:
            self._asked = self.at_deadline = True
        if self._agreement is None:
            return self._asked
        if self._asked:
            self._agreement.ask()
        return self._agreement.reached(step)


class Agreement:
    """The step at which all processes of a run stop.

    A thread of each process waits for a request, so a step costs nothing. When one comes, the thread posts the step
    that its process is about to start, process 0 publishes the latest of them, and all run on to that step. Nobody is
    past it: a process that the thread has told of the request starts no step before it knows the answer. Nobody waits
    for ever: the threads answer even if their process waits for the devices, and so for steps that others have yet to
    start.
    """

    def __init__(self, step: int):
        self._cluster = cluster.current()
        self._messages = self._cluster.messages("stop")
        self._next, self._at = step + 1, 0  # the step that this process may start; the agreed one
        self._lock, self._agreed = threading.Lock(), threading.Event()
        self._requested = self._posted = False
        self._thread = threads.start("the agreement on a stop", self._listen, needed=True)

    def ask(self) -> None:
        """Request a stop of all processes."""
        if not self._posted:
            self._posted = True
            self._request("stop")

    def reached(self, step: int) -> bool:
        """Whether `step` is the agreed one; waits for the agreement if somebody has requested a stop."""
        with self._lock:
            if not self._requested:
                self._next = step + 1
                return False
        self._agreed.wait()
        return step >= self._at

    def close(self) -> None:
        """End the thread; the processes do this after the same step."""
        self._request("over")
        self._thread.join(timeout=10)

    def _request(self, word: str) -> None:
        with contextlib.suppress(Failure):  # another process was first
            self._messages.post("request", word)

    def _listen(self) -> None:
        try:
            messages = self._messages
            if messages.wait("request") == "stop":
                with self._lock:
                    self._requested, proposed = True, self._next
                messages.post(str(self._cluster.rank), str(proposed))
                if self._cluster.is_first:
                    latest = max(int(messages.wait(str(rank))) for rank in range(self._cluster.size))
                    messages.post("at", str(latest))
                self._at = int(messages.wait("at"))
        except Failure:
            pass  # the coordinator is gone, which `watch.py` reports; nobody waits for its answer
        finally:
            self._agreed.set()
