"""Megatron's order of samples and blends, against its published values and a plain restatement of its algorithm."""

import math
import pickle
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.data.blend import blend_indices, exhaustive_indices, normalise_weights
from megajax.data.index_cache import cached
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import make_loader, open_datasets, open_split
from megajax.data.megatron_order import gpt_indices
from megajax.data.samples import Packing, make_batch
from megajax.errors import InputError

GOLDEN = Path(__file__).parents[1] / "data_files" / "megatron_blend.txt"  # of make_megatron_blend.py
SIZES = [7, 3, 12, 5, 1, 9, 4, 11]


@pytest.mark.smoke
def test_the_order_is_megatrons():
    documents, rows, shuffle = gpt_indices(np.array(SIZES), 8, 8, 1234)
    assert documents.tolist() == [2, 1, 6, 0, 4, 5, 3, 7, 5, 0, 3, 4, 2, 6, 1, 7]
    expected = "0,0 0,8 2,1 3,5 5,5 6,4 7,7 8,4 9,3 10,4 12,6 13,2 15,3"
    assert " ".join(f"{a},{b}" for a, b in rows) == expected
    assert shuffle.tolist() == [1, 0, 3, 5, 2, 4, 8, 9, 11, 7, 10, 6]
    assert (documents.dtype, rows.dtype, shuffle.dtype) == (np.int32, np.int32, np.uint32)
    datasets, samples = blend_indices([0.5, 0.3, 0.2], 12)
    assert datasets.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3]


def plain_gpt_indices(lengths, wanted, S, seed):
    """The algorithm token by token."""
    T, count = sum(lengths), 1
    while wanted is not None and count * T < wanted * S + 1:
        count += 1
    n, separated, before = (count * T - 1) // S, False, 0
    if count > 1:
        before = ((count - 1) * T - 1) // S
        separated = wanted - before < int(0.8 * ((T - 1) // S))
    random = np.random.RandomState(seed)
    groups = [count - 1, 1] if separated else [count]
    documents = []
    for epochs in groups:
        part = np.array(list(range(len(lengths))) * epochs, np.int32)
        random.shuffle(part)
        documents += part.tolist()
    stream = [(place, token) for place, d in enumerate(documents) for token in range(lengths[d])]
    rows = [list(stream[k * S]) for k in range(n + 1)]
    shuffle = []
    for first, last in ((0, before), (before, n)) if separated else ((0, n),):
        part = np.arange(first, last, dtype=np.uint32)
        random.shuffle(part)
        shuffle += part.tolist()
    return documents, rows, shuffle


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 3, 1 << 24]),
)
def test_the_order_is_that_of_the_plain_algorithm(lengths, wanted, length, seed, chunk):
    found = gpt_indices(np.array(lengths, np.int32), wanted, length, seed, chunk=chunk)
    for ours, theirs in zip(found, plain_gpt_indices(lengths, wanted, length, seed), strict=True):
        assert ours.tolist() == theirs


def plain_blend(weights, count, limits=None):
    taken, out = [0] * len(weights), []
    for t in range(count):
        behind = [w * max(float(t), 1.0) - taken[d] for d, w in enumerate(weights)]
        if limits is not None:
            behind = [b if taken[d] < limits[d] else -math.inf for d, b in enumerate(behind)]
        d = behind.index(max(behind))
        out.append((d, taken[d]))
        taken[d] += 1
    return out


# Each number of sets, and of samples, is a program: a hundred together, so that both functions have the same ones.
SETS = [st.lists(st.integers(1, 24), min_size=n, max_size=n).map(lambda x: [*x, 100 - sum(x)]) for n in (0, 1, 4)]


@settings(max_examples=30, deadline=None)
@given(st.one_of(SETS).flatmap(st.permutations), st.sampled_from([1, 100]))
def test_a_blend_is_that_of_the_plain_algorithm(numbers, count):
    weights = normalise_weights(numbers)
    assert list(zip(*map(np.ndarray.tolist, blend_indices(weights, count)), strict=True)) == plain_blend(weights, count)
    every = list(zip(*map(np.ndarray.tolist, exhaustive_indices(numbers)), strict=True))
    assert every == plain_blend(np.array(numbers) / sum(numbers), sum(numbers), numbers)


def test_a_blend_of_more_than_a_million_samples_is_that_of_the_plain_algorithm_to_its_end():
    """With halves and quarters, which float64 has exactly, its order repeats every four samples."""
    weights, count = [0.5, 0.25, 0.25], 2**20 + 6
    datasets, samples = blend_indices(weights, count)
    np.testing.assert_array_equal(datasets, np.resize([d for d, _ in plain_blend(weights, 4)], count))
    for d in range(3):
        np.testing.assert_array_equal(samples[datasets == d], np.arange((datasets == d).sum()))


