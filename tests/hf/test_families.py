"""Folders whose config.json leaves keys out, or that hold a language model beside another for images."""

import contextlib
import json
import math
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.checkpoint.description import describe_model
from megajax.config import ModelConfig, load_config
from megajax.errors import InputError
from megajax.hf.beside import Beside
from megajax.hf.convert import export, family_for, load, longest, read_folder, read_model
from megajax.hf.folder import SINGLE
from megajax.hf.kimi_linear import KimiLinear
from megajax.hf.quantising import StoredForm
from megajax.hf.tensors import Tensor
from megajax.layout.kinds import layer_kinds
from megajax.model import Transformer, parameters

FILES = Path(__file__).parents[1] / "data_files"
# config.json as Google published Gemma 3 4B
GEMMA3_4B = {
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
# config.json as Moonshot published Kimi-Linear-48B-A3B
KIMI_LINEAR = {
    "model_type": "kimi_linear",
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "head_dim": 72,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 27) if layer % 4],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize("name", ["tiny_qwen3_next", "tiny_qwen3_moe_mixed"])
@pytest.mark.parametrize(
    ("step", "plain", "expected"), [(1, [], "1111"), (2, [], "0101"), (1, [0, 1], "0011"), (3, [], "0010")]
)
def test_experts_are_in_every_nth_layer_counted_from_one(unpack, name, step, plain, expected):
    """As transformers has them: (i + 1) % decoder_sparse_step is 0, and not in mlp_only_layers."""
    path = unpack(name) / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if k != "layer_types"} | {"num_hidden_layers": 4}
    path.write_text(json.dumps(config | {"decoder_sparse_step": step, "mlp_only_layers": plain}))
    model = ModelConfig.model_validate(read_model(path.parent))
    assert "".join(str(int(kind.has_experts)) for kind in layer_kinds(model)) == expected


def write_config(folder: Path, config: dict) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.smoke
def test_the_published_config_of_gemma3_4b_is_the_named_config(tmp_path):
    path = Path(__file__).parents[2] / "configs/models/gemma3_4b.yaml"
    expected = load_config(path, ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]).model
    assert ModelConfig.model_validate(read_model(write_config(tmp_path, GEMMA3_4B))) == expected
    sizes = {name: math.prod(p.shape) for name, p in parameters(Transformer(expected)).items()}
    tower = sum(size for name, size in sizes.items() if name.startswith("vision."))
    del sizes["embedding.tokens"]
    rounded = [round(size / 1e6) for size in (tower, sum(sizes.values()) - tower)]
    assert rounded == [420, 3209], "table 1 of the report: 417 for the tower, without the projector, and 3209"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."], ids=["older", "newer"])
def test_the_language_model_of_a_folder_with_images_is_read(tmp_path, prefix):
    with zipfile.ZipFile(FILES / "tiny_gemma3_text.zip") as archive:
        archive.extractall(tmp_path)
    alone = read_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    renamed = {name.replace("model.", prefix, 1): array for name, array in tensors.items()}
    save_file(renamed | {"vision_tower.a.weight": np.ones((2, 3), np.float32)}, tmp_path / SINGLE)
    text = json.loads((tmp_path / "config.json").read_text())
    towers = {"vision_config": {"hidden_size": 3}, "audio_config": {"hidden_size": 3}}
    write_config(tmp_path, {"model_type": "gemma3", "text_config": text, **towers})
    with pytest.warns(UserWarning, match="the model of vision_config and audio_config is not"):
        assert read_folder(tmp_path, with_images=False)[1] == alone

    model = ModelConfig.model_validate(alone | {"vocab_multiple": 1})
    check_weights(tmp_path, model, np.load(FILES / "tiny_gemma3_text.npz"))


@pytest.mark.parametrize(
    ("whole", "text", "with_images", "sentence"),
    [
        *(
            (name, f"{name}_text", False, f"model_type={name} .*model.vision")
            for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
        ),
        ("gemma9", "qwen2_vl_text", False, "model_type=qwen2_vl_text is not known"),
        ("gemma9", "gemma9_text", True, "model_type=gemma9_text is not known"),
    ],
)
def test_a_folder_whose_language_model_is_not_read_alone_is_an_error_without_a_warning(
    tmp_path, recwarn, whole, text, with_images, sentence
):
    config = {"model_type": whole, "text_config": {"model_type": text}, "vision_config": {"depth": 3}}
    write_config(tmp_path, config)
    with pytest.raises(InputError, match=sentence):
        read_folder(tmp_path, with_images)
    assert not recwarn.list


