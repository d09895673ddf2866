"""The time of a step's parts on GPUs: `python scripts/breakdown.py CONFIG [section.key=value ...]`.

Traces three steps with jax.profiler, finds each kernel's operation in the compiled module, and compares the time of
each part with its roofline, the shortest possible time on an H200:

- a matmul: 2·M·N·K operations at 989 TFLOP/s, in FP8 at 1979; a grouped matmul of experts likewise, for all rows;
- attention: B·N·S²·(H + W) operations forward for keys of width H and values of width W (causal counted once), twice
  that backward, at 989 TFLOP/s; megajax's own kernels always count half of all pairs, also with documents or windows;
- a collective over n GPUs: the bytes that a GPU sends at 450 GB/s (18 NVLinks), (n−1)/n of the whole array, twice that
  for an all-reduce;
- everything else: bytes read and written at 4.8 TB/s; a plain copy reaches 4.2.

The steps run without CUDA graphs, because a trace cannot distinguish their kernels.
"""

import argparse
import gzip
import json
import math
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import hlo

from megajax.bench import synthetic_config
from megajax.console import user_errors
from megajax.runtime import prepare_environment

WARMUP_STEPS, TRACED_STEPS = 3, 3
BF16_FLOPS, FP8_FLOPS, MEMORY_BYTES, NVLINK_BYTES = 989e12, 1979e12, 4.8e12, 450e9  # a second
# Names of the step's parts (`jax.named_scope`); the innermost one counts.
SCOPES = ("embedding", "attention", "mlp", "moe", "router", "norm", "head", "weights", "gradients", "optimizer")
GROUPS = ("attention", "matmuls", "head and loss", "norms and elementwise", "optimizer", "copies", "collectives")
UNKNOWN = "not in the module"
COLUMNS = ("part", "kernels a step", "ms a step", "share", "roofline ms", "reached")


@dataclass(frozen=True)
class Kernel:
    """A kernel's run on a GPU; times in ms."""

    gpu: int
    name: str
    op: str  # the operation that launched it
    start: float
    end: float


def read_trace(events: Iterable[Mapping], module: str) -> list[Kernel]:
    """The kernels in a trace's events; `op` is empty for those of other modules."""
    events = list(events)
    processes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    gpus = {pid: int(found[1]) for pid, name in processes.items() if (found := re.search(r"GPU:(\d+)", name))}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    kernels = []
    for e in events:
        # The other threads of a GPU repeat its streams, grouped by operation, module and step.
        if e.get("ph") == "X" and e["pid"] in gpus and threads.get((e["pid"], e["tid"]), "").startswith("Stream"):
            args = e.get("args", {})
            op = args.get("hlo_op", "") if args.get("hlo_module", module).startswith(module) else ""
            kernels.append(Kernel(gpus[e["pid"]], e["name"], op, e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3))
    return kernels


def part_of(op: hlo.Op) -> tuple[str, str]:
    """The group of an operation, one of GROUPS, and its detail within the group."""
    scope = next((name for name in reversed(op.scopes) if name in SCOPES), "other")
    if op.kind in hlo.COLLECTIVES:
        return "collectives", op.kind
    if op.target.startswith("__cudnn$fmha"):
        return "attention", "backward" if "Backward" in op.target else "forward"
    if kernel := ranged_attention(op):
        return "attention", "forward" if kernel == "ranged_attention" else "backward"
    if is_matmul(op):
        shape = "×".join(map(str, matmul_shape(op))) + (" FP8" if is_fp8(op) else "")
        shape = f"experts {shape}" if is_grouped(op) else shape
        return ("head and loss", f"matmul {shape}") if scope == "head" else ("matmuls", shape)
    if scope == "head":
        return "head and loss", "elementwise"
    if scope == "optimizer":
        return "optimizer", "update"
    if op.only_moves:
        return "copies", scope
    return "norms and elementwise", "conversions" if op.only_converts else scope


def ranged_attention(op: hlo.Op) -> str | None:
    """The name of megajax's attention kernel that an operation is."""
    ours = op.target.startswith("mosaic_gpu")
    return next((scope for scope in op.scopes if scope.startswith("ranged_attention")), None) if ours else None


def is_matmul(op: hlo.Op) -> bool:
    """Whether it is a call of cuBLAS or a grouped matmul."""
    return op.target.startswith("__cublas") or is_grouped(op)


def is_grouped(op: hlo.Op) -> bool:
    """Whether it is one of megajax's kernels for the matmuls of experts."""
    return op.target.startswith("mosaic_gpu") and any(scope.startswith("grouped_") for scope in op.scopes)