@pytest.mark.smoke
def test_weights_are_checked():
    for weights in ([0.0, 0.0], [1.0, -1.0], [math.nan]):
        with pytest.raises(ValueError, match="have a negative number, or no positive one"):
            normalise_weights(weights)


@pytest.fixture
def make_megatron(make_config, tmp_path):
    def make(**settings):
        defaults = {"order": "megatron", "index_cache": None, "train_samples": None, "end_of_document": None}
        config = make_config(**(defaults | settings))
        config.run.dir, config.run.eval_interval = str(tmp_path / "run"), 4
        return config

    return make


def written(tmp_path, name, documents, lengths=None) -> str:
    with IndexedWriter(tmp_path / name, np.uint16) as writer:
        for i, document in enumerate(documents):
            writer.add_document(document, None if lengths is None else lengths[i])
    return str(tmp_path / name)


def test_samples_are_the_tokens_of_the_plain_order(tmp_path, make_megatron):
    """A document of two sequences counts as two; several epochs."""
    texts = [np.arange(100 * i, 100 * i + size) for i, size in enumerate(SIZES)]
    prefix = written(tmp_path, "a", [np.concatenate(texts[:2]), *texts[2:]], [SIZES[:2], *([s] for s in SIZES[2:])])
    config = make_megatron(train=prefix, seed=1234, global_size=2, sequence_length=8)
    config.run.steps = 4
    samples = open_datasets(config)["train"]
    documents, rows, shuffle = plain_gpt_indices(SIZES, 8, 8, 1234)
    stream = np.concatenate([texts[d] for d in documents])
    starts = [sum(SIZES[d] for d in documents[:place]) + token for place, token in rows]
    for i, row in enumerate(shuffle):
        assert samples[i].tolist() == stream[starts[row] : starts[row] + 9].tolist()
        assert samples.document_lengths(i).sum() == 9
    np.testing.assert_array_equal(samples[len(shuffle)], samples[0])  # for the loader that reads ahead
    again = pickle.loads(pickle.dumps(samples))  # a reader process
    np.testing.assert_array_equal(again[3], samples[3])


def test_an_empty_sequence_is_no_document_of_a_sample(tmp_path, make_megatron):
    prefix = written(tmp_path, "a", [range(5), [], range(10, 15), []])
    config = make_megatron(train=prefix, seed=1234, global_size=1, sequence_length=7)
    config.run.steps = 3
    samples = open_datasets(config)["train"]
    for sample, lengths in ((samples[i], samples.document_lengths(i)) for i in range(3)):
        changes = np.flatnonzero(np.diff(sample) != 1) + 1
        assert lengths.tolist() == np.diff([0, *changes, 8]).tolist()


def test_a_blend_of_splits_reads_the_samples_that_megatron_would(tmp_path, make_megatron):
    """Split by sequences, 0.5 % more samples than needed for each member, and the blend's own order."""
    rng, sets = np.random.default_rng(0), []
    for name in "abc":
        sets.append([rng.integers(0, 999, size) for size in rng.integers(1, 30, 21)])
        written(tmp_path, name, sets[-1])
    parts = [{"prefix": str(tmp_path / name), "weight": weight} for name, weight in zip("abc", (5, 3, 2), strict=True)]
    parts = tuple(type("Source", (), part) for part in parts)
    config = make_megatron(train=parts, split="90,10,0", global_size=4, sequence_length=8, seed=3)
    config.run.steps = 25
    opened = open_datasets(config)
    weights = [0.5, 0.3, 0.2]
    for split, bounds, wanted in (("train", (0, round(0.9 * 21)), 100), ("valid", (round(0.9 * 21), 21), 7 * 2 * 4)):
        orders = []
        for texts, weight in zip(sets, weights, strict=True):
            lengths = [len(text) for text in texts[slice(*bounds)]]
            count = math.ceil(math.ceil(wanted * weight) * 1.005)
            orders.append((texts[slice(*bounds)], lengths, plain_gpt_indices(lengths, count, 8, 3)))
        size = sum(math.ceil(wanted * weight) for weight in weights)
        for i, (d, sample) in enumerate(plain_blend(weights, size)):
            texts, lengths, (documents, rows, shuffle) = orders[d]
            place, token = rows[shuffle[sample]]
            stream = np.concatenate([texts[document] for document in documents[place:]])
            assert opened[split][i].tolist() == stream[token : token + 9].tolist()
    rows = np.arange(4)
    whole = make_loader(config, split="train", rows=rows)
    first = [next(whole)["tokens"] for _ in range(25)]
    resumed = make_loader(config, split="train", rows=rows[2:], start_step=20)  # the second of two processes
    for batch in first[20:]:
        np.testing.assert_array_equal(next(resumed)["tokens"], batch[2:])


