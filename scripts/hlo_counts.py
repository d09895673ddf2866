"""Counts of the operations that the train step launches on H200s, compiled without a GPU.

    python scripts/hlo_counts.py CONFIG [section.key=value ...] [--gpus N] [--text FILE]
    python scripts/hlo_counts.py --write

The first command counts library calls, collectives, loops and copies of a config's compiled step on N GPUs (default 1;
more than 8 form hosts of 8), and prints XLA's memory per device and the estimate of a run's summary. On stderr it
prints the compile time and whether the memory fits; --text saves the compiled text. The second command writes the
counts of CASES to tests/data/h200_hlo_counts.txt, which a test compares; without arguments they are printed. Needs
jax's CUDA plugin (in the extra `dev`).
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from compile_row import ROOT, run_apart

from megajax.config import load_config
from megajax.console import user_errors
from megajax.errors import InputError
from megajax.estimate.memory import estimate_memory
from megajax.tools.plan.compile import HOST, compile_for_h200, require_plugin, usable_bytes
from megajax.tools.profile import hlo
from megajax.training.step import TrainProgram

GOLDEN = ROOT / "tests/data/h200_hlo_counts.txt"
# The benchmark shapes at their full widths; two layers represent all layers. The last case has loops over layers.
CASES = (
    "configs/llama3_8b_l8.yaml mesh.fsdp=2 mesh.tensor=2 model.num_layers=2 precision.fp8.recipe=delayed --gpus 4",
    "configs/llama3_8b_l16_pipeline.yaml mesh.pipeline=2 model.num_layers=2 pipeline.schedule=zero_bubble --gpus 2",
    "configs/llama3_8b_l8_context.yaml mesh.context=2 model.num_layers=1 kernels.context=ring --gpus 2",
    "configs/mixtral_l2.yaml mesh.data=1 mesh.expert=2 mesh.fsdp=2 remat.policy=full kernels.scan_unroll=1 --gpus 4",
)
LARGE = 2**20  # bytes; smaller copies are not counted
LIBRARY_CALLS = {
    "__cublas$lt$matmul": "cuBLASLt matmul",
    "__cublas$lt$matmul$f8": "cuBLASLt FP8 matmul",
    "__cublas$gemm": "cuBLAS matmul",
    "__cudnn$fmhaSoftmax": "cuDNN attention, forward",
    "__cudnn$fmhaSoftmaxBackward": "cuDNN attention, backward",
}


def describe(ops: Iterable[hlo.Op], memory: dict[str, int]) -> list[str]:
    """One line per kind of operation: their number, their bytes, and the number in loops; then memory.

    A loop's body counts once, twice where XLA has unrolled it. The bytes of a collective are those of the whole array.
    With several hosts, a line has what one sends to others in gathers and reductions.
    """
    counts, sizes, looped = Counter(), Counter(), Counter()
    ops = list(ops)
    for op in ops:
        for kind, size in _kinds(op):
            counts[kind] += 1
            sizes[kind] += size
            looped[kind] += op.loops > 0
    lines = []
    for kind in sorted(counts):
        size = f"{sizes[kind] / 2**20:,.1f} MiB" if sizes[kind] else ""
        loops = f"{looped[kind]} in loops" if looped[kind] else ""
        lines.append(f"  {kind:<28}{counts[kind]:>5}{size:>14}{loops:>14}".rstrip())
    if sent := sum(op.between_hosts(HOST) for op in ops):
        lines.append(f"  {'sent by a host to others':<28}{'':>5}{f'{sent / 2**20:,.1f} MiB':>14}")
    return lines + [f"  {part + ' memory':<28}{size / 2**30:>15.1f} GiB" for part, size in memory.items()]


def estimate_of(program: TrainProgram) -> int:
    """Bytes per device from the estimate in a run's summary, without compilation."""
    return estimate_memory(program.plan, program.placements).total


def verdict(needed: int) -> str:
    """Whether a step that needs this number of bytes per device fits an H200."""
    usable = usable_bytes()
    sizes = f"{needed / 2**30:,.1f} GiB of the {usable / 2**30:,.1f} GiB of an H200 that a run can use"
    return f"it fits: {sizes}" if needed <= usable else f"it does not fit: it needs {sizes}"


def _kinds(op: hlo.Op) -> Iterable[tuple[str, int]]:
    """The kind of an operation in the counts, and its bytes if they matter."""
    if op.kind == "custom-call":
        yield LIBRARY_CALLS.get(op.target, " ".join([op.target, *op.scopes[-1:]])), 0
    elif op.kind in hlo.COLLECTIVES:
        yield op.kind, max(op.operand_bytes, op.result_bytes)
    elif op.kind == "while":
        yield "while loop", 0
    elif op.result_bytes > LARGE and op.only_moves:
        yield "copy above 1 MiB", op.result_bytes
    elif op.result_bytes > LARGE and op.only_converts:
        yield "conversion above 1 MiB", op.result_bytes


def golden(store: Path | None) -> str:
    """The text of every case, each compiled in its own process, two at a time."""
    require_plugin()
    with ThreadPoolExecutor(max_workers=2) as pool:
        stored = [] if store is None else ["--store", str(store)]
        return "\n".join(pool.map(lambda case: run_apart("hlo_counts.py", [*case.split(), *stored]), CASES))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="?", help="path of a config")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--text", type=Path, help="save the compiled text here")
    parser.add_argument("--store", type=Path, help="directory of compiled steps, which are not compiled again")
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.relative_to(ROOT)}")
    args = parser.parse_intermixed_args(arguments)
    with user_errors():
        if args.config is None:
            text = golden(args.store)
            if args.write:
                GOLDEN.write_text(text, encoding="utf-8")
                print(f"wrote {GOLDEN.relative_to(ROOT)}: look at its diff")
            else:
                print(text, end="")
            return 0
        if args.text and not args.text.parent.is_dir():
            raise InputError(f"--text={args.text}: the directory {args.text.parent} does not exist: make it first.")
        start = time.perf_counter()
        step = compile_for_h200(TrainProgram.build, load_config(args.config, args.overrides), args.gpus, args.store)
        text, memory = step.text, step.memory
        print(f"compiled in {time.perf_counter() - start:.0f} s; {verdict(memory['whole'])}", file=sys.stderr)
        if args.text:
            args.text.write_text(text, encoding="utf-8")
        memory["estimated"] = estimate_of(step.program)
        print(" ".join([Path(args.config).stem, *args.overrides, f"on {args.gpus} GPU{'s' * (args.gpus > 1)}"]))
        print("\n".join(describe(hlo.parse(text), memory)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
