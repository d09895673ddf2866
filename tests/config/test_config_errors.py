"""Every mistake in a config is one sentence with the key, the value, the place and the way out."""

import os
import re
from pathlib import Path

import pytest

from megajax.config import load_config
from megajax.errors import ConfigError, counted

MODEL = """\
model:
  num_layers: 4
  hidden_size: 64
  num_heads: 8
  vocab_size: 1000
"""
BATCH = "batch: {global_size: 8, sequence_length: 32}\n"
DATA = "data: {kind: synthetic}\n"
LINE = "the command line: "


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(MODEL + BATCH + DATA)
    return tmp_path


def test_torchtitans_files_are_named_as_what_they_are():
    Path("llama3.toml").write_text("[training]\nsteps = 1\n")
    assert (
        message("llama3.toml") == "llama3.toml is TOML: write YAML; docs/migration.md has torchtitan's keys and ours."
    )


def message(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


LISTS = {  # key=value → what to write
    "data.valid_sets={easy: a, hard: b}": "[{name: easy, prefix: a}, {name: hard, prefix: b}]",
    "data.valid_sets={easy: {prefix: a}}": "[{name: easy, prefix: a}]",
    "data.valid_sets={name: easy, prefix: a}": "[{name: easy, prefix: a}]",
    "data.stages={from_step: 5, train: b}": "[{from_step: 5, train: b}]",
    "data.stages={5: b}": "[{from_step: 5, train: b}]",
    "optimizer.groups={embedding.*: {learning_rate: 0.1}}": "[{parameters: [embedding.*], learning_rate: 0.1}]",
    "lora.targets=query,value": "[query,value]",
    "lora.targets=q_proj": "[query]",
    "lora.targets=c_attn, gate_proj": "[query,key,value,gate]",
    "mesh.experts_over=expert": "[expert]",
}


@pytest.mark.parametrize("typed", LISTS)
def test_what_is_no_list_is_answered_with_the_list_which_is_accepted(typed):
    key, value = typed.split("=", 1)
    more = ["data={kind: indexed, train: a}", "checkpoint.init_from=a"]
    more += ["lora.rank=1"] if key.startswith("lora") else []
    sentence = message("good.yaml", *more, f"{key}={value}")
    assert f"{key}=" in sentence and "is not a list (" in sentence
    assert sentence.endswith(f": write {LISTS[typed]}.")
    load_config("good.yaml", [*more, f"{key}={LISTS[typed]}"])


@pytest.mark.parametrize("typed", ["data.valid_sets=a", "data.valid_sets=[a, b]", "data.stages=[5]", "data.stages=5"])
def test_a_list_of_mappings_is_shown_with_its_keys(typed):
    form = "[{name: ..., prefix: ...}]" if "sets" in typed else "[{from_step: ..., train: ...}]"
    assert message("good.yaml", "data={kind: indexed, train: a}", typed).endswith(f": write {form}.")


OVERRIDES = {
    "steps=3": "steps is not a config key (@): did you mean run.steps?",
    "model.learning_rate=1": ("model.learning_rate is not a config key (@): did you mean schedule.learning_rate?"),
    "modle.num_layers=3": "modle.num_layers is not a config key (@): did you mean model.num_layers?",
    "model.rope_scaling={factr: 8}": (
        "model.rope_scaling.factr is not a config key (@): did you mean model.rope_scaling.factor?"
    ),
    "data.train=[{prefx: a}]": ("data.train.0.prefx is not a config key (@): did you mean data.train.0.prefix?"),
    "run.steps=true": "run.steps=true is not a whole number (@): write one such as 4, without quotes.",
    "model.num_layers=null": ("model.num_layers=null is not a whole number (@): write one such as 4, without quotes."),
    "model.init_std='0.1'": ("model.init_std='0.1' is not a number (@): write one such as 0.1, without quotes."),
    "optimizer.epsilon=.inf": "optimizer.epsilon=.inf is not a finite number (@): write one such as 0.1.",
    "run.name=''": "run.name='' is empty (@): write a name.",
    **{
        f"run.name={name}": f"run.name={name} is no name of a folder in runs/ (@): write it without / and control"
        " characters, or set run.dir, which may be any directory."
        for name in ("../x", "a/b", "/tmp/x", ".", "..", "a/", '"a\\nb"')
    },
    "model.layer_pattern=local": ("model.layer_pattern=local is not a list (@): write [local]."),
    "pipeline.layout=4": "pipeline.layout=4 is not a list (@): write [4].",
    "pipeline.layout=[]": "pipeline.layout=[] is empty (@): give at least one entry.",
    "pipeline.layout=[2, -1]": "pipeline.layout.1=-1 is too small (@): use 0 or more.",
    "pipeline.layout=['2']": ("pipeline.layout.0='2' is not a whole number (@): write one such as 4, without quotes."),
    "pipeline.schedule=interleaved": (
        "pipeline.schedule=interleaved is not a choice (@): use 1f1b, with"
        " pipeline.virtual_stages above 1; the choices are gpipe, 1f1b and zero_bubble."
    ),
    "pipeline.virtual_stages=0": "pipeline.virtual_stages=0 is too small (@): use 1 or more.",
    "model.layer_pattern=[]": "model.layer_pattern=[] is empty (@): give at least one entry.",
    "model.layer_pattern=[all]": (
        "model.layer_pattern.0=all is not a choice (@): did you mean global? The choices are global and local."
    ),
    "run.steps=99999999999999999999": "run.steps=99999999999999999999 is too large (@): use 2147483647 or less.",
    "run.seed=4294967296": "run.seed=4294967296 is too large (@): use 4294967294 or less.",
    "mesh.pipeline=3000000000": "mesh.pipeline=3000000000 is too large (@): use 2147483647 or less.",
    "precision.fp8.margin=1000": "precision.fp8.margin=1000 is too large (@): use 100 or less.",
    "schedule.learning_rate=0": "schedule.learning_rate=0 is too small (@): use more than 0.",
    "model.rope_fraction=1.5": "model.rope_fraction=1.5 is too large (@): use 1 or less.",
    "mesh.data=0": (
        "mesh.data=0 is not a mesh size (@): use 1 or more, or -1 on one axis to take all remaining devices."
    ),
    "model.norm=[rmsnorm]": (
        "model.norm=[rmsnorm] is not a choice (@): did you mean rmsnorm? The choices are rmsnorm and layernorm."
    ),
    "data.train=3": "data.train=3 is not a data source (@): write a path prefix, or a list of {prefix, weight}.",
    "checkpoint.allow_changes=[data, data.trian]": (
        "checkpoint.allow_changes names data.trian, which is no config key (@): did you mean data.train?"
    ),
    "checkpoint.allow_changes=[model.num_lay]": (
        "checkpoint.allow_changes names model.num_lay, which is no config key (@): did you mean model.num_layers?"
    ),
    "model=3": "model=3 is not a mapping (@): set its keys, such as model.num_layers.",
    "model=num_layers:4": "model=num_layers:4 is not a mapping (@): write a space after each colon.",
    "model.rope_sections=[1, 2, 3, 4]": "model.rope_sections=[1, 2, 3, 4] has too many entries (@): give 3.",
    "optimizer.muon.coefficients=[]": "optimizer.muon.coefficients=[] is empty (@): give at least one entry.",
    "optimizer.muon.coefficients=[[1, 2, 3, 4]]": (
        "optimizer.muon.coefficients.0=[1, 2, 3, 4] has too many entries (@): give 3."
    ),
    "objective.settings=3": "objective.settings=3 is not a mapping (@): write its keys in braces, as {name: value}.",
    "run.hook_settings.norms=3": (
        "run.hook_settings.norms=3 is not a mapping (@): write its keys in braces, as {name: value}."
    ),
    "run.hooks=null": "run.hooks=null is not a list (@): write [] for none.",
    "data.denoisers=3": "data.denoisers=3 is not a list (@): write [{noise_density: ...}].",
    "batch.schedule=4": (
        "batch.schedule=4 is not a schedule (@): write the tokens from which each size applies, such as '0: 256, 50B:"
        " 512'."
    ),
    "data.chat_template_args=3": (
        "data.chat_template_args=3 is not a mapping from names to values (@): write it like {enable_thinking: false}."
    ),
    "model.rope_scaling={}": ("model.rope_scaling.factor is not set (@): add it (divisor of the low frequencies)."),
    "data.stages=[{train: a}]": "data.stages.0.from_step is not set (@): add it (number of steps before the stage).",
}


# The arguments of transformers' apply_chat_template that are no settings of the template
OVERRIDES |= {
    (override := f"data.chat_template_args={{{name}: []}}"): (
        f"{override} sets {name}, which each chat gives (@): remove it."
    )
    for name in ("messages", "tools", "documents", "add_generation_prompt")
}


@pytest.mark.smoke
@pytest.mark.parametrize("override", OVERRIDES)
def test_a_bad_override_is_one_sentence(override: str):
    assert message("good.yaml", override) == OVERRIDES[override].replace("@", LINE + override)


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3", ".=1"])
def test_a_malformed_override_says_what_one_looks_like(override: str):
    expected = f"{override} is not an override (the command line): write section.key=value."
    assert message("good.yaml", override) == expected


def test_an_override_that_yaml_reads_as_something_else_says_how_to_write_it():
    cure = """put text in quotes, such as 'data.train="TEXT"' in a shell."""
    assert message("good.yaml", "data.train=**/*.jsonl").endswith(f"; {cure}")


def test_an_override_that_is_not_yaml_says_so():
    expected = (
        "not valid YAML (the command line: model.layer_pattern=[a): expected ',' or ']', but got"
        " '<stream end>'; close the bracket."
    )
    assert message("good.yaml", "model.layer_pattern=[a") == expected


FILES = {
    "model:\n  num_layers: 4\n  num_head: 8\n": (
        "model.num_head is not a config key (bad.yaml, line 3): did you mean model.num_heads?"
    ),
    "steps: 3\ntraining:\n  seq_len: 8\n  compile: true\n": (
        "steps is not a config key (bad.yaml, line 1): did you mean run.steps?\n"
        "  training.seq_len (bad.yaml, line 3): did you mean batch.sequence_length?\n"
        "  training.compile (bad.yaml, line 4): everything is always compiled."
    ),
    "# nothing\n": "model.num_layers is not set (bad.yaml): add it (number of blocks (attention and MLP)).",
    MODEL: ("batch.global_size is not set (bad.yaml): add it (sequences per step, over all devices and microbatches)."),
    MODEL + BATCH + "run:\n  steps: 1\n  seed: 2\n  steps: 3\n": (
        "run.steps is set twice (bad.yaml, line 10; first on line 8): keep one."
    ),
    MODEL + "run: {steps: 1}\nrun: {seed: 1}\n": ("run is set twice (bad.yaml, line 7; first on line 6): keep one."),
    "data:\n  train:\n  - {prefix: a, weight: 1, weight: 2}\n": (
        "data.train.0.weight is set twice (bad.yaml, line 3; first on line 3): keep one."
    ),
    "model:\n  num_layers: 4: 5\n": (
        "not valid YAML (bad.yaml, line 2): mapping values are not allowed here; check the indentation and the space"
        " after each colon, and quote text with a colon."
    ),
    "run:\n\tseed: 1\n": (
        "not valid YAML (bad.yaml, line 2): found character '\\t' that cannot start any token; indent with spaces"
        " instead of tabs."
    ),
    "run:\n  seed: 1\n name: b\n": (
        "not valid YAML (bad.yaml, line 3): expected <block end>, but found '<block mapping start>'; check the"
        " indentation."
    ),
    "run: {steps: 1}\nmodel\nbatch: {}\n": (
        "not valid YAML (bad.yaml, line 3): could not find expected ':'; write key: value, with a space after the"
        " colon."
    ),
    "run:\n  seed: !!python/name:os.system x\n": (
        "not valid YAML (bad.yaml, line 2): could not determine a constructor for the tag"
        " 'tag:yaml.org,2002:python/name:os.system'."
    ),
    "a: 1\n---\nb: 2\n": "not valid YAML (bad.yaml, line 2): but found another document; remove the line ---.",
    "run:\n  seed: !!int x\n": "run.seed=x does not fit its type (bad.yaml, line 2): correct it, or remove its tag.",
    "run:\0\n": "not valid YAML (bad.yaml): special characters are not allowed.",
    "[1, 2]\n": "bad.yaml holds [1, 2] instead of sections: begin with a section such as model.",
    "? [a]\n: 1\n": "a key is not text (bad.yaml, line 1): write keys as plain words.",
    "model: &m\n  rope_scaling: *m\n": (
        "model.rope_scaling contains itself (bad.yaml, line 1): write it without the alias."
    ),
    "include: 3\n": "include=3 is not a file (bad.yaml, line 1): write a path or a list of paths.",
    "include: [good.yaml, 3]\n": (
        "include=[good.yaml, 3] is not a file (bad.yaml, line 1): write a path or a list of paths."
    ),
    "run: {}\ninclude: godo.yaml\n": (
        "config file godo.yaml does not exist (bad.yaml, line 2): did you mean good.yaml?"
    ),
}


@pytest.mark.parametrize("text", FILES)
def test_a_bad_file_is_one_sentence_with_its_line(text: str):
    Path("bad.yaml").write_text(text)
    assert message("bad.yaml") == FILES[text]


def test_an_include_circle_through_other_directories_is_found():
    Path("models").mkdir()
    Path("a.yaml").write_text("include: models/b.yaml\n")
    Path("models/b.yaml").write_text("run: {}\ninclude:\n- ../a.yaml\n")
    expected = (
        "the includes form a circle, a.yaml -> models/b.yaml -> a.yaml (models/b.yaml, line 2): remove one of them."
    )
    assert message("a.yaml") == expected


def test_a_mistake_in_an_included_file_names_that_file():
    Path("models").mkdir()
    Path("models/m.yaml").write_text(MODEL + "  norm: batch\n")
    Path("main.yaml").write_text("include: models/m.yaml\n" + BATCH + DATA)
    expected = "model.norm=batch is not a choice (models/m.yaml, line 6): use rmsnorm or layernorm."
    assert message("main.yaml") == expected


def test_a_missing_or_unreadable_file_is_named():
    assert message("god.yaml") == "config file god.yaml does not exist: did you mean good.yaml?"
    names = "or the name of one in configs/, such as llama3_8b."
    assert message("no/x.yaml") == f"config file no/x.yaml does not exist: give the path of a YAML file, {names}"
    assert message(".") == "config file . cannot be read, Is a directory: give a YAML file."
    Path("run").mkdir()
    Path("run/config.yaml").touch()
    assert message("run") == "config file run cannot be read, Is a directory: did you mean run/config.yaml?"
    os.mkfifo("pipe.yaml")
    assert message("pipe.yaml") == "config file pipe.yaml cannot be read, it is no regular file: give a YAML file."
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    expected = "config file binary.yaml cannot be read, it is not UTF-8 text: give a YAML file."
    assert message("binary.yaml") == expected


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("DeepSeek-V3", "deepseek_v3"),
        ("meta-llama/Llama-3.1-8B", "llama3_8b"),
        ("Qwen3-235B-A22B", "models/qwen3_235b_a22b"),
        ("Mixtral-8x7B-v0.1", "models/mixtral_8x7b"),
        ("gpt-oss-20b", "models/gpt_oss_20b"),
        ("llama2-70b.yaml", "models/llama2_70b"),
    ],
)
def test_the_name_of_a_model_as_others_write_it_finds_its_config(written: str, name: str):
    assert message(written) == f"config file {written} does not exist: did you mean {name}?"
    Path("includes.yaml").write_text(f"include: {written}\n")
    assert message("includes.yaml").endswith("give the path of a YAML file.")  # a name is no include


