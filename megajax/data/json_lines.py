"""JSON-lines files in blocks of whole lines, decompressed while they are read.

Rows of Parquet files and the objects of a file that is one JSON array are read as such lines.
"""

import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from megajax.config.data_schema import is_remote
from megajax.errors import InputError
from megajax.extras import require

BLOCK_BYTES = 1 << 20  # of text, read together, plus the rest of the last line
ROWS = 256  # of a Parquet file, read together
STORED_BYTES = 1 << 17  # of a Zstandard file, decompressed together
KEYS_SHOWN = 10
PARQUET = b"PAR1"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Zstandard(io.RawIOBase):
    """The text of a Zstandard file, frame after frame; EOFError if the last is incomplete, OSError for damage."""

    def __init__(self, file: IO[bytes]):
        import zstandard

        self._file, self._new, self._damage = file, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame, self._ready = self._new(), b""
        self._started = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            left = self._frame.unused_data if self._frame.eof else b""
            stored = left or self._file.read(STORED_BYTES)
            if not stored:
                if self._started and not self._frame.eof:
                    raise EOFError("the compressed file ends inside a frame")
                return 0
            if self._frame.eof:
                self._frame = self._new()
            self._started = True
            try:
                self._ready = self._frame.decompress(stored)
            except self._damage as error:
                raise OSError(str(error)) from None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


# Recognised by their first bytes, not by the name.
DECOMPRESS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.open(file)),
    b"BZh": lambda file: bz2.open(file),
    b"\xfd7zXZ\0": lambda file: lzma.open(file),
    b"\x28\xb5\x2f\xfd": lambda file: io.BufferedReader(Zstandard(file)),
}
ARRAY = re.compile(rb"\s*\[\s*\{")  # the beginning of an array of objects
ZIP = b"PK\3\4"


class TextPosition(NamedTuple):
    """A border between lines of several files: the file's index, the next line (from 1) and the bytes of text before.

    In a Parquet file the lines are rows, in a JSON array its objects, and the bytes are not used.
    """

    file: int = 0
    line: int = 1
    text_bytes: int = 0


class Block(NamedTuple):
    """Consecutive lines of a file: the number of the first one (from 1), their bytes in the file, and where they end.

    Of a Parquet file each line is a row, of a JSON array an object; `unit` is the word for errors.
    """

    path: str
    first_line: int
    text: bytes
    stored_bytes: int
    end: TextPosition
    unit: str = "line"


def matching_files(pattern: str) -> list[str]:
    """The files of a path or a glob, by name; the path itself if there are none."""
    return sorted(glob.glob(pattern, recursive=True)) or [pattern]


def check_inputs(paths: Sequence[str]) -> int:
    """The size of all files in bytes; InputError for one that is not a file or cannot be read."""
    for path in paths:
        if is_remote(path):
            raise InputError(f"{path} is remote, but only token files can be: copy it to this machine first.")
        if Path(path).is_dir():
            raise InputError(f"{path} is a directory; name the files in it, such as {path.rstrip('/')}/*.jsonl.")
        if glob.has_magic(path) and not Path(path).exists():
            raise InputError(f"{path} matches no file; correct the path, or make the files first.")
        if not Path(path).is_file():
            raise InputError(f"{path} does not exist or is not a file; correct the path.")
        try:
            with open(path, "rb") as file:
                start = file.read(8)
        except OSError as error:
            raise InputError(f"{path} cannot be read ({error.strerror}); change its permissions.") from None
        if start.startswith(ZIP):
            raise InputError(f"{path} is a ZIP archive: unpack it first, with `unzip {path}`.")
        if start.startswith(PARQUET):
            require("parquet", f"{path}, a Parquet file,")
    return sum(os.path.getsize(path) for path in paths)


def read_blocks(
    paths: Sequence[str], column: str | None = None, option: str = "--json-key", start: TextPosition | None = None
) -> Iterator[Block]:
    """All lines of the files, in order; of a Parquet file only the `column` of this name, None: all.

    `option` is the setting that gave the column. `start` is the end of an earlier block; compressed and Parquet files
    are read up to it without use.
    """
    start = start or TextPosition()
    for number in range(start.file, len(paths)):
        path, first = paths[number], start if number == start.file else TextPosition(number)
        with open(path, "rb") as stored:
            is_parquet = stored.read(len(PARQUET)) == PARQUET
        yield from _read_rows(path, column, option, first) if is_parquet else _read_lines(path, first)


