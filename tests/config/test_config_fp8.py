"""FP8 settings that cannot run are errors, those without effect are warnings."""

import re
import warnings

import fp8_table
import pytest
from config_errors import first_place

from megajax.config import load_config
from megajax.config.checks import check_mesh
from megajax.errors import ConfigError

pytestmark = pytest.mark.usefixtures("base_config")

BASE = """\
model:
  num_layers: 12
  hidden_size: 64
  num_heads: 8
  num_kv_heads: 4
  head_dim: 16
  ffn_hidden_size: 128
  vocab_size: 1000
batch: {global_size: 8, sequence_length: 32}
data: {kind: synthetic}
"""
FP8 = "precision.fp8."


def _latent(nope: int, rope: int, v: int) -> str:
    """Latent attention with these widths of a head."""
    widths = f"model.qk_nope_head_dim={nope} model.qk_rope_head_dim={rope} model.v_head_dim={v}"
    return f"model.num_kv_heads=8 model.head_dim={nope + rope} {widths}"


LATENT = _latent(16, 16, 16)
DELTA = "model.linear_attention"
EXPERTS, SHARED = "model.num_experts=4 model.experts_per_token=2", "model.shared_expert_ffn_hidden_size"


def test_the_fp8_layers_are_those_between_the_first_and_the_last():
    def layers(*overrides: str) -> range:
        return load_config("x.yaml", [FP8 + override for override in overrides]).fp8_layers

    assert layers() == range(0)
    assert layers("recipe=current") == range(12)
    assert layers("recipe=delayed", "first_bf16_layers=2", "last_bf16_layers=3") == range(2, 9)
    assert layers("recipe=delayed", "first_bf16_layers=11") == range(11, 12)


