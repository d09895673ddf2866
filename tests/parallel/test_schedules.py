"""Pipeline schedules: tables written by hand, times by formula, and errors of `check`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from schedule_cases import CASES, SIZES

from megajax.options.pipeline_schedules import KINDS
from megajax.step.pipeline.schedules import IDLE, Schedule, ScheduleTable, check, make_schedule
from megajax.step.pipeline.simulator import Costs, sends, simulate, tick_starts

COSTS = (Costs(), Costs(1.0, 1.3, 0.7), Costs(2.0, 0.5, 3.0))


def rows(schedule: Schedule, operation: str) -> list[str]:
    """A line for each stage: microbatch and virtual stage (a, b, ...) at each tick, a dot where it is idle."""
    table = schedule.tables[operation]
    letters = "abc" if schedule.virtual_stages > 1 else [""]
    return [
        " ".join("." if m == IDLE else f"{m}{letters[r]}" for m, r in zip(*column, strict=True))
        for column in zip(table.microbatch.T, table.virtual_stage.T, strict=True)
    ]


def happens(schedule: Schedule, flag: str) -> str:
    """An x for each tick that has the flag, a dot for one that has not."""
    return "".join("x" if getattr(flags, flag) else "." for flags in schedule.flags)


def works(schedule: Schedule, operation: str, stage: int) -> list[tuple[int, tuple[int, int]]]:
    """(tick, (microbatch, virtual stage)) of each operation of a stage."""
    table = schedule.tables[operation]
    cells = zip(table.microbatch[:, stage].tolist(), table.virtual_stage[:, stage].tolist(), strict=True)
    return [(tick, cell) for tick, cell in enumerate(cells) if cell[0] != IDLE]


# Tables by hand


@pytest.mark.smoke
def test_1f1b_of_four_stages_and_eight_microbatches_by_hand():
    schedule = make_schedule("1f1b", stages=4, microbatches=8)
    assert rows(schedule, "forward") == [
        "0 1 2 3 4 5 6 7 . . . . . .",
        ". 0 1 2 3 4 5 6 7 . . . . .",
        ". . 0 1 2 3 4 5 6 7 . . . .",
        ". . . 0 1 2 3 4 5 6 7 . . .",
    ]
    assert rows(schedule, "backward") == [
        ". . . . . . 0 1 2 3 4 5 6 7",
        ". . . . . 0 1 2 3 4 5 6 7 .",
        ". . . . 0 1 2 3 4 5 6 7 . .",
        ". . . 0 1 2 3 4 5 6 7 . . .",
    ]
    assert schedule.weight is None


def test_gpipe_by_hand():
    schedule = make_schedule("gpipe", stages=2, microbatches=3)
    assert rows(schedule, "forward") == ["0 1 2 . . . . .", ". 0 1 2 . . . ."]
    assert rows(schedule, "backward") == [". . . . . 0 1 2", ". . . . 0 1 2 ."]


def test_two_rounds_with_deferred_weight_gradients_by_hand():
    schedule = make_schedule("zero_bubble", stages=2, microbatches=4, virtual_stages=2)
    assert rows(schedule, "forward") == [
        "0a 1a 0b 1b 2a 3a 2b 3b . . . .",
        ". 0a 1a 0b 1b 2a 3a 2b 3b . . .",
    ]
    assert rows(schedule, "backward") == [
        ". . . . 0b 1b 0a 1a 2b 3b 2a 3a",
        ". . . 0b 1b 0a 1a 2b 3b 2a 3a .",
    ]
    assert rows(schedule, "weight") == [
        ". . . . 0b 1b 0a 1a 2b 3b 2a 3a",
        ". . . . 1b 0a 1a 2b 3b 2a 3a 0b",
    ]
    assert happens(schedule, "split") == "...x.......x"
    assert happens(schedule, "weight") == "...........x"
    assert happens(schedule, "head") == "...xx..xx..."


@pytest.mark.smoke
def test_zero_bubble_of_four_stages_and_eight_microbatches_by_hand():
    schedule = make_schedule("zero_bubble", stages=4, microbatches=8)
    without = make_schedule("1f1b", stages=4, microbatches=8)
    assert rows(schedule, "forward") == rows(without, "forward")
    assert rows(schedule, "backward") == rows(without, "backward")
    assert rows(schedule, "weight") == [
        ". . . . . . 0 1 2 3 4 5 6 7",
        ". . . . . . 1 2 3 4 5 6 7 0",
        ". . . . . . 2 3 4 5 6 7 0 1",
        ". . . . . . 3 4 5 6 7 0 1 2",
    ]
    assert happens(schedule, "split") == "...xxx.....xxx"
    assert happens(schedule, "weight") == "...........xxx"


def test_zero_bubble_of_fewer_microbatches_than_stages_by_hand():
    """A stage that is done with its backward operations waits until all are, and then none is idle."""
    schedule = make_schedule("zero_bubble", stages=4, microbatches=2)
    assert rows(schedule, "backward") == [
        ". . . . . . 0 1",
        ". . . . . 0 1 .",
        ". . . . 0 1 . .",
        ". . . 0 1 . . .",
    ]
    assert rows(schedule, "weight") == [
        ". . . . . . 0 1",
        ". . . . . . 1 0",
        ". . . . . . 0 1",
        ". . . . . . 0 1",
    ]
    assert happens(schedule, "split") == "...xxxxx"
    assert happens(schedule, "weight") == "......xx"


# One operation a tick


@pytest.mark.smoke
def test_one_operation_a_tick_of_four_stages_and_eight_microbatches_by_hand():
    """A microbatch waits nowhere: 4 forward operations, then 4 backward operations of two ticks each."""
    schedule = make_schedule("1f1b", stages=4, microbatches=8, parts_per_backward=2)
    assert rows(schedule, "forward") == [
        "0 . . 1 . . 2 . . 3 . . 4 . . 5 . . 6 . . 7 . . . . . . . . . . .",
        ". 0 . . 1 . . 2 . . 3 . . 4 . . 5 . . 6 . . 7 . . . . . . . . . .",
        ". . 0 . . 1 . . 2 . . 3 . . 4 . . 5 . . 6 . . 7 . . . . . . . . .",
        ". . . 0 . . 1 . . 2 . . 3 . . 4 . . 5 . . 6 . . 7 . . . . . . . .",
    ]
    assert rows(schedule, "backward") == [
        ". . . . . . . . . . 0 0 . 1 1 . 2 2 . 3 3 . 4 4 . 5 5 . 6 6 . 7 7",
        ". . . . . . . . 0 0 . 1 1 . 2 2 . 3 3 . 4 4 . 5 5 . 6 6 . 7 7 . .",
        ". . . . . . 0 0 . 1 1 . 2 2 . 3 3 . 4 4 . 5 5 . 6 6 . 7 7 . . . .",
        ". . . . 0 0 . 1 1 . 2 2 . 3 3 . 4 4 . 5 5 . 6 6 . 7 7 . . . . . .",
    ]
    assert happens(schedule, "head") == "...x..x..x..x..x..x..x..x........"
    assert schedule.backward_part[8:14, 1].tolist() == [0, 1, 0, 0, 1, 0]


PARTED = [(P, M, k) for (P, M, R), k in itertools.product(SIZES, (1, 2, 3)) if R == 1]


def test_one_operation_a_tick_keeps_what_1f1b_keeps_and_is_as_long_idle():
    for P, M, k in PARTED:
        schedule = make_schedule("1f1b", P, M, parts_per_backward=k)
        report = simulate(schedule, Costs(1.0, 0.5 * k, 0.5 * k))
        assert report.in_flight == [min(M, P - stage) for stage in range(P)]
        assert report.buffer_slots.activation_slots == min(M, P)
        assert report.time == pytest.approx((M + P - 1) * (1 + k))
        assert not (schedule.forward.active & schedule.backward.active).any()


def test_stages_send_after_forward_operations_and_last_parts():
    # Of stage 0: F . . | . b b; of stage 1: . F b | b . .; the first stage's backward operation sends nothing.
    assert sends(make_schedule("1f1b", 2, 1, parts_per_backward=2)).tolist() == [True, False, False, True, False, False]


def test_check_refuses_broken_tables_with_one_operation_a_tick():
    schedule = make_schedule("1f1b", 4, 8, parts_per_backward=2)
    late = edited(schedule, "forward", move((3, 0), (10, 0)))
    with pytest.raises(ValueError, match="forward operation of microbatch 1 on virtual stage 1 does not follow"):
        check(late)
    with pytest.raises(
        ValueError, match="microbatch 0 on virtual stage 0 does not follow the stage after it by 2 tick"
    ):
        check(edited(schedule, "backward", move((11, 0), (12, 0))))
    with pytest.raises(ValueError, match="microbatch 0 on virtual stage 2 has parts that do not follow each other"):
        check(edited(schedule, "backward", move((6, 2), (4, 2))))
    idle = np.full((1, 4), IDLE, np.int32)
    forward, backward = (
        ScheduleTable(np.concatenate(order), np.zeros((34, 4), np.int32))
        for order in ([schedule.forward.microbatch, idle], [idle, schedule.backward.microbatch])
    )
    with pytest.raises(ValueError, match="tick 6, stage 3 has two operations"):
        check(replace(schedule, forward=forward, backward=backward))


# For every kind and many sizes


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_runs_in_the_time_of_its_formula(kind):
    for P, M, R in SIZES:
        schedule = make_schedule(kind, P, M, R)
        ideal = idle = 0.0
        for costs in COSTS:
            F, I, W = costs.forward, costs.backward, costs.weight  # noqa: E741
            idle = (P - 1) / R * (F + I + (0 if kind == "zero_bubble" else W))
            ideal = M * (F + I + W)
            assert tick_starts(schedule, costs)[-1] == pytest.approx(ideal + idle), (P, M, R, costs)
        report = simulate(schedule, COSTS[-1])  # which replays the schedule too, whatever the costs
        assert report.ideal == pytest.approx(ideal), (P, M, R)
        assert report.time == pytest.approx(ideal + idle), (P, M, R)
        assert report.bubble == pytest.approx(idle / (ideal + idle), abs=1e-12), (P, M, R)
        ticks = 2 * (M * R + P - 1) if kind == "gpipe" else M * R + R * P + P - 2
        assert report.ticks == schedule.ticks == ticks


@pytest.mark.parametrize("kind", KINDS)
def test_each_operation_follows_the_one_it_needs(kind):
    """Read off the cells one by one, without `check` and `ticks_of`."""
    for P, M, R in SIZES:
        schedule = make_schedule(kind, P, M, R)
        at = {}
        for name, table in schedule.tables.items():
            for (tick, stage), m in np.ndenumerate(table.microbatch):
                if m != IDLE:
                    key = (name, int(m), int(table.virtual_stage[tick, stage]) * P + stage)
                    assert key not in at
                    at[key] = tick
        assert len(at) == len(schedule.tables) * M * P * R
        last = P * R - 1
        for (name, m, virtual), tick in at.items():
            if name == "forward" and virtual > 0:
                assert tick == at["forward", m, virtual - 1] + 1
            if name == "backward":
                needed = at["backward", m, virtual + 1] + 1 if virtual < last else at["forward", m, last]
                assert tick == needed if virtual < last else tick >= needed
            if name == "weight":
                assert tick - at["backward", m, virtual] in (0, max(M * R, virtual % P))


def test_only_what_fills_the_pipeline_is_deferred():
    for P, M, R in SIZES:
        schedule = make_schedule("zero_bubble", P, M, R)
        full = np.flatnonzero(schedule.backward.active[:, 0])[0]  # the first tick at which all stages go backward
        total = 0
        for s in range(P):
            begun, done = ({work: tick for tick, work in works(schedule, name, s)} for name in ("backward", "weight"))
            order = list(begun)
            late = [work for work in order if done[work] != begun[work]]
            # The first s in the order of their backward operations, which is all there are before the pipeline is full.
            assert late == order[:s] == [work for work in order if begun[work] < full]
            # They are done in that order in the stage's last ticks, at which it has no backward operation.
            assert list(done) == order[s:] + order[:s]
            assert [done[work] for work in late] == list(range(schedule.ticks - len(late), schedule.ticks))
            assert not schedule.backward.active[schedule.ticks - len(late) :, s].any()
            total += len(late)
        assert total == sum(min(s, M * R) for s in range(P))
        assert total == P * (P - 1) // 2 or M * R < P - 1


def test_backward_operations_are_split_only_while_the_pipeline_fills_and_drains():
    for P, M, R in SIZES:
        schedule = make_schedule("zero_bubble", P, M, R)
        backward = schedule.backward.active
        (fills,) = np.nonzero(backward.any(axis=1) & ~backward[:, 0])
        (drains,) = np.nonzero(backward.any(axis=1) & ~backward[:, -1])
        assert len(fills) == P - 1 and len(drains) == P - 1
        assert {tick for tick, flags in enumerate(schedule.flags) if flags.split} == {*fills, *drains}
        weights = {*drains} - {*fills}
        assert {tick for tick, flags in enumerate(schedule.flags) if flags.weight} == weights
        assert len(weights) == min(P - 1, M * R)
    for kind, (P, M, R) in CASES:
        if kind != "zero_bubble" or P == 1:
            assert not any(flags.split or flags.weight for flags in make_schedule(kind, P, M, R).flags)


def test_no_stage_is_idle_after_its_first_weight_operation():
    """A program does not mask weight operations: at their ticks all stages have one."""
    for P, M, R in SIZES:
        schedule = make_schedule("zero_bubble", P, M, R)
        assert schedule.weight is not None
        ticks = np.flatnonzero(schedule.weight.active.any(axis=1))
        assert ticks.tolist() == list(range(schedule.ticks - M * R, schedule.ticks))
        assert schedule.weight.active[ticks].all()


@pytest.mark.parametrize("kind", KINDS)
def test_phases_hold_every_tick_once_with_its_flags(kind):
    for P, M, R in SIZES:
        schedule = make_schedule(kind, P, M, R)
        flags, start = [], 0
        for phase in schedule.phases:
            assert phase.start == start and phase.repeats >= 1
            for _ in range(phase.repeats):
                for run_flags, length in phase.runs:
                    flags += length * [run_flags]
            start += phase.repeats * phase.period
        assert flags == schedule.flags and len(flags) == schedule.ticks


def test_flags_say_what_happens_on_any_stage():
    for kind, (P, M, R) in CASES:
        schedule = make_schedule(kind, P, M, R)
        for tick, flags in enumerate(schedule.flags):
            for name in ("forward", "backward"):
                assert getattr(flags, name) == any(m != IDLE for m in schedule.tables[name].microbatch[tick])
            differ = False  # on any stage one without the other, or with another microbatch or virtual stage
            if schedule.weight is not None:
                tables = (schedule.backward, schedule.weight)
                backward, weight = (list(zip(t.microbatch[tick], t.virtual_stage[tick], strict=True)) for t in tables)
                differ = backward != weight
                assert flags.weight == (differ and any(m != IDLE for m, _ in weight))
            else:
                assert not flags.weight
            assert flags.split == (differ and flags.backward)
            work = (schedule.forward.microbatch[tick, P - 1], schedule.forward.virtual_stage[tick, P - 1])
            assert flags.head == (work[0] != IDLE and work[1] == R - 1)


@pytest.mark.parametrize("virtual_stages", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_phases_does_not_grow_with_microbatches(kind, virtual_stages):
    numbers = [len(make_schedule(kind, 4, M, virtual_stages).phases) for M in (8, 32, 128)]
    splits = {"gpipe": 0, "1f1b": 0, "zero_bubble": 1 if virtual_stages == 1 else 2}[kind]
    assert numbers[1] == numbers[2]
    # One virtual stage: fill, full, drain. Two: the head comes at every other P ticks; of 8 microbatches no loop yet.
    assert numbers[1] == (3 if virtual_stages == 1 else 4) + splits
    assert numbers[0] == (3 if virtual_stages == 1 else 5) + splits


# Broken tables


def edited(schedule: Schedule, operation: str, edit) -> Schedule:
    """A copy whose table `edit(microbatch, virtual stage)` has changed."""
    table = ScheduleTable(*(array.copy() for array in schedule.tables[operation]))
    edit(table.microbatch, table.virtual_stage)
    return replace(schedule, **{operation: table})


def move(one, other):
    def edit(*arrays):
        for array in arrays:
            array[one], array[other] = array[other].copy(), array[one].copy()

    return edit


def drop(cell):
    return lambda microbatch, r: microbatch.__setitem__(cell, IDLE)


def put(cell, m, in_virtual_stage=0):
    def edit(microbatch, r):
        microbatch[cell], r[cell] = m, in_virtual_stage

    return edit


NOT_ONCE = "the {} table does not hold every operation once"
# In "zero_bubble", P=4, M=8: (operation, edit, the sentence)
BROKEN = {
    "forward swapped": (
        "forward",
        move((2, 0), (3, 0)),
        "forward operation of microbatch 2 .* stage 1 does not follow",
    ),
    "backward swapped": ("backward", move((6, 1), (7, 1)), "backward operation of .* does not follow the stage after"),
    "forward early": ("forward", move((0, 1), (1, 1)), "forward operation of microbatch 0 on virtual stage 1 does not"),
    "backward early": ("backward", move((4, 1), (5, 1)), "backward operation of microbatch 0 .* stage 0 does not"),
    "before the loss": ("backward", move((2, 3), (3, 3)), "backward operation of microbatch 0 .* does not follow"),
    "weight too early": (
        "weight",
        move((5, 0), (6, 0)),
        "weight operation of microbatch 0 .* stage 0 comes before its",
    ),
    "weight swapped": ("weight", move((6, 0), (9, 0)), "weight operation of microbatch 3 .* stage 0 comes before its"),
    "deferred to too early": (
        "weight",
        move((2, 3), (11, 3)),
        "weight operation of microbatch 0 .* stage 3 comes before",
    ),
    "forward dropped": ("forward", drop((4, 1)), NOT_ONCE.format("forward") + ": microbatch 3 misses virtual stage 1"),
    "backward dropped": ("backward", drop((6, 0)), NOT_ONCE.format("backward") + ": microbatch 0 misses"),
    "weight dropped": ("weight", drop((13, 3)), NOT_ONCE.format("weight") + ": microbatch 2 misses virtual stage 3"),
    "forward twice": ("forward", put((8, 0), 0), NOT_ONCE.format("forward") + ": one occurs twice"),
    "overwritten": ("forward", put((1, 0), 0), NOT_ONCE.format("forward") + ": microbatch 1 misses"),
    "weight twice": ("weight", put((5, 2), 3), NOT_ONCE.format("weight") + ": one occurs twice"),
    "microbatch too high": (
        "forward",
        put((7, 0), 8),
        "tick 7, stage 0: the forward table has a microbatch or virtual stage",
    ),
    "microbatch below 0": (
        "forward",
        put((6, 0), -2),
        "tick 6, stage 0: the forward table has a microbatch or virtual stage",
    ),
    "virtual stage too high": (
        "weight",
        put((6, 1), 0, 1),
        "tick 6, stage 1: the weight table has a microbatch or virtual stage",
    ),
    "virtual stage below 0": (
        "backward",
        put((6, 0), 0, -1),
        "tick 6, stage 0: the backward table has a microbatch or virtual stage",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", BROKEN)
def test_check_refuses_a_broken_table(name):
    operation, edit, sentence = BROKEN[name]
    with pytest.raises(ValueError, match=rf"{sentence}.*\.$"):
        simulate(edited(make_schedule("zero_bubble", 4, 8), operation, edit), Costs())  # checks first


def test_check_refuses_a_backward_operation_before_its_loss():
    """All stages one tick early, so that they fit each other."""
    schedule = make_schedule("1f1b", 4, 8)
    early = ScheduleTable(*(np.roll(array, -1, axis=0) for array in schedule.backward))
    with pytest.raises(ValueError, match="backward operation of microbatch 0 on virtual stage 3 comes before the loss"):
        check(replace(schedule, backward=early))


def test_check_refuses_a_table_of_another_size():
    schedule = make_schedule("zero_bubble", 4, 8)
    short = ScheduleTable(*(array[:-1] for array in schedule.weight or ()))
    with pytest.raises(ValueError, match="the weight table must have 14 ticks and 4 stages"):
        check(replace(schedule, weight=short))
    with pytest.raises(ValueError, match="the forward table must have 14 ticks and 3 stages"):
        check(replace(schedule, stages=3))


@pytest.mark.parametrize("kind", KINDS)
def test_check_refuses_any_two_swapped_entries(kind):
    generator = np.random.default_rng(0)
    for P, M, R in [size for size in SIZES if size[0] > 1 and size[1] > 1]:
        schedule = make_schedule(kind, P, M, R)
        for operation in ("forward", "backward"):
            stage = int(generator.integers(P))
            ticks = np.flatnonzero(schedule.tables[operation].active[:, stage])
            one, other = (int(tick) for tick in generator.choice(ticks, 2, replace=False))
            with pytest.raises(ValueError, match=f"the {operation} operation of"):
                check(edited(schedule, operation, move((one, stage), (other, stage))))


REFUSED = {
    ("zero_bubble", 4, 8, 1, 2): "parts_per_backward=2 needs schedule=1f1b and virtual_stages=1.",
    ("1f1b", 4, 8, 2, 2): "parts_per_backward=2 needs schedule=1f1b and virtual_stages=1.",
    ("2f2b", 4, 8, 1): "schedule=2f2b is not known: use gpipe, 1f1b or zero_bubble.",
    ("1f1b", 0, 8, 1): "stages=0 is below 1: give 1 or more.",
    ("1f1b", 4, -1, 1): "microbatches=-1 is below 1: give 1 or more.",
    ("1f1b", 4, 8, 0): "virtual_stages=0 is below 1: give 1 or more.",
    ("1f1b", 4, 6, 2): "with virtual_stages=2, microbatches=6 must be a multiple of stages=4.",
}


@pytest.mark.parametrize("sizes", REFUSED)
def test_sizes_that_make_no_schedule(sizes):
    with pytest.raises(ValueError) as raised:
        make_schedule(*sizes)
    assert str(raised.value) == REFUSED[sizes]


# Costs


@pytest.mark.smoke
def test_sending_is_paid_once_at_each_tick_that_sends():
    # Two stages: F0 | F1 F0B0 | B0 F1B1 | B1; the last tick has nobody to send to.
    report = simulate(make_schedule("1f1b", 2, 2), Costs(1.0, 1.0, 1.0, send=0.5))
    assert report.time == pytest.approx((1 + 0.5) + (3 + 0.5) + (3 + 0.5) + 2)
    assert report.ideal == 6
    # In two virtual stages the last stage sends on to the first, and the first back to the last.
    schedule = make_schedule("1f1b", 2, 2, 2)
    assert sends(schedule).tolist() == 7 * [True] + [False]
    assert simulate(schedule, Costs(send=0.5)).time == pytest.approx((2 + 1 / 2) * 3 + 7 * 0.5)
    # At the tick after its last forward operation gpipe's last virtual stage has nothing to send.
    assert sends(make_schedule("gpipe", 2, 1)).tolist() == [True, False, True, False]
    assert sends(make_schedule("gpipe", 3, 3, 2)).tolist() == [*7 * [True], False, *7 * [True], False]
    assert not sends(make_schedule("1f1b", 1, 4, 3)).any()


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        ({"forward": -1.0}, "forward=-1 is not a cost: give a number from 0 up."),
        ({"send": float("nan")}, "send=nan is not a cost: give a number from 0 up."),
        ({"weight": float("inf")}, "weight=inf is not a cost: give a number from 0 up."),
        ({"forward": 0.0, "backward": 0.0, "weight": 0.0, "send": 1.0}, "forward, backward and weight are all 0: "),
    ],
)
def test_costs_are_finite_and_not_negative(bad, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}"):
        Costs(**bad)
