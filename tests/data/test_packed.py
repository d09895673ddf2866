"""The documents of a sample, and their effect on a batch: attention, positions and loss by document."""

from itertools import islice

import numpy as np
import pytest

from megajax.data.indexed import IndexedDataset
from megajax.data.loader import make_loader
from megajax.data.samples import BlendedSamples, DocumentSamples, Packing, make_batch
from megajax.data.synthetic import SyntheticSamples
from megajax.schema.vision import VisionConfig

ALL = Packing(reset_attention=True, reset_positions=True, mask_end_of_document_loss=True)

# The last sample goes on with the next epoch, whose first document has one token.
DOCUMENTS = [[10], [], [20, 21, 22, 23, 24], [30, 31], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [60, 61, 62]]
TOKENS = [[10, 20, 21, 22, 23, 24], [30, 31, 40, 41, 42, 43], [44, 45, 46, 47, 48, 49], [50, 60, 61, 62, 10, 20]]
TARGETS = [[20, 21, 22, 23, 24, 30], [31, 40, 41, 42, 43, 44], [45, 46, 47, 48, 49, 50], [60, 61, 62, 10, 20, 21]]
LENGTHS = [[1, 5, 1], [2, 5], [7], [1, 3, 1, 2]]
SEGMENTS = [[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 2, 3]]
POSITIONS = [[0, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 0, 1, 2, 0, 0]]
COUNTED = [[0, 1, 1, 1, 1, 0], [1, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 1]]


@pytest.fixture
def worked(write_documents):
    """The samples of DOCUMENTS in the file's order, S = 6."""
    return DocumentSamples(IndexedDataset(write_documents(DOCUMENTS)), (0, len(DOCUMENTS)), 6, 1, "sequential")


@pytest.mark.smoke
def test_a_packed_batch_is_as_worked_out_by_hand(worked):
    assert [worked.document_lengths(i).tolist() for i in range(4)] == LENGTHS
    batch = make_batch(worked, range(4), ALL)
    assert {name: field.tolist() for name, field in batch.items()} == {
        "tokens": TOKENS,
        "targets": TARGETS,
        "loss_mask": COUNTED,
        "positions": POSITIONS,
        "segment_ids": SEGMENTS,
    }
    dtypes = {name: "float32" if name == "loss_mask" else "int32" for name in batch}
    assert {name: field.dtype.name for name, field in batch.items()} == dtypes
    assert all(field.flags.c_contiguous for field in batch.values())


@pytest.mark.parametrize(
    ("option", "field", "expected"),
    [
        ("reset_attention", "segment_ids", SEGMENTS),
        ("reset_positions", "positions", POSITIONS),
        ("mask_end_of_document_loss", "loss_mask", COUNTED),
    ],
)
def test_each_option_changes_its_field_alone(worked, option, field, expected):
    plain, batch = make_batch(worked, range(4)), make_batch(worked, range(4), Packing(**{option: True}))
    assert batch.pop(field).tolist() == expected
    plain.pop(field, None)
    assert batch.keys() == plain.keys()
    for name in plain:
        np.testing.assert_array_equal(batch[name], plain[name])


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
@pytest.mark.parametrize("length", [1, 3, 22, 90])
def test_a_document_begins_where_the_tokens_jump(write_documents, order, length):
    """Token t + 1 follows token t within a document, and never across a border, not even of a repeated document."""
    sizes = np.random.default_rng(2).integers(0, 9, 12)
    dataset = IndexedDataset(write_documents([range(20 * i, 20 * i + size) for i, size in enumerate(sizes)]))
    samples = DocumentSamples(dataset, (0, 12), length, 5, order)
    for index in range(40):
        starts = np.flatnonzero(np.diff(samples[index], prepend=-5) != 1)
        lengths = samples.document_lengths(index)
        assert lengths.tolist() == np.diff([*starts, length + 1]).tolist()


