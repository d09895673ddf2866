"""Data files that say they are large, or become so: bounded pieces, and a sentence with the place."""

import bz2
import gzip
import io
import json
import lzma
import os
import tracemalloc
import zlib
from unittest.mock import patch

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet
from tokenizers import normalizers

from megajax.data import json_lines
from megajax.data.json_array import ArrayReader
from megajax.data.json_lines import Limits, read_blocks, texts
from megajax.data.text_growth import growth
from megajax.errors import InputError

MOST = 1 << 20
SMALL = Limits(most_bytes=MOST, few=1 << 30)
FORMATS = {"gz": gzip, "bz2": bz2, "xz": lzma, "zst": zstandard}


def lines_of(path, limits=json_lines.LIMITS, **options):
    with patch.object(json_lines, "LIMITS", limits):
        return b"".join(block.text for block in read_blocks([str(path)], **options)).splitlines()


def peak_of(read):
    """The largest allocation of a read that ends in a sentence, and the sentence."""
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as error:
            read()
        return tracemalloc.get_traced_memory()[1], str(error.value)
    finally:
        tracemalloc.stop()


def test_documents_may_have_64_mib():
    assert Limits().most_bytes == 2**26


@pytest.mark.parametrize("ending", [*FORMATS, "jsonl"])
def test_a_line_without_an_end_is_no_gigabyte(tmp_path, ending):
    path, zeros = tmp_path / f"a.{ending}", b"0" * MOST
    compress = FORMATS[ending].compress if ending in FORMATS else bytes
    # Streams one after the other are one file in all of these formats.
    path.write_bytes(compress(b'{"text": "a"}\n{"text": "') + compress(zeros) * 100)
    peak, sentence = peak_of(lambda: lines_of(path, limits=SMALL))
    assert "line 2 has more than 1 MiB" in sentence and str(path) in sentence
    assert peak < 16 * MOST


