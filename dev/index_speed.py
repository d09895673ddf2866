"""The time and the memory of Megatron's order of samples, for data sets that exist as lengths only.

    python dev/index_speed.py --tokens 1e9 1e10

Documents have 1,000 tokens on average. Prints a table: the peak is that of the process, above numpy's own.
"""

import argparse
import resource
import subprocess
import sys
import time

import numpy as np

from megajax.data.sample_order import count_epochs, gpt_indices


def row(tokens: int, epochs: float, sequence_length: int) -> str:
    """A line of the table."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lengths = np.random.default_rng(0).integers(1, 2000, tokens // 1000, dtype=np.int32)
    total = int(lengths.sum(dtype=np.int64))
    samples = int(epochs * total) // sequence_length
    start = time.perf_counter()
    found = gpt_indices(lengths, samples, sequence_length, 1234)
    seconds = time.perf_counter() - start
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    size = sum(array.nbytes for array in found) / 2**30
    count = count_epochs(total, samples, sequence_length, drop_last=True).count
    return f"| {total:.2g} | {len(lengths):,} | {count} | {samples:,} | {seconds:.1f} | {size:.2f} | {peak:.2f} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, nargs="+", default=[1e9, 1e10])
    parser.add_argument("--epochs", type=float, default=3.5)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--row", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        print(row(int(options.tokens[0]), options.epochs, options.sequence_length))
        raise SystemExit
    print("| tokens | documents | epochs | samples | seconds | index GiB | peak GiB |")
    print("|---|---|---|---|---|---|---|")
    for tokens in options.tokens:  # each in a process of its own, for its peak
        given = ["--row", "--tokens", str(tokens), "--epochs", str(options.epochs)]
        given += ["--sequence-length", str(options.sequence_length)]
        print(
            subprocess.run([sys.executable, __file__, *given], capture_output=True, text=True, check=True).stdout,
            end="",
        )
