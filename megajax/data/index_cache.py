"""Files on disk under a hash of everything that decides them, built once and mapped into memory by every process."""

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tokenize
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from megajax.errors import InputError, UserError, file_reader

if TYPE_CHECKING:
    from megajax.config import Config

KEY_FILE = "key.json"
COMPARED = 1 << 20  # bytes at both ends of a file that are part of its identity


def cache_directory(config: "Config") -> Path:
    """The directory of a run's stored orders, tokens and blocks of remote files."""
    return Path(config.data.index_cache or Path(config.run.dir) / "index_cache")


def digest(array: np.ndarray) -> str:
    """A hash of an array's content."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def text_digest(value: Any) -> str:
    """A hash of a value that JSON can hold."""
    return hashlib.blake2b(_text(value).encode(), digest_size=16).hexdigest()


@file_reader("path")
def file_digest(path: str | Path) -> str:
    """A hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@file_reader("path")
def file_identity(path: str) -> dict[str, Any]:
    """A file's size, time of change and both ends: to read a large one at each start takes too long."""
    status = os.stat(path)
    with open(path, "rb") as file:
        ends = file.read(COMPARED)
        file.seek(max(0, status.st_size - COMPARED))
        ends += file.read(COMPARED)
    return {"size": status.st_size, "changed": status.st_mtime_ns, "ends": hashlib.blake2b(ends).hexdigest()[:32]}


def cached(
    directory: Path, key: Mapping[str, Any], names: Sequence[str], build: Callable[[], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """The arrays of `build`, in the order of `names`, mapped from files; built if `directory` does not have them.

    `key` has everything that decides them. The files appear under their final name when they are complete, and one
    process builds while the others wait. Raises InputError if they cannot be written or read.
    """
    folder = folder_of(directory, key)
    with filling(directory, key) as partial:
        if partial is not None:
            arrays = build()
            with storage_errors(partial):
                for name, array in zip(names, arrays, strict=True):
                    np.save(partial / f"{name}.npy", array)
    with storage_errors(folder):
        return [_mapped(folder / f"{name}.npy") for name in names]


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")
    except (SyntaxError, OverflowError, MemoryError, TypeError, tokenize.TokenError) as error:  # of a damaged header
        raise ValueError(f"{path.name} is damaged, {error}") from None


@contextmanager
def filling(directory: Path, key: Mapping[str, Any], *, wait: bool = True) -> Iterator[Path | None]:
    """Yields an empty folder that becomes the folder of `key`; None if this has its files.

    Also None, without `wait`, while another process fills it. After an exception the folder is removed; the next
    process of this host removes the folder of a killed one. Raises InputError if the files cannot be written.
    """
    folder, partial = folder_of(directory, key), None
    with ExitStack() as stack:
        with storage_errors(folder):
            if not is_complete(folder):
                directory.mkdir(parents=True, exist_ok=True)
                is_held = stack.enter_context(_locked(folder, wait))
                if is_held and not is_complete(folder):
                    shutil.rmtree(folder, ignore_errors=True)  # without its key it was never complete
                    partial = folder.with_name(f"{_partial_of(folder)}{uuid4().hex}")
                    stack.callback(shutil.rmtree, partial, ignore_errors=True)
                    partial.mkdir()
        yield partial
        if partial is not None:
            with storage_errors(folder):
                (partial / KEY_FILE).write_text(_text(key), encoding="utf-8")
                _move(partial, folder)


def folder_of(directory: Path, key: Mapping[str, Any]) -> Path:
    """The folder of `key`, whether it exists or not."""
    return directory / hashlib.sha256(_text(key).encode()).hexdigest()[:32]


def is_complete(folder: Path) -> bool:
    """Whether a folder has its files."""
    return (folder / KEY_FILE).is_file()


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


@contextmanager
def storage_errors(folder: Path) -> Iterator[None]:
    """Around the reading and writing of a folder of the cache: their errors become an InputError that names it."""
    try:
        yield
    except (UserError, AssertionError):
        raise
    except Exception as error:  # also those of NumPy for a damaged file
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the stored data {folder} cannot be written or read ({reason}): free space there, remove it, or set "
            "data.index_cache to another directory."
        ) from None


def _partial_of(folder: Path) -> str:
    """How the name of an unfinished folder begins: with the host, since some file systems lock within a host only."""
    return f"{folder.name}.partial-{socket.gethostname()}-"


def _move(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not is_complete(folder):  # by another process, where the file system has no locks
            raise


@contextmanager
def _locked(folder: Path, wait: bool) -> Iterator[bool]:
    """Whether this process holds the lock of a folder, meanwhile; without `wait` another one may.

    Where the file system has no locks every process builds, which is more work but right.
    """
    path = folder.with_name(f"{folder.name}.lock")
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        else:
            for left in folder.parent.glob(f"{_partial_of(folder)}*"):  # by a killed process: it had the lock
                shutil.rmtree(left, ignore_errors=True)
        yield True
    path.unlink(missing_ok=True)
