"""DeepSeek's folders: the router's bias, quantised tensors, MTP modules, adapters, and what is refused."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import megajax
from megajax.checkpoint.description import describe_model
from megajax.checkpoint.weights import open_model
from megajax.config import Config, ModelConfig, load_config
from megajax.config.checks import check_mesh
from megajax.errors import InputError
from megajax.hf.__main__ import main
from megajax.hf.adapters import _of_module
from megajax.hf.convert import FAMILIES, family_for, read_model
from megajax.hf.deepseek import MODULE
from megajax.hf.folder import SINGLE
from megajax.hf.tensors import assembled
from megajax.mesh import build_mesh
from megajax.model.block import state_by_name
from megajax.model.lora import A, B, low_rank
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

FILES = Path(__file__).parents[1] / "data_files"
V3 = dict(np.load(FILES / "tiny_deepseek_v3.npz"))
BIAS = "blocks.moe.moe.expert_bias"
RUN = {"batch": {"global_size": 8, "num_microbatches": 2, "sequence_length": 16}, "data": {"kind": "synthetic"}}
BLOCK = (16, 8)


@pytest.fixture
def folder(tmp_path) -> Path:
    with zipfile.ZipFile(FILES / "tiny_deepseek_v3.zip") as archive:
        archive.extractall(tmp_path / "folder")
    return tmp_path / "folder"


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read(folder: Path, *, model: Mapping[str, int] = MappingProxyType({}), **mesh: int) -> dict[str, jax.Array]:
    """The parameters and the layers' state of a folder on a mesh of four devices; `model` changes the model's keys."""
    config = Config.model_validate(RUN | {"model": {**read_model(folder), **model}, "mesh": {"data": 1} | mesh})
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    params, state = StateSaver(program).restore_weights(str(folder))
    return params | state_by_name(state)


@pytest.mark.smoke
def test_the_bias_of_the_choice_is_imported_compared_used_and_exported(folder, tmp_path, capsys):
    run_dir = tmp_path / "run"
    assert main(["import", str(folder), str(run_dir)]) == 0
    config = load_config(run_dir / "config.yaml")
    np.testing.assert_array_equal(open_model(run_dir, config.model)[1][BIAS][:], V3[BIAS])
    for model in (megajax.from_hf(folder), megajax.load_run(run_dir)):
        np.testing.assert_array_equal([layer["moe.expert_bias"] for layer in model.weights.state[1:]], V3[BIAS])

    assert main(["export", str(run_dir), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    out = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert out[name].dtype == np.float32 and out["model.norm.weight"].dtype.name == "bfloat16"
    np.testing.assert_array_equal(out[name], V3[BIAS][1])

    assert main(["compare", str(folder), str(run_dir)]) == 0
    tensors = load_file(folder / SINGLE)
    tensors[name][5] += 1
    save_file(tensors, folder / SINGLE)
    capsys.readouterr()
    assert main(["compare", str(folder), str(run_dir)]) == 1
    assert f"{name}  [12] float32  1  " in capsys.readouterr().out


def quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(E4M3 values, scales, the numbers that both stand for) of a matrix in blocks of BLOCK."""
    rows, columns = (np.arange(size) // block for size, block in zip(w.shape, BLOCK, strict=True))
    scales = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
    np.maximum.at(scales, np.ix_(rows, columns), np.abs(w) / np.float32(448))
    each = scales[np.ix_(rows, columns)]
    values = (w / each).astype(ml_dtypes.float8_e4m3fn)
    return values, scales, values.astype(np.float32) * each


def test_fp8_blocks_have_their_numbers_in_all_parameters_on_a_mesh(folder, request):
    """The parameters of the dequantised folder are those of the quantised one, which is read in pieces."""
    tensors, whole = load_file(folder / SINGLE), {}
    for name in [*tensors]:
        if name.endswith("_proj.weight") or name.endswith("with_mqa.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], whole[name] = quantise(tensors[name])
    plain = {name: w for name, w in tensors.items() if not name.endswith("_scale_inv")}
    save_file(plain | whole, folder / SINGLE)
    expected = read(folder, fsdp=2, tensor=2)
    save_file(tensors, folder / SINGLE)
    change_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [*BLOCK]})
    request.getfixturevalue("small_pieces")
    for name, found in read(folder, fsdp=2, tensor=2).items():
        np.testing.assert_array_equal(found, expected[name], err_msg=name)
    assert not np.array_equal(expected["blocks.moe.attention.value"], V3["blocks.moe.attention.value"])


