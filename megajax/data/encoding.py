"""Documents of JSON-lines and Parquet files to tokens: in worker processes, in the order of the input."""

import multiprocessing
import os
import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from megajax.config.extensions import import_extensions
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.json_lines import LineBlock, TextPosition, texts
from megajax.data.progress import Progress
from megajax.data.tokenizers import Tokenizer, load_tokenizer
from megajax.data.workers import end_with_parent, in_order
from megajax.errors import InputError
from megajax.json_files import Count

BLOCKS_AHEAD = 4  # per worker
BAD_SHOWN = 5  # lines that are left out and named


class BadLines(NamedTuple):
    """The number of lines that were left out, and sentences about the first ones."""

    count: Count
    first: list[str]

    def plus(self, later: "BadLines") -> "BadLines":
        """These lines and later ones."""
        return BadLines(self.count + later.count, [*self.first, *later.first][:BAD_SHOWN])

    def named(self) -> str:
        """The sentences, each on a line of its own."""
        more = [f"and {self.count - len(self.first):,} more"] * (self.count > len(self.first))
        return "".join(f"\n  {line}" for line in [*self.first, *more])


class Encoded(NamedTuple):
    """The tokens of consecutive documents of a file, their lengths, their bytes in the file, and where they end."""

    path: str
    tokens: np.ndarray
    lengths: np.ndarray
    stored_bytes: int
    bad: BadLines
    end: TextPosition


@dataclass
class TextEncoder:
    """Encodes blocks of lines; each worker process has a copy. `key_option` is the setting that gave `json_key`."""

    spec: str
    begin_of_document: int | None  # the tokens around each document
    end_of_document: int | None
    json_key: str
    strict: bool = False
    key_option: str = "--json-key"
    tokenizer: Tokenizer | None = None
    extensions: tuple[str, ...] = ()  # `run.extensions`, for worker processes

    def __call__(self, block: LineBlock) -> Encoded:
        self.tokenizer = self.tokenizer or load_tokenizer(self.spec)
        bad: list[str] = []
        located = list(texts(block, self.json_key, None if self.strict else bad, self.key_option))
        dtype = token_dtype(self.tokenizer.vocab_size)
        documents: list[np.ndarray] = []
        for ids in self._encode(self.tokenizer, located, bad):
            try:
                documents.append(np.fromiter(ids, dtype, len(ids)))
            except OverflowError:  # NumPy's, for an integer that the dtype does not have
                self._check([min(ids), max(ids)], self.tokenizer.vocab_size)
                raise
        lengths = np.asarray([document.size for document in documents], np.int64)
        ends = (self.begin_of_document, self.end_of_document)
        before, after = (np.asarray([] if token is None else [token], dtype) for token in ends)
        whole = [part for document in documents if document.size for part in (before, document, after)]
        lengths[lengths > 0] += before.size + after.size
        tokens = np.concatenate([np.empty(0, dtype), *whole])
        self._check([int(tokens.min(initial=0)), int(tokens.max(initial=0))], self.tokenizer.vocab_size)
        left_out = BadLines(len(bad), bad[:BAD_SHOWN])
        return Encoded(block.path, tokens, lengths, block.stored_bytes, left_out, block.end)

    def _check(self, worst: Sequence[int], vocab_size: int) -> None:
        """Raise InputError for a token outside the vocabulary, as an extension may give it."""
        for token in worst:
            if not 0 <= token < max(1, vocab_size):
                raise InputError(
                    f"the tokenizer {self.spec} gave the token id {token}, outside its vocab_size={vocab_size}: "
                    "correct it."
                )

    def _encode(self, tokenizer: Tokenizer, located: Sequence[tuple[str, str]], bad: list[str]) -> Iterator[list[int]]:
        try:
            yield from tokenizer.encode_all([text for _, text in located])
            return
        except InputError:  # only null:N does not take every text
            pass
        for location, text in located:
            try:
                yield tokenizer.encode(text)
            except InputError as error:
                bad.append(f"{location}: {error}")
                if self.strict:
                    raise InputError(bad[-1]) from None


def write_documents(blocks: Iterable[Encoded], writer: IndexedWriter, progress: Progress) -> BadLines:
    """Writes the documents of encoded blocks, in order; returns the lines that were left out.

    Raises InputError if the writer has no document then, because every line is bad.
    """
    bad = BadLines(0, [])
    for encoded in blocks:
        writer.add_documents(encoded.tokens, encoded.lengths)
        progress.advance(encoded.stored_bytes, encoded.lengths.size, encoded.tokens.size)
        bad = bad.plus(encoded.bad)
    if bad.count and not writer.num_documents:
        raise InputError(f"every line is bad, {bad.count:,} in all; nothing is written. The first: {bad.first[0]}")
    return bad


_encoder: TextEncoder | None = None  # of a worker process


def _set_encoder(encoder: TextEncoder) -> None:
    global _encoder
    _encoder = encoder
    end_with_parent()
    import_extensions(encoder.extensions)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores already


def _encode(block: LineBlock) -> Encoded:
    assert _encoder is not None
    return _encoder(block)


def encode_blocks(encoder: TextEncoder, blocks: Iterable[LineBlock], workers: int) -> Generator[Encoded]:
    """Encodes the blocks in worker processes, a bounded number ahead, and yields the results in input order.

    With one worker a tokenizer that has threads uses all cores; else each worker is a process with one thread.
    """
    if workers == 1:
        yield from map(encoder, blocks)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    with ProcessPoolExecutor(workers, spawn, initializer=_set_encoder, initargs=(encoder,)) as pool:
        try:
            yield from in_order(partial(_submit, pool), blocks, workers * BLOCKS_AHEAD)
        except BrokenProcessPool:
            raise InputError(
                "a worker process was killed, most likely because memory ran out: use fewer workers. (A script of "
                'your own must start the run under `if __name__ == "__main__":`, since workers import it.)'
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, block: LineBlock) -> Future[Encoded]:
    """`pool.submit` with Ctrl-C blocked: it may start a worker, which inherits this and ends with this process."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return pool.submit(_encode, block)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)
