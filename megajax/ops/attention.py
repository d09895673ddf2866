"""Attention: a plain reference, cuDNN's fused kernel and our own behind one signature."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from megajax.errors import ConfigError
from megajax.ops import ranged_attention
from megajax.ops.numerics import wide
from megajax.ops.partial_attention import (
    Implementation,
    Kind,
    Part,
    Ranges,
    Scores,
    add_sinks,
    attend,
    attend_backward,
    backward_with_sinks,
)

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
    sinks: jax.Array | None = None,
    implementation: Implementation,
) -> jax.Array:
    """softmax(scale · q·k) v over the visible keys: q [B,S,N,H], k [B,S,K,H], v [B,S,K,W] -> [B,S,N,W] in q's dtype.

    Values may be of another width than keys in the reference alone. K divides N; query head n reads key/value head
    n // (N/K). With `window`, position i sees i-window+1 … i (causal only); with document_starts [B,S] (of
    `document_starts`) only positions of its own document. `softcap` squashes scores to ±softcap by tanh, before the
    mask. `scale` is 1/sqrt(H) unless given. With `sinks [N]` each query's softmax has one score more, its head's sink
    as it is, whose value is zero (GPT-OSS, OpenAI 2025). Raises ValueError for what the implementation cannot do.
    """
    if window is not None and not (causal and window >= 1):
        raise ValueError(f"window={window}, causal={causal}: a window is a positive number of tokens, causal.")
    if window is not None and window >= q_bsnh.shape[1]:
        window = None  # every earlier position is inside
    scale = 1.0 / math.sqrt(q_bsnh.shape[-1]) if scale is None else scale
    scores = Scores(scale, softcap, implementation)
    if implementation == "cudnn":
        if document_starts is not None:
            raise ValueError('implementation="cudnn" knows no documents: use "pallas" or "reference" for packed ones.')
        if softcap is not None:
            raise ValueError(f'implementation="cudnn" has no soft-cap, softcap={softcap}: use "pallas" or "reference".')
        if k_bskh.shape[-1] != v_bskh.shape[-1]:
            raise ValueError(f'cuDNN takes {_widths(k_bskh.shape[-1], v_bskh.shape[-1])}: use "reference".')
        if sinks is not None:
            return _whole(scores, "causal" if causal else "full", window, q_bsnh, k_bskh, v_bskh, None, sinks)
        return jax.nn.dot_product_attention(
            q_bsnh,
            k_bskh,
            v_bskh,
            scale=scale,
            is_causal=causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )
    if implementation == "pallas":
        if not causal:
            raise ValueError('implementation="pallas" is causal: use "cudnn" or "reference".')
        index = jnp.broadcast_to(jnp.arange(q_bsnh.shape[1], dtype=jnp.int32), q_bsnh.shape[:2])
        ranges = causal_ranges(index, document_starts, window)
        return _whole(scores, "causal", window, q_bsnh, k_bskh, v_bskh, ranges, sinks)
    visible = _visible(q_bsnh.shape[1], causal, window, document_starts)
    return _reference(scores, q_bsnh, k_bskh, v_bskh, visible, sinks)


def causal_ranges(
    index_bs: jax.Array, document_starts: jax.Array | None, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Of the keys of a whole sequence the first that queries at `index` see, and the one after the last; `[B, S]`."""
    first = jnp.zeros_like(index_bs) if document_starts is None else document_starts
    return (first if window is None else jnp.maximum(first, index_bs - window + 1)), index_bs + 1


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _whole(scores: Scores, kind: Kind, window: int | None, q, k, v, ranges: Ranges | None, sinks) -> jax.Array:
    """Attention to all keys as to a part of them, for what that gives besides: the log-sum-exp in FP32."""
    return _whole_forward(scores, kind, window, q, k, v, ranges, sinks)[0]


def _whole_forward(scores: Scores, kind: Kind, window: int | None, q, k, v, ranges: Ranges | None, sinks):
    out, lse = attend(scores, kind, q, k, v, ranges, window)
    if sinks is not None:
        out, lse = add_sinks((out, lse), sinks)
    # By this name the remat policies that keep attention find what its backward pass needs.
    out, lse = (checkpoint_name(a, "attention") for a in (out.astype(q.dtype), lse))
    return out, (q, k, v, ranges, sinks, out, lse)


def _whole_backward(scores: Scores, kind: Kind, window: int | None, saved, dout):
    q, k, v, ranges, sinks, *whole = saved

    def backward(whole: Part, dout: jax.Array):
        return attend_backward(scores, kind, q, k, v, ranges, whole, dout, window)

    gradients, dsinks = backward_with_sinks(backward, sinks, tuple(whole), dout)
    return *gradients, None, dsinks


_whole.defvjp(_whole_forward, _whole_backward)


def document_starts(segment_ids_bs: jax.Array) -> jax.Array:
    """The index of the first token of each token's document, `[B, S]` int32; a document ends where the id changes."""
    index = jnp.broadcast_to(jnp.arange(segment_ids_bs.shape[1], dtype=jnp.int32), segment_ids_bs.shape)
    changed = segment_ids_bs != jnp.roll(segment_ids_bs, 1, axis=1)
    return lax.cummax(jnp.where(changed, index, 0), axis=1)


