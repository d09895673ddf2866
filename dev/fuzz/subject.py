"""A format that is fuzzed: valid files, and the function that reads them as megajax's commands do."""

import bz2
import gzip
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

Packing = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]  # from a file's bytes to its content, and back


class Subject(NamedTuple):
    """files: those that are changed; read(the changed one).

    packings: of files whose content is changed as often as their bytes. words: the format's own, for texts. repair:
    called after half of the changes, for example to write checksums that fit. damaged: the files are so already.
    """

    files: Sequence[Path]
    read: Callable[[Path], object]
    packings: Mapping[Path, Packing] = {}
    words: Sequence[bytes] = ()
    repair: Callable[[], object] | None = None
    damaged: bool = False


def zstandard() -> Packing:
    """Zstandard, with the size of the content in the frame."""
    import zstandard as zstd

    return zstd.ZstdDecompressor().decompress, zstd.ZstdCompressor().compress


def packing_of(path: Path) -> Packing | None:
    """The packing of a compressed file, by its name."""
    known = {".gz": lambda: (gzip.decompress, gzip.compress), ".bz2": lambda: (bz2.decompress, bz2.compress)}
    known |= {".xz": lambda: (lzma.decompress, lzma.compress), ".zst": zstandard}
    return known[path.suffix]() if path.suffix in known else None


def headed(header_at: int = 8) -> Packing:
    """A safetensors file as its header alone; its length is written anew, and the tensors follow it as they were."""
    rest: list[bytes] = [b""]

    def unpack(data: bytes) -> bytes:
        size = int.from_bytes(data[:header_at], "little")
        rest[0] = data[header_at + size :]
        return data[header_at : header_at + size]

    return unpack, lambda header: len(header).to_bytes(header_at, "little") + header + rest[0]


def write(path: Path, content: str | bytes) -> Path:
    """Write a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path
