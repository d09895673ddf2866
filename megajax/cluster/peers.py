"""The other processes of a run: their signs of life, and a verdict about a lost process.

Each process writes a sign at intervals: its host, its step, and how it ended. Process 0 reads all of them, the others
read that of process 0, which also has the verdict. So the traffic grows linearly with the number of processes. A
process is silent for the time, on this process's monotonic clock, in which its sign has not changed.
"""

import contextlib
import json
import socket
import threading
import time
from typing import Any

from megajax import threads
from megajax.cluster import relay
from megajax.cluster.cluster import Cluster
from megajax.cluster.messages import Failure
from megajax.console import BAD_NUMBERS, DONE, STOPPED

IN_ORDER = (DONE, BAD_NUMBERS, STOPPED)  # exit statuses on which all processes agree
INTERVALS = 12  # in the timeout
LONGEST_INTERVAL = 5.0  # seconds
# Silence up to the verdict, of the timeout. The rest is for the way of signs and verdict; and XLA aborts a process
# whose GPUs have waited 40 s for each other in the first step, because one of them waits for the lost process.
OF_TIMEOUT = 1 / 3
SUSPECT_INTERVALS = 3  # silence up to the verdict when a collective has failed
GRACE_INTERVALS = 2  # until all processes have seen a verdict, or the end of another process


class Peers:
    """Watches the other processes from a thread that exchanges signs; `check` is called by another thread.

    The exchange may wait for ever, for example on a process 0 that is stopped, so it decides nothing.
    """

    def __init__(self, cluster: Cluster, timeout: float):
        """`timeout`: seconds from a loss to the end of every other process."""
        self._cluster, self._messages, self.timeout = cluster, cluster.messages("signs"), timeout
        self.rank = cluster.rank
        self.interval = min(timeout / INTERVALS, LONGEST_INTERVAL)
        self.step: int | None = None
        self.own_seconds: dict[str, float] = {}
        self._suspicious = False
        self.signs: dict[int, dict[str, Any]] = {}  # the last ones of the others, by process
        self._raw: dict[int, str] = {}
        self._silent = dict.fromkeys(range(cluster.size) if cluster.is_first else [0], 0.0)
        self._silent.pop(self.rank, None)
        self._ending: dict[str, Any] = {}  # how this process ends, added to its sign
        self._number, self._exchanged = 0, threading.Condition()
        self._wake = threading.Event()
        threads.start("the watch over the other processes", self._exchange_at_intervals, needed=True)

    def check(self, seconds: float) -> str | None:
        """A sentence about a lost process, or None.

        `seconds`: time since the last call, without the time in which this process itself was stopped.
        """
        if verdict := next((sign["verdict"] for sign in list(self.signs.values()) if sign.get("verdict")), None):
            return verdict
        suspicious = self._suspicious or any(sign.get("suspicious") for sign in list(self.signs.values()))
        limit = self.interval * SUSPECT_INTERVALS if suspicious else self.timeout * OF_TIMEOUT
        if relay.LOST.is_set():
            limit = 2 * self.interval
        if self._ending and self.rank > 0:  # process 0 goes as soon as it knows that this one ends too
            return None
        for process in self._silent:
            self._silent[process] += seconds
            in_order = self.signs.get(process, {}).get("in_order")  # None: it has not ended
            if in_order is None and self._silent[process] > limit:
                return self._lost(process)
            if in_order is False and self._silent[process] > GRACE_INTERVALS * self.interval:
                return self._ended(process)  # unless this process was about to end in the same way
        return None

    def suspect(self) -> None:
        """A collective has failed here: a short silence is enough for a verdict now."""
        self._suspicious = True
        self._wake.set()

    def hung(self) -> bool:
        """Whether another process ended because of a hang."""
        return any(sign.get("hung") for sign in list(self.signs.values()))

    @property
    def speaks_for_all(self) -> bool:
        """Whether this process tells the user of a verdict: the first one that is not lost."""
        return self.rank == self._cluster.alive()[0]

    def leave(self, status: int, verdict: str | None = None, hung: bool = False, agreed: bool = True) -> None:
        """Tell the others that this process ends, with a verdict if it has one.

        `agreed`: a run's status on which all processes agree is no error of this one. Process 0, whose end is the end
        of the exchange, waits for the others: after an orderly end until all have ended too, else until they can know.
        """
        in_order = agreed and status in IN_ORDER
        self._ending = {"status": status, "in_order": in_order, "verdict": verdict, "hung": hung}
        wanted = self._number + 2  # the exchange that runs now may have begun before
        self._wake.set()
        grace = None if in_order and self.rank == 0 else GRACE_INTERVALS * self.interval
        with self._exchanged:
            self._exchanged.wait_for(lambda: self._number >= wanted and self._others_have_ended(), grace)

    def _others_have_ended(self) -> bool:
        signs = [self.signs.get(process, {}) for process in self._silent if process in self._cluster.alive()]
        return self.rank > 0 or all("status" in sign for sign in signs)

    def _exchange_at_intervals(self) -> None:
        while True:
            with contextlib.suppress(Failure):  # no sign of process 0 yet, or it is gone
                self._exchange()
            if self._ending:  # soon this process is gone
                time.sleep(min(0.01 * self._cluster.size, self.interval))
            else:
                self._wake.wait(self.interval)
                self._wake.clear()

    def _exchange(self) -> None:
        facts = {"host": socket.gethostname(), "step": self.step, "own_seconds": self.own_seconds}
        facts |= {"suspicious": self._suspicious, "number": self._number, **self._ending}
        self._messages.post(str(self.rank), json.dumps(facts), again=True)
        found = self._messages.read_all() if self.rank == 0 else {"0": self._messages.read("0")}
        for name, raw in found.items():
            process, sign = int(name), _read_sign(raw)
            if process != self.rank and self._raw.get(process) != raw and sign is not None:
                self.signs[process] = sign
                self._raw[process], self._silent[process] = raw, 0.0
        with self._exchanged:
            self._number += 1
            self._exchanged.notify_all()

    def _lost(self, process: int) -> str:
        self._cluster.lost.add(process)
        return (
            f"{self.named(process)} was lost{self._last_step(process)}: it has given no sign of life for "
            f"{self._silent[process]:.0f} s, so this process ends too; start the same command again to resume from the "
            "newest checkpoint."
        )

    def _ended(self, process: int) -> str:
        return (
            f"{self.named(process)} ended with status {self.signs[process]['status']}{self._last_step(process)}, so "
            "this process ends too: its own output gives the reason."
        )

    def named(self, process: int) -> str:
        """A process's number and host."""
        host = self.host(process)
        return f"process {process}" + (f" on host {host}" if host else "")

    def host(self, process: int) -> str:
        """A process's host; "" if it has given no sign yet."""
        return socket.gethostname() if process == self.rank else self.signs.get(process, {}).get("host", "")

    def _last_step(self, process: int) -> str:
        step = self.signs.get(process, {}).get("step")
        return "" if step is None else f" (last known step: {step})"


def _read_sign(raw: str) -> dict[str, Any] | None:
    """The sign of a process; None for a text of anybody else, which counts as silence."""
    with contextlib.suppress(ValueError, RecursionError):
        sign = json.loads(raw)
        if isinstance(sign, dict) and sign.keys() >= {"host", "step", "own_seconds", "number"}:
            return sign
    return None
