"""Messages and decisions of several processes: real clients of jax's coordinator, here in threads of one process."""

import itertools
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
from jaxlib import _jax

from megajax import messages
from megajax.config import load_config
from megajax.data import text
from megajax.data.indexed import IndexedDataset, open_checked
from megajax.data.loader import datasets
from megajax.errors import InputError
from megajax.messages import Failure, Messages, decide, from_first_process

COUNT = 3


self_check = IndexedDataset.check_sizes


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


class Calls:
    """The number of the next call of each process; a thread may play two of them, one after the other."""

    def __init__(self):
        self.numbers = [itertools.count() for _ in range(COUNT)]

    def __next__(self) -> int:
        return next(self.numbers[messages.distributed.global_state.process_id])


def test_process_0_reads_the_files_of_a_run_for_all(together, monkeypatch, tmp_path):
    """Text that it identifies, token files that it checks; the others open files of the same sizes."""
    monkeypatch.setattr(messages, "_found", Calls())
    (tmp_path / "text.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    (tmp_path / "model.yaml").write_text(
        f"""
run: {{name: model, dir: {tmp_path / "run"}, steps: 1}}
model: {{num_layers: 1, hidden_size: 8, num_heads: 1, ffn_hidden_size: 8, vocab_size: 260}}
batch: {{global_size: 1, sequence_length: 4}}
data: {{kind: text, train: {tmp_path}/*.jsonl, tokenizer: byte}}
"""
    )
    config = load_config(tmp_path / "model.yaml", [])
    identified, checked = mock.Mock(wraps=text._identity), mock.Mock(wraps=IndexedDataset._check_offsets)
    monkeypatch.setattr(text, "_identity", identified)
    monkeypatch.setattr(IndexedDataset, "_check_offsets", lambda *arguments: checked(*arguments))
    found = together(lambda _: datasets(config)["train"])
    assert [samples.dataset.tokens.size for samples in found] == [found[0].dataset.tokens.size] * COUNT
    assert identified.call_count == checked.call_count == 1

    [tokens] = tmp_path.glob("run/index_cache/*/tokens.idx")
    prefix = str(tokens.with_suffix(""))
    assert [len(opened[0]) for opened in together(lambda _: open_checked([prefix]))] == [2] * COUNT
    size = tokens.stat().st_size
    monkeypatch.setattr(IndexedDataset, "check_sizes", lambda self, _: self_check(self, [size + 8, 0]))
    first, *others = together(lambda _: open_checked([prefix]))
    assert not isinstance(first, Exception)
    assert all(f"{tokens} has {size} bytes on host" in str(error) for error in others)
    tokens.write_bytes(tokens.read_bytes()[:-8])
    assert all("tokens.idx is truncated" in str(error) for error in together(lambda _: open_checked([prefix])))


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
