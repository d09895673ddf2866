"""The items of a file that is one JSON array, one after the other: such files have gigabytes."""

import codecs
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

ARRAY = re.compile(rb"\s*\[\s*\{")  # the beginning of an array of objects
_NO_SPACE = re.compile(r"\S")
_parse_item = json.JSONDecoder().raw_decode


class ArrayError(ValueError):
    """What is wrong with the array: the rest of a sentence."""


class ArrayReader:
    """Reads the array whose text is `beginning` and then what `read` returns, `piece` bytes or more at a time.

    An item may have `most` characters.
    """

    def __init__(self, beginning: bytes, read: Callable[[int], bytes], piece: int, most: int):
        self._read, self._piece, self._most = read, piece, most
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text, self._at, self._ended = "", 0, False  # before the position nothing is needed
        self._add(beginning)

    def items(self) -> Iterator[Any]:
        """The items. Raises ArrayError."""
        count = 0
        self._take()  # the bracket
        while True:
            count += 1
            yield self._item(count)
            mark = self._take()
            if mark == "]":
                break
            if mark != ",":
                raise ArrayError(f"after item {count} is {repr(mark) if mark else 'its end'}, not a comma or a bracket")
        if self._take():
            raise ArrayError("text follows its end")

    def _add(self, stored: bytes) -> None:
        try:
            self._text = self._text[self._at :] + self._decoder.decode(stored, final=not stored)
        except UnicodeDecodeError:
            raise ArrayError("it is not UTF-8") from None
        self._at, self._ended = 0, not stored

    def _more(self) -> None:
        # As much as is left, so that a long item is parsed a few times only.
        self._add(self._read(max(self._piece, len(self._text) - self._at)))

    def _skip_space(self) -> bool:
        """Whether something follows."""
        while (found := _NO_SPACE.search(self._text, self._at)) is None and not self._ended:
            self._at = len(self._text)
            self._more()
        self._at = len(self._text) if found is None else found.start()
        return found is not None

    def _take(self) -> str:
        """The next character; empty at the end."""
        if not self._skip_space():
            return ""
        self._at += 1
        return self._text[self._at - 1]

    def _item(self, number: int) -> Any:
        self._skip_space()
        while True:
            item, end, problem = None, len(self._text), ""
            try:
                item, end = _parse_item(self._text, self._at)
            except json.JSONDecodeError as error:
                problem = error.msg
            except (ValueError, RecursionError) as error:  # a long number, deep nesting
                problem = str(error)
            mark = _NO_SPACE.search(self._text, end)
            is_whole = self._ended or (mark is not None and mark[0] in ",]")  # else it may go on, as a number does
            if (end if is_whole else len(self._text)) - self._at > self._most:
                raise ArrayError(f"item {number} has more than {self._most >> 20} MiB{problem and f' ({problem})'}")
            if is_whole:
                if problem:
                    raise ArrayError(f"item {number} is not JSON ({problem})")
                self._at = end
                return item
            self._more()
