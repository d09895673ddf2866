"""The reader of JSON: bytes with a limit, UTF-8, JSON with a limit of its depth, a type, or else one sentence.

pydantic's parser has the limits: 200 levels, numbers of 4,300 digits, no half of a surrogate pair. Of a repeated key
the last value counts, as in Python. NaN and Infinity are numbers for a `float`; `Finite` excludes them.
"""

import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from megajax.errors import ACCESS_CURE, InputError, file_reader, shown
from megajax.files import check_file, read_bytes

MOST_BYTES = 2**26  # of a file
MOST_LINE_BYTES = 2**24
BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Count = Annotated[int, Field(ge=0, lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Damaged(InputError):
    """A file that cannot be read or has other content; `problem` is the reason, for a sentence of the caller."""

    def __init__(self, sentence: str, problem: str = ""):  # the default: pickle gives the sentence alone
        super().__init__(sentence)
        self.problem = problem


def damaged(place: object, problem: str, cure: str) -> Damaged:
    """The error of a file with other content than it should have."""
    return Damaged(f"{place} is damaged ({problem}): {cure}.", problem)


def parse[T](text: str | bytes, place: str, model: type[T], cure: str) -> T:
    """The value of a JSON text, of the type `model`. Raises `Damaged`, with `place`."""
    try:
        return _adapter(model).validate_json(text, strict=True)
    except ValidationError as error:
        raise _sentence(error, place, cure) from None


def check[T](value: object, place: str, model: type[T], cure: str) -> T:
    """A part of a value that was parsed, of the type `model`. Raises `Damaged`, with `place`."""
    try:
        return _adapter(model).validate_python(value, strict=True)
    except ValidationError as error:
        raise _sentence(error, place, cure) from None


@file_reader("path")
def read[T](path: Path, model: type[T], cure: str, most: int = MOST_BYTES) -> T:
    """The value of a JSON file, of the type `model`. Raises `Damaged`, also if there is no such file."""
    try:
        content = read_bytes(path, most)
    except OSError as error:
        raise _unreadable(path, error, cure) from None
    return parse(content.removeprefix(BYTE_ORDER_MARK), str(path), model, cure)


@file_reader("path")
def read_lines[T](path: Path, model: type[T], cure: str, bad: list[Damaged]) -> Iterator[tuple[bytes, T]]:
    """(line, its value of the type `model`) of a file with JSON on each line; the cure is for one line.

    A last line without an end is left out if it is incomplete: its writer is at work, or was killed. Another line
    without such a value is added to `bad`. Raises `Damaged` for a file that cannot be read.
    """
    try:
        check_file(path, sys.maxsize)
        with path.open("rb") as file:
            lines = enumerate(iter(lambda: file.readline(MOST_LINE_BYTES), b""), start=1)
            for number, line in lines:
                try:
                    yield line, parse(line.rstrip(b"\n"), f"{path}, line {number}", model, cure)
                except Damaged as error:
                    if not line.endswith(b"\n") and len(line) < MOST_LINE_BYTES:
                        return
                    bad.append(error)
    except OSError as error:
        raise _unreadable(path, error, ACCESS_CURE) from None


def _unreadable(path: Path, error: OSError, cure: str) -> Damaged:
    problem = error.strerror or str(error)
    if isinstance(error, PermissionError):  # another copy would not help
        cure = ACCESS_CURE
    return Damaged(f"{path} cannot be read ({problem}): {cure}.", problem)


@lru_cache
def _adapter(model: Any) -> TypeAdapter[Any]:
    return TypeAdapter(model)


def _sentence(error: ValidationError, place: str, cure: str) -> Damaged:
    """What is wrong first: that it is not JSON, with line and column, or the key with its value."""
    first = error.errors(include_url=False, include_context=False)[0]
    message = first["msg"]
    if first["type"] == "json_invalid":
        reason = shown(message.removeprefix("Invalid JSON: ").replace(" at line 1 column", " at column"))
        return Damaged(f"{place} is not JSON ({reason}): {cure}.", f"it is not JSON, {reason}")
    key = shown(".".join(map(str, first["loc"])))
    if first["type"] == "missing":
        return damaged(place, f"{key} is missing", cure)
    subject = f"{key}={shown(first['input'])}" if key else shown(first["input"])
    is_about_input = message.startswith("Input should")
    rest = message.removeprefix("Input") if is_about_input else f": {message[:1].lower()}{message[1:]}"
    return damaged(place, subject + rest, cure)
