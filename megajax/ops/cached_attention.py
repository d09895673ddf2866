"""Attention of a few new tokens per sequence to the keys and values of a cache."""

import math

import jax
import jax.numpy as jnp

from megajax.ops.attention import AttentionSettings
from megajax.ops.numerics import wide


def cached_attention(
    q_bsnh: jax.Array,
    keys_bkwh: jax.Array,
    values_bkwh: jax.Array,
    visible_bsw: jax.Array,
    settings: AttentionSettings,
    bias: jax.Array | None = None,
) -> jax.Array:
    """softmax(scale · q·k) v over the visible slots: q [B,S,N,H], caches [B,K,W,·], visible [B,S,W] bool -> [B,S,N,·].

    Scores and softmax are in float32 (float64 for float64 inputs), the probabilities in q's dtype. Of `settings` it
    reads soft-cap, scale and sinks; `bias [B,N,S,W]` is added to the scores. Raises nothing; a token without a visible
    slot is undefined.
    """
    scale, softcap, sinks = settings.scale, settings.softcap, settings.sinks
    B, S, N, H = q_bsnh.shape
    K, dtype = keys_bkwh.shape[1], wide(q_bsnh.dtype)
    # All queries of a KV head in one dimension: one new token has the matmuls of one query, without transpositions.
    q = q_bsnh.reshape(B, S, K, -1, H).transpose(0, 2, 1, 3, 4).reshape(B, K, -1, H)
    scores = jnp.einsum("bkqh,bkwh->bkqw", q, keys_bkwh, preferred_element_type=dtype)
    scores = scores / math.sqrt(H) if scale is None else scores * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.reshape(B, K, N // K, S, -1).swapaxes(2, 3).reshape(B, K, -1, bias.shape[-1])
    visible = visible_bsw if S == 1 else jnp.repeat(visible_bsw, N // K, axis=1)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sinks = jnp.tile(sinks.astype(dtype).reshape(K, -1), (1, S))[..., None]
        top = jnp.maximum(top, sinks)
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + (0 if sinks is None else jnp.exp(sinks - top))
    weights = (weights / total).astype(q_bsnh.dtype)
    out = jnp.einsum("bkqw,bkwh->bkqh", weights, values_bkwh, preferred_element_type=dtype)
    out = out.reshape(B, K, S, N // K, -1).transpose(0, 2, 1, 3, 4)
    return out.reshape(B, S, N, -1).astype(q_bsnh.dtype)
