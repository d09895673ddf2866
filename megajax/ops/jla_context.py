"""The gated delta rule by the kernels of jax-linear-attention, where several devices have parts of the sequences.

`ops.jla` has their public functions, which know one device. Here a device computes the map of the state over its
tokens, gets the state before them, and runs the outputs from that state. The backward pass is alike: the gradient of
the state before its tokens for a gradient of zero after them, the true gradient after them, and all others. Each
direction has one short pass more than on one device; the kernels have it there too if they cut sequences into pieces.

The kernels' states are transposed, [w, d]. Shape letters as in `linear_recurrence`, and P pieces of a sequence.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.linear_recurrence import CHUNK, StateBefore

EXACT = lax.Precision.HIGHEST


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    strength: jax.Array,
    starts: jax.Array | None,
    state_before: StateBefore,
) -> tuple[jax.Array, jax.Array]:
    """`ops.gated_delta_rule` of queries, keys and values in BF16."""
    pass_, first = _Pass(q.shape, v.shape), jnp.zeros(len(v), bool) if starts is None else starts[:, 0]
    number = None if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=1)

    def before(first: jax.Array, transition: jax.Array, final: jax.Array) -> jax.Array:
        """The state before, of which a document that begins with this device's first token sees nothing."""
        return _unless(first, state_before(_unless(first, transition), final))

    @jax.custom_vjp
    def run(*inputs: Any) -> tuple[jax.Array, jax.Array]:
        return forward(*inputs)[0]

    def forward(first: jax.Array, *inputs: Any) -> Any:
        arrays = pass_.arrays(*inputs)
        maps = pass_.maps(arrays)
        transition, final = _combine(maps)
        # Later devices see the final state; its gradient comes back by the map from final states to states before.
        initial, pull = jax.vjp(partial(before, first, transition), final)
        starts = _piece_starts(maps, initial)
        after = jnp.matmul(transition, initial, precision=EXACT) + final
        return (pass_.outputs(arrays, starts), after), (arrays, maps, starts, pull)

    def backward(saved: Any, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array | None, ...]:
        (arrays, maps, starts, pull), (dout, dafter) = saved, cotangents
        dout = pass_.padded(dout.astype(jnp.bfloat16))
        local = pass_.gradients_before(arrays, dout)
        _, dinitial = _back(maps, local, jnp.zeros_like(dafter))
        [dfinal] = pull(dinitial)
        ends, _ = _back(maps, local, dfinal + dafter)
        return None, *pass_.gradients(arrays, starts, dout, ends), None

    run.defvjp(forward, backward)
    return run(first, q, k, v, log_decay, strength, number)