def test_a_single_document_is_another_in_each_epoch(write_documents):
    samples = DocumentSamples(IndexedDataset(write_documents([[7, 8, 9]])), (0, 1), 7, 1, "shuffled")
    assert samples[1].tolist() == [8, 9, 7, 8, 9, 7, 8, 9]
    assert samples.document_lengths(1).tolist() == [2, 3, 3]


def test_a_blend_has_the_documents_of_its_sources(worked):
    blend = BlendedSamples([worked, SyntheticSamples(50, 6, 1, documents=4)], [1, 1])
    for index in range(8):
        source, rank = blend.locate(index)
        assert blend.document_lengths(index).tolist() == blend.sources[source].document_lengths(rank).tolist()
    assert [blend.document_lengths(i).size for i in range(8)] == [3, 4, 2, 4, 1, 4, 4, 4]


def test_synthetic_documents_cut_the_same_tokens_everywhere_and_depend_on_index_seed_and_stream():
    samples = SyntheticSamples(100, 20, 3, documents=5)
    lengths = np.array([samples.document_lengths(i) for i in range(300)])
    assert lengths.shape == (300, 5) and lengths.min() == 1 and set(lengths.sum(axis=1)) == {21}
    assert set(np.cumsum(lengths, axis=1)[:, :-1].flat) == set(range(1, 21))
    assert samples[7].tolist() == SyntheticSamples(100, 20, 3)[7].tolist()
    assert samples.document_lengths(7).tolist() == SyntheticSamples(9, 20, 3, documents=5).document_lengths(7).tolist()
    for other in (SyntheticSamples(100, 20, 4, documents=5), SyntheticSamples(100, 20, 3, stream=1, documents=5)):
        assert [other.document_lengths(i).tolist() for i in range(9)] != lengths[:9].tolist()


def test_synthetic_documents_may_be_one_or_as_many_as_tokens():
    lengths = {count: SyntheticSamples(10, 4, 3, documents=count).document_lengths(0) for count in (1, 4, 5)}
    assert (lengths[1].tolist(), sorted(lengths[4]), lengths[5].tolist()) == ([5], [1, 1, 1, 2], [1] * 5)


def test_synthetic_documents_begin_at_any_token_but_within_a_picture():
    """Three pictures of nine tokens."""
    tower = {"image_token": 9, "num_layers": 1, "hidden_size": 8, "num_heads": 2, "patch_size": 4, "grid": 3}
    vision = VisionConfig.model_validate(tower | {"patches_per_row": 27})
    samples = SyntheticSamples(10, 40, 3, documents=5, vision=vision)
    within = {first + token for _, first in samples.pictures(0) for token in range(1, 9)}
    starts = {int(start) for i in range(300) for start in np.cumsum(samples.document_lengths(i))[:-1]}
    assert len(within) == 24 and starts == set(range(1, 41)) - within


@pytest.mark.parametrize(("split", "workers"), [("train", 0), ("valid", 1)])
def test_the_loader_packs_as_the_config_says(make_config, write_documents, split, workers):
    prefix = write_documents(DOCUMENTS)
    options = dict(order="sequential", reset_attention=True, reset_positions=True, mask_end_of_document_loss=True)
    config = make_config(train=prefix, valid=prefix, sequence_length=6, workers=workers, **options)
    loader = make_loader(config, split=split, rows=np.arange(4))
    (batch,) = islice(loader, 1)
    loader.close()
    found = {name: batch[name].tolist() for name in ("loss_mask", "positions", "segment_ids")}
    assert found == {"loss_mask": COUNTED, "positions": POSITIONS, "segment_ids": SEGMENTS}


def test_synthetic_documents_come_from_the_config(make_config):
    config = make_config(kind="synthetic", synthetic_documents=3, reset_attention=True)
    loader = make_loader(config, split="train", rows=np.arange(4))
    (batch,) = islice(loader, 1)
    loader.close()
    expected = [SyntheticSamples(1000, 8, 7, documents=3).document_lengths(i) for i in range(4)]
    assert batch["segment_ids"].tolist() == [np.repeat(range(3), each)[:-1].tolist() for each in expected]
    assert batch["loss_mask"].all()
