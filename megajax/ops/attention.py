"""Causal attention over a whole sequence: a plain reference, cuDNN's kernel and megajax's own, with one signature."""

import math
from functools import partial
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.errors import ConfigError
from megajax.ops.numerics import wide
from megajax.ops.partial_attention import (
    Implementation,
    Part,
    Ranges,
    Scores,
    add_sinks,
    attend,
    attend_backward,
    backward_with_sinks,
    largest_score,
)

# jax refuses cuDNN attention with heads wider than 128 before Hopper, and wider than 256 on any GPU. `auto` stays below
# the limit of all GPUs.
_CUDNN_WIDEST_ANYWHERE = 128
_CUDNN_WIDEST = 256
# The reference stores the scores of all pairs of tokens. `auto` does not choose it on GPUs for longer sequences.
_REFERENCE_LONGEST_ON_GPUS = 8192


def attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    window: int | None = None,
    document_starts: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation,
) -> jax.Array:
    """`measured_attention`'s first result."""
    settings = {"window": window, "document_starts": document_starts, "softcap": softcap, "scale": scale}
    return measured_attention(q_bsnh, k_bskh, v_bskh, **settings, sinks=sinks, implementation=implementation)[0]


def measured_attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    window: int | None = None,
    document_starts: jax.Array | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Implementation,
    measured: bool = False,
    is_real: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """softmax(scale · q·k) v over the visible keys: q [B,S,N,H], k [B,S,K,H], v [B,S,K,W] -> [B,S,N,W] in q's dtype.

    K divides N; query head n reads KV head n // (N/K). "pallas" supports the widths (H, W) of
    `ranged_attention.WIDTHS`. Position i sees the positions up to i; with `window` only i-window+1 … i; with
    `document_starts` [B,S] (see the function) only those of its document. `softcap` bounds scores to ±softcap by tanh,
    before the mask. The default of `scale` is 1/sqrt(H).
    `sinks [N]` are one logit per head in the softmax denominator (attention sinks, GPT-OSS, OpenAI 2025); neither scale
    nor soft-cap applies to them. The second result is `largest_score` without the sinks, of the queries that are no
    padding by `is_real [B,S]`, None if not `measured`.
    Raises ValueError for arguments that the implementation does not support.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window} is not a positive number of tokens.")
    if window is not None and window >= q_bsnh.shape[1]:
        window = None  # it contains every earlier position
    scale = 1.0 / math.sqrt(q_bsnh.shape[-1]) if scale is None else scale
    scores = Scores(scale, softcap, implementation, measured)
    if implementation == "cudnn":
        if document_starts is not None:
            raise ValueError('implementation="cudnn" has no document mask: use "pallas" or "reference".')
        if softcap is not None:
            raise ValueError(f'implementation="cudnn" has no soft-cap, softcap={softcap}: use "pallas" or "reference".')
        if sinks is not None or measured or k_bskh.shape[-1] != v_bskh.shape[-1]:  # jax.nn has none of these
            return _whole(scores, window, q_bsnh, k_bskh, v_bskh, None, sinks, is_real)
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
        return _whole(scores, window, q_bsnh, k_bskh, v_bskh, ranges, sinks, is_real)
    visible = _visible(q_bsnh.shape[1], window, document_starts)
    return _reference(scores, q_bsnh, k_bskh, v_bskh, visible, sinks, is_real)


def causal_ranges(
    index_bs: jax.Array, document_starts: jax.Array | None, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """For queries at positions `index_bs` of the sequence: the first visible key and the end of the range; `[B, S]`."""
    first = jnp.zeros_like(index_bs) if document_starts is None else document_starts
    return (first if window is None else jnp.maximum(first, index_bs - window + 1)), index_bs + 1


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _whole(scores: Scores, window: int | None, q, k, v, ranges: Ranges | None, sinks, is_real):
    """Attention to all keys by the functions for a part of the keys, which also return the log-sum-exp in FP32."""
    return _whole_forward(scores, window, q, k, v, ranges, sinks, is_real)[0]


def _whole_forward(scores: Scores, window: int | None, q, k, v, ranges: Ranges | None, sinks, is_real):
    out, lse = attend(scores, "causal", q, k, v, ranges, window)
    largest = largest_score(scores, lse, is_real)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # Remat policies that keep attention find the residuals of its backward pass by this name.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(q.dtype), lse))
    return (out, largest), (q, k, v, ranges, sinks, out, lse)


def _whole_backward(scores: Scores, window: int | None, saved, gradients):
    dout, _ = gradients
    q, k, v, ranges, sinks, *whole = saved

    def backward(whole: Part, dout: jax.Array):
        return attend_backward(scores, "causal", q, k, v, ranges, whole, dout, window)

    (dq, dk, dv), dsinks = backward_with_sinks(backward, sinks, tuple(whole), dout)
    return dq, dk, dv, None, dsinks, None


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
    if scores.measured:
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


def choose_attention(
    requested: str,
    *,
    platform: str,
    capability: str | None,
    dtype: Any,
    head_dim: int,
    value_dim: int,
    softcap: float | None,
    packed: bool,
    sequence_length: int,
    parts_with: tuple[str, ...],
) -> tuple[Implementation, str]:
    """The implementation for `kernels.attention` (auto, cudnn, pallas, reference), and the reason, for the log.

    `packed`: a sequence holds several documents. `parts_with`: where attention runs over parts of the keys
    (`communication.context` ring or all_gather), the settings that cuDNN does not support for a part.

    Raises ConfigError if the requested kernel cannot run, and if auto finds no kernel on a GPU and the sequence is too
    long for the reference.
    """
    if requested == "reference":
        return "reference", "kernels.attention=reference"
    if platform not in ("gpu", "cuda"):
        if requested == "auto":
            return "reference", f"a fused kernel needs a GPU and this is {platform}"
        _fail(requested, (f"{requested} needs a GPU and this is {platform}", "use kernels.attention=auto or reference"))
    dtype, widest = jnp.dtype(dtype), _CUDNN_WIDEST_ANYWHERE if requested == "auto" else _CUDNN_WIDEST
    unequal = head_dim != value_dim
    if unequal:  # only where its limit is the larger one
        widest = _CUDNN_WIDEST
    cudnn = _cudnn_obstacle(dtype, max(head_dim, value_dim), softcap, packed, sequence_length, widest, parts_with)
    if unequal and float(capability or 0) < 9:
        problem = f"cuDNN needs a GPU of compute capability 9.0 for values of {value_dim} and keys of {head_dim}"
        cudnn = problem, "use kernels.attention=reference"
    pallas = _pallas_obstacle(capability, dtype, head_dim, value_dim)
    if requested != "auto":
        obstacle = cudnn if requested == "cudnn" else pallas
        if obstacle is not None:
            _fail(requested, obstacle)
        return cast(Implementation, requested), f"kernels.attention={requested}"
    if unequal and pallas is None:
        return "pallas", f"it is faster than cuDNN for keys and values of widths {head_dim} and {value_dim}"
    if cudnn is None:
        return "cudnn", "the fused kernel fits this model"
    if pallas is None:
        return "pallas", cudnn[0]
    if sequence_length > _REFERENCE_LONGEST_ON_GPUS:
        raise ConfigError(
            f"kernels.attention=auto finds no fused kernel, {cudnn[0]}, and {pallas[0]}; the reference would store the "
            f"scores of all pairs of batch.sequence_length={sequence_length} tokens: {cudnn[1]}, or set "
            "kernels.attention=reference if they fit."
        )
    return "reference", cudnn[0]


def _fail(requested: str, obstacle: tuple[str, str]) -> NoReturn:
    raise ConfigError(f"kernels.attention={requested} cannot run, {obstacle[0]}: {obstacle[1]}.")


def _pallas_obstacle(capability: str | None, dtype: Any, head_dim: int, value_dim: int) -> tuple[str, str] | None:
    """(why megajax's own kernel cannot run, the cure); None if it can."""
    instead = "use kernels.attention=reference"
    if capability != "9.0":
        return f"megajax's own kernel is for GPUs of compute capability 9.0 and this is {capability}", instead
    if dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"megajax's own kernel does not support {dtype}",
            f"set precision.compute to bfloat16 or float16, or {instead}",
        )
    from megajax.ops.ranged_attention import WIDTHS  # here: Mosaic takes half a second

    if (head_dim, value_dim) not in WIDTHS:
        ours = ", ".join(f"{key}/{value}" for key, value in WIDTHS)
        theirs = f"model.head_dim={head_dim}"
        if head_dim != value_dim:
            theirs = f"model.qk_nope_head_dim + model.qk_rope_head_dim={head_dim} with model.v_head_dim={value_dim}"
        problem = f"megajax's own kernel is for keys/values of widths {ours} and the model has {theirs}"
        return problem, f"change them, or {instead}"
    return None


