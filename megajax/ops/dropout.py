"""Dropout with a mask that depends on the token, not on its row in the array."""

import jax
import jax.numpy as jnp


def dropout(x_td: jax.Array, rate: float, key: jax.Array, token_ids_t: jax.Array) -> jax.Array:
    """x with each element zeroed with probability `rate`, the rest scaled by 1/(1-rate): [T, D] -> [T, D].

    A token's mask depends only on `key` and on the token's global id in token_ids [T] (integers), so it is the same
    on every mesh.
    """

    def keep(token_id: jax.Array) -> jax.Array:
        return jax.random.bernoulli(jax.random.fold_in(key, token_id), 1.0 - rate, x_td.shape[1:])

    return jnp.where(jax.vmap(keep)(token_ids_t), x_td * (1.0 / (1.0 - rate)), 0).astype(x_td.dtype)
