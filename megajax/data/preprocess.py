"""`megajax preprocess`: encodes documents to `P_text_document.bin/.idx`, in input order."""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import yaml

from megajax.command_parser import CommandParser
from megajax.console import user_errors
from megajax.data.encoding import TextEncoder, encode_blocks, write_documents
from megajax.data.index_cache import file_digest
from megajax.data.indexed import IndexedWriter, token_dtype
from megajax.data.journal import Journal
from megajax.data.json_lines import check_inputs, matching_files, read_blocks
from megajax.data.progress import data_size, show_progress
from megajax.data.special_tokens import begin_of_document, end_of_document
from megajax.data.tokenizers import deciding_files, load_tokenizer
from megajax.errors import InputError, counted
from megajax.files import is_number


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: str,
    *,
    workers: int = 1,
    append_eod: bool = False,
    eod_token: str | None = None,
    prepend_bos: bool = False,
    json_key: str = "text",
    strict: bool = False,
    resume: bool = False,
) -> tuple[str, int, int]:
    """Encodes the documents of JSON-lines or Parquet files, one per line or row, in order; blank lines are skipped.

    Lines without a text are left out, and a warning names the first ones; with `strict` they are InputErrors. A
    document whose text is empty is kept without tokens, as Megatron does. `append_eod` ends each document with the
    tokenizer's end-of-document token, `eod_token` with the token of this name; `prepend_bos` begins each one with the
    token that begins a text. `resume` goes on where an interrupted run with the same arguments stopped, if there is
    one, from the last record. Returns the prefix of the output, `{output_prefix}_{json_key}_document` with _ for each
    / of the key, and the numbers of documents and tokens. After an InputError older files under the prefix are
    unchanged.
    """
    loaded = load_tokenizer(tokenizer)
    prepended = begin_of_document(loaded, tokenizer) if prepend_bos else None
    appended = end_of_document(loaded, tokenizer, eod_token) if append_eod or eod_token else None
    size = check_inputs(inputs)
    if output_prefix.endswith("/"):
        raise InputError(f"--output-prefix {output_prefix} is a directory; add a name, such as {output_prefix}my.")
    prefix = f"{output_prefix}_{json_key.replace('/', '_')}_document"
    encoder, dtype = TextEncoder(tokenizer, prepended, appended, json_key, strict), token_dtype(loaded.vocab_size)
    journal = Journal(prefix, _settings(inputs, encoder), dtype.itemsize, resume=resume)
    start = journal.point
    if start.documents:
        print(f"going on after {data_size(start.documents, start.tokens)}", file=sys.stderr)
    with (
        journal,
        IndexedWriter(prefix, dtype, lengths=journal.lengths) as writer,
        show_progress(size - start.stored_bytes) as progress,
    ):
        blocks = encode_blocks(encoder, read_blocks(inputs, json_key, start=start.position), workers)
        write_documents(journal.noting(blocks, writer), writer, progress)
        bad = journal.point.bad
        if not writer.num_tokens:
            found = f'only empty text under "{json_key}"' if writer.num_documents else "no documents"
            raise InputError(f"--input: {', '.join(inputs)} has {found}; nothing is written.")
    if bad.count:
        left_out = f"{counted(bad.count, 'bad line')} left out; --strict stops at the first."
        warnings.warn(left_out + bad.named(), stacklevel=2)
    return prefix, writer.num_documents, writer.num_tokens


def _settings(inputs: Sequence[str], encoder: TextEncoder) -> dict[str, Any]:
    """All that decides the output, by the names for a sentence."""
    settings: dict[str, Any] = {"--input": list(inputs), "--json-key": encoder.json_key, "--strict": encoder.strict}
    settings |= {"--tokenizer": encoder.spec, "the appended token": encoder.end_of_document}
    settings |= {"the prepended token": encoder.begin_of_document}
    settings |= {f"the hash of {path}": file_digest(path) for path in deciding_files(encoder.spec)}
    for path in inputs:
        status = os.stat(path)
        settings[f"[size, time of change] of {path}"] = [status.st_size, status.st_mtime_ns]
    return settings


def _worker_count(value: str) -> int:
    if not is_number(value) or not int(value):
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
        help="JSON lines, one document per line, also .gz, .bz2, .xz, .zst; or Parquet, one per row; globs too",
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
    add("--prepend-bos", action="store_true", help="begin each document with the tokenizer's beginning of a text")
    add("--json-key", default="text", metavar="KEY", help="key or column of the text (default: text)")
    add("--strict", action="store_true", help="stop at the first bad line instead of leaving it out")
    add("--resume", action="store_true", help="go on where the same command was interrupted, if it was")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    with user_errors():
        options, start = _parse(arguments), time.perf_counter()
        prefix, documents, tokens = preprocess(
            [file for given in options.input for file in matching_files(given)],
            options.output_prefix,
            options.tokenizer,
            workers=options.workers,
            append_eod=options.append_eod,
            eod_token=options.eod_token,
            prepend_bos=options.prepend_bos,
            json_key=options.json_key,
            strict=options.strict,
            resume=options.resume,
        )
        seconds = time.perf_counter() - start
        print(f"{prefix}.bin/.idx: {data_size(documents, tokens)} in {seconds:,.1f} s")
        print("To train on these files, add to the config:")
        data: dict[str, Any] = {"train": prefix, "tokenizer": options.tokenizer}
        if options.eod_token:
            data["end_of_document"] = options.eod_token
        if options.prepend_bos:
            data["begin_of_document"] = True
        print(yaml.safe_dump({"data": data}, sort_keys=False), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
