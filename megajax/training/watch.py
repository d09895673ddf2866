"""Ends a training process that hangs, or whose peers are gone, with a sentence and exit status 4."""

import faulthandler
import multiprocessing
import os
import statistics
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from megajax import cluster, threads
from megajax.cluster.peers import Peers
from megajax.config import Config
from megajax.config.sentences import located
from megajax.console import CRASH, LOST, described
from megajax.training.ending import Ending, within_seconds
from megajax.training.hooks import Hook, RunView
from megajax.training.speed import find_slowest

SAFE_TIMEOUT = 30.0  # seconds: a thread of a busy host waited up to 3 s for its turn (docs/reliability.md)
RECENT = 32  # steps whose median is compared
TICK = 1.0  # seconds between looks at the clock, at most
OTHER_WORK = 12  # limit of everything but steps, as a multiple of run.hang_min_seconds


class Watch(Hook):
    """Around a run, as a context: `stepped` after each step, `working` around everything else.

    It watches this process and the others from a thread; outside the context it does nothing, so a notebook is never
    ended. `status` is the run's exit status. A run of several processes ends with the context and without jax's own
    shutdown, which waits for all processes, and aborts if one is gone. `logging.on_event` hears of the end at its end.
    """

    def __init__(self, config: Config, ending: Ending | None = None):
        self.status, self.last_line = 0, ""
        self.ending = ending or Ending(config)
        self.ending.speaks = cluster.current().is_first
        self._entered = False
        self.peers: Peers | None = None
        self._config = config
        self._steps, self._last = deque[float](maxlen=RECENT), 0.0
        self._usual = 0.0  # seconds of a step; 0: not known yet
        self._work = "the start"  # what the process does instead of steps
        self._since = 0.0  # seconds since the last step, or the begin of other work
        self._slow: int | None = None  # the process that stood out at the last logged step
        self._executors: list[Executor] = []
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        self._entered = True
        if cluster.current().size > 1:
            self.peers = Peers(cluster.current(), self._config.run.peer_timeout_seconds)
            self._warn_of_a_short_timeout()
        threads.start("the watch over hangs", self._watch, needed=True)
        return self

    def _warn_of_a_short_timeout(self) -> None:
        if self._config.run.peer_timeout_seconds < SAFE_TIMEOUT and cluster.current().is_first:
            warnings.warn(
                f"{located(self._config, 'run.peer_timeout_seconds')} is short: a process that is only slow, as on a "
                f"busy host, may count as lost: set it to {SAFE_TIMEOUT:g} or more.",
                stacklevel=2,
            )

    def on_step(self, run: RunView) -> None:
        self.stepped(run.step)
        threads.check()

    def stepped(self, step: int) -> None:
        """The host has started `step` and comes to the next one."""
        now = time.monotonic()
        if self._last:  # 0 after other work
            self._steps.append(now - self._last)
            self._usual = statistics.median(self._steps)
        self.ending.step, self._last, self._work, self._since = step, now, "", 0.0
        if self.peers is not None:
            self.peers.step = step

    @contextmanager
    def working(self, name: str) -> Iterator[None]:
        """Around work that is no step, such as a save."""
        self._work, self._since = name, 0.0
        try:
            yield
        finally:
            self._work, self._since, self._last = "", 0.0, 0.0

    def slowest(self, seconds: dict[str, float], step_seconds: float, note: Callable[[str], None]) -> dict[str, Any]:
        """Post this process's times of its steps (`StepTimes.take`); process 0 gets the slowest, for metrics.jsonl.

        Notes a line if that process stands out and is another one than in the last line. The times of the others are
        those of their last signs. Nothing without peers.
        """
        if self.peers is None:
            return {}
        self.peers.own_seconds = seconds
        signs = dict(self.peers.signs)  # a copy, because another thread adds to it
        found = find_slowest({i: sign["own_seconds"] for i, sign in signs.items()} | {self.peers.rank: seconds})
        if found is None or self.peers.rank != 0:
            return {}
        values = {"slowest_process": found.process, "slowest_host": self.peers.host(found.process)}
        values |= {"slowest_own_seconds": found.total, "others_own_seconds": found.median_of_others}
        slow = found.process if found.stands_out(step_seconds) else None
        before, self._slow = self._slow, slow
        if slow is not None and slow != before:
            note(found.explain(self.peers.named(found.process), step_seconds))
        return values

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.peers is not None:
            if _collective_failed(error):
                self._wait_for_verdict(self.peers)
            if error is not None and not isinstance(error, SystemExit):
                sys.excepthook(kind, error, trace)
            self._work, self._since = "the end of the other processes", 0.0
            status = self.status if error is None else described(error)[1]
            self.peers.leave(status, agreed=error is None)  # a closed pipe ends this process alone with status 0
            self.ending.begin()
            self._tell(self.status, error)
            _exit(status)
        with self.working("the end of the process"):
            for executor in self._executors:
                executor.shutdown()
        self._over.set()
        self.ending.begin()
        self._tell(self.status, error)

    def run_ended(self, status: int | None, error: BaseException | None) -> None:
        """A run has ended, with a status or an error; outside the context the process goes on, and this is told now."""
        if not self._entered:
            self._tell(CRASH if status is None else status, error)

    def _tell(self, status: int, error: BaseException | None) -> None:
        self.ending.tell("end", *((self.last_line, status) if error is None else described(error)))

    def end_with(self, executor: Executor) -> None:
        """Python waits for the threads of `executor` before the process ends: so that this has a limit, too."""
        self._executors.append(executor)

    def _wait_for_verdict(self, peers: Peers) -> None:
        """A collective that fails may mean that a process was lost: then the other thread ends this one."""
        peers.suspect()
        time.sleep(peers.timeout)

    def _watch(self) -> None:
        tick = min(self.peers.interval / 2, TICK) if self.peers else TICK
        before = time.monotonic()
        while not self._over.wait(tick):
            now = time.monotonic()
            seconds, before = min(now - before, 2 * tick), now  # more means that this process itself was stopped
            if self.peers is not None and (verdict := self.peers.check(seconds)):
                self._end(verdict, self.peers.hung())
            self._since += seconds
            limit = self.limit()
            if limit is not None and self._since > limit:
                self._end(self._hang(limit), hung=True)

    def limit(self) -> float | None:
        """Seconds that the current step or other work may take; None if the watchdog is off."""
        run = self._config.run
        if run.hang_factor is None:
            return None
        if self._work or not self._usual:
            return OTHER_WORK * run.hang_min_seconds
        return max(run.hang_min_seconds, run.hang_factor * self._usual)

    def _hang(self, limit: float) -> str:
        process = f"process {self.peers.rank}: " if self.peers else ""
        what = self._work or f"the step after step {self.ending.step}"
        usual = f", a usual step {self._usual:.3g} s" if self._usual and not self._work else ""
        return (
            f"{process}{what} has taken {self._since:.0f} s{usual}: it hangs. The stacks of all threads are in "
            f"{self._stacks_file()}; start the same command again to resume from the newest checkpoint, and raise "
            f"run.hang_factor or run.hang_min_seconds (limit: {limit:.0f} s) if it was only slow."
        )

    def _stacks_file(self) -> Path:
        return Path(self._config.run.dir) / f"hang-{self.peers.rank if self.peers else 0}.txt"

    def _write_stacks(self, sentence: str) -> None:
        steps = {0: self.ending.step}
        if self.peers is not None:
            steps_elsewhere = {process: sign["step"] for process, sign in dict(self.peers.signs).items()}
            steps = steps_elsewhere | {self.peers.rank: self.ending.step}
        lines = [f"last known step of process {process}: {step}" for process, step in sorted(steps.items())]
        self._stacks_file().parent.mkdir(parents=True, exist_ok=True)
        with self._stacks_file().open("w", encoding="utf-8") as file:
            print(sentence, *lines, "", sep="\n", file=file, flush=True)
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            print("Main thread:", "".join(traceback.format_stack(main)), sep="\n", file=file, flush=True)
            faulthandler.dump_traceback(file, all_threads=True)  # 100 threads, the main one last

    def _end(self, sentence: str, hung: bool) -> None:
        self.ending.begin()
        if hung:
            within_seconds(2, "the record of the hang", self._write_stacks, sentence)
        within_seconds(2, "the report of the end", os.write, 2, f"\nmegajax: error: {sentence}\n".encode())
        if self.peers is not None:
            self.peers.leave(LOST, sentence, hung)
            self.ending.speaks = self.peers.speaks_for_all
        self.ending.tell("hang" if hung else "lost", sentence, LOST)
        _exit(LOST)


def _collective_failed(error: BaseException | None) -> bool:
    """Whether an error may come from the loss of a process, itself or as the one during which it was raised."""
    if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
        return True
    return error is not None and _collective_failed(error.__context__)


def _exit(status: int) -> None:
    """End this process and its children now, whatever its other threads do."""
    for child in multiprocessing.active_children():
        child.kill()
    if status != LOST:  # after a hang another thread may hold the lock of a stream
        with suppress(OSError, ValueError):  # closed
            sys.stdout.flush()
            sys.stderr.flush()
    os._exit(status)
