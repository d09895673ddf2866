"""The weights outside the stacks of layers, such as embedding, final norm and head: one table by canonical name.

Each node takes its weights from the table and adds their gradients to the table's sums, so two nodes may share a
weight: a tied head is the embedding's table, and prediction modules use the model's head.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp

from megajax.parallel.weights.exchange import WeightExchange, row_major
from megajax.sharding import is_in_layer

Arrays = Mapping[str, jax.Array]


class WeightTable:
    """Gathers the table once a step, and reduces its gradients once."""

    def __init__(self, exchange: WeightExchange, trained: Collection[str], as_stored: Collection[str]):
        """`as_stored` are used in their FP32 shards, without a gather."""
        self.exchange, self.trained, self.as_stored = exchange, trained, as_stored

    @jax.named_scope("weights")
    def gather(self, params: Arrays) -> dict[str, jax.Array]:
        """Stored shards of all parameters → gathered weights of the table; `fsdp` gathers them once per step too."""
        own = {name: w for name, w in params.items() if not is_in_layer(name)}
        gathered = {name: self.exchange.gather_once(name, w) for name, w in own.items() if name not in self.as_stored}
        return own | {name: row_major(self.exchange.gather_layer(name, w)) for name, w in gathered.items()}

    def zero_gradients(self, weights: Arrays) -> dict[str, jax.Array]:
        """Zeros in the shapes of the gathered weights that have gradients, in the dtype of their sums."""
        trained = {name: w for name, w in weights.items() if name in self.trained}
        return {name: jnp.zeros(w.shape, self.exchange.sum_dtype(name)) for name, w in trained.items()}

    def reduce(self, gradients: Arrays) -> dict[str, jax.Array]:
        """Gradients of the weights from `gather` → complete FP32 gradients of the stored shards."""
        return {
            name: self.exchange.complete(name, g)
            if name in self.as_stored
            else self.exchange.reduce_once(name, self.exchange.reduce_layer(name, g))
            for name, g in gradients.items()
        }
