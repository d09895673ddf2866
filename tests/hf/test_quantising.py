"""Folders in FP8 and FP4: the bytes against loops over blocks, and read back, where the logits are the model's."""

import json
from itertools import product

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from megajax.config import ModelConfig
from megajax.errors import InputError
from megajax.hf.beside import Beside
from megajax.hf.convert import export, open_readers, read_folder, read_model
from megajax.hf.folder import SINGLE, FolderTensors
from megajax.hf.quantising import Mxfp4Experts, StoredForm, in_mxfp4, largest_to, power_of_two_scale
from megajax.model.block import layer_state, linear_layers, state_by_name
from megajax.model.parameters import bind, parameters
from megajax.model.transformer import Transformer

E4M3, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn


def weights_of(folder):
    """(model, the canonical weights and layer state of a folder)."""
    model = ModelConfig.model_validate(read_model(folder) | {"vocab_multiple": 1})
    shapes = {name: p.shape for name, p in parameters(Transformer(model)).items()}
    shapes |= {name: a.shape for name, a in state_by_name(layer_state(model)).items()}
    with open_readers(folder, model, shapes, "folder") as readers:
        out = {}
        for name, reader in readers.items():
            stacked = shapes[name][: reader.tensor.stacked]
            parts = [reader.part(at) for at in np.ndindex(*stacked)]
            out[name] = np.stack(parts).reshape(shapes[name]) if stacked else parts[0]
    return model, out


def logits_of(model, *each):
    """The logits of each of these weights."""
    network, kept = Transformer(model), layer_state(model)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, (2, 12))
    program = jax.jit(lambda params, state: bind(network, params)(tokens, state=state))
    for weights in each:
        state = {kind: {name: weights[f"blocks.{kind}.{name}"] for name in own} for kind, own in kept.items()}
        yield np.asarray(program({name: weights[name] for name in parameters(network)}, state), np.float64)


def power_of_two(numbers: np.ndarray) -> float:
    scale = 2.0**-126
    while np.abs(numbers).max() > 448 * scale:
        scale *= 2
    return scale


