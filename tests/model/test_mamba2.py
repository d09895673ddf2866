"""Mamba-2's norm and gate in each order, against NumPy; the rest is compared with transformers."""

import jax
import numpy as np
import pytest

from megajax.config import ModelConfig
from megajax.model.comm import Comm
from megajax.model.mamba2 import Mamba2

EPSILON = 0.1  # so large that it counts


@pytest.mark.smoke
@pytest.mark.parametrize("order", ["after_gate", "before_gate", "none"])
def test_the_norm_of_the_output_is_where_it_is_set(order):
    heads = {"num_heads": 4, "num_groups": 2, "head_dim": 3, "state_dim": 5, "output_norm": order}
    sizes = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 9, "norm_epsilon": EPSILON}
    rng = np.random.default_rng(0)
    out, gate = rng.standard_normal((2, 7, 12)).astype(np.float32)
    weights = {} if order == "none" else {"output_norm": rng.standard_normal((2, 6)).astype(np.float32)}

    def normalised(x):
        groups = x.reshape(7, 2, 6)
        square = (groups**2).mean(-1, keepdims=True) + EPSILON
        return (groups / np.sqrt(square) * weights["output_norm"]).reshape(x.shape)

    swish = gate / (1 + np.exp(-gate.astype(np.float64)))
    expected = {
        "after_gate": lambda: normalised(out * swish),
        "before_gate": lambda: normalised(out.astype(np.float64)) * swish,
        "none": lambda: out * swish,
    }[order]()
    module = Mamba2(ModelConfig.model_validate(sizes | {"mamba2": heads}))
    assert (module.output_norm is None) == (order == "none")
    found = jax.jit(lambda *arrays: module.gated(Comm(), *arrays, rates=arrays[1]))(weights, out, gate)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
