"""The time of a step on a device, divided by what the device did.

At each moment the device computes, or it only communicates, or nothing runs. A moment in which a compute kernel runs
belongs to that kernel, however many collectives run beside it; a collective has the rest: its exposed time, after its
wait for the device that comes to it last. If several kernels of a kind run, the moment belongs to the one that began
last. So the rows add up to the step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megajax.step.pipeline.schedules import Schedule
from megajax.tools.profile import hlo
from megajax.tools.profile.operations import (
    ATTENTION,
    COLLECTIVES,
    COPIES,
    ELEMENTWISE,
    MATMULS,
    group_of_kernel,
    is_collective,
    kinds_of_kernel,
    part_of,
)
from megajax.tools.profile.trace import Kernel

WAITING, BUBBLE = "waiting for the slowest device", "pipeline bubble"
HOST, IDLE, OTHERS = "host gaps", "idle between kernels", "other programs"
EXPOSED, AT = "collectives over ", "waiting in collectives over "  # and the axes
UNKNOWN_AXIS = "axes that the trace does not name"
type Rows = dict[str, float]


@dataclass(frozen=True)
class Reading:
    """What is needed to tell the row of a kernel."""

    module: str
    ops: Mapping[str, hlo.Op]
    sizes: Mapping[str, int]  # of the mesh's axes, outermost first

    def names(self, kernel: Kernel) -> bool:
        """Whether a kernel's operation is known."""
        return kernel.op in self.ops and self.is_own(kernel)

    def is_own(self, kernel: Kernel) -> bool:
        """Whether a kernel is one of the step's, as far as the trace tells."""
        return not kernel.module or kernel.module.startswith(self.module)

    def contains_others(self, kernel: Kernel) -> bool:
        """Whether a kernel is a loop, a call or a condition, whose operations are in the trace themselves."""
        return self.names(kernel) and self.ops[kernel.op].kind in hlo.CALLERS

    def row(self, kernel: Kernel) -> str:
        """The row of a kernel's time."""
        if not self.is_own(kernel):
            return OTHERS
        op = self.ops.get(kernel.op)
        group = part_of(op)[0] if op else group_of_kernel(kernel.name)
        if group == COLLECTIVES:
            axes = op.axes_of(self.sizes) if op else self.only_axes(kernel.name)
            return EXPOSED + (" and ".join(axes) or UNKNOWN_AXIS)
        return ELEMENTWISE if group == COPIES else group

    def only_axes(self, name: str) -> tuple[str, ...]:
        """The axes of a kernel whose operation the trace does not name, if all that it can belong to have the same.

        So it is with NCCL's asynchronous collectives, which XLA launches from a thread of their own.
        """
        found = {axes for kind in kinds_of_kernel(name) for axes in self._axes_by_kind.get(kind, ())}
        return found.pop() if len(found) == 1 else ()

    @cached_property
    def _axes_by_kind(self) -> dict[str, set[tuple[str, ...]]]:
        """The axes of the module's collectives, by kind; those of one device are left out."""
        found: dict[str, set[tuple[str, ...]]] = defaultdict(set)
        for op in self.ops.values():
            if is_collective(op) and (axes := op.axes_of(self.sizes)):
                found[op.kind].add(axes)
        return found

    def communicates(self, kernel: Kernel) -> bool:
        op = self.ops.get(kernel.op) if self.is_own(kernel) else None
        return is_collective(op) if op else group_of_kernel(kernel.name) == COLLECTIVES


def rows_of(kernels: Sequence[Kernel], reading: Reading, transfers: Mapping[Kernel, float] | None = None) -> Rows:
    """The ms of each row between the first kernel's start and the last one's end, of one device.

    `transfers` are those of `transfer_times`; without them no time counts as waiting.
    """
    kernels = [kernel for kernel in kernels if kernel.end > kernel.start and not reading.contains_others(kernel)]
    rows: Rows = defaultdict(float)
    for start, end, running, following in _moments(kernels, reading.communicates):
        if running is not None:
            row, waiting = reading.row(running), 0.0
            if transfers and running in transfers and row.startswith(EXPOSED):
                waiting = min(max(running.end - transfers[running] - start, 0.0), end - start)
                rows[AT + row.removeprefix(EXPOSED)] += waiting
            rows[row] += end - start - waiting
            continue
        # The host held the device back until it launched the next kernel.
        launched = following.launched if following is not None and following.launched is not None else start
        held = min(max(launched - start, 0.0), end - start)
        rows[HOST] += held
        rows[IDLE] += end - start - held
    return {row: ms for row, ms in rows.items() if ms}


