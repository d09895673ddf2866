"""Checkpoints in another directory than the run's own: `checkpoint.dir`.

`RUN/checkpoints` becomes a link to it, so that everything that finds checkpoints by their run works as before.
"""

from pathlib import Path

from megajax.checkpoint.manager import SUBDIRECTORY
from megajax.config import Config
from megajax.config.data_schema import is_remote
from megajax.errors import InputError
from megajax.files import replace_text

OWNER = "run"  # file in `checkpoint.dir` with the path of the run directory whose checkpoints are there


def link_checkpoints(config: Config) -> None:
    """Make `checkpoint.dir` and the link to it, if they are not there; the first process calls it at each start.

    Raises InputError for a URL, if the directory cannot be written or belongs to another run, or if the run has
    checkpoints elsewhere.
    """
    wanted = config.checkpoint.dir
    if wanted is None:
        return
    key = f"checkpoint.dir={wanted} ({config.where('checkpoint.dir')})"
    if is_remote(wanted):
        raise InputError(
            f"{key} is a URL, but checkpoints are written to directories: give one, such as a bucket that is mounted "
            "by a file system that can rename directories."
        )
    directory, link = Path(wanted).resolve(), Path(config.run.dir).resolve() / SUBDIRECTORY
    owner = directory / OWNER
    if link.resolve() != directory and (link.is_symlink() or link.is_dir() and any(link.iterdir())):
        raise InputError(
            f"{key}: the run's checkpoints are in {link.resolve()}: move them to checkpoint.dir and remove {link}, or "
            "restore checkpoint.dir."
        )
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        if not owner.exists():
            replace_text(owner, f"{link.parent}\n")
        if (name := owner.read_text().strip()) != str(link.parent):
            raise InputError(
                f"{key} has the checkpoints of run.dir={name}: choose another directory, or write {link.parent} into "
                f"{owner} if that run was moved."
            )
        if not link.is_symlink():
            if link.exists():
                link.rmdir()
            link.symlink_to(directory)
    except OSError as error:
        raise InputError(
            f"{key}: {error.filename or directory} cannot be written ({error.strerror}): choose another directory."
        ) from None
