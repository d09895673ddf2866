"""Norms of gradients and weights, and the relative size of updates, by parameter and by layer."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from megajax.sharding import Placement
from megajax.step.gradients import gradient_function
from megajax.training.step import TrainProgram, TrainState, directions_of

GRADIENT, WEIGHT, UPDATE = "grad_norm", "weight_norm", "update_ratio"  # of one: `grad_norm/NAME`
LAYERS = "layers"  # instead of a parameter's name: all trained parameters of each layer


class Norms:
    """The norms of every `logging.norms_interval`th step, from a program of their own.

    It computes the gradients a second time, from the state and batch of the step, so the step remains the same
    program, and the numbers of a run do not depend on the interval. Without `logging.norms_interval` all methods do
    nothing.
    """

    def __init__(self, program: TrainProgram):
        self._program, self._interval = program, program.config.logging.norms_interval
        self._compiled: dict[int, jax.stages.Compiled] = {}  # by number of microbatches
        self._compiling = threading.Lock()

    def compile(self, sizes: Sequence[int]) -> None:
        """Compile the programs for global batches of `sizes` sequences, so that their first use does not."""
        for size in sizes if self._interval else ():
            of_size = self._program.by_size[size]
            with self._compiling:
                if (microbatches := of_size.plan.num_microbatches) not in self._compiled:
                    norms = partial(_norms, of_size, gradient_function(of_size.graph, of_size.mesh))
                    program = jax.jit(norms, out_shardings=NamedSharding(of_size.mesh, P()))
                    lowered = program.lower(of_size.abstract_state, of_size.abstract_batch)
                    self._compiled[microbatches] = lowered.compile()

    def before(self, step: int, state: TrainState, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The norms of `step`, which will train `state` on `batch`, by name; nothing if they are not due.

        FP32 numbers, or `[L]` for the parameters of layers, on the devices: the host does not wait.
        """
        if not self._interval or step % self._interval:
            return {}
        count = len(batch["tokens"])
        self.compile([size for size, each in self._program.by_size.items() if each.plan.num_microbatches == count])
        return self._compiled[count](state, batch)


def _norms(program: TrainProgram, gradients_of: Callable, state: TrainState, batch) -> dict[str, jax.Array]:
    """By `kind/parameter` and `kind/layers`: norms of the gradients before clipping, of weights, and update / weight.

    The step subtracts the update: the learning rate times the optimizer's direction, with clipping and weight decay.
    """
    sums, gradients, norm, _, _ = gradients_of(state.weights, state.layer_state, batch, state.step, state.loss_scale)
    rate, directions, _ = directions_of(program, state, gradients, norm)
    finite = jnp.isfinite(sums["loss"]) & jnp.isfinite(norm)  # else the step changes no weight
    updates = {name: jnp.where(finite, rate * d, 0.0) for name, d in directions.items()}
    squares, places = [], program.placements
    for arrays in (gradients, state.masters, updates):
        by_name = {name: _squares(array, places[name]) for name, array in arrays.items()}
        layers = jnp.zeros(program.config.model.num_layers)
        for name, own in by_name.items():
            if places[name].layers is not None:
                layers = layers.at[np.array(places[name].canonical_layers)].add(own)
        squares.append(by_name | {LAYERS: layers})
    gradient, weight, update = squares
    norms = {f"{GRADIENT}/{name}": jnp.sqrt(own) for name, own in gradient.items()}
    norms |= {f"{WEIGHT}/{name}": jnp.sqrt(own) for name, own in weight.items()}
    return norms | {f"{UPDATE}/{name}": jnp.sqrt(own / weight[name]) for name, own in update.items()}


def _squares(stored: jax.Array, placement: Placement) -> jax.Array:
    """The sum of squares of a stored parameter, or of each of its layers `[L]` in the model's order.

    The padding of the storage dimension is zero.
    """
    squares = jnp.square(stored.astype(jnp.float32))
    if placement.layers is None:
        return squares.sum()
    rows = [placement.layers.index(layer) for layer in placement.canonical_layers]
    return squares.sum(axis=tuple(range(1, stored.ndim)))[np.array(rows)]
