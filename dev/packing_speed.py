"""The speed of packing, and how evenly rows and batches are divided, for lengths drawn from two distributions.

    python -m dev.packing_speed > docs/records/packing.md

Chats: log-normal, median 403 tokens, up to 8,192. Code and books, up to 131,072 tokens: 9 of 10 documents are code
(median 1,097), 1 of 10 is a book (median 29,700).
"""

import time

import numpy as np

from megajax.data.packing import RowPacking, fill_rows, imbalance, pack, spread
from megajax.layout.attention_pairs import AttentionPairs

METHODS = ("sequential", "first_fit", "balanced")
PAIRS = AttentionPairs()
CHATS, WINDOWS, ROWS = 300_000, 8, 512


def chats() -> np.ndarray:
    """The lengths of conversations."""
    rng = np.random.default_rng(1)
    return np.minimum(8192, np.exp(rng.normal(6.0, 1.1, CHATS))).astype(np.int64) + 1


def code_and_books(tokens: int, seed: int) -> np.ndarray:
    """The lengths of documents with this sum."""
    rng, count = np.random.default_rng(seed), tokens // 4000
    is_book = rng.random(count) < 0.1
    lengths = np.where(is_book, np.exp(rng.normal(10.3, 0.9, count)), np.exp(rng.normal(7.0, 1.2, count)))
    lengths = np.minimum(131_072, lengths).astype(np.int64) + 1
    some = int(np.searchsorted(np.cumsum(lengths), tokens))
    return np.append(lengths[:some], tokens - lengths[:some].sum())


def packed_chats(method: str) -> tuple[np.ndarray, int, float]:
    """(the attention of each row, number of conversations, seconds of one core)."""
    lengths, start = chats(), time.process_time()
    order, ends = pack(lengths, 8193, RowPacking(method))
    seconds = time.process_time() - start
    return np.add.reduceat(PAIRS.of(lengths[order]), [0, *ends[:-1]]), len(lengths), seconds


def packed_documents(method: str) -> tuple[np.ndarray, int, float]:
    """(the attention of each row, number of documents, seconds of one core)."""
    rows, documents, seconds, capacity = [], 0, 0.0, 131_073
    for seed in range(WINDOWS):
        lengths = code_and_books(ROWS * capacity, seed)
        documents, start = documents + len(lengths), time.process_time()
        if method == "sequential":
            edges = np.union1d(np.append(0, np.cumsum(lengths)), np.arange(ROWS + 1) * capacity)
            rows.append(np.bincount(edges[:-1] // capacity, PAIRS.of(np.diff(edges))))
            continue
        filled = fill_rows(lengths, ROWS, capacity, RowPacking(method))
        seconds += time.process_time() - start
        rows.append(np.array([PAIRS.of([piece.length for piece in row]).sum() for row in filled]))
    return np.concatenate(rows), documents, seconds


def divided(work: np.ndarray, size: int, parts: int, ordered: bool) -> str:
    """Max / mean of the parts of a batch: the mean of all batches."""
    batches = np.random.default_rng(0).permutation(work)[: len(work) // size * size].reshape(-1, size)
    return f"{np.mean([imbalance(batch[spread(batch)] if ordered else batch, parts) for batch in batches]):.2f}"


def main() -> None:
    """Print the tables."""
    print(
        "# Packing by work\n\n`python -m dev.packing_speed`: max / mean of the attention of the parts of a batch, and"
    )
    print("the packer's speed on one core.\n")
    for name, packed, size in (("chats", packed_chats, 64), ("code and books", packed_documents, 16)):
        shares = [size // 2**k for k in range(size.bit_length())]
        print(f"\n{name}, batches of {size} rows\n")
        print(f"| rows of a device in a microbatch | {' | '.join(map(str, shares))} | rows | documents/s | rows/s |")
        print("|---|" + "---|" * (len(shares) + 3))
        for method in METHODS:
            work, count, seconds = packed(method)
            cells = [divided(work, size, size // share, method == "balanced") for share in shares]
            speed = f"{count / seconds:,.0f} | {len(work) / seconds:,.0f}" if seconds else "- | -"
            speed = f"{len(work):,} | {speed}"
            print(f"| {method} | {' | '.join(cells)} | {speed} |")
    for size in (64, 1024, 4096):
        work, start = np.random.default_rng(0).integers(1, 10**9, size), time.process_time()
        spread(work)
        print(f"\nThe order of a batch of {size:,} rows takes {1000 * (time.process_time() - start):.1f} ms.")


if __name__ == "__main__":
    main()