@pytest.mark.parametrize("ending", FORMATS)
def test_one_frame_that_expands_without_limit_is_read_in_pieces(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(FORMATS[ending].compress(b"0" * (32 * MOST)))
    assert path.stat().st_size < MOST / 8
    peak, sentence = peak_of(lambda: lines_of(path, limits=SMALL))
    assert "line 1 has more than 1 MiB" in sentence
    # 4 kB of a file are decompressed together, if the library has no other limit: here all of it.
    assert peak < (80 if ending in ("zst", "xz") else 8) * MOST


LONG = b"0" * 100_000 + b"\n"  # most of it follows the block in which it begins


@pytest.mark.parametrize(
    "start, each", [(b"", b"\n"), (b"", b'{"text": ""}\n'), (b"[", b'{"text": "a long text"}, '), (b"", LONG)]
)
def test_lines_or_items_that_expand_without_limit_end_at_a_limit_of_the_file(tmp_path, start, each):
    path, limits = tmp_path / "a.bz2", SMALL._replace(most_bytes=MOST // 8, block_bytes=1 << 14)
    path.write_bytes(bz2.compress(start + each * (3 * limits.most_bytes // len(each))))
    with pytest.raises(InputError, match=f"its {path.stat().st_size:,} bytes hold more than 262,144 bytes of text"):
        lines_of(path, limits=limits)


def test_a_file_of_few_bytes_has_no_millions_of_lines(tmp_path):
    """Reading costs time for each: 96 kB of Parquet have 50 million rows without text."""
    path, limits, count = tmp_path / "a", Limits(few=1000), 5000
    parquet.write_table(pa.table({"text": pa.nulls(count, pa.string())}), path)
    files = [path.read_bytes(), bz2.compress(b"{}\n" * count), bz2.compress(b"[" + b"{}," * count + b"{}]")]
    for unit, content in zip(("row", "line", "item"), files, strict=True):
        path.write_bytes(content)
        with pytest.raises(
            InputError, match=f"{path} has more than 1,000 {unit}s, although it has {len(content)} byte"
        ):
            lines_of(path, limits=limits)
        assert len(lines_of(path, limits=Limits(few=count + 1))) >= count
    path.write_bytes(b"\n" * count)
    assert len(lines_of(path, limits=limits)) == count


def test_a_line_of_the_longest_length_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"short\n" + b"x" * 40 + b"\nshort\n")
    assert [*map(len, lines_of(path, limits=Limits(block_bytes=8, most_bytes=40)))] == [5, 40, 5]
    with pytest.raises(InputError, match="line 2 has more"):
        lines_of(path, limits=Limits(block_bytes=8, most_bytes=39))


def test_padding_between_frames_is_passed(tmp_path):
    path = tmp_path / "a.xz"
    path.write_bytes(lzma.compress(b"a\n") + bytes(8) + lzma.compress(b"b\n") + bytes(4))
    assert lines_of(path) == [b"a", b"b"]


@pytest.mark.parametrize("name", FORMATS)
def test_damage_anywhere_in_a_compressed_file_changes_nothing_or_is_a_sentence(tmp_path, name):
    lines = [b"line %d" % i**5 for i in range(40)]
    compressor = zstandard.ZstdCompressor(write_checksum=True) if name == "zst" else FORMATS[name]
    whole, path = compressor.compress(b"\n".join(lines)), tmp_path / f"a.{name}"
    for place in range(6, len(whole)):  # the bytes before say that it is compressed
        damaged = bytearray(whole)
        damaged[place] ^= 0x55
        path.write_bytes(damaged)
        try:
            assert lines_of(path) == lines
        except InputError as error:
            assert f"{path} cannot be read beyond line" in str(error)


def test_a_dictionary_of_gigabytes_is_not_allocated(tmp_path):
    path = tmp_path / "a.xz"
    small = bytearray(lzma.compress(b"a\n", preset=9))
    # The header of the block: its size, flags, filter LZMA2, one byte of properties, 2^((n + 4) / 2) bytes; CRC-32.
    start = 12
    assert small[start + 2 : start + 4] == b"\x21\x01"
    small[start + 4] = 37  # 3 GiB
    end = start + 4 * (small[start] + 1)
    small[end - 4 : end] = zlib.crc32(small[start : end - 4]).to_bytes(4, "little")
    path.write_bytes(small)
    with pytest.raises(InputError, match="Memory usage limit"):
        lines_of(path)


ITEMS = [{"text": 'é\U0001f600 \\" ]}, [', "n": [1, -2.5e3, None, True]}, 12, "a", [], {}, [[{"a": 1}]], 1.5, 123456789]


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 64, 4096])
@pytest.mark.parametrize("indent", [None, 1])
def test_items_of_an_array_are_those_of_json_wherever_it_is_cut(piece, indent):
    text = " " + json.dumps(ITEMS, ensure_ascii=False, indent=indent) + " \n"
    stored = io.BytesIO(text.encode())
    assert [*ArrayReader(stored.read(piece), stored.read, piece, MOST).items()] == ITEMS


@pytest.mark.parametrize(
    "text, problem",
    [
        ('[{"a": 1}, {"a" 2}]', r"item 2 is not JSON \(Expecting ':'"),
        ('[{"a": 1} {"a": 2}]', "after item 1 is '{', not a comma"),
        ('[{"a": 1}, ', "item 2 is not JSON"),
        ('[{"a": 1}', "after item 1 is its end"),
        ('[{"a": 1}] x', "text follows its end"),
        ('[{"a": 1}, ' + "[" * 100_000, "item 2 is not JSON"),
        ('[{"a": ' + "9" * 5000 + "}]", "item 1 is not JSON"),
        ('[{"a": "' + "x" * 2000 + '"}]', "item 1 has more than"),
        ('[{"a": "' + "x" * 2000, "item 1 has more than"),
    ],
)
def test_a_damaged_array_is_a_sentence(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(InputError, match=f"begins like a JSON array, but {problem}"):
        lines_of(path, limits=Limits(block_bytes=64, most_bytes=1000 if "x" * 9 in text else MOST))


def test_an_array_is_not_in_memory(tmp_path):
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "x" * 10_000}] * 1000))  # 10 MB
    tracemalloc.start()
    count = sum(block.text.count(b"\n") for block in read_blocks([str(path)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 1000 and peak < 8 << 20


def test_arrays_and_parquet_files_take_their_own_bytes(tmp_path):
    """So that progress ends at 100 %."""
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 100}] * 1000))
    parquet.write_table(pa.table({"text": ["x" * 100] * 1000}), tmp_path / "a.parquet", row_group_size=300)
    for path in tmp_path.iterdir():
        blocks = [*read_blocks([str(path)])]
        assert sum(block.stored_bytes for block in blocks) == path.stat().st_size
        assert sum(block.text.count(b"\n") for block in blocks) == 1000
        [*rest] = read_blocks([str(path)], start=blocks[1].end)
        assert b"".join(b.text for b in rest) == b"".join(b.text for b in blocks[2:])


