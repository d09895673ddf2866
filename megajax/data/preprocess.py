"""`python -m megajax.data.preprocess`: encodes documents to `P_text_document.bin/.idx`, in input order."""

import argparse
import multiprocessing
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import yaml

from megajax.console import CommandParser, user_errors
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.json_lines import Block, check_inputs, read_blocks, texts
from megajax.data.progress import show_progress
from megajax.data.tokenizers import Tokenizer, end_of_document, load_tokenizer
from megajax.errors import InputError

BLOCKS_AHEAD = 4  # per worker
BAD_SHOWN = 5  # lines that are left out and named


class Encoded(NamedTuple):
    """The tokens of consecutive documents, their lengths, and their bytes in the input file.

    `bad` is the number of lines that were left out, with sentences about the first ones.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    stored_bytes: int
    bad: int
    first_bad: list[str]


@dataclass
class Encoder:
    """Encodes blocks of lines; each worker process has a copy."""

    spec: str
    end_of_document: int | None  # the token appended to each document
    json_key: str
    strict: bool = False
    tokenizer: Tokenizer | None = None

    def __call__(self, block: Block) -> Encoded:
        self.tokenizer = self.tokenizer or load_tokenizer(self.spec)
        dtype = token_dtype(self.tokenizer.vocab_size)
        documents: list[np.ndarray] = []
        bad: list[str] = []
        for number, text in texts(block, self.json_key, None if self.strict else bad):
            try:
                ids = self.tokenizer.encode(text)
            except InputError as error:  # only null:N does not take every text
                bad.append(f"{block.path}, {block.unit} {number}: {error}")
                if self.strict:
                    raise InputError(bad[-1]) from None
                continue
            if ids and self.end_of_document is not None:
                ids.append(self.end_of_document)
            documents.append(np.asarray(ids, dtype))
        lengths = np.asarray([document.size for document in documents], np.int64)
        return Encoded(
            np.concatenate([np.empty(0, dtype), *documents]), lengths, block.stored_bytes, len(bad), bad[:BAD_SHOWN]
        )


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: str,
    *,
    workers: int = 1,
    append_eod: bool = False,
    eod_token: str | None = None,
    json_key: str = "text",
    strict: bool = False,
) -> tuple[str, int, int]:
    """Encodes the documents of JSON-lines or Parquet files, one per line or row, in order; blank lines are skipped.

    Lines without a text are left out, and a warning names the first ones; with `strict` they are InputErrors. A
    document whose text is empty is kept without tokens, as Megatron does. `append_eod` ends each document with the
    tokenizer's end-of-document token, `eod_token` with the token of this name. Returns the prefix of the output,
    `{output_prefix}_{json_key}_document`, and the numbers of documents and tokens. After an InputError older files
    under the prefix are unchanged.
    """
    loaded = load_tokenizer(tokenizer)
    appended = end_of_document(loaded, tokenizer, eod_token) if append_eod or eod_token else None
    size = check_inputs(inputs)
    if output_prefix.endswith("/"):
        raise InputError(f"--output-prefix {output_prefix} is a directory; add a name, such as {output_prefix}my.")
    prefix = f"{output_prefix}_{json_key}_document"
    encoder = Encoder(tokenizer, appended, json_key, strict)
    bad, first_bad = 0, []
    with IndexedWriter(prefix, token_dtype(loaded.vocab_size)) as writer, show_progress(size) as progress:
        for encoded in _map_in_order(encoder, read_blocks(inputs, json_key), workers):
            writer.add_documents(encoded.tokens, encoded.lengths)
            progress.advance(encoded.stored_bytes, encoded.lengths.size, encoded.tokens.size)
            bad, first_bad = bad + encoded.bad, [*first_bad, *encoded.first_bad][:BAD_SHOWN]
        if bad and not writer.num_documents:
            raise InputError(
                f"--input: every line is bad, {bad:,} in all; nothing is written. The first: {first_bad[0]}"
            )
        if not writer.num_tokens:
            found = f'only empty text under "{json_key}"' if writer.num_documents else "no documents"
            raise InputError(f"--input: {', '.join(inputs)} has {found}; nothing is written.")
    if bad:
        more = [f"and {bad - len(first_bad):,} more"] * (bad > len(first_bad))
        lines = "".join(f"\n  {line}" for line in [*first_bad, *more])
        warnings.warn(f"{bad:,} bad lines were left out; --strict stops at the first.{lines}", stacklevel=2)
    return prefix, writer.num_documents, writer.num_tokens


_encoder: Encoder | None = None  # of a worker process


def _set_encoder(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode(block: Block) -> Encoded:
    assert _encoder is not None
    return _encoder(block)


def _map_in_order(encoder: Encoder, blocks: Iterable[Block], workers: int) -> Iterator[Encoded]:
    """Encodes the blocks in worker processes, a bounded number ahead, and yields the results in input order."""
    if workers == 1:
        yield from map(encoder, blocks)
        return
    pending: deque[Future[Encoded]] = deque()
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    with ProcessPoolExecutor(workers, spawn, initializer=_set_encoder, initargs=(encoder,)) as pool:
        try:
            for block in blocks:
                pending.append(_submit(pool, block))
                if len(pending) >= workers * BLOCKS_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise InputError(
                "a worker process was killed, most likely because memory ran out: use fewer --workers."
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, block: Block) -> Future[Encoded]:
    """`pool.submit` with Ctrl-C blocked: it may start a worker, which inherits this and ends with this process."""
    earlier = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return pool.submit(_encode, block)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _worker_count(value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise argparse.ArgumentTypeError(f"{value} is not a number of processes (1 or more)")
    return int(value)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    description = "Encode documents with a tokenizer and write P_text_document.bin and .idx, in input order."
    parser = CommandParser("megajax.data.preprocess", description=description)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines, one document per line, also .gz, .bz2, .xz, .zst; or Parquet, one per row",
    )
    add(
        "--output-prefix",
        required=True,
        metavar="P",
        help="prefix of the output: data/my writes data/my_text_document.bin and .idx",
    )
    add(
        "--tokenizer",
        required=True,
        help="byte, null:N, a folder, a tokenizer.json, a SentencePiece .model, or a .tiktoken file",
    )
    add("--workers", type=_worker_count, default=1, metavar="N", help="processes (default: 1)")
    add("--append-eod", action="store_true", help="end each document with the tokenizer's end-of-document token")
    add("--eod-token", metavar="NAME", help="end each document with this token of the tokenizer instead")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--strict", action="store_true", help="stop at the first bad line instead of leaving it out")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    with user_errors():
        options, start = _parse(arguments), time.perf_counter()
        prefix, documents, tokens = preprocess(
            options.input,
            options.output_prefix,
            options.tokenizer,
            workers=options.workers,
            append_eod=options.append_eod,
            eod_token=options.eod_token,
            json_key=options.json_key,
            strict=options.strict,
        )
    seconds = time.perf_counter() - start
    print(f"{prefix}.bin/.idx: {documents:,} documents, {tokens:,} tokens in {seconds:,.1f} s")
    print("To train on these files, add to the config:")
    data = {"train": prefix, "tokenizer": options.tokenizer}
    if options.eod_token:
        data["end_of_document"] = options.eod_token
    print(yaml.safe_dump({"data": data}, sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
