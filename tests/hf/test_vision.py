"""Models that read images against transformers: folders, logits, gradients (data_files/make_vision_references.py)."""

import contextlib
import json
import re
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from megajax.config import ModelConfig, load_config
from megajax.errors import InputError
from megajax.hf.beside import Beside
from megajax.hf.convert import (
    FAMILIES,
    export,
    family_for,
    open_readers,
    read_folder,
    read_model,
    their_tensors,
)
from megajax.hf.folder import HEADS, SINGLE
from megajax.hf.quantising import StoredForm, quantised_weights
from megajax.hf.reader import on_devices
from megajax.hf.tensors import tensors_by_name
from megajax.hf.vision_language import VisionLanguage
from megajax.model import Transformer, bind, parameters

FILES = Path(__file__).parents[1] / "data_files"
NAMES = ["llava", "llava_siglip", "gemma3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
FIELDS = ("patches", "patch_segments", "patch_positions", "image_index", "rope_positions")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def unpack(tmp_path_factory):
    """Name → its folder."""
    folder = tmp_path_factory.mktemp("vision")
    for name in NAMES:
        with zipfile.ZipFile(FILES / f"images_{name}.zip") as archive:
            archive.extractall(folder / name)
    return folder.joinpath


@pytest.fixture(scope="module")
def stored():
    """By name the outputs of transformers."""
    return {name: np.load(FILES / f"images_{name}.npz") for name in NAMES}


def model_of(folder: Path) -> ModelConfig:
    return ModelConfig.model_validate(read_model(folder) | {"vocab_multiple": 1})


def read(folder: Path, model: ModelConfig) -> dict[str, jax.Array]:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    declared = parameters(Transformer(model)).items()
    shapes = {name: jax.ShapeDtypeStruct(p.shape, np.float32, sharding=device) for name, p in declared}
    with open_readers(folder, model, {n: s.shape for n, s in shapes.items()}, "checkpoint.init_from") as readers:
        return on_devices(readers, shapes, {})[0]


def relative(ours, theirs) -> float:
    return float(np.linalg.norm(np.asarray(ours, np.float64) - theirs) / np.linalg.norm(theirs))


def published(name: str, tensor: str) -> str:
    """A network's name of a tensor → the published one."""
    family = FAMILIES[name.removesuffix("_siglip")]
    assert isinstance(family, VisionLanguage)
    return next(iter(family.stored_names([tensor], Path())))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen3_vl"])
def test_logits_are_those_of_transformers(unpack, stored, name):
    network, weights, arrays, loss = compared(unpack, stored, name)
    found, logits = jax.jit(loss)(weights)
    assert relative(logits, arrays["logits"]) < TOLERANCE and relative(found, arrays["loss"]) < TOLERANCE


# The other towers have the same operations.
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "qwen3_vl" else pytest.mark.long) for n in NAMES])
def test_logits_and_all_gradients_are_those_of_transformers(unpack, stored, name):
    network, weights, arrays, loss = compared(unpack, stored, name)
    model = network.config
    (found, logits), gradients = jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(weights))
    assert relative(logits, arrays["logits"]) < TOLERANCE and relative(found, arrays["loss"]) < TOLERANCE
    theirs = dict(their_tensors(gradients, family_for(model).tensors(model), model, np.dtype("float32"), {}))
    given = {published(name, key.removeprefix("gradient:")): arrays[key] for key in arrays if "gradient:" in key}
    assert theirs.keys() == given.keys()
    whole = np.sqrt(sum(np.square(gradient).sum() for gradient in given.values()))
    for tensor, gradient in theirs.items():  # a bias of keys has none
        zero = np.linalg.norm(given[tensor]) < 1e-6 * whole
        assert (np.linalg.norm(gradient) < 1e-6 * whole) if zero else relative(gradient, given[tensor]) < TOLERANCE, (
            tensor
        )


