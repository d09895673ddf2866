"""The plan of the rows that devices exchange for their experts: coded by sender and assignment, against NumPy loops."""

import math
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from megajax.kernel_choice import Kernels
from megajax.mesh import AXES as MESH_AXES
from megajax.mesh import build_mesh
from megajax.ops import experts as ops
from megajax.ops.expert_mlp import Biases, ExpertKernels, ExpertMatrices
from megajax.ops.grouped_rows import Rounds
from megajax.options.dispatch import DISPATCHES, LITTLE_ROOM, Dispatch, choose_dispatch
from megajax.parallel.experts import exchanged, gathered_tokens
from megajax.parallel.experts.exchanged import Assignments, ExchangedRoute
from megajax.parallel.mesh_comm import MeshComm
from megajax.step_plan import Collectives

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


def plain_arrivals(experts: np.ndarray, start: int, room: int) -> list[list[tuple[int, int]]]:
    """For each device the (sender, assignment) of a round's rows: by its experts, then by sender, then by assignment.

    In a round a device sends another one `room` of the rows between them, by expert, from number `start` on.
    """
    flat = experts.reshape(DEVICES, -1)
    arrivals = []
    for device in range(DEVICES):
        found = []
        for sender in range(DEVICES):
            own = np.flatnonzero(flat[sender] // LOCAL == device)
            own = own[np.argsort(flat[sender, own], kind="stable")]
            found += [(flat[sender, assignment], sender, assignment) for assignment in own[start : start + room]]
        arrivals.append([(sender, assignment) for _, sender, assignment in sorted(found)])
    return arrivals


@cache
def on_devices(room: int, later: int, is_first: bool):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), AXES)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(*[P(AXES)] * 3, P()), out_specs=P(AXES), check_vma=False)
    def run(experts, x, numbers, index):
        """Of a round (rows of tokens and numbers that arrive, how many for each own expert, sums and numbers that come
        back), and the number of rounds.
        """
        permutation = ops.sort_by_expert(experts[0], EXPERTS, ROWS)
        counts = jax.lax.all_gather(permutation.group_sizes, AXES).reshape(DEVICES, DEVICES, LOCAL)
        assignments = Assignments(permutation, jnp.any(experts[0] < EXPERTS, axis=1), counts)
        first = ExchangedRoute.of_round(assignments, AXES, Rounds(ROWS, room, later), 0, room)
        route = first if is_first else first.round(index)
        rows, theirs = route.send(x[0], numbers[0])
        found = rows, theirs, route.group_sizes, *route.back(rows * theirs[:, None], theirs)
        count = 1 if first.rounds is None else first.rounds
        return jax.tree.map(lambda a: jnp.asarray(a)[None], (found, count))

    return run


@pytest.mark.parametrize(("devices", "k", "name"), [(8, 2, "all_gather"), (9, 2, "all_to_all"), (16, 16, "all_gather")])
def test_auto_gathers_up_to_eight_devices_or_as_many_as_a_token_has_experts(devices, k, name):
    assert choose_dispatch("auto", devices, k).name == name


