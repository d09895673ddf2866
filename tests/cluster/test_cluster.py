"""How the processes of a run decide together, and what happens when one is gone; threads play the processes."""

import errno
import sys
import threading
import time
from collections import defaultdict
from contextlib import nullcontext

import numpy as np
import pytest
import several_processes
from several_processes import clusters

from megajax.cluster import Cluster, Gone, current
from megajax.cluster.messages import Failure, Messages
from megajax.config import load_config
from megajax.data.indexed import IndexedWriter, open_checked
from megajax.data.loader import open_datasets
from megajax.errors import ConfigError, InputError

COUNT = 3


@pytest.fixture(params=["jax", "fake"])
def together(request):
    """With jax's own coordinator, and with the fake one of other tests, which must behave as it does."""
    with several_processes.of_jax(COUNT) if request.param == "jax" else nullcontext(clusters(COUNT)) as seen:
        with several_processes.together(seen) as call:
            yield call


@pytest.fixture
def opened():
    """The threads that open each file from now on, by its path."""
    found, active = defaultdict(list), True

    def note(event: str, arguments: tuple) -> None:
        if active and event == "open":
            found[str(arguments[0])].append(threading.get_ident())

    sys.addaudithook(note)  # for ever
    yield found
    active = False


def test_process_0_decides_by_the_values_of_all_and_nothing_stays_in_the_store(together):
    judged = []
    assert together(lambda rank: current().agree((rank, "a"), lambda values: judged.append(values) or {"a": 1})) == (
        [{"a": 1}] * COUNT
    )
    assert judged == [[[0, "a"], [1, "a"], [2, "a"]]]
    assert together(lambda _: Messages(current()._client, "agreed").read_all()) == [{}] * COUNT
    assert together(lambda rank: current().gather(rank)) == [[0, 1, 2]] * COUNT


def test_only_process_0_looks_and_all_get_what_it_found(together):
    asked = []
    decide = lambda rank: current().first_decides(lambda: asked.append(rank) or (3, rank))  # noqa: E731
    assert together(decide) == [[3, 0]] * COUNT
    assert asked == [0]
    assert Cluster().first_decides(lambda: (3, 0)) == [3, 0]  # the same for a process that is alone


def test_the_others_begin_when_process_0_is_through(together):
    order = []

    def work(rank):
        with current().first_goes_ahead("work"):
            time.sleep(0.05 if rank == 0 else 0)
            order.append(rank)
            if rank == 0:
                raise KeyError("the others find it too")

    assert [type(result) for result in together(work)] == [KeyError, type(None), type(None)]
    assert order[0] == 0 and len(order) == COUNT


def test_the_problem_of_the_lowest_rank_is_everyone_s(together):
    def find(rank):
        if rank == 2 and mistaken:
            raise ConfigError("process 2 has a bad key.")
        return "" if rank == 0 else f"problem {rank}"

    mistaken = False
    assert together(lambda rank: current().first_problem(lambda: find(rank))) == ["problem 1"] * COUNT
    mistaken = True
    for error in together(lambda rank: current().first_problem(lambda: find(rank))):
        assert isinstance(error, InputError) and str(error) == "process 2 has a bad key."
    assert Cluster().first_problem(lambda: find(1)) == "problem 1"


def test_process_0_looks_at_the_files_of_a_run_for_all(together, opened, tmp_path):
    """The others do not open text whose tokens are stored, and open token files of the same sizes."""
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
    found = together(lambda _: open_datasets(config)["train"])
    assert [samples.dataset.tokens.size for samples in found] == [found[0].dataset.tokens.size] * COUNT
    opened.clear()
    together(lambda _: open_datasets(config)["train"])
    assert len(set(opened[str(tmp_path / "text.jsonl")])) == 1  # one thread

    [tokens] = tmp_path.glob("run/index_cache/*/tokens.idx")
    prefix = str(tokens.with_suffix(""))
    assert [len(opened[0]) for opened in together(lambda _: open_checked([prefix]))] == [2] * COUNT
    size = tokens.stat().st_size
    with IndexedWriter(tmp_path / "larger", np.uint16) as writer:
        for _ in range(3):
            writer.add_document([1])
    first, *others = together(lambda index: open_checked([prefix if index else tmp_path / "larger"]))
    assert not isinstance(first, Exception)
    assert all(f"{tokens} has {size} bytes on host" in str(error) for error in others)
    tokens.write_bytes(tokens.read_bytes()[:-8])
    assert all("tokens.idx is truncated" in str(error) for error in together(lambda _: open_checked([prefix])))


