"""The tables of names and values: each against Megatron-LM's own parser, configs and files in megatron_lines.json."""

import json
from pathlib import Path

import pytest
import yaml

from megajax.config.megatron_flags import KEY
from megajax.errors import InputError
from megajax.tools.from_megatron.__main__ import read, translate
from megajax.tools.from_megatron.arguments import DESTS, from_mapping, from_yaml

STORED = json.loads((Path(__file__).parents[1] / "data_files/megatron_lines.json").read_text())
LINE: str = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 1 --train-iters 10 --lr 1e-3 --vocab-size 512 --mock-data"""
# A flag's value counts beside these.
BESIDE = {
    "fp8": "--fp8-recipe blockwise",
    "fp8_recipe": "--fp8-format hybrid",
    "fp8_amax_compute_algo": "--fp8-format hybrid",
    "fp4_recipe": "--fp4-format e2m1",
    "muon_scale_mode": "--optimizer muon",
    "moe_token_drop_policy": "--num-experts 4 --moe-expert-capacity-factor 2",
    "dataloader_type": "--data-path x",
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"), "--use-precision-aware-optimizer"),
    **dict.fromkeys(("moe_router_load_balancing_type", "moe_router_dtype"), "--num-experts 4"),
}
CHOICES = {dest: choices for dest, choices in STORED["choices"].items() if DESTS[dest].outcome == KEY}
ANY = ("transformer_impl", "tokenizer_type")  # decide nothing here, or are of other versions too
# Refused for what is possible here
IN_OTHER_WORDS = {
    *("muon_scale_mode", "dataloader_type", "moe_router_load_balancing_type", "main_params_dtype"),
    *("exp_avg_dtype", "exp_avg_sq_dtype"),
}
OLDER = {"moe_token_dispatcher_type": ["alltoall_seq"]}  # values of earlier versions of Megatron-LM
OF_THE_CONFIG = {  # fields of TransformerConfig that have flags of other names
    "num_moe_experts": "num_experts",
    "fp8_param": "fp8_param_gather",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "cpu_offloading": "cpu_offloading",
}
FIXED = ("original_max_position_embeddings", "beta_fast", "beta_slow", "gtp_weight_remat_size")
FIXED += ("expert_gtp_weight_remat_size",)


@pytest.mark.parametrize("dest", CHOICES)
def test_a_flags_values_are_those_of_megatrons_parser(dest):
    """Another one is refused with the flag and these; each of these is a setting, or is refused for another reason."""
    line = f"{LINE} {BESIDE.get(dest, '')}".replace("--mock-data" if dest == "dataloader_type" else "\n", " ")
    flag = f"--{DESTS[dest].name}"
    if dest not in ANY:
        with pytest.raises(InputError, match=flag) as refused:
            translate(read(f"{line} {flag} not_a_choice".split())[0], 1)
        assert dest in IN_OTHER_WORDS or all(choice in str(refused.value) for choice in CHOICES[dest])
    for choice in CHOICES[dest] + OLDER.get(dest, []):
        try:
            translate(read(f"{line} {flag} {choice}".split())[0], 1)
        except InputError as error:
            assert f"{flag} {choice} is none of" not in str(error)


def given_by(folder: Path, values: dict) -> dict:
    (folder / "gpt.yaml").write_text(yaml.safe_dump({"language_model": values, "train_iters": 1}))
    return {name: value for name, value in from_yaml(folder / "gpt.yaml").given.items() if name != "train_iters"}


@pytest.mark.parametrize("source", ["yaml", "fields"])
def test_every_name_and_value_of_megatrons_config_is_known(source, tmp_path):
    """Its own YAML file in all versions, and the fields of its config that are no arguments."""
    names = STORED[source]
    for i in range(max(map(len, names.values()))):
        values = {name: each[i % len(each)] for name, each in names.items()}
        given = given_by(tmp_path, values)
        if source == "fields":
            assert given == {dest: values[name] for name, dest in OF_THE_CONFIG.items() if values[name] is not None}
    assert len(names) > 40
    assert given_by(tmp_path, {"memory_efficient_layer_norm": True}) == {}  # a kernel of Apex


@pytest.mark.parametrize("name", FIXED)
def test_a_field_without_a_flag_that_changes_numbers_is_refused_with_its_value(name, tmp_path):
    (default,) = STORED["fields"][name]
    with pytest.raises(InputError, match=rf"^{name}: 3 is not possible here .*: it is {default}\.$"):
        given_by(tmp_path, {name: 3})


# Megatron's validate_yaml: the flags of activations and of groups do not count
@pytest.mark.parametrize(("kind", "here"), [("swiglu", "swiglu"), ("squaredrelu", "relu2"), ("gelu", "gelu_exact")])
@pytest.mark.parametrize("flag", ["swiglu", "squared_relu", "openai_gelu", "quick_geglu", "group_query_attention"])
def test_a_yaml_files_activation_and_groups_are_those_of_its_config(kind, here, flag, tmp_path):
    given = given_by(
        tmp_path, {"activation_func": kind, "num_query_groups": 2, "add_bias_linear": True, flag: flag[0] != "g"}
    )
    rest = read(LINE.split())[0]
    rest.given |= given
    model = yaml.safe_load(translate(rest, 1)[0])["model"]
    assert (model["activation"], model["num_kv_heads"]) == (here, 2)
    assert given_by(tmp_path, {"num_query_groups": None, "group_query_attention": True}) == {}


@pytest.mark.parametrize("value", ["squared_relu", ["gelu"], ""])
def test_an_activation_that_yaml_files_do_not_have_is_refused_with_those_that_they_have(value, tmp_path):
    with pytest.raises(InputError, match=r"^activation_func: .* is none of swiglu, squaredrelu or gelu \("):
        given_by(tmp_path, {"activation_func": value})


def test_layers_of_the_first_and_the_last_stage_of_a_yaml_file(tmp_path):
    given = given_by(tmp_path, {"num_layers_in_first_pipeline_stage": 5, "num_layers_in_last_pipeline_stage": 6})
    assert given == {"decoder_first_pipeline_num_layers": 5, "decoder_last_pipeline_num_layers": 6}


@pytest.mark.parametrize("value", [None, False, [], ""])
def test_a_name_of_a_yaml_file_without_a_value_is_no_setting(value, tmp_path):
    assert given_by(tmp_path, {"of_another_version": value}) == {}


def keys(line: list[str]) -> dict:
    return yaml.safe_load(translate(read(line)[0], 1)[0])


POSITIONS = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}


@pytest.mark.parametrize("kind", [*POSITIONS, "mrope", "relative"])
def test_positions_are_translated_or_refused(kind):
    line = f"{LINE} --position-embedding-type {kind}".split()
    if kind in POSITIONS:
        assert keys(line)["model"]["position"] == POSITIONS[kind]
    else:
        with pytest.raises(InputError, match=f"--position-embedding-type {kind}: positions are rotary"):
            keys(line)


def test_yarn_of_latent_attention_has_both_factors_of_mscale():
    line = f"{LINE} --multi-latent-attention --qk-layernorm --position-embedding-type rope --disable-bias-linear"
    flags = "--rotary-scaling-factor 4 --mscale 0.7 --mscale-all-dim 0.5"
    scaling = keys(f"{line} {flags}".split())["model"]["rope_scaling"]
    expected = {"kind": "yarn", "factor": 4, "original_max_positions": 4096, "beta_fast": 32, "beta_slow": 1}
    assert scaling == expected | {"mscale": 0.7, "mscale_all_dim": 0.5}


def test_a_file_has_the_paths_of_each_split(tmp_path):
    (tmp_path / "split.json").write_text('{"train": ["0.5", "a", "0.5", "b"], "valid": ["c"], "test": ["d"]}')
    line = LINE.replace("--mock-data", f"--per-split-data-args-path {tmp_path}/split.json")
    found = keys(line.split())["data"]
    assert [each["prefix"] for each in found["train"]] == ["a", "b"]
    assert (found["valid"], found["test"]) == ("c", "d")


def test_saved_names_of_a_transformer_config_are_those_of_their_flags():
    given = from_mapping({"num_moe_experts": 8, "fp8_param": True, "use_flash_attn": True}, "a checkpoint").given
    assert given == {"num_experts": 8, "fp8_param_gather": True, "use_flash_attn": True}
