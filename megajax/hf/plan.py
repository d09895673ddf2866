"""`hf plan`: the bytes that each process of a mesh reads of a folder, without the mesh's devices."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import PartitionSpec

from megajax.config import AXES, Config
from megajax.errors import counted
from megajax.hf.convert import open_readers
from megajax.model import Transformer, parameters
from megajax.model.upcycling import dense_model
from megajax.sharding import mesh_axes, place_all, stored_rows, unpadded_spec

Bounds = tuple[slice, ...]


class Reads(NamedTuple):
    """What one process reads."""

    size: int  # bytes
    pieces: int  # reads, each of one block of one tensor


def plan(config: Config, sizes: Mapping[str, int], folder: Path, per_process: int) -> list[Reads]:
    """The reads of each process that starts a run of `config` from `folder`, on a mesh of `sizes`.

    Each process has `per_process` devices. Nothing but the headers of the files is read. Raises InputError as reading
    does.
    """
    if config.checkpoint.upcycle:
        config = config.model_copy(update={"model": dense_model(config.model)})
    declared = parameters(Transformer(config.model))
    placements = place_all(declared, sizes, stored_rows(config, sizes["pipeline"]), config.mesh.experts_over)
    total = np.zeros((math.prod(sizes.values()) // per_process, 2), np.int64)
    shapes, allowed = {n: p.shape for n, p in placements.items()}, config.checkpoint.allow_changes
    with open_readers(folder, config.model, shapes, "HF_FOLDER", allowed=allowed) as readers:
        for name, reader in readers.items():
            # A layer's state is on all devices.
            spec = unpadded_spec(placements[name], sizes) if name in placements else PartitionSpec()
            costs: dict[Bounds, Reads] = {}
            seen: set[tuple[int, Bounds]] = set()
            for device, bounds in enumerate(shards(spec, reader.padded, sizes)):
                process = device // per_process
                if (process, bounds) not in seen:  # a process reads a shard once for all its devices
                    seen.add((process, bounds))
                    if bounds not in costs:
                        costs[bounds] = Reads(*reader.cost(bounds))
                    total[process] += costs[bounds]
    return [Reads(*row) for row in total.tolist()]


def shards(spec: PartitionSpec, shape: tuple[int, ...], sizes: Mapping[str, int]) -> Iterator[Bounds]:
    """The block of an array that each device of a mesh holds, in the order of the mesh's devices."""
    entries: list[Any] = [mesh_axes(entry) for entry in spec]
    entries += [()] * (len(shape) - len(entries))
    for at in np.ndindex(*(sizes[axis] for axis in AXES)):
        position = dict(zip(AXES, at, strict=True))
        bounds = []
        for length, axes in zip(shape, entries, strict=True):
            index, count = 0, 1
            for axis in axes:
                index, count = index * sizes[axis] + position[axis], count * sizes[axis]
            bounds.append(slice(index * length // count, (index + 1) * length // count))
        yield tuple(bounds)


def report(reads: list[Reads], per_process: int, folder_bytes: int) -> str:
    """The plan as text: a line for each process, and a summary."""
    lines = [f"process {i:>4}  {size / 1e9:10.3f} GB  {pieces:>7} pieces" for i, (size, pieces) in enumerate(reads)]
    most, total = max(reads), sum(size for size, _ in reads)
    lines.append(
        f"{counted(len(reads), 'process')} of {counted(per_process, 'device')}: {total / 1e9:,.1f} GB, of a folder of "
        f"{folder_bytes / 1e9:,.1f} GB; the largest share is {most.size / 1e9:,.3f} GB, of process {reads.index(most)}"
    )
    return "\n".join(lines)