def test_a_thousand_samples_of_a_blend_are_the_golden_ones(tmp_path, make_megatron):
    """Three data sets over several epochs, also after a resume in the middle by two processes."""
    header, *lines = GOLDEN.read_text().splitlines()
    _, seed, _, length, _, *weights = header.split()
    texts, parts, token = [], [], 0
    for name, line, weight in zip("abc", lines, weights, strict=False):
        sizes = list(map(int, line.split()[1:]))
        ends = token + np.cumsum(sizes)
        texts.append([np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)])
        token = int(ends[-1])
        parts.append(SimpleNamespace(prefix=written(tmp_path, name, texts[-1]), weight=float(weight)))
    places = [tuple(map(int, place.split(","))) for line in lines[3:] for place in line.split()]
    firsts = np.array([texts[d][sequence][offset] for d, sequence, offset in places])
    config = make_megatron(
        train=tuple(parts), seed=int(seed), global_size=20, sequence_length=int(length), vocab_size=token
    )
    config.run.steps = len(places) // 20
    read = [np.empty((50, 20), int) for _ in range(2)]
    for i, (start, processes) in enumerate(((0, [range(20)]), (23, [range(10), range(10, 20)]))):
        for rows in processes:
            loader = make_loader(config, split="train", rows=np.array(rows), start_step=start)
            for step in range(start, 50):
                read[i][step, rows] = next(loader)["tokens"][:, 0]
    assert read[0].ravel().tolist() == firsts.tolist()
    assert read[1][23:].tolist() == read[0][23:].tolist()


def test_a_blend_without_weights_reads_each_sample_once(tmp_path, make_megatron):
    """Shares in proportion to the sizes of one epoch; of fewer samples as Megatron's blend with a size."""
    sizes = {"a": [30, 41, 7], "b": [11, 5], "c": [90]}
    parts, orders = [], []
    for i, (name, own) in enumerate(sizes.items()):
        texts = [np.arange(size) + 300 * i + 100 * k for k, size in enumerate(own)]
        parts.append(SimpleNamespace(prefix=written(tmp_path, name, texts), weight=None))
        documents, rows, shuffle = plain_gpt_indices(own, None, 4, 7)
        orders.append([int(texts[documents[rows[k][0]]][rows[k][1]]) for k in shuffle])
    counts = [len(order) for order in orders]
    config = make_megatron(train=tuple(parts), global_size=1, sequence_length=4)
    for steps, limits in ((sum(counts), counts), (20, None)):
        config.run.steps = steps
        samples = open_datasets(config)["train"]
        expected = [orders[d][k] for d, k in plain_blend(normalise_weights(counts), steps, limits)]
        assert [int(samples[i][0]) for i in range(steps)] == expected
    config.run.steps = sum(counts) + 1
    with pytest.raises(InputError, match=f"have {sum(counts)} samples, each .* the run reads {sum(counts) + 1}: give"):
        open_datasets(config)
    config.data.order = "shuffled"
    np.testing.assert_allclose(open_datasets(config)["train"].weights, np.array([78, 16, 90]) / 184)


def test_the_rest_of_a_validation_set_is_a_padded_sample(tmp_path, make_megatron):
    """Eight tokens in samples of three: two whole ones, and token 6 with its target, token 7."""
    prefix = written(tmp_path, "a", [[10, 11, 12, 13, 14], [15, 16, 17]])
    seed = next(s for s in range(9) if gpt_indices(np.array([5, 3]), None, 3, s).documents.tolist() == [0, 1])
    found = gpt_indices(np.array([5, 3]), None, 3, seed, drop_last=False)
    assert found.rows.tolist() == [[0, 0], [0, 3], [1, 1], [1, 2]]
    assert sorted(found.shuffle.tolist()) == [0, 1, 2]
    sets = (SimpleNamespace(name="same", prefix=prefix),)
    config = make_megatron(train=prefix, valid=prefix, valid_sets=sets, seed=seed, sequence_length=3, global_size=1)
    config.run.steps, config.run.eval_steps, config.data.drop_last_validation_sample = 1, 2, False
    opened = open_datasets(config)
    assert len(opened["valid"]) == 3 and len(opened["train"]) == 2
    i = found.shuffle.tolist().index(2)
    assert opened["valid"][i].tolist() == opened["valid/same"][i].tolist() == [16, 17, 0, 0]
    assert opened["valid"].document_lengths(i).tolist() == [2, 2]
    for packing in (Packing(), Packing(mask_end_of_document_loss=True)):
        batch = make_batch(opened["valid"], [i], packing)
        assert batch["loss_mask"].tolist() == [[1, 0, 0]]
    batches = {split: make_loader(config, split=split, rows=np.array([0])) for split in ("train", "valid")}
    assert next(islice(batches["valid"], i, None))["is_real"].tolist() == [[True, True, False]]
    assert "is_real" not in next(batches["train"])
    assert gpt_indices(np.array([4, 3]), None, 3, 1, drop_last=False).rows.shape == (3, 2)  # no rest


