"""WebDataset shards: tar files whose consecutive members with one key, the name up to its first dot, are a sample.

A shard is read once for its headers; samples and pictures are then read at their offsets, in any order. Nothing is
extracted.
"""

import json
import tarfile
from collections.abc import Iterator
from io import SEEK_CUR, SEEK_END, SEEK_SET, RawIOBase
from pathlib import Path
from typing import Any, NamedTuple

from megajax.data.remote import RemoteFile
from megajax.errors import InputError, file_reader, shown
from megajax.schema.data import is_remote

SUFFIX = ".tar"
PICTURES = ("jpg", "jpeg", "png", "webp", "gif", "bmp")  # endings of members
RECORD, CAPTION = "json", "txt"
MOST_TEXT = 1 << 26  # bytes of a record


def is_shard(path: str) -> bool:
    """Whether a path is that of a shard."""
    return path.endswith(SUFFIX)


class ShardMember(NamedTuple):
    """Where a file lies in a shard."""

    start: int
    size: int


class Shard:
    """The members of a tar file by name; a remote one is read by blocks, which `cache` keeps.

    Raises InputError for a file that is no uncompressed tar file.
    """

    @file_reader("path")
    def __init__(self, path: str, cache: Path | None = None):
        self.path = path
        self._remote = RemoteFile(path, cache) if is_remote(path) and cache is not None else None
        try:
            with self._open() as file, tarfile.TarFile(fileobj=file) as tar:
                found = {each.name: ShardMember(each.offset_data, each.size) for each in tar if _is_plain(each)}
        except tarfile.TarError as error:
            raise InputError(
                f"{path} is not a complete tar file without compression ({shown(error)}): unpack its compression, or "
                "copy it again."
            ) from None
        self.members = {name.removeprefix("./"): member for name, member in found.items()}

    def _open(self) -> Any:
        return open(self.path, "rb") if self._remote is None else _Seekable(self._remote)

    @file_reader("self.path")
    def read(self, name: str, most: int) -> bytes:
        """A member's bytes. Raises InputError if it does not exist, or has more than `most`."""
        member = self.members.get(name.removeprefix("./"))
        if member is None:
            raise InputError(f"{self.path} has no member {shown(name)}.")
        if member.size > most:
            raise InputError(f"{self.path}, member {name} has {member.size:,} bytes, more than {most:,}.")
        with self._open() as file:
            file.seek(member.start)
            data = file.read(member.size)
        if len(data) != member.size:
            raise InputError(f"{self.path} ends within the member {name}: copy it again.")
        return data

    def samples(self) -> Iterator[dict[str, str]]:
        """The members of each sample, name by ending ("jpg", "json", "1.png"), in the order of the file."""
        key, sample = None, dict[str, str]()
        for name in self.members:
            folder, _, base = name.rpartition("/")
            stem, _, ending = base.partition(".")
            if (folder, stem) != key and sample:
                yield sample
                sample = {}
            key = folder, stem
            sample[ending.lower()] = name
        if sample:
            yield sample

    @file_reader("self.path")
    def records(self) -> Iterator[Any]:
        """What each sample has as a line of chat data would have it.

        It is the content of its `.json`, with `images` if that does not name them; or the text of its `.txt` as the
        answer to its picture. A value that is no record stays, so that its reader names it.
        """
        for sample in self.samples():
            pictures = [name for ending, name in sorted(sample.items()) if ending.rpartition(".")[2] in PICTURES]
            if RECORD in sample:
                text = self.read(sample[RECORD], MOST_TEXT)
                try:
                    record = json.loads(text)
                except (ValueError, RecursionError):
                    yield f"{sample[RECORD]} is not JSON"
                    continue
                names = isinstance(record, dict) and not record.keys() & {"images", "image"}
                yield {**record, "images": pictures} if names and pictures else record
            elif CAPTION in sample:
                caption = self.read(sample[CAPTION], MOST_TEXT).decode("utf-8", "replace").strip()
                asked = [{"type": "image", "path": name} for name in pictures]
                yield {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": caption}]}
            else:
                yield {"members": sorted(sample.values())}


def _is_plain(member: tarfile.TarInfo) -> bool:
    return member.isreg() and not member.issparse()


class _Seekable(RawIOBase):
    """A remote file as tarfile reads it."""

    def __init__(self, remote: RemoteFile):
        self._remote, self._position = remote, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = SEEK_SET) -> int:
        start = {SEEK_SET: 0, SEEK_CUR: self._position, SEEK_END: self._remote.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        stop = min(self._position + len(buffer), self._remote.size)
        data = self._remote.read(self._position, stop) if stop > self._position else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
