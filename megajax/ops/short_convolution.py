"""A short causal convolution over tokens, of each channel alone, as it comes before linear recurrences."""

import jax
import jax.numpy as jnp

from megajax.ops.numerics import keep_inputs_only, wide


def short_convolution(
    x: jax.Array, weight: jax.Array, position: jax.Array, before: jax.Array | None = None, bias: jax.Array | None = None
) -> jax.Array:
    """silu(Σ_j weight[j] · x_{t − W + 1 + j} + bias): x [B, S, F], weight [W, F], bias [F] → [B, S, F] in x.dtype.

    `position [B, S]` is that of each token in its document, and no token sees another document. `before [B, W - 1, F]`
    are the tokens before x; None: there are none.
    """
    if before is None:
        before = jnp.zeros((len(x), len(weight) - 1, x.shape[-1]), x.dtype)
    return keep_inputs_only(_compute)(x, weight, position, before, bias)


def _compute(x: jax.Array, weight: jax.Array, position: jax.Array, before: jax.Array, bias: jax.Array | None):
    S, W = x.shape[1], len(weight)
    tokens, weight = (a.astype(wide(x.dtype)) for a in (jnp.concatenate([before, x], axis=1), weight))
    y = tokens[:, W - 1 :] * weight[W - 1]
    for back in range(1, W):
        same = (position >= back)[..., None]
        y = y + jnp.where(same, tokens[:, W - 1 - back : W - 1 - back + S] * weight[W - 1 - back], 0)
    return jax.nn.silu(y if bias is None else y + bias.astype(y.dtype)).astype(x.dtype)
