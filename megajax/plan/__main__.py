"""Plans a run without a GPU: the fastest mesh, microbatches, pipeline schedule and recomputation for N GPUs.

    python -m megajax.plan CONFIG [section.key=value ...] --gpus N

Overrides are kept; the config file's mesh, microbatches, schedule and recomputation are varied. Nothing that changes
the training is: model, batch, sequence length, precision and optimizer stay. Memory and time are estimates (H200s:
measured rates; H100s and B200s: an H200's, scaled by data sheets); --compile replaces the memory of the first rows by
XLA's figure.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megajax.console import CommandParser, user_errors
from megajax.errors import InputError
from megajax.mesh import describe_hosts
from megajax.plan.compile import require_plugin
from megajax.plan.rates import DEVICES, GIB, Rates, rates_of, read_rates
from megajax.plan.search import Found, Search, explained
from megajax.plan.step_time import tokens_per_second, utilization

HEAD = ("mesh", "microbatches", "recomputed", "GiB", "ms a step", "tokens/s a GPU", "MFU", "lost to")
COMPILE_SECONDS = 1800.0
AXES_SHOWN = ("pipeline", "data", "fsdp", "expert", "context", "tensor")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan; the exit status."""
    parser = CommandParser(
        "megajax.plan.__main__", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value, kept as they are")
    parser.add_argument("--gpus", type=int, help="number of GPUs; with --fewest the largest number to try")
    parser.add_argument("--device", default="h200", help=f"{', '.join(DEVICES)} (default: h200)")
    parser.add_argument("--rates", type=Path, metavar="FILE", help="JSON file of rates in place of the device's own")
    parser.add_argument("--hosts-of", type=int, metavar="N", help="GPUs of a host (default: 8)")
    parser.add_argument("--network-gbps", type=float, metavar="RATE", help="Gbit/s of a GPU's network card (400)")
    parser.add_argument("--top", type=int, default=5, help="rows (default: 5)")
    parser.add_argument("--compile", type=int, default=0, metavar="K", help="compile the first K rows for H200s")
    parser.add_argument("--tokens", type=float, metavar="T", help="adds days and GPU-hours for T tokens, such as 15e12")
    parser.add_argument("--explain", metavar="MESH", help="one mesh in place of a search, such as tensor=8,pipeline=4")
    parser.add_argument("--fewest", action="store_true", help="the fewest GPUs that hold the run")
    with user_errors():
        options = parser.parse_intermixed_args(arguments)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        rates = rates_of(options.device)
        if options.rates is not None:
            rates = read_rates(options.rates, rates)
        rates = rates.with_links(options.hosts_of, options.network_gbps)
        check(options)
        if options.explain is not None:
            print(explain(options, rates))
        elif options.fewest:
            print(fewest(options, rates))
        else:
            print(plan(options, rates))
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises InputError for arguments that cannot be followed."""
    if options.gpus is None or options.gpus < 1:
        raise InputError("--gpus is missing or below 1: give the number of GPUs, such as --gpus 64.")
    if options.top < 1:
        raise InputError(f"--top={options.top} is below 1.")
    if options.compile:
        require_plugin()
        if options.device.lower() != "h200":
            raise InputError(f"--compile compiles for H200s, not for --device={options.device}: leave one of them out.")


def plan(options: argparse.Namespace, rates: Rates) -> str:
    """The table of the fastest candidates, and the overrides of the first."""
    search = Search(options.config, options.overrides, options.gpus, rates)
    best, compiled = search.best(max(options.top, options.compile)), {}
    for number, found in enumerate(best[: options.compile]):
        compiled[number] = xla_gib(options, found)
    fitting = [n for n in range(len(best)) if compiled.get(n, 0) <= rates.memory_gib]
    if not fitting:
        raise InputError("none of the compiled candidates fits by XLA's figures: raise --compile and --top.")
    rows = [cells(best[n], rates, compiled.get(n)) for n in fitting[: options.top]]
    lines = [f"{search.tried} candidates on {options.gpus} {rates.name}s, hosts of {rates.hosts_of}", "", *table(rows)]
    if compiled:
        lines.append("GiB marked * are XLA's; the others are estimates.")
    winner = best[fitting[0]]
    lines += ["", f"The fastest: {' '.join(winner.overrides)}", *budget(options, winner)]
    return "\n".join(lines)


def xla_gib(options: argparse.Namespace, found: Found) -> float:
    """XLA's GiB of a GPU, compiled in a process of its own. Raises InputError if it does not compile."""
    command = [sys.executable, "-m", "megajax.training.compiled_step", str(options.config), *options.overrides]
    command += [*found.overrides, "--gpus", str(options.gpus)]
    environment = {"XLA_FLAGS": "--xla_gpu_autotune_level=0", **os.environ}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise InputError(f"{' '.join(found.overrides)} does not compile in {COMPILE_SECONDS:.0f} s.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise InputError(f"{' '.join(found.overrides)} does not compile: {reason}")
    return json.loads(done.stdout.splitlines()[-1])["device_memory"]["whole"] / GIB


def mesh_text(found: Found) -> str:
    """The axes above 1, with the schedule of a pipeline."""
    sizes, pipeline = found.candidate.plan.sizes, found.candidate.config.pipeline
    text = " × ".join(f"{axis} {sizes[axis]}" for axis in AXES_SHOWN if sizes[axis] > 1) or "one GPU"
    others = [axis for axis in found.candidate.config.mesh.experts_over if axis != "expert" and sizes[axis] > 1]
    if found.candidate.config.model.num_experts and others:
        text += f", experts over {' and '.join(['expert', *others] if sizes['expert'] > 1 else others)}"
    if sizes["pipeline"] > 1:
        text += f", {pipeline.schedule}" + (f", {pipeline.rounds} rounds" if pipeline.rounds > 1 else "")
    return text


def cells(found: Found, rates: Rates, compiled: float | None = None) -> tuple[str, ...]:
    """A row of the table."""
    config, seconds = found.candidate.config, found.time.total
    remat = config.remat.policy + (f", {config.remat.layers} layers" if config.remat.layers else "")
    losses = ", ".join(f"{name} {s / seconds:.0%}" for name, s in list(found.time.losses.items())[:3])
    speed = tokens_per_second(found.candidate.plan, seconds)
    gib = f"{found.gib:.1f}" if compiled is None else f"{compiled:.1f}*"
    mfu = utilization(found.candidate.plan, rates, seconds)
    batch = str(config.batch.num_microbatches)
    return mesh_text(found), batch, remat, gib, f"{1e3 * seconds:,.0f}", f"{speed:,.0f}", f"{mfu:.1%}", losses


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (HEAD, ["---"] * len(HEAD), *rows)]


def budget(options: argparse.Namespace, found: Found) -> list[str]:
    """Days and GPU-hours for a number of tokens."""
    if not options.tokens:
        return []
    rate = options.gpus * tokens_per_second(found.candidate.plan, found.time.total)
    hours = options.tokens / rate / 3600
    return [f"{options.tokens:.3g} tokens: {hours / 24:,.1f} days, {hours * options.gpus:,.0f} GPU-hours"]


def explain(options: argparse.Namespace, rates: Rates) -> str:
    """One mesh: its row, the parts of its time and memory, larger microbatches, and twice the sequence length."""
    overrides = [*options.overrides, *mesh_overrides(options.explain)]
    found = explained(options.config, overrides, options.gpus, rates)
    time, memory = found.time, found.candidate.memory
    parts = {"matmuls": time.matmuls, "attention": time.attention, "head and loss": time.head, **time.losses}
    sizes, hosts = found.candidate.plan.sizes, [gpu // rates.hosts_of for gpu in range(options.gpus)]
    lines = [*table([cells(found, rates)]), *describe_hosts(sizes, hosts), "", "Time of a step:"]
    lines += [f"  {name:32} {1e3 * s:10,.1f} ms {s / time.total:6.1%}" for name, s in parts.items()]
    names = ("parameters", "optimizer", "gradients", "weights", "activations", "working")
    lines += ["", f"Memory of a GPU, {found.gib:.1f} of {rates.memory_gib:.1f} GiB:"]
    lines += [f"  {name:32} {getattr(memory, name) / GIB:10,.1f} GiB" for name in names]
    lines += ["", largest_microbatch(options, overrides, found, rates), longer(options, overrides, found, rates)]
    return "\n".join([*lines, *budget(options, found)])


def mesh_overrides(text: str) -> list[str]:
    """The overrides of a mesh such as tensor=8,pipeline=4; axes that it does not name are 1, and data the rest."""
    sizes = {axis: "1" for axis in AXES_SHOWN} | {"data": "-1"}
    for entry in filter(None, text.split(",")):
        axis, _, size = entry.partition("=")
        if axis.strip() not in sizes or not size.strip().lstrip("-").isdigit():
            raise InputError(
                f"--explain={text}: {entry} is no axis with a size: write tensor=8,pipeline=4, for example."
            )
        if size.strip() == "-1":
            sizes["data"] = "1"
        sizes[axis.strip()] = size.strip()
    return [f"mesh.{axis}={size}" for axis, size in sizes.items()]


def largest_microbatch(options: argparse.Namespace, overrides: list[str], found: Found, rates: Rates) -> str:
    """The sentence on the largest microbatch that fits the mesh, with the same batch."""
    shards = found.candidate.config.batch_shards(found.candidate.plan.sizes)
    sequences, batch = found.candidate.config.batch.global_size // shards, 0
    for count in range(1, sequences + 1):
        if sequences % count:
            continue
        changed = [*overrides, f"batch.num_microbatches={sequences // count}"]
        try:
            other = explained(options.config, changed, options.gpus, rates)
        except ValueError:  # a pipeline needs a minimum of microbatches
            continue
        if other.gib > rates.memory_gib:
            break
        batch = count
    return f"Largest microbatch that fits: {batch} sequences on a GPU" if batch else "No microbatch fits this mesh."


def longer(options: argparse.Namespace, overrides: list[str], found: Found, rates: Rates) -> str:
    """The sentence on sequences of twice the length, half as many."""
    batch = found.candidate.config.batch
    changed = [f"batch.sequence_length={2 * batch.sequence_length}", f"batch.global_size={batch.global_size // 2}"]
    try:
        other = explained(options.config, [*overrides, *changed], options.gpus, rates)
    except ValueError as error:
        return f"Sequences of twice the length, half as many, are refused: {error}"
    slower = other.time.total / found.time.total - 1
    return f"Sequences of twice the length, half as many: {slower:+.0%} time, {other.gib:.1f} GiB"


def fewest(options: argparse.Namespace, rates: Rates) -> str:
    """The sentence on the fewest GPUs, powers of two up to --gpus, that hold the run."""
    gpus, reason = 1, ""
    while gpus <= options.gpus:
        try:
            [found] = Search(options.config, options.overrides, gpus, rates).best(1)
        except InputError as error:
            gpus, reason = 2 * gpus, str(error)
            continue
        return "\n".join([f"The fewest {rates.name}s that hold it: {gpus}", "", *table([cells(found, rates)])])
    raise InputError(f"up to {options.gpus} GPUs are too few: {reason}")


if __name__ == "__main__":
    sys.exit(main())
