"""Adafactor (Shazeer and Stern 2018): of second moments it keeps the means of rows and of columns.

    megajax train my.yaml run.extensions=[docs/examples/adafactor.py] optimizer.kind=adafactor

Updates are not scaled by the size of the weights; AdamW updates embeddings, norms and biases.
"""

import jax.numpy as jnp

from megajax.optim import COUNT, MatrixOptimizer, OptimizerKind, Slot, register_optimizer
from megajax.schema.fields import Section


class Adafactor(MatrixOptimizer):
    SLOTS = (COUNT,)

    class Settings(Section):  # the keys of optimizer.settings
        decay: float = 0.8  # the moments decay by 1 - t^-decay in step t
        clip: float = 1.0  # the largest root mean square of an update

    def slots_of_matrices(self, rows, columns):
        return Slot("row_means", (rows, 1), exact=True), Slot("column_means", (1, columns), exact=True)

    def direction(self, gradients, slots):
        return gradients, slots | {"count": slots["count"] + 1}

    def of_matrices(self, matrices, slots):  # [k, R, C]
        kept = 1 - slots["count"].astype(jnp.float32) ** -self.settings.decay
        squares = jnp.square(matrices) + 1e-30
        rows = kept * slots["row_means"] + (1 - kept) * squares.mean(-1, keepdims=True)
        columns = kept * slots["column_means"] + (1 - kept) * squares.mean(-2, keepdims=True)
        update = matrices * jnp.sqrt(rows.mean(-2, keepdims=True) / rows / columns)
        size = jnp.sqrt(jnp.square(update).mean((-2, -1), keepdims=True))
        return update / jnp.maximum(1, size / self.settings.clip), {"row_means": rows, "column_means": columns}


register_optimizer(OptimizerKind("adafactor"), Adafactor)