def check_weights(folder: Path, model: ModelConfig, expected) -> None:
    """The parameters that are read from a folder are the expected ones."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    declared = parameters(Transformer(model)).items()
    shapes = {name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=device) for name, p in declared}
    for name, array in load(folder, shapes, {}, model, "folder")[0].items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # every second layer has a window, the last of four is not rotated, half of each head is
        ({"model_type": "gemma2", "num_hidden_layers": 4}, {"layer_pattern": ("local", "global")}),
        ({"model_type": "smollm3", "num_hidden_layers": 8}, {"rope_pattern": ("rope", "rope", "rope", "none")}),
        ({"model_type": "nemotron", "num_hidden_layers": 2}, {"rope_fraction": 0.5, "activation": "relu2"}),
        ({"model_type": "olmo2", "num_hidden_layers": 2, "num_key_value_heads": None}, {"num_kv_heads": 4}),
        ({"model_type": "qwen3", "num_hidden_layers": 2}, {"head_dim": 128}),
        ({"model_type": "qwen3_moe", "num_hidden_layers": 2} | EXPERTS, {"head_dim": 16, "sliding_window": None}),
    ],
    ids=lambda value: value.get("model_type"),
)
def test_keys_that_config_json_leaves_out_have_the_family_s_defaults(tmp_path, config, expected):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 96}
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, sizes | config)))
    assert {name: getattr(model, name) for name in expected} == expected


@pytest.mark.smoke
def test_options_of_published_families_that_few_models_set_are_kept_or_refused(tmp_path):
    """Expected is what transformers 5 computes with these keys."""

    def model_of(**config):
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 50, "intermediate_size": 96}
        return ModelConfig.model_validate(read_model(write_config(tmp_path, sizes | config)))

    # Scores that are not divided by the root of the width
    unscaled = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 50, "scale_attn_weights": False}
    gpt2 = ModelConfig.model_validate(read_model(write_config(tmp_path, {"model_type": "gpt2"} | unscaled)))
    assert gpt2.attention_scale == 1.0 and family_for(gpt2).write(gpt2)["scale_attn_weights"] is False
    positions = {"model_type": "gpt2", "n_positions": 48} | unscaled  # as the table of the learned ones
    assert longest(read_model(write_config(tmp_path, positions)), positions) == 48
    assert longest({}, {"model_type": "mamba2"}) == 2048
    # GPT-2 with a head of its own, which is stored as torch's [out, in]
    untied = ModelConfig.model_validate(
        read_model(write_config(tmp_path, {"model_type": "gpt2"} | unscaled | {"tie_word_embeddings": False}))
    )
    heads = {own.ours: own.theirs for own in family_for(untied).tensors(untied) if own.ours == "head"}
    assert heads == {"head": "lm_head.weight"} and family_for(untied).write(untied)["tie_word_embeddings"] is False
    assert not any(own.ours == "head" for own in family_for(gpt2).tensors(gpt2))
    with pytest.raises(InputError, match="attention_scale=0.5"):
        family_for(gpt2.model_copy(update={"attention_scale": 0.5}))
    # transformers needs a window also where no layer has one
    gemma2 = model_of(model_type="gemma2", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    assert gemma2.sliding_window is None and family_for(gemma2).write(gemma2)["sliding_window"] == 4096
    with pytest.raises(InputError, match="attn_logit_softcapping=20.0 is not null"):
        model_of(model_type="gemma3_text", num_hidden_layers=2, attn_logit_softcapping=20.0)
    # Versions of transformers differ in which layers of Qwen3-MoE have the window, unless all have it
    windows = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 8}
    assert model_of(**windows, **EXPERTS, max_window_layers=0).sliding_window == 8
    with pytest.raises(InputError, match="use_sliding_window=true with max_window_layers=1"):
        model_of(**windows, **EXPERTS, max_window_layers=1)
    for normalised in (False, True):  # of the scores of all experts
        router = model_of(model_type="qwen3_moe", num_hidden_layers=2, **EXPERTS, norm_topk_prob=normalised).router
        assert (router.pre_softmax, router.normalise) == (not normalised, normalised)
    everywhere = model_of(**windows | {"model_type": "qwen3", "max_window_layers": 0})
    assert everywhere.layer_pattern is None and family_for(everywhere).model_type == "qwen3"
    with pytest.raises(InputError, match="mlp_bias=true"):  # transformers' OLMo 2 has no such biases
        model_of(model_type="olmo2", num_hidden_layers=2, mlp_bias=True)
    # Versions and kernels of transformers differ
    with pytest.raises(InputError, match="sliding_window_pattern=3 without layer_types"):
        model_of(model_type="gemma2", num_hidden_layers=3, sliding_window_pattern=3)
    local = {"layer_types": ["sliding_attention"] * 4, "sliding_window": 8}
    with pytest.raises(InputError, match="use_sliding_window=false with sliding_attention in layer_types"):
        model_of(model_type="smollm3", num_hidden_layers=4, **local)
    assert model_of(model_type="smollm3", num_hidden_layers=4, **local, use_sliding_window=True).sliding_window == 8
    with pytest.raises(InputError, match="no_rope_layers has 2 entries, but the model has 4 layers"):
        model_of(model_type="smollm3", num_hidden_layers=4, no_rope_layers=[1, 0])


MAMBA = {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_head": 64, "mamba_d_state": 128}
MAMBA |= {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_proj_bias": False, "rms_norm_eps": 1e-5}
ROPE = {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25}
ROPE |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
QWEN3_5 = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128}
QWEN3_5 |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128}
QWEN3_5 |= {"mtp_num_hidden_layers": 1, "vocab_size": 248_320, "rope_parameters": ROPE, "rms_norm_eps": 1e-6}
QWEN3_5 |= {"num_attention_heads": 16, "head_dim": 256, "attn_output_gate": True}
EXPERTS_OF_35B = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
EXPERTS_OF_35B |= {"shared_expert_intermediate_size": 512, "model_type": "qwen3_5_moe_text"}
NINE = ["mamba"] * 9
# config.json as published, without keys that are no part of the network
PUBLISHED = {
    "qwen3_5_9b": {
        "model_type": "qwen3_5",
        "text_config": {"model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096}
        | {"num_key_value_heads": 4, "intermediate_size": 12_288}
        | QWEN3_5,
        "vision_config": {"depth": 27},
    },
    "qwen3_5_35b_a3b": {
        "model_type": "qwen3_5_moe",
        "text_config": EXPERTS_OF_35B
        | {"num_hidden_layers": 40, "hidden_size": 2048, "num_key_value_heads": 2}
        | QWEN3_5,
        "vision_config": {"depth": 27},
    },
    "granite_4_0_h_tiny": {"model_type": "granitemoehybrid", "hidden_size": 1536, "num_hidden_layers": 40}
    | {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100_352, "tie_word_embeddings": True}
    | {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512, "shared_intermediate_size": 1024}
    | {"embedding_multiplier": 12.0, "logits_scaling": 6.0, "residual_multiplier": 0.22}
    | {"attention_multiplier": 0.0078125, "position_embedding_type": "nope", "mamba_n_heads": 48}
    | {"layer_types": ["mamba"] * 5 + (["attention"] + NINE) * 3 + ["attention"] + ["mamba"] * 4}
    | MAMBA,
    "bamba_9b": {"model_type": "bamba", "vocab_size": 128_256, "attn_layer_indices": [9, 18, 27]}
    | MAMBA
    | {"mamba_n_heads": 128, "time_step_limit": [0.0, float("inf")]},
    "mamba2_2_7b": {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50_288}
    | {
        "num_heads": 80,
        "n_groups": 1,
        "tie_word_embeddings": True,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
    "falcon_h1_0_5b": {"model_type": "falcon_h1", "hidden_size": 1024, "num_hidden_layers": 36, "head_dim": 64}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 2048, "vocab_size": 32_784}
    | {"rope_theta": 1e11, "mamba_n_heads": 24, "mamba_d_ssm": 1536, "mamba_norm_before_gate": False}
    | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "key_multiplier": 0.39062499999999994}
    | {"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625, "ssm_in_multiplier": 1.25}
    | {"ssm_out_multiplier": 0.23570226039551587, "mlp_multipliers": [0.8838834764831844, 0.5859375]}
    | {"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]}
    | MAMBA,
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_config_of_a_hybrid_is_that_of_configs_and_is_written_again(tmp_path, name):
    config = PUBLISHED[name]
    left_out = "vision_config" in config
    with pytest.warns(UserWarning, match="vision_config") if left_out else contextlib.nullcontext():
        section = read_model(write_config(tmp_path, config))
    run = ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]
    ours = load_config(Path(__file__).parents[2] / f"configs/models/{name}.yaml", run).model
    assert describe_model(ModelConfig.model_validate(section)) == describe_model(ours)
    text = config.get("text_config", config)
    written = family_for(ours, text["model_type"]).write(ours)
    assert written["model_type"] == text["model_type"]
    multipliers = {key: value for key, value in text.items() if "multiplier" in key or key == "logits_scaling"}
    assert {key: written[key] for key in multipliers} == multipliers


@pytest.mark.smoke
def test_granite_4_without_mamba_is_read_and_written(tmp_path):
    """As Granite-4.0-Micro; hidden_size is no divisor of the default width of Mamba-2's heads."""
    config = {"model_type": "granitemoehybrid", "hidden_size": 2560, "num_hidden_layers": 4, "mamba_n_heads": 80}
    config |= {"num_local_experts": 0, "layer_types": ["attention"] * 4, "position_embedding_type": "rope"}
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, config)))
    written = family_for(model).write(model)
    assert (written["model_type"], written["layer_types"]) == ("granitemoehybrid", ["full_attention"] * 4)
    assert written["mamba_n_heads"] * written["mamba_d_head"] == written["mamba_expand"] * 2560


