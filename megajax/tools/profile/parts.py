"""The time of a step's parts in detail, each with its roofline, and its longest operations."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megajax.tools.profile.operations import GROUPS, group_of_kernel, part_of, roofline_ms, scope_of
from megajax.tools.profile.timeline import OTHERS, Reading
from megajax.tools.profile.trace import Kernel

COLUMNS = ("part", "kernels a step", "ms a step", "share", "roofline ms", "reached", "slowest device")
type Key = tuple[str, str]  # the group and its detail


@dataclass
class Part:
    """The time of a part, per step and device."""

    kernels: float = 0
    ms: float = 0
    roofline: float = 0

    def add(self, other: "Part") -> None:
        self.kernels += other.kernels
        self.ms += other.ms
        self.roofline += other.roofline


def parts(kernels: Mapping[str, Sequence[Kernel]], reading: Reading, steps: int) -> defaultdict[Key, Part]:
    """Each part of the devices' kernels, the mean per step and device."""
    share = 1 / (steps * len(kernels))
    found: defaultdict[Key, Part] = defaultdict(Part)
    launched: dict[str, Counter[str]] = defaultdict(Counter)
    for kernel in (kernel for own in kernels.values() for kernel in own if not reading.contains_others(kernel)):
        part = found[_key(kernel, reading)]
        part.kernels += share
        part.ms += share * (kernel.end - kernel.start)
        if reading.names(kernel):
            launched[kernel.op][kernel.name] += 1
    for name, runs in launched.items():
        # A library call consists of several kernels: its count is that of the rarest kernel.
        found[part_of(reading.ops[name])].roofline += share * min(runs.values()) * roofline_ms(reading.ops[name])
    return found


def _key(kernel: Kernel, reading: Reading) -> Key:
    if not reading.is_own(kernel):
        return OTHERS, ""
    if kernel.op in reading.ops:
        return part_of(reading.ops[kernel.op])
    return group_of_kernel(kernel.name), "by the kernel's name"


def table(kernels: Mapping[str, Sequence[Kernel]], reading: Reading, steps: int, step: float) -> list[str]:
    """A row for each group, and one for each part of it; `step`: ms of a step."""
    mean = parts(kernels, reading, steps)
    by_device = {device: parts({device: own}, reading, steps) for device, own in kernels.items()}
    lines = [row(COLUMNS), row(["---"] * len(COLUMNS))]
    for group in (*GROUPS, OTHERS):
        keys = sorted((key for key in mean if key[0] == group), key=lambda key: -mean[key].ms)
        for name, members in [(group, keys), *((f"– {key[1]}", [key]) for key in keys if len(keys) > 1)]:
            if members:
                whole = Part()
                for key in members:
                    whole.add(mean[key])
                spent = {d: sum(found[key].ms for key in members) for d, found in by_device.items()}
                slowest = max(spent, key=lambda device: spent[device])
                reached = f"{whole.roofline / whole.ms:.0%}" if whole.roofline and whole.ms else "–"
                times = (f"{whole.kernels:.0f}", f"{whole.ms:.2f}", f"{whole.ms / step:.1%}", f"{whole.roofline:.2f}")
                lines.append(row((name, *times, reached, f"{spent[slowest]:.2f} ({slowest})")))
    return lines


def operations(kernels: Mapping[str, Sequence[Kernel]], reading: Reading, steps: int, count: int) -> list[str]:
    """The `count` operations with the longest time: their names in traces and in Nsight Systems, and their scopes."""
    spent: dict[str, float] = defaultdict(float)
    for kernel in (kernel for own in kernels.values() for kernel in own):
        if reading.names(kernel) and not reading.contains_others(kernel):
            spent[kernel.op] += (kernel.end - kernel.start) / (steps * len(kernels))
    lines = [row(("hlo_op", "part", "scope", "ms a step")), row(["---"] * 4)]
    for name, ms in sorted(spent.items(), key=lambda item: -item[1])[:count]:
        op = reading.ops[name]
        lines.append(row((name, ", ".join(filter(None, part_of(op))), scope_of(op), f"{ms:.2f}")))
    return lines


def row(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"