def transfer_times(kernels: Mapping[str, Sequence[Kernel]], reading: Reading) -> dict[Kernel, float]:
    """The ms in which each collective transfers: the shortest run of it on any device, that of the last to come to it.

    Of collectives that not all devices ran as often nothing is known.
    """
    runs: dict[str, dict[str, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for device, own in kernels.items():
        for kernel in own:
            if reading.communicates(kernel):
                runs[kernel.op or kernel.name][device].append(kernel)
    found: dict[Kernel, float] = {}
    for by_device in runs.values():
        if len(by_device) == len(kernels) and len({len(own) for own in by_device.values()}) == 1:
            for run in zip(*by_device.values(), strict=True):
                found |= dict.fromkeys(run, min(kernel.end - kernel.start for kernel in run))
    return found


def _moments(
    kernels: Sequence[Kernel], communicates: Callable[[Kernel], bool]
) -> Iterator[tuple[float, float, Kernel | None, Kernel | None]]:
    """(start, end, the kernel that has this time or None, the next kernel to start) between all starts and ends."""
    times = sorted({time for kernel in kernels for time in (kernel.start, kernel.end)})
    begun, active = 0, []
    for start, end in pairwise(times):
        while begun < len(kernels) and kernels[begun].start <= start:
            active.append(kernels[begun])
            begun += 1
        active = [kernel for kernel in active if kernel.end > start]
        running = max(active, key=lambda kernel: (not communicates(kernel), kernel.start), default=None)
        yield start, end, running, kernels[begun] if begun < len(kernels) else None


@dataclass(frozen=True)
class Measured:
    """The rows of a step in ms; those of `mean`, over the devices, add up to its time."""

    mean: Rows
    devices: dict[str, Rows]

    @property
    def step(self) -> float:
        return sum(self.mean.values())


def measure(
    kernels: Mapping[str, Sequence[Kernel]], reading: Reading, steps: int, schedule: Schedule | None = None
) -> Measured:
    """The rows of a step; `schedule` is that of a pipeline."""
    transfers = transfer_times(kernels, reading)
    devices = {
        device: {row: ms / steps for row, ms in rows_of(own, reading, transfers).items()}
        for device, own in kernels.items()
    }
    mean: Rows = defaultdict(float)
    for rows in devices.values():
        for row, ms in without_bubble(rows, schedule).items():
            mean[WAITING if row.startswith(AT) else row] += ms / len(devices)
    return Measured(dict(mean), devices)


def exposed(rows: Rows) -> float:
    """The time in which a device only communicated."""
    return sum(ms for row, ms in rows.items() if row.startswith(EXPOSED))


def waiting(rows: Rows) -> float:
    """The time in which a device waited in a collective for another device, and computed nothing."""
    return sum(ms for row, ms in rows.items() if row.startswith(AT))


def computing(rows: Rows) -> float:
    """The time in which a device computed."""
    return sum(ms for row, ms in rows.items() if row not in (HOST, IDLE)) - exposed(rows) - waiting(rows)


def idle_share(schedule: Schedule) -> float:
    """The share of a stage's layers' time in lockstep in which it computes on unused values (docs/pipeline.md).

    A forward pass, the gradients of inputs and those of weights take a third of a layer's time each.
    """
    run = sum(
        flags.forward + flags.backward * (1 if flags.split else 2) + flags.weight
        for flags in schedule.flags  # of any stage: all stages run them
    )
    return 1 - 3 * schedule.microbatches * schedule.virtual_stages / run


def without_bubble(rows: Rows, schedule: Schedule | None) -> Rows:
    """Rows with a pipeline's bubble: in lockstep a share of all layers' rows, else of the waits for other stages."""
    if schedule is None:
        return rows
    layers = ATTENTION, MATMULS, ELEMENTWISE
    if schedule.parts_per_backward:  # an idle stage waits in the next collective
        waits = {row: ms for row, ms in rows.items() if row.startswith((EXPOSED, AT)) and "pipeline" in row}
        expected = sum(rows.get(row, 0.0) for row in layers) * (schedule.stages - 1) / schedule.microbatches
        bubble = min(expected, sum(waits.values()))
        return rows | {row: ms * (1 - bubble / sum(waits.values())) for row, ms in waits.items()} | {BUBBLE: bubble}
    share = idle_share(schedule)
    bubble = share * sum(rows.get(row, 0.0) for row in layers)
    return {row: ms * (1 - share) if row in layers else ms for row, ms in rows.items()} | {BUBBLE: bubble}


def unnamed(kernels: Mapping[str, Sequence[Kernel]], reading: Reading) -> dict[str, float]:
    """Kernels whose operation the trace does not name, and whose row is not certain: shares of all kernels' time.

    By the kernels' names, the largest first.
    """
    own = [kernel for of_device in kernels.values() for kernel in of_device if reading.is_own(kernel)]
    whole, found = sum(kernel.end - kernel.start for kernel in own), defaultdict[str, float](float)
    for kernel in own:
        if not reading.names(kernel) and not reading.only_axes(kernel.name):
            found[kernel.name] += (kernel.end - kernel.start) / whole
    return dict(sorted(found.items(), key=lambda item: -item[1]))
