"""The `.bin/.idx` layout against bytes packed by hand."""

import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megajax.data import indexed
from megajax.data.indexed import IndexedDataset, IndexedWriter, token_dtype
from megajax.errors import InputError

DOCUMENTS = [[5, 6, 7], [], [65000], [1, 2, 3, 4]]


def hand_made_index(
    lengths=(3, 1, 4),
    boundaries=(0, 1, 1, 2, 3),
    code=8,
    itemsize=2,
    magic=b"MMIDIDX\0\0",
    version=1,
    offsets=None,
) -> bytes:
    """Documents of 1, 0, 1 and 1 sequences, the layout spelled out once more."""
    if offsets is None:
        offsets = [sum(lengths[:i]) * itemsize for i in range(len(lengths))]
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(lengths))
        + struct.pack("<Q", len(boundaries))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(offsets)}q", *offsets)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )


HAND_MADE_BIN = struct.pack("<8H", 5, 6, 7, 65000, 1, 2, 3, 4)


@pytest.fixture
def put(tmp_path):
    def write(index: bytes | None = None, data: bytes | None = HAND_MADE_BIN) -> str:
        prefix = str(tmp_path / "p")
        for suffix, content in (("idx", index), ("bin", data)):
            if content is not None:
                Path(f"{prefix}.{suffix}").write_bytes(content)
        return prefix

    return write


@pytest.mark.smoke
def test_reader_finds_what_hand_packed_bytes_say(put):
    dataset = IndexedDataset(put(hand_made_index()))
    assert (len(dataset), dataset.num_documents, dataset.dtype) == (3, 4, np.uint16)
    assert [dataset.document(d).tolist() for d in range(4)] == DOCUMENTS
    assert [dataset[s].tolist() for s in range(3)] == [d for d in DOCUMENTS if d]
    assert dataset.document_starts().tolist() == [0, 3, 3, 4, 8]
    assert dataset.document_starts(1, 3).tolist() == [3, 3, 4]
    assert dataset.modes is None


@pytest.mark.smoke
def test_writer_writes_hand_packed_bytes(tmp_path):
    prefix = tmp_path / "new" / "w"
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document(DOCUMENTS[0])
        writer.add_documents(np.array([65000, 1, 2, 3, 4]), np.array([0, 1, 4]))
    assert Path(f"{prefix}.idx").read_bytes() == hand_made_index()
    assert Path(f"{prefix}.bin").read_bytes() == HAND_MADE_BIN
    assert (writer.num_documents, writer.num_tokens) == (4, 8)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["w.bin", "w.idx"]


def test_documents_of_several_sequences_and_modes_are_kept(tmp_path):
    prefix = tmp_path / "w"
    with IndexedWriter(prefix, np.int32, multimodal=True) as writer:
        writer.add_document([1, 2, 3, 70000], lengths=[1, 3], modes=[0, 1])
        writer.add_document([9], modes=[2])
    expected = hand_made_index((1, 3, 1), (0, 2, 3), code=4, itemsize=4) + struct.pack("<3b", 0, 1, 2)
    assert Path(f"{prefix}.idx").read_bytes() == expected
    dataset = IndexedDataset(prefix)
    assert dataset.document(0).tolist() == [1, 2, 3, 70000]
    assert dataset[1].tolist() == [2, 3, 70000]
    assert dataset.modes is not None and dataset.modes.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("code", "name"), [*enumerate("uint8 int8 int16 int32 int64 float64 float32 uint16".split(), start=1)]
)
def test_every_dtype_is_read_and_written_under_its_code(tmp_path, code, name):
    with IndexedWriter(tmp_path / "w", name) as writer:
        writer.add_document(np.array([1, 2, 100]))
    assert (tmp_path / "w.idx").read_bytes()[17] == code
    dataset = IndexedDataset(tmp_path / "w")
    assert dataset.tokens.dtype == np.dtype(name) and dataset.tokens.tolist() == [1, 2, 100]


def test_a_data_set_without_documents_is_read(tmp_path):
    with IndexedWriter(tmp_path / "w", np.uint16):
        pass
    dataset = IndexedDataset(tmp_path / "w")
    assert (len(dataset), dataset.num_documents, dataset.document_starts().tolist()) == (0, 0, [0])


