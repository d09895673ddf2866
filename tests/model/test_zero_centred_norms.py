"""Norms whose weights are the difference from 1, against the same norms with 1 added to the weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import COMMON, LATENT_MODELS
from single_device import make_config, weights_of

from megajax.model import Transformer, bind

MODELS = {
    "all heads": COMMON | {"qk_norm": "all_heads"},
    "layernorm": COMMON | {"norm": "layernorm", "qk_norm": "layernorm"},
    "latents": LATENT_MODELS["dense"] | {"q_lora_rank": 12},
}


@pytest.mark.parametrize("name", MODELS)
def test_every_norm_of_a_layer_adds_one(name):
    logits = []
    for zero_centred in (False, True):  # `weights_of` has the same numbers around 1, or around 0
        config = make_config(MODELS[name] | {"num_layers": 1, "norm_zero_centred": zero_centred})
        logits.append(
            jax.jit(bind(Transformer(config.model), jax.device_put(weights_of(config))))(jnp.arange(12)[None])
        )
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-5)
    assert np.abs(logits[0]).max() > 0.1
