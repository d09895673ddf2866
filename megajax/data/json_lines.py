"""JSON-lines files in blocks of whole lines; gzip, bzip2 and xz are decompressed while they are read."""

import bz2
import gzip
import json
import lzma
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from megajax.errors import InputError

BLOCK_BYTES = 1 << 20  # of text, read together, plus the rest of the last line
KEYS_SHOWN = 10

# Recognised by their first bytes, not by the name.
DECOMPRESS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.open(file)),
    b"BZh": lambda file: bz2.open(file),
    b"\xfd7zXZ\0": lambda file: lzma.open(file),
}
REFUSED = {
    b"\x28\xb5\x2f\xfd": "is compressed with Zstandard: decompress it first, with `zstd -d {path}`.",
    b"PK\3\4": "is a ZIP archive: unpack it first, with `unzip {path}`.",
    b"PAR1": "is a Parquet file: write it as JSON lines first, with pandas.read_parquet(...).to_json(..., "
    'orient="records", lines=True).',
}


class Block(NamedTuple):
    """Consecutive lines of a file: the number of the first one (from 1), and their bytes in the file."""

    path: str
    first_line: int
    text: bytes
    stored_bytes: int


def check_inputs(paths: Sequence[str]) -> int:
    """The size of all files in bytes; InputError for one that is not a file or cannot be read."""
    for path in paths:
        if Path(path).is_dir():
            raise InputError(
                f"--input: {path} is a directory; name the files in it, such as {path.rstrip('/')}/*.jsonl."
            )
        if not Path(path).is_file():
            raise InputError(f"--input: {path} does not exist or is not a file; correct the path.")
        try:
            with open(path, "rb") as file:
                start = file.read(8)
        except OSError as error:
            raise InputError(f"--input: {path} cannot be read ({error.strerror}); change its permissions.") from None
        for magic, sentence in REFUSED.items():
            if start.startswith(magic):
                raise InputError(f"--input: {path} {sentence.format(path=path)}")
    return sum(os.path.getsize(path) for path in paths)


def read_blocks(paths: Sequence[str]) -> Iterator[Block]:
    """All lines of the files, in order."""
    for path in paths:
        with open(path, "rb") as stored:
            start = stored.read(8)
            stored.seek(0)
            decompress = next((DECOMPRESS[magic] for magic in DECOMPRESS if start.startswith(magic)), lambda file: file)
            line, position = 1, 0
            try:
                lines = decompress(stored)
                while text := lines.read(BLOCK_BYTES):
                    text += b"" if text.endswith(b"\n") else lines.readline()
                    yield Block(path, line, text, stored.tell() - position)
                    line, position = line + text.count(b"\n"), stored.tell()
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                raise InputError(
                    f"--input: {path} cannot be read beyond line {line} ({error}): it is damaged or incomplete; "
                    "copy or download it again."
                ) from None


def texts(block: Block, json_key: str) -> Iterator[tuple[int, str]]:
    """The line number and the text under `json_key` of each non-blank line; InputError if it has none."""
    for number, line in enumerate(block.text.split(b"\n"), start=block.first_line):
        if line.strip():
            try:
                yield number, _text(line, json_key)
            except ValueError as error:
                raise InputError(f"{block.path}, line {number} {error}.") from None


def _text(line: bytes, json_key: str) -> str:
    wanted = f'write each document on a line of its own, as {{"{json_key}": "its text"}}'
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8: convert the file to UTF-8") from None
    except ValueError as error:
        raise ValueError(f"is not JSON ({error}): {wanted}") from None
    if not isinstance(record, dict):
        raise ValueError(f"is not a JSON object: {wanted}")
    if json_key not in record:
        keys = ", ".join(list(record)[:KEYS_SHOWN]) or "none"
        raise ValueError(f'has no key "{json_key}" (its keys: {keys}): name the key of the text with --json-key')
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(f'has {type(text).__name__} instead of text under "{json_key}": {wanted}')
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains half of a surrogate pair, which cannot be encoded: correct the text") from None
    return text