# Layers; the place is that of the first override.
REFUSED = {
    f"{FP8}first_bf16_layers=12": (
        "precision.fp8.first_bf16_layers=12 and precision.fp8.last_bf16_layers=0 leave no layer of"
        " model.num_layers=12 in FP8 (@): lower them, or set precision.fp8.recipe=none."
    ),
    f"{FP8}last_bf16_layers=7 {FP8}first_bf16_layers=5": (
        "precision.fp8.first_bf16_layers=5 and precision.fp8.last_bf16_layers=7 leave no layer of"
        " model.num_layers=12 in FP8 (the command line: precision.fp8.first_bf16_layers=5): lower them,"
        " or set precision.fp8.recipe=none."
    ),
    f"{FP8}first_bf16_layers=3 remat.policy=full remat.group=2": (
        "precision.fp8.first_bf16_layers=3 starts or ends FP8 at layer 3, inside a group of"
        " remat.group=2 (@): make that layer a multiple of remat.group, or set remat.group=1."
    ),
    f"{FP8}last_bf16_layers=2 {FP8}first_bf16_layers=3 remat.policy=full remat.group=3": (
        "precision.fp8.last_bf16_layers=2 starts or ends FP8 at layer 10, inside a group of"
        " remat.group=3 (@): make that layer a multiple of remat.group, or set remat.group=1."
    ),
    f"{FP8}last_bf16_layers=6 remat.policy=full remat.group=4 remat.layers=8": (
        "precision.fp8.last_bf16_layers=6 starts or ends FP8 at layer 6, inside a group of remat.group=4"
        " (@): make that layer a multiple of remat.group, or set remat.group=1."
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("overrides", REFUSED)
def test_an_impossible_choice_of_layers_is_refused(overrides: str):
    settings = overrides.split()
    with pytest.raises(ConfigError) as caught:
        load_config("x.yaml", [*settings, f"{FP8}recipe=current"])
    assert first_place(str(caught.value)) == REFUSED[overrides].replace("@", f"the command line: {settings[0]}")


# overrides, devices, the value that is not a multiple of 16
SHAPES = [
    ("model.hidden_size=72", 1, "model.hidden_size=72 is not one"),
    ("model.ffn_hidden_size=136", 1, "model.ffn_hidden_size=136 / mesh.tensor=1 is 136"),
    ("mesh.tensor=2 model.ffn_hidden_size=112", 2, "model.ffn_hidden_size=112 / mesh.tensor=2 is 56"),
    ("mesh.tensor=-1 model.head_dim=8", 8, "model.num_heads=8 x model.head_dim=8 / mesh.tensor=8 (from -1) is 8"),
    # Four KV heads on eight devices: each has one of them whole.
    (
        "mesh.tensor=8 model.head_dim=24 model.num_heads=16",
        8,
        "model.num_kv_heads=4 x model.head_dim=24 / mesh.tensor=8 is 24",
    ),
    # 8 sequences of 34 tokens in 2 microbatches, on 2 x 2 devices: 1 x 34.
    (
        "mesh.data=2 mesh.fsdp=2 batch.num_microbatches=2 batch.sequence_length=34",
        4,
        "the tokens of a microbatch on one device / mesh.tensor=1 is 34",
    ),
    ("mesh.data=8 batch.sequence_length=24", 8, "the tokens of a microbatch on one device / mesh.tensor=1 is 24"),
    (
        "mesh.data=2 mesh.tensor=4 batch.sequence_length=40",
        8,
        "the tokens of a microbatch on one device / mesh.tensor=4 is 40",
    ),
    (f"{LATENT} model.kv_lora_rank=24", 1, "model.kv_lora_rank=24 is not one"),
    (f"{LATENT} model.kv_lora_rank=16 model.q_lora_rank=24", 1, "model.q_lora_rank=24 is not one"),
    (f"{_latent(16, 24, 16)} model.kv_lora_rank=16", 1, "model.qk_rope_head_dim=24 is not one"),
    # A head on each device: together the eight have a multiple.
    *(
        (
            f"{_latent(nope, 16, v)} model.kv_lora_rank=16 mesh.tensor=8",
            8,
            f"model.num_heads=8 x model.{width}=24 / mesh.tensor=8 is 24",
        )
        for nope, v, width in ((24, 16, "qk_nope_head_dim"), (16, 24, "v_head_dim"))
    ),
    *(
        (
            f"model.block_pattern=[{block}] model.{section}.{number}=1 model.{section}.{width}=24 {others}",
            1,
            f"model.{section}.{number}=1 x model.{section}.{width}=24 / mesh.tensor=1 is 24",
        )
        for block, section, number, width, others in (
            ("gated_deltanet", "linear_attention", "num_key_heads", "key_head_dim", ""),
            ("gated_deltanet", "linear_attention", "num_value_heads", "value_head_dim", f"{DELTA}.num_key_heads=1"),
            ("kda", "kda", "num_heads", "head_dim", ""),
            ("mamba2", "mamba2", "num_groups", "state_dim", ""),
            ("mamba2", "mamba2", "num_heads", "head_dim", "model.mamba2.num_groups=1"),
        )
    ),
    (f"{EXPERTS} model.expert_ffn_hidden_size=72", 1, "model.expert_ffn_hidden_size=72 / mesh.tensor=1 is 72"),
    (f"{EXPERTS} {SHARED}=24", 1, f"{SHARED}=24 / mesh.tensor=1 is 24"),
]


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize(("overrides", "devices", "problem"), SHAPES)
def test_shapes_that_are_no_multiple_of_sixteen_are_refused(overrides, devices, problem, recipe):
    config = load_config("x.yaml", [*overrides.split(), f"{FP8}recipe={recipe}"])
    with pytest.raises(ConfigError) as caught:
        check_mesh(config, devices)
    assert first_place(str(caught.value)) == (
        f"precision.fp8.recipe={recipe} needs multiples of 16, but {problem}"
        f" (the command line: precision.fp8.recipe={recipe}): change it, or set precision.fp8.recipe=none."
    )


@pytest.mark.parametrize(("overrides", "devices"), [case[:2] for case in SHAPES])
def test_without_fp8_the_same_shapes_are_allowed(overrides, devices):
    check_mesh(load_config("x.yaml", overrides.split()), devices)


ALLOWED = [
    # Whole groups of two: 2, 6 and 4 layers.
    ("recipe=current first_bf16_layers=2 last_bf16_layers=4", "remat.policy=full remat.group=2", 1),
    ("recipe=current first_bf16_layers=6 last_bf16_layers=5", "", 1),
    ("recipe=delayed amax_history_length=4 amax_algorithm=most_recent margin=1 format=e4m3", "mesh.tensor=8", 8),
    ("recipe=current backend=transformer_engine", "mesh.data=2 mesh.fsdp=2 mesh.tensor=2", 8),
    ("recipe=delayed", "mesh.fsdp=8 batch.sequence_length=16", 8),
    # Layer 5 is in no group.
    ("recipe=current first_bf16_layers=5", "remat.policy=full remat.group=2 remat.layers=4", 1),
    # A device that has whole experts has their whole width.
    ("recipe=current", "mesh.tensor=2 mesh.experts_over=[tensor] model.num_experts=2 model.ffn_hidden_size=48", 2),
]


@pytest.mark.parametrize(("fp8", "others", "devices"), ALLOWED)
def test_a_sound_choice_passes_without_a_warning(fp8, others, devices):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config("x.yaml", [*(FP8 + setting for setting in fp8.split()), *others.split()])
        check_mesh(config, devices)


def test_a_microbatch_has_fewer_than_two_to_the_31_numbers_of_a_width():
    """2^17 tokens of a gated MLP: gate and up of 8176 each are below it, of 8192 they are it.

    And of attention: queries, keys and values of 85 heads of 64 are 16320, of 86 heads 16512.
    """
    big = ["batch={global_size: 1, num_microbatches: 1, sequence_length: 131072}", f"{FP8}recipe=current"]
    check_mesh(load_config("x.yaml", [*big, "model.ffn_hidden_size=8176"]), 1)
    with pytest.raises(ConfigError, match="fewer than 2\\^31 numbers at once, but .* 131072 tokens of 16384 numbers"):
        check_mesh(load_config("x.yaml", [*big, "model.ffn_hidden_size=8192"]), 1)
    check_mesh(load_config("x.yaml", [*big, "model.ffn_hidden_size=8192", "mesh.tensor=2"]), 2)  # a half on a device
    heads = "model.head_dim=64 model.num_heads={0} model.num_kv_heads={0}"
    check_mesh(load_config("x.yaml", [*big, *heads.format(85).split()]), 1)
    with pytest.raises(ConfigError, match="131072 tokens of 16512 numbers"):
        check_mesh(load_config("x.yaml", [*big, *heads.format(86).split()]), 1)


# For each setting another value than its default; delayed scaling reads them all.
OTHER_VALUES = {
    "backend": "transformer_engine",
    "format": "e4m3",
    "amax_history_length": "16",
    "amax_algorithm": "most_recent",
    "margin": "1",
    "first_bf16_layers": "2",
    "last_bf16_layers": "2",
}
ONLY_DELAYED = {"amax_history_length", "amax_algorithm", "margin"}


@pytest.mark.parametrize("recipe", ["none", "current", "delayed"])
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_setting_that_the_recipe_does_not_read_is_warned_about(name: str, recipe: str):
    override = f"{FP8}{name}={OTHER_VALUES[name]}"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_config("x.yaml", [f"{FP8}recipe={recipe}", override])
    expected = f"{override} has no effect with precision.fp8.recipe={recipe} (the command line: {override}): remove it."
    read = recipe == "delayed" or (recipe == "current" and name not in ONLY_DELAYED)
    assert [str(item.message) for item in caught] == ([] if read else [expected])


@pytest.mark.parametrize(
    "setting", ["recipe=always", "format=e5m2", "backend=cublas", "amax_history_length=0", "margin=-1"]
)
def test_a_value_that_is_none_of_the_choices_is_refused(setting: str):
    with pytest.raises(ConfigError, match=re.escape(f"{FP8}{setting.split('=')[0]}")):
        load_config("x.yaml", [f"{FP8}{setting}"])


@pytest.mark.smoke
def test_the_table_of_gpus_in_the_docs_is_that_of_the_code():
    text = fp8_table.DOCS.read_text(encoding="utf-8")
    assert text.partition(fp8_table.START)[2].partition(fp8_table.END)[0].strip() == fp8_table.table()
