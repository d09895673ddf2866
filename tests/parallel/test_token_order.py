"""The order of tokens over `context`: which device has which chunks, and the metrics of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.parallel.context import token_order


def test_the_logged_shares_of_groups_are_those_of_the_largest_group_of_each_microbatch():
    """Of four microbatches of two rows of three tokens."""
    sizes = jnp.array([[[1] * 3, [1] * 3], [[1] * 3, [2] * 3], [[4] * 3, [1] * 3], [[2] * 3, [2] * 3]])
    _, metrics = token_order.add_token_positions({"tokens": 0 * sizes, token_order.GROUP_SIZE: sizes}, 4)
    shares = {"context_groups/1": 0.25, "context_groups/2": 0.5, "context_groups/4": 0.25}
    sums = {"loss": 2.0, "attention_imbalance": 1.5, **metrics}
    assert token_order.layout_metrics(sums) == {"attention_imbalance": 1.5} | shares


def test_without_a_causal_mask_no_token_sees_padding():
    """The first row is one document of four tokens, the second has two, of three and one."""
    real, two = [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 0]], [[0] * 6, [0, 0, 0, 1, 1, 1]]
    batch = {"is_real": jnp.array([real], bool), "segment_ids": jnp.array([two])}
    found, _ = token_order.add_token_positions(batch, 1, causal=False)
    assert found["document_ends"][0, :, :4].tolist() == [[4] * 4, [3, 3, 3, 4]]
    found, _ = token_order.add_token_positions({"is_real": batch["is_real"]}, 1, causal=False)
    assert found["document_ends"][0, :, :4].tolist() == [[4] * 4] * 2


def test_each_device_has_an_early_and_a_late_chunk():
    assert token_order.chunk_order(4).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    assert token_order.stored_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert token_order.stored_order(6, 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_chunks_are_distributed_by_work():
    # 16 tokens on 2 devices: chunks of one token, a long document and then one of a token each.
    segments = np.array([[0] * 8 + list(range(1, 9))])
    order = token_order.balanced_order(segments, 2)[0]
    assert sorted(order) == list(range(16))
    seen = np.array([*range(1, 9), *[1] * 8])
    held = [order[:8], order[8:]]
    assert all((np.diff(own) > 0).all() for own in held)
    # The queries of the long document see 36 keys, the others one each.
    assert sorted(int(seen[own].sum()) for own in held) == [22, 22]
    zigzag = token_order.stored_order(16, 2)
    assert [int(seen[own].sum()) for own in (zigzag[:8], zigzag[8:])] == [14, 30]


def test_imbalance_is_the_busiest_device_over_the_mean_of_all_microbatches():
    assert float(token_order.imbalance(jnp.array([[1.0, 3.0], [6.0, 6.0]]))) == 9 / 8


@pytest.mark.parametrize("size", [2, 4, 8])
def test_typical_packed_batches_are_balanced(size):
    rng = np.random.default_rng(0)
    ends = np.sort(rng.choice(np.arange(1, 4096), (8, 20)), axis=1)
    segments = np.stack([np.searchsorted(row, np.arange(4096), side="right") for row in ends])
    seen = np.arange(4096) + 1 - np.stack([np.searchsorted(row, row) for row in segments])
    order = token_order.balanced_order(segments, size)
    work = np.take_along_axis(seen, order, axis=1).reshape(8, size, -1).sum(axis=2)
    assert (work.max(axis=1) / work.mean(axis=1)).max() < 1.03


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_change_between_zig_zag_and_the_order_of_the_sequence(size):
    mesh, tokens = Mesh(np.array(jax.devices()[:size]), ("context",)), np.arange(2 * 24 * 3).reshape(2, 24, 3)
    zigzag = tokens[:, token_order.stored_order(24, size)]
    for function, given, expected in (
        (token_order.to_consecutive, zigzag, tokens),
        (token_order.from_consecutive, tokens, zigzag),
    ):
        move = jax.shard_map(
            partial(function, context=size), mesh=mesh, in_specs=P(None, "context"), out_specs=P(None, "context")
        )
        np.testing.assert_array_equal(jax.jit(move)(given), expected)
