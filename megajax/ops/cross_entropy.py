"""Loss and gradient of the cross-entropy: one chunk of tokens, one shard of the vocabulary."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.ops import cross_entropy_kernel
from megajax.ops.numerics import wide

Reduce = Callable[[jax.Array], jax.Array]
LossImplementation = Literal["reference", "pallas"]


def chunk_loss_and_grad(
    logits_cv: jax.Array,
    targets_c: jax.Array,
    mask_c: jax.Array,
    scale: jax.Array | float,
    dtype: Any,
    *,
    vocab_start: int | jax.Array = 0,
    vocab_size: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
    implementation: LossImplementation = "reference",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, z-loss and gradient of C tokens: this shard's logits [C, V] -> (scalar, scalar, [C, V]).

    targets [C] are ids in the whole vocabulary, mask [C] weights. The shard's first column is vocab_start; columns from
    vocab_size on are padding. reduce_max and reduce_sum reduce over the shards and are called once each, with [C] and
    [2, C], or [3, C] with smoothing; None for a whole vocabulary. The results are Σ mask · loss, without the z-loss,
    and Σ mask · z_loss · lse², both equal on all shards and in float32 (float64 for float64 logits), and the gradient
    of `scale` times their sum with respect to the raw logits, in `dtype`. With `smoothing` ε the loss is (1 - ε) times
    the target's plus ε times the mean over the vocabulary.

    "pallas" is the GPU kernel, for logits of at most 32 bits.
    """
    function = _reference if implementation == "reference" else cross_entropy_kernel.chunk_loss_and_grad
    return function(
        logits_cv,
        targets_c,
        mask_c,
        scale,
        dtype,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        softcap=softcap,
        z_loss=z_loss,
        smoothing=smoothing,
        reduce_max=reduce_max,
        reduce_sum=reduce_sum,
    )


def _reference(
    logits_cv: jax.Array,
    targets_c: jax.Array,
    mask_c: jax.Array,
    scale: jax.Array | float,
    dtype: Any,
    *,
    vocab_start: int | jax.Array,
    vocab_size: int,
    softcap: float | None,
    z_loss: float,
    smoothing: float,
    reduce_max: Reduce | None,
    reduce_sum: Reduce | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    compute_dtype = wide(logits_cv.dtype)
    logits = logits_cv.astype(compute_dtype)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    columns = vocab_start + jnp.arange(logits.shape[1])[None, :]
    is_real = columns < vocab_size
    capped, logits = logits, jnp.where(is_real, logits, -jnp.inf)
    is_target = columns == targets_c[:, None]

    # A shard of padding only has a maximum of -inf, but the maximum over all shards is finite.
    maximum = jnp.max(logits, axis=1)
    maximum = maximum if reduce_max is None else reduce_max(maximum)
    shifted = logits - maximum[:, None]
    exponentials = jnp.exp(shifted)
    sums = [exponentials.sum(axis=1), jnp.where(is_target, shifted, 0).sum(axis=1)]
    if smoothing:
        sums.append(jnp.where(is_real, shifted, 0).sum(axis=1))
    own = jnp.stack(sums)
    total, target, *of_all = own if reduce_sum is None else reduce_sum(own)
    if smoothing:
        target = (1 - smoothing) * target + smoothing / vocab_size * of_all[0]

    weight = mask_c.astype(compute_dtype)
    log_total = jnp.log(total)
    lse = log_total + maximum
    loss = jnp.sum(weight * (log_total - target))
    z_term = jnp.sum(weight * z_loss * jnp.square(lse))

    share = (1 + 2 * z_loss * lse) / total
    wanted = is_target if not smoothing else (1 - smoothing) * is_target + smoothing / vocab_size * is_real
    gradient = (weight * scale)[:, None] * (exponentials * share[:, None] - wanted)
    if softcap is not None:
        gradient = gradient * (1 - jnp.square(capped / softcap))
    return loss, z_term, gradient.astype(dtype)


def chunk_log_probs(
    logits_cv: jax.Array,
    targets_c: jax.Array,
    *,
    vocab_start: int | jax.Array = 0,
    vocab_size: int,
    softcap: float | None = None,
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
) -> jax.Array:
    """Log-probabilities of the targets [C], in float32; the arguments are those of `chunk_loss_and_grad`."""
    logits = real_logits(logits_cv, vocab_start, vocab_size, softcap)
    maximum = jnp.max(logits, axis=1)
    maximum = maximum if reduce_max is None else reduce_max(maximum)
    shifted = logits - maximum[:, None]
    is_target = vocab_start + jnp.arange(logits.shape[1])[None, :] == targets_c[:, None]
    own = jnp.stack([jnp.exp(shifted).sum(axis=1), jnp.where(is_target, shifted, 0).sum(axis=1)])
    total, target = own if reduce_sum is None else reduce_sum(own)
    return target - jnp.log(total)


def real_logits(
    logits_cv: jax.Array, vocab_start: int | jax.Array, vocab_size: int, softcap: float | None
) -> jax.Array:
    """A shard's logits in at least float32 after the soft-cap, -inf for columns that are padding."""
    logits = logits_cv.astype(wide(logits_cv.dtype))
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    return jnp.where(vocab_start + jnp.arange(logits.shape[1])[None, :] < vocab_size, logits, -jnp.inf)
