"""Preprocessing speed with 1 and 2 workers, beside the loop of Megatron-LM's tool restated in plain Python.

    python dev/preprocess_speed.py --megabytes 40

Text and tokenizer are generated: words of random letters by Zipf's law, and a byte-level BPE tokenizer of 32,000
tokens. The loop parses a line, encodes its text, and appends the tokens to the file, document by document; with 2
workers a pool of processes encodes, 32 lines at a time. Both must write the same `.bin`. Prints a table: tokens per
second of wall time, the best of `--repeat` runs without the start of Python; and per second of CPU time of all
processes, from start to end, which a busy machine changes less.
"""

import argparse
import json
import multiprocessing
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megajax.data.tokenizers import ByteTokenizer

VOCABULARY, WORDS, WORDS_A_DOCUMENT, TRAINED_ON = 32_000, 50_000, 600, 8_000_000
CHUNK = 32  # lines that the pool's processes get at a time
_tokenizer = None  # of this process


def write_text(path: Path, size: int) -> None:
    """JSON lines of `size` bytes of text or a little more."""
    generator, letters = np.random.default_rng(0), np.array(list("etaoinshrdlucmfwygpbvkxqjz"))
    words = ["".join(generator.choice(letters, length)) for length in generator.integers(2, 12, WORDS)]
    shares = 1 / np.arange(1, WORDS + 1)
    written = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            length = generator.integers(1, 2 * WORDS_A_DOCUMENT)
            text = " ".join(words[i] for i in generator.choice(WORDS, length, p=shares / shares.sum()))
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text)


def write_tokenizer(path: Path, source: Path) -> None:
    """A byte-level BPE tokenizer, trained on the start of the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with open(source, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file.readlines(TRAINED_ON)]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def _load(spec: str) -> None:
    global _tokenizer
    if spec == "byte":
        _tokenizer = ByteTokenizer().encode
    else:
        tokenizer = Tokenizer.from_file(spec)
        _tokenizer = lambda text: tokenizer.encode(text).ids  # noqa: E731


def _encode(line: str) -> list[int]:
    assert _tokenizer is not None
    return _tokenizer(json.loads(line)["text"])


def loop(source: Path, spec: str, prefix: Path, workers: int) -> float:
    """The seconds of the plain loop, which writes `PREFIX.bin`."""
    start, lengths = time.perf_counter(), []
    with open(source, encoding="utf-8") as lines, open(f"{prefix}.bin", "wb") as out:
        for ids in _encoded(lines, spec, workers):
            out.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    return time.perf_counter() - start


def _encoded(lines: Iterable[str], spec: str, workers: int) -> Iterator[list[int]]:
    if workers == 1:
        _load(spec)
        yield from map(_encode, lines)
    else:
        with multiprocessing.Pool(workers, _load, [spec]) as pool:
            yield from pool.imap(_encode, lines, CHUNK)


def run(command: list[str]) -> tuple[float, float]:
    """The seconds that a command prints, and those of CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = re.search(r"in ([\d,.]+) s", out)
    assert seconds is not None, out
    return float(seconds[1].replace(",", "")), after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=40, help="of text")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--loop", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loop:
        source, spec, prefix, workers = options.loop
        print(f"in {loop(Path(source), spec, Path(prefix), int(workers)):.3f} s")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = folder / "text.jsonl"
        write_text(source, options.megabytes * 1_000_000)
        write_tokenizer(folder / "tokenizer.json", source)
        print("| tokenizer | workers | | tokens/s | tokens per CPU second |\n|---|---|---|---|---|")
        for label, spec in (("BPE", str(folder / "tokenizer.json")), ("byte", "byte")):
            for workers in map(str, (1, 2)):
                given = ["--input", str(source), "--tokenizer", spec, "--output-prefix", f"{folder}/own"]
                own = ["-m", "megajax.data.preprocess", *given, "--workers", workers]
                plain = [__file__, "--loop", str(source), spec, f"{folder}/plain", workers]
                for who, command in (("megajax", own), ("plain loop", plain)):
                    seconds, cpu = map(min, zip(*(run(command) for _ in range(options.repeat)), strict=True))
                    tokens = (folder / "plain.bin" if who == "plain loop" else folder / "own_text_document.bin").stat()
                    print(
                        f"| {label} | {workers} | {who} | {tokens.st_size / 2 / seconds:,.0f} | "
                        f"{tokens.st_size / 2 / cpu:,.0f} |",
                        flush=True,
                    )
                assert (folder / "own_text_document.bin").read_bytes() == (folder / "plain.bin").read_bytes()


if __name__ == "__main__":
    main()
