"""`megajax evaluate RUN_OR_HF_FOLDER --data PATH`: loss, perplexity and bits per byte of texts and chats.

Pairs, and all data of a run without logits, have the loss and the METRICS of the run's own objective.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.command_parser import CommandParser
from megajax.console import add_model_arguments, add_template_arguments, user_errors
from megajax.data.json_lines import matching_files
from megajax.errors import InputError
from megajax.files import check_output
from megajax.runtime import accept_missing_cuda
from megajax.schema.data import sources_of
from megajax.schema.fields import AXES

if TYPE_CHECKING:
    from megajax.inference.language_model import LanguageModel
    from megajax.inference.scored_sets import SetFormat
    from megajax.inference.scoring import ScoredWindow, Scorer

WINDOWS_AT_ONCE = 1000


def data_sets(arguments: Sequence[str]) -> dict[str, str]:
    """Paths by name from `[NAME=]PATH`; the name of a bare path is its last part.

    Paths may have equal signs (`date=2024/x.jsonl`): an argument that exists is a path, and names have no slash.
    """
    found: dict[str, str] = {}
    for argument in arguments:
        name, _, path = argument.partition("=")
        exists = Path(f"{argument}.idx").exists() or any(map(os.path.exists, matching_files(argument)))
        if exists or "/" in name or not path:
            name, path = "", argument
        name = name or Path(path).name
        if name in found:
            raise InputError(f"--data={argument}: another set is called {name}: write NAME={path}.")
        found[name] = path
    return found


def own_sets(run: str) -> tuple[dict[str, str], str | None]:
    """Paths by name of the evaluation data in a run's config, and the key of its texts, None: that of the lines.

    Relative paths may begin in a directory above the run. Raises InputError for a run without such data.
    """
    from megajax.sources import RunSource, above_or_here, find_source

    source = find_source(run, "RUN")
    if not isinstance(source, RunSource) or not ((data := source.config().data).valid or data.valid_sets):
        raise InputError(f"RUN={run} names no evaluation data in data.valid or data.valid_sets: give --data PATH.")
    sets = data_sets([path for path, _ in sources_of(data.valid or ())])
    sets |= {each.name: each.prefix for each in data.valid_sets}
    for name, path in sets.items():
        for end in ("", ".idx"):
            if found := above_or_here(path + end, source.checkpoint.parent.parent):
                sets[name] = str(found).removesuffix(end)
    return sets, data.text_key if data.kind == "text" else None


def evaluate(
    model: "LanguageModel", path: str, reading: "SetFormat | None" = None, limit: int | None = None
) -> dict[str, Any]:
    """The figures of a set: documents, tokens, what is scored, loss (nats per token), perplexity, bits per byte.

    Each document or chat is scored by itself, in windows of the model's context; with `limit` only the first ones.
    Bits per byte is None if the bytes are unknown.
    """
    from megajax.inference.scored_sets import SetFormat, open_set
    from megajax.inference.scoring import Scorer

    scorer, opened = Scorer(model), open_set(path, model, reading or SetFormat())
    count = tokens = size = 0
    total, pending = 0.0, []
    for document in islice(opened.documents, limit):
        count += 1
        size += document.size
        pending += document.windows
        if len(pending) >= WINDOWS_AT_ONCE:
            total, tokens = _added(scorer, pending, total, tokens)
            pending = []
    total, tokens = _added(scorer, pending, total, tokens)
    if not tokens:
        raise InputError(f"--data={path} has no tokens to predict: give a set with text.")
    loss = -total / tokens
    bits = -total / math.log(2) / size if size else None
    figures = {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": bits}
    return {"documents": count, "tokens": tokens, "scored": opened.scored} | figures


def _added(scorer: "Scorer", pending: "list[ScoredWindow]", total: float, tokens: int) -> tuple[float, int]:
    scores = scorer.scores(pending)
    return total + sum(score.log_likelihood for score in scores), tokens + sum(score.count for score in scores)


def report(results: dict[str, dict[str, Any]]) -> str:
    """A table of the sets, a line each."""
    width = max(4, *map(len, results))
    lines = [f"{'data':{width}}  documents      tokens  scored          loss  perplexity  bits/byte"]
    for name, found in results.items():
        bits = "unknown" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f}"
        lines.append(
            f"{name:{width}}  {found['documents']:9,}  {found['tokens']:10,}  {found['scored']:10}"
            f"  {found['loss']:7.4f}  {found['perplexity']:10.4g}  {bits:>9}"
        )
    return "\n".join(lines)


def objective_report(results: dict[str, dict[str, Any]]) -> str:
    """A table of the sets that an objective evaluates, a line each, with a column for each of its METRICS."""
    width = max(4, *map(len, results))
    _, _, *numbers = next(iter(results.values()))
    lines = [f"{'data':{width}}    samples  scored " + "".join(f"  {name:>7}" for name in numbers)]
    for name, found in results.items():
        own = "".join(f"  {found[number]:{max(7, len(number))}.4f}" for number in numbers)
        lines.append(f"{name:{width}}  {found['samples']:9,}  {found['scored']:7}{own}")
    return "\n".join(lines)


def run(options: argparse.Namespace) -> None:
    """Load the model, score the sets and print their table; `options` are those of the parser below."""
    from megajax.inference.load import load_chosen
    from megajax.inference.prompts import chosen_arguments
    from megajax.inference.scored_sets import SetFormat

    sets, json_key = (data_sets(options.data), None) if options.data else own_sets(options.run)
    reading = SetFormat(options.json_key or json_key, chosen_arguments(options))
    results = {} if options.json_key else _by_objective(options, sets)
    if results:
        print(objective_report(results))
    if texts := {name: path for name, path in sets.items() if name not in results}:
        model = load_chosen(options)
        of_texts = {name: evaluate(model, path, reading, options.limit) for name, path in texts.items()}
        print(report(of_texts))
        results |= of_texts
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def _by_objective(options: argparse.Namespace, sets: dict[str, str]) -> dict[str, dict[str, Any]]:
    """The figures of the sets that the run's own objective evaluates, by name; none of a folder of weights."""
    from megajax.inference.load import chosen_mesh
    from megajax.inference.prompts import chosen_arguments
    from megajax.sources import RunSource, find_source
    from megajax.training.own_evaluation import evaluate_by_objective, sets_of_objective

    source = find_source(options.run, "RUN")
    if not isinstance(source, RunSource):
        return {}
    chosen = sets_of_objective(source, sets, are_own=not options.data)
    if not chosen:
        return {}
    locations = {f"mesh.{axis}": "--mesh" for axis in AXES} | ({"data.valid_sets": "--data"} if options.data else {})
    mesh, arguments = chosen_mesh(options), chosen_arguments(options)
    return evaluate_by_objective(source, chosen, mesh, options.dtype, arguments, options.limit, locations)


def main(argv: Sequence[str]) -> int:
    """Print the scores of sets of texts; returns the exit status."""
    what = "Loss, perplexity and bits per byte of texts and chats; of pairs the loss and METRICS of a run's objective."
    parser = CommandParser("megajax.evaluate", description=what)
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        action="append",
        metavar="[NAME=]PATH",
        help="texts, chats or a run's pairs (JSON lines, an array, Parquet, a glob), or the prefix of .bin and .idx"
        " files; may be repeated (default: the run's data.valid and data.valid_sets)",
    )
    parser.add_argument("--json-key", help="key of the text in JSON lines (default: text, if the lines are not chats)")
    parser.add_argument("--limit", type=int, help="read only this many documents, chats or pairs of each set")
    add_template_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the figures as JSON too")
    with user_errors():
        options = parser.parse_args(argv)
        if options.limit is not None and options.limit < 1:
            raise InputError(f"--limit={options.limit} is not a positive number: give at least 1.")
        if options.output is not None:
            check_output("--output", options.output)
        accept_missing_cuda()
        run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
