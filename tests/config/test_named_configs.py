"""The configs that come with megajax: they resolve, read back, are short, and have the published sizes.

`named_configs.txt` lists the keys of each config that differ from the defaults; run this file to rewrite it.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from megajax.config import Config, ModelConfig, load_config
from megajax.config.checks import check_mesh
from megajax.model import Transformer
from megajax.model import parameters as declared
from megajax.schema.layer_sections import RopeScaling

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).with_name("named_configs.txt")
RECIPES = {
    # name, device counts from its comment
    "deepseek_500m": (1,),
    "deepseek_v3": (1024,),
    "dsv2lite_l6": (1, 2, 4),
    "dsv3_l4_e16": (1, 2),
    "gated_deltanet_2b": (1, 2, 4),
    "kda_2b": (1, 2, 4),
    "gpt3_125m": (1, 2, 4, 8),
    "gpt3_175b": (128,),
    "llama_100m": (1,),
    "llama3_1b": (1, 2, 4, 8),
    "llama3_405b": (512,),
    "llama3_70b": (64,),
    "llama3_8b": (8,),
    "llama3_8b_l16_pipeline": (4,),
    "llama3_8b_l8": (1, 2, 4),
    "llama3_8b_l8_context": (4,),
    "long_128k": (8,),
    "long_1m": (64,),
    "mamba2_2b": (1, 2, 4),
    "mixtral_8x22b": (128,),
    "mixtral_l2": (1, 2, 4),
    "moe_1b": (1,),
    "nemotron3_nano_l7": (1, 4),
    "quickstart": (1, 2, 4, 8),
    "qwen3_235b": (256,),
    "qwen3_30b_l6": (1, 2, 4),
    "qwen3_next_l4": (1, 4),
}
# The sizes of the published weights: those of the tensors in the models' folders on Hugging Face.
PARAMETERS = {
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    # Llama 3.2 1B has 1,235,814,400 with a tied head; ours adds an untied one of 128256 x 2048.
    "llama3_1b": 1_235_814_400 + 128_256 * 2048,
    # Llama 3 8B less 24 blocks of 218,112,000.
    "llama3_8b_l8": 8_030_261_248 - 24 * 218_112_000,
    # Less 16 of them, and with a vocabulary of 32768.
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_630_071_296,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 81_324_862_720,
    "flan_t5_large": 783_150_080,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    # DeepSeek-V3 without its module of multi-token prediction and without the bias of the experts' choice.
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
    # The language models of Qwen3.5, without the module of multi-token prediction, as transformers counts them
    "qwen3_5_9b": 8_953_803_264,
    "qwen3_5_35b_a3b": 34_660_610_688,
    "granite_4_0_h_tiny": 6_939_037_248,
    "bamba_9b": 9_780_235_392,
    "mamba2_2_7b": 2_702_599_680,
    "modernbert_base": 149_655_232,
    "modernbert_large": 395_881_664,
    "falcon_h1_0_5b": 521_411_104,
    # With images. Without CLIP's last layer and the norm after it, which LLaVA does not use
    "llava_1_5_7b": 7_063_427_072 - 12_596_224 - 2048,
    "gemma3_4b": 4_300_079_472,
    "qwen2_vl_7b": 8_291_375_616,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen3_vl_8b": 8_767_123_696,
    "llama3_8b_l16": 8_030_261_248 - 16 * 218_112_000 - 2 * (128_256 - 32_768) * 4096,
}
# (as printed, tolerance of the rounding)
ROUNDED_PARAMETERS = {
    # GPT-3: table 2.1 of its paper (Brown et al. 2020)
    "gpt3_125m": (125e6, 0.015),
    "gpt3_1b3": (1.3e9, 0.015),
    "gpt3_6b7": (6.7e9, 0.015),
    "gpt3_175b": (175e9, 0.015),
    # Nemotron-4 340B: 9.4 and 331.6 billion, of the embeddings and of all else, in section 2 of its report
    "nemotron4_340b": (9.4e9 + 331.6e9, 0.0003),
    # The folders on Hugging Face
    "deepseek_v2": (235.7e9, 0.0003),
    "moonlight_16b_a3b": (15.96e9, 0.0003),
    "kimi_k2": (1.026e12, 0.001),
    # The folder on Hugging Face: "49B params" of Kimi-Linear-48B-A3B
    "kimi_linear_48b_a3b": (49e9, 0.01),
    # Its report (2025)
    "nemotron3_nano_30b_a3b": (31.6e9, 0.002),
}


def load_model(name: str) -> ModelConfig:
    run = ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]
    run += ["objective.kind=masked_tokens"] if name.startswith("modernbert") else []
    return load_config(ROOT / f"configs/models/{name}.yaml", run).model


def parameters(m: ModelConfig, **changes: int) -> dict[str, int]:
    """The size of each parameter that the model declares, without padding of the vocabulary; nothing is allocated."""
    model = Transformer(m.model_copy(update={"vocab_multiple": 1, **changes}))
    return {name: math.prod(p.shape) for name, p in declared(model).items()}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    return {key: value for name in values for key, value in flat(values[name], f"{prefix}{name}.").items()}


def differences(name: str) -> str:
    """The recipe's resolved keys that differ from a config with only the required ones, as text."""
    sizes = {"num_layers": 1, "hidden_size": 1, "num_heads": 1, "vocab_size": 1}
    base = Config.model_validate({"model": sizes, "batch": {"global_size": 1, "sequence_length": 1}})
    plain = flat(base.model_dump(mode="json"))
    values = flat(load_config(ROOT / f"configs/{name}.yaml").model_dump(mode="json"))
    changed = [f"  {key} = {value}" for key, value in values.items() if plain.get(key, plain) != value]
    return "\n".join([f"{name}:", *changed])


