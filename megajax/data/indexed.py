"""Megatron's `.bin/.idx` token files: a memory-mapped reader and a streaming writer, bit for bit.

`.idx`, little-endian and packed: magic, u64 version, u8 dtype code, u64 N sequences, u64 boundaries
(documents + 1), i32[N] lengths in tokens, i64[N] byte offsets, i64[documents+1] boundaries as sequence
indices, optional i8[N] modes. `.bin`: the tokens of all sequences, one after the other.
"""

import errno
import mmap
import os
import socket
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from megajax import cluster
from megajax.console import command
from megajax.data.remote import RemoteFile, RemoteTokens
from megajax.errors import InputError, counted, file_reader, not_downloaded
from megajax.files import sync
from megajax.schema.data import is_remote

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPES = {code: np.dtype(name) for code, name in enumerate("u1 i1 <i2 <i4 <i8 <f8 <f4 <u2".split(), start=1)}
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER = struct.Struct("<9sQBQQ")
TEXT_SUFFIXES = (".jsonl", ".json", ".txt")
LARGEST_ID = 2**31 - 1
COPIED = 1 << 24  # tokens of a data set that are copied together
CHECK_BLOCK = 1 << 20  # table entries that are checked together when a file is opened


def token_dtype(vocab_size: int) -> np.dtype:
    """The dtype of `.bin` for a vocabulary: u16 below 65500, else i32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class Tokens(Protocol):
    """All tokens of a data set, an array or what is read like one."""

    @property
    def size(self) -> int: ...
    @property
    def dtype(self) -> np.dtype: ...
    def __getitem__(self, key: Any, /) -> Any: ...


class IndexedDataset:
    """The tokens under `PREFIX.bin` and `PREFIX.idx`, mapped into memory; threads may share it.

    The prefix may be a URL: then what is read is stored in the directory `cache`. `tokens` [all tokens] in file dtype
    are an array, or `RemoteTokens`, of which slices can be read; `lengths` i32[N], `offsets` i64[N] (bytes) and `modes`
    i8[N] or None by sequence; `boundaries` i64[documents+1] as sequence indices. Raises InputError if the files are
    inconsistent, and as `RemoteFile`.
    """

    @file_reader("prefix")
    def __init__(self, prefix: str | Path, *, check: bool = True, cache: Path | None = None):
        """`check` reads the whole index and compares its entries with each other and with the size of `.bin`."""
        self.prefix, self._cache = str(prefix), cache
        self._idx, self._bin = f"{prefix}.idx", f"{prefix}.bin"
        self.token_file = self._bin
        header, size, load = self._open_index()
        code, count, num_boundaries = self._read_header(header, size)
        self.dtype = DTYPES[code]
        self._read_tables(load(), count, num_boundaries)
        self.tokens, bin_size = self._open_tokens()
        self.sizes = [size, bin_size]  # of both files
        if check:
            self._check_boundaries()
            self._check_offsets(bin_size)

    def check_sizes(self, expected: Sequence[int]) -> None:
        """Raises InputError if this process sees files of other sizes than process 0, which has checked them."""
        for name, mine, first in zip((self._idx, self._bin), self.sizes, expected, strict=True):
            if mine != first:
                raise InputError(
                    f"{name} has {counted(str(mine), 'byte')} on host {socket.gethostname()} and {first} for process "
                    "0: give every host the same files."
                )

    def _open_index(self) -> tuple[bytes, int, Callable[[], np.ndarray]]:
        """The header of `.idx`, its size in bytes, and a function that returns all of it, downloaded only then."""
        if is_remote(self.prefix):
            if self._cache is None:
                raise InputError(f"{self.prefix} is remote, but is needed on this machine: copy the files first.")
            file = RemoteFile(self._idx, self._cache)
            return file.read(0, min(file.size, HEADER.size)), file.size, lambda: _map(str(file.whole()))
        if not os.path.exists(self._idx):
            raise InputError(_missing(self.prefix))
        index = _map(self._idx)
        return index[: HEADER.size].tobytes(), index.size, lambda: index

    def _read_header(self, header: bytes, size: int) -> tuple[int, int, int]:
        """(dtype code, sequences, boundaries) of an index of `size` bytes; InputError if they do not fit it."""
        if len(header) < HEADER.size:
            raise InputError(
                f"{self._idx} is truncated: it has {counted(str(size), 'byte')}, but its header takes {HEADER.size}; "
                "write it again."
            )
        magic, version, code, count, num_boundaries = HEADER.unpack(header)
        if magic != MAGIC:
            raise InputError(
                f"{self._idx} is not an index: it starts with {magic!r} instead of {MAGIC!r}; give the "
                "prefix of a .bin/.idx pair."
            )
        if version != VERSION:
            raise InputError(f"{self._idx} has version {version}, only version {VERSION} can be read; write it again.")
        if code not in DTYPES:
            raise InputError(
                f"{self._idx} has unknown dtype code {code}, known are 1 to {len(DTYPES)}; write it again."
            )
        expected = _tables_end(count, num_boundaries)
        if size < expected:
            raise InputError(
                f"{self._idx} is truncated: it has {counted(str(size), 'byte')}, but its header says {expected}; write "
                "it again."
            )
        if size - expected not in (0, count):
            raise InputError(
                f"{self._idx} has {counted(str(size - expected), 'byte')} after its tables, only {count} (a mode for "
                "each sequence) or none fit; write it again."
            )
        return code, count, num_boundaries

    def _open_tokens(self) -> tuple[Tokens, int]:
        """The tokens, and the size of `.bin` in bytes."""
        if self._cache is not None and is_remote(self.prefix):
            file = RemoteFile(self._bin, self._cache)
            tokens, size = RemoteTokens(file, self.dtype), file.size
        elif not os.path.exists(self._bin):
            raise InputError(f"{self._bin} does not exist, although {self._idx} does: write both again.")
        else:
            data = _map(self._bin)
            size = data.size
            tokens = data[: size - size % self.dtype.itemsize].view(self.dtype)
        if size % self.dtype.itemsize:
            raise InputError(
                f"{self._bin} has {counted(str(size), 'byte')}, which is not a multiple of {self._idx}'s token size "
                f"{self.dtype.itemsize}; write both again."
            )
        return tokens, size

    def _read_tables(self, index: np.ndarray, count: int, num_boundaries: int) -> None:
        def table(dtype: str, start: int, length: int) -> np.ndarray:
            return np.frombuffer(index, np.dtype(dtype), count=length, offset=start)

        lengths_end = HEADER.size + 4 * count
        self.lengths = table("<i4", HEADER.size, count)
        self.offsets = table("<i8", lengths_end, count)
        self.boundaries = table("<i8", lengths_end + 8 * count, num_boundaries)
        end = _tables_end(count, num_boundaries)
        self.modes = table("i1", end, count) if index.size > end else None

    def _check_boundaries(self) -> None:
        ends = self.boundaries[[0, -1]].tolist() if self.boundaries.size else []
        if ends != [0, self.lengths.size]:
            raise InputError(
                f"{self._idx} has inconsistent document boundaries: first and last are {ends}, not "
                f"{[0, self.lengths.size]}; write it again."
            )
        for start in range(0, self.boundaries.size, CHECK_BLOCK):
            falls = np.flatnonzero(np.diff(self.boundaries[start : start + CHECK_BLOCK + 1]) < 0)
            if falls.size:
                raise InputError(
                    f"{self._idx} has inconsistent document boundaries: document {start + falls[0]} ends "
                    "before it starts; write it again."
                )

    def _check_offsets(self, bin_size: int) -> None:
        """Sequences must follow each other without gaps, so that a document is one slice of `tokens`."""
        position = 0
        for start in range(0, self.lengths.size, CHECK_BLOCK):
            sizes = self.lengths[start : start + CHECK_BLOCK].astype(np.int64) * self.dtype.itemsize
            ends = position + np.cumsum(sizes)
            wrong = np.flatnonzero((self.offsets[start : start + CHECK_BLOCK] != ends - sizes) | (sizes < 0))
            if wrong.size:
                sequence = start + int(wrong[0])
                raise InputError(
                    f"{self._idx} has inconsistent sequences: sequence {sequence} of length "
                    f"{self.lengths[sequence]} starts at byte {self.offsets[sequence]} instead of "
                    f"{ends[wrong[0]] - sizes[wrong[0]]}; write it again."
                )
            position = int(ends[-1])
        if position != bin_size:
            raise InputError(
                f"{self._bin} has {counted(str(bin_size), 'byte')}, but {self._idx} says {position}: the two do not "
                "belong together or one is damaged; write both again."
            )

    def __reduce__(self) -> Any:
        return _reopen, (self.prefix, self._cache)  # each process maps the file itself

    def __len__(self) -> int:
        return self.lengths.size

    def __getitem__(self, sequence: int) -> np.ndarray:
        """The tokens of one sequence [length], a view of a local file."""
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {len(self)}")
        start = int(self.offsets[sequence]) // self.dtype.itemsize
        return self.tokens[start : start + int(self.lengths[sequence])]

    @property
    def num_documents(self) -> int:
        return self.boundaries.size - 1

    def document_starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """The starts of documents first..last-1 in `tokens`, and the end of the last: i64[last-first+1]."""
        last = self.num_documents if last is None else last
        bounds = self.boundaries[first : last + 1]
        if not len(self):
            return np.zeros(bounds.size, np.int64)
        starts = self.offsets[np.minimum(bounds, len(self) - 1)] // self.dtype.itemsize
        starts[bounds == len(self)] = self.tokens.size
        return starts

    def document(self, document: int) -> np.ndarray:
        """The tokens of one document [length], a view of a local file."""
        start, stop = self.document_starts(document, document + 1)
        return self.tokens[start:stop]


def check_integers(dataset: Any) -> None:
    """Raises InputError for a data set whose tokens are no integers."""
    if dataset.dtype.kind not in "iu":
        raise InputError(f"{dataset.prefix}.idx holds {dataset.dtype.name}: token ids must be integers.")


def id_range(tokens: np.ndarray, token_file: str, first: int) -> tuple[int, int]:
    """The smallest and the largest of a file's tokens from position `first` on; InputError if one cannot be an id."""
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most > LARGEST_ID:
        worst = least if least < 0 else most
        raise InputError(
            f"{token_file} has the token {worst} at position {first + np.flatnonzero(tokens == worst)[0]}: ids are "
            "from 0 to 2**31 - 1; write it again."
        )
    return least, most


