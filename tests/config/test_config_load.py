"""Loading: includes, overrides, YAML values, derived defaults, where a key was set, printing."""

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pydantic
import pytest
import yaml

from megajax.config import Config, help_text, load_config
from megajax.config.load import config_path, keys
from megajax.schema.tree import Loader, as_override

pytestmark = pytest.mark.usefixtures("base_config")

MODEL = """\
model:
  num_layers: 4
  hidden_size: 64
  num_heads: 8
  vocab_size: 1000
"""
BATCH = "batch: {global_size: 8, sequence_length: 32}\n"
DATA = "data: {kind: synthetic}\n"
BASE = MODEL + BATCH + DATA


def write(name: str, text: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


@pytest.mark.smoke
def test_later_includes_win_over_earlier_the_file_over_both_and_overrides_over_all():
    write("parts/one.yaml", "run: {name: one, seed: 1, steps: 1, log_interval: 1}\n" + MODEL)
    write("parts/two.yaml", "run: {name: two, seed: 2, steps: 2}\n" + DATA)
    write("main.yaml", "include: [parts/one.yaml, parts/two.yaml]\nrun: {name: main, seed: 3}\n" + BATCH)
    config = load_config("main.yaml", ["run.name=first", "run.name=last"])
    run = config.run
    assert (run.name, run.seed, run.steps, run.log_interval) == ("last", 3, 2, 1)


def test_an_include_is_relative_to_the_file_that_names_it():
    write("a/b/main.yaml", "include: ../c/part.yaml\n" + BATCH)
    write("a/c/part.yaml", "include: model.yaml\n" + DATA)
    write("a/c/model.yaml", MODEL)
    config = load_config("a/b/main.yaml")
    assert config.where("model.num_heads") == "a/c/model.yaml, line 4"


def test_one_file_may_be_included_twice_by_different_files():
    write("model.yaml", MODEL)
    write("left.yaml", "include: model.yaml\n" + BATCH)
    write("right.yaml", "include: model.yaml\n" + DATA)
    write("main.yaml", "include: [left.yaml, right.yaml]\n")
    assert load_config("main.yaml").model.num_layers == 4


def test_mappings_merge_key_by_key_and_all_else_is_replaced():
    write("scaled.yaml", "include: x.yaml\nmodel: {rope_scaling: {factor: 8, high_freq_factor: 6}}\n")
    scaling = load_config("scaled.yaml", ["model.rope_scaling.factor=4"]).model.rope_scaling
    assert scaling is not None and (scaling.factor, scaling.high_freq_factor) == (4.0, 6.0)
    assert load_config("scaled.yaml", ["model.rope_scaling=null"]).model.rope_scaling is None
    fresh = load_config("x.yaml", ["model.rope_scaling.factor=8"]).model.rope_scaling
    assert fresh is not None and fresh.original_max_positions == 8192
    whole_section = load_config("x.yaml", ["mesh={data: 2, tensor: 4}", "mesh.data=3"]).mesh
    assert (whole_section.data, whole_section.tensor) == (3, 4)


def test_a_mapping_that_is_one_value_is_replaced():
    batch = "batch: {global_size: 8, sequence_length: 8, num_microbatches: 4, schedule: {0: 4, 1K: 8}}\n"
    write("a.yaml", MODEL + batch + "data: {train: {prefix: a}}\n")
    write("b.yaml", "include: a.yaml\nbatch: {schedule: {0: 2, 2K: 8}}\n")
    write("blend.txt", "c d")
    for override in ("data.train={file: blend.txt}", "data={train: {file: blend.txt}}"):
        config = load_config("b.yaml", [override])
        assert config.batch.schedule == "0: 2, 2K: 8" and [part.prefix for part in config.data.train] == ["c", "d"]
        assert [config.where(f"batch.schedule.{tokens}") for tokens in ("1K", "2K")] == ["default", "b.yaml, line 2"]


def test_where_names_file_and_line_the_override_or_default():
    write("model.yaml", MODEL + "  rope_scaling:\n    factor: 8\n")
    write("dir/main.yaml", f"include: ../model.yaml\n{BATCH}{DATA}run:\n\n  # the name\n  name: main\n")
    config = load_config(Path("dir/main.yaml"), ["mesh.tensor=4", "model.rope_scaling.low_freq_factor=2"])
    assert config.where("run.name") == "dir/main.yaml, line 7"
    assert config.where("batch.sequence_length") == "dir/main.yaml, line 2"
    assert config.where("model.num_layers") == "model.yaml, line 2"
    assert config.where("model.rope_scaling.factor") == "model.yaml, line 7"
    assert config.where("mesh.tensor") == "the command line: mesh.tensor=4"
    assert config.where("model.rope_scaling.low_freq_factor").startswith("the command line: ")
    assert config.where("run.seed") == config.where("model.head_dim") == "default"
    gone = load_config("dir/main.yaml", ["model.rope_scaling=null"])
    assert gone.where("model.rope_scaling.factor") == "default"


VALUES = {
    "schedule.learning_rate=3e-4": 3e-4,
    "schedule.learning_rate=1E-3": 1e-3,
    "schedule.learning_rate=.5": 0.5,
    "schedule.learning_rate=1": 1.0,
    "run.steps=1_000": 1000,
    "run.name=yes": "yes",
    "run.name='3e-4'": "3e-4",
    "run.name=0x10": "0x10",
    "run.name=010": "010",
    "run.name=2024-01-01": "2024-01-01",
    "run.name=a=b": "a=b",
    'data.train="a\\nb"': "a\nb",
    "run.name=12:30": "12:30",
    "run.deterministic=true": True,
    "data.split=969,30,1": "969,30,1",
    "data.train=a/b": "a/b",
    "model.sliding_window=null": None,
    "model.sliding_window=": None,
    "model.num_kv_heads=~": 8,
}


@pytest.mark.parametrize("override", VALUES)
def test_values_are_read_as_yaml_1_2_and_printed_so_that_they_read_back(override: str):
    section, name = override.partition("=")[0].split(".")
    config = load_config("x.yaml", [override])
    value = getattr(getattr(config, section), name)
    assert value == VALUES[override] and type(value) is type(VALUES[override])
    write("printed.yaml", config.to_yaml())
    assert load_config("printed.yaml") == load_config("x.yaml", [f"{section}.{name}={as_override(value)}"]) == config


def test_a_name_is_that_of_a_folder_only_where_the_run_directory_follows_from_it():
    config = load_config("x.yaml", ["run.name=team/a", "run.dir=/data/runs/a"])
    assert (config.run.name, config.run.dir) == ("team/a", "/data/runs/a")


@pytest.mark.parametrize(
    "value",
    ["a\nb", "a: b", " a", "'", '"', "null", "", "\t", "é\n", "a\u2028é", "\u202e", ["a\nb", 1], {"a": "b\n\nc"}],
)
def test_a_value_as_an_override_is_one_line_that_reads_back(value):
    text = as_override(value)
    assert "\n" not in text and yaml.load(text, Loader) == value


def test_letters_of_all_languages_are_shown_as_they_are_typed():
    assert [as_override(value) for value in ("/müller/数据", ["é", 1])] == ["/müller/数据", "[é, 1]"]


def test_a_long_list_is_written_as_a_short_one():
    assert as_override(["dense"] * 50) == f"[{', '.join(['dense'] * 50)}]"


def test_lists_from_the_command_line():
    data = load_config("x.yaml", ["data.train=[{prefix: a}, {prefix: b, weight: 2}]"]).data
    assert [(source.prefix, source.weight) for source in data.train] == [("a", 1.0), ("b", 2.0)]  # type: ignore
    pattern = ["model.layer_pattern=[local, global]", "model.sliding_window=8"]
    assert load_config("x.yaml", pattern).model.layer_pattern == ("local", "global")


LATENT = "model={kv_lora_rank: 8, qk_nope_head_dim: 6, qk_rope_head_dim: 4, v_head_dim: 5}"
# The default of each key that follows from others, by overrides
DERIVED = {
    "run.dir": {"": "runs/run", "run.name=me": "runs/me"},
    "run.steps": {"": 1000},
    "run.compilation_cache": {"run.name=me": "runs/me/compilation_cache", "run.dir=a/b": "a/b/compilation_cache"},
    "model.num_kv_heads": {"": 8},
    "model.head_dim": {"": 8, "model.num_heads=4": 16, LATENT: 10},
    "model.ffn_hidden_size": {"": 256},
    "model.max_positions": {"": None, "model.position=learned": 32},
    "model.expert_ffn_hidden_size": {"": None, "model.num_experts=4": 256},
    "model.vision.ffn_hidden_size": {"": 64},
    "model.vision.patches_per_row": {
        "": 64**2,
        "model.vision.grid=3": 9,
        "model.vision={grid: 3, class_token: true}": 10,
        "model.vision={grid: 3, interpolate: true}": 64**2,
    },
    "model.vision.projector_ffn_hidden_size": {"": 16, "model.vision.merge=2": 64},
    "schedule.min_learning_rate": {"": 3e-5, "schedule.learning_rate=0.2": 0.02, "schedule.kind=inverse_sqrt": 0},
    "schedule.decay_steps": {"": 1000, "run.steps=70": 70, "run.steps=5 schedule.warmup_steps=9": 10},
    "schedule.wsd_decay_steps": {
        "": None,
        **{f"schedule.kind=wsd run.steps={steps}": wsd for steps, wsd in ((70, 7), (19, 1), (9, 1), (1, 1))},
    },
    "lora.alpha": {"": None, "lora.rank=4 checkpoint.init_from=r": 4.0},
    "kernels.scan_unroll": {"": None},  # chosen at the start
    "kernels.loss_chunk_tokens": {"": None},
}


@pytest.mark.filterwarnings("ignore:schedule.warmup_steps=9")
@pytest.mark.parametrize("key", [key for key, field in keys() if "derived" in dict(field.json_schema_extra or {})])
def test_a_default_that_follows_from_other_keys(key: str):
    tower = ["model.vision={image_token: 5, num_layers: 1, hidden_size: 16, num_heads: 2}"]
    for overrides, expected in DERIVED[key].items():
        given = re.split(r" (?=\w+\.)", overrides) if overrides else []
        config = load_config("x.yaml", [*(tower if ".vision." in key else []), *given])
        assert attrgetter(key)(config) == expected, overrides


@pytest.mark.parametrize(("packing", "share"), [("first_fit", True), ("sequential", True), ("none", False)])
def test_what_chats_decide_follows_from_whether_they_share_rows(packing: str, share: bool):
    data = load_config(
        "x.yaml", ["data.kind=chat", "data.train=t", "data.tokenizer=byte", f"data.packing={packing}"]
    ).data
    assert (data.reset_attention, data.reset_positions, data.mask_end_of_document_loss) == (share, share, True)


def test_null_restores_a_derived_default_that_an_include_set():
    write("part.yaml", BASE + "run: {dir: elsewhere}\nschedule: {decay_steps: 5}\n")
    config = load_config("part.yaml", ["run.dir=null", "schedule.decay_steps=null", "model.ffn_hidden_size=null"])
    assert (config.run.dir, config.schedule.decay_steps) == ("runs/run", 1000)


def test_an_empty_section_is_all_defaults():
    write("main.yaml", BASE + "run:\nmesh: null\n")
    assert load_config("main.yaml").run == load_config("x.yaml").run


def test_null_removes_a_mapping_that_an_include_set():
    write("main.yaml", BASE + "objective: {kind: mine, settings: {heat: 2}}\nrun: {hook_settings: {a: {b: 1}}}\n")
    nulls = ["objective.settings=null", "run.hook_settings=null", "model.router=null"]
    config = load_config("main.yaml", ["objective.kind=next_token", *nulls])
    assert (config.objective.settings, config.run.hook_settings) == ({}, {})
    assert config.model.router == load_config("x.yaml").model.router


def test_configs_are_equal_by_value_hashable_and_frozen():
    write("y.yaml", "# moved down\n" + BASE)
    one, other = load_config("x.yaml"), load_config("y.yaml")
    assert one == other and hash(one) == hash(other)
    assert one != load_config("x.yaml", ["run.seed=2"])
    with pytest.raises(pydantic.ValidationError):
        one.run.seed = 3  # type: ignore[misc]


def test_a_config_made_in_python_is_complete_too():
    config = Config.model_validate(yaml.safe_load(BASE))
    assert config == load_config("x.yaml") and config.model.padded_vocab_size == 1024
    assert config.schedule.decay_steps == 1000 and config.where("model.num_layers") == "default"


def test_the_printed_config_has_every_section_in_order():
    printed = yaml.safe_load(load_config("x.yaml").to_yaml())
    assert list(printed) == list(Config.model_fields)
    assert list(printed["run"])[:3] == ["name", "dir", "seed"]


@pytest.mark.smoke
def test_help_lists_every_key_with_a_one_line_doc_type_and_default():
    text = help_text()
    for key, field in keys():
        assert field.description and field.description.endswith("."), key
        assert f"  {key}  {field.description} [" in text
    assert "  run.steps  Number of optimizer steps. [int, default: 1000]\n" in text
    assert "  model.num_layers  Number of blocks (attention and MLP). [int, required]\n" in text
    assert (
        "  model.head_dim  Width of a query and a key. [int, default: hidden_size / num_heads,"
        " or qk_nope_head_dim + qk_rope_head_dim]\n"
        "  model.ffn_hidden_size  Width of the MLP. [int, default: 4 * hidden_size]\n"
    ) in text
    assert "[rmsnorm | layernorm, default: rmsnorm]" in text
    assert "[list of (global | local) or null, default: null]" in text
    assert "[mapping or null, default: null]" in text
    assert "  data.train.N.prefix  " in text
    assert "[text or list of (mapping) or null, default: null]" in text


def test_importing_the_config_verify_pictures_or_data_does_not_import_jax():
    modules = ["config.cli", "config.checks", "tools.verify.__main__", "tools.schedule"]
    data = "describe indexed json_lines loader preprocess progress samples synthetic tokenizers"
    names = [f"megajax.{name}" for name in (*modules, *(f"data.{name}" for name in data.split()))]
    code = f"import importlib, sys\nfor name in {names}:\n    importlib.import_module(name)\n"
    code += "    if 'jax' in sys.modules: sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_blend_may_be_written_as_megatron_does():
    Path("x.yaml").write_text(MODEL + BATCH + "data: {train: 0.7 a 3 b}\n")
    assert [(part.prefix, part.weight) for part in load_config("x.yaml").data.train] == [("a", 0.7), ("b", 3.0)]


def test_a_name_is_that_of_a_config_that_comes_with_megajax(tmp_path, monkeypatch):
    """From any directory; a file of the same name comes first."""
    monkeypatch.chdir(tmp_path)
    assert load_config("llama3_8b").model.num_layers == 32
    Path("llama3_8b").write_text(f"include: {config_path('llama3_1b')}")
    assert load_config("llama3_8b").model.num_layers == 16
