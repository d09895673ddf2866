"""Calls to services that may be slow or gone, in a thread of their own: a run does not wait for them."""

import queue
from collections.abc import Callable

from megajax import threads

WAITING = 1000  # calls; then the next ones are left out


class Background:
    """Makes calls one after another; the first failure of each service is a line on the console."""

    def __init__(self, note: Callable[[str], None]):
        self._note, self._failed = note, set[str]()
        self._calls = queue.Queue[tuple[str, Callable[[], object]] | None](WAITING)
        self._thread = threads.start("the thread of W&B, MLflow and on_event", self._work)

    def submit(self, service: str, call: Callable[[], object]) -> None:
        """Make a call soon; `service` names the receiver for the user."""
        try:
            self._calls.put_nowait((service, call))
        except queue.Full:
            self._fail(service, "it does not answer fast enough")

    def close(self, seconds: float) -> None:
        """Wait for all calls, `seconds` at most."""
        try:
            self._calls.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._note(f"megajax: warning: a service did not answer within {seconds:g} s at the end of the run")

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            service, call = entry
            try:
                call()
            except Exception as error:  # any error of a client, a command or the network
                self._fail(service, str(error).strip().splitlines()[0][:300] if str(error).strip() else repr(error))

    def _fail(self, service: str, reason: str) -> None:
        if service not in self._failed:
            self._failed.add(service)
            self._note(f"megajax: warning: {service} failed ({reason}); training continues")