def written(path, table, **options):
    parquet.write_table(table, path, **options)
    return path


def records_of(path):
    return [json.loads(line) for line in lines_of(path)]


def test_dates_times_and_durations_are_text_whatever_their_size(tmp_path):
    nested = pa.list_(pa.struct([("at", pa.timestamp("ns")), ("by", pa.string())]))
    table = pa.table(
        {
            "text": ["a"],
            "ns": pa.array([1], pa.timestamp("ns")),
            "zone": pa.array([0], pa.timestamp("ms", "UTC")),
            "day": pa.array([2**31 - 1], pa.date32()),
            "time": pa.array([1], pa.time64("ns")),
            "long": pa.array([2**62], pa.duration("s")),
            "messages": pa.array([[{"at": 10**9, "by": "x"}]], nested),
            "map": pa.array([[("k", 5)]], pa.map_(pa.string(), pa.timestamp("ns"))),
        }
    )
    [record] = records_of(written(tmp_path / "a.parquet", table))
    assert record["text"] == "a" and record["ns"] == "1970-01-01 00:00:00.000000001"
    assert record["zone"].startswith("1970-01-01 00:00:00") and record["time"] == "00:00:00.000000001"
    assert isinstance(record["day"], str) and record["long"] == str(2**62)
    assert record["messages"][0] | {"at": ""} == {"at": "", "by": "x"}
    assert record["messages"][0]["at"].startswith("1970-01-01 00:00:01")
    assert record["map"] == [["k", "1970-01-01 00:00:00.000000005"]]


def test_other_types_are_read_as_before(tmp_path):
    table = pa.table(
        {
            "x": [1.5, float("nan")],
            "big": pa.array(["a", "b"]).dictionary_encode(),
            "nothing": pa.nulls(2),
            "list": [[1], None],
        }
    )
    first, second = records_of(written(tmp_path / "a.parquet", table))
    assert first == {"x": 1.5, "big": "a", "nothing": None, "list": [1]}
    assert second["x"] != second["x"] and second["list"] is None


