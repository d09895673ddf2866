"""Multi-head latent attention trains on any mesh as on one device."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxpr_equations import equations
from mesh_models import LATENT_MODELS

from megajax.config import LoraConfig, ModelConfig
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError
from megajax.estimate.costs import attention_flops
from megajax.estimate.traces import traces
from megajax.mesh import build_mesh
from megajax.model import Transformer, bind, parameters
from megajax.model.block import Block
from megajax.training.step import TrainProgram

STEPS = 2
DOCUMENTS = {"synthetic_documents": 5, "reset_attention": True, "reset_positions": True}
# All multiples of 16
FP8_WIDTHS = {"hidden_size": 64, "num_heads": 8, "q_lora_rank": 48, "kv_lora_rank": 32, "ffn_hidden_size": 64}
FP8_WIDTHS |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32}


@pytest.mark.long
def test_latent_attention_trains_on_a_mesh_as_on_one_device(table, difference):
    """A layer of each kind."""
    mesh, model = {"expert": 2, "tensor": 2, "context": 2}, LATENT_MODELS["v3"] | {"num_layers": 2}
    sections = {"communication": {"context": "all_gather"}, "data": DOCUMENTS, "remat": {"policy": "save_matmuls"}}
    config = table.make_config(model, mesh, microbatches=2, steps=STEPS, optimizer="sgd", **sections)
    assert not (found := difference(config)).problems(), found


@pytest.mark.parametrize(
    ("sections", "numbers"),
    [
        ({}, 12 + 4),  # the latent and the rotary key
        # With up-projections in FP8: keys and values of all heads
        (
            {
                "precision": {"fp8": {"recipe": "current"}},
                "batch": {"sequence_length": 32},
                "communication": {"context": "ring"},
            },
            8 * (32 + 32),
        ),
    ],
    ids=["fp32", "fp8"],
)
def test_the_ring_sends_latents_where_it_can(table, sections, numbers):
    model = LATENT_MODELS["dense"] | {"num_layers": 1} | (FP8_WIDTHS if "precision" in sections else {})
    config = table.make_config(model, {"context": 2}, optimizer="sgd", **sections)
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 2), jax.devices()[:2]))
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch).jaxpr
    sent = [each.outvars[0].aval for each in equations(traced.jaxpr) if each.primitive.name == "ppermute"]
    tokens = config.batch.global_size * config.batch.sequence_length // 2
    words = [array.size for array in sent if array.dtype == np.uint16 and array.size]
    assert min(words) == 2 * numbers * tokens, "two words for a number"


@pytest.mark.smoke
def test_deepseek_v3_attention_has_its_published_parameters_and_flops():
    """From the paper's widths: 7168 x (1536 + 512 + 64), 1536 x 128 x 192, 512 x 128 x 256, 128 x 128 x 7168."""
    model = ModelConfig.model_validate(
        {
            **{"num_layers": 1, "hidden_size": 7168, "num_heads": 128, "vocab_size": 128, "ffn_hidden_size": 8},
            **{"q_lora_rank": 1536, "kv_lora_rank": 512},
            **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        }
    )
    attention, work = (
        Block(model, "dense").parts["attention"],
        traces(model, LoraConfig(), 4096, "bfloat16").of("dense").parts["attention"],
    )
    matmul = 7168 * 2112 + 1536 * 24576 + 512 * 32768 + 16384 * 7168
    assert work.multiplications == matmul
    norms = 7168 + 1536 + 512
    sizes = {name: math.prod(p.shape) for name, p in parameters(attention).items()}
    assert sum(sizes.values()) == matmul + norms
    assert attention_flops(work, 4096, None, causal=True) == 3 * 4096 * 128 * (192 + 128)


@pytest.mark.smoke
@pytest.mark.parametrize("causal", [True, False])
def test_a_token_sees_the_last_one_only_if_attention_is_to_both_sides(causal):
    model = Transformer(ModelConfig.model_validate(LATENT_MODELS["dense"] | {"num_layers": 1, "causal": causal}))
    rng = np.random.default_rng(1)
    weights = {name: 0.5 * rng.standard_normal(p.shape, np.float32) for name, p in parameters(model).items()}
    first, second = jax.jit(bind(model, jax.device_put(weights)))(jnp.array([[1, 2, 3, 4], [1, 2, 3, 5]]))
    assert (np.asarray(first) != second).any(-1).tolist() == [not causal] * 3 + [True]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, (0.1 * 0.7 * math.log(40) + 1) ** 2 / math.sqrt(16)), (0.3, 0.3)],  # of DeepSeek's code; as it is set
)
def test_yarn_changes_the_scale_of_scores_unless_it_is_set(given, expected):
    scaling = {"kind": "yarn", "factor": 40.0, "original_max_positions": 64, "mscale": 0.7, "mscale_all_dim": 0.7}
    widths = {"qk_nope_head_dim": 12, "qk_rope_head_dim": 4}
    settings = LATENT_MODELS["dense"] | widths | {"rope_scaling": scaling, "attention_scale": given}
    attention = Block(ModelConfig.model_validate(settings), "dense").parts["attention"]
    assert attention.score_scale() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"v_head_dim": None}, r"model.kv_lora_rank=12 needs model.v_head_dim .*: set model.v_head_dim=128"),
        ({"head_dim": 16}, r"model.head_dim=16 is not the sum of model.qk_nope_head_dim=8 .*: remove model.head_dim"),
        ({"qk_rope_head_dim": 3}, r"model.qk_rope_head_dim=3 is odd"),
        ({"num_kv_heads": 2}, r"cannot be combined with model.num_kv_heads=2 .*: remove model.num_kv_heads: each head"),
        ({"rope_fraction": 0.5}, r"cannot be combined with model.rope_fraction=0.5 .*: remove model.rope_fraction"),
        ({"attention_bias": True}, r"cannot be combined with model.attention_bias=true"),
    ],
)
def test_what_latent_attention_does_not_have_is_refused(table, change, sentence):
    with pytest.raises(ConfigError, match=sentence):
        table.make_config(LATENT_MODELS["dense"] | change)