@pytest.mark.smoke
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_the_published_number_of_parameters(name: str):
    without_module = {"mtp_layers": 0} if name.startswith("qwen3_5") else {}
    assert sum(parameters(load_model(name), **without_module).values()) == PARAMETERS[name]


@pytest.mark.parametrize("name", ROUNDED_PARAMETERS)
def test_a_model_has_the_published_rounded_number_of_parameters(name: str):
    published, tolerance = ROUNDED_PARAMETERS[name]
    assert sum(parameters(load_model(name)).values()) == pytest.approx(published, rel=tolerance)


def test_gpt3_small_with_1024_positions_is_gpt2_small():
    assert sum(parameters(load_model("gpt3_125m"), max_positions=1024).values()) == 124_439_808


def test_nemotron4_has_the_two_published_counts_of_parameters():
    sizes = parameters(load_model("nemotron4_340b"))
    embeddings = sizes.pop("embedding.tokens") + sizes.pop("head")
    assert (round(embeddings / 1e9, 1), round(sum(sizes.values()) / 1e9, 1)) == (9.4, 331.6)


def test_deepseek_v3_has_the_published_parameters_with_its_module():
    """685 billion: the folder repeats embedding and head in the module of multi-token prediction."""
    sizes = parameters(load_model("deepseek_v3"), mtp_layers=1)
    repeated = sizes["embedding.tokens"] + sizes["head"]
    assert sum(sizes.values()) + repeated == pytest.approx(685e9, rel=1e-3)


def test_rotary_positions_are_as_published():
    assert load_model("llama2_70b").rope_theta == 10000
    assert load_model("llama3_8b").rope_theta == load_model("llama3_70b").rope_theta == 500000
    assert load_model("llama3_8b").rope_scaling is load_model("llama3_70b").rope_scaling is None
    scaling = load_model("llama3_405b").rope_scaling
    assert scaling is not None
    assert scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )


def test_every_file_in_configs_is_tested_here():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(RECIPES)
    models = {path.stem for path in (ROOT / "configs/models").glob("*.yaml")}
    assert models == set(PARAMETERS) | set(ROUNDED_PARAMETERS)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_without_warnings_fits_its_devices_and_reads_back(name: str, tmp_path: Path):
    path = ROOT / f"configs/{name}.yaml"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = load_config(path)
        (tmp_path / "printed.yaml").write_text(config.to_yaml())
        assert load_config(tmp_path / "printed.yaml") == config
    for devices in RECIPES[name]:
        check_mesh(config, devices)
    assert len(path.read_text().splitlines()) < 40
    assert config.run.name == name


@pytest.mark.parametrize("name", [*PARAMETERS, *ROUNDED_PARAMETERS])
def test_a_model_file_has_only_a_model_section_and_few_lines(name: str):
    text = (ROOT / f"configs/models/{name}.yaml").read_text()
    sections = [line for line in text.splitlines() if line[0] not in " #"]
    assert [line.partition(":")[0] for line in sections if not line.startswith("include")] == ["model"]
    assert len(text.splitlines()) <= (32 if "vision:" in text else 22)


def test_quickstart_runs_on_every_mesh_of_up_to_8_devices_and_4_microbatches():
    path = ROOT / "configs/quickstart.yaml"
    sizes = (1, 2, 4, 8)
    meshes = [(d, f, t) for d in sizes for f in sizes for t in sizes if d * f * t <= 8]
    for data, fsdp, tensor in meshes:
        for microbatches in (1, 2, 4):
            mesh = f"mesh={{data: {data}, fsdp: {fsdp}, tensor: {tensor}}}"
            config = load_config(path, [mesh, f"batch.num_microbatches={microbatches}"])
            check_mesh(config, data * fsdp * tensor)


def test_the_resolved_recipes_are_the_recorded_ones():
    assert "\n\n".join(differences(name) for name in RECIPES) + "\n" == GOLDEN.read_text()


if __name__ == "__main__":
    GOLDEN.write_text("\n\n".join(differences(name) for name in RECIPES) + "\n")
