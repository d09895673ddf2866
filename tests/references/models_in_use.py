"""Small models with random weights on a mesh, as generation uses them."""

from collections.abc import Mapping

import jax
import numpy as np
from single_device import weights_of

import megajax
from megajax.config import Config
from megajax.inference.language_model import LanguageModel
from megajax.inference.weights import abstract_parameters
from megajax.model import Transformer
from megajax.model.block import layer_state


def build(model: Mapping, sizes: Mapping[str, int], change=None, speculate: int = 0) -> LanguageModel:
    """The section `model` on a mesh with `weights_of`; `change` is a function from them to others."""
    settings = {"model": dict(model), "data": {"kind": "synthetic"}, "precision": {"compute": "float32"}}
    config = Config.model_validate(settings | {"batch": {"global_size": 1, "sequence_length": 256}})
    mesh = megajax.build_mesh(dict(sizes), jax.devices()[: int(np.prod([*sizes.values()]))])
    transformer = Transformer(config.model)
    shapes = abstract_parameters(transformer, mesh, "float32")
    weights = weights_of(config)
    weights = change(weights) if change else weights
    params = {n: jax.device_put(a, shapes[n].sharding) for n, a in weights.items()}
    state = {
        kind: {n: np.linspace(-0.1, 0.1, int(np.prod(a.shape)), dtype=a.dtype).reshape(a.shape) for n, a in own.items()}
        for kind, own in layer_state(config.model).items()
    }
    return LanguageModel(config, params, state, mesh, speculate=speculate)


def greedy_tokens(whole: LanguageModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest tokens after each prompt, each from a forward pass of the whole sequence."""
    rows = [[*prompt] for prompt in prompts]
    for _ in range(count):
        padded = np.array([row + [0] * (32 - len(row)) for row in rows])
        logits = np.asarray(whole(padded))
        for i, row in enumerate(rows):
            row.append(int(np.argmax(logits[i, len(row) - 1])))
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
