"""JSON-lines files in blocks of whole lines, decompressed while they are read.

Rows of Parquet files and the objects of a file that is one JSON array are read as such lines.
"""

import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

from pydantic import Field

from megajax.data.compressed import DAMAGE, decompress
from megajax.data.json_array import ARRAY, ArrayError, ArrayReader
from megajax.data.parquet import read_rows
from megajax.data.pictures import embedded
from megajax.errors import InputError, file_reader, not_downloaded, shown
from megajax.extras import require
from megajax.json_files import Count
from megajax.schema.data import is_remote

KEYS_SHOWN = 10
PARQUET = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ZIP = b"PK\3\4"
ARROW = (b"ARROW1", b"\xff\xff\xff\xff")  # a file, and a stream, as datasets' save_to_disk writes
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".jsonl.xz", ".jsonl.bz2", ".jsonl.zst", ".parquet")


class Limits(NamedTuple):
    """Sizes of the pieces that are read."""

    block_bytes: int = 1 << 20  # of text, read together, plus the rest of the last line
    rows: int = 256  # of a Parquet file or a JSON array, at most, in a block
    most_bytes: int = 1 << 26  # of a line, a row or an item: ten times the longest books
    few: int = 1 << 18  # lines, rows or items that any file may have; a file of more has a byte or more for each


LIMITS = Limits()


class TextPosition(NamedTuple):
    """A border between lines of several files: the file's index, the next line (from 1) and the bytes of text before.

    In a Parquet file the lines are rows, in a JSON array its objects, and the bytes are not used.
    """

    file: Count = 0
    line: Annotated[int, Field(ge=1, lt=2**63)] = 1
    text_bytes: Count = 0


class TextLine(NamedTuple):
    """A line that is not blank, and where it is, for errors."""

    text: bytes
    location: str


class LineBlock(NamedTuple):
    """Consecutive lines of a file: the number of the first one (from 1), their bytes in the file, and where they end.

    Of a Parquet file each line is a row, of a JSON array an object; `unit` is the word for errors.
    """

    path: str
    first_line: int
    text: bytes
    stored_bytes: int
    end: TextPosition
    unit: str = "line"

    def lines(self) -> Iterator[TextLine]:
        """The lines that are not blank."""
        for number, line in enumerate(self.text.split(b"\n"), start=self.first_line):
            if line.strip():
                yield TextLine(line, f"{self.path}, {self.unit} {number}")


def matching_files(pattern: str) -> list[str]:
    """The files of a path or a glob, by name; the path itself if there are none."""
    return sorted(glob.glob(pattern, recursive=True)) or [pattern]


def check_inputs(paths: Sequence[str]) -> int:
    """The size of all files in bytes; InputError for one that is not a file or cannot be read."""
    return sum(map(_checked_size, paths))


