"""Attention to a part of the keys, with what it takes to add the parts up: the softmax's log-sum-exp, in FP32.

`merge` joins parts as FlashAttention joins tiles (Dao et al. 2022). The backward pass of a part needs the output and
the log-sum-exp of all parts, and gives the part's share of dq, and dk and dv of its keys.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.ops.attention import Implementation
from megajax.ops.numerics import wide

Kind = Literal["causal", "full", "prefix"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Where tokens stand: their index in the sequence, and their document; `[B, S]` int32, documents may be None."""

    index: jax.Array
    segments: jax.Array | None


@dataclass(frozen=True)
class Scores:
    """How scores are made: softcap(scale · q·k), seen if not later than the query, in its window and document."""

    scale: float
    window: int | None
    softcap: float | None
    implementation: Implementation


Part = tuple[jax.Array, jax.Array]  # output [B, Sq, N, H], log-sum-exp [B, N, Sq] FP32


def attend(
    scores: Scores, kind: Kind, q: jax.Array, k: jax.Array, v: jax.Array, where_q: Place, where_k: Place
) -> Part:
    """Attention of `q [B, Sq, N, H]` to the keys `k`, `v [B, Sk, K, H]` that it sees.

    The reference sees by `where_q` and `where_k`. cuDNN sees by `kind`: queries and keys are the same tokens
    ("causal"), all are seen ("full"), or in each sequence those before its first query ("prefix": keys from index 0).
    A query that sees nothing has an output of 0 and a log-sum-exp of -inf.
    """
    if scores.implementation == "cudnn":
        return _cudnn(scores, kind, q, k, v, where_q)
    s, _ = _scores(scores, q, k, where_q, where_k)
    largest = s.max(-1, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isfinite(largest), largest, 0))
    total = p.sum(-1, keepdims=True)
    out = jnp.einsum("bkgqs,bskh->bqkgh", p / jnp.where(total == 0, 1, total), v.astype(p.dtype))
    lse = jnp.log(total) + largest
    B, Sq, N, H = q.shape
    return out.reshape(B, Sq, N, H), lse.reshape(B, N, Sq)


def attend_backward(
    scores: Scores, kind: Kind, q, k, v, where_q: Place, where_k: Place, whole: Part, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This part's (dq, dk, dv); `whole` is the output and log-sum-exp of all parts, `dout` the output's gradient."""
    if scores.implementation == "cudnn":
        return _cudnn_backward(scores, kind, q, k, v, where_q, whole, dout)
    out, lse = whole
    s, slope = _scores(scores, q, k, where_q, where_k)
    p = jnp.exp(s - lse.reshape(*s.shape[:-1], 1))
    B, Sq, N, H = q.shape
    grouped = (B, Sq, *s.shape[1:3], H)
    q, dout, out = (a.astype(s.dtype).reshape(grouped) for a in (q, dout, out))
    dv = jnp.einsum("bkgqs,bqkgh->bskh", p, dout)
    dp = jnp.einsum("bqkgh,bskh->bkgqs", dout, v.astype(s.dtype))
    ds = p * (dp - jnp.einsum("bqkgh,bqkgh->bkgq", dout, out)[..., None]) * slope * scores.scale
    dq = jnp.einsum("bkgqs,bskh->bqkgh", ds, k.astype(s.dtype)).reshape(B, Sq, N, H)
    return dq, jnp.einsum("bkgqs,bqkgh->bskh", ds, q), dv


def merge(one: Part, other: Part) -> Part:
    """Two parts of the same queries, of disjoint keys → their sum, FP32. One of them sees something."""
    lse = jnp.logaddexp(one[1], other[1])
    outs = (out * jnp.exp(part - lse).swapaxes(1, 2)[..., None] for out, part in (one, other))
    return sum(outs), lse  # type: ignore[return-value]


def _scores(scores: Scores, q, k, where_q: Place, where_k: Place) -> tuple[jax.Array, jax.Array | float]:
    """(`[B, K, N/K, Sq, Sk]`, -inf where nothing is seen; the soft-cap's derivative), in FP32 or FP64."""
    dtype = wide(q.dtype)
    B, Sq, N, H = q.shape
    K = k.shape[2]
    q = q.astype(dtype).reshape(B, Sq, K, N // K, H)
    s, slope = jnp.einsum("bqkgh,bskh->bkgqs", q, k.astype(dtype)) * scores.scale, 1.0
    if scores.softcap is not None:
        squashed = jnp.tanh(s / scores.softcap)
        s, slope = scores.softcap * squashed, 1 - squashed**2
    behind = where_q.index[:, :, None] - where_k.index[:, None, :]
    visible = behind >= 0
    if scores.window is not None:
        visible &= behind < scores.window
    if where_q.segments is not None and where_k.segments is not None:
        visible &= where_q.segments[:, :, None] == where_k.segments[:, None, :]
    return jnp.where(visible[:, None, None], s, -jnp.inf), slope


# cuDNN. jax.nn.dot_product_attention rounds the log-sum-exp to BF16 and has no backward pass of a part.

MASKS = {"causal": "CAUSAL", "full": "NO_MASK", "prefix": "PADDING"}  # its names, by kind


def _cudnn(scores: Scores, kind: Kind, q, k, v, where_q: Place) -> Part:
    from jax._src.cudnn import fused_attention_stablehlo as fused

    lengths = _lengths(kind, q, k, where_q)
    call: Any = fused.dot_product_attention
    mask = fused.MaskType[MASKS[kind]]
    out, lse = call(q, k, v, **lengths, scale=scores.scale, mask_type=mask, return_residual=True)
    if kind == "prefix":
        some = (where_q.index[:, 0] > 0)[:, None, None]
        out, lse = jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)
    return out, lse


def _cudnn_backward(scores: Scores, kind: Kind, q, k, v, where_q: Place, whole: Part, dout):
    from jax._src.cudnn import fused_attention_stablehlo as fused

    out, lse = whole[0].astype(q.dtype), whole[1]
    if kind == "prefix":  # the key that a sequence without any is given gets no gradient
        some = (where_q.index[:, 0] > 0)[:, None, None, None]
        out, dout = jnp.where(some, out, 0), jnp.where(some, dout, 0)
    lengths = _lengths(kind, q, k, where_q)
    unused = jnp.zeros(0, q.dtype)
    dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, unused, lengths.get("q_seqlen", unused), lengths.get("kv_seqlen", unused)),
        *(unused, unused, unused, unused, lse, out, dout.astype(q.dtype)),
        scale=scores.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType[MASKS[kind]],
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=None,
    )
    if kind == "prefix":  # nothing is promised of what lies behind
        seen = jnp.arange(k.shape[1]) < lengths["kv_seqlen"][:, None]
        dk, dv = (jnp.where(seen[..., None, None], g, 0) for g in (dk, dv))
    return dq, dk, dv


def _lengths(kind: Kind, q: jax.Array, k: jax.Array, where_q: Place) -> dict[str, jax.Array]:
    """Each sequence's queries and keys, `[B]` int32, where they are not all; cuDNN wants one key at least."""
    if kind != "prefix":
        return {}
    before = jnp.clip(where_q.index[:, 0], 1, k.shape[1])
    return {"q_seqlen": jnp.full(len(q), q.shape[1], jnp.int32), "kv_seqlen": before.astype(jnp.int32)}