@pytest.fixture
def with_module(folder) -> Path:
    """The folder with a module of multi-token prediction: its block has the numbers of the last layer plus 1."""
    tensors = load_file(folder / SINGLE)
    module = {name.replace("layers.2.", "layers.3."): w + 1 for name, w in tensors.items() if "layers.2." in name}
    rng = np.random.default_rng(0)
    for name, shape in {"enorm": 32, "hnorm": 32, "shared_head.norm": 32, "eh_proj": (32, 64)}.items():
        module[f"model.layers.3.{name}.weight"] = rng.normal(size=shape).astype(np.float32)
    module["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].copy()
    module["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"].copy()
    save_file(tensors | module, folder / SINGLE)
    change_config(folder, num_nextn_predict_layers=1)
    return folder


def test_modules_of_multi_token_prediction_are_read_and_written(with_module, tmp_path):
    expected = load_file(with_module / SINGLE)
    assert main(["import", str(with_module), str(tmp_path / "run")]) == 0
    found = megajax.load_weights(tmp_path / "run")
    names = {name for name in found if name.startswith("blocks.mtp.")}
    for name in names - {f"blocks.mtp.{own}" for own in MODULE}:
        np.testing.assert_array_equal(found[name][0], V3[name.replace(".mtp.", ".moe.", 1)][1] + 1, err_msg=name)
    np.testing.assert_array_equal(found["blocks.mtp.join.projection"][0], expected["model.layers.3.eh_proj.weight"].T)
    for ours, theirs in {"join.embedding_norm": "enorm", "join.stream_norm": "hnorm"}.items():
        np.testing.assert_array_equal(found[f"blocks.mtp.{ours}"][0], expected[f"model.layers.3.{theirs}.weight"])

    own = megajax.from_hf(with_module, speculate=1).weights.layers[3]
    np.testing.assert_array_equal(own["join.projection"], found["blocks.mtp.join.projection"][0])
    on_mesh = read(with_module, fsdp=2, tensor=2)
    for name in names:
        np.testing.assert_array_equal(on_mesh[name], found[name], err_msg=name)

    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    written = load_file(next((tmp_path / "out").glob("*.safetensors")))
    assert written.keys() == expected.keys()
    for name, w in expected.items():
        np.testing.assert_array_equal(written[name], w, err_msg=name)
    assert json.loads((tmp_path / "out/config.json").read_text())["num_nextn_predict_layers"] == 1
    assert main(["compare", str(with_module), str(tmp_path / "run")]) == 0


@pytest.mark.parametrize("copy", ["embed_tokens", "shared_head.head"])
def test_a_module_s_own_embedding_or_head_is_refused(with_module, copy):
    tensors = load_file(with_module / SINGLE)
    tensors[f"model.layers.3.{copy}.weight"][-1, -1] += 1
    save_file(tensors, with_module / SINGLE)
    with pytest.raises(InputError, match=rf"model.layers.3.{copy}.weight differs from .*: set model.mtp_layers=0"):
        read(with_module, fsdp=2, tensor=2)


@pytest.mark.smoke
def test_a_run_may_leave_the_modules_out(with_module):
    found = read(with_module, model={"mtp_layers": 0}, fsdp=4)
    np.testing.assert_array_equal(found["final_norm"], V3["final_norm"])
    np.testing.assert_array_equal(found[BIAS], V3[BIAS])
    tensors = load_file(with_module / SINGLE)
    second = {n.replace("layers.3.", "layers.4."): w for n, w in tensors.items() if "layers.3." in n}
    save_file(tensors | second, with_module / SINGLE)
    change_config(with_module, num_nextn_predict_layers=2)
    np.testing.assert_array_equal(read(with_module, model={"mtp_layers": 0}, fsdp=4)[BIAS], V3[BIAS])
    change_config(with_module, num_nextn_predict_layers=0)
    with pytest.raises(InputError, match=r"has the tensor model\.layers\.3\..*, which the model does not have"):
        read(with_module, fsdp=4)


@pytest.mark.smoke
def test_a_config_json_that_promises_modules_that_are_not_there_has_none(folder):
    """transformers writes the number of modules, but not the modules."""
    change_config(folder, num_nextn_predict_layers=1)
    assert "mtp_layers" not in read_model(folder)
    with pytest.raises(
        InputError, match="--speculate=1 drafts with multi-token prediction modules, but folder=.* none"
    ):
        megajax.from_hf(folder, speculate=1)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "name", ["kv_b_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj"], ids=lambda name: name.removesuffix("_proj")
)
def test_adapters_of_weights_that_share_a_tensor_are_its_adapter(folder, name):
    """The tensor of the merged weights is the tensor of the weights plus B A."""
    model = Config.model_validate(RUN | {"model": read_model(folder)}).model
    parts = [t for t in FAMILIES["deepseek_v3"].tensors(model) if name in t.theirs and t.ours.startswith("blocks.moe.")]
    rng, weights, merged = np.random.default_rng(0), {}, []
    for tensor in parts:
        w = V3[tensor.ours][1]
        inside = w.ndim - 1 if tensor.ours.endswith("output") else 1
        a, b = rng.normal(size=(2, *w.shape[:inside], 3)), rng.normal(size=(2, 3, *w.shape[inside:]))
        weights |= {tensor.ours + A: a, tensor.ours + B: b}
        merged.append((tensor, w + low_rank(a[1], b[1])))
    a, b = _of_module(parts, weights, (1,), {tensor.ours: V3[tensor.ours].shape[1:] for tensor in parts})
    assert a.shape[0] == b.shape[1] == 3 * len(parts)
    plain = assembled([(tensor, V3[tensor.ours][1]) for tensor in parts])
    np.testing.assert_array_equal(plain, load_file(folder / SINGLE)[f"model.layers.2.self_attn.{name}.weight"])
    np.testing.assert_allclose(assembled(merged), plain + b @ a, atol=1e-5)


