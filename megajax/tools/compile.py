"""Compiles a config's train step for GPUs that this machine does not have: does it fit, and what does it launch?

    megajax compile CONFIG [section.key=value ...] [--gpus N]

Prints the library calls, collectives, loops and copies of the compiled step on N GPUs (more than 8 form hosts of 8),
XLA's memory per device, and the estimate of a run's summary. Needs jax's CUDA plugin (in the extra `dev`).
"""

import argparse
import json
import resource
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from megajax.command_parser import CommandParser
from megajax.config import load_config
from megajax.console import user_errors
from megajax.estimate.memory import estimate_memory
from megajax.files import check_output
from megajax.tools.plan import DEVICE_NAMES
from megajax.tools.plan.compile import CompiledStep, compile_for_gpus
from megajax.tools.plan.rates import HOST
from megajax.tools.plan.targets import usable_bytes
from megajax.tools.profile import hlo

LARGE = 2**20  # bytes; smaller copies are not counted
LIBRARY_CALLS = {
    "__cublas$lt$matmul": "cuBLASLt matmul",
    "__cublas$lt$matmul$f8": "cuBLASLt FP8 matmul",
    "__cublas$gemm": "cuBLAS matmul",
    "__cudnn$blockScaledDot": "cuDNN block-scaled matmul",
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


def verdict(needed: int, device: str) -> str:
    """Whether a step that needs this number of bytes per device fits it."""
    usable, article = usable_bytes(device), "a" if device[0] in "bB" else "an"
    sizes = (
        f"{needed / 2**30:,.1f} GiB of the {usable / 2**30:,.1f} GiB of {article} {device.upper()} that a run can use"
    )
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


def figures(step: CompiledStep) -> dict:
    """A compiled step as numbers.

    Layers as (loops, layers of the body) of each segment, seconds of tracing and lowering, seconds of XLA, the peak
    memory of this process, and XLA's memory per device by part, in bytes.
    """
    return {
        "segments": [
            (segment.iterations, segment.layers_per_iteration) for segment in step.program.graph.layers.segments
        ],
        "lower_seconds": step.trace_seconds + step.lower_seconds,
        "xla_seconds": step.compile_seconds,
        "compiler_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10,
        "device_memory": step.memory,
    }


def main(arguments: list[str]) -> int:
    """Compile, and print the counts or the figures; the exit status. XLA reads its flags once per process."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = CommandParser("megajax.tools.compile", description=__doc__, formatter_class=raw)
    parser.add_argument("config", help="path of a config, or the name of one of configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="keys of the config")
    parser.add_argument("--gpus", type=int, default=1, help="number of GPUs (default: 1)")
    parser.add_argument("--device", default="h200", help=f"{', '.join(DEVICE_NAMES)} (default: {DEVICE_NAMES[0]})")
    parser.add_argument("--text", type=Path, metavar="FILE", help="save the compiled text here")
    parser.add_argument("--json", action="store_true", help="print memory and times as one JSON object")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)  # compiled steps, which are not compiled again
    with user_errors():
        args = parser.parse_intermixed_args(arguments)
        if args.text is not None:
            check_output("--text", args.text)
        config = load_config(args.config, args.overrides)
        step = compile_for_gpus(config, args.gpus, args.store, device=args.device)
        if args.text:
            args.text.write_text(step.text, encoding="utf-8")
        if args.json:
            print(json.dumps(figures(step)))
            return 0
        print(f"compiled in {step.seconds:.0f} s; {verdict(step.memory['whole'], args.device)}", file=sys.stderr)
        print(" ".join([Path(args.config).stem, *args.overrides, f"on {args.gpus} GPU{'s' * (args.gpus > 1)}"]))
        memory = {**step.memory, "estimated": estimate_memory(step.program.plan).total}
        print("\n".join(describe(hlo.parse(step.text), memory)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