def open_checked(prefixes: Sequence[str | Path], cache: Path | None = None) -> list[IndexedDataset]:
    """The data sets of a run: process 0 checks them, the others open files of the same sizes.

    All processes must call this. Raises InputError as `IndexedDataset`.
    """
    checked: list[IndexedDataset] = []

    def check() -> list[list[int]]:
        checked.extend(IndexedDataset(prefix, cache=cache) for prefix in prefixes)
        return [dataset.sizes for dataset in checked]

    expected = cluster.current().first_decides(check)
    if not checked:
        checked = [IndexedDataset(prefix, check=False, cache=cache) for prefix in prefixes]
        for dataset, sizes in zip(checked, expected, strict=True):
            dataset.check_sizes(sizes)
    return checked


def _tables_end(count: int, num_boundaries: int) -> int:
    return HEADER.size + 12 * count + 8 * num_boundaries


def _reopen(prefix: str, cache: Path | None) -> IndexedDataset:
    return IndexedDataset(prefix, check=False, cache=cache)


def _map(path: str) -> np.ndarray:
    """The bytes of a file, mapped read-only."""
    try:
        # A pipe is empty, instead of an endless wait.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if not os.fstat(file.fileno()).st_size:
                return np.empty(0, np.uint8)  # an empty file cannot be mapped
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}): correct the prefix or its permissions.") from None


