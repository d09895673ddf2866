"""Attention to a part of the keys, with the log-sum-exp of the softmax in FP32, which is needed to merge parts.

`merge` merges parts as FlashAttention merges tiles (Dao et al. 2022). The backward pass of a part takes the output and
the log-sum-exp of all parts, and returns the part's share of dq, and dk and dv of its keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from megajax.ops.barriers import not_before, not_merged
from megajax.ops.numerics import wide
from megajax.ops.query_ranges import Options, Ranges

Implementation = Literal["reference", "cudnn", "pallas", "triton"]
Kind = Literal["causal", "full", "prefix"]


@dataclass(frozen=True)
class Scores:
    """The settings of the scores softcap(scale · q·k)."""

    scale: float
    softcap: float | None
    implementation: Implementation
    wants_largest: bool = False  # whether `largest_score` is wanted


class Mask(NamedTuple):
    """The keys that queries see, by their ranges, or as a kind that cuDNN has.

    "causal": queries and keys are the same tokens, optionally with a `window`; "full": all keys; "prefix": the keys
    before an end that all queries of a sequence share in `ranges`.
    """

    kind: Kind
    ranges: Ranges | None = None  # unused by cuDNN but for "prefix"; bounds never decrease along the queries
    window: int | None = None  # for cuDNN alone: other implementations have it in `ranges`


Part = tuple[jax.Array, jax.Array]  # output [B, Sq, N, W], log-sum-exp [B, N, Sq] FP32


def attend(scores: Scores, mask: Mask, q: jax.Array, k: jax.Array, v: jax.Array) -> Part:
    """Attention of `q [B, Sq, N, H]` to the keys that it sees: `k [B, Sk, K, H]`, `v [B, Sk, K, W]`.

    "pallas" supports widths (H, W) up to those of `ranged_attention.WIDTHS`, "triton" up to 256. A query without keys
    has an output of 0 and a log-sum-exp of -inf.
    """
    if scores.implementation == "cudnn":
        return _cudnn(scores, mask, q, k, v)
    assert mask.ranges is not None
    if scores.implementation != "reference":
        options = Options(scores.scale, scores.softcap)
        return _kernels(scores.implementation).attend(q, k, v, mask.ranges, options)
    s, _ = _scores(scores, q, k, mask.ranges)
    largest = s.max(-1, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isfinite(largest), largest, 0))
    total = p.sum(-1, keepdims=True)
    out = jnp.einsum("bkgqs,bskh->bqkgh", p / jnp.where(total == 0, 1, total), v.astype(p.dtype))
    lse = jnp.log(total) + largest
    B, Sq, N, H = q.shape
    return out.reshape(B, Sq, N, v.shape[-1]), lse.reshape(B, N, Sq)


def attend_backward(
    scores: Scores, mask: Mask, q, k, v, whole: Part, dout: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """This part's (dq, dk, dv); `whole` is the output and log-sum-exp of all parts, `dout` the output gradient."""
    if scores.implementation == "cudnn":
        return _cudnn_backward(scores, mask, q, k, v, whole, dout)
    assert mask.ranges is not None
    if scores.implementation != "reference":
        options, whole = Options(scores.scale, scores.softcap), (whole[0].astype(q.dtype), whole[1])
        return _kernels(scores.implementation).attend_backward(q, k, v, mask.ranges, whole, dout, options)
    out, lse = whole
    s, slope = _scores(scores, q, k, mask.ranges)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)  # a query without keys has p = exp(s - inf) = 0
    p = jnp.exp(s - lse.reshape(*s.shape[:-1], 1))
    B, Sq, N, H = q.shape
    q, dout, out = (a.astype(s.dtype).reshape(B, Sq, *s.shape[1:3], -1) for a in (q, dout, out))
    dv = jnp.einsum("bkgqs,bqkgh->bskh", p, dout)
    dp = jnp.einsum("bqkgh,bskh->bkgqs", dout, v.astype(s.dtype))
    ds = p * (dp - jnp.einsum("bqkgh,bqkgh->bkgq", dout, out)[..., None]) * slope * scores.scale
    dq = jnp.einsum("bkgqs,bskh->bqkgh", ds, k.astype(s.dtype)).reshape(B, Sq, N, H)
    return dq, jnp.einsum("bkgqs,bqkgh->bskh", ds, q), dv


def _kernels(implementation: Implementation) -> ModuleType:
    """megajax's kernels for Hopper or for any GPU, imported where they are used: Mosaic takes half a second."""
    name = {"pallas": "ranged_attention", "triton": "ranged_attention_triton"}[implementation]
    return import_module(f"megajax.ops.{name}")


def largest_score(scores: Scores, lse: jax.Array, is_real: jax.Array | None) -> jax.Array | None:
    """The log-sum-exp of scores `[B, N, Sq]` → its largest value for each head, at least 0; None if it is not wanted.

    It is a bound of the largest score: above it by at most the logarithm of the number of keys. `[N]` FP32, without
    gradients. Queries that are padding, where `is_real [B, Sq]` is False, do not count.
    """
    if not scores.wants_largest:
        return None
    lse = lse if is_real is None else jnp.where(is_real[:, None], lse, 0)
    return lax.stop_gradient(jnp.maximum(lse.astype(jnp.float32).max(axis=(0, 2)), 0))


def merge(one: Part, other: Part) -> Part:
    """Two parts with the same queries and disjoint keys → the part with both, in FP32. Each query sees some key."""
    lse = jnp.logaddexp(one[1], other[1])
    outs = (out * jnp.exp(part - lse).swapaxes(1, 2)[..., None] for out, part in (one, other))
    return sum(outs), lse  # type: ignore[return-value]