def test_a_dispatch_with_room_for_any_number_keeps_it():
    found = [Dispatch("own", room=room).with_little_room().room for room in (math.inf, 9, 1)]
    assert found == [math.inf, LITTLE_ROOM, 1]


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["all", "some dropped", "all to one device"])
@pytest.mark.parametrize(("room", "later"), [(3, 2), (ROWS, 1)])
def test_each_row_arrives_where_a_plain_loop_says_and_comes_back(kind, room, later):
    experts = routed(kind)
    fullest = max(
        np.count_nonzero(experts[sender] // LOCAL == device) for sender in range(DEVICES) for device in range(DEVICES)
    )
    rounds = 1 + max(0, -(-(fullest - room) // later))
    x = np.random.default_rng(1).integers(1, 9, (DEVICES, TOKENS, 3)).astype(np.float32)
    numbers = np.float32(1 + np.arange(DEVICES * ROWS).reshape(DEVICES, ROWS))
    summed, returned = np.zeros_like(x), np.zeros_like(numbers)
    for index in range(rounds):
        run = on_devices(room, later, is_first=index == 0)
        (rows, theirs, sizes, back, numbers_back), count = jax.device_get(run(experts, x, numbers, np.int32(index)))
        assert count.tolist() == [rounds] * DEVICES
        start, count = (room + (index - 1) * later, later) if index else (0, room)
        expected = plain_arrivals(experts, start, count)
        for device in range(DEVICES):
            senders, assignments = np.array(expected[device], int).reshape(-1, 2).T
            np.testing.assert_array_equal(theirs[device, : len(senders)], numbers[senders, assignments])
            np.testing.assert_array_equal(rows[device, : len(senders)], x[senders, assignments // K])
            assert not rows[device, len(senders) :].any() and not theirs[device, len(senders) :].any()
            own = experts.reshape(DEVICES, ROWS)[senders, assignments] - device * LOCAL
            assert sizes[device].tolist() == np.bincount(own, minlength=LOCAL).tolist()
        summed, returned = summed + back, returned + numbers_back
    kept = np.where(experts.reshape(DEVICES, ROWS) < EXPERTS, numbers, 0)
    np.testing.assert_array_equal(returned, kept)
    np.testing.assert_array_equal(summed, x * kept.reshape(DEVICES, TOKENS, K).sum(axis=2, keepdims=True))


def test_a_token_has_an_expert_whichever_device_has_the_expert():
    experts = routed("some dropped")
    experts[1, 2] = EXPERTS
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(2, 2), AXES)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=False)
    def run(experts):
        kinds = exchanged.Exchanged, gathered_tokens.GatheredExperts
        routes = [kind(AXES, DEVICES, ExpertKernels(), lambda a: a).route(experts[0], LOCAL, None) for kind in kinds]
        return [route.has_expert(TOKENS)[None] for route in routes]

    for found in run(experts):
        np.testing.assert_array_equal(found, (experts < EXPERTS).any(axis=2))


@pytest.mark.smoke
def test_assignments_are_sorted_by_expert_and_summed_by_token():
    experts = routed("some dropped")[0]
    x, weights = np.random.default_rng(1).integers(1, 9, (TOKENS, 3)).astype(np.float32), np.float32(range(1, ROWS + 1))

    @jax.jit
    def run(experts, x, weights):
        route = ops.SortedRoute.of(experts, EXPERTS, None)
        rows, row_weights = route.send(x, weights)
        back = route.back(rows * row_weights[:, None], row_weights)
        return route.permutation, rows, *back, route.has_expert(TOKENS)

    permutation, rows, summed, returned, has_expert = run(experts, x, weights)
    flat = experts.reshape(-1)
    np.testing.assert_array_equal(permutation.order, np.argsort(flat, kind="stable"))
    np.testing.assert_array_equal(permutation.group_sizes, np.bincount(flat, minlength=EXPERTS + 1)[:EXPERTS])
    np.testing.assert_array_equal(rows, np.repeat(x, K, axis=0)[np.argsort(flat, kind="stable")])
    np.testing.assert_array_equal(summed, x * weights.reshape(TOKENS, K).sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(returned, weights)
    np.testing.assert_array_equal(has_expert, (experts < EXPERTS).any(axis=1))


def test_an_expert_draws_by_the_token_and_the_number_of_its_assignment(monkeypatch):
    """Dropout and rounding at random: id · k + number, in the order of the rows that the experts get."""

    class Matrices:
        num_experts, token_ids = EXPERTS, np.array([7, 3, 90, 4, 5], np.uint32)

        def with_ids(self, ids):
            return ids

    def ids_of_rows(mlp, route, x, weights, ids):
        return route.back(route.send(x, ids)[1][:, None].astype(np.float32))[0]

    monkeypatch.setattr(ops, "expert_mlp", ids_of_rows)
    experts, k = routed("all")[0], np.uint32(K)
    mlp: Any = None
    matrices: Any = Matrices()

    def run(x, experts, weights):
        route = ops.SortedRoute.of(experts, EXPERTS, None)
        return ops.apply_experts(mlp, route, x, weights, matrices)

    found = jax.jit(run)(np.zeros((TOKENS, 1), np.float32), experts, np.ones((TOKENS, K), np.float32))
    np.testing.assert_array_equal(np.asarray(found)[:, 0], K * k * np.asarray(matrices.token_ids) + K * (K - 1) // 2)


@pytest.mark.parametrize("over", [("expert",), ("expert", "tensor")])
@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_experts_with_biases_on_a_mesh_are_those_of_a_plain_loop(dispatch, over):
    """Each bias once, whether `tensor` divides the experts' widths or the experts; also in several rounds of rows."""
    D, F, rng = 6, 8, np.random.default_rng(3)
    sizes = dict.fromkeys(MESH_AXES, 1) | {"expert": 2, "tensor": 2}
    x, weights = rng.normal(size=(DEVICES, TOKENS, D)), rng.random((DEVICES, TOKENS, K))
    up, down = rng.normal(size=(EXPERTS, D, F)), rng.normal(size=(EXPERTS, F, D))
    up_bias, down_bias = rng.normal(size=(EXPERTS, F)), rng.normal(size=(EXPERTS, D))
    experts = routed("all")
    chosen = replace(DISPATCHES[dispatch], room=0.5)
    collectives = Collectives(dispatch=chosen, expert_shards=2 * len(over), experts_over=over)
    comm = MeshComm(sizes, Kernels(), collectives, deterministic=False)

    def local(x, experts, weights, up, down, up_bias, down_bias):
        matrices = ExpertMatrices(up, down, Biases(up_bias, down_bias))
        return comm.experts("gelu", x[0], experts[0], weights[0], matrices, None)[None]

    tokens, width = P(("expert", "tensor")), None if "tensor" in over else "tensor"
    matrices = (P(over, None, width), P(over, width), P(over, width), P(over))
    mesh = build_mesh(sizes, jax.devices()[:DEVICES])
    run = jax.shard_map(local, mesh=mesh, in_specs=(*[tokens] * 3, *matrices), out_specs=tokens, check_vma=False)
    arrays = (np.float32(a) for a in (weights, up, down, up_bias, down_bias))
    with jax.default_matmul_precision("highest"):
        found = jax.jit(run)(np.float32(x), experts, *arrays)
    hidden = np.einsum("ntd,edf->ntef", x, up) + up_bias
    hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
    outputs = np.einsum("ntef,efd->nted", hidden, down) + down_bias
    chosen = np.take_along_axis(outputs, experts[..., None], axis=2)
    np.testing.assert_allclose(found, (weights[..., None] * chosen).sum(axis=2), rtol=1e-4, atol=1e-5)


def test_a_dispatch_has_rounds_where_its_first_one_may_not_have_room_for_all_rows():
    """All rows of `devices` devices may go to one of them, which has room for a multiple of an even share."""
    for dispatch in DISPATCHES.values():
        for devices in (1, 2, 4, 5, 8):
            rounds = Rounds.of(share=100, most=100 * devices, room=dispatch.room, later_room=1)
            assert dispatch.has_rounds(devices) == (rounds.most > rounds.first), (dispatch.name, devices)
    assert not DISPATCHES["all_gather"].has_rounds(4) and DISPATCHES["all_gather"].has_rounds(5)