def test_files_that_include_each_other_twice_end_with_a_sentence():
    for i in range(40):
        Path(f"i{i}.yaml").write_text(f"include: [i{i + 1}.yaml, i{i + 1}.yaml]\n")
    Path("i40.yaml").write_text("")
    pattern = r"includes 200 files and more \(i\d+.yaml, line 1\): include each file once"
    assert re.search(pattern, message("i0.yaml"))


def test_a_number_in_base_60_is_no_number():
    Path("base.yaml").write_text("include: good.yaml\nrun: {steps: !!int '1:2:3'}\n")
    assert "run.steps=1:2:3 does not fit its type (base.yaml, line 2)" in message("base.yaml")


def test_a_removed_key_of_an_earlier_versions_config_yaml_is_dropped():
    Path("old.yaml").write_text(Path("good.yaml").read_text() + "precision:\n  compute: float32\n  params: float32\n")
    place = f"old.yaml, line {len(Path('old.yaml').read_text().splitlines())}"
    with pytest.warns(UserWarning) as caught:
        config = load_config("old.yaml")
    warning = f"precision.params has no effect ({place}): remove it, the format is always float32."
    assert warning in [str(item.message) for item in caught]
    assert config == load_config("good.yaml", ["precision.compute=float32"])
    assert message("good.yaml", "precision.params=bfloat16") == (
        "precision.params is not a config key (the command line: precision.params=bfloat16): "
        "master weights are always FP32 numbers; optimizer.state is the form of the moments."
    )


def test_a_long_value_is_cut():
    text = message("good.yaml", "run.steps=" + "x" * 100)
    assert text.startswith("run.steps=" + "x" * 57 + "... is not a whole number (")


@pytest.mark.smoke
@pytest.mark.parametrize("words", ["1 token", "0 tokens", "4,096 tokens", "2 processes", "1 process", "2 microbatches"])
def test_nouns_have_the_number_of_their_count(words):
    number, noun = words.split()
    one = {"tokens": "token", "processes": "process", "microbatches": "microbatch"}.get(noun, noun)
    assert counted(int(number.replace(",", "")), one) == words
    assert (counted(2, "entry"), counted(2, "epoch"), counted("0.5", "epoch")) == (
        "2 entries",
        "2 epochs",
        "0.5 epochs",
    )
