"""Sample order and blends against slow and plain reimplementations."""

import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from megajax.data import samples as samples_module
from megajax.data.indexed import IndexedDataset, IndexedWriter
from megajax.data.megatron import MegatronSamples, OrderSettings
from megajax.data.samples import BlendedSamples, DocumentSamples, Samples, make_batch, split_documents
from megajax.data.synthetic import SyntheticSamples
from megajax.errors import InputError

RAGGED = [
    [10],
    [],
    [20, 21, 22, 23, 24],
    [30, 31],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50],
    [],
    [60, 61, 62],
]


def naive_samples(documents, length, seed, epochs, shuffled):
    """All samples that start in the first `epochs` passes, by writing the whole stream down."""
    num_tokens = sum(map(len, documents))
    stream, orders = [], []
    for epoch in range(epochs + 1 + length // num_tokens + 1):
        generator = np.random.Generator(np.random.PCG64((seed, epoch)))
        order = generator.permutation(np.arange(len(documents), dtype=np.int32)) if shuffled else range(len(documents))
        stream += [token for document in order for token in documents[document]]
        orders.append(generator)
    result = []
    for epoch in range(epochs):
        starts = [s for s in range(0, len(stream), length) if epoch * num_tokens <= s < (epoch + 1) * num_tokens]
        if shuffled:
            starts = orders[epoch].permutation(np.array(starts)).tolist()
        result += [stream[start : start + length + 1] for start in starts]
    return result


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
@pytest.mark.parametrize("length", [1, 3, 4, 22, 50])
def test_samples_equal_the_written_out_stream(write_documents, order, length):
    dataset = IndexedDataset(write_documents(RAGGED))
    samples = DocumentSamples(dataset, (0, len(RAGGED)), length, 5, order)
    expected = naive_samples(RAGGED, length, 5, 6, order == "shuffled")
    assert len(expected) >= 2
    assert [samples[i].tolist() for i in range(len(expected))] == expected
    assert samples[0].dtype == np.int32


@pytest.mark.smoke
@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, -(2**63), -7])
def test_a_token_that_does_not_fit_is_never_another_one(tmp_path, token):
    with IndexedWriter(tmp_path / "wide", np.int64) as writer:
        writer.add_document(np.array([*range(20), token, *range(19)]))
    samples = DocumentSamples(IndexedDataset(tmp_path / "wide"), (0, 1), 10, 0, "sequential")
    assert samples[0].tolist() == list(range(11))
    with pytest.raises(InputError, match=f"wide.bin has the token {token} at position 20: ids are from 0"):
        samples[2]