def is_fp8(op: hlo.Op) -> bool:
    """Whether a matmul reads FP8."""
    return op.operands[-1].dtype.startswith("f8") if is_grouped(op) else op.target.endswith("$f8")


def matmul_shape(op: hlo.Op) -> tuple[int, int, int]:
    """M, N, K of a cuBLAS call or a grouped matmul; batches count as rows, and the rows of all experts together."""
    if is_grouped(op):
        left, result = math.prod(op.operands[-2].dims), op.results[0].dims
        if len(result) == 3:  # the weights' gradient, [experts, M, N]
            return result[1], result[2], left // result[1]
        return result[0], result[1], left // result[0]
    left = op.operands[0].dims
    contracted = math.prod(left[d] for d in _numbers(op, "lhs_contracting_dimensions"))
    rows = math.prod(left) // contracted
    return rows, math.prod(op.results[0].dims) // rows, contracted


def roofline_ms(op: hlo.Op) -> float:
    """The roofline of one run of an operation, as in the module's docstring."""
    if is_matmul(op):
        return 2e3 * math.prod(matmul_shape(op)) / (FP8_FLOPS if is_fp8(op) else BF16_FLOPS)
    if op.target.startswith("__cudnn$fmha"):
        B, N, S, keys = _numbers(op, "intermediate_tensor_shape.*?dimensions")
        window = _numbers(op, "sliding_window_length")[0]
        if window:
            keys = window - window * window / (2 * S)
        elif '"CAUSAL"' in op.attributes:
            keys /= 2
        flops = 2 * B * N * S * keys * (op.operands[0].dims[-1] + op.operands[2].dims[-1])
        return 1e3 * flops * (2 if "Backward" in op.target else 1) / BF16_FLOPS
    if ranged_attention(op):
        (B, S, N, H), (_, keys, _, W) = op.operands[0].dims, op.operands[2].dims
        return 1e3 * B * N * S * keys * (H + W) / BF16_FLOPS
    if op.kind in hlo.COLLECTIVES:
        others = 1 if op.kind == "collective-permute" else (op.group_size - 1) / op.group_size
        sent = max(op.operand_bytes, op.result_bytes) * others * (2 if op.kind == "all-reduce" else 1)
        return 1e3 * sent / NVLINK_BYTES
    return 1e3 * op.traffic / MEMORY_BYTES


def _numbers(op: hlo.Op, key: str) -> list[int]:
    """The numbers of a key in an operation's backend config, a list or a single one."""
    found = re.search(rf'"{key}": ?(\[[^\]]*\]|"?\d+)', op.attributes)
    return [int(number) for number in re.findall(r"\d+", found[1])] if found else [0]


@dataclass
class Part:
    """The time of a part, per step and GPU."""

    kernels: float = 0
    ms: float = 0
    roofline: float = 0


def parts(kernels: Sequence[Kernel], ops: Mapping[str, hlo.Op], steps: int) -> dict[tuple[str, str], Part]:
    """Each (group, detail) of the GPUs' kernels, the mean per step and GPU."""
    share = 1 / (steps * len({kernel.gpu for kernel in kernels}))
    found: dict[tuple[str, str], Part] = defaultdict(Part)
    launched: dict[str, Counter] = defaultdict(Counter)
    for kernel in kernels:
        part = found[part_of(ops[kernel.op]) if kernel.op in ops else (UNKNOWN, "")]
        part.kernels += share
        part.ms += share * (kernel.end - kernel.start)
        launched[kernel.op][kernel.name] += 1
    for name in launched.keys() & ops.keys():
        # A library call consists of several kernels: its count is that of the rarest kernel.
        found[part_of(ops[name])].roofline += share * min(launched[name].values()) * roofline_ms(ops[name])
    return found


@dataclass(frozen=True)
class Timeline:
    """The times of a GPU in a step, in ms."""

    step: float
    compute: float
    communication: float
    exposed: float  # communication while nothing else ran
    idle: float


