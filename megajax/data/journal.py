"""The state of an unfinished preprocessing on disk, from which `--resume` goes on."""

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict

import numpy as np

from megajax import json_files
from megajax.data.encoding import BadLines, Encoded
from megajax.data.indexed import IndexedWriter, write_errors
from megajax.data.json_lines import TextPosition
from megajax.errors import InputError, counted, file_reader
from megajax.files import sync
from megajax.json_files import Count

RECORD_SECONDS = 30.0  # between records, at least


@dataclass(frozen=True)
class Point:
    """A border between blocks of the input, and the sums of the blocks before it."""

    position: TextPosition = TextPosition()
    stored_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    bad: BadLines = BadLines(0, [])

    def after(self, encoded: Encoded) -> "Point":
        """The end of the next block."""
        return Point(
            encoded.end,
            self.stored_bytes + encoded.stored_bytes,
            self.documents + encoded.lengths.size,
            self.tokens + encoded.tokens.size,
            self.bad.plus(encoded.bad),
        )


class Sums(TypedDict):
    """Of the blocks before a point."""

    stored_bytes: Count
    documents: Count
    tokens: Count


class JournalRecord(TypedDict):
    """A point on the disk, and the settings of its run."""

    settings: dict[str, Any]
    position: TextPosition
    bad: BadLines
    sums: Sums
    finishing: bool


class Journal:
    """Beside PREFIX.bin.partial: documents' lengths i32 in .lengths.partial, and the last record in .resume.partial.

    `settings` has all that decides the output, by the names that a sentence calls them. With `resume` an earlier run's
    record is read: `point` and `lengths` (None: there is none, begin at the start); InputError if its settings differ
    or its files are damaged. A context manager: the files are removed at the end, or after an exception before the
    first record.
    """

    def __init__(self, prefix: str, settings: Mapping[str, Any], itemsize: int, *, resume: bool):
        self.prefix, self.itemsize = prefix, itemsize
        self.settings = json.loads(json.dumps(settings))
        endings = ("lengths.partial", "resume.partial", "resume.partial.new")
        self._lengths_path, self._record, self._new_record = (Path(f"{prefix}.{ending}") for ending in endings)
        self.point, self.lengths = Point(), None
        if resume and self._record.is_file():
            self._load()
        self._recorded = self.point
        self._last = time.monotonic()

    @file_reader("self.prefix", cure="start again without --resume")
    def _load(self) -> None:
        try:
            values = json_files.read(self._record, JournalRecord, "start again without --resume")
            self._check_settings(values["settings"])
            self.point = Point(values["position"], bad=values["bad"], **values["sums"])
            partial, whole = Path(f"{self.prefix}.bin.partial"), Path(f"{self.prefix}.bin")
            if values["finishing"] and not partial.exists() and whole.exists():  # stopped between the final names
                Path(f"{self.prefix}.idx").unlink(missing_ok=True)
                whole.rename(partial)
            if (found := self._lengths_path.stat().st_size // 4) < self.point.documents:
                raise ValueError(f"{self.point.documents} documents were recorded, {self._lengths_path} has {found}")
            self.lengths = np.fromfile(self._lengths_path, "<i4", self.point.documents)
            size, needed = partial.stat().st_size, self.point.tokens * self.itemsize
            if int(self.lengths.sum(dtype=np.int64)) != self.point.tokens or size < needed:
                raise ValueError(f"{needed} bytes of tokens were recorded, {partial} has {size}")
        except InputError:
            raise
        except (OSError, ValueError) as error:
            raise InputError(
                f"--resume: the partial files of {self.prefix} are damaged ({error}): start again without --resume."
            ) from None

    def _check_settings(self, earlier: Mapping[str, Any]) -> None:
        for name in [*self.settings, *earlier]:
            then, now = (json.dumps(each.get(name)) for each in (earlier, self.settings))
            if then != now:
                raise InputError(
                    f"--resume: {name} is {now}, but was {then} in the interrupted run: give the same again, or start "
                    "without --resume."
                )

    def __enter__(self) -> Self:
        with write_errors(self.prefix):
            self._record.parent.mkdir(parents=True, exist_ok=True)
            if self.lengths is None:
                self._record.unlink(missing_ok=True)  # first: it must not meet other partial files
            self._file = open(self._lengths_path, "wb" if self.lengths is None else "r+b")
            self._file.truncate(4 * self.point.documents)
            self._file.seek(0, os.SEEK_END)
        return self

    def noting(self, blocks: Iterable[Encoded], writer: IndexedWriter) -> Iterator[Encoded]:
        """The blocks; `writer` must have each one's tokens before it takes the next one."""
        for encoded in blocks:
            yield encoded
            with write_errors(self.prefix):
                self._file.write(encoded.lengths.astype("<i4").tobytes())
                self.point = self.point.after(encoded)
                if self.point.tokens and time.monotonic() - self._last >= RECORD_SECONDS:
                    self._write_record(writer)
        if writer.keep:
            with write_errors(self.prefix):
                self._write_record(writer, finishing=True)

    def _write_record(self, writer: IndexedWriter, finishing: bool = False) -> None:
        """`finishing`: from now on the files may get their final names."""
        writer.sync()
        sync(self._file)
        writer.keep = True  # before the record: it needs the tokens
        point = self.point
        sums = {"stored_bytes": point.stored_bytes, "documents": point.documents, "tokens": point.tokens}
        with open(self._new_record, "w", encoding="utf-8") as file:
            values = {"settings": self.settings, "position": point.position, "bad": point.bad, "sums": sums}
            json.dump(values | {"finishing": finishing}, file)
            sync(file)
        self._new_record.replace(self._record)
        self._recorded, self._last = point, time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        with suppress(OSError):  # a full disk fails again here
            self._file.close()
        if kind is not None and self._record.exists():
            warnings.warn(
                f"{self.prefix}.bin.partial is kept: the same command with --resume goes on after "
                f"{counted(self._recorded.documents, 'document')}.",
                stacklevel=3,
            )
        else:
            for path in (self._record, self._new_record, self._lengths_path):
                path.unlink(missing_ok=True)