@pytest.mark.smoke
def test_every_token_is_an_input_exactly_once_an_epoch(write_documents):
    generator = np.random.default_rng(0)
    ends = np.cumsum(generator.integers(0, 90, 200))
    documents = [list(range(start, end)) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    dataset = IndexedDataset(write_documents(documents))
    total, length = int(ends[-1]), 16
    samples = DocumentSamples(dataset, (0, 200), length, 3, "shuffled")
    epochs = 3
    inputs = Counter(token for i in range(-(-epochs * total // length)) for token in samples[i][:-1].tolist())
    surplus = -(-epochs * total // length) * length - epochs * total  # the last sample reaches into a further epoch
    assert set(inputs) == set(range(total))
    assert sum(inputs.values()) == epochs * total + surplus and sum(c - epochs for c in inputs.values()) == surplus
    assert min(inputs.values()) == epochs


def test_targets_are_the_inputs_moved_on_by_one(write_documents):
    dataset = IndexedDataset(write_documents([list(range(100))]))
    samples = DocumentSamples(dataset, (0, 1), 10, 1, "sequential")
    batch = make_batch(samples, [0, 2])
    assert batch["tokens"].tolist() == [list(range(10)), list(range(20, 30))]
    assert batch["targets"].tolist() == [list(range(1, 11)), list(range(21, 31))]
    assert batch["positions"].tolist() == [list(range(10))] * 2
    assert batch.keys() == {"tokens", "targets", "loss_mask", "positions"} and batch["loss_mask"].all()
    assert {name: (field.shape, field.dtype.name) for name, field in batch.items()} == {
        name: ((2, 10), "float32" if name == "loss_mask" else "int32") for name in batch
    }
    assert all(field.flags.c_contiguous for field in batch.values())


def test_epochs_and_seeds_have_different_orders(write_documents):
    dataset = IndexedDataset(write_documents([[i] * 4 for i in range(50)]))
    first, second = (DocumentSamples(dataset, (0, 50), 4, seed, "shuffled") for seed in (1, 2))
    epochs = [[first[50 * e + i].tolist() for i in range(49)] for e in range(2)]
    assert epochs[0] != epochs[1] != [second[i].tolist() for i in range(49)] != epochs[0]


def test_threads_and_unpickled_copies_read_the_same_in_any_order(write_documents):
    dataset = IndexedDataset(write_documents(RAGGED))
    samples = DocumentSamples(dataset, (0, 7), 3, 5, "shuffled")
    expected = naive_samples(RAGGED, 3, 5, 40, True)
    indices = np.random.default_rng(0).permutation(len(expected)).tolist()
    copy = pickle.loads(pickle.dumps(samples))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda i: (samples[i].tolist(), copy[i].tolist()), indices))
    assert read == [(expected[i],) * 2 for i in indices]


def test_a_range_of_documents_gives_no_token_of_the_others(write_documents):
    dataset = IndexedDataset(write_documents(RAGGED))
    samples = DocumentSamples(dataset, (2, 5), 6, 5, "shuffled")
    expected = naive_samples(RAGGED[2:5], 6, 5, 4, True)
    assert [samples[i].tolist() for i in range(len(expected))] == expected


def test_another_order_is_another_entry(write_documents, monkeypatch):
    class Backwards:
        def __init__(self, starts, sequence_length, seed):
            self.starts, self.size = starts, sequence_length + 1

        def pieces(self, index):
            yield int(self.starts[-1]) - self.size * (index + 1), int(self.starts[-1]) - self.size * index

    monkeypatch.setitem(samples_module.ORDERS, "backwards", Backwards)
    dataset = IndexedDataset(write_documents([list(range(20))]))
    samples = DocumentSamples(dataset, (0, 1), 3, 1, "backwards")
    assert [samples[i].tolist() for i in range(2)] == [[16, 17, 18, 19], [12, 13, 14, 15]]


def test_token_positions_beyond_two_billion_are_exact():
    starts = np.array([0, 3_000_000_000, 7_000_000_000], np.int64)
    order = samples_module.StreamOrder(starts, 8192, 1, shuffled=False)
    assert list(order.pieces(366_210)) == [(2_999_992_320, 3_000_000_000), (3_000_000_000, 3_000_000_513)]
    assert list(order.pieces(854_492)) == [(6_999_998_464, 7_000_000_000), (0, 6_657)]


def test_data_without_tokens_or_of_floats_is_refused(write_documents, tmp_path):
    empty = IndexedDataset(write_documents([[], []], "empty"))
    floats = IndexedDataset(write_documents([[1.5]], "floats", np.float32))
    for dataset, sentence in (
        (
            empty,
            f"{empty.prefix}.bin has 2 documents, without any token: write it again from text that is not empty.",
        ),
        (floats, f"{floats.prefix}.idx holds float32: token ids must be integers."),
    ):
        for kind, order in (
            (DocumentSamples, (4, 1, "shuffled")),
            (MegatronSamples, (OrderSettings(1, 4, 1), tmp_path, None)),
        ):
            with pytest.raises(InputError) as caught:
                kind(dataset, (0, dataset.num_documents), *order)
            assert str(caught.value) == sentence


def blend_of(weights):
    return BlendedSamples([SyntheticSamples(50, 4, seed) for seed in range(len(weights))], weights)


def naive_blend(weights, count):
    taken, result = [0] * len(weights), []
    for _ in range(count):
        source = min(range(len(weights)), key=lambda d: (taken[d] + 0.5) / weights[d])
        result.append((source, taken[source]))
        taken[source] += 1
    return result


@pytest.mark.parametrize(
    "weights",
    [[1.0], [1.0, 1.0], [0.5, 0.25, 0.25], [3.0, 1.0], [0.9, 0.099, 0.001], [1, 1, 1, 1e-6], [0.3] * 9],
)
def test_blend_takes_from_the_source_furthest_behind(weights):
    blend = blend_of(weights)
    expected = naive_blend(blend.weights.tolist(), 3000)
    assert [blend.locate(n) for n in range(3000)] == expected


def test_random_blends_follow_the_greedy_rule_and_their_weights():
    generator = np.random.default_rng(1)
    for sources in (2, 5, 40):
        weights = generator.exponential(size=sources) + 1e-3
        blend = blend_of(weights.tolist())
        chosen = naive_blend(blend.weights.tolist(), 2000)
        assert [blend.locate(n) for n in range(2000)] == chosen
        counts = np.bincount([source for source, _ in chosen], minlength=sources)
        assert np.abs(counts - 2000 * blend.weights).max() < 2


def test_far_samples_of_a_blend_are_found_without_the_near_ones():
    blend = blend_of([0.7, 0.2, 0.1])
    start = 10**11
    found = [blend.locate(start + n) for n in range(1000)]
    assert np.bincount([source for source, _ in found]).tolist() == [700, 200, 100]
    for source in range(3):
        ranks = [rank for d, rank in found if d == source]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks)))


class Numbered(Samples):
    """Whatever is asked of a sample is a number with the source's in hundreds, the index in units."""

    def __init__(self, source: int):
        self.source = source

    def number(self, index: int) -> Any:
        return 100 * self.source + index

    __getitem__ = document_lengths = counted = padding = pictures = number


def test_blend_returns_all_of_the_source_sample():
    blend = BlendedSamples([Numbered(1), Numbered(2)], [2, 1])  # at 3/4, 9/4 and 15/4, and at 3/2 and 9/2
    of_sample = blend.__getitem__, blend.document_lengths, blend.counted, blend.padding, blend.pictures
    for get in of_sample:
        assert [get(index) for index in range(5)] == [100, 200, 101, 102, 201]


def test_split_covers_all_documents_in_proportion():
    assert split_documents(1000, [969, 30, 1]) == [(0, 969), (969, 999), (999, 1000)]
    assert split_documents(10, [1, 1, 1]) == [(0, 3), (3, 7), (7, 10)]
    assert split_documents(7, [1, 0, 0]) == [(0, 7), (7, 7), (7, 7)]


def test_synthetic_tokens_depend_on_index_seed_and_stream_and_fill_the_vocabulary():
    samples = SyntheticSamples(100, 1000, 3)
    assert samples[7].tolist() == SyntheticSamples(100, 1000, 3)[7].tolist()
    others = [samples[8], SyntheticSamples(100, 1000, 4)[7], SyntheticSamples(100, 1000, 3, stream=1)[7]]
    assert all(other.tolist() != samples[7].tolist() for other in others)
    assert (samples[7].shape, samples[7].dtype) == ((1001,), np.int32)
    assert set(samples[7].tolist() + samples[8].tolist()) == set(range(100))
