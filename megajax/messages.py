"""Messages between the processes of a run: texts in the key-value store of jax's coordinator.

They need no devices, so they work before jax's backend has started, in any thread, and while the devices are busy.
"""

import contextlib
import itertools
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import distributed  # jax has no public functions for its key-value store

from megajax.errors import InputError

FOR_EVER = 365 * 24 * 3600.0  # seconds
ANSWER_SECONDS = 120.0  # all processes have joined before, so each answers within seconds
READ_SECONDS = 10.0
SLOWEST = 3600.0  # seconds that one process may be behind the others

_calls: defaultdict[tuple[Any, str], Iterator[int]] = defaultdict(itertools.count)

Failure = jax.errors.JaxRuntimeError  # of each method: there is no such value (in time), or the coordinator is gone


class Messages:
    """Texts by name in one directory of the store.

    index, count: the number of this process, and of all; 0 and 1 without `jax.distributed`, where there is no store.
    """

    def __init__(self, directory: str):
        state = distributed.global_state
        alone = state.client is None
        self.index, self.count = (0, 1) if alone else (state.process_id, state.num_processes)
        self._client: Any = state.client
        self._directory = f"megajax/{directory}"

    def post(self, name: str, text: str, again: bool = False) -> None:
        """Set a text; a Failure if there is one of this name already, unless `again`."""
        self._client.key_value_set(f"{self._directory}/{name}", text, allow_overwrite=again)

    def read(self, name: str) -> str:
        """A text that is there."""
        return self._client.key_value_try_get(f"{self._directory}/{name}")

    def read_all(self) -> dict[str, str]:
        """All texts by name."""
        found = self._client.key_value_dir_get(self._directory)
        return {key.rpartition("/")[2]: text for key, text in found}

    def wait(self, name: str, seconds: float = FOR_EVER) -> str:
        """A text that may come later."""
        return self._client.blocking_key_value_get(f"{self._directory}/{name}", int(1000 * seconds))

    def meet(self, seconds: float) -> None:
        """Wait until all processes call this, which each may do once."""
        self._client.wait_at_barrier(f"{self._directory}/met", int(1000 * seconds))

    def remove(self) -> None:
        """Remove the directory with all its texts."""
        self._client.key_value_delete(self._directory)

    def decide(self, text: str, judge: Callable[[list[str]], str], seconds: float = ANSWER_SECONDS) -> str:
        """`judge(the texts of all processes)`, called on process 0, its result on every process.

        All processes use a directory once. Raises InputError on every process if one does not answer within `seconds`,
        or if `judge` fails.
        """
        if self.count == 1:
            return judge([text])
        if self.index == 0:
            verdict = _collect(self, text, judge, seconds)
            self.post("verdict", json.dumps(verdict))
        else:
            self.post(str(self.index), text)
            try:
                verdict = json.loads(self.wait("verdict", 2 * seconds))
            except Failure:
                raise InputError(f"process 0 did not answer within {2 * seconds:g} s: look at its output.") from None
        # Process 0 may end after this, and the store with it. A text may be large, and is not needed again.
        with contextlib.suppress(Failure):  # one is gone, or silent
            self.meet(min(seconds, READ_SECONDS))
            if self.index == 0:
                self.remove()
        if "failed" in verdict:
            raise InputError(verdict["failed"])
        if "silent" in verdict:
            raise InputError(f"process {verdict['silent']} did not answer within {seconds:g} s: look at its output.")
        return verdict["judged"]


def next_name(kind: str) -> str:
    """A name for the next call of a kind, the same on all processes, since they make the same calls in one order."""
    return f"{kind}/{next(_calls[distributed.global_state.client, kind])}"


def gather(name: str, value: Any, seconds: float = ANSWER_SECONDS) -> list[Any]:
    """The values of all processes, which JSON can hold; otherwise as `Messages.decide`."""
    return json.loads(Messages(name).decide(json.dumps(value), lambda texts: f"[{','.join(texts)}]", seconds))


def from_first_process(find: Callable[[], Any]) -> Any:
    """`find()` of process 0 on every process, a value that JSON can hold; the others do not call it.

    All processes must call this in their main threads, and one message each way is enough, so it suits values that
    thousands of processes would otherwise read from the same files. It stays in the store: keep it small. Raises
    InputError on every process if `find` fails.
    """
    messages = Messages(next_name("found"))
    if messages.index == 0:
        try:
            answer = {"found": find()}
        except Exception as error:  # the others wait for an answer
            if messages.count == 1:
                raise
            answer = {"failed": str(error) or type(error).__name__}
        text = json.dumps(answer)
        if messages.count > 1:
            messages.post("answer", text)
    else:
        try:
            text = messages.wait("answer", 2 * SLOWEST)
        except Failure:
            raise InputError(f"process 0 did not answer within {2 * SLOWEST:g} s: look at its output.") from None
    answer = json.loads(text)
    if "failed" in answer:
        with contextlib.suppress(Failure):  # process 0 may end after this, and the store with it
            messages.meet(READ_SECONDS)
        raise InputError(answer["failed"])
    return answer["found"]


def _collect(messages: Messages, text: str, judge: Callable[[list[str]], str], seconds: float) -> dict[str, str]:
    """Process 0's verdict, or the numbers of the processes that are silent."""
    end, texts, silent = time.monotonic() + seconds, [text], []
    for index in range(1, messages.count):
        try:
            texts.append(messages.wait(str(index), max(0.1, end - time.monotonic())))
        except Failure:
            silent.append(str(index))
    if silent:
        return {"silent": ", ".join(silent)}
    try:
        return {"judged": judge(texts)}
    except Exception as error:  # the others wait for an answer
        return {"failed": str(error) or type(error).__name__}
