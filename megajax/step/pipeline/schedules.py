"""Pipeline schedules as tables: the microbatch that each stage works on at each tick.

In lockstep every stage does at most one forward, one backward and one weight-gradient operation at each tick. With one
operation a tick (`1f1b` on GPUs, if its backward pass has equal parts) it does one forward operation, or one of the
parts of a backward operation. Then it sends its results to its neighbours, which use them at the next tick. A stage
holds R virtual stages (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training"); the r-th of stage s is
number r·P + s in the model's order. Tables and buffers count them by r. `megajax schedule` draws schedules.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megajax.options.pipeline_schedules import KINDS, Kind, defers

IDLE = -1


class ScheduleTable(NamedTuple):
    """The work of each stage at each tick for one kind of operation, `[ticks, P]` int32."""

    microbatch: np.ndarray  # IDLE where the stage is idle
    virtual_stage: np.ndarray  # r, 0 where the stage is idle

    @property
    def active(self) -> np.ndarray:
        """Where the stage is not idle, `[ticks, P]` bool."""
        return self.microbatch != IDLE


class Flags(NamedTuple):
    """The operations of a tick, on any stage."""

    forward: bool
    head: bool  # head and loss, after a forward operation of the last virtual stage
    backward: bool
    split: bool  # backward operations leave weight gradients to weight operations
    weight: bool  # deferred weight gradients; at a tick without `split`, backward operations compute all gradients


class TickRun(NamedTuple):
    """Consecutive ticks with the same flags."""

    flags: Flags
    length: int


@dataclass(frozen=True)
class Phase:
    """Ticks from `start` on: `repeats` times the same sequence of runs."""

    start: int
    repeats: int
    runs: tuple[TickRun, ...]

    @property
    def period(self) -> int:
        return sum(run.length for run in self.runs)


@dataclass(frozen=True, eq=False)  # a key of caches by its identity
class Schedule:
    """A pipeline schedule. Build it with `make_schedule`; call `check` on any other before use."""

    kind: str
    stages: int
    microbatches: int
    virtual_stages: int
    forward: ScheduleTable
    backward: ScheduleTable  # gradients of inputs
    weight: ScheduleTable | None  # gradients of weights; None: in the backward operations
    parts_per_backward: int = 0  # ticks of a backward operation, with one operation a tick; 0: lockstep

    @property
    def ticks(self) -> int:
        return len(self.forward.microbatch)

    @property
    def period(self) -> int:
        """The ticks in which a stage does all operations of one microbatch, with one operation a tick."""
        return self.parts_per_backward + 1

    @cached_property
    def backward_part(self) -> np.ndarray:
        """The part of each backward operation, `[ticks, P]` int32; 0 where the stage is idle."""
        part = np.zeros(self.backward.microbatch.shape, np.int32)
        for tick in range(1, self.ticks):
            again = self.backward.active[tick] & (self.backward.microbatch[tick] == self.backward.microbatch[tick - 1])
            part[tick] = np.where(again, part[tick - 1] + 1, 0)
        return part

    @property
    def tables(self) -> dict[str, ScheduleTable]:
        """The tables by operation."""
        named = {"forward": self.forward, "backward": self.backward, "weight": self.weight}
        return {name: table for name, table in named.items() if table is not None}

    @cached_property
    def ticks_of(self) -> dict[str, np.ndarray]:
        """By operation: the tick of each microbatch on each virtual stage, `[M, R·P]`; IDLE if it is missing.

        Of a backward operation in parts that of its last part.
        """
        out = {}
        for name, table in self.tables.items():
            ticks = np.full((self.microbatches, self.virtual_stages * self.stages), IDLE)
            for tick, stage in np.argwhere(table.active):
                ticks[table.microbatch[tick, stage], table.virtual_stage[tick, stage] * self.stages + stage] = tick
            out[name] = ticks
        return out

    @cached_property
    def flags(self) -> list[Flags]:
        """The flags of each tick."""
        head = (self.forward.active & (self.forward.virtual_stage == self.virtual_stages - 1))[:, -1]
        split = weight = np.zeros(self.ticks, bool)
        if self.weight is not None:
            pairs = zip(self.backward, self.weight, strict=True)
            split = np.any([(ours != theirs).any(axis=1) for ours, theirs in pairs], axis=0)
            weight = split & self.weight.active.any(axis=1)
        backward = self.backward.active.any(axis=1)
        rows = zip(self.forward.active.any(axis=1), head, backward, split & backward, weight, strict=True)
        return [Flags(*map(bool, row)) for row in rows]

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The ticks as loops, one per pattern of flags: the program does not grow with the number of microbatches.

        A pattern is one run, or two that alternate, as with virtual stages.
        """
        runs = [(flags, len(list(group))) for flags, group in itertools.groupby(self.flags)]
        phases, start, i = [], 0, 0
        while i < len(runs):
            pair, repeats = runs[i : i + 2], 1
            while len(pair) == 2 and runs[i + 2 * repeats : i + 2 * repeats + 2] == pair:
                repeats += 1
            phases.append(Phase(start, repeats, tuple(TickRun(*run) for run in (pair if repeats > 1 else pair[:1]))))
            start += repeats * phases[-1].period
            i += repeats * len(phases[-1].runs)
        return tuple(phases)