def compared(unpack, stored, name: str):
    """(network, weights, transformers' arrays, weights → (loss, logits)) of a folder."""
    model, arrays = model_of(unpack(name)), stored[name]
    expected = json.loads(str(arrays["model"])) | {"vocab_multiple": 1}
    rows = expected["vision"]["patches_per_row"]
    model = model.model_copy(update={"vision": model.vision.model_copy(update={"patches_per_row": rows})})
    assert model == ModelConfig.model_validate(expected)
    network, weights = Transformer(model), read(unpack(name), model)
    fields = {field: arrays[field] for field in FIELDS if field in arrays}
    counted = arrays["targets"] >= 0

    def loss(weights):
        logits = bind(network, weights)(arrays["tokens"], fields=fields)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), arrays["targets"][..., None], axis=-1)[..., 0]
        return -(chosen * counted).sum() / counted.sum(), logits

    return network, weights, arrays, loss


def is_kept(theirs, ours) -> bool:
    return ours == theirs if not isinstance(theirs, dict) else ours == (ours or {}) | theirs


@pytest.mark.filterwarnings("ignore:.*the language model")
@pytest.mark.parametrize("name", ["llava", "llava_siglip", "gemma3"])
def test_without_images_a_folder_is_that_of_its_language_model(unpack, name):
    whole, text = (read_folder(unpack(name), with_images)[1] for with_images in (True, False))
    assert "vision" in whole and "vision" not in text
    assert all(text[key] == whole[key] for key in ("num_layers", "hidden_size", "vocab_size"))


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_read_and_written_as_it_was(unpack, tmp_path, name):
    model = model_of(unpack(name))
    weights = read(unpack(name), model)
    of_run = {"bos_token_id": 5, "eos_token_id": [6, 7], "max_position_embeddings": 89}
    export(jax.device_get(weights), model, tmp_path, StoredForm("float32"), Beside(keys=of_run))
    theirs, ours = (load_file(folder / "model.safetensors") for folder in (unpack(name), tmp_path))
    named = {published(name, tensor): array for tensor, array in theirs.items()}
    assert ours.keys() <= named.keys() and all((named[tensor] == ours[tensor]).all() for tensor in ours)
    if "qwen" in name:  # transformers 5 renames the others' as it reads them
        assert ours.keys() == theirs.keys()
    unused = FAMILIES[name.removesuffix("_siglip")].unused(json.loads((unpack(name) / "config.json").read_text()))
    assert all(tensor.startswith(unused) for tensor in named.keys() - ours.keys())
    assert model_of(tmp_path) == model
    theirs, ours = (json.loads((folder / "config.json").read_text()) for folder in (unpack(name), tmp_path))
    assert ours.get("image_seq_length") == ((model.vision.grid or 0) ** 2 if "llava" in name else None)
    assert of_run.items() <= ours.items() and of_run.items() <= ours["text_config"].items()
    parts = [(theirs, ours), *((theirs[part], ours[part]) for part in ("text_config", "vision_config"))]
    differ = {key for their, own in parts for key, value in their.items() if not is_kept(value, own.get(key))}
    differ -= {"text_config", "vision_config"}
    layers = {"vision_feature_layer", "num_hidden_layers"}  # of the tower, without those that are not read
    assert differ <= {*MAY_CHANGE.split(), *layers, "num_channels", "use_bidirectional_attention"}


# Of training, of the stored weights and of programs, read with the tokenizer, of videos, or of a window that is null
MAY_CHANGE = """architectures attention_dropout bos_token_id dtype eos_token_id image_seq_length initializer_factor
    initializer_range max_position_embeddings pad_token_id pretraining_tp projection_dim tokens_per_second
    transformers_version use_cache video_token_id vision_end_token_id vision_start_token_id boi_token_index
    eoi_token_index _sliding_window_pattern max_window_layers use_sliding_window
    vision_use_head"""


@pytest.mark.parametrize("name", NAMES)
def test_every_other_key_of_a_config_counts(unpack, tmp_path, name):
    config = json.loads((unpack(name) / "config.json").read_text())

    def is_silent(part: dict, key: str) -> bool:
        value = part[key]
        other = not value if isinstance(value, bool) else 2 * value + 1 if isinstance(value, int | float) else "x"
        part[key] = other
        (tmp_path / "config.json").write_text(json.dumps(config))
        part[key] = value
        try:
            return ModelConfig.model_validate(read_model(tmp_path)) == base
        except (InputError, ValidationError):
            return False

    base = ModelConfig.model_validate(read_model(unpack(name)))
    parts = [config, config["text_config"], config["vision_config"]]
    parts += [part["rope_parameters"] for part in parts if isinstance(part.get("rope_parameters"), dict)]
    silent = {key for part in parts for key in part if not isinstance(part[key], dict) and is_silent(part, key)}
    assert silent <= {*MAY_CHANGE.split()}