def add_sinks(whole: Part, sinks: jax.Array) -> Part:
    """Attention to all keys and to one more key per head: its score is the sink's logit, `sinks [N]`, its value zero.

    With the result as `whole`, `attend_backward` returns the gradients of attention with sinks.
    """
    out, of_keys = whole
    lse = jnp.logaddexp(of_keys, sinks.astype(of_keys.dtype)[:, None])
    return out * jnp.exp(of_keys - lse).swapaxes(1, 2)[..., None], lse


def backward_with_sinks[Gradients](
    backward: Callable[[Part, jax.Array], Gradients], sinks: jax.Array | None, whole: Part, dout: jax.Array
) -> tuple[Gradients, jax.Array | None]:
    """(`backward(whole, dout)`, the gradient of `sinks [N]` or None); `whole` is the result of `add_sinks`.

    The score gradient of the sink is P · (dP - D), as for a key, with dP = 0 because the sink's value is zero.
    """
    if sinks is None:
        return backward(whole, dout), None
    # Without this barrier XLA keeps the output without sinks and applies them again where the output is read.
    whole, dout = not_merged((whole, dout))
    out, lse = whole
    delta = jnp.sum(out.astype(lse.dtype) * dout.astype(lse.dtype), axis=-1).swapaxes(1, 2)
    p = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)
    dsinks = -jnp.sum(p * delta, axis=(0, 2)).astype(sinks.dtype)
    # Without this barrier XLA sums over the tokens at the end of the step, and keeps all layers' `dout` until then.
    return not_before((backward(whole, dout), dsinks))


def _scores(scores: Scores, q, k, ranges: Ranges) -> tuple[jax.Array, jax.Array | float]:
    """(scores `[B, K, N/K, Sq, Sk]`, -inf outside the ranges; the soft-cap's derivative), in FP32 or FP64."""
    dtype = wide(q.dtype)
    B, Sq, N, H = q.shape
    K = k.shape[2]
    q = q.astype(dtype).reshape(B, Sq, K, N // K, H)
    s, slope = jnp.einsum("bqkgh,bskh->bkgqs", q, k.astype(dtype)) * scores.scale, 1.0
    if scores.softcap is not None:
        squashed = jnp.tanh(s / scores.softcap)
        s, slope = scores.softcap * squashed, 1 - squashed**2
    first, end = (edge[:, :, None] for edge in ranges)
    keys = jnp.arange(k.shape[1])
    visible = (keys >= first) & (keys < end)
    return jnp.where(visible[:, None, None], s, -jnp.inf), slope


# cuDNN. jax.nn.dot_product_attention rounds the log-sum-exp to BF16 and has no backward pass for a part.

MASKS = {"causal": "CAUSAL", "full": "NO_MASK", "prefix": "PADDING"}  # cuDNN's names


def _cudnn(scores: Scores, mask: Mask, q, k, v) -> Part:
    from megajax.jax_internals import fused_attention_stablehlo as fused

    before = _before(mask)
    call: Any = fused.dot_product_attention
    mask_type = fused.MaskType[MASKS[mask.kind]]
    settings = {"scale": scores.scale, "mask_type": mask_type, "sliding_window_length": mask.window}
    out, lse = call(q, k, v, **_lengths(before, q, k), **settings, return_residual=True)
    if before is not None:
        some = (before > 0)[:, None, None]
        out, lse = jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)
    return out, lse


def _cudnn_backward(scores: Scores, mask: Mask, q, k, v, whole: Part, dout):
    from megajax.jax_internals import fused_attention_stablehlo as fused

    before = _before(mask)
    out, lse = whole[0].astype(q.dtype), whole[1]
    if before is not None:  # `_lengths` gives a sequence without keys one key, which gets no gradient
        some = (before > 0)[:, None, None, None]
        out, dout = jnp.where(some, out, 0), jnp.where(some, dout, 0)
    lengths = _lengths(before, q, k)
    unused = jnp.zeros(0, q.dtype)
    dq, dk, dv = fused._dot_product_attention_bwd_p_wrapper.bind(
        *(q, k, v, unused, lengths.get("q_seqlen", unused), lengths.get("kv_seqlen", unused)),
        *(unused, unused, unused, unused, lse, out, dout.astype(q.dtype)),
        scale=scores.scale,
        seed=42,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=fused.MaskType[MASKS[mask.kind]],
        layout=fused.AttentionLayout.BTNH.value,
        sliding_window_length=mask.window,
    )
    if before is not None:  # cuDNN leaves gradients of later keys undefined
        seen = jnp.arange(k.shape[1]) < lengths["kv_seqlen"][:, None]
        dk, dv = (jnp.where(seen[..., None, None], g, 0) for g in (dk, dv))
    return dq, dk, dv


def _before(mask: Mask) -> jax.Array | None:
    """For "prefix": the end of each sequence's visible keys, `[B]`."""
    if mask.kind != "prefix":
        return None
    assert mask.ranges is not None
    return mask.ranges[1][:, 0]


def _lengths(before: jax.Array | None, q: jax.Array, k: jax.Array) -> dict[str, jax.Array]:
    """Each sequence's numbers of queries and keys, `[B]` int32, for "prefix"; cuDNN needs at least one key."""
    if before is None:
        return {}
    keys = jnp.clip(before, 1, k.shape[1]).astype(jnp.int32)
    return {"q_seqlen": jnp.full(len(q), q.shape[1], jnp.int32), "kv_seqlen": keys}
