"""Batches depend on step and row only; unreadable data is an error of one sentence before the start."""

import multiprocessing
import os
import signal
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from megajax.data.loader import make_loader, open_datasets, open_split
from megajax.data.samples import BlendedSamples
from megajax.errors import InputError

DOCUMENTS = [list(range(start, start + 7)) for start in range(0, 700, 7)]


def take(loader, count):
    batches = list(islice(loader, count))
    loader.close()
    return batches


def assert_equal(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.smoke
def test_row_r_of_step_t_is_one_sample(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS))
    samples = open_datasets(config)["train"]
    batches = take(make_loader(config, split="train", rows=np.arange(4), start_step=0), 3)
    for step, batch in enumerate(batches):
        for row in range(4):
            sample = samples[step * 4 + row]
            assert batch["tokens"][row].tolist() == sample[:-1].tolist()
            assert batch["targets"][row].tolist() == sample[1:].tolist()
    assert set(batches[0]) == {"tokens", "targets", "loss_mask", "positions"}
    assert all(field.shape == (4, 8) for field in batches[0].values())


def test_resuming_equals_reading_on(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS))
    whole = take(make_loader(config, split="train", rows=np.arange(4)), 60)  # several epochs
    assert_equal(take(make_loader(config, split="train", rows=np.arange(4), start_step=37), 23), whole[37:])


def test_a_growing_batch_reads_the_next_samples_whatever_the_processes(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS), global_size=6, schedule="0: 2, 30: 6")  # from step 3 on
    plain = make_config(train=config.data.train, global_size=1)
    one_by_one = take(make_loader(plain, split="train", rows=np.arange(1)), 16)
    parts = [np.array(rows) for rows in ([0, 2, 4], [1, 3, 5])]
    read = [take(make_loader(config, split="train", rows=rows), 4) for rows in parts]
    sample = 0
    for step, rows in enumerate((2, 2, 6, 6)):
        assert [len(batches[step]["tokens"]) for batches in read] == [rows / 2, rows / 2]
        for row in range(rows):
            expected = one_by_one[sample]["tokens"][0].tolist()
            assert read[row % 2][step]["tokens"][row // 2].tolist() == expected
            sample += 1
    resumed = [take(make_loader(config, split="train", rows=rows, start_step=3), 1) for rows in parts]
    for one, other in zip(resumed, read, strict=True):
        assert_equal(one, other[3:])
    valid = make_config(train=None, valid=config.data.train, global_size=6, schedule="0: 2, 30: 6")
    assert len(take(make_loader(valid, split="valid", rows=np.arange(6)), 1)[0]["tokens"]) == 6


def test_rows_of_all_processes_make_the_whole_batch(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS), global_size=6)
    whole = take(make_loader(config, split="train", rows=np.arange(6)), 5)
    parts = [np.array(rows, np.int32) for rows in ([4, 1], [0], [5, 2, 3])]
    read = [take(make_loader(config, split="train", rows=rows), 5) for rows in parts]
    for rows, batches in zip(parts, read, strict=True):
        assert_equal(batches, [{name: field[rows] for name, field in batch.items()} for batch in whole])


def test_prefetch_changes_nothing(make_config, write_documents):
    blend = [
        SimpleNamespace(prefix=write_documents(DOCUMENTS, "a"), weight=2.0),
        SimpleNamespace(prefix=write_documents(DOCUMENTS[:9], "b"), weight=1.0),
    ]
    plain = take(make_loader(make_config(train=blend), split="train", rows=np.arange(4), start_step=3), 7)
    for prefetch in (0, 5):  # test_registered_data.py has worker processes
        config = make_config(train=blend, prefetch=prefetch)
        assert_equal(take(make_loader(config, split="train", rows=np.arange(4), start_step=3), 7), plain)


