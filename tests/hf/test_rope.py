"""Rotary positions in config.json, in transformers' older and newer layout."""

import pytest

from megajax.config import ModelConfig
from megajax.hf.defaults import DEFAULTS, LLAMA
from megajax.hf.families import Gemma3Text
from megajax.hf.modernbert import ModernBert
from megajax.hf.rope_scaling import read_rope, write_rope

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
    "longrope by its name in the first Phi-3 folders": (
        {
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]},
        },
        {
            "rope_scaling": {
                "kind": "longrope",
                "factor": 4.0,
                "original_max_positions": 64,
                "short_factors": [1.0, 2.0],
                "long_factors": [3.0, 4.0],
            }
        },
    ),
    "both layouts: the older counts, with its base": (
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_theta": 10000.0,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5.0},
        },
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    ),
    "the newer layout beside another base": (
        {"rope_scaling": None, "rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {},
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
    assert read_rope(LLAMA | config) == {"rope_theta": 10000.0} | expected


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
    read = ModelConfig.model_validate(SHAPE | read_rope(LLAMA | written))
    assert read == model


def test_the_longest_position_of_longrope_comes_back_whatever_its_ratio():
    """Phi-3's factor is the ratio of two lengths: rounded down, some products are one too few."""
    factors = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0], "rope_type": "longrope"}
    for longest in range(100, 400):
        lengths = {"max_position_embeddings": longest, "original_max_position_embeddings": 99}
        model = ModelConfig.model_validate(SHAPE | read_rope(LLAMA | lengths | {"rope_scaling": factors}))
        assert write_rope(model, partial=False).items() >= lengths.items()


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="rope_type=axial is not default, linear, dynamic, llama3, yarn, longrope"):
        read_rope(LLAMA | {"rope_scaling": {"type": "axial"}})


@pytest.mark.smoke
def test_of_gemma_3_the_older_scaling_counts_beside_positions_by_kind_of_layer():
    def read(**config):
        return Gemma3Text().read_rope(DEFAULTS["gemma3_text"] | config)

    scaling = {"rope_type": "linear", "factor": 8.0}
    by_kind = {"full_attention": {"rope_theta": 3.0}, "sliding_attention": {"rope_theta": 4.0}}
    linear = {"rope_scaling": {"kind": "linear", "factor": 8.0}}
    older = {"rope_theta": 33.0, "rope_local_base_freq": 44.0}
    assert read() == {"rope_theta": 1e6, "rope_local_theta": 1e4}
    assert read(rope_scaling=scaling, **older) == {"rope_theta": 33.0, "rope_local_theta": 44.0} | linear
    both = read(rope_scaling=scaling, rope_parameters=by_kind, **older)
    assert both == {"rope_theta": 3.0, "rope_local_theta": 4.0} | linear
    for wrong in ({"rope_parameters": scaling}, {"rope_scaling": by_kind}):  # transformers ignores them
        with pytest.raises(ValueError, match="rope_parameters without full_attention"):
            read(**wrong)


@pytest.mark.parametrize(("kinds", "local"), [(("sliding", "full"), 1e4), (("full", "full"), None)])
def test_modernbert_has_another_base_in_layers_with_windows_only(kinds, local):
    layers = {"num_hidden_layers": 2, "layer_types": [f"{kind}_attention" for kind in kinds]}
    model = ModernBert().read(DEFAULTS["modernbert"] | layers)
    assert (model["rope_theta"], model.get("rope_local_theta")) == (160000, local)
