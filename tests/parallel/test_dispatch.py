"""The plan of the rows that devices exchange for their experts: coded by sender and assignment, against NumPy loops."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.ops import experts as ops
from megajax.parallel.experts.exchanged import exchange, plan

AXES = ("outer", "inner")  # experts may be divided over several axes
DEVICES, LOCAL, TOKENS, K = 4, 2, 5, 2
EXPERTS = DEVICES * LOCAL
ROWS = TOKENS * K


def routed(kind: str) -> np.ndarray:
    """`[devices, T, k]` different experts of each token; E: the router has dropped the assignment."""
    random = np.random.default_rng(0)
    if kind == "all to one device":
        return np.tile(np.array([4, 5]), (DEVICES, TOKENS, 1))
    experts = np.stack([random.permutation(EXPERTS)[:K] for _ in range(DEVICES * TOKENS)])
    if kind == "some dropped":
        experts[random.random(experts.shape) < 0.3] = EXPERTS
    return experts.reshape(DEVICES, TOKENS, K)


def plain_arrivals(experts: np.ndarray) -> list[list[tuple[int, int]]]:
    """For each device the (sender, assignment) of its rows: by its experts, then by sender, then by assignment."""
    return [
        [
            (sender, assignment)
            for expert in range(device * LOCAL, (device + 1) * LOCAL)
            for sender in range(DEVICES)
            for assignment in np.flatnonzero(experts[sender].reshape(-1) == expert)
        ]
        for device in range(DEVICES)
    ]


def on_devices(room: int):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), AXES)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    def run(experts, rows):
        """Own assignments' `rows` → (those that arrive, how many for each own expert, the rows sent back, rounds)."""
        permutation = ops.sort_by_expert(experts[0], EXPERTS, ROWS)
        most = ops.most_rows(DEVICES * TOKENS, K, LOCAL)
        routes = plan(AXES, permutation.group_sizes, DEVICES, room, (ROWS, most))
        there = exchange(AXES, room, routes.rounds, routes.sent, routes.arrived, (rows[0][permutation.order],))
        (back,) = exchange(AXES, room, routes.rounds, routes.arrived, routes.sent, there)
        return there[0][None], routes.group_sizes[None], back[permutation.inverse][None], routes.rounds[None]

    return run


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["all", "some dropped", "all to one device"])
@pytest.mark.parametrize("room", [1, 3, ROWS])
def test_each_row_arrives_where_a_plain_loop_says_and_comes_back(kind, room):
    experts = routed(kind)
    coded = np.stack([np.indices((DEVICES, ROWS))[0], np.indices((DEVICES, ROWS))[1]], axis=2) + 1  # no zeros
    arrived, sizes, back, rounds = map(np.asarray, on_devices(room)(jnp.asarray(experts), jnp.float32(coded)))
    expected = plain_arrivals(experts)
    for device in range(DEVICES):
        count = len(expected[device])
        np.testing.assert_array_equal(arrived[device, :count] - 1, np.array(expected[device]).reshape(count, 2))
        assert not arrived[device, count:].any()
        own = experts.reshape(-1) - device * LOCAL
        assert sizes[device].tolist() == [np.count_nonzero(own == expert) for expert in range(LOCAL)]
    kept = experts.reshape(DEVICES, ROWS, 1) < EXPERTS
    np.testing.assert_array_equal(back, np.where(kept, coded, 0))
    fullest = max(
        np.count_nonzero(experts[sender] // LOCAL == device) for sender in range(DEVICES) for device in range(DEVICES)
    )
    assert rounds.tolist() == [-(-fullest // room)] * DEVICES


@pytest.mark.smoke
def test_assignments_are_sorted_by_expert_and_summed_by_token():
    experts = routed("some dropped")[0]
    permutation = ops.sort_by_expert(jnp.asarray(experts), EXPERTS, ROWS)
    flat = experts.reshape(-1)
    np.testing.assert_array_equal(permutation.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(permutation.group_sizes, np.bincount(flat, minlength=EXPERTS + 1)[:EXPERTS])
    x = np.random.default_rng(1).integers(1, 9, (TOKENS, 3)).astype(np.float32)
    rows = ops.dispatch(jnp.asarray(x), permutation, K)
    np.testing.assert_array_equal(rows, np.repeat(x, K, axis=0)[np.argsort(flat, kind="stable")])
    weights = np.arange(1.0, ROWS + 1, dtype=np.float32)  # of assignments
    weighted = np.asarray(rows) * np.asarray(ops.permute(jnp.asarray(weights), permutation))[:, None]
    expected = x * weights.reshape(TOKENS, K).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(ops.combine(jnp.asarray(weighted), permutation, K), expected)
