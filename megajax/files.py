"""Text as users write it, and files that a crash leaves either as they were or whole."""

import contextlib
import errno
import gzip
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from megajax.errors import ConfigError, InputError, shown

# In a run directory, for modules with and without jax.
CONFIG, METRICS, LOCK, SUBDIRECTORY = "config.yaml", "metrics.jsonl", "lock", "checkpoints"
CONSOLE_LOG = "console.log"
HEARTBEAT_SECONDS = 10.0  # the owner of a lock touches it this often

MOST_DIGITS = 18  # of a number in a name or an argument: below 2**63
PIECE_BYTES = 2**18
MOST_BYTES = 2**28  # of a file that is read whole


def check_file(path: Any, most: int = MOST_BYTES) -> None:
    """Raises OSError for a pipe or a device, which have no end, and for a file of more than `most` bytes."""
    if path.exists() and not path.is_dir():
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if path.stat().st_size > most:
            raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))


def read_bytes(path: Any, most: int = MOST_BYTES) -> bytes:
    """A file of at most `most` bytes, of a disk or a bucket. Raises OSError, as `check_file`."""
    if isinstance(path, Path):
        check_file(path, most)
    with path.open("rb") as file:
        return _read_all(file, most, path)


def read_text(path: Any, most: int = MOST_BYTES) -> str:
    """A text file in UTF-8, with or without a byte order mark, whatever the locale is.

    Every file that a user may have written is read here, except lines of data (`json_lines`). Raises OSError and
    UnicodeDecodeError.
    """
    return read_bytes(path, most).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_gzip(path: Path, most: int = 2**30) -> bytes:
    """What a gzip file holds, at most `most` bytes. Raises OSError, and ValueError for damage."""
    check_file(path, most)
    with gzip.open(path) as file:
        try:
            return _read_all(file, most, path)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"it is no whole gzip file, {error}") from None


def _read_all(file: Any, most: int, path: Any) -> bytes:
    """In pieces, since a read of a number of bytes takes memory for all of them first."""
    pieces, size = [], 0
    while piece := file.read(PIECE_BYTES):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise OSError(errno.EINVAL, f"it has more than {most:,} bytes", str(path))
    return b"".join(pieces)


def why_unreadable(error: OSError | UnicodeDecodeError) -> str | None:
    """The reason of an error of `read_text`, for a sentence."""
    return error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"


def is_number(text: str) -> bool:
    """Whether a text, such as a file's name or an argument, is digits 0 to 9 only, few enough for int()."""
    return text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS


def whole_number(environment: Mapping[str, str], name: str, default: int) -> int:
    """The number in a variable of the environment. Raises ConfigError if it is none of 32 bits."""
    value = environment.get(name) or str(default)
    if not is_number(value) or int(value) >= 2**31:
        raise ConfigError(f"{name}={shown(value)} is not a whole number below 2**31: correct or unset the variable.")
    return int(value)


def is_url(path: str | Path) -> bool:
    """Whether a path begins with a scheme, also where a slash is missing: a `Path` of s3://x is s3:/x."""
    return re.match(r"[A-Za-z][\w+.-]+:/", str(path), re.ASCII) is not None


def check_output(option: str, path: Path, is_folder: bool = False) -> None:
    """Raises InputError if the file or folder of a command's `option` cannot be written, before the work for it.

    Nothing is changed. A folder may have to be made, with those above it.
    """
    if is_url(path):
        raise InputError(f"{option}={path} is a URL: write to a path of this machine, and copy what is there.")
    found = Path(os.path.realpath(path))
    try:
        if is_folder:
            while not found.exists():
                found = found.parent
            tempfile.TemporaryFile(dir=found).close()
        elif found.is_file() or found.is_dir():
            os.close(os.open(found, os.O_WRONLY))
        elif not found.exists():  # else a device or a pipe
            tempfile.TemporaryFile(dir=found.parent).close()
    except OSError as error:
        problem = f"{option}={path} cannot be written ({error.strerror})"
        raise InputError(f"{problem}: give another {'folder' if is_folder else 'file'}.") from None


def check_new_file(option: str, path: Path) -> None:
    """As `check_output`, for a file that must not exist."""
    if path.exists():
        raise InputError(f"{option}={path} exists: name a new file, or remove it.")
    check_output(option, path)


def is_free(folder: Path) -> bool:
    """Whether a new folder can get this name: nothing has it, or an empty folder in which this process does not run."""
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()) and not folder.samefile("."))


def check_new_folder(option: str, path: Path) -> None:
    """As `check_output`, for a folder that is new or empty."""
    if not is_free(path):
        raise InputError(f"{option}={path} exists: give a new folder, or remove it.")
    check_output(option, path, is_folder=True)


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