def _read_lines(path: str, start: TextPosition) -> Iterator[Block]:
    with open(path, "rb") as stored:
        magic = stored.read(8)
        decompress = next((DECOMPRESS[key] for key in DECOMPRESS if magic.startswith(key)), None)
        stored.seek(start.text_bytes if decompress is None else 0)
        line, text_bytes = start.line, start.text_bytes
        try:
            lines = stored if decompress is None else decompress(stored)
            to_skip = 0 if decompress is None else text_bytes
            while to_skip:
                to_skip -= len(lines.read(min(to_skip, BLOCK_BYTES)))
            position = stored.tell()
            while text := lines.read(BLOCK_BYTES):
                text += b"" if text.endswith(b"\n") else lines.readline()
                own = text if text_bytes else text.removeprefix(BYTE_ORDER_MARK)
                if not text_bytes and ARRAY.match(own):
                    yield from _read_array(path, own + lines.read(), start)
                    return
                first, line, text_bytes = line, line + text.count(b"\n"), text_bytes + len(text)
                yield Block(path, first, own, stored.tell() - position, TextPosition(start.file, line, text_bytes))
                position = stored.tell()
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            raise InputError(
                f"{path} cannot be read beyond line {line} ({error}): it is damaged or incomplete; "
                "copy or download it again."
            ) from None


def _read_array(path: str, text: bytes, start: TextPosition) -> Iterator[Block]:
    """The objects of a JSON array as lines of JSON; the whole array is in memory."""
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} begins like a JSON array, but is none ({error}): correct it, or write an object on each line."
        ) from None
    size = os.path.getsize(path)
    for first in range(start.line - 1, len(items), ROWS):
        last = min(first + ROWS, len(items))
        lines = "".join(json.dumps(item) + "\n" for item in items[first:last])
        stored = size * last // len(items) - size * first // len(items)
        yield Block(path, first + 1, lines.encode(), stored, TextPosition(start.file, last + 1), "item")


def _read_rows(path: str, column: str | None, option: str, start: TextPosition) -> Iterator[Block]:
    """The rows of a Parquet file as lines of JSON."""
    import pyarrow
    from pyarrow import parquet

    row, size = 0, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as file:
            names, total = file.schema_arrow.names, file.metadata.num_rows
            if column is not None and column not in names:
                raise InputError(
                    f'{path} has no column "{column}" (its columns: {", ".join(names[:KEYS_SHOWN])}): name '
                    f"the column of the text with {option}."
                )
            for batch in file.iter_batches(ROWS, columns=None if column is None else [column]):
                skipped = min(batch.num_rows, max(0, start.line - 1 - row))
                row += skipped
                if skipped == batch.num_rows:
                    continue
                records = batch.slice(skipped).to_pylist()
                text = "".join(json.dumps(record, default=str) + "\n" for record in records)
                before, after = size * row // total, size * (row + len(records)) // total
                end = TextPosition(start.file, row + len(records) + 1)
                yield Block(path, row + 1, text.encode(), after - before, end, "row")
                row += len(records)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(
            f"{path} cannot be read beyond row {row} ({error}): it is damaged or incomplete; copy or download it again."
        ) from None


def texts(
    block: Block, json_key: str, bad: list[str] | None = None, option: str = "--json-key"
) -> Iterator[tuple[int, str]]:
    """The line number and the text under `json_key` of each non-blank line.

    A line without a text is left out, and a sentence about it is added to `bad`; with None it is an InputError.
    `option` is the setting that gave the key.
    """
    for number, line in enumerate(block.text.split(b"\n"), start=block.first_line):
        if line.strip():
            try:
                yield number, _text(line, json_key, option)
            except ValueError as error:
                sentence = f"{block.path}, {block.unit} {number} {error}."
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
        keys = ", ".join(list(record)[:KEYS_SHOWN]) or "none"
        raise ValueError(f'has no key "{json_key}" (its keys: {keys}): name the key of the text with {option}')
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(f'has {type(text).__name__} instead of text under "{json_key}": {wanted}')
    check_encodable(text)
    return text
