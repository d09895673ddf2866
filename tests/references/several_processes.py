"""Threads of this process that play the processes of a run: real clients of jax's coordinator."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

from jax._src import distributed
from jaxlib import _jax  # type: ignore[attr-defined]


class Process(threading.local):
    """What `jax.distributed` knows of a process; each thread is one."""

    client: Any = None
    process_id = 0
    num_processes: int | None = None


@contextlib.contextmanager
def threads_as_processes() -> Iterator[Process]:
    """What is set of the yielded object is known to the setting thread only."""
    with mock.patch.object(distributed, "global_state", Process()) as state:
        yield state


@contextlib.contextmanager
def process(index: int, count: int, client: object) -> Iterator[None]:
    """This thread is process `index` of `count` meanwhile, with a client of the test's own."""
    with threads_as_processes() as state:
        state.client, state.process_id, state.num_processes = client, index, count
        yield


@contextlib.contextmanager
def together(count: int) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
    """(function) → its results of all processes, called with their numbers at the same time; an error is a result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, count)
    clients = [_jax.get_distributed_runtime_client(address, index, init_timeout=60) for index in range(count)]
    with threads_as_processes() as state, ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda client: client.connect(), clients))

        def call(function: Callable[[int], Any], index: int) -> Any:
            state.client, state.process_id, state.num_processes = clients[index], index, count
            try:
                return function(index)
            except Exception as error:
                return error

        yield lambda function: list(threads.map(lambda index: call(function, index), range(count)))
        list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()
