"""The rates of this machine's GPUs and links for `megajax plan`: timed, fitted, compared with the shipped ones.

A process times the programs of `programs` on its first device, and the collectives of all groups that it is in. The
first process takes the median over the processes, fits (`fits`) and writes the file.
"""

import statistics
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax

from megajax import cluster
from megajax.console import aligned
from megajax.kernel_choice import Hardware
from megajax.tools.plan.rates import GIB, H200, KEYS, Rates, rates_of_kind, write_rates
from megajax.tools.preflight.fits import Timing, linear_rate, saturating_rate, shared_half
from megajax.tools.preflight.measurements import DeviceGroup, collective, devices_by_host, seconds_per_call, sent_bytes
from megajax.tools.preflight.programs import (
    COPY,
    IN_FP32,
    MATMUL,
    ON_CPUS,
    ON_GPUS,
    WIDTHS,
    Sizes,
    TimedProgram,
    attention_kind,
    programs,
    random_arguments,
)

WITHIN, BETWEEN = "within a host", "between hosts"
GATHERS = ("all-gather", "reduce-scatter")  # of weights and gradients, by NCCL
LINKS = (*GATHERS, "all-reduce", "all-to-all", "permute")
SLOW = 0.9  # of the shipped rate
FIGURES = (1, 2, 3)  # columns of the report's tables


class Answer(NamedTuple):
    """What a process found."""

    timings: list[Timing]
    memory_gib: float | None  # that a run can use on its first device; None on CPUs


class Machine(NamedTuple):
    """The devices of all processes."""

    kind: str  # of a device
    count: int
    hosts: int


# Timing


def measure(hosts: Sequence[str], sizes: Sizes | None = None) -> Answer:
    """The timings of this process; `hosts`: the host of each process; `sizes` of the programs, None: the device's.

    All processes must call it.
    """
    device = jax.local_devices()[0]
    on_gpu = device.platform == "gpu"
    sizes = sizes or (ON_GPUS if on_gpu else ON_CPUS)
    hardware = Hardware(device.platform, getattr(device, "compute_capability", None))
    with jax.default_device(device):
        timings = [timing for program in programs(sizes, hardware) if (timing := timed(program, sizes))]
    for group in link_groups(jax.devices(), hosts):
        timings += timed_links(group, sizes)
    stats = (device.memory_stats() or {}) if on_gpu else {}
    limit = stats.get("bytes_limit")
    return Answer(timings, limit and limit / GIB)


def link_groups(devices: Sequence[Any], hosts: Sequence[str]) -> list[DeviceGroup]:
    """Within each host 2, 4, … and all of its devices; between hosts the first device of 2, 4, … and all hosts."""
    by_host = devices_by_host(devices, hosts)
    found = [
        DeviceGroup(f"{WITHIN} ({size})", host, members[:size])
        for host, members in by_host.items()
        for size in _powers(len(members))
    ]
    firsts = [members[0] for members in by_host.values()]
    return found + [DeviceGroup(f"{BETWEEN} ({size})", "first devices", firsts[:size]) for size in _powers(len(firsts))]


def _powers(count: int) -> list[int]:
    """2, 4, … below `count`, and `count`; none for one device."""
    return [2**i for i in range(1, count.bit_length()) if 2**i < count] + ([count] if count > 1 else [])


def timed(program: TimedProgram, sizes: Sizes) -> Timing | None:
    """The program's time at the clocks of a GPU under load; None, with a warning, if it cannot run here."""
    try:
        arguments, function = random_arguments(program), jax.jit(program.function)
        start = None
        while start is None or time.perf_counter() - start < sizes.warm_seconds:
            jax.block_until_ready([function(arguments) for _ in range(2)])
            start = start or time.perf_counter()  # after the compilation
        return Timing(program.kind, program.size, program.work, seconds_per_call(function, arguments))
    except RuntimeError as error:  # out of memory, or a missing library
        reason = (str(error).splitlines() or ["no reason given"])[0]
        warnings.warn(f"{program.kind}, size {program.size}, was not measured: {reason}", stacklevel=2)
        return None


