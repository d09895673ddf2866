"""Tokens to their experts and back: rows sorted by expert, the experts' MLP, rows summed by token."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import router
from megajax.ops.expert_mlp import ExpertMatrices, ExpertMlp, Route, expert_mlp
from megajax.ops.numerics import wide


class Permutation(NamedTuple):
    """The order of the assignments `T·k`: those of a token are adjacent; sorted, those of an expert are."""

    order: jax.Array  # [R] int32: the assignment in each sorted row
    inverse: jax.Array  # [T·k] int32: the sorted row of each assignment; those to no expert may be past R
    group_sizes: jax.Array  # [E] int32

    def part(self, start: jax.Array | int, rows: int) -> "Permutation":
        """`rows` sorted rows from `start` on; `inverse` of other assignments is past them."""
        order = self.order.at[start + jnp.arange(rows)].get(mode="clip")
        inverse = self.inverse - start
        inverse = jnp.where(inverse < 0, rows, inverse)
        return Permutation(order, inverse, rows_within(self.group_sizes, start, rows)[1])


def most_rows(tokens: int, k: int, num_experts: int, capacity: int | None = None) -> int:
    """The largest number of assignments to `num_experts` experts; each of `tokens` tokens has k different experts.

    An expert has at most `capacity` assignments.
    """
    rows = tokens * min(k, num_experts)
    return rows if capacity is None else min(rows, capacity * num_experts)


def sort_by_expert(experts: jax.Array, num_experts: int, rows: int) -> Permutation:
    """Assignments `experts [T, k]` sorted by expert, then by token; those to no expert (E) are last.

    The first R = `rows` sorted assignments are kept, which must include all those to experts.
    """
    flat = experts.reshape(-1)
    count = flat.shape[0]
    assert count * (num_experts + 1) < 2**32, "assignments are sorted by one 32-bit number each"
    numbers = jnp.arange(count, dtype=jnp.uint32)
    # Expert and assignment in one number: only a sort of single numbers is fast on GPUs.
    order = (jnp.sort(flat.astype(jnp.uint32) * count + numbers) % count).astype(jnp.int32)
    inverse = jnp.zeros(count, jnp.int32).at[order].set(numbers.astype(jnp.int32), unique_indices=True)
    return Permutation(order[:rows], inverse, router.count(experts, num_experts))


def rows_within(sizes: jax.Array, start: jax.Array | int, count: int) -> tuple[jax.Array, jax.Array]:
    """Of rows in ranges of `sizes [..., L]`, one after the other, those from row `start` on, `count` at the most.

    Returns (how many rows of each range are before them, how many of them each range has).
    """
    ends = jnp.cumsum(sizes, axis=-1) - start
    skipped = sizes - jnp.clip(ends, 0, sizes)
    return skipped, jnp.clip(ends, 0, count) - jnp.clip(ends - sizes, 0, count)


def sum_of_tokens(rows: jax.Array, tokens: int) -> jax.Array:
    """Rows of assignments `[T·k, D]` → `[T, D]`, added in float32."""
    by_token = rows.reshape(tokens, -1, rows.shape[-1])
    return by_token.astype(wide(rows.dtype)).sum(axis=1).astype(rows.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SortedRoute(Route):
    """Tokens to rows sorted by expert. Both directions are gathers, so no scatter has to add rows."""

    permutation: Permutation
    is_routed: jax.Array  # [T]: whether a token has an expert
    k: int = field(metadata={"static": True})

    @classmethod
    def of(cls, experts: jax.Array, num_experts: int, capacity: int | None) -> "SortedRoute":
        """For `experts [T, k]`; an assignment to E adds nothing, and an expert has at most `capacity` assignments."""
        T, k = experts.shape
        permutation = sort_by_expert(experts, num_experts, most_rows(T, k, num_experts, capacity))
        return cls(permutation.group_sizes, permutation, jnp.any(experts < num_experts, axis=1), k)

    def send(self, x: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        order = self.permutation.order
        return x[order // self.k], *(each[order] for each in numbers)

    def back(self, rows: jax.Array, *numbers: jax.Array) -> tuple[jax.Array, ...]:
        of_assignments = self._of_assignments(rows)
        return sum_of_tokens(of_assignments, len(of_assignments) // self.k), *map(self._of_assignments, numbers)

    def rows(self, tokens: int) -> int:
        return len(self.permutation.order)

    def has_expert(self, tokens: int) -> jax.Array:
        return self.is_routed

    def _of_assignments(self, rows: jax.Array) -> jax.Array:
        """Sorted rows → the rows of the assignments, `[T·k, ...]`; zeros for those past the last row."""
        order, inverse = self.permutation.order, self.permutation.inverse
        if len(order) == len(inverse):
            return rows[inverse]
        return rows.at[inverse].get(mode="fill", fill_value=0)


def apply_experts(
    mlp: ExpertMlp, route: Route, x: jax.Array, weights: jax.Array, matrices: ExpertMatrices
) -> jax.Array:
    """`x [T, D]` → `[T, D]`: Σ over a token's assignments, with weights `[T, k]`, of weight · MLP of the expert."""
    if matrices.token_ids is not None:
        matrices = matrices.with_ids(assignment_ids(matrices.token_ids, weights.shape[1]))
    route = jax.tree.map(lambda a: checkpoint_name(a, "routing"), route)
    return expert_mlp(mlp, route, x, weights.reshape(-1), matrices)


def assignment_ids(token_ids: jax.Array, k: int) -> jax.Array:
    """The id of each of a token's k assignments, `[T·k]` uint32."""
    return (token_ids[:, None] * jnp.uint32(k) + jnp.arange(k, dtype=jnp.uint32)).reshape(-1)
