"""The loader's tokens per second for each kind of data, in the trainer's threads and in worker processes.

    python dev/loader_speed.py --text my.jsonl --tokenizer tokenizer.json

Data is generated; with --text the text is read from a file, and the speed of its first pass is printed too. Each figure
is of an own process that does nothing else, after the first batches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config import Config
from megajax.data.indexed import IndexedWriter
from megajax.data.loader import make_loader, open_datasets

DOCUMENT = 1000  # tokens, on average
VOCABULARY = 32_000
ROWS = 16  # of a batch
KINDS: dict[str, dict[str, Any]] = {
    "synthetic": {"kind": "synthetic"},
    "token files, shuffled": {"train": "{folder}/tokens"},
    "token files, balanced": {"train": "{folder}/tokens", "packing": "balanced", "reset_attention": True},
    "token files, Megatron's order": {"train": "{folder}/tokens", "order": "megatron", "train_samples": 100_000},
    "text": {"kind": "text", "train": "{text}", "tokenizer": "{tokenizer}"},
    "packed chats": {"kind": "chat", "train": "{folder}/chats.jsonl", "tokenizer": "byte"},
}


def generate(folder: Path, tokens: int) -> None:
    """Write token files, text whose words are token ids, and chats of letters."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 2 * DOCUMENT, tokens // DOCUMENT)
    with (
        IndexedWriter(folder / "tokens", np.uint16) as writer,
        open(folder / "text.jsonl", "w", encoding="utf-8") as text,
    ):
        for length in lengths:
            ids = rng.integers(0, VOCABULARY, length)
            writer.add_document(ids)
            text.write(json.dumps({"text": " ".join(map(str, ids))}) + "\n")
    with open(folder / "chats.jsonl", "w", encoding="utf-8") as chats:
        for length in lengths[: len(lengths) // 10]:
            letters = rng.integers(97, 123, length + 1, dtype=np.uint8).tobytes().decode()
            middle = length // 2
            chats.write(json.dumps({"prompt": letters[:middle], "completion": letters[middle:]}) + "\n")


def config_of(options: argparse.Namespace, kind: str, workers: int, cache: str) -> Config:
    """The config of a kind of data."""
    names = {"folder": options.folder, "text": options.text, "tokenizer": options.tokenizer}
    data = {key: value.format(**names) if isinstance(value, str) else value for key, value in KINDS[kind].items()}
    data |= {"workers": workers, "index_cache": str(Path(options.folder, cache))}
    content = {
        "run": {"steps": 1000, "dir": options.folder, "eval_steps": 0},
        "model": {"num_layers": 1, "hidden_size": 64, "num_heads": 1, "vocab_size": 1 << 18},
        "batch": {"global_size": ROWS, "sequence_length": options.sequence_length},
        "data": data,
    }
    return Config.model_validate(content)


def speed(options: argparse.Namespace, kind: str, workers: int) -> float:
    """Tokens per second."""
    config = config_of(options, kind, workers, "cache")
    batches = make_loader(config, split="train", rows=np.arange(ROWS))
    for _ in range(20):  # those that were read ahead while the workers started
        next(batches)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < options.seconds:
        next(batches)
        count += 1
    return count * ROWS * options.sequence_length / (time.perf_counter() - start)


def first_pass(options: argparse.Namespace, workers: int) -> float:
    """Tokens per second when the text is tokenised."""
    start = time.perf_counter()
    samples: Any = open_datasets(config_of(options, "text", workers, f"first-{workers}"))["train"]
    return samples.num_tokens / (time.perf_counter() - start)


def measured(options: argparse.Namespace, kind: str, workers: int, **environment: str) -> float:
    """The figure of another process."""
    given = ["--folder", options.folder, "--text", options.text, "--tokenizer", options.tokenizer]
    given += ["--kind", kind, "--workers", str(workers), "--seconds", str(options.seconds)]
    given += ["--sequence-length", str(options.sequence_length)]
    command = [sys.executable, __file__, *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | environment)
    return float(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="JSON lines or Parquet (default: generated token ids)")
    parser.add_argument("--tokenizer", default=f"null:{VOCABULARY}", help="of the text (default: null)")
    parser.add_argument("--tokens", type=float, default=2e7, help="number of generated tokens (default: 2e7)")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=5, help="of each figure (default: 5)")
    for hidden, of in (("folder", str), ("kind", str), ("workers", int)):
        parser.add_argument(f"--{hidden}", type=of, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        figure = first_pass if options.kind == "first pass" else lambda *given: speed(given[0], options.kind, given[1])
        print(figure(options, options.workers))
        raise SystemExit
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        generate(Path(folder), int(options.tokens))
        if options.text:
            one = measured(options, "first pass", 1, TOKENIZERS_PARALLELISM="false")
            threads, two = measured(options, "first pass", 0), measured(options, "first pass", 2)
            print(f"first pass, tokens/s: one thread {one:,.0f}, threads {threads:,.0f}, two processes {two:,.0f}\n")
        options.text = options.text or f"{folder}/text.jsonl"
        print("| tokens/s | threads | 2 processes |\n|---|---|---|")
        for kind in KINDS:
            print(f"| {kind} | {measured(options, kind, 0):,.0f} | {measured(options, kind, 2):,.0f} |", flush=True)