class _Pass:
    """The kernels for arrays of some shapes."""

    def __init__(self, keys: tuple[int, ...], values: tuple[int, ...]):
        from jla.ops.mosaic_gpu import scalar_gate  # type: ignore[import-not-found]

        (self.B, self.S, self.K, self.d), (_, _, self.N, self.w) = keys, values
        self.pieces = scalar_gate.pieces(self.B, self.N, self.w, self.S, delta=True)
        self.pad = -self.S % (CHUNK * self.pieces)

    def padded(self, x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, 0), (0, self.pad), *[(0, 0)] * (x.ndim - 2)])

    def arrays(self, q, k, v, log_decay, strength, number) -> dict[str, Any]:
        """What the kernels take."""
        from jla.ops.mosaic_gpu import _common as common  # type: ignore[import-not-found]
        from jla.ops.mosaic_gpu import gated_delta_rule_kernels as kernels  # type: ignore[import-not-found]

        documents = None if number is None else common.segment_vectors(number, self.pad)
        decay = common.chunk_log2_decay(log_decay, self.B, self.S, self.N, self.pad)
        strength, (q, k, v) = common.head_major(strength, self.pad), map(self.padded, (q, k, v))
        solved = kernels.kkt_fwd(k, strength, seg=documents)
        return {"q": q, "k": k, "v": v, "t0": solved, "g2": decay, "beta": strength, "seg": documents}

    def maps(self, arrays: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        """(transitions `[P, B, N, d, d]`, final states `[P, B, N, d, w]` after zeros) of the pieces."""
        how = {"store_states": False, "out_final": True, "aug": True, "cp": self.pieces}
        _, both = _kernels().state_fwd_wy(**_without(arrays, "q"), h0=None, **how)
        both = self._by_piece(both)
        return both[..., : self.d], both[..., self.d :]

    def outputs(self, arrays: dict[str, Any], starts: jax.Array) -> jax.Array:
        """From the states before the pieces, `[B, S, N, w]`."""
        from jla.ops.mosaic_gpu import scalar_gate_fused  # type: ignore[import-not-found]

        how = {"scale": 1.0, "out_final": False, "out_dtype": jnp.bfloat16, "cp": self.pieces}
        out, _ = scalar_gate_fused.fused_fwd_wy(**arrays, h0=self._given(starts), **how)
        return out[:, : self.S]

    def gradients_before(self, arrays: dict[str, Any], dout: jax.Array) -> jax.Array:
        """Those of the states before the pieces, if those after them are zero, `[P, B, N, d, w]`."""
        how = {"scale": 1.0, "want_dh0": True, "store_grads": False, "cp": self.pieces}
        return self._by_piece(_kernels().state_bwd_wy(**_without(arrays, "v"), do=dout, dht=None, **how)[2])

    def gradients(
        self, arrays: dict[str, Any], starts: jax.Array, dout: jax.Array, ends: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Those of queries, keys, values, decays and strengths, from the gradients of the states after the pieces."""
        states, _ = _kernels().state_fwd_wy(**_without(arrays, "q"), h0=self._given(starts), cp=self.pieces)
        how = {"scale": 1.0, "want_dh0": False, "cp": self.pieces}
        dstates, dv, _ = _kernels().state_bwd_wy(**_without(arrays, "v"), do=dout, dht=self._given(ends), **how)
        dq, dk, dstrength, ddecay = _kernels().chunk_grads(**arrays, do=dout, h=states, dh=dstates, scale=1.0)
        ddecay = lax.cumsum(ddecay.reshape(self.B, self.N, -1, CHUNK), axis=3, reverse=True)
        ddecay, dstrength = (a.reshape(self.B, self.N, -1).swapaxes(1, 2)[:, : self.S] for a in (ddecay, dstrength))
        return *map(self._of_keys, (dq, dk)), dv[:, : self.S], ddecay, dstrength

    def _of_keys(self, x: jax.Array) -> jax.Array:
        """The sum over the heads that share a key, `[B, S, K, d]`."""
        x = x[:, : self.S].astype(jnp.float32).reshape(self.B, self.S, self.K, -1, self.d)
        return x.sum(axis=3).astype(jnp.bfloat16)

    def _by_piece(self, states: jax.Array) -> jax.Array:
        """`[B · P, N, w, d]` → `[P, B, N, d, w]`."""
        return jnp.moveaxis(states.reshape(self.B, self.pieces, *states.shape[1:]), 1, 0).swapaxes(-1, -2)

    def _given(self, states: jax.Array) -> jax.Array:
        """Inverse of `_by_piece`."""
        return jnp.moveaxis(states.swapaxes(-1, -2), 0, 1).reshape(-1, self.N, self.w, self.d)


def _kernels() -> Any:
    from jla.ops.mosaic_gpu import gated_delta_rule_bwd  # type: ignore[import-not-found]

    return gated_delta_rule_bwd


def _without(arrays: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in arrays.items() if key != name}


def _unless(begins: jax.Array, state: jax.Array) -> jax.Array:
    return jnp.where(begins[:, None, None, None], 0, state)


def _combine(maps: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The map of all pieces, one after the other."""
    (transition, *transitions), (final, *finals) = map(list, maps)
    for own, end in zip(transitions, finals, strict=True):
        transition = jnp.matmul(own, transition, precision=EXACT)
        final = jnp.matmul(own, final, precision=EXACT) + end
    return transition, final


def _piece_starts(maps: tuple[jax.Array, jax.Array], state: jax.Array) -> jax.Array:
    """The states before the pieces `[P, B, N, d, w]`, from that before the first."""
    states = [state]
    for own, end in list(zip(*maps, strict=True))[:-1]:
        states.append(jnp.matmul(own, states[-1], precision=EXACT) + end)
    return jnp.stack(states)


def _back(maps: tuple[jax.Array, jax.Array], local: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the gradients of the states after the pieces, that of the state before the first), from that after the last."""
    ends = [end]
    for own, added in list(zip(maps[0], local, strict=True))[::-1]:
        ends.append(jnp.matmul(own.swapaxes(-1, -2), ends[-1], precision=EXACT) + added)
    return jnp.stack(ends[-2::-1]), ends[-1]