@file_reader("path")
def _checked_size(path: str) -> int:
    if is_remote(path):
        raise InputError(f"{path} is remote, but only token files and shards can be: copy it to this machine first.")
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory; name the files in it, such as {path.rstrip('/')}/*.jsonl.")
    if glob.has_magic(path) and not Path(path).exists():
        raise InputError(f"{path} matches no file; correct the path, or make the files first.")
    if not Path(path).is_file():
        raise InputError(f"{path} does not exist or is not a file: correct the path{not_downloaded(path)}.")
    try:
        with open(path, "rb") as file:
            start = file.read(8)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); change its permissions.") from None
    if start.startswith(ZIP):
        raise InputError(f"{path} is a ZIP archive: unpack it first, with `unzip {path}`.")
    if start.startswith(ARROW):
        raise InputError(f"{path} is an Arrow file: write it as Parquet, with `to_parquet` of Hugging Face's Dataset.")
    if start.startswith(PARQUET):
        require("parquet", f"{path}, a Parquet file,")
    return os.path.getsize(path)


def read_blocks(
    paths: Sequence[str],
    column: str | None = None,
    option: str = "--json-key",
    start: TextPosition | None = None,
) -> Iterator[LineBlock]:
    """All lines of the files, in order; of a Parquet file only the `column` of this name, None: all.

    `option` is the setting that gave the column. `start` is the end of an earlier block; compressed and Parquet files
    are read up to it without use.
    """
    start = start or TextPosition()
    for number in range(start.file, len(paths)):
        first = start if number == start.file else TextPosition(number)
        yield from _read_file(paths[number], column, option, first)


@file_reader("path")
def _read_file(path: str, column: str | None, option: str, start: TextPosition) -> Iterator[LineBlock]:
    with open(path, "rb") as stored:
        is_parquet = stored.read(len(PARQUET)) == PARQUET
    if is_parquet:
        rows = read_rows(path, column, option, start.line - 1, LIMITS.rows, LIMITS.most_bytes)
        blocks = _record_blocks(path, rows, start, "row")
    else:
        blocks = _read_lines(path, start)
    size = os.path.getsize(path)
    most = max(LIMITS.few, size)
    for block in blocks:
        if block.end.line > most + 1:  # each takes time
            raise InputError(
                f"{path} has more than {most:,} {block.unit}s, although it has {size:,} bytes: leave out those without "
                "text."
            )
        yield block


def record_blocks(path: str, records: Iterator[Any], unit: str) -> Iterator[LineBlock]:
    """Values as lines of JSON, in blocks; `unit` is the word for one of them in errors."""
    return _record_blocks(path, ((record, 0) for record in records), TextPosition(), unit)


def _read_lines(path: str, start: TextPosition) -> Iterator[LineBlock]:
    line = start.line
    with open(path, "rb") as stored:
        try:
            text_bytes, compressed = start.text_bytes, decompress(stored, 2 * LIMITS.most_bytes)
            lines, to_skip = (stored, 0) if compressed is None else (compressed, text_bytes)
            stored.seek(text_bytes if compressed is None else 0)
            while to_skip and (passed := lines.read(min(to_skip, LIMITS.block_bytes))):
                to_skip -= len(passed)
            position = stored.tell()
            while text := lines.read(LIMITS.block_bytes):
                body = text if text_bytes else text.removeprefix(BYTE_ORDER_MARK)
                if not text_bytes and ARRAY.match(body):
                    items = _array_items(path, body, lines, stored, start.line - 1)
                    yield from _record_blocks(path, items, start, "item")
                    return
                ending = _rest_of_line(lines, path, text, line)
                body, text = body + ending, text + ending
                first, line, text_bytes = line, line + text.count(b"\n"), text_bytes + len(text)
                yield LineBlock(path, first, body, stored.tell() - position, TextPosition(start.file, line, text_bytes))
                position = stored.tell()
        except DAMAGE as error:
            raise InputError(
                f"{path} cannot be read beyond line {line} ({error}): it is damaged or incomplete; "
                "copy or download it again."
            ) from None


def _rest_of_line(lines: IO[bytes], path: str, text: bytes, line: int) -> bytes:
    """The rest of the last line of `text`, which begins with line number `line`."""
    if text.endswith(b"\n"):
        return b""
    here, most_bytes = len(text) - 1 - text.rfind(b"\n"), LIMITS.most_bytes
    ending = lines.readline(most_bytes - here + 1)
    if here + len(ending) > most_bytes and not ending.endswith(b"\n"):
        raise InputError(
            f"{path}, line {line + text.count(b'\n')} has more than {most_bytes >> 20} MiB: write each "
            "document on a line of its own, and divide one that is longer."
        )
    return ending


def _array_items(
    path: str, beginning: bytes, lines: IO[bytes], stored: IO[bytes], skipped: int
) -> Iterator[tuple[Any, int]]:
    """The items of a JSON array after the first `skipped`, each with the bytes of the file that were read for it."""
    position = 0
    try:
        reader = ArrayReader(beginning, lines.read, LIMITS.block_bytes, LIMITS.most_bytes)
        for number, item in enumerate(reader.items()):
            before, position = position, stored.tell()
            if number >= skipped:
                yield item, position - before
    except ArrayError as error:
        raise InputError(
            f"{path} begins like a JSON array, but {error}: correct it, or write an object on each line."
        ) from None


def _record_blocks(
    path: str, records: Iterator[tuple[Any, int]], start: TextPosition, unit: str
) -> Iterator[LineBlock]:
    """Values, each with its bytes in the file, as lines of JSON; the first has number `start.line`."""
    first, stored_bytes, lines, size = start.line, 0, [], 0

    def block() -> LineBlock:
        end = TextPosition(start.file, first + len(lines))
        return LineBlock(path, first, "".join(lines).encode(), stored_bytes, end, unit)

    for value, taken in records:
        lines.append(json.dumps(value, default=_as_text) + "\n")
        size, stored_bytes = size + len(lines[-1]), stored_bytes + taken
        if len(lines) == LIMITS.rows or size >= LIMITS.block_bytes:
            yield block()
            first, stored_bytes, lines, size = first + len(lines), 0, [], 0
    if lines:
        yield block()


def _as_text(value: Any) -> str:
    """What JSON does not have: bytes, such as a picture's, as a data URL."""
    return embedded(value) if isinstance(value, bytes) else str(value)


def located_lines(paths: Sequence[str]) -> Iterator[TextLine]:
    """The lines, rows or objects of the files, in order."""
    for block in read_blocks(paths):
        yield from block.lines()


@file_reader("block.path")
def texts(
    block: LineBlock, json_key: str, bad: list[str] | None = None, option: str = "--json-key"
) -> Iterator[tuple[str, str]]:
    """The text under `json_key` of each line that is not blank, after the line's location.

    A line without a text is left out, and a sentence about it is added to `bad`; with None it is an InputError.
    `option` is the setting that gave the key.
    """
    for line, location in block.lines():
        try:
            yield location, _text(line, json_key, option)
        except ValueError as error:
            sentence = f"{location} {error}."
            if bad is None:
                raise InputError(sentence) from None
            bad.append(sentence)


def parse(line: bytes, wanted: str) -> Any:
    """The value of a line of JSON; ValueError with the rest of a sentence, which ends with what is `wanted`."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8: convert the file to UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON ({error}): {wanted}") from None


def check_encodable(text: str) -> None:
    """Raises ValueError with the rest of a sentence for a text without bytes in UTF-8, which JSON can make."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains half of a surrogate pair, which cannot be encoded: correct the text") from None


def _text(line: bytes, json_key: str, option: str) -> str:
    wanted = f'write each document on a line of its own, as {{"{json_key}": "its text"}}'
    record = parse(line, wanted)
    if not isinstance(record, dict):
        raise ValueError(f"is not a JSON object: {wanted}")
    if json_key not in record:
        keys = shown(", ".join(list(record)[:KEYS_SHOWN])) or "none"
        raise ValueError(f'has no key "{json_key}" (its keys: {keys}): name the key of the text with {option}')
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(f'has {type(text).__name__} instead of text under "{json_key}": {wanted}')
    check_encodable(text)
    return text