@pytest.mark.long
@pytest.mark.parametrize("request_to_stop", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_reading_goes_on_when_worker_processes_are_asked_to_stop(make_config, write_documents, request_to_stop):
    prefix = write_documents(DOCUMENTS)
    plain = take(make_loader(make_config(train=prefix), split="train", rows=np.arange(4)), 20)
    earlier = multiprocessing.active_children()
    loader = make_loader(make_config(train=prefix, workers=1, prefetch=1), split="train", rows=np.arange(4))
    read = [next(loader)]
    workers = [process for process in multiprocessing.active_children() if process not in earlier]
    assert len(workers) == 1
    assert workers[0].pid is not None
    os.kill(workers[0].pid, request_to_stop)
    read += take(loader, 19)
    assert_equal(read, plain)


def test_evaluation_reads_from_sample_0_whatever_the_workers(make_config, write_documents):
    prefix = write_documents(DOCUMENTS)
    config = make_config(train=prefix, valid=prefix, workers=2)
    samples = open_datasets(config)["valid"]
    batch = take(make_loader(config, split="valid", rows=np.arange(4), samples=samples), 1)[0]
    assert batch["tokens"].tolist() == [samples[i][:-1].tolist() for i in range(4)]


def test_splits_are_the_documents_in_their_shares(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS), split="90,10,0", sequence_length=7)
    opened = open_datasets(config)
    assert set(opened) == {"train", "valid"}
    for samples, tokens in ((opened["train"], range(630)), (opened["valid"], range(630, 700))):
        seen = {token for i in range(len(tokens) // 7) for token in samples[i][:-1].tolist()}
        assert seen == set(tokens)


def test_separate_files_and_blends_are_opened(make_config, write_documents):
    train = [SimpleNamespace(prefix=write_documents(DOCUMENTS, "a"), weight=1.0)]
    train.append(SimpleNamespace(prefix=write_documents([[999] * 50], "b"), weight=3.0))
    opened = open_datasets(make_config(train=train, test=write_documents([[5] * 9], "t")))
    assert set(opened) == {"train", "test"} and isinstance(opened["train"], BlendedSamples)
    assert sum(opened["train"][i][0] == 999 for i in range(40)) == 30
    assert set(opened["test"][3].tolist()) == {5}


def test_synthetic_data_ignores_paths_and_stays_in_the_vocabulary(make_config):
    valid_sets = (SimpleNamespace(name="wiki", prefix="nowhere"),)
    config = make_config(kind="synthetic", train="nowhere", valid_sets=valid_sets, vocab_size=50)
    opened = open_datasets(config)
    assert set(opened) == {"train", "valid", "test"}
    assert opened["train"][0].tolist() != opened["valid"][0].tolist()
    batch = take(make_loader(config, split="train", rows=np.arange(4)), 1)[0]
    assert 0 <= batch["tokens"].min() and batch["tokens"].max() < 50
    assert batch["tokens"][3].tolist() == opened["train"][3][:-1].tolist()


def sentence_of(config):
    with pytest.raises(InputError) as caught:
        open_datasets(config)
    return str(caught.value)


def test_missing_and_damaged_files_are_named_with_their_key(make_config, write_documents):
    prefix = write_documents(DOCUMENTS)
    assert sentence_of(make_config(train=prefix, valid="./no/where")) == (
        "data.valid (run.yaml, line 10): ./no/where.idx does not exist: correct the prefix, or write it with "
        "`python -m megajax.data.preprocess`."
    )
    with open(f"{prefix}.bin", "ab") as file:
        file.write(b"\0\0")
    assert sentence_of(make_config(train=prefix)) == (
        f"data.train (run.yaml, line 10): {prefix}.bin has 1402 bytes, but {prefix}.idx says 1400: the two "
        "do not belong together or one is damaged; write both again."
    )


def test_a_vocabulary_larger_than_the_models_is_refused(make_config, write_documents):
    prefix = write_documents(DOCUMENTS)
    assert sentence_of(make_config(train=prefix, tokenizer="byte", vocab_size=256)) == (
        "data.tokenizer=byte has 257 tokens, more than model.vocab_size=256 (run.yaml, line 16): set "
        "model.vocab_size=257 or larger."
    )
    assert sentence_of(make_config(train=prefix, vocab_size=699)) == (
        f"{prefix}.bin holds token id 699, outside model.vocab_size=699 (run.yaml, line 16): set "
        "model.vocab_size=700 or larger, preferably the vocabulary size of the tokenizer that wrote the file."
    )
    assert "train" in open_datasets(make_config(train=prefix, vocab_size=700, tokenizer="byte"))
    negative = write_documents([[1, -1, 2] * 3], "negative", np.int32)
    assert sentence_of(make_config(train=negative)) == (
        f"{negative}.bin holds the negative token id -1: write the file again."
    )


def test_a_missing_tokenizer_is_named_with_its_key(make_config, write_documents):
    assert sentence_of(make_config(train=write_documents(DOCUMENTS), tokenizer="no.json")) == (
        'data.tokenizer (run.yaml, line 14): no.json does not exist: correct the path of the tokenizer, or use "byte".'
    )


def test_a_share_without_documents_is_refused(make_config, write_documents):
    prefix = write_documents(DOCUMENTS[:10])
    assert sentence_of(make_config(train=prefix, split="969,30,1")) == (
        f'data.train (run.yaml, line 10): {prefix} has 10 documents, and data.split="969,30,1" '
        "leaves none for "
        "valid: give valid a larger share, or 0."
    )


def test_data_of_less_than_a_sample_is_refused(make_config, write_documents):
    prefix, two, none = write_documents([[5] * 17] * 2), write_documents([[1, 2]], "two"), write_documents([], "none")
    assert "train" in open_datasets(make_config(train=prefix, sequence_length=33))
    assert sentence_of(make_config(train=prefix, sequence_length=34)) == (
        f"data.train (run.yaml, line 10): {prefix}.bin has 34 tokens for train, but a sample of "
        "batch.sequence_length=34 takes 35: set batch.sequence_length=33 or less, or give more text."
    )
    blend = [SimpleNamespace(prefix=p, weight=1.0) for p in (prefix, two)]
    assert f"{two}.bin has 2 tokens for train, " in sentence_of(make_config(train=blend))
    assert "7 tokens for valid" in sentence_of(make_config(train=write_documents(DOCUMENTS), split="99,1,0"))
    assert sentence_of(make_config(train=prefix, valid=none)) == (
        f"data.valid (run.yaml, line 10): {none}.bin has no documents: write it again from text that is not empty."
    )


def test_a_split_file_is_opened_once(make_config, write_documents):
    opened = open_datasets(make_config(train=write_documents(DOCUMENTS), split="8,1,1"))
    assert len({id(vars(samples)["dataset"]) for samples in opened.values()}) == 1


def test_open_split_does_not_look_at_token_ids(make_config, write_documents):
    config = make_config(train=write_documents(DOCUMENTS), vocab_size=5, order="sequential")
    assert open_split(config, "train")[1].tolist() == list(range(8, 17))
