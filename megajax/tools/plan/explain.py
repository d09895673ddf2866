"""One mesh in detail: its time and memory by part, its communication by axis, and what else would fit."""

import argparse
import contextlib
import itertools
import math
import warnings

from megajax.config import AXES
from megajax.config.load import read_tree
from megajax.config.mesh_checks import read_mesh
from megajax.config.sentences import divisors
from megajax.console import terminal_width
from megajax.errors import counted
from megajax.mesh import describe_hosts
from megajax.tools.plan.candidates import Candidate
from megajax.tools.plan.rates import GIB, Rates
from megajax.tools.plan.report import budget, cells, limit_line, more_time, table
from megajax.tools.plan.search import explained, most_microbatches
from megajax.tools.plan.step_time import StepTime
from megajax.tools.plan.variations import MICROBATCHES

MEMORY = ("parameters", "optimizer", "gradients", "weights", "activations", "working")


def explain(options: argparse.Namespace, found: Candidate, overrides: list[str]) -> list[str]:
    """Lines on a candidate whose config is that of `overrides`."""
    time, memory, rates = found.time, found.memory, found.rates
    sizes, hosts = found.plan.sizes, [gpu // rates.hosts_of for gpu in range(options.gpus)]
    parts = {"matmuls": time.matmuls, "attention": time.attention, "head and loss": time.head, **time.losses}
    rows = [cells(found, options.margin)]
    lines = [*_cures(options, found, overrides), *table(rows, options.markdown, terminal_width())]
    lines += [limit_line(rates, rows, options.margin), *describe_hosts(sizes, hosts), "", "Time of a step:"]
    lines += [f"  {name:36} {1e3 * s:10,.1f} ms {s / time.total:6.1%}" for name, s in parts.items()]
    lines += ["", *communication(time)]
    lines += ["", f"Memory of a GPU, {found.gib:.1f} of {rates.memory_gib:.1f} GiB:"]
    lines += [f"  {name:36} {getattr(memory, name) / GIB:10,.1f} GiB" for name in MEMORY]
    lines += ["", largest_microbatch(options, overrides, found), longer(options, overrides, found)]
    return [*lines, *budget(options, found)]


def _cures(options: argparse.Namespace, found: Candidate, overrides: list[str]) -> list[str]:
    """Lines on a mesh that does not fit: what it lacks, and three changes that make it fit, fewest GPUs first.

    More GPUs and shorter sequences are tried only if there are fewer than three without them.
    """
    rates, lacking = found.rates, found.gib - found.rates.memory_gib
    if lacking <= 0:
        return []
    config, sizes = found.config, found.plan.sizes
    shards = config.batch_shards(sizes)
    batches = [f"{MICROBATCHES}={n}" for n in divisors(config.batch.global_size // shards)]
    remats = ["remat.policy=selective", "remat.policy=full"]
    singles = [[each] for each in [*batches, *remats, "optimizer.offload=1"]]
    if sizes["data"] > 1:
        singles.append([f"mesh.fsdp={sizes['data'] * sizes['fsdp']}", "mesh.data=1"])
        for axis in ("tensor", "pipeline"):
            if sizes["data"] % 2 == 0:
                singles.append([f"mesh.{axis}={2 * sizes[axis]}", f"mesh.data={sizes['data'] // 2}"])
    pairs = [one + other for one, other in itertools.combinations(singles, 2) if not _same_key(one, other)]
    dearer = [[f"--gpus={n * options.gpus}"] for n in (2, 4)]
    for axis in ("fsdp", "tensor", "pipeline"):
        dearer += [[f"--gpus={n * options.gpus}", f"mesh.{axis}={n * sizes[axis]}"] for n in (2, 4)]
    dearer.append([f"batch.sequence_length={config.batch.sequence_length // 2}"])
    fitting: list[tuple[int, int, float, float, list[str]]] = []
    for rank, changes in enumerate((singles, pairs, dearer, [[*one, *other] for one in dearer for other in singles])):
        enough = [set(change) for *_, change in fitting]
        for change in (each for each in changes if not any(one < set(each) for one in enough)):
            with contextlib.suppress(ValueError):  # it is not legal
                other = _changed(options, [*overrides, *change], rates)
                gpus, seconds = math.prod(other.plan.sizes.values()), other.time.total
                fitting += [(gpus, rank // 2, seconds, other.gib, change)] if other.gib <= rates.memory_gib else []
        if len(fitting) >= 3:
            break
    first = f"Does not fit: {found.gib:.1f} GiB, {lacking:.1f} more than the {rates.memory_gib:.1f} of a GPU."
    if not fitting:
        return [
            f"{first} No two changes of the batch, recomputation, mesh or GPUs make it fit: use many more GPUs.",
            "",
        ]
    lines = [f"{first} Changes that make it fit, on the fewest GPUs first:"]
    for _, _, seconds, gib, change in sorted(fitting)[:3]:
        lines.append(f"  {1e3 * seconds:10,.1f} ms {gib:8.1f} GiB   {' '.join(change)}")
    if len(fitting) < 3:
        lines.append(
            "  No others were found among changes of batch, recomputation, offload, mesh, sequence length and GPUs."
        )
    return [*lines, ""]


def _changed(options: argparse.Namespace, overrides: list[str], rates: Rates) -> Candidate:
    """The candidate with overrides, of which one may be --gpus=N."""
    gpus = next((int(each.removeprefix("--gpus=")) for each in overrides if each.startswith("--gpus=")), options.gpus)
    return explained(options.config, [each for each in overrides if not each.startswith("--gpus=")], gpus, rates)


def _same_key(one: list[str], other: list[str]) -> bool:
    keys = [override.split("=")[0] for override in [*one, *other]]
    return len(set(keys)) < len(keys)


def best_microbatches(options: argparse.Namespace, overrides: list[str], rates: Rates) -> list[str]:
    """The override of the fastest number of microbatches that fits, else of the one that needs least memory.

    None if the config or an override sets it. If each number is refused, the mesh is to blame.
    """
    given = read_tree(options.config, overrides).values
    batch = given.get("batch") or {}
    if "num_microbatches" in batch or not isinstance(size := batch.get("global_size"), int):
        return []
    found: list[tuple[bool, float, int]] = []
    with warnings.catch_warnings(action="ignore"):
        for count in divisors(max(1, size)):
            with contextlib.suppress(ValueError):
                one = explained(options.config, [*overrides, f"{MICROBATCHES}={count}"], options.gpus, rates)
                fits = one.gib <= rates.memory_gib
                found.append((not fits, one.time.total if fits else one.gib, count))
    chosen = min(found)[2] if found else most_microbatches(given["mesh"]["pipeline"], size)
    return [f"{MICROBATCHES}={chosen}"]


def communication(time: StepTime) -> list[str]:
    """Bytes that a GPU sends in a step, and their time, by axis."""
    traffic = time.traffic
    if not traffic:
        return ["Communication: none"]
    lines = [f"  {'':12}{'link':>16}{'GB sent':>12}{'ms':>12}{'ms exposed':>12}"]
    for axis in (axis for axis in AXES if axis in traffic):
        link, sums = "between hosts" if axis in time.between_hosts else "within a host", traffic[axis]
        lines.append(
            f"  {axis:12}{link:>16}{sums.sent / 1e9:12,.2f}{1e3 * sums.seconds:12,.1f}{1e3 * sums.exposed:12,.1f}"
        )
    return ["Communication of a GPU in a step, recomputation included:", *lines]


def mesh_overrides(text: str) -> list[str]:
    """The overrides of a mesh such as tensor=8,pipeline=4; axes that it does not name are 1, and data the rest."""
    named = read_mesh(text, "--explain", rest=True)
    data = {"data": 1 if -1 in named.values() else -1}
    return [f"mesh.{axis}={size}" for axis, size in {**dict.fromkeys(AXES, 1), **data, **named}.items()]


def largest_microbatch(options: argparse.Namespace, overrides: list[str], found: Candidate) -> str:
    """The sentence on the largest microbatch that fits the mesh, with the same batch."""
    shards = found.config.batch_shards(found.plan.sizes)
    sequences, batch = found.config.batch.global_size // shards, 0
    for count in divisors(sequences):
        changed = [*overrides, f"{MICROBATCHES}={sequences // count}"]
        try:
            other = explained(options.config, changed, options.gpus, found.rates)
        except ValueError:  # a pipeline needs a minimum of microbatches
            continue
        if other.gib > found.rates.memory_gib:
            break
        batch = count
    return (
        f"Largest microbatch that fits: {counted(batch, 'sequence')} on a GPU"
        if batch
        else "No microbatch fits this mesh."
    )


def longer(options: argparse.Namespace, overrides: list[str], found: Candidate) -> str:
    """The sentence on sequences of twice the length, half as many."""
    batch = found.config.batch
    changed = [f"batch.sequence_length={2 * batch.sequence_length}", f"batch.global_size={batch.global_size // 2}"]
    changed = [*overrides, *changed]
    try:
        other = explained(options.config, changed, options.gpus, found.rates)
    except ValueError as error:
        try:  # as many sequences of a microbatch
            fewer = f"{MICROBATCHES}={max(1, batch.num_microbatches // 2)}"
            other = explained(options.config, [*changed, fewer], options.gpus, found.rates)
        except ValueError:
            return f"Sequences of twice the length, half as many, are refused: {error}"
    return f"Sequences of twice the length, half as many: {more_time(other, found)}, {other.gib:.1f} GiB"
