"""The end of a training process, which several threads may come to: decided once, told once."""

import threading
from pathlib import Path
from typing import Any

from megajax import threads
from megajax.config import Config
from megajax.training import events


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
        if self.speaks and self.config.logging.on_event is not None and (self.owns_run or self._could_own_run()):
            found = events.event(self.config, kind, self.step, text, status)
            within_seconds(events.SECONDS, "logging.on_event", events.deliver, self.config, found)

    def _could_own_run(self) -> bool:
        """Whether an earlier process began the run, and none goes on with it."""
        from megajax.training.run_lock import RunLock  # here, because it imports jax

        run_dir = Path(self.config.run.dir)
        return run_dir.is_dir() and not RunLock(run_dir).is_taken()


def within_seconds(seconds: float, name: str, function: Any, *arguments: Any) -> None:
    """Call `function`, but don't wait longer: a file system or a pipe may hang, too. `name` says what it does."""
    threads.start(name, function, *arguments).join(seconds)