@lru_cache(maxsize=256)  # the planner asks for the same ones many times
def make_schedule(
    kind: Kind, stages: int, microbatches: int, virtual_stages: int = 1, parts_per_backward: int = 0
) -> Schedule:
    """A schedule of a known kind.

    - `gpipe` (Huang et al. 2019): all forward operations, then all backward operations.
    - `1f1b` (Narayanan et al. 2019; interleaved, 2021): each backward operation runs as soon as possible, so memory
      does not grow with the number of microbatches. In lockstep a tick holds one forward *and* one backward operation.
      With `parts_per_backward` a stage does one operation a tick: a forward operation, or one part of a backward one.
    - `zero_bubble` (Qi et al. 2024): like `1f1b`, but weight gradients of the first backward operations are deferred:
      stage s computes those of its first s operations in the last ticks, in which it has no other work.

    With several virtual stages, microbatches run in groups of P. Raises ValueError for sizes below 1, and then if M is
    not a multiple of P.
    """
    P, M, R = stages, microbatches, virtual_stages
    if kind not in KINDS:
        raise ValueError(f"schedule={kind} is not known: use {', '.join(KINDS[:-1])} or {KINDS[-1]}.")
    for name, size in (("stages", P), ("microbatches", M), ("virtual_stages", R)):
        if size < 1:
            raise ValueError(f"{name}={size} is below 1: give 1 or more.")
    if R > 1 and M % P:
        raise ValueError(f"with virtual_stages={R}, microbatches={M} must be a multiple of stages={P}.")
    if parts_per_backward:
        if (kind, R) != ("1f1b", 1):
            raise ValueError(f"parts_per_backward={parts_per_backward} needs schedule=1f1b and virtual_stages=1.")
        return _one_operation_a_tick(P, M, parts_per_backward)
    fill = P - 1  # ticks from the first stage to the last
    first_backward = M * R + fill if kind == "gpipe" else R * P - 1
    ticks = first_backward + M * R + fill
    # (microbatch, virtual stage) of the first stage's M·R operations, in order
    order = np.array(list(_in_groups(M, P, R)))
    position = np.arange(len(order))[:, None]
    stage = np.arange(P)[None, :]
    forward = _table(ticks, order, position + stage)
    reversed_order = np.stack([order[:, 0], R - 1 - order[:, 1]], axis=1)
    backward = _table(ticks, reversed_order, first_backward + position + fill - stage)
    at_once = first_backward + position + fill - stage
    deferred = np.minimum(stage, M * R)
    weight = _table(ticks, reversed_order, np.where(position < deferred, ticks - deferred + position, at_once))
    return Schedule(kind, P, M, R, forward, backward, weight if defers(kind) else None)


