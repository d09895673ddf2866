"""Attention over a whole sequence: a plain reference, cuDNN's kernel and megajax's own, with one signature."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.ops.numerics import wide
from megajax.ops.partial_attention import (
    Implementation,
    Kind,
    Mask,
    Ranges,
    Scores,
    add_sinks,
    attend,
    attend_backward,
    backward_with_sinks,
    largest_score,
)
from megajax.ops.relative_bias import relative_bias

Inputs = tuple[jax.Array, jax.Array, jax.Array]  # q, k, v


class PackedDocuments(NamedTuple):
    """The documents of packed sequences, `[B, S]` int32 each: padding counts as a document."""

    starts: jax.Array  # first position of each token's document
    ends: jax.Array | None = None  # the position after its last one, which causal attention does not read


@dataclass(frozen=True)
class AttentionSettings:
    """How queries attend to keys and values."""

    # Number of tokens that a token sees before it, and without `causal` after it, itself included; None: all of them
    window: int | None = None
    softcap: float | None = None  # bounds scores to ±softcap by tanh, before the mask
    scale: float | None = None  # factor of the scores; None: `H ** -0.5`
    # [N]: one logit per head in the softmax denominator (attention sinks, GPT-OSS, OpenAI 2025), without scale and
    # soft-cap; of the same heads as the queries
    sinks: jax.Array | None = None
    wants_largest: bool = False  # whether the largest scores are returned
    causal: bool = True  # whether a token sees none after it
    # [N, buckets]: `relative_bias.relative_bias` of the same heads as the queries, added to the scores
    bias_table: jax.Array | None = None
    bias_distance: int = 128  # its max_distance

    def bias_of(self, length: int) -> jax.Array | None:
        """The bias of each pair of tokens of a sequence, `[N, length, length]`."""
        if self.bias_table is None:
            return None
        return relative_bias(self.bias_table, length, self.bias_distance, self.causal)


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    settings: AttentionSettings = AttentionSettings(),
    *,
    implementation: Implementation,
    documents: PackedDocuments | None = None,
    is_real: jax.Array | None = None,
    two_sided_ends: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """softmax(scale · q·k) v over the visible keys: q [B,S,N,H], k [B,S,K,H], v [B,S,K,W] -> [B,S,N,W] in q's dtype.

    K divides N; query head n reads KV head n // (N/K). "pallas" supports widths (H, W) up to those of
    `ranged_attention.WIDTHS`, "triton" up to 256. Position i sees the positions up to i, those after it too unless
    `settings.causal`; with a window w only i-w+1 … i+w-1; with `documents` [B,S] (see `documents_of`) only those of its
    document; with `two_sided_ends` [B,S] (see `two_sided_ends`) also those of its run, whatever the window.
    The second result is `largest_score` without the sinks, of the queries that are no padding by `is_real [B,S]`; None
    if it is not wanted.
    Raises ValueError for arguments that the implementation does not support.
    """
    window, softcap, sinks, causal = settings.window, settings.softcap, settings.sinks, settings.causal
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not a positive number of tokens.")
    if window is not None and window >= q_bsnh.shape[1]:
        window = None  # it contains every position
    scale = 1.0 / math.sqrt(q_bsnh.shape[-1]) if settings.scale is None else settings.scale
    scores = Scores(scale, softcap, implementation, settings.wants_largest)
    kind: Kind = "causal" if causal else "full"
    qkv = q_bsnh, k_bskh, v_bskh
    if implementation == "cudnn":
        if documents is not None or two_sided_ends is not None:
            raise ValueError('implementation="cudnn" has no document mask: use another.')
        if window is not None and not causal:
            raise ValueError('implementation="cudnn" has no window on both sides: use another.')
        if softcap is not None:
            raise ValueError(f'implementation="cudnn" has no soft-cap, softcap={softcap}: use another.')
        bias = settings.bias_of(q_bsnh.shape[1])
        # jax.nn has none of these.
        if sinks is not None or settings.wants_largest or k_bskh.shape[-1] != v_bskh.shape[-1]:
            assert bias is None, "a bias has no sinks, scores or other widths of values"
            return _whole(scores, kind, window, qkv, None, sinks, is_real)
        out = jax.nn.dot_product_attention(
            *qkv,
            None if bias is None else bias[None].astype(q_bsnh.dtype),
            scale=scale,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
        return out, None
    if implementation != "reference":
        if settings.bias_table is not None:
            raise ValueError(f'implementation="{implementation}" has no bias by distance: use "cudnn" or "reference".')
        index = jnp.broadcast_to(jnp.arange(q_bsnh.shape[1], dtype=jnp.int32), q_bsnh.shape[:2])
        ranges = visible_ranges(index, documents, window, None if causal else q_bsnh.shape[1], two_sided_ends)
        return _whole(scores, kind, window, qkv, ranges, sinks, is_real)
    visible = _visible(q_bsnh.shape[1], window, documents, causal, two_sided_ends)
    return _reference(scores, qkv, visible, sinks, is_real, settings.bias_of(q_bsnh.shape[1]))


def cross_attention(
    q_bsnh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, ranges: Ranges | None, scores: Scores
) -> jax.Array:
    """Attention to another sequence: q [B,S,N,H], k and v [B,T,K,H] -> [B,S,N,H] in q's dtype.

    Query i sees the keys [first, end) of `ranges` [B,S], which never decrease along S; None: all. A query without keys
    has an output of 0. "cudnn" takes no ranges.
    """
    if scores.implementation == "cudnn":
        if ranges is not None:
            raise ValueError('implementation="cudnn" has no ranges of keys: use another.')
    elif ranges is None:
        B, S = q_bsnh.shape[:2]
        ranges = jnp.zeros((B, S), jnp.int32), jnp.full((B, S), k_btkh.shape[1], jnp.int32)
    whole: Any = _whole(scores, "full", None, (q_bsnh, k_btkh, v_btkh), ranges, None, None)
    return whole[0]


def attention_of_rows(
    q_bsnh: jax.Array,
    k_btkh: jax.Array,
    v_btkh: jax.Array,
    ranges: Ranges,
    bias_nst: jax.Array,
    scores: Scores,
) -> jax.Array:
    """Attention of some queries of a sequence to all its keys, with a bias of each pair `[N, S, T]`; materialised."""
    first, end = (edge[:, :, None] for edge in ranges)
    keys = jnp.arange(k_btkh.shape[1])
    visible = ((keys >= first) & (keys < end))[:, None, None]
    return _reference(scores, (q_bsnh, k_btkh, v_btkh), visible, None, None, bias_nst)[0]


def same_documents(query_ids_bs: jax.Array, key_ids_bt: jax.Array) -> Ranges:
    """For packed pairs of sequences: the range of the keys with the document id of each query, `[B, S]`.

    Ids never decrease along a sequence, except that negative ones, of padding, are at its end; padding sees padding.
    """
    last = jnp.iinfo(jnp.int32).max
    query, key = (jnp.where(ids < 0, last, ids) for ids in (query_ids_bs, key_ids_bt))
    before, until = key[:, None] < query[..., None], key[:, None] <= query[..., None]
    return before.sum(-1, dtype=jnp.int32), until.sum(-1, dtype=jnp.int32)


def two_sided_ends(is_two_sided_bs: jax.Array) -> jax.Array:
    """For each token that attends to later ones the position after the last of its run, 0 for others, `[B, S]` int32.

    A run are the consecutive tokens of an image (Gemma 3) or a prefix. Other tokens are between two of them.
    """
    ends = documents_of(is_two_sided_bs).ends
    assert ends is not None
    return jnp.where(is_two_sided_bs, ends, 0)


def visible_ranges(
    index_bs: jax.Array,
    documents: PackedDocuments | None,
    window: int | None,
    length: int | None,
    two_sided_ends: jax.Array | None = None,
) -> Ranges:
    """For queries at positions `index_bs` of the sequence: the first visible key and the end of the range; `[B, S]`.

    `length` is that of a sequence; None: causal attention, but for `two_sided_ends` of the queries.
    """
    first = jnp.zeros_like(index_bs) if documents is None else documents.starts
    first = first if window is None else jnp.maximum(first, index_bs - window + 1)
    if length is None:
        return first, index_bs + 1 if two_sided_ends is None else jnp.maximum(index_bs + 1, two_sided_ends)
    end = jnp.full_like(index_bs, length) if documents is None else documents.ends
    assert end is not None
    return first, end if window is None else jnp.minimum(end, index_bs + window)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _whole(scores: Scores, kind: Kind, window: int | None, qkv: Inputs, ranges: Ranges | None, sinks, is_real):
    """Attention to all keys by the functions for a part of the keys, which also return the log-sum-exp in FP32."""
    return _whole_forward(scores, kind, window, qkv, ranges, sinks, is_real)[0]


def _whole_forward(scores: Scores, kind: Kind, window: int | None, qkv: Inputs, ranges: Ranges | None, sinks, is_real):
    out, lse = attend(scores, Mask(kind, ranges, window), *qkv)
    largest = largest_score(scores, lse, is_real)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # Remat policies that keep attention find the residuals of its backward pass by this name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(qkv[0].dtype), lse))
    return (out, largest), (qkv, ranges, sinks, out, lse)


def _whole_backward(scores: Scores, kind: Kind, window: int | None, saved, gradients):
    dout, _ = gradients
    qkv, ranges, sinks, *whole = saved
    backward = partial(attend_backward, scores, Mask(kind, ranges, window), *qkv)
    gradients, dsinks = backward_with_sinks(backward, sinks, tuple(whole), dout)
    # The reference's are in FP32.
    return tuple(g.astype(a.dtype) for g, a in zip(gradients, qkv, strict=True)), None, dsinks, None


_whole.defvjp(_whole_forward, _whole_backward)


def documents_of(segment_ids_bs: jax.Array) -> PackedDocuments:
    """The document of each token, which ends where the id changes."""
    S = segment_ids_bs.shape[1]
    index = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), segment_ids_bs.shape)
    first = segment_ids_bs != jnp.roll(segment_ids_bs, 1, axis=1)
    last = segment_ids_bs != jnp.roll(segment_ids_bs, -1, axis=1)
    starts = lax.cummax(jnp.where(first, index, 0), axis=1)
    return PackedDocuments(starts, lax.cummin(jnp.where(last, index + 1, S), axis=1, reverse=True))


def _reference(
    scores: Scores,
    qkv: tuple[jax.Array, jax.Array, jax.Array],
    visible: jax.Array,
    sinks: jax.Array | None,
    is_real: jax.Array | None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Attention by materialised scores, in float32 (float64 for float64 inputs); `bias [N, S, S']` is added to them."""
    q_bsnh, k_bskh, v_bskh = qkv
    dtype = wide(q_bsnh.dtype)
    B, S, N, H = q_bsnh.shape
    T, K, W = v_bskh.shape[1:]
    G = N // K
    # One batched matmul per KV head, with its G query heads in the rows: the fastest form on CPUs.
    q = q_bsnh.astype(dtype).reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, H)
    k, v = (a.astype(dtype).transpose(0, 2, 1, 3) for a in (k_bskh, v_bskh))
    s = jnp.einsum("bkrh,bksh->bkrs", q, k).reshape(B, K, G, S, T) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    if bias is not None:
        s = s + bias.astype(dtype).reshape(K, G, S, T)
    s = jnp.where(visible, s, -jnp.inf)
    largest = None
    if scores.wants_largest:
        lse = jax.nn.logsumexp(lax.stop_gradient(s), axis=-1)
        largest = largest_score(scores, lse.reshape(B, N, S), is_real)
    if sinks is not None:
        logits = jnp.broadcast_to(sinks.astype(dtype).reshape(K, G, 1, 1), (B, K, G, S, 1))
        weights = jax.nn.softmax(jnp.concatenate([s, logits], axis=-1), axis=-1)[..., :T]
    else:
        weights = jax.nn.softmax(s, axis=-1)
    weights = weights.reshape(B, K, G * S, T)
    out = jnp.einsum("bkrs,bksw->bkrw", weights, v).reshape(B, K, G, S, W)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, N, W).astype(q_bsnh.dtype), largest


def _visible(
    S: int, window: int | None, documents: PackedDocuments | None, causal: bool, two_sided_ends: jax.Array | None
) -> jax.Array:
    """Whether a query sees a key, broadcastable to [B, K, N/K, S, S]. Each query sees its own position."""
    behind = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
    visible = behind >= 0 if causal else jnp.full((S, S), True)
    if window is not None:
        visible &= jnp.abs(behind) < window
    if two_sided_ends is not None:
        visible = (visible | ((behind < 0) & (jnp.arange(S) < two_sided_ends[..., None])))[:, None, None]
    if documents is not None:
        visible &= (documents.starts[:, :, None] == documents.starts[:, None, :])[:, None, None]
    return visible
