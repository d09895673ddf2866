"""Generation with latent attention: the cache keeps latents, and the tokens are those of whole sequences."""

import jax
import numpy as np
import pytest
from mesh_models import LATENT_MODELS
from models_in_use import build, greedy_tokens

from megajax.inference.generation import Generator, PaddedPrompts
from megajax.inference.sampling import Sampling

PROMPTS, NEW = [[3, 5, 9, 11, 17], [100, 7], [1] * 9, [8, 3, 1, 2]], 12


@pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param("v3", {"num_layers": 2}, marks=pytest.mark.long), ("v2", {"sliding_window": 7, "num_layers": 1})],
)
def test_cached_latents_give_the_tokens_of_whole_sequences(name, options):
    settings = LATENT_MODELS[name] | options
    expected = greedy_tokens(build(settings, {}), PROMPTS, NEW)
    model = build(settings, {"fsdp": 2, "tensor": 2})
    generator = Generator(model, Sampling(temperature=0))
    assert [*generator.tokens(PROMPTS, NEW)][-1] == expected

    program = generator._prefill.eval_shape(
        model.weights,
        PaddedPrompts(np.zeros((4, 64), np.int32), np.zeros(4, np.int32), np.uint32(0)),
        **{"size": 128, "room": 64},
    )
    slots = options.get("sliding_window", 128)
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(program.caches)}
    assert shapes == {(4, 1, slots, 4 + 12)}, "a rotary key and a latent for each token, for all heads"