def _cudnn_obstacle(
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    packed: bool,
    sequence_length: int,
    widest: int,
    parts_with: tuple[str, ...],
) -> tuple[str, str] | None:
    """(why cuDNN attention cannot run, the cure); None if it can."""
    instead = "or use kernels.attention=auto"  # megajax's own kernel where it runs, else the reference
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN does not support {dtype}", f"set precision.compute to bfloat16 or float16, {instead}"
    if head_dim % 8 or head_dim > widest:
        return (
            f"cuDNN needs head widths that are multiples of 8 up to {widest} and model.head_dim={head_dim}",
            f"change it, {instead}",
        )
    # jax 0.11 passes its own empty placeholder for a bias, whose gradient needs even lengths.
    if sequence_length % 2:
        return (
            f"jax trains cuDNN attention only on even lengths and batch.sequence_length={sequence_length}",
            f"make it even, {instead}",
        )
    if softcap is not None:
        return f"cuDNN has no soft-cap and model.attention_softcap={softcap}", f"remove it, {instead}"
    if packed:
        return (
            "cuDNN has no document mask and the batch has packed documents",
            f"unset data.reset_attention, {instead}",
        )
    if parts_with:
        return (
            f"cuDNN does not support {' and '.join(parts_with)} for a part of the keys",
            f"set communication.context=all_to_all, {instead}",
        )
    return None
