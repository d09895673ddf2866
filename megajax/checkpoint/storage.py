"""The folder of a run's checkpoints: a directory, or the objects of a bucket whose names begin with a URL.

On a disk a checkpoint appears under its name when its directory is renamed. A bucket has no directories and renames
objects one by one. There a checkpoint is complete when orbax has written its last object, COMMITTED, and everything
without it is the rest of an interrupted save. `RUN/checkpoints` is then a text file with the URL.
"""

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Required, TypedDict

from etils import epath
from pydantic import ConfigDict

from megajax.checkpoint import s3
from megajax.errors import InputError, file_reader, shown
from megajax.extras import EXTRAS, require
from megajax.files import SUBDIRECTORY, is_number, read_bytes, replace_text
from megajax.json_files import Count, Finite, damaged, parse

GCS = "gs://"
EXTRA_OF = {GCS: "gcs", s3.SCHEME: "s3"}  # by scheme of a URL
COMMITTED = "commit_success.txt"  # orbax's name

type Folder = Path | epath.Path
Section = dict[str, Any]


class Losses(TypedDict):
    """`training/spikes.py`'s."""

    last: list[Finite]
    spikes: Count


class Description(TypedDict, total=False):
    """What a checkpoint says about itself; one of weights alone has the first two entries."""

    __pydantic_config__ = ConfigDict(extra="allow")  # pyright: ignore

    step: Required[Count]
    model: Required[Section]
    samples_consumed: Count | None
    run: Section
    optimizer: Section
    batch: Section
    precision: Section
    schedule: Section
    lora: Section
    data: Section
    base: int | None
    fp8_history: Count
    optimizer_state: bool
    ema: bool
    losses: Losses


def is_in_bucket(folder: Folder | str) -> bool:
    """Whether a folder or URL is in a bucket."""
    return str(folder).startswith(tuple(EXTRA_OF))


def bucket_folder(url: str) -> epath.Path:
    """The folder at a URL. Raises InputError if the package that reads and writes there is not installed."""
    protocol = url.partition(":")[0]
    extra, needed_by = EXTRA_OF[f"{protocol}://"], f"{url}, which is in a bucket,"
    fsspec = require("remote", needed_by)
    if protocol not in fsspec.registry:
        require(extra, needed_by)
    # Orbax, tensorstore and other processes write there too, so a listing is old at once.
    fsspec.config.conf.setdefault(protocol, {})["use_listings_cache"] = False
    logging.getLogger(EXTRAS[extra][1]).setLevel(logging.CRITICAL)  # it writes a traceback for each request that fails
    if url.startswith(s3.SCHEME):
        s3.prepare()
    return epath.Path(url)


def checkpoint_folder(run_dir: str | Path) -> Folder:
    """The folder of a run's checkpoints, to which `RUN/checkpoints` leads; nothing is created.

    Raises InputError for a file there that has no URL of a bucket.
    """
    path = Path(run_dir) / SUBDIRECTORY
    if not path.is_file():
        return path.resolve()
    url = read_bytes(path).decode("utf-8-sig", errors="replace").strip()
    if not is_in_bucket(url):
        known = " or ".join(EXTRA_OF)
        problem = f"{path} is a file without the URL of a bucket ({known}), it holds {shown(url)!r}"
        raise InputError(f"{problem}: bring the directory of the checkpoints back, or choose another run.dir.")
    return bucket_folder(url)


def leads_elsewhere(run_dir: str | Path) -> bool:
    """Whether the checkpoints of a run are not in its own directory."""
    path = Path(run_dir) / SUBDIRECTORY
    return path.is_symlink() or path.is_file()


def lead_to(folder: Folder, path: Path) -> None:
    """Make `path` a link to a directory, or a file with the URL of a folder in a bucket."""
    if isinstance(folder, Path):
        path.symlink_to(folder)
    else:
        replace_text(path, f"{folder}\n")


def complete_steps(run_dir: str | Path) -> list[int]:
    """The steps of a run's complete checkpoints, oldest first; nothing is created.

    Raises InputError if they are in a bucket that cannot be read, as `checkpoint_folder` does.
    """
    folder = checkpoint_folder(run_dir)
    if not is_in_bucket(folder):
        return sorted(int(path.name) for path in folder.glob("*") if is_number(path.name))
    with store_errors(folder):
        return sorted(int(path.name) for path in _steps_in_bucket(folder) if (path / COMMITTED).exists())


def _steps_in_bucket(folder: Folder) -> list[Folder]:
    with contextlib.suppress(FileNotFoundError):  # there are no objects
        return [path for path in folder.iterdir() if is_number(path.name)]
    return []


def remove_partial(folder: Folder) -> None:
    """Remove the remains of interrupted saves, as far as possible. Only for a process that alone writes there."""
    if not is_in_bucket(folder):
        for part in folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(part, ignore_errors=True)
        return
    parts: list[Folder] = []
    with contextlib.suppress(Exception):  # the store may not answer: a later start removes them
        parts = [part for part in _steps_in_bucket(folder) if not (part / COMMITTED).exists()]
    for part in parts:
        with contextlib.suppress(Exception):  # one that may not be removed does not keep the others
            epath.Path(part).rmtree()