@pytest.mark.parametrize("call", ["first_decides", "agree"])
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InputError("a.txt is missing."), "a.txt is missing."),
        (OSError(errno.ENOSPC, "No space left", "a.txt"), "a.txt could not be written (No space left)"),
        (KeyError("x"), "process 0 failed ('x'): look at its output."),
        (Gone("process 2 did not answer."), "process 2 did not answer."),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_process_0_is_its_own_there_and_a_sentence_elsewhere(together, call, error, told):
    def fail(*_):
        raise error

    arguments = (fail,) if call == "first_decides" else ("a value", fail)
    first, *others = together(lambda _: getattr(current(), call)(*arguments))
    assert first is error
    kind = Gone if isinstance(error, Gone) else InputError
    assert all(type(other) is kind and told in str(other) for other in others)
    assert together(lambda rank: current().gather(rank)) == [[0, 1, 2]] * COUNT  # the next call is not disturbed


def test_the_others_wait_for_process_0_longer_than_it_waits_for_them():
    """It may take the last one's value after all of its time, and then has to look at the values. That is one time for
    all: of several silent ones, the second gets what the first has left.
    """
    waits = []

    class Noting(several_processes.Store):
        def blocking_key_value_get(self, key, timeout_in_ms):
            waits.append((key.rpartition("/")[2], timeout_in_ms))
            return super().blocking_key_value_get(key, timeout_in_ms)

    with several_processes.together(clusters(2, Noting(2))) as call:
        assert call(lambda rank: current().agree(rank, sum, seconds=8)) == [1, 1]
        assert call(lambda rank: current().first_decides(lambda: 3, seconds=8)) == [3, 3]
    assert [wait for name, wait in waits if name == "answer"] == [16000, 16000]
    [collecting] = [wait for name, wait in waits if name == "1"]
    assert 4000 < collecting <= 8000

    waits.clear()
    with several_processes.together(clusters(3, Noting(3))[:1]) as call:
        [error] = call(lambda _: current().gather(0, seconds=0.2))
    assert isinstance(error, Gone) and "process 1, 2 did not answer within 0.2 s" in str(error)
    assert [name for name, _ in waits] == ["1", "2"] and waits[1][1] <= 100 < waits[0][1] <= 200


@pytest.mark.parametrize("silent", [0, 1])
def test_all_others_name_a_process_that_does_not_answer(together, silent):
    found = together(lambda rank: rank == silent or current().gather(rank, seconds=0.3))
    for error in (error for rank, error in enumerate(found) if rank != silent):
        assert isinstance(error, Gone) and f"process {silent} did not answer within 0." in str(error)


def test_all_wait_for_the_last_one_to_meet_and_fail_when_one_is_missing(together):
    came, meeting = [], together(lambda _: current().messages("meeting"))

    def come(rank):
        time.sleep(0.1 if rank == 0 else 0)  # the others wait for it
        came.append(rank)
        meeting[rank].meet(5)
        came.append(rank)

    assert together(come) == [None] * COUNT
    assert sorted(came[:COUNT]) == sorted(came[COUNT:]) == [0, 1, 2]
    another = together(lambda _: current().messages("meeting"))
    for error in together(lambda rank: another[rank].meet(0.2) if rank else None)[1:]:
        assert isinstance(error, Failure)


def test_a_lost_process_is_no_longer_alive():
    first = clusters(COUNT)[0]
    first.lost.add(1)
    assert first.alive() == [0, 2]


def test_texts_are_read_by_name_and_a_missing_or_second_one_is_a_failure(together):
    signs = together(lambda _: current().messages("signs"))
    together(lambda rank: signs[rank].post(str(rank), "old"))
    together(lambda rank: signs[rank].post(str(rank), f"new {rank}", again=True))
    wanted = {str(index): f"new {index}" for index in range(COUNT)}
    assert together(lambda rank: signs[rank].read_all()) == [wanted] * COUNT
    assert together(lambda rank: signs[rank].read("2")) == ["new 2"] * COUNT
    for failing in (
        lambda rank: signs[rank].post("1", "second"),
        lambda rank: signs[rank].read("7"),
        lambda rank: signs[rank].wait("7", 0.1),
    ):
        assert all(isinstance(error, Failure) for error in together(failing))
