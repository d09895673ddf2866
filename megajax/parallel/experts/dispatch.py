"""Experts on several devices: tokens are sent to the devices of their experts, and the results back.

The experts are divided over one or several mesh axes, `mesh.experts_over`; each group of devices along them has all
experts.

- `all_gather`: every device gets all tokens of its group and computes the assignments to its own experts; the sums are
  reduce-scattered. A device sends its T tokens to each of the n - 1 others.
- `all_to_all`: every assignment's row is sent to its expert's device, where rows arrive sorted by expert (Lepikhin et
  al. 2020, with rows instead of capacity). A device sends k·T·(n - 1)/n rows.

No assignment is dropped here: the receive buffer has room for the worst case, all assignments to one device, or for the
experts' capacity. Assignments that the router has dropped have the expert index E: their rows are not sent and add
nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import experts as ops
from megajax.ops.expert_mlp import num_experts
from megajax.parallel import collectives
from megajax.parallel.weights.exchange import gather_tiles
from megajax.step_plan import Collectives

Axes = tuple[str, ...]
# Smallest number of slices that a device sends. XLA's kernel for GPUs of one host copies a slice with one block of
# threads; few blocks would leave most of the links' bandwidth unused.
SLICES = 512


@dataclass(frozen=True)
class ExpertParallel:
    """A layer's experts, divided over the axes `experts_over`."""

    collectives: Collectives
    kernels: ops.ExpertKernels
    max_over_devices: ops.MaxOverDevices

    def apply(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        """Own tokens `x [T, D]`, their `experts` and `weights` `[T, k]`, own experts' parameters → `[T, D]`."""
        distributed = self._gathered if self.collectives.dispatch == "all_gather" else self._exchanged
        strategy = distributed if self.collectives.expert_shards > 1 else self._on_device
        return strategy(activation, x, experts, weights, w_up, w_down, capacity, biases)

    def _on_device(self, *arguments) -> jax.Array:
        return ops.apply_experts(*arguments, kernels=self.kernels, max_over_devices=self.max_over_devices)

    def _gathered(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        local, axes = num_experts(w_up), self.collectives.experts_over
        x, experts, weights = (gather_tiles(a, axes, 0) for a in (x, experts, weights))
        own = experts - lax.axis_index(axes) * local
        own = jnp.where((own >= 0) & (own < local), own, local)  # `local`: an expert of another device
        y = self._on_device(activation, x, own, weights, w_up, w_down, capacity, biases)
        return collectives.psum_scatter(y, axes, scatter_dimension=0, tiled=True)

    def _exchanged(self, activation: str, x, experts, weights, w_up, w_down, capacity: int | None, biases) -> jax.Array:
        (T, k), local, size = experts.shape, num_experts(w_up), self.collectives.expert_shards
        axes, ragged = self.collectives.experts_over, self.collectives.ragged
        permutation = ops.sort_by_expert(experts, local * size, T * k)
        routes = plan(axes, permutation.group_sizes, size, -(-SLICES // (local * size)) if ragged else 1)
        permutation, routes = jax.tree.map(lambda a: checkpoint_name(a, "routing"), (permutation, routes))
        max_rows = ops.most_rows(size * T, k, local, capacity)

        def to_experts(rows: jax.Array) -> jax.Array:
            return exchange(axes, max_rows, ragged, routes.there, routes.back, rows)

        received = checkpoint_name(to_experts(ops.dispatch(x, permutation, k)), "dispatched")
        own_weights: jax.Array = ops.permute(weights.reshape(-1), permutation)
        row_weights = checkpoint_name(to_experts(own_weights[:, None]), "routing")[:, 0]
        arguments = activation, self.kernels, received, row_weights, w_up, w_down, routes.group_sizes
        y: jax.Array = ops.expert_mlp(*arguments, self.max_over_devices, biases)
        return ops.combine(exchange(axes, T * k, ragged, routes.back, routes.there, y), permutation, k)


class Slices(NamedTuple):
    """Arguments of `lax.ragged_all_to_all`, `[n]` each: one or more slices per peer device and expert."""

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array  # on the receiving device
    recv_sizes: jax.Array


class Routes(NamedTuple):
    """Rows sorted by expert on every device ↔ rows on their experts' devices, sorted by expert, then by sender."""

    there: Slices  # to the experts' devices
    back: Slices
    group_sizes: jax.Array  # number of rows received for each own expert


def plan(axes: Axes, counts: jax.Array, size: int, pieces: int = 1) -> Routes:
    """The routes of this device's `counts [E]` rows for each expert; `size` devices have E / size experts each.

    Each expert's rows from one device to another are cut into `pieces` slices of nearly equal size.
    """
    counts = collectives.all_gather(counts, axes)  # [senders, E]
    rank, E = lax.axis_index(axes), counts.shape[1]
    sent_from = jnp.cumsum(counts, axis=1) - counts
    by_receiver = counts.reshape(size, size, -1).transpose(1, 2, 0)  # [receivers, own experts, senders]
    flat = by_receiver.reshape(size, -1)
    arrives_at = (jnp.cumsum(flat, axis=1) - flat).reshape(by_receiver.shape)

    def own(table: jax.Array) -> jax.Array:
        """`[senders, E]` → the columns of own experts, flat."""
        return lax.dynamic_slice_in_dim(table, rank * (E // size), E // size, 1).reshape(-1)

    there = Slices(sent_from[rank], counts[rank], arrives_at[:, :, rank].reshape(-1), own(counts))
    back = Slices(arrives_at[rank].T.reshape(-1), own(counts), own(sent_from), counts[rank])
    return Routes(_cut(there, pieces), _cut(back, pieces), by_receiver[rank].sum(axis=1))


def _cut(slices: Slices, pieces: int) -> Slices:
    """Cut each slice into `pieces`."""

    def parts(sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Sizes of slices `[n]` → (each piece's offset in its slice, its size), both `[n, pieces]`."""
        bounds = sizes[:, None] * jnp.arange(pieces + 1) // pieces
        return bounds[:, :-1], jnp.diff(bounds)

    begins, sent = parts(slices.send_sizes)
    _, received = parts(slices.recv_sizes)
    starts = (offsets[:, None] + begins for offsets in (slices.input_offsets, slices.output_offsets))
    first, arrives = (a.reshape(-1) for a in starts)
    return Slices(first, sent.reshape(-1), arrives, received.reshape(-1))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def exchange(axes: Axes, rows: int, ragged: bool, slices: Slices, reverse: Slices, x: jax.Array) -> jax.Array:
    """Move slices of `x [R, D]` → `[rows, D]`, zeros in other rows; `reverse` moves gradients back."""
    if ragged:
        with jax.named_scope(collectives.scope(axes)):
            return lax.ragged_all_to_all(x, jnp.zeros((rows, *x.shape[1:]), x.dtype), *slices, axis_name=axes)
    return _exchange_by_gather(axes, rows, slices, x)


def _exchange_forward(axes, rows, ragged, slices, reverse, x):
    return exchange(axes, rows, ragged, slices, reverse, x), (slices, reverse, x.shape[0])


def _exchange_backward(axes, rows, ragged, residuals, dy):
    slices, reverse, sent = residuals
    return None, None, exchange(axes, sent, ragged, reverse, slices, dy)


exchange.defvjp(_exchange_forward, _exchange_backward)


def _exchange_by_gather(axes: Axes, rows: int, slices: Slices, x: jax.Array) -> jax.Array:
    """`exchange` for CPUs, which have no ragged all-to-all: each device selects its rows from those of all devices."""
    rank = lax.axis_index(axes)

    def to_me(table: jax.Array) -> jax.Array:
        tables = collectives.all_gather(table, axes)  # [senders, receivers · slices]
        width = tables.shape[1] // tables.shape[0]
        return lax.dynamic_slice_in_dim(tables, rank * width, width, 1)

    starts, sizes, arrivals = (to_me(a) for a in (slices.input_offsets, slices.send_sizes, slices.output_offsets))
    senders = jnp.arange(len(starts))[:, None] * x.shape[0]
    row = jnp.arange(rows)[:, None]
    first, end, source = arrivals.reshape(-1), (arrivals + sizes).reshape(-1), (starts + senders).reshape(-1)
    inside = (row >= first) & (row < end)
    index = jnp.sum(jnp.where(inside, source + row - first, 0), axis=1)
    picked = gather_tiles(x, axes, 0)[index]
    return jnp.where(inside.any(axis=1)[:, None], picked, 0)
