"""`megajax inspect PREFIX|CONFIG|RUN`: figures about token files, and samples as the model gets them.

A file is described by its documents: their number, lengths, first and last tokens. A config is described by its splits
and sources, and by one sample as text.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np

from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.console import user_errors
from megajax.data.balance import balance_lines
from megajax.data.chat_samples import ChatSamples
from megajax.data.describe import SOURCES_SHOWN, describe_data
from megajax.data.epochs import resolve_epochs
from megajax.data.fim import open_infilling
from megajax.data.images import SizedPicture
from megajax.data.indexed import IndexedDataset, Tokens, check_integers, id_range
from megajax.data.loader import Documents, find_images, open_datasets
from megajax.data.masking import open_masking
from megajax.data.megatron import MegatronBlend, MegatronSamples, wanted_samples
from megajax.data.remote import RemoteTokens
from megajax.data.samples import BlendedSamples, Changes, DocumentSamples, Packing, Samples, make_batch, sources_in
from megajax.data.tokenizers import Tokenizer, decode_after, load_tokenizer
from megajax.errors import InputError, counted
from megajax.files import CONFIG, check_output, is_number
from megajax.runtime import accept_missing_cuda

if TYPE_CHECKING:
    from megajax.config import Config

FIRST = 32  # tokens by which documents are compared
BAR = 40  # letters
MEASURED = 256  # samples whose padding and counted tokens are counted
AT_ONCE = 1 << 20  # documents, or tokens
MIXING = np.uint64(0x9E3779B97F4A7C15)  # odd, of the hash of a document's first tokens
GREY, BOLD, PLAIN = "\033[90m", "\033[1m", "\033[0m"


def describe_file(dataset: Documents, end: int | None = None) -> list[str]:
    """Lines about token files; `end` is the end-of-document token, None: the most frequent last token.

    Raises InputError for tokens that cannot be ids.
    """
    check_integers(dataset)
    starts = dataset.document_starts()
    lengths = np.diff(starts)
    full = lengths > 0
    count, with_tokens = lengths.size, int(full.sum())
    lines = [
        f"{dataset.prefix}: {counted(count, 'document')}, {counted(len(dataset), 'sequence')}, "
        f"{counted(dataset.tokens.size, 'token')}, {dataset.dtype.name}"
    ]
    if not with_tokens:
        return lines
    lines += length_lines(lengths)
    lines.append(f"  {_share(count - with_tokens, count)} of the documents are empty")
    if isinstance(dataset.tokens, RemoteTokens):
        return [*lines, "  the documents' first and last tokens are not read, because the file is remote"]
    tokens, blocks = dataset.tokens, range(0, dataset.tokens.size, AT_ONCE)
    ranges = [id_range(tokens[start : start + AT_ONCE], dataset.token_file, start) for start in blocks]
    lines.append(f"  token ids from {min(least for least, _ in ranges)} to {max(most for _, most in ranges)}")
    repeated = repeated_starts(dataset.tokens, starts)
    lines.append(f"  {_share(repeated, with_tokens)} begin as an earlier one (the first {FIRST} tokens)")
    tokens, counts = np.unique(dataset.tokens[starts[1:][full] - 1], return_counts=True)
    which = "the end-of-document token" if end is not None else "the most frequent last token"
    end = int(tokens[counts.argmax()]) if end is None else end
    lines.append(f"  {_share(float(counts[tokens == end].sum()), with_tokens)} end with token {end}, {which}")
    return lines


def length_lines(lengths: np.ndarray) -> list[str]:
    """The mean, quantiles and a histogram of lengths in tokens, by powers of two."""
    median, most = np.quantile(lengths, [0.5, 0.9])
    lines = [
        f"  tokens per document: mean {lengths.mean():,.1f}, median {median:,.0f}, 90 % up to {most:,.0f}, longest "
        f"{lengths.max():,}"
    ]
    powers = np.frexp(lengths)[1]  # 0 for 0, 1 for 1, 2 for 2 and 3, ...
    first, counts = int(powers.min()), np.bincount(powers)
    for power in range(first, counts.size):
        low, high = (0, 0) if power == 0 else (1 << (power - 1), (1 << power) - 1)
        name = f"{low:,}" if low == high else f"{low:,}-{high:,}"
        bar = "#" * int(np.ceil(BAR * counts[power] / counts.max()))
        lines.append(f"  {name:>27} {counts[power]:>13,} {bar}".rstrip())
    return lines


def repeated_starts(tokens: Tokens, starts: np.ndarray) -> int:
    """The number of documents with tokens whose first 32 tokens are those of an earlier document."""
    hashes = []
    for first in range(0, starts.size - 1, AT_ONCE):
        some = starts[first : first + AT_ONCE + 1]
        lengths = np.diff(some)
        some, lengths = some[:-1][lengths > 0], lengths[lengths > 0]
        hashed = np.zeros(some.size, np.uint64)
        for i in range(FIRST):
            token = tokens[np.minimum(some + i, tokens.size - 1)].astype(np.uint64) + np.uint64(1)
            hashed = (hashed + np.where(lengths > i, token, np.uint64(0))) * MIXING
            hashed ^= hashed >> np.uint64(29)
        hashes.append(hashed)
    every = np.concatenate(hashes)
    return every.size - np.unique(every).size


def describe_samples(config: "Config", split: str, samples: Samples, colour: bool, number: int = 0) -> list[str]:
    """Lines about a split's sources and the sample `number` as text; `colour` for a terminal."""
    data = config.data
    packing = Packing.of(config)
    tokenizer = load_tokenizer(data.tokenizer) if data.tokenizer and data.kind != "synthetic" else None
    sources = sources_in(samples)
    lines: list[str] = []
    if isinstance(samples, BlendedSamples) and (read := wanted_samples(config, split)):
        lines.append(f"{split}: tokens of each source in {counted(read, 'sample')}")
        for source, weight in list(zip(sources, samples.weights, strict=True))[:SOURCES_SHOWN]:
            lines.append(f"  {round(read * weight) * config.sample_length:>15,} {_name(source)}")
    for source in sources[:SOURCES_SHOWN]:
        if isinstance(source, DocumentSamples):
            lines += describe_file(source.dataset, tokenizer.end_of_document if tokenizer else None)
        elif isinstance(source, ChatSamples):
            lines += [f"{source.path}:", *length_lines(np.diff(source.starts))]
    checked = min(MEASURED, len(samples)) if isinstance(samples, MegatronSamples | MegatronBlend) else MEASURED
    masking = open_masking(config)
    masks = [make_batch(samples, [i], packing, Changes(masking=masking))["loss_mask"] for i in range(checked)]
    padding = sum(samples.padding(i) for i in range(checked)) / checked / (config.batch.sequence_length + 1)
    lines.append(
        f"first {counted(checked, 'sample')} of {split}: padding {padding:.1%}, the loss counts {np.mean(masks):.1%}"
    )
    if split == "train":
        lines += balance_lines(config, samples)
    changes = Changes(open_infilling(config), masking=masking)
    return [*lines, "", *sample_lines(split, samples, number, packing, tokenizer, colour, changes)]