def by_hand(kind, w):
    """(numbers, scales, the same as FP32) of a matrix [out, in]."""
    values, whole = np.zeros(w.shape, E4M3), np.zeros(w.shape, np.float32)
    height, width = (128, 128) if kind == "fp8_block" else (1, w.shape[1]) if kind == "fp8_channel" else w.shape
    scales = np.zeros([-(-n // size) for n, size in zip(w.shape, (height, width), strict=True)], np.float32)
    for i, j in np.ndindex(scales.shape):
        part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        scales[i, j] = np.float32(np.abs(w[part]).max() / 448) if kind == "fp8_tensor" else power_of_two(w[part])
        values[part] = (w[part] / scales[i, j]).astype(E4M3)
        whole[part] = values[part].astype(np.float32) * scales[i, j]
    return values, scales, whole


def written(folder):
    """The bytes of the tensors by name; safetensors gives FP8 to NumPy in this way only."""
    with safe_open(folder / SINGLE, framework="np") as file:
        shapes = {name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
    return shapes


# (weights, inputs) of a compressed-tensors group: who shares a scale, and whether the engine makes it from each input
SCHEMES = {
    "fp8_channel": ({"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}),
    "fp8_tensor": ({"strategy": "tensor", "dynamic": False}, {"strategy": "tensor", "dynamic": False}),
}


def check_schemes(config, kind):
    if kind == "fp8_block":
        expected = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        assert expected.items() <= config.items()
        return
    (group,) = config["config_groups"].values()
    for part, scheme in zip(("weights", "input_activations"), SCHEMES[kind], strict=True):
        assert group[part] == scheme | {"num_bits": 8, "type": "float", "symmetric": True}, part


CASES = [("tiny_llama", kind) for kind in ("fp8_block", "fp8_channel", "fp8_tensor")]
CASES += [("tiny_deepseek_v3", "fp8_block"), ("tiny_mixtral", "fp8_channel"), ("tiny_phi3", "fp8_block")]
CASES += [("tiny_qwen3_5_text", "fp8_tensor")]  # layers of two kinds
OF_LAYERS = {"self_attn.k_proj": "attention.qkv", "mlp.down_proj": "mlp.down"}


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_linear_layers_are_in_fp8_and_are_read_back(unpack, tmp_path, name, kind):
    model, weights = weights_of(unpack(name))
    origin = json.loads((unpack(name) / "config.json").read_text())["model_type"]
    rng, out = np.random.default_rng(1), tmp_path / "out"
    amax = {f"{layer}.input": rng.random((model.num_layers, 4)) for layer in linear_layers(model)}
    in_bf16 = set()
    if kind == "fp8_tensor":  # one layer has no history
        amax["mlp.down.input"][0] = 0
        in_bf16 = {"model.layers.0.mlp.down_proj.weight"}
    export(weights, model, tmp_path / "plain", StoredForm("float32"), Beside(origin=origin))
    export(
        weights, model, out, StoredForm("bfloat16", kind, amax if kind == "fp8_tensor" else None), Beside(origin=origin)
    )
    found, plain, config = written(out), FolderTensors(tmp_path / "plain"), read_folder(out)[2]["quantization_config"]
    suffix = "_scale_inv" if kind == "fp8_block" else "_scale"
    quantised = [n for n in found if n + suffix in found]
    check_schemes(config, kind)
    left_out = config["modules_to_not_convert" if kind == "fp8_block" else "ignore"]
    matrices = [n for n in plain.files if n.endswith("proj.weight")]
    assert {*quantised} & {*matrices} == {*matrices} - in_bf16
    assert not {*left_out} & {n.removesuffix(".weight") for n in quantised}
    with FolderTensors(out, config) as stored:
        for tensor in plain.files:
            slices = tuple(slice(0, n) for n in plain.shape(tensor))
            w, read = plain.read(tensor, slices), stored.read(tensor, slices)
            if tensor not in quantised:
                state = tensor.endswith("e_score_correction_bias")
                np.testing.assert_array_equal(read, w if state else w.astype(ml_dtypes.bfloat16))
                assert tensor.removesuffix(".weight") in left_out or not tensor.endswith(".weight")
                continue
            values, scales, whole = by_hand(kind, w)
            np.testing.assert_array_equal(read, whole)
            np.testing.assert_array_equal(stored.read_stored(tensor, slices).view(np.uint8), values.view(np.uint8))
            shape, dtype = found[tensor + suffix]
            assert dtype == "F32" and [*shape] == ([1] if kind == "fp8_tensor" else [*scales.shape])
    if kind == "fp8_tensor":
        given = {n: s for n, s in found.items() if n.endswith("input_scale")}
        assert len(given) == len(quantised)
        with safe_open(out / SINGLE, framework="np") as file:
            for layer, (theirs, ours) in product(range(model.num_layers), OF_LAYERS.items()):
                if (scale := f"model.layers.{layer}.{theirs}.input_scale") in given:
                    largest = np.float32(amax[f"{ours}.input"][layer].max())
                    assert file.get_tensor(scale) == np.float32(largest / 448)
    read_model_again, again = weights_of(out)
    assert read_model_again == model
    if (name, kind) != CASES[0]:
        return
    exact, ours = logits_of(model, weights, again)
    assert 1e-3 < np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.15  # of E4M3: 2 to 3 % a matmul


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("tiny_llama_tied", "lm_head"),  # without a tensor: engines would wait for its scales
        ("tiny_modernbert", "decoder"),
        ("tiny_nemotron_h", "model.norm_f"),  # backbone.norm_f in the files, and in transformers 4
    ],
)
def test_engines_find_each_module_that_is_not_quantised(unpack, tmp_path, name, module):
    model, weights = weights_of(unpack(name))
    export(weights, model, tmp_path / "out", StoredForm("float32", "fp8_channel"))
    assert module in read_folder(tmp_path / "out")[2]["quantization_config"]["ignore"]


def test_experts_of_gpt_oss_are_in_mxfp4_and_stay_what_they_are(unpack, tmp_path):
    model, weights = weights_of(unpack("tiny_gpt_oss"))
    export(weights, model, tmp_path / "first", StoredForm("float32", "mxfp4"))
    found, config = written(tmp_path / "first"), read_folder(tmp_path / "first")[2]["quantization_config"]
    assert config["quant_method"] == "mxfp4" and "model.layers.0.self_attn.q_proj" in config["modules_to_not_convert"]
    assert sum(n.endswith("_blocks") for n in found) == 2 * model.num_layers
    _, again = weights_of(tmp_path / "first")
    experts = {n for n in weights if n.rpartition(".")[2] in ("gate", "up", "down")}
    for name, w in weights.items():
        if name not in experts:
            np.testing.assert_array_equal(again[name], w)
    exact, ours = logits_of(model, weights, again)
    assert 1e-3 < np.linalg.norm(ours - exact) / np.linalg.norm(exact) < 0.2
    export(again, model, tmp_path / "second", StoredForm("float32", "mxfp4"))  # no number changes again
    for name, w in weights_of(tmp_path / "second")[1].items():
        np.testing.assert_array_equal(w, again[name])


@pytest.mark.smoke
def test_zeros_are_stored_with_the_scale_one():
    """They would be divided by zero."""
    amax = np.array([0, 448, 7], np.float32)
    np.testing.assert_array_equal(largest_to(amax), np.array([1, 1, 1 / 64], np.float32))
    np.testing.assert_array_equal(power_of_two_scale(amax), [1, 1, 1 / 64])


@pytest.mark.smoke
def test_a_group_of_mxfp4_has_the_better_of_two_scales():
    rng = np.random.default_rng(2)
    groups = (rng.standard_normal((50, 32)) * 2.0 ** rng.integers(-40, 40, (50, 1))).astype(np.float32)
    groups[0] = 0
    exponents, codes = in_mxfp4(groups)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for group, exponent, own in zip(groups, exponents, codes, strict=True):
        errors = {}
        for candidate in range(exponent - 3, exponent + 4):
            nearest = [min(table, key=lambda t, v=v: abs(t - v)) for v in np.abs(group) / 2.0**candidate]
            errors[candidate] = sum((np.abs(group) - np.array(nearest) * 2.0**candidate) ** 2)
        values = np.where(own & 8, -1, 1) * table[own & 7] * 2.0**exponent
        assert np.sum((values - group) ** 2) <= errors[exponent] * (1 + 1e-9) <= min(errors.values()) * (1 + 1e-9)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        (
            "tiny_gpt2",
            "fp8_block",
            "because transformer.h.0.mlp.c_fc.weight of model_type gpt2 is no matrix [out, in]: use none",
        ),
        ("tiny_gpt_oss", "fp8_channel", "of model_type gpt_oss is no matrix [out, in]: use mxfp4"),
        (
            "tiny_granitemoehybrid",  # [experts, out, in]
            "fp8_channel",
            ".block_sparse_moe.input_linear.weight of model_type granitemoehybrid is no matrix [out, in]: use none",
        ),
        ("tiny_llama", "mxfp4", "because model_type llama has no experts in one tensor, as GPT-OSS has"),
        ("tiny_mixtral", "fp8_tensor", "because it has experts, whose inputs have no scale"),
    ],
)
def test_a_model_that_a_format_does_not_have_is_refused(unpack, tmp_path, name, kind, sentence):
    model, weights = weights_of(unpack(name))
    origin = json.loads((unpack(name) / "config.json").read_text())["model_type"]
    with pytest.raises(InputError) as error:
        export(weights, model, tmp_path / "out", StoredForm("float32", kind), Beside(origin=origin))
    assert sentence in str(error.value) and not (tmp_path / "out").exists()


def test_groups_of_mxfp4_have_32_inputs():
    stored = dict(Mxfp4Experts().stored("x.down_proj", np.ones((2, 64, 8), np.float32)))
    assert {name: array.shape for name, array in stored.items()} == {
        "x.down_proj_blocks": (2, 8, 2, 16),
        "x.down_proj_scales": (2, 8, 2),
    }
    with pytest.raises(InputError, match="=mxfp4 cannot .*x.down_proj has 63 inputs, no multiple of 32: use none"):
        next(Mxfp4Experts().stored("x.down_proj", np.ones((2, 63, 8), np.float32)))