REFUSED = {
    "groups by more than two scores": (
        {"num_experts_per_tok": 6},
        "num_experts_per_tok=6 is not twice topk_group=2",
    ),
    "no chosen group": ({"topk_group": 0}, "num_experts_per_tok=4 is not twice topk_group=0"),
    "null chosen groups": ({"topk_group": None}, "num_experts_per_tok=4 is not twice topk_group=None"),
    "one expert, normalised": (
        {"num_experts_per_tok": 1, "n_group": 1},
        "norm_topk_prob=true with num_experts_per_tok=1",
    ),
    "another choice": ({"topk_method": "greedy"}, "topk_method=greedy is not noaux_tc"),
    "other scores": ({"scoring_func": "softmax"}, "scoring_func=softmax is not sigmoid"),
    "biases": ({"attention_bias": True}, "attention_bias=True is not False"),
    "a part of the layers": ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not 1"),
    "rotated halves": ({"rope_interleave": False}, "rope_interleave=False is not True"),
    "grouped keys": ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not 4"),
    "V2 normalised": (
        {"model_type": "deepseek_v2", "topk_method": "greedy", "norm_topk_prob": True},
        "norm_topk_prob=true",
    ),
    "V2 by another choice": (
        {"model_type": "deepseek_v2", "topk_method": "noaux_tc"},
        "topk_method=noaux_tc is not greedy",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_megajax_does_not_have_is_refused(folder, case):
    changes, sentence = REFUSED[case]
    change_config(folder, **changes)
    with pytest.raises(InputError) as error:
        read_model(folder)
    assert sentence in str(error.value) and "megajax cannot compute this" in str(error.value)


# The keys of the published folders' config.json that describe the network
V2_LITE = {
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
BY_BIAS = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
SCALED = V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0}
LARGE = {"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536}
PUBLISHED = {
    "deepseek_v2_lite": ("deepseek_v2", V2_LITE),
    "deepseek_v2": (
        "deepseek_v2",
        V2_LITE
        | LARGE
        | {
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "num_hidden_layers": 60,
            "routed_scaling_factor": 16.0,
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
        },
    ),
    "deepseek_v3": (
        "deepseek_v3",
        V2_LITE
        | LARGE
        | BY_BIAS
        | {
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "rope_scaling": SCALED,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
            "vocab_size": 129280,
        },
    ),
    "moonlight_16b_a3b": (
        "deepseek_v3",
        V2_LITE
        | BY_BIAS
        | {
            "intermediate_size": 11264,
            "num_nextn_predict_layers": 0,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.446,
            "vocab_size": 163840,
        },
    ),
    "kimi_k2": (
        "kimi_k2",
        V2_LITE
        | BY_BIAS
        | {
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "num_attention_heads": 64,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 61,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 1536,
            "rope_scaling": SCALED | {"beta_fast": 1.0, "factor": 32.0},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "vocab_size": 163840,
        },
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_json_is_that_of_configs(tmp_path, name):
    model_type, published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published | {"model_type": model_type}))
    found = ModelConfig.model_validate(read_model(tmp_path) | {"mtp_layers": 0})
    path = Path(__file__).parents[2] / f"configs/models/{name}.yaml"
    ours = load_config(path, ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]).model
    assert describe_model(found) == describe_model(ours)
    assert read_model(tmp_path).get("mtp_layers", 0) == published.get("num_nextn_predict_layers", 0)
    family = FAMILIES["deepseek_v3" if model_type == "kimi_k2" else model_type]
    assert family_for(ours) is family


@pytest.mark.parametrize("normalised", [True, False])
def test_whether_weights_of_experts_are_normalised_is_written(tmp_path, normalised):
    model_type, published = PUBLISHED["moonlight_16b_a3b"]
    published = published | {"model_type": model_type, "norm_topk_prob": normalised}
    (tmp_path / "config.json").write_text(json.dumps(published))
    written = FAMILIES[model_type].write(ModelConfig.model_validate(read_model(tmp_path)))
    assert written["norm_topk_prob"] is normalised
