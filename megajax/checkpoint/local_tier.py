"""A fast tier of checkpoints on the disk or in the memory of each host, besides the durable ones.

Each process writes the shards of its own devices as raw bytes, so nothing crosses the network and nothing is converted.
They serve a restart of the same processes on the same hosts; every other restart uses the durable checkpoint.

    LOCAL_DIR/RUN/process-P/STEP/data            the distinct shards, one after the other
    LOCAL_DIR/RUN/process-P/STEP/index.json      their slices, shapes, dtypes and offsets; layout; description
    LOCAL_DIR/RUN/process-P/STEP/checksums.json  of both files
"""

import json
import math
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from megajax import cluster, json_files
from megajax.checkpoint import checksums
from megajax.checkpoint.host_memory import copy_of
from megajax.checkpoint.manager import reason
from megajax.checkpoint.storage import Description
from megajax.cluster.cluster import first_of
from megajax.errors import UserError, reading
from megajax.files import is_number
from megajax.json_files import Count, Damaged, damaged

DATA, INDEX, PARTIAL = "data", "index.json", ".partial"
ALIGNMENT = 64  # bytes
WRITERS = 8  # threads of a process that write shards
MOST = 8  # complete steps that a process offers at a start; there are two or three
FITS, DAMAGED, OTHER_LAYOUT = range(3)

type Shard = tuple[str, str]  # the name of an array, and a slice of it


class StoredShard(NamedTuple):
    """A shard in the file of data."""

    name: str
    slice: str
    shape: tuple[Count, ...]
    dtype: str
    offset: Count


class Index(TypedDict):
    """The content of `index.json`."""

    layout: str
    shards: list[StoredShard]
    description: Description


@dataclass(frozen=True)
class LocalCheckpoint:
    """This process's part of a checkpoint; the arrays are read from its file when `tree` is called."""

    step: int
    directory: Path
    description: dict[str, Any]
    shards: Mapping[Shard, np.ndarray]

    def tree(self, abstract: Any) -> Any:
        """The arrays in the form of `abstract`, `ShapeDtypeStruct`s with shardings. All processes call it."""

        def build(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
            assert leaf.sharding is not None
            kind = leaf.sharding.memory_kind
            on_devices = [
                jax.device_put(self.shards[shard], SingleDeviceSharding(device, memory_kind=kind), may_alias=False)
                for device, shard in _needed(path, leaf)
            ]
            return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, on_devices)

        return jax.tree_util.tree_map_with_path(build, abstract)


@dataclass(frozen=True)
class LocalOutcome:
    """The result of a save: its step, bytes of this process, seconds of writing, reason of a failure."""

    step: int
    size: int
    seconds: float
    error: str | None