def test_bin_is_u16_below_65500_tokens_and_i32_from_there():
    assert [token_dtype(size).name for size in (257, 65499, 65500, 128256)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def test_reading_copies_nothing_and_cannot_write(put):
    dataset = IndexedDataset(put(hand_made_index()))
    assert np.shares_memory(dataset.document(3), dataset.tokens)
    assert not dataset.tokens.flags.writeable and not dataset.tokens.flags.owndata


def test_threads_and_unpickled_copies_read_the_same(put):
    dataset = IndexedDataset(put(hand_made_index()))
    copy = pickle.loads(pickle.dumps(dataset))
    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(lambda d: (dataset.document(d % 4).tolist(), copy.document(d % 4).tolist()), range(400)))
    assert read == [(DOCUMENTS[d % 4],) * 2 for d in range(400)]


def test_a_failed_write_leaves_the_old_files_and_nothing_else(put):
    prefix = put(hand_made_index())
    with pytest.raises(RuntimeError), IndexedWriter(prefix, np.uint16) as writer:
        writer.add_document([1, 1, 1])
        raise RuntimeError
    assert [d.tolist() for d in map(IndexedDataset(prefix).document, range(4))] == DOCUMENTS
    assert sorted(path.name for path in Path(prefix).parent.iterdir()) == ["p.bin", "p.idx"]


