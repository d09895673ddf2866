"""What tells others about a run while it trains: trackers, events, and the console's text in the run directory."""

import logging
import os
import queue
import socket
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from megajax import threads
from megajax.config import Config
from megajax.console import DONE, STOPPED, described, early_warnings
from megajax.files import CONSOLE_LOG
from megajax.training import events
from megajax.training.logs import CONSOLE
from megajax.training.trackers import Tracker, check_trackers, start_trackers

WAITING = 1000  # calls; then the next ones are left out
CLOSING_SECONDS = 60.0  # for what W&B or MLflow has not been sent yet


class Monitoring:
    """Started after the lock is taken and ended with the run; on process 0 only, and nothing here ends a run."""

    def __init__(self, config: Config, note: Callable[[str], None]):
        """Raises ConfigError for a missing package or program."""
        self.config, self._note = config, note
        self._trackers: list[Tracker] = []
        self._services: Background | None = None
        self._events: Background | None = None
        self._kept: KeptConsole | None = None
        check_trackers(config)
        events.check_target(config)

    def start(self, say: Callable[[str], None]) -> None:
        """Begin, on process 0. Raises InputError if a tracker cannot start."""
        self._kept = KeptConsole(Path(self.config.run.dir) / CONSOLE_LOG)
        self._services, self._events = Background(self._note), Background(self._note)
        self._trackers.extend(start_trackers(self.config, say))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """The numbers of a step, by tag."""
        for tracker in self._trackers:
            assert self._services is not None
            self._services.submit(tracker.name, lambda tracker=tracker: tracker.write(step, numbers))

    def event(self, kind: str, step: int, text: str) -> None:
        """Send an event of a run that goes on, if `logging.on_event` is set."""
        if self._events is not None and self.config.logging.on_event is not None:
            found = events.event(self.config, kind, step, text)
            self._events.submit("logging.on_event", lambda: events.deliver(self.config, found))

    @property
    def last_line(self) -> str:
        """The console's last line."""
        return "" if self._kept is None else self._kept.last

    def end(self, status: int | None, error: BaseException | None) -> None:
        """The run ends with a status or an error."""
        if self._kept is None or self._services is None or self._events is None:
            return
        if error is not None:
            sentence, status = described(error)
            CONSOLE.info(f"megajax: error: {sentence}")
        failed = status not in (DONE, STOPPED)
        for tracker in self._trackers:
            self._services.submit(tracker.name, lambda tracker=tracker: tracker.close(failed))
        self._services.close(CLOSING_SECONDS)
        self._events.close(events.SECONDS)
        self._kept.close()
        self._trackers, self._services, self._events, self._kept = [], None, None, None


class KeptConsole(logging.Handler):
    """Appends the console's lines, and warnings, to a file; `last` is the last line. A full disk stops it silently."""

    def __init__(self, path: Path):
        file = path.open("a", encoding="utf-8", buffering=1)  # first: logging closes all that began to be handlers
        super().__init__()
        self.last, self._file = "", file
        self._show = warnings.showwarning
        warnings.showwarning = self._keep_warning
        CONSOLE.setLevel(logging.INFO)
        CONSOLE.addHandler(self)
        self._write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S %z')} process {os.getpid()} on {socket.gethostname()}")
        while early_warnings:
            self._write(f"megajax: warning: {early_warnings.popleft()}")

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
        self._write(self.last)

    def close(self) -> None:
        CONSOLE.removeHandler(self)
        warnings.showwarning = self._show
        try:
            self._file.close()
        except OSError:
            pass
        super().close()

    def _keep_warning(self, message, category, filename, lineno, file=None, line=None) -> None:
        self._write(f"{category.__name__}: {message}")
        self._show(message, category, filename, lineno, file, line)

    def _write(self, text: str) -> None:
        try:
            self._file.write(f"{text}\n")
        except OSError:
            pass


class Background:
    """Calls to services that may be slow or gone, one after another in a thread: a run does not wait for them.

    The first failure of each service is a line on the console.
    """

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
