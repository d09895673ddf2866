"""Quantised tensors of a folder, read slice by slice, against plain loops over their blocks with ml_dtypes."""

import json
import zipfile
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from megajax.config import Config
from megajax.config.checks import check_mesh
from megajax.errors import InputError
from megajax.hf.convert import read_model
from megajax.hf.folder import SINGLE, FolderTensors
from megajax.mesh import build_mesh
from megajax.training.saving import StateSaver
from megajax.training.step import TrainProgram

FILES = Path(__file__).parents[1] / "data_files"
E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 8]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized"}
STRATEGIES = {"tensor": {}, "channel": {}, "block": {"block_structure": [16, 8]}}
GROUPS = {kind: {"weights": {"strategy": kind} | own} for kind, own in STRATEGIES.items()}
COMPRESSED_BLOCK = COMPRESSED | {"config_groups": {"block": GROUPS["block"]}}


def fp8_blocks(w, block, dtype=np.float32):
    """(E4M3 values, scales, the numbers that both stand for) of a matrix."""
    values, whole = np.zeros(w.shape, E4M3), np.zeros(w.shape, np.float32)
    scales = np.zeros([-(-size // b) for size, b in zip(w.shape, block, strict=True)], dtype)
    for at in np.ndindex(scales.shape):
        part = tuple(slice(i * b, (i + 1) * b) for i, b in zip(at, block, strict=True))
        scales[at] = np.abs(w[part]).max() / 448
        values[part] = (w[part] / np.float32(scales[at])).astype(E4M3)
        whole[part] = values[part].astype(np.float32) * np.float32(scales[at])
    return values, scales, whole


def mxfp4(w):
    """(blocks, scales, the numbers that both stand for) of matrices `[E, in, out]`."""
    experts, inner, out = w.shape
    blocks, scales = (
        np.zeros((experts, out, inner // 32, 16), np.uint8),
        np.zeros((experts, out, inner // 32), np.uint8),
    )
    whole = np.zeros_like(w)
    for e, n, g in np.ndindex(scales.shape):
        group = w[e, 32 * g : 32 * g + 32, n]
        exponent = int(np.floor(np.log2(np.abs(group).max()))) - 2
        numbers = np.clip(group / 2.0**exponent, -6, 6).astype(E2M1)
        bits = numbers.view(np.uint8) & 15
        blocks[e, n, g] = bits[0::2] | bits[1::2] << 4
        scales[e, n, g] = exponent + 127
        assert scales[e, n, g].view(E8M0).astype(np.float64) == 2.0**exponent
        whole[e, 32 * g : 32 * g + 32, n] = numbers.astype(np.float32) * 2.0**exponent
    return blocks, scales, whole


@pytest.fixture
def rng():
    return np.random.default_rng(3)


SLICES = [(slice(0, 40), slice(0, 30)), (slice(3, 29), slice(7, 17)), (slice(16, 32), slice(8, 9))]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("settings", "scale", "dtype"),
    [(FP8, "w_scale_inv", each) for each in (np.float32, ml_dtypes.bfloat16, E8M0)]
    + [(COMPRESSED_BLOCK, "w_scale", ml_dtypes.bfloat16)],
)
def test_a_slice_of_fp8_blocks_has_its_scales(tmp_path, rng, settings, scale, dtype):
    values, scales, whole = fp8_blocks(rng.normal(size=(40, 30)).astype(np.float32), (16, 8), dtype)
    save_file({"other": np.ones(5, np.float32), "w": values, scale: scales}, tmp_path / SINGLE)
    with FolderTensors(tmp_path, settings) as weights:
        assert weights.files.keys() == {"other", "w"} and weights.shape("w") == (40, 30)
        assert weights.itemsize("w") * whole.size == values.nbytes + scales.nbytes
        for slices in SLICES:
            found = weights.read("w", slices)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, whole[slices])


@pytest.mark.smoke
@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_is_that_of_the_whole_tensor(tmp_path, rng, shape):
    values, scale = rng.normal(size=(6, 10)).astype(E4M3), np.full(shape, 0.3, np.float32)
    save_file({"w": values, "w_scale_inv": scale}, tmp_path / SINGLE)
    with FolderTensors(tmp_path, {"quant_method": "fp8", "weight_block_size": None}) as weights:
        assert weights.shape("w") == (6, 10)
        found = weights.read("w", (slice(1, 4), slice(2, 10)))
        np.testing.assert_array_equal(found, values[1:4, 2:].astype(np.float32) * np.float32(0.3))


@pytest.mark.smoke
@pytest.mark.parametrize("kinds", [("channel", "tensor"), ("tensor", "block"), ("block", "channel", "tensor")])
def test_groups_of_several_strategies_have_their_own_scales(tmp_path, rng, kinds):
    """compressed-tensors' shapes of scales: [1], [out, 1], [out / rows, in / columns]."""
    tensors, expected = {}, {}
    for kind in kinds:
        block = {"tensor": (40, 30), "channel": (1, 30), "block": (16, 8)}[kind]
        values, scales, expected[kind] = fp8_blocks(rng.normal(size=(40, 30)).astype(np.float32), block)
        tensors |= {kind: values, f"{kind}_scale": scales.reshape(1) if kind == "tensor" else scales}
    save_file(tensors, tmp_path / SINGLE)
    groups = {kind: GROUPS[kind] for kind in kinds} | {"of inputs": {"targets": ["LlamaAttention"], "weights": None}}
    with FolderTensors(tmp_path, COMPRESSED | {"config_groups": groups}) as weights:
        for kind, whole in expected.items():
            assert weights.shape(kind) == (40, 30)
            for slices in SLICES:
                np.testing.assert_array_equal(weights.read(kind, slices), whole[slices])


@pytest.mark.smoke
def test_a_slice_of_mxfp4_is_transposed_and_scaled(tmp_path, rng):
    w = rng.normal(size=(3, 96, 10)).astype(np.float32) * np.exp(rng.normal(size=(3, 96, 10)).astype(np.float32))
    blocks, scales, whole = mxfp4(w)
    assert np.abs(whole - w).max() < np.abs(w).max() / 5 and len(np.unique(scales)) > 3
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / SINGLE)
    with FolderTensors(tmp_path, {"quant_method": "mxfp4"}) as weights:
        assert weights.files.keys() == {"w"} and weights.shape("w") == (3, 96, 10)
        for slices in (
            (slice(0, 3), slice(0, 96), slice(0, 10)),
            (slice(1, 2), slice(30, 65), slice(2, 9)),
            (slice(1, 3), slice(64, 96), slice(1, 10, 2)),
        ):
            found = weights.read("w", slices)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, whole[slices])


def unpacked(tmp_path, name):
    with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
        archive.extractall(tmp_path / name)
    return tmp_path / name


def change(folder, settings, tensors):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    save_file(tensors, folder / SINGLE)


def read(folder, mesh):
    config = Config.model_validate(
        {
            "model": read_model(folder) | {"vocab_multiple": 64},
            "mesh": {"data": 1} | mesh,
            "batch": {"global_size": 8, "sequence_length": 16},
            "data": {"kind": "synthetic"},
        }
    )
    program = TrainProgram.build(config, build_mesh(check_mesh(config, 4), jax.devices()[:4]))
    return StateSaver(program).restore_weights(str(folder))[0]


def test_an_fp8_folder_has_its_weights_on_a_mesh(tmp_path):
    folder = unpacked(tmp_path, "tiny_llama")
    tensors, expected = load_file(folder / SINGLE), {}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name], tensors[f"{name}_scale_inv"], expected[layer] = fp8_blocks(tensors[name], (16, 8))
    change(folder, FP8, tensors)
    found = np.asarray(read(folder, {"fsdp": 2, "tensor": 2})["blocks.dense.attention.query"])
    for layer, whole in expected.items():
        np.testing.assert_array_equal(found[layer].reshape(len(whole.T), -1), whole.T)


def test_an_mxfp4_folder_has_its_weights_on_a_mesh(tmp_path, small_pieces):
    folder = unpacked(tmp_path, "tiny_gpt_oss")
    tensors, expected = load_file(folder / SINGLE), {}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            w = tensors.pop(whole)
            tensors[f"{whole}_blocks"], tensors[f"{whole}_scales"], expected[layer, name] = mxfp4(w)
    change(folder, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    found = jax.device_get(read(folder, {"expert": 2, "tensor": 2}))
    found = {n.removeprefix("blocks.moe.moe."): a for n, a in found.items()}
    for layer in range(2):
        gate_up = expected[layer, "gate_up_proj"]
        np.testing.assert_array_equal(found["gate"][layer], gate_up[..., 0::2])
        np.testing.assert_array_equal(found["up"][layer], gate_up[..., 1::2])
        np.testing.assert_array_equal(found["down"][layer], expected[layer, "down_proj"])


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("settings", "parts", "bad"),
    [
        (FP8, ("w", "w_scale_inv"), np.float32(np.nan)),
        (FP8, ("w", "w_scale_inv"), ml_dtypes.bfloat16(-np.inf)),
        (FP8, ("w", "w_scale_inv"), E8M0(np.nan)),
        (FP8 | {"weight_block_size": None}, ("w", "w_scale_inv"), np.float32(np.inf)),
        ({"quant_method": "mxfp4"}, ("w_blocks", "w_scales"), np.uint8(255)),
    ],
)
def test_a_scale_that_is_not_finite_is_a_sentence_where_it_is_read(tmp_path, settings, parts, bad):
    if settings["quant_method"] == "mxfp4":
        values, scales, blocks = np.zeros((1, 8, 2, 16), np.uint8), np.full((1, 8, 2), 127, np.uint8), (1, 32, 8)
    else:
        shape = (3, 4) if settings["weight_block_size"] else ()
        values, scales, blocks = np.ones((40, 30), E4M3), np.ones(shape, bad.dtype), (32, 16)
    scales[(-1,) * scales.ndim] = bad
    save_file(dict(zip(parts, (values, scales), strict=True)), tmp_path / SINGLE)
    with FolderTensors(tmp_path, settings) as weights:
        shape = weights.shape("w")
        if scales.ndim:  # not in these blocks
            weights.read("w", tuple(slice(0, size) for size in blocks))
        with pytest.raises(InputError, match=f"{tmp_path}: {parts[1]} has a scale that is .*(nan|inf)"):
            weights.read("w", tuple(slice(0, size) for size in shape))


W, SCALES = np.ones((40, 30), E4M3), np.ones((3, 4), np.float32)
MISTAKES = {
    "another method": (
        {"quant_method": "gptq"},
        {},
        "quantization_config.quant_method=gptq is not known: megajax reads fp8, mxfp4, compressed-tensors",
    ),
    "no block": (
        FP8 | {"weight_block_size": [16]},
        {},
        "quantization_config.weight_block_size=[16] is not a list of two sizes",
    ),
    "another format": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"strategy": "group"}}},
        },
        {},
        "quantization_config has format=pack-quantized with strategies group of weights: megajax reads float-quantized",
    ),
    "no groups": (
        COMPRESSED,
        {},
        "quantization_config has format=float-quantized with no strategies of weights: megajax reads float-quantized",
    ),
    "no scales": (FP8, {"w": W}, "w has dtype F8_E4M3 and no scales"),
    "no settings": (None, {"w": W, "w_scale_inv": SCALES}, "and no scales, which quantization_config in config.json"),
    "other scales": (FP8, {"w": W, "w_scale_inv": SCALES.T.copy()}, "has the shape [4, 3], but by quantization_config"),
    "packed in bytes": (FP8, {"w": np.ones((40, 30), np.int8), "w_scale_inv": SCALES}, "w has dtype I8 where a"),
    "a block of one size": (
        COMPRESSED | {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": 128}}}},
        {},
        "block_structure=128 is not a list of two sizes",
    ),
    "blocks of two sizes": (
        COMPRESSED
        | {"config_groups": {"g": GROUPS["block"], "h": {"weights": {"strategy": "block", "block_structure": [8, 8]}}}},
        {},
        "quantization_config.config_groups: block_structure is [8, 8] and [16, 8]: megajax reads one size",
    ),
    "scales of another strategy": (
        COMPRESSED | {"config_groups": {kind: GROUPS[kind] for kind in ("channel", "tensor")}},
        {"w": W, "w_scale": SCALES},
        "w_scale has the shape [3, 4], but by quantization_config.config_groups in config.json it has [] or [40, 1]",
    ),
    "another group": (
        {"quant_method": "mxfp4"},
        {"w_blocks": np.ones((2, 3, 4, 8), np.uint8), "w_scales": np.ones((2, 3, 4), np.uint8)},
        "w_blocks has the shape [2, 3, 4, 8] and w_scales [2, 3, 4], but MXFP4",
    ),
}


@pytest.mark.smoke
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_sentence(tmp_path, mistake):
    settings, tensors, sentence = MISTAKES[mistake]
    save_file(tensors or {"w": W}, tmp_path / SINGLE)
    with pytest.raises(InputError) as error:
        FolderTensors(tmp_path, settings).shape("w")
    assert sentence in str(error.value) and str(tmp_path) in str(error.value)
