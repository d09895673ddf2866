"""Keys that a config.json lacks have transformers' values (tests/data_files/make_hf_defaults.py), in each family."""

import json
import zipfile
from pathlib import Path

import pytest

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.convert import FAMILIES, longest, read_folder, read_model
from megajax.layout.kinds import layer_kinds

FILES = Path(__file__).parents[1] / "data_files"
GOLDEN = json.loads((FILES / "hf_defaults.json").read_text())
# Keys whose null has a meaning in every family that reads them: no such part, and as many KV heads as heads.
UNSET = {"sliding_window": "sliding_window", "attn_logit_softcapping": "attention_softcap"}
UNSET |= {"final_logit_softcapping": "logit_softcap", "q_lora_rank": "q_lora_rank"}
TINY = {"qwen3": "qwen3_local", "qwen3_moe": "qwen3_moe_mixed"}


def tiny(family: str) -> dict:
    """The config.json of a tiny model that transformers wrote."""
    with zipfile.ZipFile(FILES / f"tiny_{TINY.get(family, family)}.zip") as archive:
        return json.loads(archive.read("config.json"))


def model_of(folder: Path, config: dict) -> ModelConfig | None:
    """None if the config.json is refused."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        return ModelConfig.model_validate(read_model(folder))
    except InputError:
        return None


def test_all_families_are_compared():
    # transformers does not have Kimi-K2 under its name
    assert GOLDEN.keys() == FAMILIES.keys() - {"kimi_k2", *WHOLE}


@pytest.mark.smoke
@pytest.mark.parametrize("family", GOLDEN)
def test_a_config_with_no_key_is_that_of_transformers(tmp_path, family):
    # transformers has no number of experts per token for DeepSeek-V2
    given = {"model_type": family} | ({"num_experts_per_tok": 6} if family == "deepseek_v2" else {})
    expected = model_of(tmp_path, {**GOLDEN[family]["default"], **given})
    assert expected is not None and model_of(tmp_path, given) == expected


@pytest.mark.smoke
@pytest.mark.parametrize("family", GOLDEN)
def test_a_key_that_is_absent_or_null_has_the_value_of_transformers_or_is_refused(tmp_path, family):
    config = tiny(family)
    assert model_of(tmp_path, config) is not None
    for key, changes in GOLDEN[family]["removed"].items():
        if changes is not None:  # transformers reads it
            found = model_of(tmp_path, {name: value for name, value in config.items() if name != key})
            assert found == model_of(tmp_path, config | changes), key
    for key, changes in GOLDEN[family]["null"].items():
        found = model_of(tmp_path, config | {key: None})
        if changes is None:  # transformers 5 refuses it, 4 did not
            heads = config.get("num_attention_heads", 1)
            older = {"num_key_value_heads": heads, "head_dim": config.get("hidden_size", 0) // heads}
            changes = {key: older.get(key, False)}
        assert found in (None, model_of(tmp_path, config | changes)), key
        if key in UNSET:
            assert found is not None and getattr(found, UNSET[key]) is None, key
        if key == "num_key_value_heads":
            assert found is not None and found.num_kv_heads == found.num_heads


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_null_groups_of_experts_are_one_group(tmp_path, family):
    config, none = tiny(family), {"n_group": None, "topk_group": None}
    one = model_of(tmp_path, config | {"topk_method": GOLDEN[family]["default"].get("topk_method", "noaux_tc")} | none)
    assert one is not None and one.router.num_groups == 1


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_null_for_a_size_of_latent_attention_or_of_experts_is_refused_and_no_dense_model(tmp_path, family):
    config = tiny(family)
    for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "v_head_dim"):
        assert model_of(tmp_path, config | {key: None}) is None, key
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"):
        assert model_of(tmp_path, config | {key: None}) is None, key


@pytest.mark.smoke
@pytest.mark.parametrize("family", [family for family, golden in GOLDEN.items() if golden["two"]])
def test_of_two_keys_for_one_thing_that_of_transformers_counts_or_both_are_refused(tmp_path, family):
    config = tiny(family)
    for absent, given, changes in GOLDEN[family]["two"]:
        found = model_of(tmp_path, {name: value for name, value in config.items() if name not in absent} | given)
        expected = None if changes is None else model_of(tmp_path, config | changes)
        assert found == expected or (not absent and found is None), given


# As transformers 5.24 prints them, of T5 and of each part of models that read images; what it needs besides is given:
# a size of pictures that mm_tokens_per_image divides, SigLIP's strategy, and a tower's output of the model's width.
def sizes(layers: int, width: int, heads: int, ffn: int) -> dict:
    keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    return dict(zip(keys, (layers, width, heads, ffn), strict=True))


CLIP = sizes(12, 768, 12, 3072) | {"image_size": 224, "patch_size": 32, "num_channels": 3, "layer_norm_eps": 1e-5}
CLIP |= {"hidden_act": "quick_gelu", "attention_dropout": 0.0}
SIGLIP = CLIP | {"patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6}
LLAVA = {"image_token_index": 32_000, "projector_hidden_act": "gelu", "vision_feature_layer": -2}
LLAVA |= {"vision_feature_select_strategy": "default", "multimodal_projector_bias": True}
QWEN_TOWER = {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16}
QWEN_TOWER |= {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN2_TOWER = {"depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16}
QWEN2_TOWER |= {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER = {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304}
QWEN3_TOWER |= {"num_heads": 16, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3_TOWER |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]}
QWEN = {"vocab_size": 152_064, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5}
QWEN |= {"use_sliding_window": False, "rope_parameters": {"rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
QWEN3 = {"vocab_size": 151_936, "num_key_value_heads": 32, "head_dim": 128, "hidden_act": "silu", "rms_norm_eps": 1e-6}
QWEN3 |= {"attention_bias": False, "rope_parameters": {"rope_theta": 5e5, "mrope_section": [24, 20, 20]}}
T5 = {"vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_decoder_layers": 6}
T5 |= {"num_heads": 8, "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
T5 |= {"layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu", "tie_word_embeddings": True}
# family: (keys that are given, the defaults of the whole, of text_config and of vision_config)
WHOLE: dict[str, list[tuple[dict, dict, dict, dict]]] = {
    "t5": [({}, T5, {}, {})],
    "llava": [
        ({}, LLAVA, {}, CLIP),
        (
            {"vision_feature_select_strategy": "full", "vision_config": {"model_type": "siglip_vision_model"}},
            LLAVA | {"vision_feature_select_strategy": "full"},
            {},
            SIGLIP,
        ),
    ],
    "gemma3": [
        (
            {"vision_config": {"image_size": 896, "patch_size": 14, "vision_use_head": False}},
            {"image_token_index": 262_144, "mm_tokens_per_image": 256},
            {},
            SIGLIP | {"image_size": 896, "patch_size": 14},
        )
    ],
    "qwen2_vl": [
        (
            {"vision_config": {"hidden_size": 8192}},
            {"image_token_id": 151_655},
            sizes(80, 8192, 64, 29_568) | QWEN,
            QWEN2_TOWER,
        )
    ],
    "qwen2_5_vl": [
        (
            {"vision_config": {"out_hidden_size": 8192}},
            {"image_token_id": 151_655},
            sizes(80, 8192, 64, 29_568) | QWEN,
            QWEN_TOWER | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
        )
    ],
    "qwen3_vl": [
        (
            {"vision_config": {"out_hidden_size": 4096}},
            {"image_token_id": 151_655},
            sizes(32, 4096, 32, 22_016) | QWEN3,
            QWEN3_TOWER,
        )
    ],
}


@pytest.mark.parametrize(("family", "case"), [(family, case) for family, cases in WHOLE.items() for case in cases])
def test_absent_keys_of_models_with_two_stacks_have_the_values_of_transformers(tmp_path, family, case):
    given, whole, text, tower = case
    absent = {"model_type": family} | ({} if family == "t5" else {"text_config": {}, "vision_config": {}}) | given
    written = absent | whole
    if family != "t5":
        written |= {"text_config": text, "vision_config": tower | absent["vision_config"]}
    expected = model_of(tmp_path, written)
    assert expected is not None and model_of(tmp_path, absent) == expected
    for part in (written, written.get("text_config", {}), written.get("vision_config", {})):
        for key in [key for key in part if key not in ("model_type", "text_config", "vision_config")]:
            if key not in absent and key not in absent.get("vision_config", {}):
                value = part.pop(key)
                assert model_of(tmp_path, written) == expected, key
                part[key] = value


def test_keys_of_a_window_that_tiny_models_cannot_show_have_the_values_of_transformers(tmp_path):
    """Those of Qwen2Config, Qwen3Config, Qwen2VLTextConfig and Qwen3MoeConfig; no window is read of Qwen3-VL."""
    window = {"use_sliding_window": True, "num_hidden_layers": 90}
    whole = {"text_config": window, "vision_config": {"hidden_size": 8192, "out_hidden_size": 8192}}
    for family, first in (("qwen2", 28), ("qwen3", 28), ("qwen2_vl", 80), ("qwen2_5_vl", 80)):
        given = {"model_type": family} | (whole if first == 80 else window)
        model = model_of(tmp_path, given)
        assert model is not None and model.sliding_window == 4096
        assert [kind.window for kind in layer_kinds(model)] == [None] * first + [4096] * (90 - first)
    everywhere = model_of(tmp_path, window | {"model_type": "qwen3_moe", "max_window_layers": 0})
    assert everywhere is not None and everywhere.sliding_window == 4096


def test_the_width_of_a_tower_without_hidden_size_is_the_output_s_of_qwen2_vl(tmp_path):
    text = {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4}  # as of the 7B
    given = {"model_type": "qwen2_vl", "text_config": text, "vision_config": {}}
    model = model_of(tmp_path, given)
    assert model is not None and model == model_of(tmp_path, given | {"vision_config": {"hidden_size": 3584}})


def test_llava_with_siglip_needs_a_strategy_since_the_default_drops_a_class_token_that_it_lacks(tmp_path):
    siglip = {"model_type": "llava", "text_config": {}, "vision_config": {"model_type": "siglip_vision_model"}}
    assert model_of(tmp_path, siglip) is None
    assert model_of(tmp_path, siglip | {"vision_feature_select_strategy": "full"}) is not None


@pytest.mark.parametrize("family", GOLDEN)
def test_the_longest_sequence_of_a_folder_is_what_transformers_reads(tmp_path, family):
    default = GOLDEN[family]["default"]
    of_file = {key for key in default if key in ("max_position_embeddings", "model_max_length", "n_positions")}
    for given in ({}, *({key: 777} for key in of_file)):
        config = {"model_type": family} | given
        config |= {"num_experts_per_tok": 6} if family == "deepseek_v2" else {}
        (tmp_path / "config.json").write_text(json.dumps(config))
        _, section, whole = read_folder(tmp_path)
        assert longest(section, whole) == max(
            given.values(), default=max((default[key] for key in of_file), default=2048)
        )


def test_qwen3_moe_with_a_window_has_it_from_the_28th_layer_on_unless_the_file_says_otherwise(tmp_path):
    """transformers 4 reads max_window_layers=28 where there is none, which no tiny model can have."""
    window = tiny("qwen3_moe") | {"use_sliding_window": True, "sliding_window": 8}
    window.pop("max_window_layers", None)
    assert model_of(tmp_path, window) is None
    everywhere = model_of(tmp_path, window | {"max_window_layers": 0})
    assert everywhere is not None and everywhere.sliding_window == 8
