"""Dynamic context: the division of documents among groups of devices, against plain loops and all possibilities."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megajax.config import ModelConfig
from megajax.layout.attention_pairs import token_pairs
from megajax.layout.context_groups import EXCESS, ContextGroups, document_runs
from megajax.parallel.context.token_order import GROUP_SIZE, ROW_INDEX, grouped_order

DEVICES = st.sampled_from((2, 4, 8))


@st.composite
def rows(draw, devices: int, length: int = 24):
    """Lengths that fill a row; many ends at borders of devices, as groups need them."""
    tokens = devices * length
    ends = draw(st.sets(st.integers(1, tokens - 1), max_size=20)) | draw(st.sets(st.sampled_from(range(6, tokens, 6))))
    return np.diff([0, *sorted(ends), tokens]).tolist()


def causal_pairs(length: int) -> int:
    return sum(range(1, length + 1))


@settings(max_examples=150, deadline=None)
@given(st.data(), DEVICES, st.sampled_from((0, 10, 1000)))
def test_groups_are_filled_by_whole_documents_and_none_has_much_more_work(data, devices, linear):
    lengths = data.draw(rows(devices))
    documents, sizes = ContextGroups(devices, linear=linear).arrange(lengths)
    assert sorted(documents) == list(range(len(lengths))), "a document is lost, or there twice"
    work = [causal_pairs(length) + linear * length for length in lengths]
    at, left = 0, list(documents)
    while at < devices:
        size = sizes[at]
        assert size in (1, 2, 4, 8) and at % size == 0 and sizes[at : at + size] == [size] * size
        own, tokens = [], 0
        while tokens < size * sum(lengths) // devices:
            own.append(left.pop(0))
            tokens += lengths[own[-1]]
        assert tokens == size * sum(lengths) // devices, "a document is in two groups"
        assert own == sorted(own)
        if size < devices:
            assert sum(work[each] for each in own) * devices <= sum(work) * size * (1 + 1 / EXCESS) * (1 + 1e-12)
        at += size
    assert ContextGroups(devices, linear=linear).arrange(lengths) == (documents, sizes)


@settings(max_examples=100, deadline=None)
@given(st.data(), DEVICES)
def test_all_devices_are_one_group_only_if_no_documents_fill_a_half(data, devices):
    """Tried are all choices, where work sets no limit and there are few documents."""
    lengths = data.draw(rows(devices, 6).filter(lambda lengths: len(lengths) <= 8))
    choices = (chosen for count in range(len(lengths)) for chosen in combinations(lengths, count))
    possible = any(2 * sum(chosen) == sum(lengths) for chosen in choices)
    assert (max(ContextGroups(devices, linear=10**6).arrange(lengths).sizes) < devices) == possible


@settings(max_examples=60, deadline=None)
@given(st.data(), DEVICES, st.booleans())
def test_devices_hold_each_token_once_and_documents_stay_inside_their_groups(data, devices, consecutive):
    lengths = [data.draw(rows(devices)) for _ in range(2)]
    # Ids are reused: only neighbours differ.
    segments = np.stack([np.repeat(np.arange(len(row)) % 2, row) for row in lengths])
    real = np.arange(segments.shape[1]) < np.array([[segments.shape[1]], [segments.shape[1] - 17]])
    groups = ContextGroups(devices, linear=10**6)
    stored, fields = grouped_order({"segment_ids": segments, "is_real": real}, groups, True, consecutive)
    again = grouped_order({"segment_ids": segments, "is_real": real}, groups, True, consecutive)
    assert (stored == again[0]).all() and all((fields[name] == again[1][name]).all() for name in fields)
    assert ("order" in fields) != consecutive
    for row, own_lengths in enumerate(lengths):
        assert sorted(stored[row]) == list(range(segments.shape[1])) == list(fields[ROW_INDEX][row])
        index = fields["order"][row] if "order" in fields else np.argsort(stored[row])
        assert sorted(index) == list(range(segments.shape[1]))
        held = stored[row].reshape(devices, -1)
        device = np.empty(segments.shape[1], int)
        for number, own in enumerate(held):
            device[own] = number
            assert (np.diff(index[own]) > 0).all(), "chunks of a device are in the order of the groups"
        start = 0
        for length in own_lengths:
            tokens = [token for token in range(start, start + length) if real[row, token]]
            start += length
            if not tokens:
                continue
            assert (np.diff(index[tokens]) == 1).all(), "a document is apart"
            assert len(set(fields["segment_ids"][row, tokens].tolist())) == 1
            sizes = set(fields[GROUP_SIZE][row, tokens].tolist())
            assert len(sizes) == 1 and len({device[token] // max(sizes) for token in tokens}) == 1
        in_order = np.argsort(index)
        ids, numbers = fields["segment_ids"][row, in_order], np.repeat(np.arange(len(own_lengths)), own_lengths)
        numbers = np.where(real[row], numbers, -1)[in_order]
        assert ((np.diff(ids) != 0) | (np.diff(numbers) == 0)).all(), "two documents became one"


@pytest.mark.smoke
def test_a_long_document_is_shared_and_short_ones_are_not():
    """4 devices of 4 tokens: one document of 8, the others of at most 4; then work alone forbids to divide."""
    groups = ContextGroups(4, linear=1000)
    assert groups.arrange([2, 8, 3, 2, 1]) == ([1, 0, 3, 2, 4], [2, 2, 1, 1])
    # One document of 4 has 10 pairs, four of one token have 4: only without other work this is much.
    even = [4, 1, 1, 1, 1]
    assert ContextGroups(2, linear=1000).arrange(even).sizes == [1, 1]
    assert ContextGroups(2).arrange(even).sizes == [2, 2]


def test_padding_fills_any_gap():
    ids, real = np.repeat([3, 5], (5, 11)), np.arange(16) < 7
    assert document_runs(ids, real).tolist() == [5, 2, 1, 2, 4, 2]
    assert document_runs(ids).tolist() == [5, 11]
    assert ContextGroups(2, linear=1000).arrange([5, 2, 1, 2, 4, 2]).sizes == [1, 1]


def test_the_linear_layers_of_a_token_in_pairs_of_a_query_and_a_key():
    """By hand: 2 layers, width 8, 2 heads and 1 KV head of 4, a gated MLP of 16, 32 words."""
    model = {"num_layers": 2, "hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_hidden_size": 16}
    model = ModelConfig.model_validate({**model, "vocab_size": 32, "vocab_multiple": 1, "activation": "swiglu"})
    projections, mlp = 8 * 8 + 8 * 8 + 8 * 8, 3 * 8 * 16
    assert token_pairs(model) == (2 * (projections + mlp) + 8 * 32) // (2 * (4 + 4))
    # Two of four experts of 24, and a shared one of 40, in the second layer
    experts = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 24, "first_dense_layers": 1}
    routed = model.model_validate(model.model_dump() | experts | {"shared_expert_ffn_hidden_size": 40})
    moe = 3 * 8 * (2 * 24 + 40)
    assert token_pairs(routed) == (2 * projections + mlp + moe + 8 * 32) // (2 * (4 + 4))
