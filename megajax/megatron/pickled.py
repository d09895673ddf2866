"""Pickles of torch and Megatron-Core, read without running anything: containers, tensors and a few plain classes.

A pickle names functions that its reader calls. Here a name is looked up in a table of stand-ins that only hold what
they are given; any other name is refused.
"""

import functools
import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from megajax.errors import InputError, shown

Modules = tuple[str, ...]  # beginnings of the names of modules
MOST_BYTES = 2**28  # of a pickle, whose tensors are elsewhere
# torch's dtypes, each with the beginning of the name of its storages' class
STORED_AS = {"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long"}
STORED_AS |= {"int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool"}
DTYPES = {name: np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name) for name in STORED_AS}
STORAGES = {f"{kind}Storage": DTYPES[name] for name, kind in STORED_AS.items()}


class Plain:
    """A stand-in for an object: what it was made of, its state, and its attributes if the state names them."""

    def __init__(self, *made_of: Any):
        self.made_of, self.state = made_of, ()

    def __setstate__(self, state: Any) -> None:
        self.state = state
        if isinstance(state, dict):
            self.__dict__ |= {name: value for name, value in state.items() if isinstance(name, str)}

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(str(self.state))


class TensorInfo(NamedTuple):
    """A tensor of a pickle: the name of its record, and its place in it."""

    record: str
    dtype: np.dtype
    start: int  # in numbers
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """Whether its numbers follow each other in the record, in the order of the rows."""
        expected, strides = 1, []
        for size in reversed(self.shape):
            strides.append(expected)
            expected *= size
        pairs = zip(self.shape, self.strides, reversed(strides), strict=True)
        return all(size <= 1 or stride == own for size, stride, own in pairs)


def _tensor(storage: Any, start: int, shape: Any, strides: Any, *_: Any) -> TensorInfo:
    record, dtype = storage
    return TensorInfo(record, dtype, int(start), tuple(map(int, shape)), tuple(map(int, strides)))


@functools.cache
def _stand_in(name: str) -> type[Plain]:
    return type(name, (Plain,), {})


# Modules of classes that describe a checkpoint; each becomes a stand-in of its name.
DESCRIPTIONS = ("torch.distributed.checkpoint.", "megatron.core.dist_checkpointing.")
# What a pickle may name: the class or function there → what is called here
ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("argparse", "Namespace"): _stand_in("Namespace"),
    ("types", "SimpleNamespace"): _stand_in("SimpleNamespace"),
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch.serialization", "_get_layout"): str,
    ("_io", "BytesIO"): _stand_in("BytesIO"),
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PurePosixPath"): PurePosixPath,
    **{("torch", name): name for name in STORAGES},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
}


class PlainUnpickler(pickle.Unpickler):
    """An unpickler that calls what ALLOWED has and nothing else.

    Other names are refused, or, if it `holds_others`, become stand-ins that run nothing either; with a tuple, those of
    modules that begin so.
    """

    def __init__(self, file: BinaryIO, source: str, holds_others: bool | Modules):
        super().__init__(file)
        self._source, self._holds_others = source, holds_others

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(DESCRIPTIONS) and "." not in name:
            return _stand_in(name)
        if (module, name) not in ALLOWED:
            if self._holds_others is True or module.startswith(self._holds_others or ()):
                return _stand_in(name)
            raise InputError(
                f"{self._source} names {shown(f'{module}.{name}')}, which a checkpoint of tensors does not need: it "
                "was not read; save the checkpoint again, without other objects."
            )
        return ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """The storage of a tensor: ("storage", class, record, device, numbers) → (record, dtype)."""
        kind, storage, record, *_ = pid
        if kind != "storage" or storage not in STORAGES:
            raise InputError(f"{self._source} has a storage of the unknown type {shown(storage)}: save it again.")
        return str(record), STORAGES[storage]


def load_plain(read: Callable[[], bytes] | bytes, source: str, holds_others: bool | Modules = False) -> Any:
    """The object of a pickle; `holds_others` as in `PlainUnpickler`.

    Raises InputError for a damaged pickle, and for one that names another object.
    """
    data = read if isinstance(read, bytes) else read()
    if len(data) > MOST_BYTES:
        raise InputError(f"{source} has {len(data):,} bytes, which no list of tensors has: save the checkpoint again.")
    try:
        return PlainUnpickler(io.BytesIO(data), source, holds_others).load()
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{source} is damaged (it is nested too deeply): copy it again.") from None
    except MemoryError:
        raise InputError(f"{source} is damaged (a length in it is larger than the memory): copy it again.") from None
    except Exception as error:  # of the unpickler, or of a stand-in that got other arguments
        raise InputError(f"{source} is damaged ({shown(error)}): copy it again.") from None


class SavedTensor(NamedTuple):
    """A tensor in a file that torch.save wrote: where its numbers are."""

    info: TensorInfo
    at: int  # byte of the file


class TorchZip:
    """A file, or a part of one, that torch.save wrote: an archive with a pickle and the records of its storages."""

    def __init__(self, file: BinaryIO, start: int, length: int, source: str, holds_others: bool | Modules = False):
        self._source, self._start = source, start
        self._part = FilePart(file, start, length)
        try:
            self._zip = zipfile.ZipFile(self._part)
            self._members = {name.partition("/")[2]: self._zip.getinfo(name) for name in self._zip.namelist()}
            if self._zip.read(self._members["byteorder"]) != b"little" if "byteorder" in self._members else False:
                raise InputError(f"{source} has numbers of another byte order: save it on a usual machine.")
            self.value = load_plain(lambda: self._zip.read(self._checked("data.pkl")), source, holds_others)
        except (zipfile.BadZipFile, KeyError, OSError, EOFError, NotImplementedError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{source} is damaged ({shown(error)}): copy it again.") from None

    def _checked(self, name: str) -> zipfile.ZipInfo:
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise zipfile.BadZipFile(f"{name} is compressed")
        if member.file_size > self._part.length:
            raise zipfile.BadZipFile(f"{name} is longer than the file")
        return member

    def place(self, tensor: TensorInfo) -> SavedTensor:
        """Where the numbers of a tensor of `value` are."""
        try:
            member = self._checked(f"data/{tensor.record}")
        except (KeyError, zipfile.BadZipFile) as error:
            raise InputError(f"{self._source} is damaged ({shown(error)}): copy it again.") from None
        self._part.seek(member.header_offset + 26)
        lengths = self._part.read(4)  # of the name and of the extra field, which the local header has by itself
        own = 30 + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
        count = int(np.prod(tensor.shape, dtype=object))
        last = (tensor.start + count) * tensor.dtype.itemsize
        first = member.header_offset + own
        if tensor.start < 0 or min(tensor.shape, default=0) < 0 or last > member.file_size:
            raise InputError(f"{self._source} is damaged (a tensor is larger than its record): copy it again.")
        if first + last > self._part.length or not tensor.is_contiguous:
            raise InputError(f"{self._source} has a tensor whose numbers are not side by side: save it again.")
        return SavedTensor(tensor, self._start + first + tensor.start * tensor.dtype.itemsize)


class FilePart(io.RawIOBase):
    """A part of an open file as a file of its own; it grows by what is written at its end."""

    def __init__(self, file: BinaryIO, start: int, length: int = 0):
        super().__init__()
        self._file, self._start, self.length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self.length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        size = max(0, self.length - self._at) if size < 0 else max(0, min(size, self.length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(size)
        self._at += len(data)
        return data

    def write(self, data: Any) -> int:
        self._file.seek(self._start + self._at)
        self._at += self._file.write(data)
        self.length = max(self.length, self._at)
        return len(data)
