"""Tokens to their experts and back: rows sorted by expert, the experts' MLP, rows summed by token.

The permutation uses gathers in both directions and in both passes, so no scatter has to add rows.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from megajax.ops import router
from megajax.ops.expert_mlp import ExpertMatrices, ExpertMlp, expert_mlp
from megajax.ops.numerics import wide


class Permutation(NamedTuple):
    """The order of the assignments `T·k`: those of a token are adjacent; sorted, those of an expert are."""

    order: jax.Array  # [R] int32: the assignment in each sorted row
    inverse: jax.Array  # [T·k] int32: the sorted row of each assignment; those to no expert may be past R
    group_sizes: jax.Array  # [E] int32


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


def apply_experts(
    mlp: ExpertMlp,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    matrices: ExpertMatrices,
    capacity: int | None,
) -> jax.Array:
    """`x [T, D]` → `[T, D]`: Σ over a token's assignments `[T, k]` of weight · MLP of the expert.

    An assignment to E adds nothing. An expert has at most `capacity` assignments.
    """
    k, E = experts.shape[1], matrices.num_experts
    permutation = sort_by_expert(experts, E, most_rows(len(x), k, E, capacity))
    permutation = jax.tree.map(lambda a: checkpoint_name(a, "routing"), permutation)
    rows = checkpoint_name(dispatch(x, permutation, k), "dispatched")
    row_weights = checkpoint_name(permute(weights.reshape(-1), permutation), "routing")
    if matrices.token_ids is not None:
        matrices = matrices.with_ids(assignment_ids(matrices.token_ids, k)[permutation.order])
    y = expert_mlp(mlp, rows, row_weights, matrices, permutation.group_sizes)
    return combine(y, permutation, k)


def assignment_ids(token_ids: jax.Array, k: int) -> jax.Array:
    """The id of each of a token's k assignments, `[T·k]` uint32."""
    return (token_ids[:, None] * jnp.uint32(k) + jnp.arange(k, dtype=jnp.uint32)).reshape(-1)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dispatch(x: jax.Array, permutation: Permutation, k: int) -> jax.Array:
    """`x [T, D]` → `[R, D]`: the token of each sorted assignment."""
    return x[permutation.order // k]


def _dispatch_forward(x, permutation, k):
    return dispatch(x, permutation, k), permutation


def _dispatch_backward(k, permutation, dy):
    return _sum_of_assignments(dy, permutation, k), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def combine(y: jax.Array, permutation: Permutation, k: int) -> jax.Array:
    """Sorted rows `[R, D]` → `[T, D]`: the sum of each token's rows, in float32."""
    return _sum_of_assignments(y, permutation, k)


def _combine_forward(y, permutation, k):
    return combine(y, permutation, k), permutation


def _combine_backward(k, permutation, dx):
    return dx[permutation.order // k], None


combine.defvjp(_combine_forward, _combine_backward)


def _sum_of_assignments(rows: jax.Array, permutation: Permutation, k: int) -> jax.Array:
    by_token = _of_assignments(rows, permutation).reshape(-1, k, rows.shape[-1])
    return by_token.astype(wide(rows.dtype)).sum(axis=1).astype(rows.dtype)


def _of_assignments(rows: jax.Array, permutation: Permutation) -> jax.Array:
    """Sorted rows → the rows of the assignments, `[T·k, ...]`; zeros for those past the last row."""
    if len(permutation.order) == len(permutation.inverse):
        return rows[permutation.inverse]
    return rows.at[permutation.inverse].get(mode="fill", fill_value=0)


@jax.custom_vjp
def permute(values: jax.Array, permutation: Permutation) -> jax.Array:
    """`values [T·k]`, one number per assignment, in sorted order."""
    return values[permutation.order]


permute.defvjp(
    lambda values, permutation: (permute(values, permutation), permutation),
    lambda permutation, dy: (_of_assignments(dy, permutation), None),
)
