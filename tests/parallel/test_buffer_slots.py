"""Buffer slots of pipeline schedules: microbatches in flight, and errors of `replay`."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from schedule_cases import CASES

from megajax.options.pipeline_schedules import KINDS
from megajax.step.pipeline.schedules import IDLE, assign_buffer_slots, make_schedule
from megajax.step.pipeline.simulator import Costs, replay, simulate


@pytest.mark.smoke
@pytest.mark.parametrize("P", [1, 2, 4, 8])
def test_microbatches_in_flight_of_one_round(P):
    for M in (2 * P - 1, 2 * P, 64):
        in_flight = {kind: simulate(make_schedule(kind, P, M), Costs()).in_flight for kind in KINDS}
        assert in_flight["1f1b"] == [2 * (P - s) - 1 for s in range(P)]
        assert in_flight["zero_bubble"] == in_flight["1f1b"]
        assert in_flight["gpipe"] == P * [M]


@pytest.mark.parametrize("R", [2, 3])
def test_microbatches_in_flight_of_rounds_do_not_grow_with_microbatches(R):
    P = 4
    for kind in ("1f1b", "zero_bubble"):
        few, many = (simulate(make_schedule(kind, P, M, R), Costs()) for M in (4 * P, 16 * P))
        assert few.in_flight == many.in_flight and few.buffer_slots == many.buffer_slots
        # The first stage keeps its microbatches until the first one is back, R·P + P - 2 ticks later.
        assert few.in_flight[0] == (R * P + P - 2 + 1) / R <= 2 * P - 1


def test_replay_refuses_wrong_slots_with_one_operation_a_tick():
    schedule = make_schedule("1f1b", 4, 8, parts_per_backward=2)
    slots = assign_buffer_slots(schedule)
    assert slots.activation_slots == 4
    wrong = slots.backward.copy()
    wrong[11, 0] += 1  # the second part of the first microbatch on stage 0
    with pytest.raises(ValueError, match="tick 11, stage 0: the backward operation of microbatch 0.* reads slot 1"):
        replay(schedule, replace(slots, backward=wrong))
    wrong = slots.forward.copy()
    wrong[9, 0] = slots.forward[3, 0]  # microbatch 3 where microbatch 1 still is
    with pytest.raises(ValueError, match="microbatch 1, virtual stage 0 reads slot .* which holds microbatch 3"):
        replay(schedule, replace(slots, forward=wrong))


def test_slots_are_at_most_one_more_than_live_microbatches():
    for kind, (P, M, R) in CASES:
        schedule = make_schedule(kind, P, M, R)
        report = simulate(schedule, Costs())  # replays the slots
        alive = round(max(report.in_flight) * R)
        assert alive <= report.buffer_slots.activation_slots <= alive + 1
        assert report.buffer_slots.pending_head_slots == (M if kind == "gpipe" else 1)
        # Deferred operands of the last stage while the pipeline fills, and one slot for a backward operation at the end
        deferred = kind == "zero_bubble" and P > 1
        assert report.buffer_slots.deferred_slots == (min(P - 1, M * R) + 1 if deferred else 0)


SLOT_FIELDS = {
    "forward": "activation_slots",
    "backward": "activation_slots",
    "deferred": "deferred_slots",
    "weight": "deferred_slots",
    "head": "pending_head_slots",
    "backward_head": "pending_head_slots",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("P", "M", "R"), [(1, 3, 2), (2, 4, 1), (2, 8, 2), (4, 8, 2), (4, 16, 4)])
def test_rounds_may_have_slots_of_their_own(kind, P, M, R):
    schedule = make_schedule(kind, P, M, R)
    slots = assign_buffer_slots(schedule, per_virtual_stage=True)
    replay(schedule, slots)
    assert len(slots.virtual_stages) == slots.activation_slots and set(slots.virtual_stages) == set(range(R))
    owner = np.array(slots.virtual_stages)
    for table, accessed in ((schedule.forward, slots.forward), (schedule.backward, slots.backward)):
        used = table.active
        assert (owner[accessed[used]] == table.virtual_stage[used]).all()
    if R == 1:
        assert np.array_equal(slots.forward, assign_buffer_slots(schedule).forward)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        *itertools.product(["gpipe", "1f1b"], ["forward", "backward", "head", "backward_head"]),
        *itertools.product(["zero_bubble"], SLOT_FIELDS),
    ],
)
def test_replay_catches_every_slot_that_is_off_by_one(kind, field):
    schedule = make_schedule(kind, 3, 6, 2)
    slots = assign_buffer_slots(schedule)
    replay(schedule, slots)
    table = schedule.tables.get({"deferred": "backward"}.get(field, field.split("_")[0]), schedule.forward)
    used = table.active
    if "head" in field:
        used = (used & (table.virtual_stage == schedule.virtual_stages - 1))[:, -1]
    flag = {"weight": "weight", "deferred": "split"}.get(field)
    if flag:
        used = used & np.array([getattr(flags, flag) for flags in schedule.flags])[:, None]
    assert used.any()
    count = getattr(slots, SLOT_FIELDS[field])
    for cell in np.argwhere(used):
        wrong = getattr(slots, field).copy()
        wrong[tuple(cell)] = (wrong[tuple(cell)] + 1) % max(count, 2)
        with pytest.raises(ValueError, match=r"^tick \d+, stage \d: the \w+ operation of .* slot \d+ of the \w+.*\.$"):
            replay(schedule, replace(slots, **{field: wrong}))


@pytest.mark.smoke
def test_replay_catches_an_idle_operation_that_overwrites_what_is_needed():
    schedule = make_schedule("gpipe", 2, 3)
    slots = assign_buffer_slots(schedule)
    assert schedule.forward.microbatch[3, 0] == IDLE and schedule.flags[3].forward
    wrong = slots.forward.copy()
    wrong[3, 0] = slots.forward[1, 0]
    sentence = (
        "tick 6, stage 0: the backward operation of microbatch 1, virtual stage 0 reads slot 1 of the activations, "
    )
    with pytest.raises(ValueError, match=f"^{sentence}which holds no microbatch.$"):
        replay(schedule, replace(slots, forward=wrong))