def _missing(prefix: str) -> str:
    """The sentence for a prefix without an `.idx`, with the most likely prefix."""
    path = Path(prefix)
    is_text = any(suffix in TEXT_SUFFIXES for suffix in path.suffixes)
    problem = f"{prefix}.idx does not exist"
    if path.exists() or is_text:
        problem = f"{prefix} is {'a directory' if path.is_dir() else 'not the prefix of a .bin/.idx pair'}"
    stem = path.parent / (path.name.split(".")[0] if is_text else path.name.removesuffix(".bin").removesuffix(".idx"))
    meant = _nearest(path, "") if path.is_dir() else _nearest(stem.parent, stem.name)
    if meant:
        return f"{problem}: did you mean {meant}?"
    if is_text:
        files = ("--input", prefix, "--output-prefix", stem)
        written = command("preprocess", *files, "--tokenizer", "TOKENIZER")
        as_it_is = "data.kind=text reads texts as they are, and data.kind=chat chats"
        return f"{problem}: {as_it_is}; or write one with `{written}`, and give {stem}_text_document."
    if os.path.exists(f"{prefix}.bin"):
        return f"{problem}, although {prefix}.bin does: write both again."
    return f"{problem}: correct the prefix, or write it with `{command('preprocess')}`{not_downloaded(prefix)}."


def _nearest(folder: Path, name: str) -> Path | None:
    """The prefix in a folder that begins with `name`, as in preprocessing, or else is most similar to it."""
    found = sorted(file.stem for file in folder.glob("*.idx"))
    continued = [stem for stem in found if stem == name or stem.startswith(f"{name}_" if name else "")]
    return next((folder / stem for stem in continued or get_close_matches(name, found)), None)


@contextmanager
def write_errors(prefix: str) -> Iterator[None]:
    """Around writing files under an output prefix: an OSError becomes an InputError that names it."""
    try:
        yield
    except OSError as error:
        space = "free space, or " if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise InputError(
            f"{prefix}.bin and .idx cannot be written ({error.strerror}): {space}choose another directory "
            "(--output-prefix, or data.index_cache)."
        ) from None


