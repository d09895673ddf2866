"""The Hopper kernels of jax-linear-attention (extra `linear-attention`) for the recurrences of this package.

They take and give BF16, and compute decays, states and sums in FP32. The last state of a document is not seen by the
next one, as in the definitions here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops import jla_context
from megajax.ops.barriers import not_dropped
from megajax.ops.linear_recurrence import StateBefore

WIDTHS = (64, 128)  # of keys and values that the kernels have
CHANNELS = 128  # those of decays that a kernel sums at a time: a multiple on each device


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    state_before: StateBefore | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ops.gated_delta_rule` of values in BF16."""
    kind = "gated_deltanet"
    if log_decay.ndim == 4:  # its queries and keys are those of the heads
        kind, group = "kda", v.shape[2] // k.shape[2]
        q, k = (jnp.repeat(a, group, axis=2) for a in (q, k))
    elif state_before is not None:
        q, k, v = (a.astype(jnp.bfloat16) for a in (q, k, v))
        return jla_context.gated_delta_rule(q, k, v, log_decay, strength, starts, state_before)
    run = _kernel(kind, q, k, starts, g=log_decay, beta=strength)
    if state_before is None:
        return run(v, initial)
    # The recurrence is linear in its values and its state. From an identity, without values, the final state is the
    # transition, and the outputs are what the queries find in each row of the state before.
    (B, _, N, _), d = v.shape, k.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(d, dtype=jnp.float32), (B, N, d, d))
    found, transition = run(jnp.zeros((*v.shape[:3], d), v.dtype), identity)
    out, final = run(v, None)
    before = state_before(transition, final)
    out = out + jnp.einsum("bsnd,bndw->bsnw", found, before, preferred_element_type=jnp.float32)
    return out, final + jnp.matmul(transition, before, precision=lax.Precision.HIGHEST)


def state_space(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    starts: jax.Array | None = None,
    initial: jax.Array | None = None,
    state_before: StateBefore | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`ops.state_space` of values in BF16."""
    run = _kernel("simple_gla", q, k, starts, g=log_decay)
    if state_before is None:
        return run(v, initial)
    out, final = run(v, None)
    # What is left of the state before at each token, until the first document that begins here
    left = jnp.exp(jnp.cumsum(log_decay, axis=1))
    if starts is not None:
        left = jnp.where(jnp.cumsum(starts, axis=1)[..., None] > 0, 0, left)
    transition = jnp.broadcast_to(left[:, -1, :, None], (*final.shape[:3],))
    before = state_before(transition, final)
    group = v.shape[2] // q.shape[2]
    found = jnp.einsum("bsgd,bgmdw->bsgmw", q, before.reshape(len(v), q.shape[2], group, *before.shape[2:]))
    out = out + left[..., None] * found.reshape(v.shape)
    return out, final + transition[..., None] * before


def _kernel(kind: str, q: jax.Array, k: jax.Array, starts: jax.Array | None, **gates: jax.Array) -> Any:
    """(values `[B, S, N, w]`, initial state or None) → (outputs in BF16, final state)."""
    from jla.ops import linear_attention  # type: ignore[import-not-found]
    from jla.ops.mosaic_gpu import scalar_gate  # type: ignore[import-not-found]

    number = None if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=1)
    q, k = q.astype(jnp.bfloat16), k.astype(jnp.bfloat16)

    def run(v: jax.Array, state: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        if state is not None and starts is not None:  # they compare a token's document with that of the token before
            state = jnp.where(starts[:, 0, None, None, None], 0, state)
        given: dict[str, Any] = {"scale": 1.0, "initial_state": state, "output_final_state": True}
        v = v.astype(jnp.bfloat16)
        if kind == "simple_gla" and k.shape[2] < v.shape[2]:  # its backward pass adds up the gradients of a group
            grouped = {"delta": False, "beta": None, "grouped_key_grads": True}
            return scalar_gate.run(q, k, v, segment_ids=number, **given, **gates, **grouped)
        # Of a function with `optimize_remat`, as KDA's, jax cannot drop a result and later the residuals.
        return not_dropped(linear_attention(kind, q, k, v, impl="mosaic_gpu", segment_ids=number, **given, **gates))

    return run