def test_multipliers_of_an_input_are_not_those_of_biases(tmp_path):
    """Falcon-H1's keys are (W (in · x) + b) · key, and its other biases have the multiplier of their output alone."""
    biased = PUBLISHED["falcon_h1_0_5b"] | {"attention_bias": True, "mlp_bias": True}
    biased |= {"attention_in_multiplier": 4.0, "key_multiplier": 0.5}
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, biased)))
    found = {t.ours.split(".", 2)[-1]: t.factor for t in family_for(model, "falcon_h1").tensors(model)}
    gate, down = biased["mlp_multipliers"]
    names = "query_bias key_bias value_bias output_bias".split()
    assert [found[f"attention.{name}"] for name in names] == [1, 0.5, 1, 0.9375]
    assert [found[f"mlp.{name}_bias"] for name in ("gate", "up", "down")] == [gate, 1, down]
    assert [found[f"attention.{name}"] for name in ("query", "key", "value")] == [4, 2, 4]


@pytest.mark.parametrize("experts", [64, 0])
def test_the_residual_multiplier_of_granite_is_that_of_all_outputs_and_their_biases(tmp_path, experts):
    """transformers adds residual_multiplier times the output of attention or Mamba-2 and of the MLP or experts."""
    biased = PUBLISHED["granite_4_0_h_tiny"] | {"attention_bias": True, "num_local_experts": experts}
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, biased)))
    tensors = family_for(model, "granitemoehybrid").tensors(model)
    found = {t.ours.rpartition(".")[2] for t in tensors if t.ours.startswith("blocks.") and t.factor == 0.22}
    assert found == {"output", "output_bias", "down"} | ({"shared_down"} if experts else set())
    assert {t.factor for t in tensors if t.ours.startswith("blocks.")} == {0.22, 1}


