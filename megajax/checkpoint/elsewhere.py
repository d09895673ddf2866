"""Checkpoints elsewhere than in the run's own directory: `checkpoint.dir`.

`RUN/checkpoints` leads there, so that everything that finds checkpoints by their run works as before.
"""

from pathlib import Path

import tensorstore

from megajax.checkpoint.storage import (
    SUBDIRECTORY,
    Folder,
    bucket_folder,
    checkpoint_folder,
    is_in_bucket,
    key_value_store,
    lead_to,
    leads_elsewhere,
    store_problem,
)
from megajax.config import Config
from megajax.config.sentences import located
from megajax.errors import InputError
from megajax.files import replace_text

OWNER = "run"  # file in `checkpoint.dir` with the path of the run directory whose checkpoints are there
RETRIES = 3  # of a request to a bucket at the start; a save waits longer


def link_checkpoints(config: Config) -> None:
    """Make `checkpoint.dir` and `RUN/checkpoints`, if they are not there; the first process calls it at each start.

    Raises InputError if the directory or bucket cannot be written or belongs to another run, if the run has
    checkpoints elsewhere, or if it had some there and nothing is there now.
    """
    wanted = config.checkpoint.dir
    if wanted is None:
        return
    key, run_dir = located(config, "checkpoint.dir"), Path(config.run.dir).resolve()
    folder: Folder = bucket_folder(wanted) if is_in_bucket(wanted) else Path(wanted).resolve()
    link, here = run_dir / SUBDIRECTORY, checkpoint_folder(run_dir)
    if here != folder and (leads_elsewhere(run_dir) or link.is_dir() and any(link.iterdir())):
        raise InputError(
            f"{key}: the run's checkpoints are in {here}: move them to checkpoint.dir and remove {link}, or "
            "restore checkpoint.dir."
        )
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        if (name := _owner(folder, run_dir, key, leads_elsewhere(run_dir))) is None:
            raise InputError(
                f"{key}: the run's checkpoints were there ({link} leads there), but nothing is there now: mount or "
                f"restore it; if they are gone for good, remove {link}, and the run begins at step 0."
            )
        if name != str(run_dir):
            raise InputError(
                f"{key} has the checkpoints of run.dir={name}: choose another directory, or write {run_dir} into "
                f"{folder / OWNER} if that run was moved."
            )
        if not leads_elsewhere(run_dir):
            if link.exists():
                link.rmdir()
            lead_to(folder, link)
    except OSError as error:
        raise InputError(
            f"{key}: {error.filename or folder} cannot be written ({error.strerror}): choose another directory."
        ) from None


def _owner(folder: Folder, run_dir: Path, key: str, was_taken: bool) -> str | None:
    """The run directory whose checkpoints are in a folder; `run_dir` if it had none. `key` is for errors.

    None for a folder without an owner that `was_taken` by this run: its disk may not be mounted.
    """
    if isinstance(folder, Path):
        if not (folder / OWNER).exists():
            if was_taken:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            replace_text(folder / OWNER, f"{run_dir}\n")
        return (folder / OWNER).read_text(encoding="utf-8").strip()
    context = tensorstore.Context({f"{store}_request_retries": {"max_retries": RETRIES} for store in ("gcs", "s3")})
    try:
        store = tensorstore.KvStore.open(key_value_store(folder), context=context).result()
        found = store.read(OWNER).result()
        if was_taken and not found.value:
            return None
        name = found.value.decode().strip() or str(run_dir)
        # Written again at each start, which shows at once whether a save can write; but only over what was read.
        written = store.write(OWNER, f"{name}\n", if_equal=found.stamp.generation).result()
        if not written.generation:  # another run took the folder meanwhile, or nothing can be there
            name = store.read(OWNER).result().value.decode().strip()
            if not name:
                raise ValueError("NOT_FOUND: there is no such bucket")
    except ValueError as error:  # tensorstore raises it for all failures
        raise store_problem(key, error) from None
    return name
