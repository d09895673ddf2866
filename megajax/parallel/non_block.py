"""The parts of the model outside its blocks: a list before the first block and a list after the last.

A new part, such as an extra prediction module, is one more entry of a list; the train step, evaluation and the pipeline
run the lists. In a pipeline the first virtual stage runs the first list. All stages run the last list, each on its
share of the tokens that leave the last virtual stage.
"""

from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import jax
import jax.numpy as jnp

from megajax.model.lora import is_trained
from megajax.model.parts import BlockInputs
from megajax.parallel.comm import MeshComm
from megajax.parallel.embedding import MeshEmbedding
from megajax.parallel.head import LossHead
from megajax.parallel.weights.exchange import WeightExchange, row_major
from megajax.sharding import BLOCKS
from megajax.step_plan import StepPlan

Arrays = Mapping[str, jax.Array]


class FirstPart(Protocol):
    """Computes a term of the residual stream that enters the first block."""

    as_stored: tuple[str, ...]  # weights that it uses in their FP32 shards, without a gather

    def forward(self, weights: Arrays, batch: Arrays, inputs: BlockInputs) -> jax.Array:
        """Batch fields `[B, S]` → `[T / tensor, D]`."""
        ...

    def backward(
        self, gradients: Arrays, weights: Arrays, batch: Arrays, inputs: BlockInputs, dx: jax.Array
    ) -> dict[str, jax.Array]:
        """`gradients` plus those of its weights that are in them; `dx` is the gradient of the residual stream."""
        ...


class LastPart(Protocol):
    """Computes losses from the residual stream that leaves the last block."""

    SUMS: tuple[str, ...]  # names of its losses

    def losses(self, weights: Arrays, x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """This device's share of the summed loss of `x [T / tensor, D]`, targets and mask `[T]`."""
        ...

    def losses_and_gradients(
        self, weights: Arrays, x: jax.Array, targets: jax.Array, mask: jax.Array, scale: jax.Array, accumulated: Arrays
    ) -> tuple[dict[str, jax.Array], jax.Array, dict[str, jax.Array]]:
        """(shares of the sums, dx, `accumulated` plus the gradients of its weights that are in it).

        `scale` multiplies dx and gradients.
        """
        ...


class NonBlock:
    """The parts outside the blocks, and their weights."""

    def __init__(self, plan: StepPlan, comm: MeshComm, exchange: WeightExchange):
        self.exchange, self.lora = exchange, plan.config.lora
        self.first: tuple[FirstPart, ...] = (MeshEmbedding(plan, comm),)
        self.last: tuple[LastPart, ...] = (LossHead(plan, comm),)
        self.as_stored = [name for part in self.first for name in part.as_stored]

    @property
    def sums(self) -> list[str]:
        """The names of the last parts' losses; each is logged."""
        names = [name for part in self.last for name in part.SUMS]
        assert len({*names}) == len(names), f"two last parts have a sum of the same name: {names}"
        return names

    @jax.named_scope("weights")
    def gather(self, params: Arrays) -> dict[str, jax.Array]:
        """Stored shards of all parameters → gathered weights outside the blocks, except those of `as_stored`.

        `fsdp` gathers them once per step too.
        """
        own = {name: w for name, w in params.items() if not name.startswith(BLOCKS)}
        gathered = {name: self.exchange.gather_once(name, w) for name, w in own.items() if name not in self.as_stored}
        return own | {name: row_major(self.exchange.gather_layer(name, w)) for name, w in gathered.items()}

    def zero_gradients(self, weights: Arrays) -> dict[str, jax.Array]:
        """Zeros in the shapes of the gathered weights that have gradients, in the dtype of their sums."""
        trained = {n: w for n, w in weights.items() if is_trained(self.lora, n)}
        return {n: jnp.zeros(w.shape, self.exchange.sum_dtype(n)) for n, w in trained.items()}

    def reduce(self, gradients: Arrays) -> dict[str, jax.Array]:
        """Gradients of the weights from `gather` → complete FP32 gradients of the stored shards."""
        return {
            name: self.exchange.complete(name, g)
            if name in self.as_stored
            else self.exchange.reduce_once(name, self.exchange.reduce_layer(name, g))
            for name, g in gradients.items()
        }

    def forward(self, weights: Arrays, batch: Arrays, inputs: BlockInputs) -> jax.Array:
        """Batch fields `[B, S]` → the residual stream `[T / tensor, D]` that enters the first block."""
        return reduce(jnp.add, [part.forward(weights, batch, inputs) for part in self.first])

    def backward(
        self, gradients: dict[str, jax.Array], weights: Arrays, batch: Arrays, inputs: BlockInputs, dx: jax.Array
    ) -> dict[str, jax.Array]:
        """`gradients` plus those of the first parts' weights."""
        for part in self.first:
            gradients = part.backward(gradients, weights, batch, inputs, dx)
        return gradients

    def losses(self, weights: Arrays, x: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
        """This device's share of the summed losses of `x [T / tensor, D]`."""
        return reduce(jnp.add, [part.losses(weights, x, targets, mask) for part in self.last])

    def losses_and_gradients(
        self,
        weights: Arrays,
        x: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        scale: jax.Array,
        gradients: dict[str, jax.Array],
    ) -> tuple[dict[str, jax.Array], jax.Array, dict[str, jax.Array]]:
        """(shares of all sums, dx, `gradients` plus those of the last parts' weights)."""
        sums: dict[str, jax.Array] = {}
        dxs: list[jax.Array] = []
        for part in self.last:
            own, dx, gradients = part.losses_and_gradients(weights, x, targets, mask, scale, gradients)
            sums |= own
            dxs.append(dx)
        return sums, reduce(jnp.add, dxs), gradients