def _reference(scores: Scores, q_bsnh, k_bskh, v_bskh, visible: jax.Array | None, sinks: jax.Array | None) -> jax.Array:
    """Attention by materialised scores, in float32 (float64 for float64 inputs)."""
    dtype = wide(q_bsnh.dtype)
    B, S, N, H = q_bsnh.shape
    K, W = v_bskh.shape[2:]
    G = N // K
    # One plain batched matmul for each KV head, its G query heads in the rows: the fastest form on CPUs.
    q = q_bsnh.astype(dtype).reshape(B, S, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * S, H)
    k, v = (a.astype(dtype).transpose(0, 2, 1, 3) for a in (k_bskh, v_bskh))
    s = jnp.einsum("bkrh,bksh->bkrs", q, k).reshape(B, K, G, S, S) * scores.scale
    if scores.softcap is not None:
        s = scores.softcap * jnp.tanh(s / scores.softcap)
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    if sinks is not None:
        logits = jnp.broadcast_to(sinks.astype(dtype).reshape(K, G, 1, 1), (B, K, G, S, 1))
        weights = jax.nn.softmax(jnp.concatenate([s, logits], axis=-1), axis=-1)[..., :S]
    else:
        weights = jax.nn.softmax(s, axis=-1)
    weights = weights.reshape(B, K, G * S, S)
    out = jnp.einsum("bkrs,bksw->bkrw", weights, v).reshape(B, K, G, S, W)
    return out.transpose(0, 3, 1, 2, 4).reshape(B, S, N, W).astype(q_bsnh.dtype)


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
    capability: str | None,
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    packed: bool,
    value_dim: int | None = None,
    sequence_length: int | None = None,
    parts_with: tuple[str, ...] = (),
) -> tuple[Implementation, str]:
    """The implementation for `kernels.attention` (auto, cudnn, pallas, reference), and why, for the log.

    Queries and keys are `head_dim` wide, values `value_dim`, by default the same. `packed`: several documents in a
    sequence. `sequence_length` is the one trained on, None where nothing is trained.
    Where keys are attended to in parts (`kernels.context` ring or all_gather), `parts_with` are the settings that a
    part in cuDNN does not know of.
    Raises ConfigError if a kernel is asked for by name and cannot run, and if auto would take the reference for
    sequences whose scores do not fit a GPU.
    """
    if requested == "reference":
        return "reference", "kernels.attention=reference"
    dtype, on_gpu = jnp.dtype(dtype), platform in ("gpu", "cuda")
    obstacles: dict[Implementation, tuple[str, str] | None] = {
        "cudnn": _cudnn_obstacle(
            dtype,
            head_dim,
            softcap,
            packed,
            sequence_length,
            _CUDNN_WIDEST_ANYWHERE if requested == "auto" else _CUDNN_WIDEST,
            parts_with,
        ),
        "pallas": _pallas_obstacle(capability, dtype, head_dim),
    }
    if not on_gpu:
        name = requested if requested != "auto" else "a fused kernel"
        no_gpu = f"{name} needs a GPU and this is {platform}", "use kernels.attention=auto or reference"
        obstacles = {"cudnn": no_gpu, "pallas": no_gpu}
    elif value_dim is not None and value_dim != head_dim:
        equal = f"a fused kernel takes {_widths(head_dim, value_dim)}", "use kernels.attention=reference"
        obstacles = {"cudnn": equal, "pallas": equal}
    if requested != "auto":
        chosen: Implementation = "cudnn" if requested == "cudnn" else "pallas"
        obstacle = obstacles[chosen]
        if obstacle:
            raise ConfigError(f"kernels.attention={requested} cannot run, {obstacle[0]}: {obstacle[1]}.")
        return chosen, f"kernels.attention={requested}"
    cudnn, pallas = obstacles["cudnn"], obstacles["pallas"]
    if cudnn is None:
        return "cudnn", "the fused kernel fits this model"
    if pallas is None:
        return "pallas", cudnn[0]
    if on_gpu and (sequence_length or 0) > _REFERENCE_LONGEST_ON_GPUS:
        raise ConfigError(
            f"kernels.attention=auto finds no fused kernel, {cudnn[0]}, and {pallas[0]}; the reference would hold the "
            f"scores of all pairs of batch.sequence_length={sequence_length} tokens: {cudnn[1]}, or set "
            "kernels.attention=reference if they fit."
        )
    return "reference", cudnn[0]


def _widths(keys: int, values: int) -> str:
    return f"values as wide as keys, and they are {values} and {keys} wide"


def _pallas_obstacle(capability: str | None, dtype: Any, head_dim: int) -> tuple[str, str] | None:
    """Why our own kernel cannot run and what to do about it; None if it can."""
    instead = "or use kernels.attention=reference"
    if capability != "9.0":
        return f"megajax's own kernel is for GPUs of compute capability 9.0 and this is {capability}", instead[3:]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"megajax's own kernel has no {dtype}", f"set precision.compute to bfloat16 or float16, {instead}"
    if head_dim not in ranged_attention.HEAD_DIMS:
        widths = " and ".join(map(str, ranged_attention.HEAD_DIMS))
        return f"megajax's own kernel takes heads of {widths} and model.head_dim={head_dim}", f"change it, {instead}"
    return None


def _cudnn_obstacle(
    dtype: Any,
    head_dim: int,
    softcap: float | None,
    packed: bool,
    sequence_length: int | None,
    widest: int,
    parts_with: tuple[str, ...],
) -> tuple[str, str] | None:
    """Why cuDNN attention cannot run and what to do about it; None if it can."""
    instead = "or use kernels.attention=auto"  # megajax's own kernel where it runs, else the reference
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
    if packed:
        return (
            "cuDNN takes no document borders here and the batch has packed documents",
            f"unset data.reset_attention, {instead}",
        )
    if parts_with:
        return (
            f"cuDNN's attention to a part of the keys does not know {' and '.join(parts_with)}",
            f"set kernels.context=all_to_all, {instead}",
        )
    return None
