"""Initial values of every parameter: their spread, and what they depend on."""

import math
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from mesh_models import GPT2, MODELS

from megajax.config import ModelConfig
from megajax.model import Transformer, init_parameters, parameters
from megajax.model.width import std_factor

SMALL = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "init_std": 0.05}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"num_experts": 4, "first_dense_layers": 1, "expert_ffn_hidden_size": 16}
EXPERTS |= {"shared_expert_ffn_hidden_size": 16, "shared_expert_gate": True}
# The mixers' heads have one size, and modules are as many as layers: each shape is drawn by a program of its own.
DELTA = {"num_key_heads": 32, "num_value_heads": 32, "key_head_dim": 8, "value_head_dim": 8, "conv_kernel": 4}
STATES = {"num_groups": 32, "num_heads": 32, "state_dim": 8, "head_dim": 8, "conv_kernel": 4}
TOWER = {"image_token": 1, "num_layers": 3, "hidden_size": 32, "num_heads": 4, "patch_size": 2, "grid": 4}
TOWER |= {"class_token": True, "embedding_norm": True, "projector": "average"}
ZERO_CENTRED = "vision.projector.norm"  # whatever the model's norms are
CASES = {
    "llama": MODELS["llama"] | SMALL | {"num_kv_heads": 2, "qk_norm": True},
    "gpt2": GPT2 | SMALL | {"max_positions": 16},
    "experts": SMALL | LATENT | EXPERTS,
    "modules": MODELS["llama"] | SMALL | {"mtp_layers": 3, "norm_zero_centred": True},
    "gated_deltanet": SMALL | {"block_pattern": ["gated_deltanet"], "linear_attention": DELTA},
    "kda": SMALL | {"block_pattern": ["kda"], "kda": {"num_heads": 32, "head_dim": 8, "conv_kernel": 4}},
    "mamba2": SMALL | {"block_pattern": ["mamba2"], "mamba2": STATES},
    "t5": SMALL | {"position": "relative", "encoder": {"kind": "layers", "num_layers": 3, "sequence_length": 8}},
    "vision": SMALL | {"vision": TOWER},
}
# In recurrences: PyTorch's interval of a convolution over 4 tokens, A and the steps of Mamba-2 by their parameters;
# each number is uniform in its interval.
INITIAL = {
    "convolution": (lambda w: w, -0.5, 0.5),
    "decay_rate": (np.exp, 1.0, 16.0),
    "decay_bias": (lambda w: np.log(np.log1p(np.exp(w))), math.log(0.001), math.log(0.1)),
}
INITIAL["step_bias"] = INITIAL["decay_bias"]
INTO_THE_STREAM = (".output", ".down", ".shared_down")


@cache
def initial(case: str, depth_scaled: bool) -> tuple[ModelConfig, dict, dict]:
    config = ModelConfig.model_validate(CASES[case] | {"depth_scaled_init": depth_scaled})
    model = Transformer(config)
    arrays = {name: np.asarray(w) for name, w in init_parameters(model, 5, config.init_std).items()}
    return config, arrays, parameters(model)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.long if name in ("llama", "experts") else []) for name in CASES]
)
def test_matrices_have_the_std_norms_are_one_biases_zero_and_recurrences_their_intervals(case):
    config, arrays, declared = initial(case, depth_scaled=False)
    for name, w in arrays.items():
        role = declared[name].role
        if role in ("matrix", "embedding"):
            error = 6 / math.sqrt(2 * w.size)  # six standard deviations
            assert w.std() == pytest.approx(config.init_std, rel=error), name
            assert abs(w.mean()) < 6 * config.init_std / math.sqrt(w.size), name
        elif interval := next((own for end, own in INITIAL.items() if name.endswith(end)), None):
            of, low, high = interval
            assert ((low - 1e-6 <= of(w)) & (of(w) <= high + 1e-6)).all(), name
            error = 6 * (high - low) / math.sqrt(12 * w.size)
            assert of(w).mean() == pytest.approx((low + high) / 2, abs=error), name
            assert of(w).std() == pytest.approx((high - low) / math.sqrt(12), abs=error), name
        else:
            assert (w == (role == "norm" and not config.norm_zero_centred and name != ZERO_CENTRED)).all(), name
    matrices = [w.ravel()[:8] for name, w in arrays.items() if declared[name].role in ("matrix", "embedding")]
    matrices += [row.ravel()[:8] for n, w in arrays.items() if "blocks" in n and w.any() and w.std() for row in w[1:]]
    assert len(np.unique(np.array(matrices), axis=0)) == len(matrices), "of all parameters and layers others"


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("embed", "vocab"), True),
        (("layers", "embed", "router"), True),
        (("modules", "embed", "router"), True),
        (("layers", "embed"), True),  # the gate of a shared expert
        (("embed", "outputs"), True),  # of an objective's own head
        (("modules", "embed", "mlp"), False),
        (("layers", "mlp", "embed"), False),
        (("vocab", "embed"), False),
    ],
)
def test_outputs_whose_number_does_not_grow_have_the_std_of_the_head(axes, expected):
    """With four times the width a fourth, and half for an inner matrix."""
    config = ModelConfig.model_validate(SMALL | {"mup_base_width": 8})
    factor = std_factor(config, SimpleNamespace(axes=axes, role="matrix"))
    assert factor == (1 / 4 if expected else 1 / 2)


OF_DEPTH = CASES | {"two modules": CASES["modules"] | {"mtp_layers": 2}}


@pytest.mark.parametrize("case", OF_DEPTH)
def test_depth_scaling_divides_what_is_added_to_the_residual_stream_by_the_root_of_the_branches(case):
    """By what each parameter declares, and of two models by their numbers."""
    plain, scaled = (
        parameters(Transformer(ModelConfig.model_validate(OF_DEPTH[case] | {"depth_scaled_init": on})))
        for on in (False, True)
    )
    factors = {n: 1 / math.sqrt(2 * SMALL["num_layers"]) if n.endswith(INTO_THE_STREAM) else 1 for n in plain}
    assert {name: p.scale for name, p in scaled.items()} == pytest.approx(
        {name: factors[name] * p.scale for name, p in plain.items()}
    )
    if case in ("gpt2", "modules"):
        arrays, others = (initial(case, depth_scaled)[1] for depth_scaled in (True, False))
        for name, w in others.items():
            np.testing.assert_allclose(arrays[name], factors[name] * w, rtol=1e-6, err_msg=name)