def sample_lines(
    split: str,
    samples: Samples,
    number: int,
    packing: Packing,
    tokenizer: Tokenizer | None,
    colour: bool,
    changes: Changes,
) -> list[str]:
    """A sample's documents as text, each with its position; tokens that the loss does not count are marked.

    The last token is a target only; with masking it is not there. Without a tokenizer the text is the token ids.
    """
    batch = make_batch(samples, [number], packing, changes)
    row, in_loss = batch["tokens"][0], batch["loss_mask"][0] > 0
    lengths, padding = samples.document_lengths(number), samples.padding(number)
    if changes.masking is None:  # position i predicts token i + 1
        row, in_loss = np.append(row, batch["targets"][0, -1]), np.concatenate([[False], in_loss])
    else:
        lengths = np.diff(np.minimum(np.cumsum([0, *lengths]), row.size))
        lengths = lengths[lengths > 0]
    source, rank = samples, number
    if isinstance(samples, BlendedSamples):
        which, rank = samples.locate(number)
        source = samples.sources[which]
    documents = len(lengths) - (padding > 0)
    mark = "grey" if colour else "in ⟦⟧"
    lines = [
        f"sample {number:,} of {split}, number {rank:,} of {_name(source)}: {counted(row.size, 'token')}, "
        f"{counted(documents, 'document')}, {counted(padding, 'token')} of padding; {mark}: not counted in the loss"
    ]
    ends = np.cumsum(lengths)
    for i, (start, stop) in enumerate(list(zip(ends - lengths, ends, strict=True))[:documents]):
        place = f"position {batch['positions'][0][start]:,}" if start < batch["positions"].size else "a target only"
        title = f"--- document {i + 1}: {counted(stop - start, 'token')}, {place}"
        lines.append(f"{BOLD}{title}{PLAIN}" if colour else title)
        lines.append("".join(_marked(row[start:stop], in_loss[start:stop], tokenizer, colour)))
        lines += [_picture_line(*placed) for placed in samples.pictures(number) if start <= placed.first < stop]
    return lines


def _picture_line(sized: SizedPicture, first: int) -> str:
    return f"  picture {sized.picture.name}: {sized.rows} x {sized.columns} patches, tokens from number {first:,} on"