@pytest.mark.parametrize(("norm_first", "ours"), [(True, "before_gate"), (False, "after_gate")])
def test_falcons_norm_of_mamba_is_before_or_after_the_gate(tmp_path, norm_first, ours):
    """transformers' FalconH1RMSNormGated gates the normalised output, or normalises the gated one."""
    config = PUBLISHED["falcon_h1_0_5b"] | {"mamba_rms_norm": True, "mamba_norm_before_gate": norm_first}
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, config)))
    assert model.mamba2.output_norm == ours
    written = family_for(model, "falcon_h1").write(model)
    assert (written["mamba_rms_norm"], written["mamba_norm_before_gate"]) == (True, norm_first)


@pytest.mark.smoke
def test_multipliers_are_undone_exactly_for_all_numbers_of_bfloat16():
    """Every finite BF16 number, times the factors of published models, in FP32 and back."""
    numbers = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    wide = numbers.astype(np.float32)
    numbers = numbers[np.isfinite(wide) & ((wide == 0) | (np.abs(wide) > 1e-30)) & (np.abs(wide) < 1e30)]
    for factor in (12.0, 1 / 72, 0.22, 5.656854249492381, 0.39062499999999994, 1.25 * 0.3535533905932738):
        tensor = Tensor("a", "b", factor=factor)
        product = tensor.multiplied(numbers)
        assert np.array_equal(tensor.divided(product).astype(numbers.dtype), numbers), factor
        other = (numbers + numbers).astype(np.float32)
        assert np.array_equal(tensor.as_in_folder(product, numbers), numbers.astype(np.float32))
        assert not np.array_equal(tensor.as_in_folder(other, numbers), numbers.astype(np.float32))


