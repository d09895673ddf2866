"""Writes a checkpoint in Megatron-Core's distributed format, block by block; `distributed.py` describes the format."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megajax.megatron import METADATA
from megajax.megatron.torch_files import Call, Instance, Named, Pairs, pickled, save, tensor

FILE_BYTES = 5 * 10**9
DCP = "torch.distributed.checkpoint."


class Place(NamedTuple):
    """Where a block of a tensor, or an object, is stored."""

    file: str
    start: int
    length: int


class StoredBlock(NamedTuple):
    """A block of a tensor: its place in the tensor, and in the files."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


class CheckpointWriter:
    """Writes tensors to the files of a folder as they come, and at the end the list of them.

    A tensor may have several names, and a block of its numbers is stored once.
    """

    def __init__(self, folder: Path, file_bytes: int = FILE_BYTES):
        self._folder, self._file_bytes = folder, file_bytes
        self._tensors: dict[str, tuple[tuple[int, ...], np.dtype, list[StoredBlock]]] = {}
        self._objects: dict[str, Place] = {}
        self._file: BinaryIO | None = None
        self._count = 0
        self._nothing: Place | None = None  # of the object None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, names: Iterable[str], block: np.ndarray, at: Sequence[int] = (), sizes: Sequence[int] = ()) -> None:
        """Write a block of a tensor with these names.

        It is all of the tensor but for the leading dimensions, which have `sizes`: there it is at the indices `at`.
        """
        shape = (*(1 for _ in at), *block.shape)
        whole = (*sizes, *block.shape)
        stored = StoredBlock((*at, *(0 for _ in block.shape)), shape, self._save(block.reshape(shape)))
        for name in names:
            self._tensors.setdefault(name, (whole, block.dtype, []))[2].append(stored)

    def add_nothing(self, names: Iterable[str]) -> None:
        """Write the object None with these names."""
        self._nothing = self._nothing or self._save(None)
        for name in names:
            self._objects[name] = self._nothing

    def finish(self, common: Mapping[str, Any]) -> None:
        """Write the list of the tensors, and what all ranks have in common."""
        (self._folder / METADATA).write_bytes(pickled(self._metadata()))
        with (self._folder / "common.pt").open("wb") as file:
            save(file, dict(common))
        text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        (self._folder / "metadata.json").write_text(text, encoding="utf-8")

    def _save(self, block: np.ndarray | None) -> Place:
        if self._file is None or self._file.tell() >= self._file_bytes:
            if self._file is not None:
                self._file.close()
            self._file = (self._folder / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        start = self._file.tell()
        if block is None:
            save(self._file, [None])  # objects are in a list there
        else:
            save(self._file, tensor("0", block), {"0": block})
        return Place(Path(self._file.name).name, start, self._file.tell() - start)

    def _metadata(self) -> Instance:
        tensors = {name: _tensor(*described) for name, described in self._tensors.items()}
        stored = [
            (_index(name, block.offsets), _place(block.place))
            for name, (_, _, blocks) in self._tensors.items()
            for block in blocks
        ]
        stored += [(_index(name, None), _place(place)) for name, place in self._objects.items()]
        return _described(
            "Metadata",
            {
                "state_dict_metadata": tensors | {n: _described("BytesStorageMetadata", {}) for n in self._objects},
                "planner_data": None,
                "storage_data": Pairs(tuple(stored)),
                "storage_meta": None,
            },
        )


def _described(name: str, attributes: Mapping[str, Any]) -> Instance:
    return Instance(Named(f"{DCP}metadata", name), dict(attributes))


def _index(name: str, offsets: tuple[int, ...] | None) -> Instance:
    place = None if offsets is None else _size(offsets)
    return _described("MetadataIndex", {"fqn": name, "offset": place, "index": None})


def _place(place: Place) -> Instance:
    attributes = {"relative_path": place.file, "offset": place.start, "length": place.length}
    return Instance(Named(f"{DCP}filesystem", "_StorageInfo"), attributes)


def _size(sizes: tuple[int, ...]) -> Call:
    return Call(Named("torch", "Size"), (sizes,))


def _tensor(shape: tuple[int, ...], dtype: np.dtype, blocks: Sequence[StoredBlock]) -> Instance:
    layout = Call(Named("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Named(f"{DCP}metadata", "_MEM_FORMAT_ENCODING"), (0,))
    properties = Instance(Named(f"{DCP}metadata", "TensorProperties"), (dtype, layout, False, contiguous, False))
    chunks = [
        _described("ChunkStorageMetadata", {"offsets": _size(block.offsets), "sizes": _size(block.sizes)})
        for block in blocks
    ]
    return _described("TensorStorageMetadata", {"properties": properties, "size": _size(shape), "chunks": chunks})
