"""Causal attention over a whole sequence: a plain reference, cuDNN's kernel and megajax's own, with one signature."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops.numerics import wide
from megajax.ops.partial_attention import (
    Implementation,
    Mask,
    Ranges,
    Scores,
    add_sinks,
    attend,
    attend_backward,
    backward_with_sinks,
    largest_score,
)

Inputs = tuple[jax.Array, jax.Array, jax.Array]  # q, k, v


@dataclass(frozen=True)
class AttentionSettings:
    """How queries attend to keys and values."""

    window: int | None = None  # number of tokens that a token sees; None: all before it
    softcap: float | None = None  # bounds scores to ±softcap by tanh, before the mask
    scale: float | None = None  # factor of the scores; None: `H ** -0.5`
    # [N]: one logit per head in the softmax denominator (attention sinks, GPT-OSS, OpenAI 2025), without scale and
    # soft-cap; of the same heads as the queries
    sinks: jax.Array | None = None
    wants_largest: bool = False  # whether the largest scores are returned


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    settings: AttentionSettings = AttentionSettings(),
    *,
    implementation: Implementation,
    document_starts: jax.Array | None = None,
    is_real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """softmax(scale · q·k) v over the visible keys: q [B,S,N,H], k [B,S,K,H], v [B,S,K,W] -> [B,S,N,W] in q's dtype.

    K divides N; query head n reads KV head n // (N/K). "pallas" supports the widths (H, W) of
    `ranged_attention.WIDTHS`. Position i sees the positions up to i; with a window w only i-w+1 … i; with
    `document_starts` [B,S] (see the function) only those of its document.
    The second result is `largest_score` without the sinks, of the queries that are no padding by `is_real [B,S]`; None
    if it is not wanted.
    Raises ValueError for arguments that the implementation does not support.
    """
    window, softcap, sinks = settings.window, settings.softcap, settings.sinks
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not a positive number of tokens.")
    if window is not None and window >= q_bsnh.shape[1]:
        window = None  # it contains every earlier position
    scale = 1.0 / math.sqrt(q_bsnh.shape[-1]) if settings.scale is None else settings.scale
    scores = Scores(scale, softcap, implementation, settings.wants_largest)
    if implementation == "cudnn":
        if document_starts is not None:
            raise ValueError('implementation="cudnn" has no document mask: use "pallas" or "reference".')
        if softcap is not None:
            raise ValueError(f'implementation="cudnn" has no soft-cap, softcap={softcap}: use "pallas" or "reference".')
        # jax.nn has none of these.
        if sinks is not None or settings.wants_largest or k_bskh.shape[-1] != v_bskh.shape[-1]:
            return _whole(scores, window, (q_bsnh, k_bskh, v_bskh), None, sinks, is_real)
        out = jax.nn.dot_product_attention(
            q_bsnh,
            k_bskh,
            v_bskh,
            scale=scale,
            is_causal=True,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        return out, None
    if implementation == "pallas":
        index = jnp.broadcast_to(jnp.arange(q_bsnh.shape[1], dtype=jnp.int32), q_bsnh.shape[:2])
        ranges = causal_ranges(index, document_starts, window)
        return _whole(scores, window, (q_bsnh, k_bskh, v_bskh), ranges, sinks, is_real)
    visible = _visible(q_bsnh.shape[1], window, document_starts)
    return _reference(scores, q_bsnh, k_bskh, v_bskh, visible, sinks, is_real)


def causal_ranges(
    index_bs: jax.Array, document_starts: jax.Array | None, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """For queries at positions `index_bs` of the sequence: the first visible key and the end of the range; `[B, S]`."""
    first = jnp.zeros_like(index_bs) if document_starts is None else document_starts
    return (first if window is None else jnp.maximum(first, index_bs - window + 1)), index_bs + 1


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(scores: Scores, window: int | None, qkv: Inputs, ranges: Ranges | None, sinks, is_real):
    """Attention to all keys by the functions for a part of the keys, which also return the log-sum-exp in FP32."""
    return _whole_forward(scores, window, qkv, ranges, sinks, is_real)[0]


def _whole_forward(scores: Scores, window: int | None, qkv: Inputs, ranges: Ranges | None, sinks, is_real):
    out, lse = attend(scores, Mask("causal", ranges, window), *qkv)
    largest = largest_score(scores, lse, is_real)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # Remat policies that keep attention find the residuals of its backward pass by this name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(qkv[0].dtype), lse))
    return (out, largest), (qkv, ranges, sinks, out, lse)


def _whole_backward(scores: Scores, window: int | None, saved, gradients):
    dout, _ = gradients
    qkv, ranges, sinks, *whole = saved
    backward = partial(attend_backward, scores, Mask("causal", ranges, window), *qkv)
    gradients, dsinks = backward_with_sinks(backward, sinks, tuple(whole), dout)
    return gradients, None, dsinks, None


_whole.defvjp(_whole_forward, _whole_backward)


def document_starts(segment_ids_bs: jax.Array) -> jax.Array:
    """The first position of each token's document, `[B, S]` int32; a document ends where the id changes."""
    index = jnp.broadcast_to(jnp.arange(segment_ids_bs.shape[1], dtype=jnp.int32), segment_ids_bs.shape)
    changed = segment_ids_bs != jnp.roll(segment_ids_bs, 1, axis=1)
    return lax.cummax(jnp.where(changed, index, 0), axis=1)


def _reference(
    scores: Scores, q_bsnh, k_bskh, v_bskh, visible: jax.Array, sinks: jax.Array | None, is_real: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """Attention by materialised scores, in float32 (float64 for float64 inputs)."""
    dtype = wide(q_bsnh.dtype)
    B, S, N, H = q_bsnh.shape
    K, W = v_bskh.shape[2:]
    G = N // K
    # One batched matmul per KV head, with its G query heads in the rows: the fastest form on CPUs.
    q = q_bsnh.astype(dtype).reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, H)
    k, v = (a.astype(dtype).transpose(0, 2, 1, 3) for a in (k_bskh, v_bskh))
    s = jnp.einsum("bkrh,bksh->bkrs", q, k).reshape(B, K, G, S, S) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    s = jnp.where(visible, s, -jnp.inf)
    largest = None
    if scores.wants_largest:
        lse = jax.nn.logsumexp(lax.stop_gradient(s), axis=-1)
        largest = largest_score(scores, lse.reshape(B, N, S), is_real)
    if sinks is not None:
        logits = jnp.broadcast_to(sinks.astype(dtype).reshape(K, G, 1, 1), (B, K, G, S, 1))
        weights = jax.nn.softmax(jnp.concatenate([s, logits], axis=-1), axis=-1)[..., :S]
    else:
        weights = jax.nn.softmax(s, axis=-1)
    weights = weights.reshape(B, K, G * S, S)
    out = jnp.einsum("bkrs,bksw->bkrw", weights, v).reshape(B, K, G, S, W)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, N, W).astype(q_bsnh.dtype), largest


def _visible(S: int, window: int | None, document_starts: jax.Array | None) -> jax.Array:
    """Whether a query sees a key, broadcastable to [B, K, N/K, S, S]. Each query sees its own position."""
    behind = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
    visible = behind >= 0
    if window is not None:
        visible &= behind < window
    if document_starts is not None:
        visible &= (document_starts[:, :, None] == document_starts[:, None, :])[:, None, None]
    return visible
