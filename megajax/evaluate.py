"""`python -m megajax.evaluate RUN_OR_HF_FOLDER --data PREFIX_OR_FILE`: loss, perplexity and bits per byte of texts."""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megajax.console import CommandParser, add_model_arguments, user_errors
from megajax.data.indexed import IndexedDataset
from megajax.data.json_lines import check_inputs, read_blocks, texts
from megajax.errors import InputError
from megajax.runtime import accept_missing_cuda

SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".jsonl.xz", ".jsonl.bz2", ".jsonl.zst", ".parquet")
DOCUMENTS_AT_ONCE = 1000


class Document(NamedTuple):
    """A document's tokens, and its bytes in UTF-8 (None: unknown)."""

    tokens: list[int]
    size: int | None


def data_sets(arguments: Sequence[str]) -> dict[str, str]:
    """Paths by name from `[NAME=]PATH`; the name of a bare path is its last part.

    Paths may have equal signs (`date=2024/x.jsonl`): an argument that exists is a path, and names have no slash.
    """
    found: dict[str, str] = {}
    for argument in arguments:
        name, _, path = argument.partition("=")
        exists = Path(argument).exists() or Path(f"{argument}.idx").exists()
        if exists or "/" in name or not path:
            name, path = "", argument
        name = name or Path(path).name
        if name in found:
            raise InputError(f"--data={argument}: another set is called {name}: write NAME={path}.")
        found[name] = path
    return found


def documents(path: str, model: Any, json_key: str) -> Iterator[Document]:
    """The documents of JSON lines or of token files `PREFIX.bin` and `.idx`; errors as in preprocessing."""
    if path.endswith(SUFFIXES):
        check_inputs([path])
        for block in read_blocks([path], json_key):
            for _, text in texts(block, json_key):
                if text:
                    yield Document(model.encode(text, special_tokens=False), len(text.encode()))
        return
    dataset = IndexedDataset(path)
    for i in range(dataset.num_documents):
        tokens = dataset.document(i).tolist()
        if tokens and tokens[-1] in model.stop_tokens:
            tokens = tokens[:-1]
        if tokens and tokens[0] == model.begin_token:  # every document gets it
            tokens = tokens[1:]
        if tokens:
            yield Document(tokens, len(model.tokenizer.decode(tokens).encode()) if model.tokenizer else None)


def evaluate(model: Any, path: str, json_key: str = "text", limit: int | None = None) -> dict[str, Any]:
    """The figures of one set: documents, tokens, loss (nats per token), perplexity, bits per byte.

    Each document is scored by itself, in windows of the model's context, from its first token if the model has a token
    for the beginning or the end of a text, else from its second. Bits per byte is None if the bytes are unknown.
    """
    from megajax.inference.scoring import Scorer, windows

    scorer, prefix = Scorer(model), model.prefix_token
    count = tokens = size = 0
    total, sized = 0.0, True
    stream, pending = documents(path, model, json_key), []
    for i, document in enumerate(stream):
        if limit is not None and i >= limit:
            break
        count += 1
        sized &= document.size is not None
        size += document.size or 0
        pending += windows(document.tokens if prefix is None else [prefix, *document.tokens], model.max_length)
        if len(pending) >= DOCUMENTS_AT_ONCE:
            total, tokens = _added(scorer, pending, total, tokens)
            pending = []
    total, tokens = _added(scorer, pending, total, tokens)
    if not tokens:
        raise InputError(f"--data={path} has no tokens to predict: give a set with text.")
    loss = -total / tokens
    bits = -total / math.log(2) / size if sized and size else None
    return {"documents": count, "tokens": tokens, "loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits}


def _added(scorer: Any, pending: list[Any], total: float, tokens: int) -> tuple[float, int]:
    scores = scorer.scores(pending)
    return total + sum(score.log_likelihood for score in scores), tokens + sum(score.count for score in scores)


def report(results: dict[str, dict[str, Any]]) -> str:
    """A table of the sets, a line each."""
    width = max(4, *map(len, results))
    lines = [f"{'data':{width}}  documents      tokens     loss  perplexity  bits/byte"]
    for name, found in results.items():
        bits = "unknown" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}"
        lines.append(
            f"{name:{width}}  {found['documents']:9,}  {found['tokens']:10,}  {found['loss']:7.4f}"
            f"  {found['perplexity']:10.4g}  {bits:>9}"
        )
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Load the model, score the sets and print their table; `options` are those of the parser below."""
    from megajax.inference.load import load_chosen

    sets = data_sets(options.data)
    model = load_chosen(options)
    results = {name: evaluate(model, path, options.json_key, options.limit) for name, path in sets.items()}
    print(report(results))
    if options.output:
        try:
            Path(options.output).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output={options.output} cannot be written ({error.strerror}): give another.") from None


def main(argv: Sequence[str]) -> int:
    """Print the scores of sets of texts; returns the exit status."""
    parser = CommandParser("megajax.evaluate", description="Loss, perplexity and bits per byte of texts.")
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        metavar="[NAME=]PATH",
        help="JSON lines (.jsonl), or the prefix of .bin and .idx files; may be repeated",
    )
    parser.add_argument("--json-key", default="text", help="key of the text in JSON lines (default: text)")
    parser.add_argument("--limit", type=int, help="only the first documents of each set")
    parser.add_argument("--output", metavar="FILE", help="write the figures as JSON too")
    with user_errors():
        options = parser.parse_args(argv)
        if options.limit is not None and options.limit < 1:
            raise InputError(f"--limit={options.limit} is not a positive number: give at least 1.")
        accept_missing_cuda()
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
