"""Rotary positions in config.json, in transformers' older and newer layout."""

import pytest

from megajax.config import ModelConfig
from megajax.hf.rope import read_rope, write_rope

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "vocab_size": 8}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
# config.json → keys of `model` besides rope_theta=10000
CONFIGS = {
    "nothing": ({}, {}),
    "theta alone": ({"rope_theta": 10000.0, "rope_scaling": None}, {}),
    "older linear": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    ),
    "older llama3, without its length": (
        {"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
        {"rope_scaling": {"kind": "llama3", "factor": 8.0, "original_max_positions": 64, **LLAMA3}},
    ),
    "dynamic": (
        {"max_position_embeddings": 64, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"kind": "dynamic", "factor": 2.0, "original_max_positions": 64}},
    ),
    "yarn with two mscales, its factor from the lengths": (
        {
            "max_position_embeddings": 256,
            "rope_scaling": {
                "type": "yarn",
                "factor": None,
                "original_max_position_embeddings": 64,
                "mscale": 2.0,
                "mscale_all_dim": 1.0,
            },
        },
        {
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_positions": 64,
                "mscale": 2.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "a part of each head": (
        {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_fraction": 0.5},
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_json_of_either_layout_is_read(name):
    config, expected = CONFIGS[name]
    assert read_rope(config) == {"rope_theta": 10000.0} | expected


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("layout", ["older", "newer"])
def test_all_keys_of_a_kind_are_written_and_read_in_both_layouts(kind, layout):
    special = {"low_freq_factor": 2.0, "high_freq_factor": 3.0, "beta_fast": 9.0, "beta_slow": 3.0}
    special |= {"attention_factor": 0.7, "truncate": False, "original_max_positions": 99}
    special |= {"short_factors": (1.0, 2.0), "long_factors": (3.0, 4.0)}
    unused = ModelConfig.model_validate(SHAPE | {"rope_scaling": {"kind": kind, "factor": 5.0}}).rope_scaling.unused
    scaling = {"kind": kind, "factor": 5.0} | {name: v for name, v in special.items() if name not in unused}
    model = ModelConfig.model_validate(SHAPE | {"rope_theta": 7.0, "rope_fraction": 0.5, "rope_scaling": scaling})
    written = write_rope(model, partial=True)
    del written["rope_parameters" if layout == "older" else "rope_scaling"]
    if layout == "newer":
        del written["rope_theta"]
    read = ModelConfig.model_validate(SHAPE | read_rope(written))
    assert read == model


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="rope_type=axial is not default, linear, dynamic, llama3, yarn, longrope"):
        read_rope({"rope_scaling": {"type": "axial"}})
