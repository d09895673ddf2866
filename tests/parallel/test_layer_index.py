"""`LayerIndex`: rows of a stage's stacked arrays, against NumPy."""

import jax
import numpy as np
import pytest

from megajax.sharding import EMPTY
from megajax.step.stack.layer_index import LayerIndex


@pytest.mark.parametrize(
    "lengths", [(3,), (1, 1), (1, 2, 1), (2, 3), (2, 2, 2, 2), (1, 4, 2), (1, 2, 1, 2, 1)], ids=str
)
def test_joined_segments_are_their_layers_in_order(lengths):
    rng, layers = np.random.default_rng(3), sum(lengths)
    index = LayerIndex(np.arange(layers).reshape(1, 1, layers), range(layers))
    parts = [rng.standard_normal((n, 3, 2)).astype(np.float32) for n in lengths]
    np.testing.assert_array_equal(jax.jit(index.join)(parts), np.concatenate(parts))


@pytest.mark.parametrize(
    "layers", [[[[0, 1]], [[2, EMPTY]]], [[[0, EMPTY], [2, 3]], [[1, EMPTY], [4, EMPTY]]]], ids=str
)
def test_a_slot_without_a_layer_has_no_gradient_and_each_layer_its_own(layers):
    """Slots `[stages, virtual stages, n]` of uneven pipelines; a stage has them as `[R · n, ...]`."""
    indices = np.array(layers)
    index = LayerIndex(indices, range(indices.shape[-1]))
    rows = indices.reshape(len(indices), -1)
    gradients = np.random.default_rng(4).standard_normal((*rows.shape, 3)).astype(np.float32)
    found = jax.jit(jax.vmap(index.without_empty, axis_name="pipeline"))(gradients)
    np.testing.assert_array_equal(found, np.where(rows[..., None] == EMPTY, 0, gradients))