def text_of_bytes(values):
    """A column of text whose bytes are no UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


def test_a_value_that_cannot_be_read_is_named_by_group_row_and_column(tmp_path):
    table = pa.table({"id": range(5), "text": text_of_bytes([b"a", b"b", b"c", b"\xff", b"d"])})
    path = written(tmp_path / "a.parquet", table, row_group_size=2)
    seen = []
    with pytest.raises(InputError, match=r"a.parquet, row group 1, row 4, column text: .*utf-8"):
        for block in read_blocks([str(path)], "text"):
            seen += texts(block, "text")
    assert seen == []  # the rows before it are in the same block


def test_names_that_come_twice_are_sentences(tmp_path):
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    inner = pa.StructArray.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["a", "a"])
    path = written(tmp_path / "a.parquet", twice)
    for column in ("text", None):
        with pytest.raises(InputError, match='has 2 columns "text": rename'):
            lines_of(path, column=column)
    path = written(tmp_path / "b.parquet", pa.table({"text": ["a"], "s": inner}))
    with pytest.raises(InputError, match="row group 0, row 1, column s: .*duplicate"):
        lines_of(path)
    assert lines_of(path, column="text") == [b'{"text": "a"}']


def test_a_row_group_that_expands_is_refused_before_it_is_read(tmp_path):
    table = pa.table({"id": range(2), "text": ["a", "0" * (32 * MOST)]})
    path = written(tmp_path / "a.parquet", table, compression="zstd", use_dictionary=False)
    del table
    before = pa.total_allocated_bytes()
    pool = pa.default_memory_pool()
    with pytest.raises(InputError, match="row group 0: the file's .* bytes become"):
        lines_of(path, column="text", limits=SMALL)
    assert pa.total_allocated_bytes() == before and pool.bytes_allocated() == before


def test_rows_that_repeat_a_value_may_be_a_thousand_times_the_file(tmp_path):
    for count, length in ((5000, 10_000), (5, 10_000)):
        repeated = pa.array(["x" * length] * count).dictionary_encode()
        path = written(tmp_path / "a.parquet", pa.table({"text": repeated}), compression="zstd")
        if count * length < MOST:
            assert len(lines_of(path, column="text", limits=SMALL)) == count
            continue
        assert path.stat().st_size < 2000
        peak, sentence = peak_of(lambda path=path: lines_of(path, column="text", limits=SMALL))
        assert "row group 0: the file's" in sentence and peak < 16 * MOST


def test_a_long_row_is_a_sentence_and_a_repeated_value_is_not_multiplied(tmp_path, monkeypatch):
    path = written(tmp_path / "a.parquet", pa.table({"text": ["a", "b" * (MOST + 1), "c"]}), compression="none")
    with pytest.raises(InputError, match="row group 0, row 2 has 1 MiB, but a document has at most 1"):
        lines_of(path, limits=SMALL)
    repeated = pa.array(["x" * (MOST // 2)] * 64).dictionary_encode()
    noise = pa.array([os.urandom(1000) for _ in range(64)])  # so that the file is not that small
    path = written(tmp_path / "b.parquet", pa.table({"text": repeated, "noise": noise}), use_dictionary=["text"])
    del repeated
    tracemalloc.start()
    monkeypatch.setattr(json_lines, "LIMITS", SMALL)
    count = sum(block.text.count(b"\n") for block in read_blocks([str(path)], "text"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 64 and peak < 16 * MOST


# Characters of a character at most, by Unicode: U+FB2C, U+1F82, U+FDFA. BERT's normalizer writes spaces around each
# Chinese one, and three for a letter in lower case; a byte is a letter, and a space comes before each of both.
GROWTH = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 3 * 3, "ByteLevel": 2 * 4}
GROWTH |= {"Metaspace": 2, "Strip": 1}


def test_the_growth_of_each_step_is_a_bound_of_what_the_library_writes():
    for kind, bound in GROWTH.items():
        assert growth({"type": kind}) == bound, kind
    for kind, key in (("BPEDecoder", "suffix"), ("CTC", "word_delimiter_token")):  # a space and two for what is empty
        assert (growth({"type": kind, key: ""}), growth({"type": kind, key: "x"})) == (3, 1)
    letters = "".join(map(chr, (*range(0x20, 0x3000), *range(0xF900, 0xFE00), 0x4E00, 0x10FFFF)))
    for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "BertNormalizer"):
        normalizer = getattr(normalizers, kind)()
        longest = max(len(normalizer.normalize_str(letter)) for letter in letters)
        assert longest == GROWTH[kind] if kind.startswith("NF") else longest <= GROWTH[kind], kind
    steps = [{"type": "NFKD"}, {"type": "Prepend", "prepend": "ab"}]
    for part in ("normalizers", "pretokenizers", "decoders", "processors"):  # as tokenizers writes them
        assert growth({"type": "Sequence", part: steps}) == 18 * 3
