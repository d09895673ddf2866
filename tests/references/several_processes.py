"""Threads of this process that play the processes of a run, with a store of their own in the place of jax's."""

import contextlib
import random
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megajax.cluster import Cluster, standing_for
from megajax.jax_internals import native


class Store:
    """A key-value store with the functions of jax's client; each takes up to `slowest` seconds."""

    def __init__(self, count: int, slowest: float = 0.0):
        self.values: dict[str, str] = {}
        self._came, self._changed = defaultdict[str, int](int), threading.Condition()
        self._count, self._slowest = count, slowest

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        self._take_time()
        with self._changed:
            if key in self.values and not allow_overwrite:
                raise RuntimeError(f"ALREADY_EXISTS: {key}")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise RuntimeError(f"NOT_FOUND: {key}")
        return self.values[key]

    def key_value_dir_get(self, directory: str) -> list[tuple[str, str]]:
        return [(key, value) for key, value in list(self.values.items()) if key.startswith(f"{directory}/")]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self.values, min(timeout_in_ms / 1000, 20)):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {key}")
            found = self.values[key]
        self._take_time()
        return found

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        with self._changed:
            self._came[barrier_id] += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._came[barrier_id] >= self._count, min(timeout_in_ms / 1000, 20)):
                raise RuntimeError(f"DEADLINE_EXCEEDED: {barrier_id}")

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self.values = {each: value for each, value in self.values.items() if not each.startswith(f"{key}/")}

    def _take_time(self) -> None:
        if self._slowest:
            time.sleep(random.random() * self._slowest)


def clusters(count: int, store: Store | None = None) -> list[Cluster]:
    """The cluster that each of `count` processes sees."""
    store = store or Store(count)
    return [Cluster(rank, count, store) for rank in range(count)]


@contextlib.contextmanager
def together(seen: Sequence[Cluster]) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """(function) → its results of all processes, called with their ranks at the same time; an error is a result."""

    def call(function: Callable[[int], Any], rank: int) -> Any:
        with standing_for(seen[rank]):
            try:
                return function(rank)
            except Exception as error:
                return error

    with ThreadPoolExecutor(len(seen)) as threads:
        yield lambda function: list(threads.map(lambda rank: call(function, rank), range(len(seen))))


@contextlib.contextmanager
def of_jax(count: int) -> Iterator[list[Cluster]]:
    """The cluster that each of `count` processes sees, with real clients of jax's coordinator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = native.get_distributed_runtime_service(address, count)
    clients = [native.get_distributed_runtime_client(address, rank, init_timeout=60) for rank in range(count)]
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda client: client.connect(), clients))
        yield [Cluster(rank, count, client) for rank, client in enumerate(clients)]
        list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()