class IndexedWriter:
    """Writes `PREFIX.bin` document by document and `PREFIX.idx` at the end, both first under temporary names.

    A context manager: a normal exit renames both files, an exception removes them, or with `keep` leaves the tokens;
    older files under the prefix are unchanged until then. With `lengths` [documents] the writer goes on after these
    documents of one sequence each in the tokens that an earlier one left. Raises InputError if the files cannot be
    written (no permission, disk full) or a token does not fit `dtype`.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type | str,
        *,
        multimodal: bool = False,
        lengths: np.ndarray | None = None,
    ):
        self.prefix = str(prefix)
        self.dtype: np.dtype = np.dtype(dtype).newbyteorder("<")
        self._code = CODES[self.dtype]
        self._lengths, self._boundaries = array("i"), array("q", [0])
        self._modes = array("b") if multimodal else None
        if is_remote(self.prefix):
            raise InputError(f"{prefix}: token files are written to local paths only: write them here, and copy them.")
        self.num_tokens, self.keep = 0, lengths is not None
        with write_errors(self.prefix):
            Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._partial("bin"), "wb" if lengths is None else "r+b")
            if lengths is not None:
                self._add_lengths(lengths)
                self._file.truncate(self.num_tokens * self.dtype.itemsize)
                self._file.seek(0, os.SEEK_END)

    def _partial(self, kind: str) -> str:
        return f"{self.prefix}.{kind}.partial"

    @property
    def num_documents(self) -> int:
        return len(self._boundaries) - 1

    def add_document(self, tokens: Any, lengths: Any = None, modes: Any = None) -> None:
        """Appends a document: tokens [T] in sequences of `lengths` (default: one), `modes` if multimodal."""
        tokens = np.asarray(tokens)
        lengths = np.asarray([tokens.size] if lengths is None else lengths, np.int32)
        assert lengths.sum() == tokens.size, "the sequences' lengths must add up to the document"
        self._write(tokens)
        self.num_tokens += tokens.size
        self._lengths.frombytes(lengths.tobytes())
        self._boundaries.append(len(self._lengths))
        if self._modes is not None:
            self._modes.frombytes(np.broadcast_to(np.asarray(modes, np.int8), lengths.shape).tobytes())

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Appends many documents of one sequence each (none if its length is 0): tokens [sum(lengths)]."""
        assert self._modes is None and lengths.sum() == tokens.size
        self._write(tokens)
        self._add_lengths(lengths)

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends all documents of a data set of the same dtype, which has modes if this one is multimodal."""
        assert dataset.dtype == self.dtype and (dataset.modes is None) == (self._modes is None)
        with write_errors(self.prefix):
            for start in range(0, dataset.tokens.size, COPIED):
                self._file.write(dataset.tokens[start : start + COPIED].tobytes())
        self._boundaries.frombytes((len(self._lengths) + dataset.boundaries[1:]).tobytes())
        self._lengths.frombytes(dataset.lengths.tobytes())
        if self._modes is not None and dataset.modes is not None:
            self._modes.frombytes(dataset.modes.tobytes())
        self.num_tokens += dataset.tokens.size

    def _add_lengths(self, lengths: np.ndarray) -> None:
        self._boundaries.frombytes((len(self._lengths) + np.cumsum(lengths > 0, dtype=np.int64)).tobytes())
        self._lengths.frombytes(lengths[lengths > 0].astype(np.int32).tobytes())
        self.num_tokens += int(lengths.sum(dtype=np.int64))

    def sync(self) -> None:
        """Returns when the tokens so far are on the disk."""
        sync(self._file)

    def _write(self, tokens: np.ndarray) -> None:
        if tokens.size and self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype.type)
            worst = int(tokens.max()) if tokens.max() > limits.max else int(tokens.min())
            if not limits.min <= worst <= limits.max:
                raise InputError(
                    f"{self.prefix}.bin: token {worst} does not fit {self.dtype.name}; use a wider dtype or "
                    "the tokenizer that the dtype was chosen for."
                )
        with write_errors(self.prefix):
            self._file.write(tokens.astype(self.dtype).tobytes())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        try:
            if kind is None:
                with write_errors(self.prefix):
                    self._finish()
        finally:
            with suppress(OSError):  # a full disk fails again here
                self._file.close()
            for ending in ("idx",) if self.keep else ("bin", "idx"):
                Path(self._partial(ending)).unlink(missing_ok=True)

    def _finish(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32) if self._lengths else np.empty(0, np.int32)
        sizes = lengths.astype(np.int64) * self.dtype.itemsize
        with open(self._partial("idx"), "wb") as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._code, lengths.size, len(self._boundaries)))
            index.write(lengths.astype("<i4").tobytes())
            index.write((np.cumsum(sizes) - sizes).astype("<i8").tobytes())
            index.write(np.frombuffer(self._boundaries, np.int64).astype("<i8").tobytes())
            if self._modes is not None:
                index.write(self._modes.tobytes())
            for file in (self._file, index):
                sync(file)
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)  # an older one must not meet the new tokens
        os.replace(self._partial("bin"), f"{self.prefix}.bin")
        os.replace(self._partial("idx"), f"{self.prefix}.idx")
