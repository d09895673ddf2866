"""The text of compressed files, decompressed in pieces whose size is bounded, whatever the file says.

A file may be a few kB that expand to terabytes, so no reader asks for all of it, and its text has a limit.
"""

import bz2
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from typing import IO, Any, cast

STORED_BYTES = 1 << 12  # decompressed together; Zstandard makes at most 32,768 times as many bytes of them, 128 MiB
EXPANSION = 1000  # bytes of text for each of a file's; below 30 for most text, gzip makes at most 1,032
DICTIONARY_BYTES = 1 << 28  # of an .xz file, at most; `xz -9` needs a quarter
DAMAGE = (OSError, EOFError, zlib.error)  # raised by the files of `decompress`


class Frames(io.RawIOBase):
    """The text of frames one after the other; EOFError if the last is incomplete, OSError for damage."""

    def __init__(self, file: IO[bytes], new: Callable[[], Any], damage: type[Exception]):
        """`new` makes the decompressor of a frame, which raises `damage`."""
        self._file, self._new, self._damage = file, new, damage
        self._frame, self._ready = new(), memoryview(b"")
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
                stored = stored.lstrip(b"\0")  # padding after a frame
                self._frame, self._started = self._new(), bool(stored)
            self._started = self._started or bool(stored)
            try:
                self._ready = memoryview(self._frame.decompress(stored))
            except self._damage as error:
                raise OSError(str(error)) from None
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


class Bounded:
    """The text of a compressed file; OSError if it is far longer than text that compresses well."""

    def __init__(self, text: IO[bytes], stored_bytes: int, most: int):
        """`most` bytes are allowed to a small file too."""
        self._text, self._stored = text, stored_bytes
        self._most = self._left = max(most, EXPANSION * stored_bytes)

    def read(self, size: int) -> bytes:
        return self._counted(self._text.read(size))

    def readline(self, size: int) -> bytes:
        return self._counted(self._text.readline(size))

    def _counted(self, text: bytes) -> bytes:
        self._left -= len(text)
        if self._left < 0:
            raise OSError(f"its {self._stored:,} bytes hold more than {self._most:,} bytes of text")
        return text


def _zstandard(file: IO[bytes]) -> IO[bytes]:
    import zstandard

    return io.BufferedReader(Frames(file, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError))


def _xz(file: IO[bytes]) -> IO[bytes]:
    return io.BufferedReader(Frames(file, lambda: lzma.LZMADecompressor(memlimit=DICTIONARY_BYTES), lzma.LZMAError))


# Recognised by their first bytes, not by the name.
_READERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.open(file)),
    b"BZh": lambda file: bz2.open(file),
    b"\xfd7zXZ\0": _xz,
    b"\x28\xb5\x2f\xfd": _zstandard,
}


def decompress(stored: IO[bytes], most: int) -> IO[bytes] | None:
    """The text of a compressed file, None for a file that is not compressed; `most` as for `Bounded`."""
    magic = stored.read(8)
    stored.seek(0)
    found = next((read(stored) for start, read in _READERS.items() if magic.startswith(start)), None)
    return None if found is None else cast(IO[bytes], Bounded(found, os.fstat(stored.fileno()).st_size, most))
