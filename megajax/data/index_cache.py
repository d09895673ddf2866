"""Files on disk under a hash of everything that decides them, built once and mapped into memory by every process."""

import fcntl
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from megajax.errors import InputError

if TYPE_CHECKING:
    from megajax.config import Config

KEY_FILE = "key.json"


def cache_directory(config: "Config") -> Path:
    """The directory of a run's stored orders, tokens and blocks of remote files."""
    return Path(config.data.index_cache or Path(config.run.dir) / "index_cache")


def digest(array: np.ndarray) -> str:
    """A hash of an array's content."""
    return hashlib.blake2b(np.ascontiguousarray(array).data, digest_size=16).hexdigest()


def file_digest(path: str | Path) -> str:
    """A hash of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


def cached(
    directory: Path, key: Mapping[str, Any], names: Sequence[str], build: Callable[[], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """The arrays of `build`, in the order of `names`, mapped from files; see `cached_folder`."""

    def write(folder: Path) -> None:
        for name, array in zip(names, build(), strict=True):
            np.save(folder / f"{name}.npy", array)

    folder = cached_folder(directory, key, write)
    with _errors(folder):
        return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]


def cached_folder(directory: Path, key: Mapping[str, Any], write: Callable[[Path], None]) -> Path:
    """The folder of `key` in `directory`; `write` fills it if it is not there.

    `key` has everything that decides the files. They appear under their final name when they are complete, and one
    process writes while the others wait. Raises InputError if they cannot be written.
    """
    with filling(directory, key) as partial:
        if partial is not None:
            write(partial)
    return folder_of(directory, key)


@contextmanager
def filling(directory: Path, key: Mapping[str, Any], *, wait: bool = True) -> Iterator[Path | None]:
    """Yields an empty folder that becomes the folder of `key`; None if this has its files.

    Also None, without `wait`, while another process fills it. After an exception the folder is removed.
    """
    folder = folder_of(directory, key)
    with _errors(folder):
        if is_complete(folder):
            yield None
            return
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / f"{folder.name}.lock", wait) as is_held:
            if not is_held or is_complete(folder):
                yield None
                return
            shutil.rmtree(folder, ignore_errors=True)  # without its key it was never complete
            partial = folder.with_name(f"{folder.name}.partial-{uuid4().hex}")
            try:
                partial.mkdir()
                yield partial
                (partial / KEY_FILE).write_text(_text(key))
                _move(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)


def folder_of(directory: Path, key: Mapping[str, Any]) -> Path:
    """The folder of `key`, whether it exists or not."""
    return directory / hashlib.sha256(_text(key).encode()).hexdigest()[:32]


def is_complete(folder: Path) -> bool:
    """Whether a folder has its files."""
    return (folder / KEY_FILE).is_file()


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


@contextmanager
def _errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except (OSError, ValueError) as error:  # ValueError: np.load of a damaged file
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the index of samples {folder} cannot be written or read ({reason}): free space there, remove it, or set "
            "data.index_cache to another directory."
        ) from None


def _move(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError:
        if not is_complete(folder):  # by another process, where the file system has no locks
            raise


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Whether this process holds a lock, meanwhile; without `wait` another one may.

    Where the file system has no locks every process builds, which is more work but right.
    """
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass
        yield True
    path.unlink(missing_ok=True)
