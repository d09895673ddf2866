"""Text as users write it, and files that a crash leaves either as they were or whole."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

# In a run directory, for modules with and without jax.
CONFIG, METRICS, LOCK, SUBDIRECTORY = "config.yaml", "metrics.jsonl", "lock", "checkpoints"
HEARTBEAT_SECONDS = 10.0  # the owner of a lock touches it this often


def read_text(path: Path) -> str:
    """A text file in UTF-8, with or without a byte order mark, whatever the locale is.

    Every file that a user may have written is read here, except lines of data (`json_lines`). Raises OSError and
    UnicodeDecodeError.
    """
    return path.read_text(encoding="utf-8-sig")


def why_unreadable(error: OSError | UnicodeDecodeError) -> str | None:
    """The reason of an error of `read_text`, for a sentence."""
    return error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; the file written there replaces `path` at the end of the block.

    Whenever the process or the machine stops, `path` is the old file or the new one. After an exception it is the old
    one, and nothing else remains. One process at a time may replace a file.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            sync(file)
        temporary.replace(path)
        sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a text file as `replaced` does."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def replace_copy(source: Path, path: Path) -> None:
    """Copy a file as `replaced` does."""
    with replaced(path) as temporary:
        shutil.copyfile(source, temporary)


def sync(file: IO[Any]) -> None:
    """Returns when everything that was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Returns when the names in a directory are on the disk, where the file system can do that."""
    with contextlib.suppress(OSError):
        number = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