def timed_links(group: DeviceGroup, sizes: Sizes) -> list[Timing]:
    """The collectives of a group, if this process takes part in it; its first one has the timings.

    The number of calls does not depend on the time, because all processes must call a collective equally often.
    """
    me, timings = cluster.current().rank, []
    if all(device.process_index != me for device in group.devices):
        return []
    for operation in LINKS:
        for megabytes in sizes.megabytes:
            buffer = megabytes * 2**20
            function, argument = collective(operation, group.devices, buffer // 4)
            work = sent_bytes(operation, len(group.devices), buffer)
            seconds = seconds_per_call(function, argument)
            timings.append(Timing(f"{operation} {group.kind}", megabytes, work, seconds))
    return timings if group.devices[0].process_index == me else []


# Rates from timings


def typical(answers: Sequence[Answer]) -> dict[str, list[Timing]]:
    """By kind and in the order of the measurements: the median over the processes of each size's seconds."""
    seconds: dict[tuple[str, float, float], list[float]] = {}
    for answer in answers:
        for timing in answer.timings:
            seconds.setdefault(timing[:3], []).append(timing.seconds)
    found: dict[str, list[Timing]] = {}
    for key, values in seconds.items():
        found.setdefault(key[0], []).append(Timing(*key, statistics.median(values)))
    return found


def fitted(timings: dict[str, list[Timing]]) -> dict[str, Any]:
    """The fields of Rates that the timings give."""
    found: dict[str, Any] = {}
    for name, fp8 in (("bf16", False), ("fp8", True)):
        if found_timings := timings.get(MATMUL[fp8]):
            found[f"{name}_flops"], found[f"{name}_half_rate"] = saturating_rate(found_timings)
    if in_fp32 := timings.get(IN_FP32):  # with the half-rate of BF16
        found["fp32_flops"] = in_fp32[0].work / in_fp32[0].seconds * (1 + found["bf16_half_rate"] / in_fp32[0].size)
    if widths := {width: found_timings for width, _ in WIDTHS if (found_timings := timings.get(attention_kind(width)))}:
        rates, found["attention_half_rate"] = shared_half(widths)
        found["attention_flops"] = tuple(rates.items())
    if copies := timings.get(COPY):
        found["memory_bytes"] = copies[0].work / copies[0].seconds
    if permute := _largest(timings, ("permute",), WITHIN):
        found["link_bytes"] = linear_rate(permute).rate
        found["nccl_bytes"] = linear_rate(_largest(timings, GATHERS, WITHIN)).rate
    if between := _largest(timings, GATHERS, BETWEEN):
        found["network_bytes"] = linear_rate(between).rate
    return found


def _largest(timings: dict[str, list[Timing]], operations: Sequence[str], where: str) -> list[Timing]:
    """The timings of these collectives in the largest group of a class of links."""
    found = []
    for operation in operations:  # groups are measured in the order of their sizes
        found += next((last for kind, last in reversed(timings.items()) if kind.startswith(f"{operation} {where}")), [])
    return found


def machine_rates(machine: Machine, answers: Sequence[Answer]) -> tuple[Rates, list[str]]:
    """(the rates, the fields that were measured); the others are the shipped ones, of an H200 for unknown devices."""
    found = fitted(typical(answers))
    if memory := [answer.memory_gib for answer in answers if answer.memory_gib]:
        found["memory_gib"] = min(memory)
    if machine.count > machine.hosts:  # one device of a host says nothing about the host
        found["hosts_of"] = machine.count // machine.hosts
    shipped = rates_of_kind(machine.kind)
    return replace(shipped or replace(H200, name=machine.kind), **found), list(found)


# The report


class Figure(NamedTuple):
    """A rate at a size that steps have; `field`: the field of Rates that it depends on."""

    what: str
    field: str
    rate: float

    def __str__(self) -> str:
        number, unit = (self.rate / 1e12, "TFLOP/s") if self.field.endswith("flops") else (self.rate / 1e9, "GB/s")
        return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


def figures(rates: Rates) -> list[Figure]:
    """What the report shows of a GPU's rates."""
    found = []
    for n in (1024, 8192):
        found += [
            Figure(f"matmul BF16, smallest dimension {n}", "bf16_flops", rates.matmul_flops(n, fp8=False)),
            Figure(f"matmul FP8, smallest dimension {n}", "fp8_flops", rates.matmul_flops(n, fp8=True)),
        ]
    for width, _ in WIDTHS:
        what = f"attention over 8192 tokens, heads of {width}"
        found.append(Figure(what, "attention_flops", rates.attention(width, 8192)))
    return [
        *found,
        Figure("copy in memory", "memory_bytes", rates.memory_bytes),
        Figure("copies between GPUs of a host", "link_bytes", rates.link_bytes),
        Figure("gathers and reductions in a host", "nccl_bytes", rates.nccl_bytes),
        Figure("gathers and reductions between hosts", "network_bytes", rates.network_bytes),
    ]


def compared(rates: Rates, measured: Sequence[str], shipped: Rates | None) -> tuple[str, list[str]]:
    """(a table of the rates beside the shipped ones, a sentence for each that is below SLOW times the shipped one)."""
    table, slow = [("", "measured", "shipped" if shipped else "", "")], []
    theirs = figures(shipped) if shipped else [None] * len(figures(rates))
    for mine, their in zip(figures(rates), theirs, strict=True):
        if mine.field not in measured:
            table.append((mine.what, "not measured", str(their or ""), ""))
            continue
        share = f"{mine.rate / their.rate:.0%}" if their else ""
        table.append((mine.what, str(mine), str(their or ""), share))
        if shipped and their and mine.rate < SLOW * their.rate:
            slow.append(
                f"{mine.what}: {mine} is {share} of the shipped rate ({shipped.name}): look for a slow GPU or link, or "
                "another program on the machine, before you plan with this file."
            )
    return "\n".join(aligned(table, FIGURES)), slow


def links_table(timings: dict[str, list[Timing]]) -> str:
    """Each collective: the fitted rate and the time of a call without data, which includes its start from Python."""
    table = [("collective", "GB/s", "us a call")]
    for kind, own in timings.items():
        if kind.startswith(LINKS):
            rate, latency = linear_rate(own)
            table.append((kind, f"{rate / 1e9:.3g}", f"{latency * 1e6:.0f}"))
    return "\n".join(aligned(table, FIGURES)) if len(table) > 1 else ""


def finish(path: Path, machine: Machine, answers: Sequence[Answer]) -> str:
    """Write the file; the report. One process calls it with the answers of all."""
    (rates, measured), shipped = machine_rates(machine, answers), rates_of_kind(machine.kind)
    table, slow = compared(rates, measured, shipped)
    notes = {
        "device": machine.kind,
        "devices": machine.count,
        "hosts": machine.hosts,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "jax": jax.__version__,
        "not_measured": [name for name in KEYS if name not in (*measured, "name")],
    }
    write_rates(path, rates, notes)
    lines = ["", table, "", links_table(typical(answers)), *slow]
    lines.append(f"{path}: not measured, so the shipped figures: {', '.join(notes['not_measured'])}")
    if shipped is None:
        lines.append(f"There are no shipped rates of {machine.kind}: figures that were not measured are an H200's.")
    return "\n".join(lines)