LOCALLY_SCALED = {"full_attention": {"rope_type": "default"}}
LOCALLY_SCALED |= {"sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
IN_BOTH = KIMI_LINEAR["linear_attn_config"] | {"full_attn_layers": [1, 4, 8, 12, 16, 20, 24, 27]}


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("family", "change", "key"),
    [
        ("granitemoehybrid", {"residual_multiplier": 0.0}, "residual_multiplier=0"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "has no ssm_multipliers.2"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias=True"),
        ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias=False"),
        ("bamba", {"time_step_limit": [0.0, 0.1]}, "time_step_limit"),
        ("mamba2", {"expand": 3}, "num_heads=128 times head_dim=64"),
        ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attn"]}, "layer_types has attn"),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe"], "num_hidden_layers": 3}, "num_hidden_layers=3"),
        ("qwen3_next", {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers=2 is not 0 or 1"),
        ("qwen3_next", {"num_hidden_layers": 1, "layer_types": ["mamba"]}, "layer_types=mamba is not"),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, "mlp_only_layers=[0, 2] are not the first layers"),
        ("modernbert", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ("modernbert", {"rope_parameters": {"full_attention": YARN}}, "rope_type=yarn"),
        ("modernbert", {"rope_parameters": {"sliding_attention": YARN}}, "rope_type=yarn"),
        ("gemma3_text", {"rope_parameters": LOCALLY_SCALED}, "rope_parameters.sliding_attention.rope_type=linear"),
        ("kimi_linear", KIMI_LINEAR | {"linear_attn_config": IN_BOTH}, "layer 1 in none or both of its lists"),
        ("kimi_linear", KIMI_LINEAR | {"layer_types": ["mamba"] * 27}, "layer_types=mamba is not"),
        ("qwen3_vl", {"vision_config": {"deepstack_visual_indexes": [3, 1]}}, "deepstack_visual_indexes=[3, 1]"),
        ("llava", {"vision_feature_layer": 40}, "vision_feature_layer=40"),
    ],
)
def test_what_a_hybrid_cannot_have_is_refused_by_its_key(tmp_path, family, change, key):
    with pytest.raises(InputError) as error:
        read_model(write_config(tmp_path, {"model_type": family} | change))
    assert key in str(error.value)