def timeline(kernels: Sequence[Kernel], ops: Mapping[str, hlo.Op], steps: int) -> Timeline:
    """From the first kernel's start to the last one's end, of one GPU."""
    intervals: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for kernel in kernels:
        transfer = any(name in kernel.name.lower() for name in ("nccl", "memcpyp2p"))
        collective = ops[kernel.op].kind in hlo.COLLECTIVES if kernel.op in ops else transfer
        intervals[collective].append((kernel.start, kernel.end))
    whole = max(kernel.end for kernel in kernels) - min(kernel.start for kernel in kernels)
    communication, compute = _covered(intervals[True]), _covered(intervals[False])
    busy = _covered(intervals[True] + intervals[False])
    times = (whole, compute, communication, busy - compute, whole - busy)
    return Timeline(*(time / steps for time in times))


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def report(kernels: Sequence[Kernel], ops: Iterable[hlo.Op], steps: int) -> str:
    """The table of parts, and a line for each GPU."""
    if not kernels:
        return "There is no breakdown: the trace has no GPU streams. Run it on a machine with NVIDIA GPUs."
    table = {name: op for op in ops for name in (op.name, op.inner) if name}
    gpus = sorted({kernel.gpu for kernel in kernels})
    own = {gpu: [kernel for kernel in kernels if kernel.gpu == gpu] for gpu in gpus}
    times = {gpu: timeline(own[gpu], table, steps) for gpu in gpus}
    step = sum(time.step for time in times.values()) / len(gpus)
    mean = parts(kernels, table, steps)
    by_gpu = {gpu: parts(own[gpu], table, steps) for gpu in gpus} if len(gpus) > 1 else {}
    columns = (*COLUMNS, *(["slowest GPU"] if by_gpu else []))
    lines = [_row(columns), _row(["---"] * len(columns))]
    for group in (*GROUPS, UNKNOWN):
        keys = sorted((key for key in mean if key[0] == group), key=lambda key: -mean[key].ms)
        for name, members in [(group, keys), *((f"– {key[1]}", [key]) for key in keys if len(keys) > 1)]:
            if members:
                part = _sum(mean[key] for key in members)
                slowest = {gpu: sum(found[key].ms for key in members if key in found) for gpu, found in by_gpu.items()}
                lines.append(_row(_cells(name, part, step, slowest)))
    busiest, last = (max(gpus, key=lambda gpu: getattr(times[gpu], field)) for field in ("compute", "step"))
    for gpu in gpus:
        notes = [note for note, which in (("busiest", busiest), ("slowest", last)) if which == gpu and len(gpus) > 1]
        lines.append(
            f"GPU {gpu}{f' ({", ".join(notes)})' if notes else ''}: {times[gpu].step:.1f} ms a step: compute "
            f"{times[gpu].compute:.1f}, communication {times[gpu].communication:.1f} (exposed "
            f"{times[gpu].exposed:.1f}), idle {times[gpu].idle:.1f}"
        )
    return "\n".join(lines[: -len(gpus)] + [""] + lines[-len(gpus) :])


def _sum(parts: Iterable[Part]) -> Part:
    total = Part()
    for part in parts:
        total = Part(total.kernels + part.kernels, total.ms + part.ms, total.roofline + part.roofline)
    return total


def _cells(name: str, part: Part, step: float, by_gpu: Mapping[int, float]) -> list[str]:
    reached = f"{part.roofline / part.ms:.0%}" if part.roofline else "–"
    cells = [name, f"{part.kernels:.0f}", f"{part.ms:.2f}", f"{part.ms / step:.1%}", f"{part.roofline:.2f}", reached]
    slowest = max(by_gpu, key=lambda gpu: by_gpu[gpu], default=None)
    return cells if slowest is None else [*cells, f"{by_gpu[slowest]:.2f} (GPU {slowest})"]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def trace(path: str, overrides: list[str]) -> tuple[list[Kernel], list[hlo.Op]]:
    """Run a config's steps in this process; returns the kernels of the traced steps and the module's operations."""
    with tempfile.TemporaryDirectory() as directory:
        config = synthetic_config(path, overrides, directory)
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="
        flags = prepare_environment(config)

        import jax

        from megajax.training.loop import Trainer

        trainer = Trainer(config, flags=flags)
        batches = [trainer.next_batch() for _ in range(WARMUP_STEPS + TRACED_STEPS)]
        step = trainer.program.train_step.lower(trainer.state, batches[0]).compile()
        state = trainer.state

        def run(batches):
            nonlocal state
            for batch in batches:
                state, _ = step(state, batch)
            jax.block_until_ready(state)

        run(batches[:WARMUP_STEPS])
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(directory, profiler_options=options):
            run(batches[WARMUP_STEPS:])
        trainer.checkpoints.close()
        text = step.as_text()
        (written,) = Path(directory).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
        module = re.match(r"HloModule ([\w.-]+)", text)
        return read_trace(events, module[1] if module else ""), hlo.parse(text)


def main(arguments: list[str]) -> int:
    """Print the breakdown of a config's step; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="CONFIG", help="a path, or the name of a file in configs/")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config")
    options = parser.parse_args(arguments)
    with user_errors():
        kernels, ops = trace(options.config, options.overrides)
    print(report(kernels, ops, TRACED_STEPS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
