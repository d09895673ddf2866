"""Generation with latent attention: the cache keeps latents, and the tokens are those of whole sequences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mesh_models import LATENT_MODELS

import megajax
from megajax.config import Config
from megajax.inference.generation import Generator
from megajax.inference.language_model import LanguageModel
from megajax.inference.sampling import Sampling
from megajax.inference.weights import abstract_parameters
from megajax.model import Transformer
from megajax.model.block import layer_state
from megajax.model.parameters import init_parameters

PROMPTS, NEW = [[3, 5, 9, 11, 17], [100, 7], [1] * 9, [8, 3, 1, 2]], 12


def build(name, sizes, **options):
    settings = {"model": LATENT_MODELS[name] | options, "data": {"kind": "synthetic"}}
    config = Config.model_validate(
        settings | {"batch": {"global_size": 1, "sequence_length": 256}, "precision": {"compute": "float32"}}
    )
    mesh = megajax.build_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])
    model = Transformer(config.model)
    shapes = abstract_parameters(model, mesh, "float32")
    weights = init_parameters(model, 0, config.model.init_std)
    params = {n: jax.device_put(a, shapes[n].sharding) for n, a in weights.items()}
    state = {
        kind: {n: jnp.linspace(-0.1, 0.1, int(np.prod(a.shape))).reshape(a.shape) for n, a in own.items()}
        for kind, own in layer_state(config.model).items()
    }
    return LanguageModel(config, params, state, mesh)


@pytest.mark.parametrize(("name", "options"), [("v3", {}), ("v2", {"sliding_window": 7})])
def test_cached_latents_give_the_tokens_of_whole_sequences(name, options):
    whole = build(name, {}, **options)
    expected = []
    for prompt in PROMPTS:
        tokens = [*prompt]
        for _ in range(NEW):
            padded = np.array([tokens + [0] * (24 - len(tokens))])
            tokens.append(int(np.argmax(np.asarray(whole(padded))[0, len(tokens) - 1])))
        expected.append(tokens[len(prompt) :])
    model = build(name, {"fsdp": 2, "tensor": 2}, **options)
    generator = Generator(model, Sampling(temperature=0))
    assert [*generator.tokens(PROMPTS, NEW)][-1] == expected

    program = generator._prefill.eval_shape(
        model.weights,
        *(np.zeros((4, 64), np.int32), np.zeros(4, np.int32), np.uint32(0)),
        **{"size": 128, "room": 64},
    )
    slots = options.get("sliding_window", 128)
    shapes = {tuple(leaf.shape) for leaf in jax.tree.leaves(program.caches)}
    assert shapes == {(4, 1, slots, 4 + 12)}, "a rotary key and a latent for each token, for all heads"