def write_pictures(config: "Config", samples: Samples, number: int, folder: Path) -> list[str]:
    """Writes the pictures of a sample as the model gets them, PNG files in `folder`; a line about each."""
    images = find_images(config)
    assert images is not None
    lines = list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for i, placed in enumerate(samples.pictures(number)):
        path, image = folder / f"sample_{number}_picture_{i}.png", images.shown(*images.entries_of(placed.sized))
        image.save(path)
        lines.append(f"{path}: {image.width} x {image.height} pixels")
    return lines or [f"sample {number} has no pictures"]


def _marked(tokens: np.ndarray, counted: np.ndarray, tokenizer: Tokenizer | None, colour: bool) -> Iterator[str]:
    """The text of each run of tokens that count, or that do not."""
    before, after = (GREY, PLAIN) if colour else ("⟦", "⟧")
    edges = [0, *(np.flatnonzero(np.diff(counted)) + 1).tolist(), tokens.size]
    for start, stop in zip(edges, edges[1:], strict=False):
        text = _text(tokens[:start].tolist(), tokens[start:stop].tolist(), tokenizer)
        yield text if counted[start] else f"{before}{text}{after}"


def _text(before: list[int], tokens: list[int], tokenizer: Tokenizer | None) -> str:
    """The text of tokens after others: special ones by their names, once with their number if they repeat.

    Control characters are written by their codes.
    """
    if tokenizer is None:
        return " ".join(map(str, tokens)) + " "
    names = {tokenizer.end_of_document: "<end of document>"}
    names |= {tokenizer.token_id(name): name for name in tokenizer.special_tokens}
    parts, start = [], 0
    for name, run in groupby(tokens, names.get):
        stop = start + len(list(run))
        if name is None:
            parts.append(decode_after(tokenizer, [*before, *tokens[:start]], tokens[start:stop]))
        else:
            parts.append(name if stop == start + 1 else f"{name} x {stop - start} ")
        start = stop
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in "".join(parts))


def _name(source: Samples) -> str:
    if isinstance(source, DocumentSamples):
        return source.dataset.prefix
    return source.path if isinstance(source, ChatSamples) else "synthetic tokens"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.2%}"


def _number(value: str) -> int:
    if not is_number(value):
        raise argparse.ArgumentTypeError(f"{value} is not the number of a sample (0 or more)")
    return int(value)


def _config_lines(options: argparse.Namespace, run_dir: Path | None, colour: bool) -> list[str]:
    config = load_config(options.target, options.overrides, run_dir)
    if options.pictures is not None:
        if config.model.vision is None:
            cure = "leave it out"
            raise InputError(f"--pictures: the config has no model.vision, so its samples have no pictures: {cure}.")
        check_output("--pictures", options.pictures, is_folder=True)
    accept_missing_cuda()
    opened, given, number = open_datasets(config), options.split or "train", options.sample or 0
    config = resolve_epochs(config, opened["train"])
    split = next((each for each in (given, f"valid/{given}") if each in opened), None)
    if split is None:
        raise InputError(f"--split={given} is not in the config: choose {', '.join(opened)}.")
    samples = opened[split]
    if isinstance(samples, MegatronSamples | MegatronBlend) and number >= (count := len(samples)):
        raise InputError(
            f"--sample={number}: data.order=megatron has {counted(count, 'sample')} of {split}: give 0 to {count - 1}."
        )
    lines = describe_data(config, opened) + describe_samples(config, split, samples, colour, number)
    return lines + ([] if options.pictures is None else write_pictures(config, samples, number, options.pictures))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    description = "Print figures about token files, or about a config's data with one of its samples as text."
    parser = CommandParser("megajax.data.inspect", description=description)
    what = "prefix of a .bin/.idx pair, or YAML file or directory of a run"
    parser.add_argument("target", metavar="PREFIX|CONFIG|RUN", help=what)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings instead of the config's")
    parser.add_argument("--sample", type=_number, metavar="N", help="sample to show, of a config (default: 0)")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="write the sample's pictures there, as the model gets them"
    )
    parser.add_argument("--split", help="train, valid, test or the NAME of a set (default: train)")
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        run_dir = Path(options.target) if Path(options.target, CONFIG).is_file() else None
        if run_dir is not None:
            options.target = str(run_dir / CONFIG)
        if options.target.endswith((".yaml", ".yml")):
            colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            lines = _config_lines(options, run_dir, colour)
        elif options.overrides or options.split or options.sample is not None or options.pictures is not None:
            raise InputError(
                f"{options.target} is the prefix of token files, which have no samples: give a CONFIG (.yaml) for "
                "--sample, --pictures, --split and section.key=value."
            )
        else:
            with TemporaryDirectory() as cache:
                lines = describe_file(IndexedDataset(options.target, cache=Path(cache)))
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
