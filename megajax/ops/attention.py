"""Attention: a plain reference, cuDNN's fused kernel and our own behind one signature."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from megajax.errors import ConfigError
from megajax.ops.numerics import wide

Implementation = Literal["reference", "cudnn"]

# jax refuses cuDNN attention on heads wider than 128 before Hopper, and wider than 256 on any GPU: auto takes
# what every GPU runs, an explicit choice may ask for more.
_CUDNN_WIDEST_ANYWHERE = 128
_CUDNN_WIDEST = 256
# The reference holds the scores of all pairs of tokens: longer than this on a GPU it is used only if asked for by name.
_REFERENCE_LONGEST_ON_GPUS = 8192


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    causal: bool = True,
    window: int | None = None,
    document_starts: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    implementation: Implementation,
) -> jax.Array:
    """softmax(scale · q·k) v over the visible keys: q [B,S,N,H], k and v [B,S,K,H] -> [B,S,N,H] in q's dtype.

    K divides N; query head n reads key/value head n // (N/K). With `window`, position i sees i-window+1 … i
    (causal only); with document_starts [B,S] (of `document_starts`) only positions of its own document. `softcap`
    squashes scores to ±softcap by tanh, before the mask. `scale` is 1/sqrt(H) unless given.
    Raises ValueError for what the implementation cannot do.
    """
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window={window}, causal={causal}: a window is a positive number of tokens, causal.")
    if window is not None and window >= q_bsnh.shape[1]:
        window = None  # every earlier position is inside
    scale = 1.0 / math.sqrt(q_bsnh.shape[-1]) if scale is None else scale
    if implementation == "cudnn":
        if document_starts is not None:
            raise ValueError('implementation="cudnn" knows no documents: use "reference" for packed ones.')
        if softcap is not None:
            raise ValueError(f'implementation="cudnn" has no soft-cap, softcap={softcap}: use "reference".')
        return jax.nn.dot_product_attention(
            q_bsnh,
            k_bskh,
            v_bskh,
            scale=scale,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    return _reference(q_bsnh, k_bskh, v_bskh, causal, window, document_starts, softcap, scale)


def document_starts(segment_ids_bs: jax.Array) -> jax.Array:
    """The index of the first token of each token's document, `[B, S]` int32; a document ends where the id changes."""
    index = jnp.broadcast_to(jnp.arange(segment_ids_bs.shape[1], dtype=jnp.int32), segment_ids_bs.shape)
    changed = segment_ids_bs != jnp.roll(segment_ids_bs, 1, axis=1)
    return lax.cummax(jnp.where(changed, index, 0), axis=1)


def _reference(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    causal: bool,
    window: int | None,
    document_starts: jax.Array | None,
    softcap: float | None,
    scale: float,
) -> jax.Array:
    """Attention by materialised scores, in float32 (float64 for float64 inputs)."""
    dtype = wide(q_bsnh.dtype)
    B, S, N, H = q_bsnh.shape
    K = k_bskh.shape[2]
    G = N // K
    # One plain batched matmul for each KV head, its G query heads in the rows: the fastest form on CPUs.
    q = q_bsnh.astype(dtype).reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, H)
    k, v = (a.astype(dtype).transpose(0, 2, 1, 3) for a in (k_bskh, v_bskh))
    scores = jnp.einsum("bkrh,bksh->bkrs", q, k).reshape(B, K, G, S, S) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = _visible(S, causal, window, document_starts)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).reshape(B, K, G * S, S)
    out = jnp.einsum("bkrs,bksh->bkrh", weights, v).reshape(B, K, G, S, H)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, N, H).astype(q_bsnh.dtype)


def _visible(S: int, causal: bool, window: int | None, document_starts: jax.Array | None) -> jax.Array | None:
    """Which key each query sees, broadcastable to [B, K, N/K, S, S]; None if all. Each sees itself."""
    visible = None
    if causal:
        behind = jnp.arange(S)[:, None] - jnp.arange(S)[None, :]
        visible = behind >= 0
        if window is not None:
            visible &= behind < window
    if document_starts is not None:
        same = (document_starts[:, :, None] == document_starts[:, None, :])[:, None, None]
        visible = same if visible is None else visible & same
    return visible


def choose_attention(
    requested: str,
    *,
    platform: str,
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    segment_ids: bool,
    sequence_length: int | None = None,
    parts_with: tuple[str, ...] = (),
) -> tuple[Implementation, str]:
    """The implementation for `kernels.attention` (auto, cudnn, reference), and why, for the log.

    `sequence_length` is the one trained on, None where nothing is trained. Where keys are attended to in parts
    (`kernels.context` ring or all_gather), `parts_with` are the settings that a part would have to know of.
    Raises ConfigError if cudnn is asked for by name and cannot run, and if auto would take the reference for sequences
    whose scores do not fit a GPU.
    """
    if requested == "reference":
        return "reference", "kernels.attention=reference"
    widest = _CUDNN_WIDEST_ANYWHERE if requested == "auto" else _CUDNN_WIDEST
    obstacle = _cudnn_obstacle(
        platform, jnp.dtype(dtype), head_dim, softcap, segment_ids, sequence_length, widest, parts_with
    )
    if requested == "auto":
        on_gpu = platform in ("gpu", "cuda")
        if obstacle and on_gpu and (sequence_length or 0) > _REFERENCE_LONGEST_ON_GPUS:
            raise ConfigError(
                f"kernels.attention=auto finds no fused kernel, {obstacle[0]}, and the reference would hold the scores "
                f"of all pairs of batch.sequence_length={sequence_length} tokens: {obstacle[1]}, or set "
                "kernels.attention=reference if they fit."
            )
        return ("reference", obstacle[0]) if obstacle else ("cudnn", "the fused kernel fits this model")
    if obstacle:
        raise ConfigError(f"kernels.attention=cudnn cannot run, {obstacle[0]}: {obstacle[1]}.")
    return "cudnn", "kernels.attention=cudnn"


def _cudnn_obstacle(
    platform: str,
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    segment_ids: bool,
    sequence_length: int | None,
    widest: int,
    parts_with: tuple[str, ...],
) -> tuple[str, str] | None:
    """Why cuDNN attention cannot run and what to do about it; None if it can."""
    instead = "or use kernels.attention=reference"
    if platform not in ("gpu", "cuda"):
        return f"cuDNN needs a GPU and this is {platform}", "use kernels.attention=auto or reference"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN has no {dtype} kernel", f"set precision.compute to bfloat16 or float16, {instead}"
    if head_dim % 8 or head_dim > widest:
        return (
            f"cuDNN takes head widths that are multiples of 8 up to {widest} and model.head_dim={head_dim}",
            f"change it, {instead}",
        )
    # jax 0.11 takes its own empty placeholder for a bias, whose gradient needs even lengths.
    if sequence_length is not None and sequence_length % 2:
        return (
            f"jax trains cuDNN attention on even lengths alone and batch.sequence_length={sequence_length}",
            f"make it even, {instead}",
        )
    if softcap is not None:
        return f"cuDNN has no soft-cap and model.attention_softcap={softcap}", f"remove it, {instead}"
    if segment_ids:
        return (
            "cuDNN takes no segment ids here and the batch has packed documents",
            f"unset data.reset_attention, {instead}",
        )
    if parts_with:
        return (
            f"a part of the keys is attended to by a call that does not know {' and '.join(parts_with)}",
            f"set kernels.context=all_to_all, {instead}",
        )
    return None