def _one_operation_a_tick(P: int, M: int, parts: int) -> Schedule:
    """`1f1b` with one operation a tick: in each period of `parts` + 1 ticks a stage begins one microbatch.

    A forward operation follows that of the stage before it by one tick, a backward operation that of the stage after it
    by `parts` ticks. So a stage's forward operations and parts are at different places of the period.
    """
    period = parts + 1
    forward, backward = (np.full((period * (M + P - 1), P), IDLE, np.int32) for _ in range(2))
    for m, stage in itertools.product(range(M), range(P)):
        forward[period * m + stage, stage] = m
        first = period * m + P + parts * (P - 1 - stage)
        backward[first : first + parts, stage] = m
    tables = (ScheduleTable(table, np.zeros_like(table)) for table in (forward, backward))
    return Schedule("1f1b", P, M, 1, *tables, weight=None, parts_per_backward=parts)


def _in_groups(M: int, P: int, R: int) -> Iterator[tuple[int, int]]:
    """(microbatch, virtual stage): each group of P microbatches runs all R virtual stages before the next group."""
    for first in range(0, M, P):
        for r in range(R):
            yield from ((m, r) for m in range(first, min(first + P, M)))


def _table(ticks: int, operations: np.ndarray, at: np.ndarray) -> ScheduleTable:
    """A table of `operations [n, 2]`: every stage does each of them, at tick `at [n, P]`."""
    table = ScheduleTable(np.full((ticks, at.shape[1]), IDLE, np.int32), np.zeros((ticks, at.shape[1]), np.int32))
    for stage in range(at.shape[1]):
        table.microbatch[at[:, stage], stage] = operations[:, 0]
        table.virtual_stage[at[:, stage], stage] = operations[:, 1]
    return table


def check(schedule: Schedule) -> None:
    """Check that every operation occurs once and that its inputs are available.

    A backward operation in parts occurs at the tick of each part. A stage uses its neighbour's result at the next tick;
    results do not wait between stages. Within a tick the order is forward, head, backward, weight. Raises ValueError
    with the first wrong operation.
    """
    S = schedule.stages * schedule.virtual_stages
    for name, table in schedule.tables.items():
        if not table.microbatch.shape == table.virtual_stage.shape == (schedule.ticks, schedule.stages):
            raise ValueError(f"the {name} table must have {schedule.ticks} ticks and {schedule.stages} stages.")
        exists = (table.microbatch >= 0) & (table.microbatch < schedule.microbatches)
        wrong = table.active & ~(exists & (table.virtual_stage >= 0) & (table.virtual_stage < schedule.virtual_stages))
        if wrong.any():
            tick, stage = np.argwhere(wrong)[0]
            raise ValueError(
                f"tick {tick}, stage {stage}: the {name} table has a microbatch or virtual stage that does not exist."
            )
    for name, table in schedule.tables.items():
        ticks = max(schedule.parts_per_backward, 1) if name == "backward" else 1
        if table.active.sum() != schedule.microbatches * S * ticks or (schedule.ticks_of[name] == IDLE).any():
            missing = np.argwhere(schedule.ticks_of[name] == IDLE)
            which = "microbatch {} misses virtual stage {}".format(*missing[0]) if len(missing) else "one occurs twice"
            raise ValueError(f"the {name} table does not hold every operation once: {which}.")
    forward, backward, k = schedule.ticks_of["forward"], schedule.ticks_of["backward"], schedule.parts_per_backward
    _fail_where(forward[:, 1:] != forward[:, :-1] + 1, "forward", "does not follow the stage before it by one tick", 1)
    each = "one tick" if k < 2 else f"{k} ticks"
    follows = backward[:, :-1] == backward[:, 1:] + max(k, 1)
    _fail_where(~follows, "backward", f"does not follow the stage after it by {each}")
    _fail_where(backward[:, -1:] < forward[:, -1:] + k, "backward", "comes before the loss of its microbatch", S - 1)
    if k:
        _check_one_operation(schedule)
    if schedule.weight is not None:
        _fail_where(schedule.ticks_of["weight"] < backward, "weight", "comes before its backward operation")
        idle = np.array([flags.weight for flags in schedule.flags])[:, None] & ~schedule.weight.active
        if idle.any():
            raise ValueError(
                "tick {}, stage {} has no weight operation, but other stages have one.".format(*np.argwhere(idle)[0])
            )


