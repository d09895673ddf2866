"""The solver of dynamic context, against plain loops, all possibilities and hand-worked cases."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.estimate.context_groups import SequenceGroup, assign


def cost(length: int, degree: int) -> float:
    """Linear and quadratic work, divided, and traffic that grows with the devices."""
    return length / degree + length * length / (64 * degree) + (2 * length / degree * (degree - 1) if degree > 1 else 0)


sequences = st.lists(st.integers(1, 400), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None)
@given(sequences, st.sampled_from((1, 2, 4, 8)), st.integers(1, 3), st.integers(60, 500))
def test_each_sequence_is_in_one_block_and_all_sums_are_those_of_plain_loops(lengths, devices, microbatches, capacity):
    found = assign(lengths, devices, microbatches, capacity, cost)
    if found is None:
        assert sum(lengths) > capacity or max(lengths) > capacity * devices
        return
    assert sorted(group.sequence for group in found.groups) == list(range(len(lengths)))
    ends, tokens = np.zeros((microbatches, devices)), np.zeros((microbatches, devices), int)
    for sequence, microbatch, first, degree in found.groups:
        assert degree in (1, 2, 4, 8) and first % degree == 0 and first + degree <= devices
        block = ends[microbatch, first : first + degree]
        assert (block == block[0]).all(), "a device of the group would wait for another one"
        block += cost(lengths[sequence], degree)
        tokens[microbatch, first : first + degree] += -(-lengths[sequence] // degree)
    assert tokens.max() <= capacity and (tokens == found.tokens).all()
    np.testing.assert_allclose(found.seconds, ends, rtol=1e-12)
    assert found.step_seconds == pytest.approx(sum(max(row) for row in ends), rel=1e-12)
    again = assign(lengths, devices, microbatches, capacity, cost)
    assert again is not None and again.groups == found.groups


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_no_division_of_few_sequences_is_much_better(lengths):
    """All degrees and blocks of 4 devices: the longest time is at most half as long again as the best of them."""
    blocks = [(first, degree) for degree in (1, 2, 4) for first in range(0, 4, degree)]
    best = np.inf
    for chosen in product(blocks, repeat=len(lengths)):
        times = np.zeros(4)
        for length, (first, degree) in zip(lengths, chosen, strict=True):
            times[first : first + degree] += cost(length, degree)
        best = min(best, times.max())
    found = assign(lengths, 4, 1, 10_000, cost)
    assert found is not None and best * (1 - 1e-12) <= found.seconds.max() <= 1.5 * best


@pytest.mark.smoke
def test_a_long_sequence_is_shared_and_short_ones_are_not():
    """Attention only, without traffic: 8 has 64 units, as 16 times 2; 4 devices have 32 each."""
    found = assign([8, *[2] * 16], 4, 1, 100, lambda length, degree: length * length / degree)
    assert found is not None and found.seconds.tolist() == [[32.0] * 4] and found.waiting == 0
    assert found.groups[0] == SequenceGroup(0, 0, 0, 2) and {group.degree for group in found.groups[1:]} == {1}
    assert assign([8], 4, 1, 1, lambda length, degree: 1.0) is None  # two tokens a device
    assert assign([2, 2], 1, 1, 3, lambda length, degree: 1.0) is None
    two = assign([2, 2], 1, 2, 3, lambda length, degree: 1.0)  # in two microbatches
    assert two is not None and two.seconds.tolist() == [[1.0], [1.0]]