class LocalTier:
    """The local checkpoints of one run. All processes save the same steps.

    Between saves there are two. The older one is removed when the next save begins, the newer one not before the next
    one is complete on every process: so all processes have a step in common at any time.
    """

    def __init__(self, local_dir: str, run: str, layout: str):
        """`run` is the name of the run's directory there; `layout` what else than shapes decides the shards' meaning.

        Both are the same on all processes.
        """
        self._cluster, self._layout = cluster.current(), layout
        self.directory = Path(local_dir) / run / f"process-{self._cluster.rank}"
        self._thread = ThreadPoolExecutor(1, "local checkpoint")
        self._writing: Future[LocalOutcome] | None = None
        self._common: int | None = None  # the newest step that every process has

    def newest(self, after: int, abstract: Any) -> tuple[LocalCheckpoint | None, str]:
        """The newest step above `after` that every process has undamaged and in the form of `abstract`.

        Otherwise None, and the reason if there are newer steps. A damaged file is a warning on its process. All
        processes call this.
        """
        mine = sorted((step for step in self._steps() if step > after), reverse=True)[:MOST]
        offered = self._cluster.gather(mine)
        common = set(mine).intersection(*offered)
        newest = max((step for steps in offered for step in steps), default=-1)
        why = "" if newest < 0 or newest in common else f"not every process has that of step {newest}"
        for step in sorted(common, reverse=True):
            found, state = self._read(step, abstract)
            states = self._cluster.gather(state)
            if set(states) == {FITS}:
                return found, ""
            problem = "is of another mesh, number of processes or precision"
            if DAMAGED in states:
                damaged = [str(process) for process, state in enumerate(states) if state == DAMAGED]
                problem = f"is damaged on process {', '.join(damaged)}"
            why = why or f"that of step {step} {problem}"
        return None, why

    def prepare(self, keep: int | None) -> None:
        """Make the directory, and remove all steps but `keep`, from which the run goes on, since the run repeats them.

        Raises OSError if the directory cannot be written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self._common = keep
        self._remove_others()

    def save(self, step: int, tree: Any, description: Mapping[str, Any]) -> None:
        """Start writing a tree of arrays; `outcome` must have been called for the previous save.

        Returns when the copies to the host are queued, on CPUs when they are made; then the arrays may be donated.
        """
        assert self._writing is None, "ask for the outcome of the last save first"
        copies = [
            (jax.tree_util.keystr(path), text, copy_of(shard))
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
            for text, shard in {_slice(shard.index, leaf.shape): shard for shard in leaf.addressable_shards}.items()
        ]
        self._writing = self._thread.submit(self._write, step, copies, description)

    @property
    def is_writing(self) -> bool:
        """Whether a save runs, or its outcome was not asked for."""
        return self._writing is not None

    def outcome(self, wait: bool = False) -> LocalOutcome | None:
        """The result of the last save, once; None while it runs (unless `wait`), or if there is no new result."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def remove(self) -> None:
        """Remove all steps: the durable checkpoint is as new. No save runs."""
        shutil.rmtree(self.directory, ignore_errors=True)
        with suppress(OSError):  # not empty, or another process of this host has removed it
            self.directory.parent.rmdir()

    def _write(self, step: int, copies: list, description: Mapping[str, Any]) -> LocalOutcome:
        start, partial = time.perf_counter(), self.directory / f"{step}{PARTIAL}"
        size, error = sum(copy.nbytes for _, _, copy in copies), None
        try:
            self._remove_others()
            partial.mkdir()
            entries = _write_shards(partial / DATA, copies)
            index = {"layout": self._layout, "description": description, "shards": entries}
            (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
            # Nothing is synced: a host that stops loses its memory anyway, and torn files do not fit their checksums.
            if problem := checksums.write(partial, [checksums.compute(partial)]):
                raise OSError(problem)
            partial.rename(self.directory / str(step))
        except Exception as problem:  # a full disk, or an error of a device
            error = reason(problem)
            shutil.rmtree(partial, ignore_errors=True)
        try:  # one answer for all, so that they keep the same step
            failure = f"process {self._cluster.rank}: {error}" if error else ""
            verdict = self._cluster.agree(failure, first_of, "local checkpoint")
        except UserError as problem:  # one is slower, or gone
            verdict = str(problem)
        if not verdict:
            self._common = step
        return LocalOutcome(step, size, time.perf_counter() - start, error or verdict or None)

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self.directory.glob("*") if is_number(path.name)]

    def _remove_others(self) -> None:
        for path in self.directory.iterdir():
            if path.name != str(self._common):
                shutil.rmtree(path)

    def _read(self, step: int, abstract: Any) -> tuple[LocalCheckpoint | None, int]:
        directory = self.directory / str(step)
        try:
            with reading(directory, "remove it"):
                damage = checksums.damage(directory) if checksums.exist(directory) else f"{checksums.NAME} is missing"
                if not damage:
                    index = json_files.read(directory / INDEX, Index, "remove it")
                    return self._open(step, index, abstract)
        except Damaged as error:
            damage = error.problem
        except UserError as error:  # such as a disk with errors
            damage = reason(error)
        warnings.warn(f"the local checkpoint {directory} is damaged ({damage}): it is not used.", stacklevel=2)
        return None, DAMAGED

    def _open(self, step: int, index: Index, abstract: Any) -> tuple[LocalCheckpoint | None, int]:
        leaves = jax.tree_util.tree_leaves_with_path(abstract)
        needed = {shard: leaf for path, leaf in leaves for _, shard in _needed(path, leaf)}
        stored = {(each.name, each.slice): each for each in index["shards"]}
        wanted = {shard: (leaf.sharding.shard_shape(leaf.shape), leaf.dtype.name) for shard, leaf in needed.items()}
        forms = {shard: (stored[shard].shape, stored[shard].dtype) for shard in needed if shard in stored}
        if index["layout"] != self._layout or forms != wanted:
            return None, OTHER_LAYOUT
        directory = self.directory / str(step)
        data = np.memmap(directory / DATA, np.uint8, "r")
        shards = {shard: _view(data, leaf.dtype, stored[shard]) for shard, leaf in needed.items()}
        return LocalCheckpoint(step, directory, {**index["description"]}, shards), FITS


def _write_shards(path: Path, copies: Sequence[tuple[str, str, Any]]) -> list[StoredShard]:
    """Write the copies to one file."""
    entries, offset = [], 0
    for name, text, copy in copies:
        entries.append(StoredShard(name, text, copy.shape, copy.dtype.name, offset))
        offset += -(-copy.nbytes // ALIGNMENT) * ALIGNMENT
    with path.open("wb") as file:
        file.truncate(offset)

    def write(offset: int, copy: Any) -> None:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(np.ascontiguousarray(copy).reshape(-1).view(np.uint8))

    with ThreadPoolExecutor(WRITERS) as threads:
        pairs = zip(entries, copies, strict=True)
        writes = [threads.submit(write, entry.offset, copy) for entry, (_, _, copy) in pairs]
    for each in writes:
        each.result()
    return entries


def _view(data: np.ndarray, dtype: Any, shard: StoredShard) -> np.ndarray:
    end = shard.offset + math.prod(shard.shape) * dtype.itemsize
    if end > data.size:
        raise damaged(INDEX, f"{INDEX} does not fit {DATA}", "remove it")
    return data[shard.offset : end].view(dtype).reshape(shard.shape)


def _needed(path: Any, leaf: Any) -> Iterator[tuple[Any, Shard]]:
    """The shard of an array on each device of this process."""
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        yield device, (jax.tree_util.keystr(path), _slice(index, leaf.shape))


def _slice(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """A shard's slice as text: "0:4,8:16"."""
    return ",".join("{}:{}".format(*part.indices(size)) for part, size in zip(index, shape, strict=True))