def _check_one_operation(schedule: Schedule) -> None:
    """With one operation a tick: a stage does no two at once, and the parts of a backward operation without a pause."""
    last, backward = schedule.ticks_of["backward"], schedule.backward.microbatch
    if (both := schedule.forward.active & schedule.backward.active).any():
        raise ValueError("tick {}, stage {} has two operations.".format(*np.argwhere(both)[0]))
    for back in range(schedule.parts_per_backward):
        found = backward[last - back, np.arange(schedule.stages)]
        _fail_where(found != np.arange(len(last))[:, None], "backward", "has parts that do not follow each other")


def _fail_where(wrong: np.ndarray, name: str, problem: str, first_stage: int = 0) -> None:
    """Raise for the first `wrong[m, i]`: microbatch m on virtual stage first_stage + i."""
    if wrong.any():
        microbatch, stage = np.argwhere(wrong)[0] + [0, first_stage]
        raise ValueError(f"the {name} operation of microbatch {microbatch} on virtual stage {stage} {problem}.")


@dataclass(frozen=True)
class BufferSlots:
    """The buffer slots that operations write and read, `[ticks, P]` int32.

    In lockstep an idle operation runs too, and its results are not used: it writes to a free slot, and reads a slot
    that a forward operation has written, so that it makes no NaN.
    """

    activation_slots: int  # number of slots on each stage for residuals of forward operations
    virtual_stages: tuple[int, ...]  # that of each of these slots, on every stage; empty if they share the slots
    deferred_slots: int  # number of slots for operands of weight operations; 0 if none is deferred
    pending_head_slots: int  # number of slots for pending head gradients, which wait in `gpipe` only
    forward: np.ndarray  # the forward operation writes to this activation slot
    backward: np.ndarray  # the backward operation reads this activation slot
    deferred: np.ndarray  # the backward operation writes to this deferred slot
    weight: np.ndarray  # the weight operation reads this deferred slot
    head: np.ndarray  # [ticks]: the head writes to this slot of pending head gradients
    backward_head: np.ndarray  # [ticks]: the last virtual stage's backward operation reads this one


@lru_cache(maxsize=256)
def assign_buffer_slots(schedule: Schedule, per_virtual_stage: bool = False) -> BufferSlots:
    """Buffer slots for a checked schedule; a slot is free again after its last use.

    Virtual stages share activation slots; with `per_virtual_stage` each has its own, which may need more.
    """
    stages, final = range(schedule.stages), schedule.virtual_stages - 1
    flagged = {name: np.array([getattr(flags, name) for flags in schedule.flags]) for name in Flags._fields}

    def assign(writer: ScheduleTable, writes: np.ndarray, reader: str) -> list["_Assigned"]:
        return [
            _assign(_writes(schedule, writes, s), _intervals(schedule, writer, s, schedule.ticks_of[reader]))
            for s in stages
        ]

    def written(assigned: list["_Assigned"]) -> np.ndarray:
        return np.stack([own.written for own in assigned], axis=1)

    def read(assigned: list["_Assigned"], reader: ScheduleTable) -> np.ndarray:
        return np.stack([_read(own, reader, s) for s, own in zip(stages, assigned, strict=True)], axis=1)

    activations, virtual_stages = assign(schedule.forward, flagged["forward"], "backward"), ()
    if per_virtual_stage:
        activations, virtual_stages = _assign_per_virtual_stage(schedule, flagged["forward"])
    nothing = np.zeros((schedule.ticks, schedule.stages), np.int32)
    deferred_slots = assign(schedule.backward, flagged["split"], "weight") if schedule.weight is not None else []
    starts, ends = schedule.ticks_of["forward"][:, -1], schedule.ticks_of["backward"][:, -1]
    heads = _assign(flagged["head"], {(m, final): (int(starts[m]), int(ends[m])) for m in range(schedule.microbatches)})
    return BufferSlots(
        activation_slots=max(own.count for own in activations),
        virtual_stages=virtual_stages,
        deferred_slots=max((own.count for own in deferred_slots), default=0),
        pending_head_slots=heads.count,
        forward=written(activations),
        backward=read(activations, schedule.backward),
        deferred=written(deferred_slots) if deferred_slots else nothing,
        weight=read(deferred_slots, schedule.weight) if schedule.weight is not None else nothing,
        head=heads.written,
        backward_head=_read(heads, schedule.backward, schedule.stages - 1),
    )


