"""Processes and threads that read or tokenise data while others work."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice

from megajax import threads


def end_with_parent() -> None:
    """Runs in a worker process: end it when its parent ends, also if the parent is killed and cannot stop it."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threads.start("the wait for the end of the trainer", wait)


def one_ahead[T](values: Iterable[T]) -> Iterator[T]:
    """The values; a thread waits for the next one while one is used."""
    iterator = iter(values)
    with ThreadPoolExecutor(1, "ahead") as pool:
        following = pool.submit(list, islice(iterator, 1))
        while value := following.result():
            following = pool.submit(list, islice(iterator, 1))
            yield value[0]


def in_order[T, R](submit: Callable[[T], Future[R]], values: Iterable[T], ahead: int) -> Iterator[R]:
    """The result of each value, in order; up to `ahead` of them are submitted before the first is waited for.

    An error of `values` comes after the results of those before it.
    """

    def submitted() -> Iterator[Future[R]]:
        try:
            yield from map(submit, values)
        except Exception as error:
            failed = Future[R]()
            failed.set_exception(error)
            yield failed

    waiting = deque[Future[R]]()
    for future in submitted():
        waiting.append(future)
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def shared_cache[**P, T](size: int, make: Callable[P, T]) -> Callable[P, T]:
    """`lru_cache` for threads: one makes a value while the others wait for it."""
    lock, cached = threading.Lock(), lru_cache(size)(make)

    def get(*arguments: P.args, **named: P.kwargs) -> T:
        with lock:
            return cached(*arguments, **named)

    return get