FAULTS = {
    "missing idx": (
        None,
        HAND_MADE_BIN,
        "{p}.idx does not exist, although {p}.bin does: write both again.",
    ),
    "missing bin": (
        hand_made_index(),
        None,
        "{p}.bin does not exist, although {p}.idx does: write both again.",
    ),
    "no header": (
        hand_made_index()[:20],
        HAND_MADE_BIN,
        "{p}.idx is truncated: it has 20 bytes, but its header takes 34; write it again.",
    ),
    "empty idx": (
        b"",
        HAND_MADE_BIN,
        "{p}.idx is truncated: it has 0 bytes, but its header takes 34; write it again.",
    ),
    "truncated": (
        hand_made_index()[:-1],
        HAND_MADE_BIN,
        "{p}.idx is truncated: it has 109 bytes, but its header says 110; write it again.",
    ),
    "too long": (
        hand_made_index() + b"\0",
        HAND_MADE_BIN,
        "{p}.idx has 1 byte after its tables, only 3 (a mode for each sequence) or none fit; write it again.",
    ),
    "magic": (
        hand_made_index(magic=b"TNTIDX\0\0\0"),
        HAND_MADE_BIN,
        "{p}.idx is not an index: it starts with b'TNTIDX\\x00\\x00\\x00' instead of b'MMIDIDX\\x00\\x00'; "
        "give the prefix of a .bin/.idx pair.",
    ),
    "version": (
        hand_made_index(version=2),
        HAND_MADE_BIN,
        "{p}.idx has version 2, only version 1 can be read; write it again.",
    ),
    "dtype": (
        hand_made_index(code=9),
        HAND_MADE_BIN,
        "{p}.idx has unknown dtype code 9, known are 1 to 8; write it again.",
    ),
    "bin too short": (
        hand_made_index(),
        HAND_MADE_BIN[:-2],
        "{p}.bin has 14 bytes, but {p}.idx says 16: the two do not belong together or one is damaged; write "
        "both again.",
    ),
    "bin too long": (
        hand_made_index(),
        HAND_MADE_BIN + b"\0\0",
        "{p}.bin has 18 bytes, but {p}.idx says 16: the two do not belong together or one is damaged; write "
        "both again.",
    ),
    "half a token": (
        hand_made_index(),
        HAND_MADE_BIN[:-1],
        "{p}.bin has 15 bytes, which is not a multiple of {p}.idx's token size 2; write both again.",
    ),
    "offsets": (
        hand_made_index(offsets=(0, 4, 8)),
        HAND_MADE_BIN,
        "{p}.idx has inconsistent sequences: sequence 1 of length 1 starts at byte 4 instead of 6; write it again.",
    ),
    "negative length": (
        hand_made_index(lengths=(9, -1), boundaries=(0, 2), offsets=(0, 18)),
        HAND_MADE_BIN,
        "{p}.idx has inconsistent sequences: sequence 1 of length -1 starts at byte 18 instead of 18; write it again.",
    ),
    "last boundary": (
        hand_made_index(boundaries=(0, 1, 2)),
        HAND_MADE_BIN,
        "{p}.idx has inconsistent document boundaries: first and last are [0, 2], not [0, 3]; write it again.",
    ),
    "no boundary": (
        hand_made_index(boundaries=()),
        HAND_MADE_BIN,
        "{p}.idx has inconsistent document boundaries: first and last are [], not [0, 3]; write it again.",
    ),
    "falling boundaries": (
        hand_made_index(boundaries=(0, 2, 1, 3)),
        HAND_MADE_BIN,
        "{p}.idx has inconsistent document boundaries: document 1 ends before it starts; write it again.",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("block", [1, 2, indexed.CHECK_BLOCK])
def test_damaged_files_are_refused_with_one_sentence(put, monkeypatch, fault, block):
    """Whatever number of entries is checked together."""
    monkeypatch.setattr(indexed, "CHECK_BLOCK", block)
    index, data, sentence = FAULTS[fault]
    prefix = put(index, data)
    with pytest.raises(InputError) as caught:
        IndexedDataset(prefix)
    assert str(caught.value) == sentence.format(p=prefix)


def test_a_directory_in_place_of_the_index_is_refused(tmp_path):
    (tmp_path / "p.idx").mkdir()
    with pytest.raises(InputError) as caught:
        IndexedDataset(tmp_path / "p")
    expected = f"{tmp_path}/p.idx cannot be read (Is a directory): correct the prefix or its permissions."
    assert str(caught.value) == expected


WRONG_PREFIXES = {
    "docs": "docs.idx does not exist: did you mean docs_text_document?",
    "docs_text_document.bin": "docs_text_document.bin is not the prefix of a .bin/.idx pair: did you mean "
    "docs_text_document?",
    "docs_text_document.idx": "docs_text_document.idx is not the prefix of a .bin/.idx pair: did you mean "
    "docs_text_document?",
    "docs_txt_document": "docs_txt_document.idx does not exist: did you mean docs_text_document?",
    "code": "code.idx does not exist: did you mean code_content_document?",
    "docs.jsonl": "docs.jsonl is not the prefix of a .bin/.idx pair: did you mean docs_text_document?",
    "docs.json": "docs.json is not the prefix of a .bin/.idx pair: did you mean docs_text_document?",
    "docs.txt": "docs.txt is not the prefix of a .bin/.idx pair: did you mean docs_text_document?",
    "new.jsonl.gz": "new.jsonl.gz is not the prefix of a .bin/.idx pair: data.kind=text reads texts as they are, "
    "and data.kind=chat chats; or write one with `python -m "
    "megajax.data.preprocess --input new.jsonl.gz --output-prefix new --tokenizer TOKENIZER`, and give "
    "new_text_document.",
    ".": ". is a directory: did you mean code_content_document?",
    "no/where": "no/where.idx does not exist: correct the prefix, or write it with `python -m "
    "megajax.data.preprocess`; nothing is downloaded.",
}


@pytest.mark.parametrize("prefix", WRONG_PREFIXES)
def test_a_wrong_prefix_is_answered_with_the_one_that_was_meant(tmp_path, monkeypatch, prefix):
    monkeypatch.chdir(tmp_path)
    for name in ("docs_text_document.bin", "docs_text_document.idx", "code_content_document.idx"):
        (tmp_path / name).write_text("")
    with pytest.raises(InputError) as caught:
        IndexedDataset(prefix)
    assert str(caught.value) == WRONG_PREFIXES[prefix]


@pytest.mark.parametrize("file", ["bin", "idx"])
@pytest.mark.parametrize("tokens", [3, 100_000], ids=["when it is flushed", "while it is written"])
def test_a_full_disk_is_one_sentence_and_damages_nothing(tmp_path, file, tokens):
    """The kernel's device that is always full replaces the file."""
    with IndexedWriter(tmp_path / "w", np.uint16) as writer:
        writer.add_document([1, 2])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / f"w.{file}.partial").symlink_to("/dev/full")
    with pytest.raises(InputError) as caught, IndexedWriter(tmp_path / "w", np.uint16) as writer:
        for _ in range(3):
            writer.add_document(np.ones(tokens))
    assert str(caught.value) == (
        f"{tmp_path}/w.bin and .idx cannot be written (No space left on device): free space, or choose another "
        "directory (--output-prefix, or data.index_cache)."
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_token_that_does_not_fit_is_refused(tmp_path):
    for tokens, worst in (([1, 65536], 65536), ([-1, 1], -1)):
        with pytest.raises(InputError) as caught, IndexedWriter(tmp_path / "w", np.uint16) as writer:
            writer.add_document(tokens)
        assert str(caught.value) == (
            f"{tmp_path}/w.bin: token {worst} does not fit uint16; use a wider dtype or the tokenizer that "
            "the dtype was chosen for."
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_place_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as caught:
        IndexedWriter(tmp_path / "file" / "w", np.uint16)
    assert str(caught.value) == (
        f"{tmp_path}/file/w.bin and .idx cannot be written (File exists): choose another directory "
        "(--output-prefix, or data.index_cache)."
    )
