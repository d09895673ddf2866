"""Experts over the `expert` axis: tokens travel to the devices that hold their experts, and back.

- `all_gather`: every device gets all tokens of its group, computes the assignments to its own experts, and the sums are
  reduce-scattered. A device sends its T tokens to each of the n - 1 others.
- `all_to_all`: every assignment's row goes to its expert's device, where it arrives sorted by expert (Lepikhin et al.
  2020, with rows in place of capacity). A device sends k·T·(n - 1)/n rows.

Nothing is dropped here: what receives rows has room for the worst case, every token's assignments to one device. What
the router has dropped is assigned to no expert (E): such rows are not sent, and add nothing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import experts as ops
from megajax.parallel.weights import gather_tiles

AXIS = "expert"


def gathered(comm: Any, activation: str, x, experts, weights, w_up, w_down) -> jax.Array:
    """`x [T, D]`, `experts` and `weights` `[T, k]` of the own tokens, the own experts' matrices → `[T, D]`."""
    local = w_up.shape[0]
    x, experts, weights = (gather_tiles(a, (AXIS,), 0) for a in (x, experts, weights))
    own = experts - lax.axis_index(AXIS) * local
    own = jnp.where((own >= 0) & (own < local), own, local)  # `local`: an expert of another device
    y = ops.apply_experts(activation, x, own, weights, w_up, w_down, comm.expert_kernels)
    return lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def exchanged(comm: Any, activation: str, x, experts, weights, w_up, w_down) -> jax.Array:
    """The same, by rows."""
    (T, k), local, size = experts.shape, w_up.shape[0], comm.sizes[AXIS]
    permutation = ops.sort_by_expert(experts, local * size)
    routes = plan(permutation.group_sizes, size)
    permutation, routes = jax.tree.map(lambda a: checkpoint_name(a, "routing"), (permutation, routes))
    there = partial(exchange, routes.there, routes.back, rows=size * T * min(k, local), ragged=comm.ragged)
    back = partial(exchange, routes.back, routes.there, rows=T * k, ragged=comm.ragged)

    received = checkpoint_name(there(ops.dispatch(x, permutation, k)), "dispatched")
    own_weights: jax.Array = ops.permute(weights.reshape(-1), permutation)
    row_weights = checkpoint_name(there(own_weights[:, None]), "routing")[:, 0]
    y: jax.Array = ops.expert_mlp(
        activation, comm.expert_kernels, received, row_weights, w_up, w_down, routes.group_sizes
    )
    return ops.combine(back(y), permutation, k)


class Slices(NamedTuple):
    """What `lax.ragged_all_to_all` moves: for each device, and each expert between the two, one slice; `[E]` each."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array  # on the device that receives
    recv_sizes: jax.Array


class Routes(NamedTuple):
    """Rows sorted by expert on every device ↔ rows on their experts' devices, sorted by expert, then by sender."""

    there: Slices
    back: Slices
    group_sizes: jax.Array  # of the own experts: rows received


def plan(counts: jax.Array, size: int) -> Routes:
    """The routes of `counts [E]` rows of this device for each expert, which lie evenly over `size` devices."""
    counts = lax.all_gather(counts, AXIS)  # [senders, E]
    rank, E = lax.axis_index(AXIS), counts.shape[1]
    sent_from = jnp.cumsum(counts, axis=1) - counts
    by_receiver = counts.reshape(size, size, -1).transpose(1, 2, 0)  # [receivers, own experts, senders]
    flat = by_receiver.reshape(size, -1)
    arrives_at = (jnp.cumsum(flat, axis=1) - flat).reshape(by_receiver.shape)

    def own(table: jax.Array) -> jax.Array:
        """`[senders, E]` → the columns of the own experts, flat."""
        return lax.dynamic_slice_in_dim(table, rank * (E // size), E // size, 1).reshape(-1)

    there = Slices(sent_from[rank], counts[rank], arrives_at[:, :, rank].reshape(-1), own(counts))
    back = Slices(arrives_at[rank].T.reshape(-1), own(counts), own(sent_from), counts[rank])
    return Routes(there, back, by_receiver[rank].sum(axis=1))


def exchange(slices: Slices, reverse: Slices, x: jax.Array, rows: int, ragged: bool) -> jax.Array:
    """Move slices of `x [R, D]` → `[rows, D]`, zeros where nothing arrives; `reverse` moves gradients back."""
    return _exchange(rows, ragged, slices, reverse, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(rows: int, ragged: bool, slices: Slices, reverse: Slices, x: jax.Array) -> jax.Array:
    if ragged:
        return lax.ragged_all_to_all(x, jnp.zeros((rows, *x.shape[1:]), x.dtype), *slices, axis_name=AXIS)
    return _picked(rows, slices, x)


def _exchange_forward(rows, ragged, slices, reverse, x):
    return _exchange(rows, ragged, slices, reverse, x), (slices, reverse, x.shape[0])


def _exchange_backward(rows, ragged, residuals, dy):
    slices, reverse, sent = residuals
    return None, None, _exchange(sent, ragged, reverse, slices, dy)


_exchange.defvjp(_exchange_forward, _exchange_backward)


def _picked(rows: int, slices: Slices, x: jax.Array) -> jax.Array:
    """The same where there is no ragged all-to-all, on CPUs: of all devices' rows each picks those sent to it."""
    rank = lax.axis_index(AXIS)

    def to_me(table: jax.Array) -> jax.Array:
        tables = lax.all_gather(table, AXIS)  # [senders, receivers · slices]
        width = tables.shape[1] // tables.shape[0]
        return lax.dynamic_slice_in_dim(tables, rank * width, width, 1)

    starts, sizes, arrivals = (to_me(a) for a in (slices.input_offsets, slices.send_sizes, slices.output_offsets))
    senders = jnp.arange(len(starts))[:, None] * x.shape[0]
    row = jnp.arange(rows)[:, None]
    first, end, source = arrivals.reshape(-1), (arrivals + sizes).reshape(-1), (starts + senders).reshape(-1)
    inside = (row >= first) & (row < end)
    index = jnp.sum(jnp.where(inside, source + row - first, 0), axis=1)
    picked = gather_tiles(x, (AXIS,), 0)[index]
    return jnp.where(inside.any(axis=1)[:, None], picked, 0)
