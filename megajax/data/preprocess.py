"""`python -m megajax.data.preprocess`: JSON lines to `P_text_document.bin/.idx`, on several cores, in input
order.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.tokenizers import Tokenizer, load_tokenizer
from megajax.errors import InputError, UserError

RANGE_BYTES = 1 << 20  # of input, encoded at a time
RANGES_AHEAD = 4  # a worker


class Range(NamedTuple):
    """The lines of a file that begin at bytes start..stop-1."""

    path: str
    start: int
    stop: int


class Encoded(NamedTuple):
    """Tokens of consecutive documents, their lengths, and (byte, what is wrong) of a line that stopped the
    work.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    error: tuple[int, str] | None


@dataclass
class Encoder:
    """Encodes ranges of lines; a copy of it works in each process."""

    spec: str
    append_eod: bool
    json_key: str
    tokenizer: Tokenizer | None = None

    def __call__(self, lines: Range) -> Encoded:
        self.tokenizer = self.tokenizer or load_tokenizer(self.spec)
        dtype, end_of_document = token_dtype(self.tokenizer.vocab_size), self.tokenizer.end_of_document
        documents: list[np.ndarray] = []
        error = None
        with open(lines.path, "rb") as file:
            for position, line in _lines(file, lines):
                try:
                    text = self._text(line)
                    ids = self.tokenizer.encode(text)
                except ValueError as problem:  # UnicodeError too
                    error = (position, str(problem))
                    break
                if self.append_eod and ids and end_of_document is not None:
                    ids.append(end_of_document)
                documents.append(np.asarray(ids, dtype))
        lengths = np.asarray([document.size for document in documents], np.int64)
        return Encoded(np.concatenate([np.empty(0, dtype), *documents]), lengths, error)

    def _text(self, line: bytes) -> str:
        try:
            record = json.loads(line.decode())
        except UnicodeDecodeError:
            raise ValueError("is not UTF-8") from None
        except ValueError as error:
            raise ValueError(f"is not JSON ({error})") from None
        if not isinstance(record, dict):
            raise ValueError("is not a JSON object")
        if self.json_key not in record:
            raise ValueError(f'has no key "{self.json_key}"')
        text = record[self.json_key]
        if not isinstance(text, str):
            raise ValueError(f'holds {type(text).__name__} instead of text under "{self.json_key}"')
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("holds half of a surrogate pair, which is no text") from None
        return text


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: str,
    *,
    workers: int = 1,
    append_eod: bool = False,
    json_key: str = "text",
) -> tuple[str, int, int]:
    """Encodes the documents of JSON-lines files, one a line, in order; empty lines are passed over.

    A document whose text is empty is kept without tokens, as Megatron does. Returns the prefix written,
    `{output_prefix}_{json_key}_document`, and the numbers of documents and tokens. Raises InputError, leaving
    what stood under the prefix untouched.
    """
    loaded = load_tokenizer(tokenizer)
    if append_eod and loaded.end_of_document is None:
        raise InputError(f"--append-eod: {tokenizer} has no end-of-document token; leave the option out.")
    ranges = list(_ranges(inputs))
    prefix = f"{output_prefix}_{json_key}_document"
    encode = Encoder(tokenizer, append_eod, json_key)
    with IndexedWriter(prefix, token_dtype(loaded.vocab_size)) as writer, _progress(ranges) as advance:
        for lines, encoded in zip(ranges, _map_in_order(encode, ranges, workers), strict=True):
            if encoded.error:
                position, problem = encoded.error
                raise InputError(f"{lines.path}, line {_line_number(lines.path, position)} {problem}: mend the line.")
            writer.add_documents(encoded.tokens, encoded.lengths)
            advance(lines.stop - lines.start)
    return prefix, writer.num_documents, writer.num_tokens


def _ranges(inputs: Sequence[str]) -> Iterator[Range]:
    for path in inputs:
        if not Path(path).is_file():
            raise InputError(f"--input: {path} does not exist or is not a file; correct the path.")
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise InputError(f"--input: {path} cannot be read ({error.strerror}); mend its permissions.") from None
        for start in range(0, size, RANGE_BYTES):
            yield Range(path, start, min(start + RANGE_BYTES, size))


def _lines(file: BinaryIO, lines: Range) -> Iterator[tuple[int, bytes]]:
    """The byte position and content of each line of a range that is not blank."""
    position = max(lines.start - 1, 0)
    file.seek(position)
    if lines.start:
        position += len(file.readline())  # the rest of a line of the range before, or its newline
    while position < lines.stop:
        line = file.readline()
        if line.strip():
            yield position, line
        position += len(line)


def _line_number(path: str, position: int) -> int:
    """The line, counted from 1, that begins at a byte position."""
    newlines = 0
    with open(path, "rb") as file:
        while block := file.read(min(RANGE_BYTES, position)):
            newlines += block.count(b"\n")
            position -= len(block)
    return newlines + 1


_encoder: Encoder | None = None  # of a worker process


def _set_encoder(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode(lines: Range) -> Encoded:
    assert _encoder is not None
    return _encoder(lines)


def _map_in_order(encoder: Encoder, ranges: Iterable[Range], workers: int) -> Iterator[Encoded]:
    """Encodes the ranges in processes, a bounded number ahead, and yields in their order."""
    if workers <= 1:
        yield from map(encoder, ranges)
        return
    pending: deque[Future[Encoded]] = deque()
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    with ProcessPoolExecutor(workers, spawn, initializer=_set_encoder, initargs=(encoder,)) as pool:
        try:
            for lines in ranges:
                pending.append(pool.submit(_encode, lines))
                if len(pending) >= workers * RANGES_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _progress(ranges: Sequence[Range]) -> Iterator[Callable[[int], None]]:
    """A progress bar over the input's bytes, on terminals only; yields what moves it on."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=sum(lines.stop - lines.start for lines in ranges))
        yield partial(bar.advance, task)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 done, 2 bad input."""
    parser = argparse.ArgumentParser(prog="python -m megajax.data.preprocess", description=__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="FILE", help="JSON lines, a document each")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="writes P_text_document.bin and .idx")
    parser.add_argument("--tokenizer", required=True, help="byte, a tokenizer.json, or a SentencePiece .model")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--json-key", default="text", help="the key that holds the text (default: text)")
    options = parser.parse_args(arguments)
    try:
        prefix, documents, tokens = preprocess(
            options.input,
            options.output_prefix,
            options.tokenizer,
            workers=options.workers,
            append_eod=options.append_eod,
            json_key=options.json_key,
        )
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{prefix}.bin/.idx: {documents:,} documents, {tokens:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
