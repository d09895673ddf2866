"""Files as torch writes them, without torch: pickles of plain values and of described objects, archives of tensors.

`pickled.py` reads them.
"""

import pickle
import struct
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megajax.megatron.pickled import DTYPES, STORAGES, FilePart

BLOCK_BYTES = 2**26  # of numbers that are written at a time
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}


class Named(NamedTuple):
    """A class or a function, by its name; the reader of the pickle looks it up."""

    module: str
    name: str


class Call(NamedTuple):
    """What a function returns."""

    function: Named
    arguments: tuple[Any, ...]


class Instance(NamedTuple):
    """An object of a class, by its state: its attributes by name, or what its `__setstate__` takes."""

    of: Named
    state: Any


class Pairs(NamedTuple):
    """A dictionary whose keys may be descriptions."""

    pairs: tuple[tuple[Any, Any], ...]


class RecordOfNumbers(NamedTuple):
    """The numbers of a tensor, which are a record of the archive."""

    record: str
    dtype: np.dtype
    count: int


def pickled(value: Any) -> bytes:
    """The pickle (protocol 2, which torch's own reader knows) of plain values and of the objects described above."""
    pickler = _Pickler()
    pickler.add(value)
    return bytes(pickler.out + pickle.STOP)


class _Pickler:
    def __init__(self):
        self.out = bytearray(pickle.PROTO + b"\2")
        self._seen: dict[tuple[type, Any], int] = {}  # texts and names: they are many, and few differ

    def add(self, value: Any) -> None:
        match value:
            case None | bool():
                self.out += {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}[value]
            case int():
                self._add_integer(value)
            case float():
                self.out += pickle.BINFLOAT + struct.pack(">d", value)
            case str():
                encoded = value.encode()
                self._once(value, pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded)
            case np.dtype():
                self.add(Named("torch", _DTYPE_NAMES[value]))
            case Named():
                self._once(value, pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
            case Call():
                self.add(value.function)
                self.add(value.arguments)
                self.out += pickle.REDUCE
            case Instance():
                self.add(value.of)
                self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
                self.add(value.state)
                self.out += pickle.BUILD
            case RecordOfNumbers():
                kind = Named("torch", _STORAGE_NAMES[value.dtype])
                self.add(("storage", kind, value.record, "cpu", value.count))
                self.out += pickle.BINPERSID
            case Pairs():
                self._add_marked([item for pair in value.pairs for item in pair], pickle.EMPTY_DICT, pickle.SETITEMS)
            case tuple():
                self._add_marked(value, b"", pickle.TUPLE)
            case list():
                self._add_marked(value, pickle.EMPTY_LIST, pickle.APPENDS)
            case dict():
                self.add(Pairs(tuple(value.items())))
            case _:
                raise TypeError(f"a {type(value).__name__} is no plain value")

    def _add_integer(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.out += pickle.BININT + struct.pack("<i", value)
        else:
            encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.out += pickle.LONG1 + bytes([len(encoded)]) + encoded

    def _add_marked(self, items: Any, before: bytes, after: bytes) -> None:
        self.out += before + pickle.MARK
        for item in items:
            self.add(item)
        self.out += after

    def _once(self, value: Any, code: bytes) -> None:
        key = type(value), value
        if key in self._seen:
            self.out += pickle.LONG_BINGET + struct.pack("<I", self._seen[key])
        else:
            self._seen[key] = len(self._seen)
            self.out += code + pickle.LONG_BINPUT + struct.pack("<I", self._seen[key])


def tensor(record: str, array: np.ndarray) -> Call:
    """A tensor with the numbers of `array`, which the archive has as a record of this name."""
    strides = [int(np.prod(array.shape[i + 1 :], dtype=int)) for i in range(array.ndim)]
    hooks = Call(Named("collections", "OrderedDict"), ())
    storage = RecordOfNumbers(record, array.dtype, array.size)
    arguments = (storage, 0, tuple(array.shape), tuple(strides), False, hooks)
    return Call(Named("torch._utils", "_rebuild_tensor_v2"), arguments)


def save(file: BinaryIO, value: Any, arrays: Mapping[str, np.ndarray] = {}) -> None:
    """Write, as torch.save does, a value and the numbers of its tensors by the names of their records.

    The archive begins at the file's position.
    """
    with zipfile.ZipFile(FilePart(file, file.tell()), "w") as archive:  # pyright: ignore[reportArgumentType]
        records = {"data.pkl": pickled(value), "byteorder": b"little", "version": b"3\n"}
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
        for name, array in arrays.items():
            numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            info = zipfile.ZipInfo(f"archive/data/{name}")
            with archive.open(info, "w", force_zip64=numbers.size >= 2**31) as record:
                for start in range(0, numbers.size, BLOCK_BYTES):
                    record.write(memoryview(numbers[start : start + BLOCK_BYTES]))
