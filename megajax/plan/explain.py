"""One mesh in detail: its time and memory by part, its communication by axis, and what else would fit."""

import argparse

from megajax.config.sentences import divisors
from megajax.errors import InputError
from megajax.mesh import describe_hosts
from megajax.plan.rates import GIB, Rates
from megajax.plan.report import AXES_SHOWN, budget, cells, table
from megajax.plan.search import Found, explained
from megajax.plan.step_time import StepTime

MEMORY = ("parameters", "optimizer", "gradients", "weights", "activations", "working")


def explain(options: argparse.Namespace, found: Found, overrides: list[str], rates: Rates) -> list[str]:
    """Lines on a candidate whose config is that of `overrides`."""
    time, memory = found.time, found.candidate.memory
    sizes, hosts = found.candidate.plan.sizes, [gpu // rates.hosts_of for gpu in range(options.gpus)]
    parts = {"matmuls": time.matmuls, "attention": time.attention, "head and loss": time.head, **time.losses}
    lines = [*table([cells(found, rates)]), *describe_hosts(sizes, hosts), "", "Time of a step:"]
    lines += [f"  {name:36} {1e3 * s:10,.1f} ms {s / time.total:6.1%}" for name, s in parts.items()]
    lines += ["", *communication(time)]
    lines += ["", f"Memory of a GPU, {found.gib:.1f} of {rates.memory_gib:.1f} GiB:"]
    lines += [f"  {name:36} {getattr(memory, name) / GIB:10,.1f} GiB" for name in MEMORY]
    lines += ["", largest_microbatch(options, overrides, found, rates), longer(options, overrides, found, rates)]
    return [*lines, *budget(options, found)]


def communication(time: StepTime) -> list[str]:
    """Bytes that a GPU sends in a step, and their time, by axis."""
    traffic = time.traffic
    if not traffic:
        return ["Communication: none"]
    lines = [f"  {'':12}{'link':>16}{'GB sent':>12}{'ms':>12}{'ms exposed':>12}"]
    for axis in (axis for axis in AXES_SHOWN if axis in traffic):
        link, own = "between hosts" if axis in time.between_hosts else "within a host", traffic[axis]
        lines.append(
            f"  {axis:12}{link:>16}{own.sent / 1e9:12,.2f}{1e3 * own.seconds:12,.1f}{1e3 * own.exposed:12,.1f}"
        )
    return ["Communication of a GPU in a step, recomputation included:", *lines]


def mesh_overrides(text: str) -> list[str]:
    """The overrides of a mesh such as tensor=8,pipeline=4; axes that it does not name are 1, and data the rest."""
    sizes, named = {axis: "1" for axis in AXES_SHOWN} | {"data": "-1"}, set[str]()
    for entry in filter(None, text.split(",")):
        axis, _, size = (each.strip() for each in entry.partition("="))
        if axis not in sizes or not size.lstrip("-").isdigit():
            raise InputError(
                f"--explain={text}: {entry} is no axis with a size: write tensor=8,pipeline=4, for example."
            )
        if axis in named:
            raise InputError(f"--explain={text} has {axis} twice: leave one of them out.")
        named.add(axis)
        if size == "-1":
            sizes["data"] = "1"
        sizes[axis] = size
    return [f"mesh.{axis}={size}" for axis, size in sizes.items()]


def largest_microbatch(options: argparse.Namespace, overrides: list[str], found: Found, rates: Rates) -> str:
    """The sentence on the largest microbatch that fits the mesh, with the same batch."""
    shards = found.candidate.config.batch_shards(found.candidate.plan.sizes)
    sequences, batch = found.candidate.config.batch.global_size // shards, 0
    for count in divisors(sequences):
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
    changed = [*overrides, *changed]
    try:
        other = explained(options.config, changed, options.gpus, rates)
    except ValueError as error:
        try:  # as many sequences of a microbatch
            fewer = f"batch.num_microbatches={max(1, batch.num_microbatches // 2)}"
            other = explained(options.config, [*changed, fewer], options.gpus, rates)
        except ValueError:
            return f"Sequences of twice the length, half as many, are refused: {error}"
    slower = other.time.total / found.time.total - 1
    return f"Sequences of twice the length, half as many: {slower:+.0%} time, {other.gib:.1f} GiB"
