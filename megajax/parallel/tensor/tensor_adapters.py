"""The terms that low-rank adapters (`model.lora`) add to the outputs of linear layers, on the mesh.

An adapter is two linear layers. Only their product of width R crosses devices: a column layer multiplies its own tokens
by A and gathers that product; a row layer sums it over `tensor` and multiplies its own tokens by B.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from megajax.model.lora import Adapted
from megajax.parallel.tensor.linear import TensorParallel, column_linear, replicated_linear, row_linear


@dataclass(frozen=True)
class TensorAdapters:
    """`dropout(x) @ A @ B · alpha / rank` of a linear layer's input x, for each kind of layer in linear.py."""

    tp: TensorParallel

    def column(self, x: jax.Array, w: Adapted) -> jax.Array:
        """`[T / tensor, in]` → `[T, out]` with this device's columns."""
        return column_linear(self.tp, replicated_linear(self.tp, _dropout(x, w), w.a), w.b)

    def row(self, x: jax.Array, w: Adapted) -> jax.Array:
        """`[T, in]` with this device's share of `in` → `[T / tensor, out]`."""
        if w.token_ids is not None:
            first = lax.axis_index("tensor") * x.shape[1] if self.tp.ring.size > 1 else 0
            x = _dropout(x, replace(w, token_ids=self.tp.ring.all_gather_tokens(w.token_ids)), first)
        return replicated_linear(self.tp, row_linear(self.tp, x, w.a), w.b)

    def replicated(self, x: jax.Array, w: Adapted) -> jax.Array:
        """`[T / tensor, in]` → `[T / tensor, out]`."""
        return replicated_linear(self.tp, replicated_linear(self.tp, _dropout(x, w), w.a), w.b)


def _dropout(x: jax.Array, w: Adapted, first: jax.Array | int = 0) -> jax.Array:
    """`ops.dropout` for the columns of a wider array from `first` on: a number's mask depends on its token and column.

    So a layer whose input is divided over `tensor` has the same mask on every mesh.
    """
    if w.key is None or w.token_ids is None:
        return x
    columns, key = first + jnp.arange(x.shape[1], dtype=jnp.uint32), w.key

    def bits(token: jax.Array) -> jax.Array:
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(key, token), columns)
        return jax.random.key_data(keys)[:, 0]

    keep = jax.vmap(bits)(w.token_ids) >= jnp.uint32(w.dropout * 2**32)
    return jnp.where(keep, x * (1.0 / (1.0 - w.dropout)), 0).astype(x.dtype)
