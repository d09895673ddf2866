"""Files at a URL (gs://, s3://, ...) over fsspec, read by blocks that stay in a directory of this machine.

A block is a file of its own that appears under its name when it is complete, so processes and hosts may share the
directory. It belongs to one version of the remote file.
"""

import hashlib
import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megajax.errors import InputError, shown
from megajax.extras import require

BLOCK_BYTES = 1 << 18  # a sample takes a few kB of it; a larger block is fetched faster only if its neighbours are read
BLOCKS_A_FOLDER = 1000
PIECE_BYTES = 1 << 26  # of a file that is copied whole
THREADS = 32  # that fetch blocks, in each process
ATTEMPTS, FIRST_WAIT = 5, 0.5  # seconds; each wait is twice the one before
# What a store says of a file's version, the best first.
VERSIONS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "mtime", "LastModified", "last_modified", "created")


class RemoteFile:
    """The file at a URL; what is read of it is kept under `cache`. `size` in bytes, `identity` of this version.

    Raises InputError if it does not exist, may not be read, or cannot be read after several attempts, and if `cache`
    cannot be written. Threads may share it.
    """

    def __init__(self, url: str, cache: Path):
        self.url = url
        self._system, self._path = _file_system(url)
        info = self._retried(self._system.info, self._path)
        if info.get("size") is None:
            raise InputError(f"{url}: the store does not give its size: copy the file to this machine.")
        self.size = int(info["size"])
        if self.size < 0:
            raise InputError(f"{url} has {self.size} bytes by its store: copy the file to this machine.")
        version = next((str(info[name]) for name in VERSIONS if info.get(name) is not None), "")
        key = json.dumps([url, self.size, version])
        self.identity = hashlib.sha256(key.encode()).hexdigest()[:32]
        self._folder = cache / f"remote-{self.identity}"
        self._lock = threading.Lock()
        self._here: set[int] = set()  # blocks that this process has seen in the folder
        self._coming: dict[int, Future[None]] = {}

    def whole(self) -> Path:
        """A copy of the whole file."""
        path = self._folder / "whole"
        self._store(path, 0, self.size)
        return path

    def fetch(self, first: int, last: int) -> list[Future[None]]:
        """Starts to read bytes first..last-1; they are here when all results are."""
        blocks = range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
        return [coming for block in blocks if (coming := self._fetch_block(block)) is not None]

    def read(self, first: int, last: int) -> bytes:
        """Bytes first..last-1."""
        with self._cache_errors():
            try:
                return self._read_blocks(first, last)
            except FileNotFoundError:  # somebody has removed a block
                self._here.clear()
                return self._read_blocks(first, last)

    def _read_blocks(self, first: int, last: int) -> bytes:
        for coming in self.fetch(first, last):
            coming.result()
        parts = []
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            start = block * BLOCK_BYTES
            with open(self._block_path(block), "rb") as file:
                file.seek(max(0, first - start))
                parts.append(file.read(min(last - start, BLOCK_BYTES) - file.tell()))
        return b"".join(parts)

    def _block_path(self, block: int) -> Path:
        return self._folder / str(block // BLOCKS_A_FOLDER) / str(block % BLOCKS_A_FOLDER)

    def _fetch_block(self, block: int) -> Future[None] | None:
        """None if the block is here."""
        if block in self._here:
            return None
        with self._lock:
            if block in self._here:
                return None
            if block not in self._coming:
                self._coming[block] = _threads().submit(self._get_block, block)
            return self._coming[block]

    def _get_block(self, block: int) -> None:
        start = block * BLOCK_BYTES
        try:
            self._store(self._block_path(block), start, min(start + BLOCK_BYTES, self.size))
            self._here.add(block)
        finally:
            with self._lock:
                del self._coming[block]

    def _store(self, path: Path, first: int, last: int) -> None:
        """`path` has bytes first..last-1; it appears when it is complete."""
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        with self._cache_errors():
            if path.exists():
                return
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._check_space(path.parent, last - first)
                with open(partial, "wb") as file:
                    for start in range(first, last, PIECE_BYTES):
                        file.write(self._retried(self._get, start, min(start + PIECE_BYTES, last)))
                os.replace(partial, path)
            finally:
                with suppress(OSError):
                    partial.unlink(missing_ok=True)

    def _check_space(self, folder: Path, size: int) -> None:
        free = shutil.disk_usage(folder).free
        if size > free:
            raise InputError(
                f"{self.url}: {size:,} bytes are needed on this machine, by the size that the store gives, but "
                f"{folder} has {free:,} free: free space there, or set data.index_cache to another directory."
            )

    def _get(self, first: int, last: int) -> bytes:
        data = self._system.cat_file(self._path, first, last)
        if len(data) != last - first:
            raise OSError(f"{len(data)} bytes came instead of {last - first}")
        return data

    @contextmanager
    def _cache_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._folder} cannot be written or read ({error.strerror}), for {self.url}: free space there, "
                "correct its permissions, or set data.index_cache to another directory."
            ) from None

    def _retried(self, read: Callable[..., Any], *arguments: Any) -> Any:
        for attempt in range(ATTEMPTS):
            try:
                return read(*arguments)
            except FileNotFoundError:
                raise InputError(f"{self.url} does not exist: correct the prefix.") from None
            except PermissionError as error:
                raise InputError(
                    f"{self.url} cannot be read ({error}): give this machine the credentials of the store."
                ) from None
            except Exception as error:  # the stores' libraries have their own
                if attempt + 1 == ATTEMPTS:
                    raise InputError(
                        f"{self.url} cannot be read after {ATTEMPTS} attempts ({type(error).__name__}: {error}): check "
                        "the connection and the credentials, then start again."
                    ) from None
            time.sleep(FIRST_WAIT * 2**attempt)


class RemoteTokens:
    """The tokens of a remote `.bin`: slices of it are arrays of `dtype`."""

    def __init__(self, file: RemoteFile, dtype: np.dtype):
        self._file, self.dtype, self.size = file, dtype, file.size // dtype.itemsize

    def __getitem__(self, key: slice) -> np.ndarray:
        start, stop, step = key.indices(self.size)
        assert step == 1
        width = self.dtype.itemsize
        return np.frombuffer(self._file.read(start * width, max(start, stop) * width), self.dtype)

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> list[Future[None]]:
        """Starts to read ranges (start, stop) of tokens, all at the same time; they are here when all results are."""
        width = self.dtype.itemsize
        return [coming for start, stop in ranges for coming in self._file.fetch(start * width, stop * width)]


@lru_cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, "fetch")


def _file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path in it."""
    fsspec = require("remote", f"{url}, which is remote,")
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        raise InputError(f"{url} needs a package for its protocol ({error}): install it with pip.") from None
    except Exception as error:  # each protocol has errors of its own
        raise InputError(f"{url} cannot be opened ({shown(error)}): correct the URL.") from None
