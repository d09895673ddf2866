"""What a launcher leaves in the run directory for `megajax status` while it starts the run again."""

import contextlib
import math
import time
from pathlib import Path

from megajax.files import HEARTBEAT_SECONDS, LOCK

NAME = "restarting"


class RestartSign:
    """A file from the end of one start until a process of the next one has the lock; none after the context."""

    def __init__(self, run_dir: str):
        self._path, self._lock, self._given = Path(run_dir, NAME), Path(run_dir, LOCK), 0.0

    def __enter__(self) -> "RestartSign":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def give(self) -> None:
        """Write or touch the file, if there is a run directory."""
        with contextlib.suppress(OSError):
            self._path.touch()
        self._given = time.monotonic()

    def renew(self) -> None:
        """Touch the file at intervals, as long as it counts."""
        if time.monotonic() - self._given >= HEARTBEAT_SECONDS and restarting_since(self._path.parent) is not None:
            self.give()


def restarting_since(run_dir: Path) -> float | None:
    """The time of a launcher's newest sign; None if there is none, or a process has the lock since then."""
    sign, lock = _touched(run_dir / NAME), _touched(run_dir / LOCK)
    return sign if sign > lock else None


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return -math.inf
