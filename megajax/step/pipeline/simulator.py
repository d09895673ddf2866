"""Simulation of a pipeline schedule tick by tick: time, bubble, and the activations and buffer slots in memory."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from megajax.step.pipeline.schedules import IDLE, BufferSlots, Schedule, ScheduleTable, Work, assign_buffer_slots, check


@dataclass(frozen=True)
class Costs:
    """The time of one microbatch on a whole stage, all R virtual stages together, in any unit.

    Raises ValueError for a cost that is negative or not finite, and if forward, backward and weight are all 0.
    """

    forward: float = 1.0
    backward: float = 1.0  # gradients of inputs
    weight: float = 1.0  # gradients of weights
    send: float = 0.0  # a transfer to a neighbour; once per tick at which any stage sends

    def __post_init__(self) -> None:
        for name, cost in ((field.name, getattr(self, field.name)) for field in fields(self)):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"{name}={cost:g} is not a cost: give a number from 0 up.")
        if not self.work:
            raise ValueError("forward, backward and weight are all 0: give one of them a cost above 0.")

    @property
    def work(self) -> float:
        """The time of one microbatch on one stage without sending."""
        return self.forward + self.backward + self.weight

    def of_operations(self, schedule: Schedule) -> dict[str, float]:
        """By table of the schedule: the cost of one operation at a tick: of one virtual stage, or of one part."""
        backward = self.backward + (self.weight if schedule.weight is None else 0.0)
        backward /= max(schedule.parts_per_backward, 1)
        whole = {"forward": self.forward, "backward": backward, "weight": self.weight}
        return {name: whole[name] / schedule.virtual_stages for name in schedule.tables}


class SlotCounts(NamedTuple):
    """The number of slots of a stage's buffers, as in `BufferSlots`."""

    activation_slots: int
    deferred_slots: int
    pending_head_slots: int


@dataclass(frozen=True)
class Report:
    """The result of `simulate`."""

    ticks: int
    time: float
    ideal: float  # the time without idle stages
    in_flight: list[float]  # on each stage: most microbatches whose activations are kept at once, in whole stages
    buffer_slots: SlotCounts

    @property
    def bubble(self) -> float:
        """The idle fraction of the time, 0 to 1."""
        return max(0.0, 1 - self.ideal / self.time)


def simulate(schedule: Schedule, costs: Costs) -> Report:
    """Run a schedule without a model.

    Stages run in lockstep: a tick takes as long as its slowest stage. Raises ValueError for a table that cannot run
    (`check`) and for buffer slots that are overwritten too early (`replay`).
    """
    check(schedule)
    slots = assign_buffer_slots(schedule)
    replay(schedule, slots)
    return Report(
        ticks=schedule.ticks,
        time=float(tick_starts(schedule, costs)[-1]),
        ideal=schedule.microbatches * costs.work,
        in_flight=_in_flight(schedule),
        buffer_slots=SlotCounts(slots.activation_slots, slots.deferred_slots, slots.pending_head_slots),
    )


def tick_starts(schedule: Schedule, costs: Costs) -> np.ndarray:
    """The start of each tick, then the end of the last one, `[ticks + 1]`."""
    cost = costs.of_operations(schedule)
    of_stages = sum(cost[name] * table.active for name, table in schedule.tables.items())
    of_ticks = np.max(of_stages, axis=1) + costs.send * sends(schedule)
    return np.concatenate([[0.0], np.cumsum(of_ticks)])


def sends(schedule: Schedule) -> np.ndarray:
    """The ticks at which any stage sends to another, `[ticks]` bool."""
    if schedule.stages == 1:
        return np.zeros(schedule.ticks, bool)
    forward, backward = schedule.forward.active.copy(), schedule.backward.active.copy()
    forward[:, -1] &= schedule.forward.virtual_stage[:, -1] != schedule.virtual_stages - 1  # the last virtual stage
    backward[:, 0] &= schedule.backward.virtual_stage[:, 0] != 0  # the first
    backward &= schedule.backward_part == max(schedule.parts_per_backward, 1) - 1  # the results of last parts
    return (forward | backward).any(axis=1)


