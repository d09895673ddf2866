"""A run's processes as one object: they decide, agree, gather and wait by messages, never by collectives of devices."""

import functools
import itertools
import json
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megajax.cluster.messages import Failure, Messages
from megajax.console import outcome
from megajax.errors import InputError, UserError, shown

PATIENCE = 3600.0  # seconds that one process may be behind the others
READ_SECONDS = 10.0  # in which all have read an answer


class Gone(InputError):
    """A process did not answer in time, or it has ended and the messages with it."""


class Cluster:
    """The processes of a run: this one's rank, and their number.

    Values are of JSON: a tuple arrives as a list, with one process too. All processes make the same calls of a `kind`
    in the same order; a call outside the main thread needs a kind of its own.

    Policy: an error on process 0 is its own there and an InputError on the others. Who waits longer than `seconds`
    raises Gone with the numbers of the silent processes, the same sentence on all. Nobody else watches: in a run it is
    `peers.py` that ends all other processes within `run.peer_timeout_seconds` of a loss, whatever they wait for.
    """

    def __init__(self, rank: int = 0, size: int = 1, client: Any = None):
        """`client`: jax's, of the key-value store in process 0; None with one process."""
        self.rank, self.size, self._client = rank, size, client
        self.lost: set[int] = set()  # noted by `peers.py`
        self._calls = defaultdict[str, Iterator[int]](itertools.count)

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which writes and decides."""
        return self.rank == 0

    @functools.cached_property
    def hosts(self) -> list[str]:
        """The name of each process's host. All processes must make the first call."""
        return self.gather(socket.gethostname(), "hosts")

    def alive(self) -> list[int]:
        """The ranks of the processes that are not known to be lost."""
        return [rank for rank in range(self.size) if rank not in self.lost]

    def messages(self, kind: str) -> Messages:
        """The directory of the next call of a kind."""
        return Messages(self._client, f"{kind}/{next(self._calls[kind])}")

    def first_decides[T](self, decide: Callable[[], T], kind: str = "decided", seconds: float = PATIENCE) -> T:
        """`decide()` of process 0 on every process; the others do not call it.

        A message for each process is enough, so it suits what thousands would otherwise read from the same files. The
        value stays in the store: keep it small.
        """
        messages, error = self.messages(kind), None
        if self.is_first:
            text, error = _attempt(decide)
            self._post(messages, "answer", text)
        else:
            text = self._wait(messages, "answer", 2 * seconds)
        if "value" not in json.loads(text):
            self._until_read(messages, seconds)
        return _value(text, error)

    def agree(
        self, value: Any, judge: Callable[[list[Any]], Any], kind: str = "agreed", seconds: float = PATIENCE
    ) -> Any:
        """`judge(the values of all processes, by rank)`, called on process 0, its result on every process."""
        messages, error = self.messages(kind), None
        if self.is_first:
            text, error = _attempt(lambda: judge(self._collect(messages, value, seconds)))
            self._post(messages, "answer", text)
        else:
            self._post(messages, str(self.rank), json.dumps(value))
            text = self._wait(messages, "answer", 2 * seconds)
        # Process 0 may end after this, and the store with it. Values may be large, and are not needed again.
        if self._until_read(messages, seconds) and self.is_first:
            messages.remove()
        return _value(text, error)

    def gather(self, value: Any, kind: str = "gathered", seconds: float = PATIENCE) -> list[Any]:
        """The values of all processes, by rank."""
        return self.agree(value, list, kind, seconds)

    def first_problem(self, find: Callable[[], str]) -> str:
        """The sentence of the lowest rank whose `find()` is not empty; a UserError is an InputError on all."""
        mistake = problem = ""
        try:
            problem = find()
        except UserError as error:
            mistake = str(error)
        mistakes, problems = zip(*self.gather([mistake, problem]), strict=True)
        if any(mistakes):
            raise InputError(first_of(mistakes))
        return first_of(problems)

    @contextmanager
    def first_goes_ahead(self, kind: str) -> Iterator[None]:
        """Around work of all processes: the others begin when process 0 has ended it, by an error too."""
        messages = self.messages(kind)
        if not self.is_first:
            self._wait(messages, "through", PATIENCE)
        try:
            yield
        finally:
            if self.is_first:
                self._post(messages, "through", "")

    def _post(self, messages: Messages, name: str, text: str) -> None:
        if self.size > 1:
            messages.post(name, text)

    def _wait(self, messages: Messages, name: str, seconds: float) -> str:
        try:
            return messages.wait(name, seconds)
        except Failure:
            raise Gone(f"process 0 did not answer within {seconds:g} s: look at its output.") from None

    def _collect(self, messages: Messages, value: Any, seconds: float) -> list[Any]:
        end, values, silent = time.monotonic() + seconds, [json.loads(json.dumps(value))], []
        for rank in range(1, self.size):
            try:
                values.append(json.loads(messages.wait(str(rank), max(0.1, end - time.monotonic()))))
            except Failure:
                silent.append(str(rank))
        if silent:
            raise Gone(f"process {', '.join(silent)} did not answer within {seconds:g} s: look at its output.")
        return values

    def _until_read(self, messages: Messages, seconds: float) -> bool:
        """Whether others have come too; one that is lost, or silent, is what the caller reports."""
        with suppress(Failure):
            if self.size > 1:
                messages.meet(min(seconds, READ_SECONDS))
                return True
        return False


def first_of(sentences: Iterable[str]) -> str:
    """The first text that is not empty; empty if there is none."""
    return next(filter(None, sentences), "")


def _attempt(decide: Callable[[], Any]) -> tuple[str, Exception | None]:
    """The answer of process 0 as text, and its error: the others must not wait for it in vain."""
    try:
        return json.dumps({"value": decide()}), None
    except Exception as error:
        unknown = f"process 0 failed ({shown(str(error) or type(error).__name__)}): look at its output."
        sentence, _ = outcome(error) or (unknown, 0)
        return json.dumps({"gone" if isinstance(error, Gone) else "failed": sentence}), error


def _value(text: str, error: Exception | None) -> Any:
    if error is not None:
        raise error
    answer = json.loads(text)
    if "gone" in answer:
        raise Gone(answer["gone"])
    if "failed" in answer:
        raise InputError(answer["failed"])
    return answer["value"]