def move(source: Folder, target: Folder) -> None:
    """Move a checkpoint; in a bucket its objects are copied there, and then removed.

    COMMITTED is copied last and removed first, so no part of a checkpoint looks complete if this is interrupted.
    """
    if isinstance(source, Path):
        source.rename(target)
        return
    (system, top), (_, new) = _system(source), _system(target)
    names = sorted(system.find(top), key=lambda name: name == f"{top}/{COMMITTED}")
    for name in names:
        system.cp_file(name, new + name.removeprefix(top))
    for name in reversed(names):
        system.rm_file(name)


def sizes(folder: Folder) -> dict[str, int]:
    """The size in bytes of each file of a checkpoint, by its path in the folder."""
    if isinstance(folder, Path):
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    system, top = _system(folder)
    return {path.removeprefix(f"{top}/"): entry["size"] for path, entry in system.find(top, detail=True).items()}


def saved_at(checkpoint: Folder) -> float:
    """When a checkpoint became complete, in seconds since 1970."""
    if isinstance(checkpoint, Path):
        return checkpoint.stat().st_mtime
    system, last = _system(checkpoint / COMMITTED)
    return system.modified(last).timestamp()


@file_reader("checkpoint", cure="use another checkpoint")
def read_description(checkpoint: Folder) -> dict[str, Any]:
    """The description of `RUN/checkpoints/STEP`, without orbax, for which all processes would have to read it.

    Raises `Damaged`, and InputError if it cannot be read.
    """
    name, cure = "description/metadata", "use another checkpoint"
    try:
        with store_errors(checkpoint):
            content = read_bytes(checkpoint / name)
    except FileNotFoundError:
        raise damaged(checkpoint, f"{name} is missing", cure) from None
    return {**parse(content, f"{checkpoint}/{name}", Description, cure)}


def write_text(path: Folder, text: str) -> None:
    """Write a file, which appears whole or not at all."""
    if isinstance(path, Path):
        replace_text(path, text)
    else:
        path.write_text(text, encoding="utf-8")


def key_value_store(folder: Folder) -> dict[str, Any]:
    """Tensorstore's specification of a folder."""
    if not is_in_bucket(folder):
        return {"driver": "file", "path": f"{folder}/"}
    if str(folder).startswith(s3.SCHEME):
        return s3.key_value_store(f"{folder}/")
    bucket, _, path = str(folder).removeprefix(GCS).partition("/")
    return {"driver": "gcs", "bucket": bucket, "path": f"{path}/"}


def _system(folder: Folder) -> tuple[Any, str]:
    """fsspec's file system of a folder in a bucket, and the path there."""
    import fsspec

    return fsspec.url_to_fs(str(folder))


SILENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "RESOURCE_EXHAUSTED", "INTERNAL")  # statuses of tensorstore
DENIED = (
    *("PERMISSION_DENIED", "UNAUTHENTICATED", "Forbidden", "Anonymous caller", "credentials", ", 401"),  # of GCS
    *("Unauthorized", "Access Denied", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"),  # of S3
)
# Packages whose errors come from the store or the way there.
CLIENTS = ("gcsfs", "s3fs", "botocore", "aiobotocore", "fsspec", "aiohttp", "google", "requests", "asyncio")


@contextlib.contextmanager
def store_errors(folder: Folder) -> Iterator[None]:
    """Raises InputError if a bucket doesn't answer, or not to this user; lets all other errors through.

    So a store that doesn't answer is not taken for a damaged checkpoint.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        text, client = str(error), type(error).__module__.partition(".")[0] in CLIENTS
        # Time-outs and lost connections are OSErrors; a missing object may be damage.
        client |= isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
        said = any(f"{status}:" in text for status in SILENT) or any(word in text for word in DENIED)
        if not is_in_bucket(folder) or not (client or said):
            raise
        raise store_problem(str(folder), error) from None


def store_problem(name: str, error: Exception) -> InputError:
    """The sentence for a bucket that cannot be read or written; `name` has the URL, first or in a setting."""
    text, cure = str(error).strip() or type(error).__name__, "check the connection"
    if isinstance(error, PermissionError) or any(word in text for word in DENIED):
        keys = "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS"
        if s3.SCHEME in name:
            keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        cure = f"give this machine credentials that may list, read, write and delete there ({keys})"
    elif any(word in text for word in ("NOT_FOUND", "Invalid GCS bucket", "NoSuchBucket")):
        cure = "create the bucket, or correct its name"
    text = text.splitlines()[0].partition(" [")[0][:200]  # tensorstore adds the answer in brackets
    return InputError(f"{name} cannot be read or written ({text}): {cure}, then start again.")
