"""The gated delta rule: a linear recurrence with an erasing update.

For each head S_t = (1 − b_t k_t k_tᵀ) a_t S_{t−1} + b_t k_t v_tᵀ and o_t = S_tᵀ q_t, with a strength b in [0, 1] and a
decay a in (0, 1]: a number in gated DeltaNet (Yang et al., arXiv 2412.06464), a diagonal matrix, by channel of the key,
in Kimi delta attention (arXiv 2510.26692). Keys should have norm 1. All functions compute in FP32 (float64 for float64
inputs).
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
    unit_lower_inverse,
)
from megajax.ops.mlp_activation import ElementwiseImplementation
from megajax.ops.numerics import wide


def change(state: jax.Array, k: jax.Array, v: jax.Array, strength: jax.Array) -> jax.Array:
    """What a token adds to the values of its key in the decayed state."""
    return strength[..., None] * (v - jnp.sum(state * k[..., None], axis=-2))


def recurrent_gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    count: jax.Array | None = None,
    prepare: Prepare | None = None,
    implementation: ElementwiseImplementation = "reference",
) -> tuple[jax.Array, jax.Array]:
    """The definition, token by token: arguments and results as `gated_delta_rule`, the rest as `token_by_token`."""
    arguments = q, k, v, log_decay, starts, initial, strength
    return token_by_token(change, *arguments, count=count, prepare=prepare, implementation=implementation)


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    state_before: StateBefore | None = None,
    precision: lax.Precision = lax.Precision.HIGHEST,
    implementation: LinearAttentionImplementation = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Queries and keys `[B, S, K, d]`, values `[B, S, N, w]`, strengths `[B, S, N]` → (`[B, S, N, w]`, final state).

    `log_decay` is `[B, S, N]`, or `[B, S, N, d]` by channel. K divides N: N / K consecutive heads share a query and a
    key. `starts [B, S]` is True where a document begins, and the state is zeros before it. States are `[B, N, d, w]`.
    Where several devices have consecutive parts of the sequences, `state_before` gives the initial state. Within a
    chunk this is the UT transform of the WY representation (section 3.3 of gated DeltaNet): with A the strictly lower
    part of b_i (k_i · a_{j+1} … a_i k_j), the state changes by the values (1 + A)⁻¹ (b v) less what (1 + A)⁻¹ (b k)
    finds in the state before the chunk.
    """
    if implementation != "reference":
        kernels = jla if implementation == "jla" else implementation
        return kernels.gated_delta_rule(q, k, v, log_decay, strength, starts, initial, state_before)
    (B, S, K, _), dtype, size = q.shape, wide(v.dtype), chunk_size(q.shape[1])
    group = v.shape[2] // K
    parts = q, k, v, by_channel(log_decay), strength[..., None]
    q, k, v, log_decay, strength = (to_chunks(a.astype(dtype), size) for a in parts)
    decay = decays(log_decay, documents(starts, (B, S), size))

    def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.matmul(x, y, precision=precision)

    repeats = jnp.tril(strength * decay.products(k, k, precision), -1)
    solved, scores = unit_lower_inverse(repeats), decay.products(q, k, precision)
    q, k = (jnp.repeat(a, group, axis=2) for a in (q, k))
    erased = matmul(solved, strength * decay.from_before * k)
    maps = ChunkMaps(decay.of_chunk, decay.to_end * k, matmul(solved, strength * v), erased)
    states, final = states_before(maps, initial, state_before, precision)
    changes = maps.values - matmul(erased, states)
    out = matmul(decay.from_before * q, states) + matmul(scores, changes)
    return from_chunks(out, S), final
