"""Megatron-Core's blends of data sets, number for number: at each step the data set that is furthest behind its weight.

Each choice depends on all before it, so the choices are a loop. XLA compiles it for the CPU, at 50 ns a sample.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

CHUNK = 1 << 20  # samples whose targets are in memory at a time


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """Weights with sum 1, as Megatron divides them. Raises ValueError for a negative one, and if all are 0."""
    array = np.asarray(weights, np.float64)
    if (array < 0).any() or not array.sum() > 0 or not np.isfinite(array).all():
        raise ValueError(f"the weights {list(weights)} have a negative number, or no positive one")
    return (array / array.sum()).tolist()


def blend_indices(weights: Sequence[float], num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """(data set int16, its sample int64) of each of `num_samples` samples, for weights with sum 1.

    Step t takes the data set d with the largest w_d · max(t, 1) - (samples taken from d), in float64, the first one of
    equals.
    """
    return _blend(np.asarray(weights, np.float64), np.full(len(weights), num_samples), num_samples)


def exhaustive_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(data set int16, its sample int64) of all samples of data sets of these sizes, each once.

    The data sets are chosen as in `blend_indices`, with weights in proportion to `sizes`; one that has no samples left
    is passed over.
    """
    limits = np.asarray(sizes, np.int64)
    return _blend(limits / limits.sum(), limits, int(limits.sum()))


def _blend(shares: np.ndarray, limits: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    import jax

    assert len(shares) <= np.iinfo(np.int16).max, len(shares)
    datasets, samples = np.empty(num_samples, np.int16), np.empty(num_samples, np.int64)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        taken: Any = np.zeros(len(shares), np.int64)
        for first in range(0, num_samples, CHUNK):
            last = min(first + CHUNK, num_samples)
            # Multiplied here: in the loop the compiler would fuse the product into the difference and round once.
            targets = np.maximum(np.arange(first, last, dtype=np.float64), 1.0)[:, None] * shares
            taken, chosen = _program()(taken, targets, limits)
            datasets[first:last], samples[first:last] = chosen
    return datasets, samples


@lru_cache(1)
def _program() -> Any:
    import jax
    import jax.numpy as jnp

    @jax.jit
    def program(taken, targets, limits):
        def step(taken, target):
            chosen = jnp.argmax(jnp.where(taken < limits, target - taken, -jnp.inf))
            return taken.at[chosen].add(1), (chosen.astype(jnp.int16), taken[chosen])

        return jax.lax.scan(step, taken, targets)

    return program
