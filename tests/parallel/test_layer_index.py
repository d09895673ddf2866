"""`LayerIndex`: rows of a stage's stacked arrays, against NumPy."""

import jax
import numpy as np
import pytest

from megajax.step.stack.layer_index import LayerIndex


@pytest.mark.parametrize(
    "lengths", [(3,), (1, 1), (1, 2, 1), (2, 3), (2, 2, 2, 2), (1, 4, 2), (1, 2, 1, 2, 1)], ids=str
)
def test_joined_segments_are_their_layers_in_order(lengths):
    rng, layers = np.random.default_rng(3), sum(lengths)
    index = LayerIndex(np.arange(layers).reshape(1, 1, layers), range(layers))
    parts = [rng.standard_normal((n, 3, 2)).astype(np.float32) for n in lengths]
    np.testing.assert_array_equal(jax.jit(index.join)(parts), np.concatenate(parts))
