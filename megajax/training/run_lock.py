"""The lock of a run directory, in which one process trains at a time: a file with the owner's name and heartbeat."""

import atexit
import contextlib
import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypedDict

from pydantic import Field

from megajax import cluster, json_files, threads
from megajax.errors import InputError, UserError, shown
from megajax.files import HEARTBEAT_SECONDS, LOCK, METRICS, SUBDIRECTORY
from megajax.json_files import Count, Damaged

WATCH_SECONDS = 2.5 * HEARTBEAT_SECONDS  # without a heartbeat in this time, an owner on another host is gone
SHARED_SECONDS = 70.0  # in which a file appears on all hosts: NFS may hide a new one for a minute


class Owner(TypedDict):
    """A process that trains in a run directory."""

    host: str
    process: Annotated[int, Field(gt=0, lt=2**31)]
    since: str
    boot: str
    processes: str
    started: Count | None


class RunLock:
    """The lock of one run directory; `with lock:` or `acquire` and `release`. Only process 0 of a run takes it.

    `lost` turns True if another process took the lock over, which can happen if this process was suspended for long.
    """

    def __init__(self, run_dir: str | Path):
        self.path = Path(run_dir) / LOCK
        self.held = self.lost = False
        self._released = threading.Event()
        self._thread: threading.Thread | None = None  # the heartbeat, on process 0

    def acquire(self, say: Callable[[str], None] = print) -> None:
        """Take the lock, or take it over if its owner is gone. Otherwise raises InputError on every process.

        Also if another process of the run does not see the lock: the first save would wait for its files forever.
        """
        if self.held:
            return
        at, owner = cluster.current().first_decides(lambda: (str(self.path.parent.resolve()), self._acquire(say)))
        self.held = True
        if problem := cluster.current().first_problem(lambda: self._unshared(at, owner)):
            self.release()  # else the next call would find it held, and ask no more
            raise InputError(problem)

    def release(self) -> None:
        """Release the lock if it is held."""
        if self.held and self._thread is not None:
            self._released.set()
            self._thread.join()
            if not self.lost:
                self.path.unlink(missing_ok=True)
            atexit.unregister(self.release)
        self.held, self._thread = False, None

    def is_taken(self) -> bool:
        """Whether another process that still runs holds the lock."""
        self._mine, owner = _this_process(), read_owner(self.path)
        return owner is not None and not self._is_mine(owner) and self._is_alive(owner, lambda _: None)

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _unshared(self, at: str, owner: Owner) -> str:
        """The problem if this process does not see the lock of process 0, whose run directory is `at`."""
        end = time.monotonic() + SHARED_SECONDS
        while read_owner(self.path) != owner:
            if time.monotonic() > end:
                here = f"run.dir={self.path.parent} is {self.path.parent.resolve()} on host {socket.gethostname()}"
                return (
                    f"{here}, where the files of process 0 do not appear, which writes to {at} on host {owner['host']}:"
                    " give the path of a directory on a file system that all processes share."
                )
            time.sleep(0.5)
        return ""

    def _acquire(self, say: Callable[[str], None]) -> Owner:
        """Take the lock on process 0; its owner as the file has it."""
        self._mine = _this_process()
        while not self._created():
            owner = read_owner(self.path)
            if owner is None and not self.path.exists():
                continue  # released just now
            if owner is not None and self._is_mine(owner):
                return owner  # another Trainer of this process holds it
            if self._is_alive(owner, say):
                raise InputError(
                    f"run.dir={self.path.parent} is in use: {_named(owner)} trains there: wait for it, stop it, or "
                    "choose another run.dir."
                )
            if self._removed(owner):
                say(f"taking over {self.path.parent}: {_named(owner)} is gone")
        self._released.clear()
        self.lost = False
        self._thread = threads.start(f"the sign of life in {self.path}", self._beat, needed=True)
        atexit.register(self.release)
        return self._mine

    def _is_mine(self, owner: Owner) -> bool:
        return {**owner, "since": ""} == {**self._mine, "since": ""}

    def _created(self) -> bool:
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(json.dumps(self._mine))
        except FileExistsError:
            return False
        except OSError as error:
            raise InputError(f"{self.path} cannot be written ({error.strerror}): choose another run.dir.") from None
        return True

    def _is_alive(self, owner: Owner | None, say: Callable[[str], None]) -> bool:
        """Whether the owner still runs: by its process number on the same host, else by its heartbeat."""
        if owner is not None and all(owner[key] == self._mine[key] for key in ("host", "boot", "processes")):
            return _started(owner["process"]) == owner["started"]
        say(f"run.dir={self.path.parent} has a lock of {_named(owner)}: waiting up to {WATCH_SECONDS:g} s for a sign")
        seen = _touched(self.path)
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(min(0.5, WATCH_SECONDS / 5))
            if _touched(self.path) != seen:
                return self.path.exists()
        return False

    def _removed(self, owner: Owner | None) -> bool:
        """Remove the lock of a process that is gone, but not one that another process took meanwhile."""
        aside = self.path.with_name(f"{LOCK}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(aside)
            removed = read_owner(aside) == owner
            if not removed:
                with contextlib.suppress(OSError):  # a third process has taken the lock meanwhile
                    os.link(aside, self.path)
            aside.unlink()
            return removed
        return False

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_SECONDS):
            with contextlib.suppress(OSError, UserError):  # a file system may fail temporarily
                if not self._created():
                    owner = read_owner(self.path)
                    if owner is not None and owner != self._mine:
                        self.lost = True
                        return
                    os.utime(self.path)


class Leftovers:
    """What a start leaves behind if it is refused, or interrupted before its first logged step, in its run directory.

    Made before anything is written there.
    """

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


def _this_process() -> Owner:
    """A unique description of this process."""
    boot, processes = "", ""
    with contextlib.suppress(OSError):  # not on Linux: then only the host
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        processes = os.readlink("/proc/self/ns/pid")  # containers have process numbers of their own
    return {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "boot": boot,
        "processes": processes,
        "started": _started(os.getpid()),
    }


def _started(process: int) -> int | None:
    """When a process of this host started, in the kernel's ticks: it tells processes with the same number apart.

    0 if the system has no such figure, None if there is no such process.
    """
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # another user's process, but it exists
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0
    return None if state[0] == "Z" else int(state[19])


def read_owner(path: Path) -> Owner | None:
    """The owner of a lock; None if there is no lock, or no owner in it."""
    try:
        return json_files.read(path, Owner, "remove it if nothing trains there")
    except Damaged:
        return None  # gone, or its writer was killed before it wrote


def _touched(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _named(owner: Owner | None) -> str:
    if owner is None:
        return "an unknown process"
    return f"process {owner['process']} on {shown(owner['host'])} (since {shown(owner['since'])})"