Work = tuple[int, int]  # microbatch, virtual stage


def _writes(schedule: Schedule, writes: np.ndarray, stage: int) -> np.ndarray:
    """The ticks at which a stage's forward operations write: with one operation a tick none that is idle."""
    return writes & schedule.forward.active[:, stage] if schedule.parts_per_backward else writes


class _Assigned(NamedTuple):
    count: int  # slots
    written: np.ndarray  # [ticks]
    of_work: dict[Work, int]  # the slot of each microbatch and virtual stage


def _intervals(
    schedule: Schedule, writer: ScheduleTable, stage: int, last_read: np.ndarray
) -> dict[Work, tuple[int, int]]:
    """The live intervals (first tick, last tick) of the arrays that a stage's operations of one table write."""
    out = {}
    for tick in np.flatnonzero(writer.active[:, stage]):
        m, r = int(writer.microbatch[tick, stage]), int(writer.virtual_stage[tick, stage])
        out[m, r] = (int(tick), int(last_read[m, r * schedule.stages + stage]))
    return out


def _assign(writes: np.ndarray, intervals: dict[Work, tuple[int, int]]) -> _Assigned:
    """The lowest free slot for each live interval; within a tick, writes come before reads.

    A write (`writes [ticks]`) that starts no live interval goes to a free slot.
    """
    starts = {first: work for work, (first, _) in intervals.items()}
    written, of_work = np.zeros(len(writes), np.int32), {}
    free_after: list[int] = []  # for each slot
    for tick in np.flatnonzero(writes):
        slot = next((i for i, last in enumerate(free_after) if last < tick), len(free_after))
        free_after[slot:] = free_after[slot:] or [IDLE]
        written[tick] = slot
        if int(tick) in starts:
            work = starts[int(tick)]
            of_work[work], free_after[slot] = slot, intervals[work][1]
    return _Assigned(len(free_after), written, of_work)


def _assign_per_virtual_stage(schedule: Schedule, writes: np.ndarray) -> tuple[list[_Assigned], tuple[int, ...]]:
    """(each stage's activation slots, the virtual stage of each slot), slots in their order."""
    assigned = [_Assigned(0, np.zeros(schedule.ticks, np.int32), {}) for _ in range(schedule.stages)]
    virtual_stages: tuple[int, ...] = ()
    for r in range(schedule.virtual_stages):
        first = len(virtual_stages)
        for s, before in enumerate(assigned):
            intervals = _intervals(schedule, schedule.forward, s, schedule.ticks_of["backward"])
            own = {work: interval for work, interval in intervals.items() if work[1] == r}
            new = _assign(_writes(schedule, writes, s) & (schedule.forward.virtual_stage[:, s] == r), own)
            written = np.where(schedule.forward.virtual_stage[:, s] == r, new.written + first, before.written)
            of_work = before.of_work | {work: slot + first for work, slot in new.of_work.items()}
            assigned[s] = _Assigned(first + new.count, written, of_work)
        virtual_stages += (r,) * (max(own.count for own in assigned) - first)
    return assigned, virtual_stages


def _read(assigned: _Assigned, reader: ScheduleTable, stage: int) -> np.ndarray:
    """The slot that a stage's operation reads at each tick; an idle operation reads the first slot."""
    slots = np.zeros(len(reader.microbatch), np.int32)
    for tick in np.flatnonzero(reader.active[:, stage]):
        slots[tick] = assigned.of_work.get(
            (int(reader.microbatch[tick, stage]), int(reader.virtual_stage[tick, stage])), 0
        )
    return slots
