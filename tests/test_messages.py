"""Messages and decisions of several processes: real clients of jax's coordinator, here in threads of one process."""

import sys
import threading
from collections import defaultdict

import numpy as np
import pytest
import several_processes

from megajax.config import load_config
from megajax.data.indexed import IndexedWriter, open_checked
from megajax.data.loader import datasets
from megajax.errors import InputError
from megajax.messages import Failure, Messages, from_first_process

COUNT = 3


@pytest.fixture
def together():
    with several_processes.together(COUNT) as call:
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


def test_all_get_the_verdict_of_process_0_and_nothing_stays_in_the_store(together):
    judged = []

    def judge(texts):
        judged.append(texts)
        return "verdict"

    assert together(lambda index: Messages("question").decide(f"text {index}", judge)) == ["verdict"] * COUNT
    assert judged == [["text 0", "text 1", "text 2"]]
    assert together(lambda index: Messages("question").read_all()) == [{}] * COUNT


def test_only_process_0_looks_and_all_get_what_it_found(together):
    asked = []
    assert together(lambda index: from_first_process(lambda: asked.append(index) or [3, index])) == [[3, 0]] * COUNT
    assert asked == [0]


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
    found = together(lambda _: datasets(config)["train"])
    assert [samples.dataset.tokens.size for samples in found] == [found[0].dataset.tokens.size] * COUNT
    opened.clear()
    together(lambda _: datasets(config)["train"])
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


def test_all_hear_of_a_failure_of_process_0(together):
    def fail(texts):
        raise OSError("the store is silent")

    for error in together(lambda index: Messages("question").decide("text", fail)):
        assert isinstance(error, InputError) and str(error) == "the store is silent"


def test_all_name_a_process_that_does_not_answer(together):
    answer = lambda index: index == 1 or Messages("question").decide("text", lambda texts: "", seconds=0.3)  # noqa: E731
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
