"""Checksums of a checkpoint's files, which find damage before a file is read.

`STEP/checksums.json` has the size of each file and the CRC-32 of each of its pieces. CRC-32 finds accidental damage, at
2.7 GB/s per thread; it does not prove who wrote a file. A second file says that the first was written, so its loss is
damage too. Both come after the checkpoint is complete; one that a crash leaves without them is read without.
"""

import json
import math
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple, TypedDict

from megajax.checkpoint.storage import Folder, sizes, store_errors, write_text
from megajax.errors import InputError, file_reader, shown
from megajax.files import read_bytes
from megajax.json_files import Count, Damaged, damaged, parse

NAME = "checksums.json"
WRITTEN = f"{NAME}.written"
PIECE = 2**26  # bytes; large files are divided among threads and processes
BLOCK = 2**22  # bytes that a thread reads at a time
THREADS = 8


class Entry(TypedDict):
    """A file, and the checksums of its pieces."""

    size: Count
    crc32: list[str]


class ChecksumRecord(TypedDict):
    """The content of `checksums.json`; the last checksum is of `files`."""

    format: Literal[1]
    piece: Count
    crc32: str
    files: dict[str, Entry]


class FilePiece(NamedTuple):
    """Bytes `number * PIECE` up to `(number + 1) * PIECE` of a file; an empty file has one piece."""

    name: str
    number: int


def exist(directory: Folder) -> bool:
    """Whether a checkpoint has checksums; those of older versions have none."""
    return (directory / NAME).exists()


def lost(directory: Folder) -> str:
    """What is wrong with a checkpoint whose checksums were written and are gone; empty if they are not."""
    if exist(directory) or not (directory / WRITTEN).exists():
        return ""
    return f"{NAME} is missing: copy it again, or remove {WRITTEN} to read the checkpoint without a verification"


def compute(directory: Folder, index: int = 0, count: int = 1) -> list[tuple[str, int, str]]:
    """(file, piece, CRC-32 in hexadecimal) for the `index`-th of `count` equal shares of a checkpoint's pieces."""
    share = _pieces(sizes(directory))[index::count]
    with ThreadPoolExecutor(THREADS) as threads:
        found = threads.map(lambda piece: _read(directory, piece), share)
        return [(piece.name, piece.number, crc) for piece, (crc, _) in zip(share, found, strict=True)]


def write(directory: Folder, shares: Sequence[Sequence[Sequence[Any]]]) -> str:
    """Write `checksums.json` from the shares of all processes; a problem if they do not cover all files, else empty."""
    lengths = sizes(directory)
    found = sorted(tuple(piece) for share in shares for piece in share)
    if [(name, number) for name, number, _ in found] != _pieces(lengths):
        return "the processes see different files"
    files: dict[str, Any] = {name: {"size": size, "crc32": []} for name, size in lengths.items()}
    for name, _, crc in found:
        files[name]["crc32"].append(crc)
    record = {"format": 1, "piece": PIECE, "crc32": _own(files), "files": files}
    write_text(directory / NAME, json.dumps(record, indent=0))
    write_text(directory / WRITTEN, f"{NAME} belongs to this checkpoint.\n")
    return ""


@file_reader("directory", cure="use another checkpoint")
def damage(directory: Folder, index: int = 0, count: int = 1, part: str = "") -> str:
    """The first damaged file of a checkpoint and what is wrong with it; empty if there is none, or no checksums.

    Reads the `index`-th of `count` equal shares of the pieces, of files whose names begin with `part`.
    """
    try:
        with store_errors(directory):
            if not exist(directory):
                return lost(directory)
            recorded = _recorded(directory)
    except Damaged as error:
        return f"{NAME} cannot be read: {error.problem}"
    except PermissionError:
        raise _forbidden(directory / NAME) from None
    except OSError as error:
        return f"{NAME} cannot be read: {error.strerror or error}"
    share = [piece for piece in recorded if piece.name.startswith(part)][index::count]
    with ThreadPoolExecutor(THREADS) as threads:
        return next(filter(None, threads.map(lambda piece: _problem(directory, piece, *recorded[piece]), share)), "")


def _problem(directory: Folder, piece: FilePiece, size: int, crc: str) -> str:
    try:
        with store_errors(directory):
            if not (directory / piece.name).is_file():  # a pipe would block
                return f"{piece.name} is missing"
            found, length = _read(directory, piece, size)
    except PermissionError:
        raise _forbidden(directory / piece.name) from None
    except OSError as error:
        return f"{piece.name} cannot be read: {error.strerror or error}"
    if length != size:
        return f"{piece.name} has {length} bytes instead of {size}"
    return "" if found == crc else f"{piece.name} has other bits than when it was saved"


def _forbidden(path: Folder) -> InputError:
    return InputError(f"{path} cannot be read: give yourself the permission.")


def _recorded(directory: Folder) -> dict[FilePiece, tuple[int, str]]:
    """The file's size and the CRC-32 of each recorded piece. Raises `Damaged`, or OSError."""
    path, cure = directory / NAME, "use another checkpoint"
    record = parse(read_bytes(path), str(path), ChecksumRecord, cure)
    if record["piece"] != PIECE or record["crc32"] != _own(record["files"]):
        raise damaged(path, "its own checksum differs", cure)
    pieces = {}
    for name, entry in record["files"].items():
        file, size, crcs = PurePosixPath(name), entry["size"], entry["crc32"]
        if file.is_absolute() or ".." in file.parts or "\0" in name or len(crcs) != _count(size):
            raise damaged(path, f"its entry {shown(name)} is wrong", cure)
        pieces |= {FilePiece(name, number): (size, crc) for number, crc in enumerate(crcs)}
    return pieces


def _read(directory: Folder, piece: FilePiece, size: int | None = None) -> tuple[str, int]:
    """A piece's CRC-32, and the size of its file; nothing is read if that is not `size`."""
    with (directory / piece.name).open("rb") as file:
        length = file.seek(0, 2)
        if size not in (None, length):
            return "", length
        file.seek(piece.number * PIECE)
        crc, left = 0, min(PIECE, length - piece.number * PIECE)
        while left > 0 and (block := file.read(min(BLOCK, left))):
            crc, left = zlib.crc32(block, crc), left - len(block)
    return f"{crc:08x}", length


def _own(files: dict[str, Any]) -> str:
    """The CRC-32 of the record itself, so that its damage is not taken for that of another file."""
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"


def _pieces(lengths: dict[str, int]) -> list[FilePiece]:
    return sorted(FilePiece(name, number) for name, size in lengths.items() for number in range(_count(size)))


def _count(size: int) -> int:
    return max(1, math.ceil(size / PIECE))
