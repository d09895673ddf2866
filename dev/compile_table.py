"""Compile time and memory of large models' train steps for H200s, without a GPU.

    python dev/compile_table.py [--only TEXT] [CONFIG [section.key=value ...] --gpus N]

Compiles each row of ROWS, or the given config, in its own process, one at a time, and prints a Markdown table: seconds
of tracing and lowering, seconds of XLA, the peak memory of the compiling process, and XLA's memory per device. Times
are those of this machine: leave it idle. Needs jax's CUDA plugin, like hlo_counts.py.
"""

import argparse
import sys
from itertools import groupby
from pathlib import Path

from compile_row import compile_apart

from megajax.console import user_errors
from megajax.errors import InputError
from megajax.tools.plan.compile import require_plugin

# config, overrides, GPUs
ROWS = (
    ("configs/llama3_8b.yaml", "", 8),
    ("configs/llama3_8b.yaml", "mesh.fsdp=2 batch.num_microbatches=1 batch.global_size=2", 2),
    ("configs/llama3_8b.yaml", "mesh.fsdp=2 batch.num_microbatches=1 batch.global_size=2 kernels.scan_unroll=1", 2),
    (
        "configs/llama3_70b.yaml",
        "mesh.data=-1 mesh.fsdp=8 mesh.tensor=1 batch.global_size=512 batch.num_microbatches=1",
        512,
    ),
    ("configs/mixtral_8x22b.yaml", "", 128),
    ("configs/qwen3_235b.yaml", "", 256),
    ("configs/gpt3_175b.yaml", "mesh.pipeline=8 mesh.data=-1 mesh.fsdp=1 batch.num_microbatches=96", 1024),
    ("configs/gpt3_175b.yaml", "", 128),
    ("configs/deepseek_v3.yaml", "", 1024),
    ("configs/deepseek_v3.yaml", "mesh.expert=64", 1024),
    ("configs/llama3_405b.yaml", "batch.global_size=1024", 2048),
)
HEADER = ("config", "GPUs", "layers", "trace + lower s", "XLA s", "compiler GiB", "GiB a device")


def _times(count: int, loops: int, unroll: int) -> str:
    """Text for segments with a body of `unroll` layers and `loops` iterations each."""
    body = f"{loops} × {unroll}" if loops > 1 else f"{unroll}"
    return f"{count} × ({body})" if count > 1 else body


def row(path: str, overrides: list[str], gpus: int) -> str:
    """A row of the table. Raises InputError if the config does not compile."""
    found = compile_apart(path, overrides, gpus)
    segments = groupby(tuple(segment) for segment in found["segments"])
    cells = (
        " ".join([Path(path).stem, *overrides]),
        f"{gpus:,}",
        ", ".join(_times(len([*same]), *each) for each, same in segments),
        f"{found['lower_seconds']:.0f}",
        f"{found['xla_seconds']:.0f}",
        f"{found['compiler_memory'] / 2**30:.1f}",
        f"{found['device_memory']['whole'] / 2**30:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="path of a config; default: the rows of ROWS")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows with this text in their config or overrides")
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        require_plugin()
        rows = [(args.config, " ".join(args.overrides), args.gpus)] if args.config else ROWS
        rows = [r for r in rows if args.only in f"{r[0]} {r[1]}"]
        if not rows:
            raise InputError(f"--only={args.only} is in no row: use part of a config's name, such as mixtral.")
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
        for path, overrides, gpus in rows:
            print(row(path, overrides.split(), gpus), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
