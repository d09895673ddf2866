"""Arrays on disk under a hash of everything that decides them, built once and mapped into memory by every process."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from megajax.errors import InputError

KEY_FILE = "key.json"


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
    """The arrays of `build`, in the order of `names`, mapped from files; built if `directory` does not have them.

    `key` has everything that decides them. The files appear under their final name when they are complete, and one
    process builds while the others wait. Raises InputError if they cannot be written.
    """
    text = json.dumps(key, sort_keys=True)
    folder = directory / hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        if not (folder / KEY_FILE).is_file():
            directory.mkdir(parents=True, exist_ok=True)
            with _locked(directory / f"{folder.name}.lock"):
                if not (folder / KEY_FILE).is_file():
                    _write(folder, text, dict(zip(names, build(), strict=True)))
        return [np.load(folder / f"{name}.npy", mmap_mode="r") for name in names]
    except (OSError, ValueError) as error:  # ValueError: np.load of a damaged file
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"the index of samples {folder} cannot be written or read ({reason}): free space there, remove it, or set "
            "data.index_cache to another directory."
        ) from None


def _write(folder: Path, key: str, arrays: Mapping[str, np.ndarray]) -> None:
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(folder, ignore_errors=True)  # without its key it was never complete
    try:
        partial.mkdir()
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
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
