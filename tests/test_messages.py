"""Messages and decisions of several processes: real clients of jax's coordinator, here in threads of one process."""

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from jaxlib import _jax

from megajax import messages
from megajax.errors import InputError
from megajax.messages import Failure, Messages, decide, from_first_process

COUNT = 3


class State(threading.local):
    """What `jax.distributed` knows of a process; each thread is one."""

    client, process_id, num_processes = None, 0, None


@pytest.fixture
def together(monkeypatch):
    """(function) → its results of all processes, called with their numbers at the same time; an error is a result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    service = _jax.get_distributed_runtime_service(address, COUNT)
    clients = [_jax.get_distributed_runtime_client(address, index, init_timeout=60) for index in range(COUNT)]
    state = State()
    monkeypatch.setattr(messages.distributed, "global_state", state)
    threads = ThreadPoolExecutor(COUNT)
    list(threads.map(lambda client: client.connect(), clients))

    def call(function, index):
        state.client, state.process_id, state.num_processes = clients[index], index, COUNT
        try:
            return function(index)
        except Exception as error:
            return error

    yield lambda function: list(threads.map(lambda index: call(function, index), range(COUNT)))
    list(threads.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def test_all_get_the_verdict_of_process_0_and_nothing_stays_in_the_store(together):
    judged = []

    def judge(texts):
        judged.append(texts)
        return "verdict"

    assert together(lambda index: decide("question", f"text {index}", judge)) == ["verdict"] * COUNT
    assert judged == [["text 0", "text 1", "text 2"]]
    assert together(lambda index: Messages("question").read_all()) == [{}] * COUNT


def test_only_process_0_looks_and_all_get_what_it_found(together, monkeypatch):
    monkeypatch.setattr(messages, "_found", itertools.repeat(0))  # these processes share the counter
    asked = []
    assert together(lambda index: from_first_process(lambda: asked.append(index) or [3, index])) == [[3, 0]] * COUNT
    assert asked == [0]


def test_all_hear_of_a_failure_of_process_0(together):
    def fail(texts):
        raise OSError("the store is silent")

    for error in together(lambda index: decide("question", "text", fail)):
        assert isinstance(error, InputError) and str(error) == "the store is silent"


def test_all_name_a_process_that_does_not_answer(together, monkeypatch):
    monkeypatch.setattr(messages, "READ_SECONDS", 0.1)
    answer = lambda index: index == 1 or decide("question", "text", lambda texts: "", seconds=0.3)  # noqa: E731
    first, _, last = together(answer)
    for error in (first, last):
        assert isinstance(error, InputError) and "process 1 did not answer within 0.3 s" in str(error)


def test_texts_are_read_by_name_and_a_missing_or_second_one_is_a_failure(together):
    together(lambda index: Messages("signs").post(str(index), "old"))
    together(lambda index: Messages("signs").post(str(index), f"new {index}", again=True))
    wanted = {str(index): f"new {index}" for index in range(COUNT)}
    assert together(lambda _: Messages("signs").read_all()) == [wanted] * COUNT
    assert together(lambda _: Messages("signs").read("2")) == ["new 2"] * COUNT
    for failing in (
        lambda _: Messages("signs").post("1", "second"),
        lambda _: Messages("signs").read("7"),
        lambda _: Messages("signs").wait("7", 0.1),
    ):
        assert all(isinstance(error, Failure) for error in together(failing))
