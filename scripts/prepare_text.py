"""Real text from any machine: the Python standard library's sources as `.bin/.idx`, with a tokenizer.

Writes OUT/train.jsonl and valid.jsonl (every 20th file), OUT/tokenizer.json (byte-level BPE), OUT/train_text_document
and valid_text_document, and finally OUT/summary.json with token counts and the unigram entropy: the validation loss of
a model that knows only token frequencies. A second run with the same options does nothing.
"""

import argparse
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from megajax.data.indexed import IndexedDataset
from megajax.data.preprocess import preprocess
from megajax.errors import UserError
from megajax.files import read_text

SKIPPED = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
VALID_EVERY = 20
TOKENIZER_BYTES = 10_000_000  # of text, the most that the tokenizer is trained on
END_OF_DOCUMENT = "<|endoftext|>"
FILES = ("train.jsonl", "valid.jsonl", "tokenizer.json") + tuple(
    f"{split}_text_document.{suffix}" for split in ("train", "valid") for suffix in ("bin", "idx")
)


def source_files(root: Path) -> list[Path]:
    """The `.py` files under `root` in sorted order, without tests."""
    found = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED]
        found += [Path(directory, name) for name in names if name.endswith(".py")]
    return sorted(found)


def documents(site_packages: bool) -> Iterator[tuple[str, str]]:
    """The name and text of every non-empty UTF-8 source."""
    roots = [sysconfig.get_path("stdlib")]
    if site_packages:
        roots += sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for root in map(Path, roots):
        for path in source_files(root):
            try:
                text = read_text(path)
            except (UnicodeDecodeError, OSError):
                continue
            if text.strip():
                yield path.relative_to(root).as_posix(), text


def write_text(out: Path, site_packages: bool) -> None:
    """Writes train.jsonl and valid.jsonl."""
    with (
        open(out / "train.jsonl", "w", encoding="utf-8") as train,
        open(out / "valid.jsonl", "w", encoding="utf-8") as valid,
    ):
        for number, (name, text) in enumerate(documents(site_packages), start=1):
            file = train if number % VALID_EVERY else valid
            file.write(json.dumps({"source": name, "text": text}) + "\n")


def train_tokenizer(out: Path, vocab_size: int) -> None:
    """Trains a byte-level BPE on train.jsonl, or on evenly spaced documents if it is large."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    step = -(-(out / "train.jsonl").stat().st_size // TOKENIZER_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with open(out / "train.jsonl", encoding="utf-8") as lines:
        chosen = (json.loads(line)["text"] for number, line in enumerate(lines) if number % step == 0)
        tokenizer.train_from_iterator(chosen, trainer)
    tokenizer.save(str(out / "tokenizer.json"))


def unigram_entropy(train: np.ndarray, valid: np.ndarray, vocab_size: int) -> float:
    """Nats per token of `valid` under the token frequencies of `train`, with add-one smoothing."""
    counts, occurrences = (_counts(tokens, vocab_size) for tokens in (train, valid))
    log_probabilities = np.log((counts + 1) / (counts.sum() + vocab_size))
    return float(-(occurrences * log_probabilities).sum() / occurrences.sum())


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, tokens.size, 1 << 24):
        counts += np.bincount(tokens[start : start + (1 << 24)], minlength=vocab_size)
    return counts


def prepare(out: Path, options: dict, workers: int) -> dict:
    """Writes the files unless OUT already has them; returns the summary."""
    summary_path = out / "summary.json"
    if summary_path.is_file() and all((out / name).is_file() for name in FILES):
        summary = json.loads(summary_path.read_text(encoding="utf-8"))
        if summary["options"] == options:
            return summary
    out.mkdir(parents=True, exist_ok=True)
    summary_path.unlink(missing_ok=True)  # the files that it describes are replaced below
    write_text(out, options["site_packages"])
    train_tokenizer(out, options["vocab_size"])
    summary = {"options": options}
    tokens = {}
    for split in ("train", "valid"):
        prefix, count, _ = preprocess(
            [str(out / f"{split}.jsonl")],
            str(out / split),
            str(out / "tokenizer.json"),
            workers=workers,
            append_eod=True,
        )
        tokens[split] = IndexedDataset(prefix).tokens
        summary |= {f"{split}_documents": count, f"{split}_tokens": tokens[split].size}
    summary["unigram_entropy"] = unigram_entropy(tokens["train"], tokens["valid"], options["vocab_size"])
    summary_path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="directory to write to")
    parser.add_argument("--vocab-size", type=int, default=2048, help="of the tokenizer (default: 2048)")
    parser.add_argument("--site-packages", action="store_true", help="add the installed packages' sources")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="default: all cores")
    arguments = parser.parse_args()
    if arguments.vocab_size < 257:
        parser.error(f"--vocab-size {arguments.vocab_size}: give at least 257, the bytes and the end of document")
    options = {
        "python": sys.version,
        "vocab_size": arguments.vocab_size,
        "site_packages": arguments.site_packages,
    }
    try:
        summary = prepare(arguments.out, options, arguments.workers)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    for split in ("train", "valid"):
        print(f"{split}: {summary[f'{split}_documents']:,} documents, {summary[f'{split}_tokens']:,} tokens")
    print(f"unigram entropy of valid: {summary['unigram_entropy']:.4f} nats per token")
    return 0


if __name__ == "__main__":
    sys.exit(main())
