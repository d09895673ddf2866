"""Loss and gradient of the cross-entropy: one chunk of tokens, one shard of the vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from megajax.ops.numerics import wide

Reduce = Callable[[jax.Array], jax.Array]
LossImplementation = Literal["reference", "pallas"]


@dataclass(frozen=True)
class Vocabulary:
    """What the columns of logits `[C, V]` are: ids of a vocabulary of `size` tokens from `start` on, then padding.

    `softcap` c makes of a logit x: c · tanh(x / c). On a shard `reduce_max` and `reduce_sum` reduce over the shards;
    None for a whole vocabulary.
    """

    size: int
    start: int | jax.Array = 0
    softcap: float | None = None
    reduce_max: Reduce | None = None
    reduce_sum: Reduce | None = None

    def ids(self, logits_cv: jax.Array) -> jax.Array:
        """The columns' ids, `[1, V]`."""
        return self.start + jnp.arange(logits_cv.shape[1])[None, :]

    def capped(self, logits: jax.Array) -> jax.Array:
        """The logits after the soft-cap, in at least float32."""
        logits = logits.astype(wide(logits.dtype))
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def maximum(self, of_shard_c: jax.Array) -> jax.Array:
        """The maxima over all shards. That of a shard of padding only is -inf, but that of all shards is finite."""
        return of_shard_c if self.reduce_max is None else self.reduce_max(of_shard_c)

    def sum(self, of_shard_nc: jax.Array) -> jax.Array:
        """The sums over all shards."""
        return of_shard_nc if self.reduce_sum is None else self.reduce_sum(of_shard_nc)


def chunk_loss_and_grad(
    logits_cv: jax.Array,
    targets_c: jax.Array,
    mask_c: jax.Array,
    scale: jax.Array | float,
    dtype: Any,
    vocabulary: Vocabulary,
    z_loss: float = 0.0,
    smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss, z-loss and gradient of C tokens: this shard's logits [C, V] -> (scalar, scalar, [C, V]).

    targets [C] are ids in the whole vocabulary, mask [C] weights. The vocabulary's reductions are called once each,
    with [C] and [2, C], or [3, C] with smoothing. The results are Σ mask · loss, without the z-loss, and
    Σ mask · z_loss · lse², both equal on all shards and in float32 (float64 for float64 logits), and the gradient of
    `scale` times their sum with respect to the raw logits, in `dtype`. With `smoothing` ε the loss is (1 - ε) times the
    target's plus ε times the mean over the vocabulary.
    """
    size, softcap, columns = vocabulary.size, vocabulary.softcap, vocabulary.ids(logits_cv)
    capped, is_real, is_target = vocabulary.capped(logits_cv), columns < size, columns == targets_c[:, None]
    logits = jnp.where(is_real, capped, -jnp.inf)
    maximum = vocabulary.maximum(jnp.max(logits, axis=1))
    shifted = logits - maximum[:, None]
    exponentials = jnp.exp(shifted)
    sums = [exponentials.sum(axis=1), jnp.where(is_target, shifted, 0).sum(axis=1)]
    if smoothing:
        sums.append(jnp.where(is_real, shifted, 0).sum(axis=1))
    total, target, *of_all = vocabulary.sum(jnp.stack(sums))
    if smoothing:
        target = (1 - smoothing) * target + smoothing / size * of_all[0]

    weight = mask_c.astype(capped.dtype)
    log_total = jnp.log(total)
    lse = log_total + maximum
    loss = jnp.sum(weight * (log_total - target))
    z_term = jnp.sum(weight * z_loss * jnp.square(lse))

    share = (1 + 2 * z_loss * lse) / total
    wanted = is_target if not smoothing else (1 - smoothing) * is_target + smoothing / size * is_real
    gradient = (weight * scale)[:, None] * (exponentials * share[:, None] - wanted)
    if softcap is not None:
        gradient = gradient * (1 - jnp.square(capped / softcap))
    return loss, z_term, gradient.astype(dtype)


def chunk_log_probs(logits_cv: jax.Array, targets_c: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Log-probabilities of the targets [C], in float32; the arguments are those of `chunk_loss_and_grad`."""
    columns = vocabulary.ids(logits_cv)
    logits = jnp.where(columns < vocabulary.size, vocabulary.capped(logits_cv), -jnp.inf)
    shifted = logits - vocabulary.maximum(jnp.max(logits, axis=1))[:, None]
    is_target = columns == targets_c[:, None]
    own = jnp.stack([jnp.exp(shifted).sum(axis=1), jnp.where(is_target, shifted, 0).sum(axis=1)])
    total, target = vocabulary.sum(own)
    return target - jnp.log(total)
