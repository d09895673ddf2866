"""What the kernels of jax-linear-attention that `ops.jla_context` calls compute, by the definition of the recurrence.

Only their arguments and results are as there: transposed states, heads before tokens, sequences in pieces.
"""

import jax
import jax.numpy as jnp

from megajax.ops.delta_rule import recurrent_gated_delta_rule
from megajax.ops.linear_recurrence import CHUNK

PIECES = 2


def heads_first(x, pad):
    return jnp.pad(x, ((0, 0), (0, pad), (0, 0))).swapaxes(1, 2)


def segment_vectors(number, pad):
    """Here: where documents begin; the kernels take the first token for one that goes on."""
    return jnp.pad(jnp.diff(number, axis=1, prepend=number[:, :1]) != 0, ((0, 0), (0, pad)))


def run(q, k, v, log_decay, strength, starts, initial):
    """All pieces `[B · P, ...]`: (outputs, final states), in the layout of the kernels."""
    B, S, N, _ = v.shape
    q, k = (jnp.repeat(a, N // a.shape[2], axis=2) for a in (q, k))
    starts = jnp.zeros((B, S), bool) if starts is None else starts

    def cut(a):
        return a.reshape(B * PIECES, S // PIECES, *a.shape[2:])

    rates = cut(log_decay.swapaxes(1, 2)), cut(strength.swapaxes(1, 2))
    initial = initial.swapaxes(-1, -2)
    out, final = recurrent_gated_delta_rule(cut(q), cut(k), cut(v), rates[0], rates[1], cut(starts), initial)
    return out.reshape(B, S, N, -1), final.swapaxes(-1, -2)


def states(v, k, initial):
    B, _, N, w = v.shape
    zeros = jnp.zeros((B * PIECES, N, w, k.shape[-1]))
    return zeros if initial is None else initial


def state_fwd_wy(*, k, v, t0, g2, beta, seg, h0, cp, store_states=True, out_final=False, aug=False):
    assert cp == PIECES and aug == out_final == (not store_states)
    if not aug:
        return h0, None  # here `chunk_grads` needs no others
    identity = jnp.broadcast_to(jnp.eye(k.shape[-1]), (*states(v, k, None).shape[:2], *[k.shape[-1]] * 2))
    _, transition = run(k, k, jnp.zeros((*v.shape[:3], k.shape[-1])), g2, beta, seg, identity)
    _, final = run(k, k, v, g2, beta, seg, states(v, k, None))
    return None, jnp.concatenate([transition, final], axis=2)


def fused_fwd_wy(*, q, k, v, t0, g2, beta, seg, h0, scale, out_final, out_dtype, cp):
    assert (scale, out_final, out_dtype, cp) == (1, False, jnp.bfloat16, PIECES)
    return run(q, k, v, g2, beta, seg, h0)[0], None


def state_bwd_wy(*, q, k, do, t0, g2, beta, seg, dht, scale, want_dh0, cp, store_grads=True):
    assert (scale, cp) == (1, PIECES)
    ends = states(do, k, dht)
    pull = jax.vjp(lambda v, h0: run(q, k, v, g2, beta, seg, h0), jnp.zeros(do.shape), states(do, k, None))[1]
    dv, dh0 = pull((do.astype(jnp.float32), ends))
    return ends, dv if store_grads else None, dh0 if want_dh0 else None


def chunk_grads(*, q, k, v, do, t0, g2, beta, seg, h, dh, scale):
    assert scale == 1
    q, k = (jnp.repeat(a.astype(jnp.float32), v.shape[2] // a.shape[2], axis=2) for a in (q, k))
    pull = jax.vjp(lambda q, k, g, b: run(q, k, v, g, b, seg, h), q, k, g2, beta)[1]
    dq, dk, ddecay, dstrength = pull((do.astype(jnp.float32), dh))
    by_chunk = ddecay.reshape(*ddecay.shape[:2], -1, CHUNK)
    later = jnp.pad(by_chunk[..., 1:], [(0, 0)] * 3 + [(0, 1)])
    return dq, dk, dstrength, (by_chunk - later).reshape(ddecay.shape)  # of the decays' sums in a chunk


MODULES = {
    "scalar_gate": {"pieces": lambda *shape, delta: PIECES},
    "scalar_gate_fused": {"fused_fwd_wy": fused_fwd_wy},
    "gated_delta_rule_bwd": {"state_fwd_wy": state_fwd_wy, "state_bwd_wy": state_bwd_wy, "chunk_grads": chunk_grads},
    "gated_delta_rule_kernels": {"kkt_fwd": lambda k, beta, seg: None},
    "_common": {
        "segment_vectors": segment_vectors,
        "head_major": heads_first,
        "chunk_log2_decay": lambda g, batch, length, heads, pad: heads_first(g, pad),
    },
}