def test_all_experts_in_one_tensor_are_read_as_qwen3_5_is_published(tmp_path):
    with zipfile.ZipFile(FILES / "tiny_qwen3_5_moe_text.zip") as archive:
        archive.extractall(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts."
        own = {
            name: [tensors.pop(f"{experts}{e}.{name}_proj.weight") for e in range(4)] for name in ("gate", "up", "down")
        }
        halves = [np.concatenate(pair) for pair in zip(own["gate"], own["up"], strict=True)]
        tensors |= {f"{experts}gate_up_proj": np.stack(halves), f"{experts}down_proj": np.stack(own["down"])}
    save_file(tensors, tmp_path / SINGLE)
    model = ModelConfig.model_validate(read_model(tmp_path) | {"vocab_multiple": 1})
    check_weights(tmp_path, model, np.load(FILES / "tiny_qwen3_5_moe_text.npz"))


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_the_module_of_qwen3_next_and_5_is_under_its_published_names(tmp_path, family):
    """transformers leaves it out; the shapes are those of the published folder, for these widths."""
    with zipfile.ZipFile(FILES / f"tiny_{family}.zip") as archive:
        archive.extractall(tmp_path)
    section = read_model(tmp_path) | {"mtp_layers": 1, "vocab_multiple": 1}
    model, rng = ModelConfig.model_validate(section), np.random.default_rng(0)
    shapes = {name: p.shape for name, p in parameters(Transformer(model)).items()}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    export(weights, model, tmp_path / "out", StoredForm("float32"), Beside(origin=family))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == family
    tensors, D = load_file(tmp_path / "out" / SINGLE), model.hidden_size
    own = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
    np.testing.assert_array_equal(own["mtp.fc.weight"], weights["blocks.mtp.join.projection"][0].T)
    # vLLM's: the norm of the next token's embedding, and that of the model's output
    norms = {"pre_fc_norm_embedding": "join.embedding_norm", "pre_fc_norm_hidden": "join.stream_norm"}
    for theirs, ours in (norms | {"norm": "final_norm"}).items():
        np.testing.assert_array_equal(own[f"mtp.{theirs}.weight"], weights[f"blocks.mtp.{ours}"][0], theirs)
    assert own["mtp.fc.weight"].shape == (D, 2 * D)
    assert own["mtp.layers.0.self_attn.q_proj.weight"].shape == (2 * model.num_heads * model.head_dim, D)
    assert {name.split(".")[2] for name in own if name.startswith("mtp.layers.")} == {"0"}, "experts too"
    check_weights(tmp_path / "out", model, weights)
    if family == "qwen3_next":
        return
    # As published: the language model beside a vision tower, and the module outside of it
    renamed = {name.replace("model.", "model.language_model.", 1): array for name, array in tensors.items()}
    save_file(renamed | {"model.visual.a.weight": np.ones((2, 3), np.float32)}, tmp_path / "out" / SINGLE)
    text = json.loads((tmp_path / "out" / "config.json").read_text())
    write_config(tmp_path / "out", {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 3}})
    with pytest.warns(UserWarning, match="vision_config"):
        check_weights(tmp_path / "out", model, weights)


@pytest.mark.parametrize("key", ["mlp_only_layers", "decoder_sparse_step", "norm_topk_prob"])
def test_keys_of_qwen3_next_are_none_of_qwen3_5(tmp_path, key):
    """transformers does not read them: all layers have experts, whose weights are normalised."""
    with zipfile.ZipFile(FILES / "tiny_qwen3_5_moe_text.zip") as archive:
        config = json.loads(archive.read("config.json"))
    other = {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False}[key]
    assert key not in config
    section = read_model(write_config(tmp_path, config))
    assert read_model(write_config(tmp_path, config | {key: other})) == section


def test_kimi_linear_as_it_was_published(tmp_path):
    """Its layers are in linear_attn_config, from 1, and its first layer's MLP is not named an expert."""
    path = Path(__file__).parents[2] / "configs/models/kimi_linear_48b_a3b.yaml"
    expected = load_config(path, ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]).model
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, KIMI_LINEAR)))
    assert model == expected
    read = {
        key: value for key, value in KIMI_LINEAR.items() if key not in ("head_dim", "model_max_length", "rope_theta")
    }
    assert KimiLinear().write(model).items() >= read.items()
    names = {tensor.theirs.format(layer=0, expert=0) for tensor in KimiLinear().tensors(model)}
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.block_sparse_moe.experts.0.w3.weight"} <= names
    for key, value in (("mla_use_nope", False), ("linear_attn_config", {"gate_lower_bound": -5.0})):
        with pytest.raises(InputError, match=key):
            read_model(write_config(tmp_path, KIMI_LINEAR | {key: value}))
