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
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
    implementation: LossImplementation = "reference",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, z-loss and gradient of C tokens: this shard's logits [C, V] -> (scalar, scalar, [C, V]).

    targets [C] are ids in the whole vocabulary, mask [C] weights. The shard's first column is vocab_start; columns from
    vocab_size on are padding. reduce_max and reduce_sum reduce over the shards and are called once each, with [C] and
    [2, C]; None for a whole vocabulary. The results are Σ mask · loss, without the z-loss, and Σ mask · z_loss · lse²,
    both equal on all shards and in float32 (float64 for float64 logits), and the gradient of `scale` times their sum
    with respect to the raw logits, in `dtype`.

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
    reduce_max: Reduce | None,
    reduce_sum: Reduce | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    compute_dtype = wide(logits_cv.dtype)
    logits = logits_cv.astype(compute_dtype)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    columns = vocab_start + jnp.arange(logits.shape[1])[None, :]
    capped, logits = logits, jnp.where(columns < vocab_size, logits, -jnp.inf)
    is_target = columns == targets_c[:, None]

    # A shard of padding only has a maximum of -inf, but the maximum over all shards is finite.
    maximum = jnp.max(logits, axis=1)
    maximum = maximum if reduce_max is None else reduce_max(maximum)
    shifted = logits - maximum[:, None]
    exponentials = jnp.exp(shifted)
    own = jnp.stack([exponentials.sum(axis=1), jnp.where(is_target, shifted, 0).sum(axis=1)])
    total, target = own if reduce_sum is None else reduce_sum(own)

    weight = mask_c.astype(compute_dtype)
    log_total = jnp.log(total)
    lse = log_total + maximum
    loss = jnp.sum(weight * (log_total - target))
    z_term = jnp.sum(weight * z_loss * jnp.square(lse))

    share = (1 + 2 * z_loss * lse) / total
    gradient = (weight * scale)[:, None] * (exponentials * share[:, None] - is_target)
    if softcap is not None:
        gradient = gradient * (1 - jnp.square(capped / softcap))
    return loss, z_term, gradient.astype(dtype)