@pytest.mark.filterwarnings("ignore:.*the language model")
@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_another_type_is_a_sentence_under_every_key(unpack, tmp_path, name):
    config, refused = json.loads((unpack(name) / "config.json").read_text()), set()
    parts = {"": config, "text_config": config["text_config"], "vision_config": config["vision_config"]}
    for part, values in parts.items():
        for key, value in values.items():
            for wrong in ("x", -3, [2, 2], *([] if isinstance(value, dict) else ([], {"a": "x"}))):
                values[key] = wrong
                (tmp_path / "config.json").write_text(json.dumps(config))
                values[key] = value
                try:
                    read_model(tmp_path)
                except InputError as error:
                    refused.add(key)
                    sentence = str(error)
                    assert str(tmp_path) in sentence and "damaged" not in sentence, (part, key, wrong, sentence)
                    assert key in sentence and "model.vision" not in sentence, (part, key, wrong, sentence)
    assert refused > {"text_config", "vision_config", "patch_size", "hidden_act", "hidden_size", "num_hidden_layers"}


# As published: Qwen2.5-VL's has the text model's keys beside vision_config
QWEN_TOWER = {"depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16}
QWEN_TOWER |= {"in_chans": 3, "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "window_size": 112}
QWEN_TOWER |= {"spatial_patch_size": 14, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2}
QWEN = {"model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
QWEN |= {"num_attention_heads": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
QWEN |= {"vocab_size": 152064, "image_token_id": 151655, "max_window_layers": 28, "use_sliding_window": False}
QWEN |= {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768}
QWEN |= {"tie_word_embeddings": False, "vision_config": QWEN_TOWER | {"temporal_patch_size": 2}}
QWEN2_TOWER = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 3584}
QWEN2_TOWER |= {"patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}
QWEN2 = QWEN | {"model_type": "qwen2_vl", "vision_config": QWEN2_TOWER | {"model_type": "qwen2_vl"}}
LLAVA_TOWER = {"hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model"}
LLAVA_TOWER |= {"num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768}
LLAVA = {"model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "pad_token_id": 32001}
LLAVA |= {"projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
LLAVA |= {"text_config": {"model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}}
LLAVA |= {"vision_config": LLAVA_TOWER}


QWEN3_TOWER = {"deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh"}
QWEN3_TOWER |= {"hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_vl"}
QWEN3_TOWER |= {"num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 4096, "patch_size": 16}
QWEN3_TEXT = {"attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096}
QWEN3_TEXT |= {"intermediate_size": 12288, "model_type": "qwen3_vl_text", "num_attention_heads": 32}
QWEN3_TEXT |= {"num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 5000000}
QWEN3_TEXT |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}}
QWEN3 = {"model_type": "qwen3_vl", "image_token_id": 151655, "video_token_id": 151656, "tie_word_embeddings": False}
QWEN3 |= {"text_config": QWEN3_TEXT | {"vocab_size": 151936}}
QWEN3 |= {"vision_config": QWEN3_TOWER | {"spatial_merge_size": 2, "temporal_patch_size": 2}}
PUBLISHED = [("qwen2_vl_7b", QWEN2), ("qwen2_5_vl_7b", QWEN), ("llava_1_5_7b", LLAVA), ("qwen3_vl_8b", QWEN3)]


@pytest.mark.parametrize(("name", "config"), PUBLISHED)
def test_a_published_config_is_the_named_config(tmp_path, name, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = ["batch.global_size=1", "batch.sequence_length=128", "data.kind=synthetic"]
    expected = load_config(Path(__file__).parents[2] / f"configs/models/{name}.yaml", run).model
    assert ModelConfig.model_validate(read_model(tmp_path)) == expected


@pytest.mark.parametrize("value", [[-2, -1], [-2], "default", -25, 25])
def test_other_outputs_of_llavas_tower_than_that_of_one_layer_are_refused(tmp_path, value):
    (tmp_path / "config.json").write_text(json.dumps(LLAVA | {"vision_feature_layer": value}))
    with pytest.raises(InputError, match=rf"{re.escape(f'vision_feature_layer={value}')} .* use another model"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("part", "own"), [("text_config", {"model_type": "phi"}), ("vision_config", {"model_type": "pixtral"})]
)
def test_a_part_of_another_family_is_refused_with_its_key(tmp_path, part, own):
    (tmp_path / "config.json").write_text(json.dumps(LLAVA | {part: LLAVA[part] | own}))
    with pytest.raises(InputError, match=f"{part}.model_type={own['model_type']} .* use another model"):
        read_model(tmp_path)


@pytest.mark.parametrize(("key", "value"), [("in_chans", 1), ("spatial_patch_size", 7), ("out_hidden_size", 1024)])
def test_a_tower_that_the_model_does_not_have_is_refused_with_its_key(tmp_path, key, value):
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"vision_config": QWEN_TOWER | {key: value}}))
    with pytest.raises(InputError, match=f"{key}={value} "):
        read_model(tmp_path)


@pytest.mark.parametrize(("name", "config"), PUBLISHED)
def test_other_channels_or_patches_of_any_tower_are_refused_with_their_key(tmp_path, name, config):
    for key in config["vision_config"].keys() & {"in_chans", "in_channels", "num_channels", "spatial_patch_size"}:
        changed = config | {"vision_config": config["vision_config"] | {key: 1}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=f"{key}=1 "):
            read_model(tmp_path)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_qwen3_vl_s_positions_take_turns_in_either_layout(tmp_path, key):
    text = {name: of for name, of in QWEN3["text_config"].items() if not name.startswith("rope_")}
    for turns in (True, False):
        rope = {"mrope_section": [24, 20, 20], "mrope_interleaved": turns, "rope_type": "default", "rope_theta": 5e6}
        (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"text_config": text | {key: rope}}))
        with contextlib.nullcontext() if turns else pytest.raises(InputError, match="mrope_interleaved=False"):
            assert read_model(tmp_path)["rope_interleaved"]


def test_scaled_positions_of_qwen2_5_vl_come_back_with_their_sections(tmp_path):
    scaling = {"factor": 4.0, "original_max_position_embeddings": 32768, "mrope_section": [16, 24, 24]}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | {"rope_scaling": scaling | {"type": "yarn"}}))
    model = ModelConfig.model_validate(read_model(tmp_path))
    text = family_for(model).write(model)["text_config"]
    for key in ("rope_scaling", "rope_parameters"):
        assert (scaling | {"rope_type": "yarn"}).items() <= text[key].items(), key


# Of videos and of training; LLaVA's last layer, which is not read; transformers' name of a tower that is its own model
NOT_WRITTEN = {"tokens_per_second", "num_hidden_layers", "projection_dim", "model_type"}


@pytest.mark.parametrize(("name", "config"), PUBLISHED)
def test_an_exported_config_has_the_keys_and_values_of_the_published_one(tmp_path, name, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.model_validate(read_model(tmp_path))
    written = family_for(model).write(model)
    for part in ("text_config", "vision_config"):
        theirs, ours = config.get(part, {}), written[part]
        assert {key for key, value in theirs.items() if not is_kept(value, ours.get(key))} <= NOT_WRITTEN, part
    for key in ("model_type", "image_token_index", "image_token_id", "tie_word_embeddings", "projector_hidden_act"):
        assert written.get(key) == config[key] if key in config else True, key


@pytest.mark.parametrize(("name", "config"), PUBLISHED)
def test_the_head_beside_tied_embeddings_is_looked_for_under_its_published_name(tmp_path, name, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.model_validate(read_model(tmp_path)).model_copy(update={"tie_embeddings": False})
    assert len({tensor.theirs for tensor in family_for(model).tensors(model)} & {*HEADS}) == 1


# Tensors of published files that transformers does not read, or not in these models
NOT_READ = {
    "llava": [
        *(f"vision_tower.vision_model.encoder.layers.23.{name}" for name in ("layer_norm1.bias", "mlp.fc2.weight")),
        *("vision_tower.vision_model.post_layernorm.weight", "vision_tower.vision_model.embeddings.position_ids"),
        "vision_tower.vision_model.head.probe",
    ],
}


def test_tensors_of_published_files_that_the_model_has_not_are_left_out():
    family = FAMILIES["llava"]
    unused = family.unused(family.with_text_config(LLAVA))
    assert all(name.startswith(unused) for name in NOT_READ["llava"])
    others = [f"vision_tower.vision_model.{name}" for name in ("encoder.layers.22.mlp.fc2.weight", "pre_layrnorm.bias")]
    assert not any(name.startswith(unused) for name in (*others, "language_model.lm_head.weight"))


def test_the_unused_head_of_gemma_3s_tower_is_not_read(unpack, tmp_path):
    """`vision_use_head` is transformers' default; no output or gradient of its Gemma 3 depends on the head."""
    config = json.loads((unpack("gemma3") / "config.json").read_text())
    tensors = load_file(unpack("gemma3") / SINGLE)
    expected = read(unpack("gemma3"), model := model_of(unpack("gemma3")))
    for own in ({"vision_use_head": True}, {}):
        tower = {key: value for key, value in config["vision_config"].items() if key != "vision_use_head"} | own
        (tmp_path / "config.json").write_text(json.dumps(config | {"vision_config": tower}))
        prefix = next(name for name in tensors if "post_layernorm" in name).partition("post_layernorm")[0]
        save_file(tensors | {f"{prefix}head.probe": np.ones((1, 1, 16), np.float32)}, tmp_path / SINGLE)
        assert model_of(tmp_path) == model
        jax.tree.map(np.testing.assert_array_equal, read(tmp_path, model), expected)


# Matrices of the tower and between it and the text, as transformers 5.24 names their modules (`named_modules`)
TOWER = [
    f"model.vision_tower.encoder.layers.0.{name}" for name in ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc2")
]
PROJECTOR = [f"model.multi_modal_projector.linear_{number}" for number in (1, 2)]
TEXT = "model.language_model.embed_tokens"
BLOCK = [f"model.visual.blocks.0.attn.{name}" for name in ("qkv", "proj")]
MODULES = {
    "llava": [TEXT, *TOWER, *PROJECTOR],
    "llava_siglip": TOWER + PROJECTOR,
    "gemma3": [TEXT, *TOWER],
    "qwen2_vl": [*BLOCK, "model.visual.blocks.1.mlp.fc1", "model.visual.merger.mlp.0"],
    "qwen2_5_vl": [*BLOCK, "model.visual.blocks.1.mlp.gate_proj", "model.visual.merger.mlp.2"],
    "qwen3_vl": [*BLOCK, "model.visual.blocks.1.mlp.linear_fc1", "model.visual.deepstack_merger_list.0.linear_fc2"],
}


@pytest.mark.parametrize("name", NAMES)
def test_engines_find_the_modules_of_a_tower_among_those_that_are_not_quantised(unpack, name):
    model = model_of(unpack(name))
    family = family_for(model)
    parts = tensors_by_name(family.tensors(model), model)
    untied = family.tensors(model.model_copy(update={"tie_embeddings": False}))
    heads = [tensor.theirs for tensor in untied if tensor.ours == "head"]
    found = quantised_weights(StoredForm("float32", "fp8_channel"), parts, model, family.model_type, heads)
    left_out = found.settings["quantization_config"]["ignore"]
    assert {*MODULES[name], "lm_head"} <= {*left_out}


# Beginnings of names in files of LLaVA and of Gemma 3: as published, of transformers from 4.52 on, and of a bare model
LAYOUTS = {
    "vision_tower.vision_model.post_layernorm.weight": (
        "vision_tower.vision_model.post_layernorm.weight",
        "model.vision_tower.vision_model.post_layernorm.weight",
        "vision_tower.post_layernorm.weight",
        "model.vision_tower.post_layernorm.weight",
    ),
    "multi_modal_projector.linear_1.weight": (
        "multi_modal_projector.linear_1.weight",
        "model.multi_modal_projector.linear_1.weight",
    ),
    "language_model.model.norm.weight": (
        "language_model.model.norm.weight",
        "model.language_model.norm.weight",
        "language_model.norm.weight",
    ),
    "language_model.lm_head.weight": ("language_model.lm_head.weight", "lm_head.weight"),
}


@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_each_layout_of_names_is_the_published_one(family, tmp_path):
    for published_name, names in LAYOUTS.items():
        for name in names:
            assert FAMILIES[family].stored_names([name], tmp_path) == {published_name: name}
        with pytest.raises(InputError, match="which are the same"):
            FAMILIES[family].stored_names(names[:2], tmp_path)
