"""Work on files from elsewhere in a child process with limits on memory and time, whose death is a sentence.

Chat templates and tokenizers are programs: nothing bounds what they take before they run. This module, and the modules
of the work, import neither jax nor the config, so that a child starts in 0.1 s.
"""

import os
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from mmap import mmap
from multiprocessing.connection import Connection
from socket import socketpair
from tempfile import TemporaryFile
from typing import Any

from megajax.errors import InputError, UserError, shown

MEMORY = 2**30  # bytes of address space
SECONDS = 3.0  # of the processor
SERVE = "import sys; from megajax.data.sandbox import serve; serve(*map(float, sys.argv[1:]))"
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
WORD = 8  # bytes


class Stopped(Exception):
    """A work did not end: how many values it had made, and an error that says why."""

    def __init__(self, made: int, error: ValueError):
        super().__init__(made, error)
        self.made, self.error = made, error


class LimitedProcess:
    """A process that works within limits: started by the first work, and again after its death.

    It ends with this object and with this process, also if that is killed.
    """

    def __init__(self, memory: int = MEMORY, seconds: float = SECONDS):
        """`seconds` are those of a work between two calls of `restart_clock`."""
        self.memory, self.seconds = memory, seconds
        self._lock, self._process = threading.Lock(), None

    def run[T](self, subject: str, cure: str, work: Callable[..., Iterator[T]], *arguments: Any) -> list[T]:
        """What `work(*arguments)` yields; `work` is a function of a module.

        Raises Stopped with a UserError of the work, or one that says which limit `subject` reached, with the `cure`.
        """
        with self._lock:
            connection = self._started()
            self._made[0] = 0
            try:
                connection.send((work, arguments))
                values, error = connection.recv()
            except RecursionError:  # nothing was sent
                problem = InputError(f"{subject} gets values that are nested too deeply: correct them.")
                raise Stopped(0, problem) from None
            except (EOFError, ConnectionError):
                assert self._process is not None
                values, error = [], self._process.wait()
            except BaseException:  # Ctrl-C
                self._end()  # the reply is not read
                raise
            if error is not None:
                raise Stopped(self._made[0], self._error(subject, cure, error))
            return values

    def _started(self) -> Connection:
        if self._process is None or self._process.poll() is not None:
            parent_end, child_end = socketpair()
            with child_end, TemporaryFile() as counter:
                counter.truncate(WORD)
                self._made = memoryview(mmap(counter.fileno(), WORD)).cast("Q")  # values, written by the child
                given = (counter.fileno(), self.memory, self.seconds)
                self._process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, *map(str, given)],
                    stdin=child_end.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # what native code writes when it aborts
                    pass_fds=given[:1],
                    env=os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    start_new_session=True,  # Ctrl-C does not reach it
                )
            self._connection = Connection(parent_end.detach())
            self._end = weakref.finalize(self, _end, self._process, self._connection)
        return self._connection

    def _error(self, subject: str, cure: str, end: Exception | int) -> UserError:
        """The sentence for an exception of the work, or for the exit status of its process."""
        if isinstance(end, UserError):
            return end
        if isinstance(end, MemoryError):
            why = f"takes more than {self.memory >> 20:,} MiB of memory"
        elif isinstance(end, AssertionError):  # a mistake of megajax
            raise end
        elif isinstance(end, Exception):
            why = f"fails ({type(end).__name__}: {shown(end)})"
        elif end == -signal.SIGPROF:
            why = f"takes more than {self.seconds:g} s of processor time"
        else:
            name = signal.Signals(-end).name if end < 0 else f"status {end}"
            why = f"ends its process ({name}), which may take {self.memory >> 20:,} MiB of memory"
        return InputError(f"{subject} {why}: {cure}.")


def _end(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()


_limit: float | None = None  # seconds of this process; None: it is no child
_restarted = 0.0


def restart_clock() -> None:
    """In a child: give what follows all of the time, or nine tenths of it. In other processes nothing."""
    global _restarted
    if _limit is not None and time.monotonic() - _restarted > _limit / 10:  # a system call takes long
        _restarted = time.monotonic()
        signal.setitimer(signal.ITIMER_PROF, _limit)


def serve(counter: float, memory: float, seconds: float) -> None:
    """Be a `LimitedProcess`'s process: work until the parent closes the connection."""
    global _limit
    _limit = seconds
    for kind, limit in ((resource.RLIMIT_AS, int(memory)), (resource.RLIMIT_CORE, 0)):
        most = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # native code too ends by it
    parent, made = Connection(sys.stdin.fileno()), memoryview(mmap(int(counter), WORD)).cast("Q")
    while _works(parent, made):
        pass


def _works(parent: Connection, made: memoryview) -> bool:
    """Answer one call of `LimitedProcess.run`; False: there is none."""
    values, error = [], None
    try:
        work, arguments = parent.recv()
        restart_clock()
        for value in work(*arguments):
            values.append(value)
            made[0] = len(values)
    except EOFError:
        return False
    except Exception as found:
        values, error = [], found
    parent.send((values, error))
    return True
