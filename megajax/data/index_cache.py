"""Files on disk under a hash of everything that decides them, built once and mapped into memory by every process."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    folder = folder_of(directory, key)
    with _errors(folder):
        if not is_complete(folder):
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / f"{folder.name}.lock"):
                if not is_complete(folder):
                    _write(folder, _text(key), write)
    return folder


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


def _write(folder: Path, key: str, write: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # without its key it was never complete
    try:
        partial.mkdir()
        write(partial)
        (partial / KEY_FILE).write_text(key)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock between processes; without one where the file system has none, which builds twice but right."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        yield
    path.unlink(missing_ok=True)
