"""Keys that a config.json lacks have transformers' values (tests/data_files/make_hf_defaults.py), in each family."""

import json
import zipfile
from pathlib import Path

import pytest

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.convert import FAMILIES, read_model

FILES = Path(__file__).parents[1] / "data_files"
GOLDEN = json.loads((FILES / "hf_defaults.json").read_text())
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
    # transformers does not have Kimi-K2 under its name; T5's are in test_t5.py, the others' in test_vision.py
    others = {"kimi_k2", "t5", "llava", "gemma3", "qwen2_5_vl", "qwen3_vl"}
    assert GOLDEN.keys() == FAMILIES.keys() - others


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


@pytest.mark.smoke
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_null_groups_of_experts_are_one_group(tmp_path, family):
    config, none = tiny(family), {"n_group": None, "topk_group": None}
    one = model_of(tmp_path, config | {"topk_method": GOLDEN[family]["default"].get("topk_method", "noaux_tc")} | none)
    assert one is not None and one.router.num_groups == 1


@pytest.mark.smoke
@pytest.mark.parametrize("family", [family for family, golden in GOLDEN.items() if golden["two"]])
def test_of_two_keys_for_one_thing_that_of_transformers_counts_or_both_are_refused(tmp_path, family):
    config = tiny(family)
    for absent, given, changes in GOLDEN[family]["two"]:
        found = model_of(tmp_path, {name: value for name, value in config.items() if name not in absent} | given)
        expected = None if changes is None else model_of(tmp_path, config | changes)
        assert found == expected or (not absent and found is None), given