def test_a_validation_source_shorter_than_a_sample_is_padded_in_one_epoch(tmp_path, make_megatron):
    """Two sources without weights; with one source the evaluation would repeat the five tokens."""
    long, short = written(tmp_path, "long", [range(100, 117)]), written(tmp_path, "short", [[10, 11, 12, 13, 14]])
    blend = tuple(SimpleNamespace(prefix=prefix, weight=None) for prefix in (long, short))
    config = make_megatron(train=long, valid=blend, sequence_length=8, global_size=1)
    config.data.drop_last_validation_sample = False
    valid = open_datasets(config)["valid"]
    assert sorted(valid[i].tolist() for i in range(len(valid))) == [
        [10, 11, 12, 13, 14, 0, 0, 0, 0],
        list(range(100, 109)),
        list(range(108, 117)),
    ]
    config.data.valid = short
    with pytest.raises(InputError, match=r"has 5 tokens for valid.* pads the last sample only, after .* repeated"):
        open_datasets(config)
    config.run.eval_steps = "all"  # reads one epoch of one source too
    valid = open_datasets(config)["valid"]
    assert len(valid) == 1 and valid[0].tolist() == [10, 11, 12, 13, 14, 0, 0, 0, 0]


def test_documents_end_at_their_token(tmp_path, make_megatron):
    """As with --reset-attention-mask, wherever sequences end; 256 is the end of a document for bytes."""
    prefix = written(tmp_path, "eod", [[1, 2, 256, 3, 256], [256, 4, 5, 6], [7, 8, 9, 256]])
    config = make_megatron(train=prefix, tokenizer="byte", reset_attention=True, global_size=1, sequence_length=5)
    config.run.steps = 2
    samples = open_datasets(config)["train"]
    for i in range(2):
        sample, lengths = samples[i].tolist(), samples.document_lengths(i).tolist()
        ends = np.cumsum(lengths).tolist()
        assert ends[-1] == 6 and min(lengths) > 0
        assert ends[:-1] == [k + 1 for k, token in enumerate(sample) if token == 256 and k < 5]
    config.data.reset_attention, config.data.fim_rate = False, 0.5  # depends on documents too
    assert open_split(config, "train").document_lengths(1).tolist() == lengths
    config.data.reset_attention, config.data.fim_rate, config.data.tokenizer = True, 0.0, None
    with pytest.raises(InputError, match="finds the ends of documents by their token.*set data.tokenizer"):
        open_datasets(config)


def test_an_index_is_built_once_and_mistakes_are_sentences(tmp_path, make_megatron):
    prefix = written(tmp_path, "a", [[1] * 20, [2] * 30])
    config = make_megatron(train=prefix, global_size=1, sequence_length=8, index_cache=str(tmp_path / "cache"))
    expected = open_datasets(config)["train"][0]
    folder = next(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert {path.name for path in folder.iterdir()} == {"documents.npy", "rows.npy", "shuffle.npy", "key.json"}
    shuffle = np.load(folder / "shuffle.npy")
    np.save(folder / "shuffle.npy", np.roll(shuffle, 1))  # read, and not built again
    np.testing.assert_array_equal(open_datasets(config)["train"][1], expected)
    (folder / "rows.npy").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be written or read .*free space there, remove it, or set data.index"):
        open_datasets(config)
    (tmp_path / "file").touch()
    config.data.index_cache = str(tmp_path / "file" / "cache")
    with pytest.raises(InputError, match="data.train .*Not a directory.*set data.index_cache to another directory"):
        open_datasets(config)
    config = make_megatron(train=prefix, global_size=1, sequence_length=50, index_cache=str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"has 50 tokens for train, but a sample of batch.sequence_length=50"):
        open_datasets(config)


def test_a_build_that_fails_leaves_nothing_that_loads(tmp_path):
    def fail():
        raise KeyboardInterrupt

    key = {"kind": "test"}
    with pytest.raises(KeyboardInterrupt):
        cached(tmp_path, key, ["a"], fail)
    (found,) = cached(tmp_path, key, ["a"], lambda: [np.arange(3)])
    assert found.tolist() == [0, 1, 2]
    assert cached(tmp_path, {"kind": "other"}, ["a"], lambda: [np.zeros(1)])[0].tolist() == [0.0]
