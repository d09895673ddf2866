"""State space duality (Mamba-2, Dao and Gu, arXiv 2405.21060): a linear recurrence whose state decays by one number.

For each head S_t = a_t S_{t−1} + k_t v_tᵀ and o_t = S_tᵀ q_t; in the paper's letters q is C, k is B and v is Δ x. All
functions compute in FP32 (float64 for float64 inputs).
"""

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import jla
from megajax.ops.linear_recurrence import (
    ChunkMaps,
    LinearAttentionImplementation,
    Prepare,
    StateBefore,
    by_channel,
    chunk_size,
    decays,
    documents,
    from_chunks,
    states_before,
    to_chunks,
    token_by_token,
)
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.numerics import wide


def recurrent_state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    count: jax.Array | None = None,
    prepare: Prepare | None = None,
    implementation: ElementwiseImplementation = "reference",
) -> tuple[jax.Array, jax.Array]:
    """The definition, token by token: arguments and results as `state_space`, the rest as `token_by_token`."""
    arguments = q, k, v, log_decay, starts, initial
    return token_by_token(
        lambda state, k, v: v, *arguments, count=count, prepare=prepare, implementation=implementation
    )


def state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    state_before: StateBefore | None = None,
    precision: lax.Precision = lax.Precision.HIGHEST,
    implementation: LinearAttentionImplementation = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys `[B, S, G, d]`, values `[B, S, N, w]`, decays `[B, S, N]` → (`[B, S, N, w]`, the final state).

    The other arguments are those of `ops.gated_delta_rule`.
    """
    if implementation != "reference":
        kernels = jla if implementation == "jla" else implementation
        return kernels.state_space(q, k, v, log_decay, starts, initial, state_before)
    (B, S, G, _), dtype, size = q.shape, wide(v.dtype), chunk_size(q.shape[1])
    q, k, v, log_decay = (to_chunks(a.astype(dtype), size) for a in (q, k, v, by_channel(log_decay)))
    decay, group = decays(log_decay, documents(starts, (B, S), size)), v.shape[2] // G
    scores = decay.products(q, k, precision)
    q, k = (jnp.repeat(a, group, axis=2) for a in (q, k))
    maps = ChunkMaps(decay.of_chunk, decay.to_end * k, v, None)
    states, final = states_before(maps, initial, state_before, precision)
    out = jnp.matmul(decay.from_before * q, states, precision=precision) + jnp.matmul(scores, v, precision=precision)
    return from_chunks(out, S), final
