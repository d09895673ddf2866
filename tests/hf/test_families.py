"""Folders whose config.json leaves keys out, or that hold a language model beside another for images."""

import json
import math
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.config import ModelConfig, load_config
from megajax.errors import InputError
from megajax.hf.convert import export, family_for, load, read_model
from megajax.hf.folder import SINGLE
from megajax.hf.kimi_linear import KimiLinear
from megajax.layout.kinds import layer_kinds
from megajax.model import Transformer, parameters

FILES = Path(__file__).parents[1] / "data_files"
# config.json as Google published Gemma 3 4B, without the part for images
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
def test_the_published_config_of_gemma3_4b_has_its_layers_positions_and_size(tmp_path):
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, GEMMA3_4B)))
    assert model.layer_pattern == ("local",) * 5 + ("global",) and model.sliding_window == 1024
    assert (model.rope_theta, model.rope_local_theta) == (1e6, 1e4)
    assert model.rope_scaling is not None and (model.rope_scaling.kind, model.rope_scaling.factor) == ("linear", 8)
    sizes = {name: math.prod(p.shape) for name, p in parameters(Transformer(model)).items()}
    del sizes["embedding.tokens"]
    assert round(sum(sizes.values()) / 1e6) == 3209, "as in table 1 of the report, without embeddings"


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."], ids=["older", "newer"])
def test_the_language_model_of_a_folder_with_images_is_read(tmp_path, prefix):
    with zipfile.ZipFile(FILES / "tiny_gemma3_text.zip") as archive:
        archive.extractall(tmp_path)
    alone = read_model(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    renamed = {name.replace("model.", prefix, 1): array for name, array in tensors.items()}
    save_file(renamed | {"vision_tower.a.weight": np.ones((2, 3), np.float32)}, tmp_path / SINGLE)
    text = json.loads((tmp_path / "config.json").read_text())
    write_config(tmp_path, {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 3}})
    assert read_model(tmp_path) == alone

    model = ModelConfig.model_validate(alone | {"vocab_multiple": 1})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    declared = parameters(Transformer(model)).items()
    shapes = {name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=device) for name, p in declared}
    stored = np.load(FILES / "tiny_gemma3_text.npz")
    for name, array in load(tmp_path, shapes, {}, model, "folder")[0].items():
        np.testing.assert_array_equal(array, stored[name], err_msg=name)


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


def test_the_module_of_qwen3_next_is_under_its_published_names(tmp_path):
    """transformers leaves it out; the shapes are those of the published folder, for these widths."""
    with zipfile.ZipFile(FILES / "tiny_qwen3_next.zip") as archive:
        archive.extractall(tmp_path)
    section = read_model(tmp_path) | {"mtp_layers": 1, "vocab_multiple": 1}
    model, rng = ModelConfig.model_validate(section), np.random.default_rng(0)
    shapes = {name: p.shape for name, p in parameters(Transformer(model)).items()}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    export(weights, model, tmp_path / "out", "float32", {})
    tensors, D = load_file(tmp_path / "out" / SINGLE), model.hidden_size
    own = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
    np.testing.assert_array_equal(own["mtp.fc.weight"], weights["blocks.mtp.join.projection"][0].T)
    np.testing.assert_array_equal(own["mtp.norm.weight"], weights["blocks.mtp.final_norm"][0])
    assert own["mtp.fc.weight"].shape == (D, 2 * D) and own["mtp.pre_fc_norm_hidden.weight"].shape == (D,)
    assert own["mtp.layers.0.self_attn.q_proj.weight"].shape == (2 * model.num_heads * model.head_dim, D)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=device) for name, shape in shapes.items()}
    for name, array in load(tmp_path / "out", wanted, {}, model, "folder")[0].items():
        np.testing.assert_array_equal(array, weights[name], err_msg=name)


def test_kimi_linear_as_it_was_published(tmp_path):
    """Its layers are in linear_attn_config, from 1, and its first layer's MLP is not named an expert."""
    path = Path(__file__).parents[2] / "configs/models/kimi_linear_48b_a3b.yaml"
    expected = load_config(path, ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]).model
    model = ModelConfig.model_validate(read_model(write_config(tmp_path, KIMI_LINEAR)))
    assert model == expected
    assert KimiLinear().write(model)["linear_attn_config"] == KIMI_LINEAR["linear_attn_config"]
    names = {tensor.theirs.format(layer=0, expert=0) for tensor in KimiLinear().tensors(model)}
    assert {"model.layers.0.mlp.up_proj.weight", "model.layers.0.block_sparse_moe.experts.0.w3.weight"} <= names
    for key, value in (("mla_use_nope", False), ("linear_attn_config", {"gate_lower_bound": -5.0})):
        with pytest.raises(InputError, match=key):
            read_model(write_config(tmp_path, KIMI_LINEAR | {key: value}))