def _in_flight(schedule: Schedule) -> list[float]:
    """On each stage: most activations kept at once, in whole stages."""
    first = schedule.ticks_of["forward"]
    last = schedule.ticks_of["backward"]
    most = []
    for stage in range(schedule.stages):
        change = np.zeros(schedule.ticks + 1, int)
        np.add.at(change, first[:, stage :: schedule.stages], 1)
        np.add.at(change, last[:, stage :: schedule.stages] + 1, -1)
        most.append(float(np.cumsum(change).max()) / schedule.virtual_stages)
    return most


class _Access(NamedTuple):
    """An operation's write to a buffer, or its read. `slot` has one column per stage, or only the last stage's."""

    flag: str  # name of the flag of its ticks
    operation: str  # idle or not
    writes: bool
    buffer: str
    count: int  # number of slots of the buffer
    table: ScheduleTable  # the operation's microbatches and virtual stages, [ticks, columns]
    slot: np.ndarray  # [ticks, columns]


def replay(schedule: Schedule, slots: BufferSlots) -> None:
    """Check buffer slots by simulating their writes and reads tick by tick.

    Each operation must read a slot that was written for its own microbatch and virtual stage. In lockstep an idle one
    overwrites its slot with numbers that are not used, and must read a slot that has been written. Deferred slots are
    written only at ticks with `Flags.split`, and read only at ticks with `Flags.weight`. Raises ValueError with tick,
    stage and operation.
    """
    memory: dict[tuple[str, int, int], Work | None] = {}  # by buffer, stage and slot; None: from an idle operation
    accesses = _accesses(schedule, slots)
    for tick, flags in enumerate(schedule.flags):
        for access in (access for access in accesses if getattr(flags, access.flag)):
            width = access.slot.shape[1]
            for column in range(width):
                stage, slot = schedule.stages - width + column, int(access.slot[tick, column])
                microbatch, r = (int(own[tick, column]) for own in access.table)
                work = None if microbatch == IDLE else (microbatch, r)
                if work is None and schedule.parts_per_backward:
                    continue  # an idle stage runs no operation
                where = f"tick {tick}, stage {stage}: the {access.operation} operation of {_named(work)}"
                name = f"slot {slot} of the {access.buffer}"
                if not 0 <= slot < access.count:
                    raise ValueError(f"{where} uses {name}, but there are {access.count} slots.")
                if access.writes:
                    memory[access.buffer, stage, slot] = work
                    continue
                if (access.buffer, stage, slot) not in memory:
                    raise ValueError(f"{where} reads {name}, which has not been written.")
                if work is not None and (found := memory[access.buffer, stage, slot]) != work:
                    raise ValueError(f"{where} reads {name}, which holds {_named(found)}.")


def _named(work: Work | None) -> str:
    return "no microbatch" if work is None else f"microbatch {work[0]}, virtual stage {work[1]}"


def _accesses(schedule: Schedule, slots: BufferSlots) -> list[_Access]:
    """All accesses, in their order within a tick."""
    forward, backward, weight = schedule.forward, schedule.backward, schedule.weight
    loss, last = (_of_last_virtual_stage(schedule, table) for table in (forward, backward))
    heads = "pending head gradients"
    out = [
        _Access("forward", "forward", True, "activations", slots.activation_slots, forward, slots.forward),
        _Access("head", "head", True, heads, slots.pending_head_slots, loss, slots.head[:, None]),
        _Access("backward", "backward", False, "activations", slots.activation_slots, backward, slots.backward),
        _Access("backward", "backward", False, heads, slots.pending_head_slots, last, slots.backward_head[:, None]),
    ]
    if weight is not None:
        out += [
            _Access("split", "backward", True, "deferred operands", slots.deferred_slots, backward, slots.deferred),
            _Access("weight", "weight", False, "deferred operands", slots.deferred_slots, weight, slots.weight),
        ]
    return out


def _of_last_virtual_stage(schedule: Schedule, table: ScheduleTable) -> ScheduleTable:
    """The table of the last virtual stage only, `[ticks, 1]`."""
    last = np.where(table.virtual_stage == schedule.virtual_stages - 1, table.microbatch, IDLE)
    return ScheduleTable(last[:, -1:], table.virtual_stage[:, -1:])
