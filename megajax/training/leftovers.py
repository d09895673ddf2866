"""Removes what a start leaves behind if it is refused, or interrupted before its first logged step."""

import os
import shutil
import socket
from pathlib import Path

from megajax.files import LOCK, METRICS, SUBDIRECTORY


class Leftovers:
    """Of one process and its run directory; made before anything is written there."""

    def __init__(self, run_dir: str | Path):
        self.run_dir = Path(run_dir)
        self._made = [path for path in (self.run_dir, *self.run_dir.parents) if not path.exists()]

    def __enter__(self) -> "Leftovers":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        """A mistake ends a start by SystemExit; what another error leaves may explain it."""
        if isinstance(error, SystemExit) and error.code:
            self.remove()

    def remove(self) -> None:
        """Remove this process's lock, and the directory if this process made it and nothing has been logged there.

        Nothing is removed while another process holds the lock.
        """
        lock = self.run_dir / LOCK
        if lock.exists():
            from megajax.training.run_lock import read_owner  # here, because it imports jax

            owner = read_owner(lock)
            if owner is None or (owner["process"], owner["host"]) != (os.getpid(), socket.gethostname()):
                return
            lock.unlink(missing_ok=True)
        if self.run_dir not in self._made or self._has_results():
            return
        shutil.rmtree(self.run_dir, ignore_errors=True)
        for parent in self._made[1:]:
            try:
                parent.rmdir()
            except OSError:  # not empty, or removed already
                return

    def _has_results(self) -> bool:
        metrics, checkpoints = self.run_dir / METRICS, self.run_dir / SUBDIRECTORY
        if metrics.exists() and metrics.stat().st_size:
            return True
        return checkpoints.is_dir() and any(checkpoints.iterdir()) or checkpoints.is_symlink() or checkpoints.is_file()
