"""Each weight has a part in the logits. Layers are those of megajax/reference.py too, so a step with it tells less."""

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval
from mesh_models import GPT2, HYBRID, KIMI, LATENT_MODELS, MAMBA, MODERN_BERT, TINY

from megajax.config import ModelConfig
from megajax.model import Transformer, bind, parameters

NORMS = {"norm": "layernorm", "norm_placement": "both"}
MODELS = {
    "gpt2": TINY | GPT2 | NORMS | {"num_layers": 1, "num_kv_heads": 4, "max_positions": 8},
    "bert": MODERN_BERT | {"num_layers": 1},
    "latent": LATENT_MODELS["dense"] | NORMS | {"num_layers": 1},
    "deltanet": HYBRID | NORMS | {"num_layers": 2, "block_pattern": ["gated_deltanet", "moe"]},
    "kda": KIMI | NORMS | {"num_layers": 1, "block_pattern": ["kda_moe"]},
    "mamba": MAMBA | {"norm": "layernorm"},
}


@pytest.mark.parametrize("name", MODELS)
def test_each_weight_has_a_part_in_the_logits(name):
    model = Transformer(ModelConfig.model_validate(MODELS[name]))
    weights = {name: jax.ShapeDtypeStruct(p.shape, jnp.float32) for name, p in sorted(parameters(model).items())}
    traced = jax.make_jaxpr(lambda weights, tokens: bind(model, weights)(tokens))(weights, jnp.zeros((1, 8), jnp.int32))
    _, used = partial_eval.dce_jaxpr(traced.jaxpr, [True])
    assert [name for name, is_used in zip(weights, used, strict=False) if not is_used] == []
