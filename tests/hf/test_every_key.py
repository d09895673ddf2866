"""Every key of a published config.json changes the model that is read, is refused, or stands here with a reason."""

import contextlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megajax.errors import InputError
from megajax.hf.convert import family_for, read_folder, read_model
from megajax.hf.defaults import DEFAULTS
from megajax.schema.model import ModelConfig

FILES = Path(__file__).parents[1] / "data_files"
FOLDERS = sorted(FILES.glob("tiny_*.zip"))
MAY_CHANGE = {  # the others decide the model's numbers
    "of other programs": "architectures transformers_version use_cache pretraining_tp reorder_and_upcast_attn",
    "of the stored weights": "dtype initializer_range",
    "read with the tokenizer": "bos_token_id eos_token_id pad_token_id",
    "of their training": """attention_dropout attn_pdrop embd_pdrop resid_pdrop router_jitter_noise
        router_aux_loss_coef output_router_logits""",
    "of classifiers": """summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj""",
    "rotary positions have no last one": "max_position_embeddings",
}
OF_FAMILY = {  # what other keys of the file decide
    "tiny_deepseek_v2": "head_dim qk_head_dim",
    "tiny_deepseek_v3": "head_dim qk_head_dim",
    "tiny_gemma3_text": "_sliding_window_pattern",  # layer_types
    "tiny_qwen2": "max_window_layers",  # layer_types
    "tiny_qwen3_local": "max_window_layers",  # layer_types
    "tiny_qwen3_moe_mixed": "mlp_only_layers sliding_window use_sliding_window",  # the order; a window is off or null
    "tiny_qwen3_next": "mlp_only_layers",  # the order
    # Of programs, of training, of the initial weights, or of expert groups and prediction modules that it does not have
    "tiny_nemotron_h": """chunk_size expand hidden_dropout mamba_ssm_cache_dtype moe_shared_expert_overlap
        mtp_layers_block_type num_logits_to_keep rescale_prenorm_residual time_step_floor time_step_limit time_step_max
        topk_group use_mamba_kernels""",
    "tiny_kimi_linear": "head_dim qk_head_dim model_max_length topk_group",  # it has one group of experts
    # Of programs and of training; chunks of the program; what other keys of the file decide
    "tiny_mamba2": """chunk_size rescale_prenorm_residual residual_in_fp32 time_step_floor time_step_max time_step_min
        time_step_rank""",
    "tiny_bamba": "attn_layer_indices mamba_chunk_size num_logits_to_keep z_loss_coefficient",
    "tiny_falcon_h1": "mamba_chunk_size num_logits_to_keep mamba_expand mamba_norm_before_gate",
    "tiny_granitemoehybrid": "mamba_chunk_size position_embedding_type rope_parameters",
    "tiny_granite_dense": "mamba_chunk_size intermediate_size num_experts_per_tok",
    # Of programs, of training, of classifiers, or read with the tokenizer
    "tiny_modernbert": """classifier_dropout classifier_pooling cls_token_id deterministic_flash_attn embedding_dropout
        initializer_cutoff_factor mlp_dropout sep_token_id sparse_pred_ignore_index sparse_prediction""",
    "tiny_smollm3": "no_rope_layer_interval sliding_window use_sliding_window",  # no_rope_layers; as above
}

OLDER = {  # names of kinds of layers of transformers 4, by those of 5
    "tiny_nemotron_h": {"linear_attention": "mamba", "full_attention": "attention"},
    "tiny_granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
}
ABSENT = {  # keys of published files that these lack, with values that their models do not have
    "tiny_deepseek_v3": {"moe_layer_freq": 2, "scoring_func": "softmax", "topk_method": "greedy"},
    "tiny_kimi_linear": {
        "mla_use_nope": False,
        "moe_layer_freq": 2,
        "moe_router_activation_func": "softmax",
        "num_nextn_predict_layers": 1,
        "use_grouped_topk": False,
    },
}


OF_TRUTHS = {"tie_word_embeddings": "tie_embeddings", "decoder_bias": "head_bias"}
OF_TRUTHS |= {name: name for name in ("attention_bias", "mlp_bias", "norm_bias")}


def other(value: Any) -> Any:
    """A value of the same type that is not equal."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return 2 * value + 1
    if isinstance(value, str):
        return f"{value}x"
    if isinstance(value, list):
        return value[::-1] if value[::-1] != value else [*value, *value[-1:]]
    return 3


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.stem)
def test_every_key_of_a_config_counts(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))

    def read(changed):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        return ModelConfig.model_validate(read_model(tmp_path))

    base, silent = read(config), set()
    for key, value in config.items():
        try:
            found = read(config | {key: other(value)})
        except (InputError, ValidationError):
            continue
        silent |= {key} if found == base else set()
        if ours := OF_TRUTHS.get(key):
            assert {name for name in ModelConfig.model_fields if getattr(found, name) != getattr(base, name)} == {ours}
    free = " ".join([*MAY_CHANGE.values(), OF_FAMILY.get(path.stem, "")]).split()
    assert silent - {*free} == set()


ALL = [*FOLDERS, *sorted(FILES.glob("images_*.zip"))]


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
def test_biases_in_one_tensor_are_divided_as_their_weights_are(path, tmp_path):
    """Also those that the tiny model lacks, but a key of its config adds: a linear layer's bias has its outputs."""
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))

    def read(config) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelConfig.model_validate(read_folder(tmp_path, with_images=True)[1])

    for key in (key for key, value in config.items() if key.endswith("_bias") and value is False):
        with contextlib.suppress(InputError):  # not possible in this family
            read(config | {key: True})
            config[key] = True
    parts: dict[str, dict[str, tuple[int, int]]] = {}
    for tensor in family_for(model := read(config), config["model_type"]).tensors(model):
        if tensor.fused is not None:
            name = tensor.theirs.removesuffix(".weight").replace("_bias", ".bias")
            ours = tensor.ours.removesuffix("_bias").removesuffix("_convolution")
            parts.setdefault(name, {})[ours] = tensor.start, tensor.step
    biases = {name: own for name, own in parts.items() if name.endswith(".bias")}
    assert biases == {name: parts[name.removesuffix(".bias")] for name in biases}
    if path.stem == "tiny_modernbert":
        assert {name.split(".")[-2] for name in biases} == {"Wqkv", "Wi"}


@pytest.mark.parametrize("name", OLDER)
def test_older_names_of_kinds_of_layers_are_read(name, tmp_path):
    with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
        config = json.loads(archive.read("config.json"))
    (key,) = config.keys() & {"layer_types", "layers_block_type"}
    older = [OLDER[name].get(kind, kind) for kind in config[key]]
    assert set(OLDER[name]) <= {*config[key]}
    sections = []
    for kinds in (config[key], older):
        (tmp_path / "config.json").write_text(json.dumps(config | {key: kinds}))
        sections.append(read_model(tmp_path))
    assert sections[0] == sections[1]


# Keys that others decide here, but not in every program that reads a folder; Qwen3's 28 layers are not the tiny model's
FOR_OTHER_PROGRAMS = {"attn_layer_indices", "max_window_layers", "mlp_only_layers", "sliding_window", "topk_group"}
FOR_OTHER_PROGRAMS |= {"num_experts_per_tok", "use_sliding_window"}
UNWRITTEN = {  # with another value, or not at all
    "a tower is written without the layers whose output is not read": """num_hidden_layers vision_feature_layer
        image_seq_length""",
    "of videos, and of text around images": """video_token_id vision_start_token_id vision_end_token_id boi_token_index
        eoi_token_index tokens_per_second""",
    "of the initial weights, or of other programs": "initializer_factor projection_dim vision_use_head",
    "what other keys of the file decide, or always the same": """_sliding_window_pattern num_channels dense_act_fn
        is_gated_act dropout_rate classifier_dropout""",
}


@pytest.mark.parametrize("path", [*ALL, FILES / "t5.zip"], ids=lambda p: p.stem)
def test_every_key_is_written_as_transformers_wrote_it(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelConfig.model_validate(read_folder(tmp_path, with_images=True)[1])
    written = json.loads(json.dumps(family_for(model, config["model_type"]).write(model)))
    words = [*MAY_CHANGE.values(), OF_FAMILY.get(path.stem, ""), *([] if path in FOLDERS else UNWRITTEN.values())]
    free = {*" ".join(words).split()} - (FOR_OTHER_PROGRAMS if path.stem != "tiny_qwen3_local" else set())

    def compare(theirs: dict, ours: dict, place: str = "") -> None:
        for key, value in theirs.items():
            if key in free:
                continue
            if isinstance(value, dict) and value:
                compare(value, ours[key], f"{place}{key}.")
            else:
                assert ours.get(key, value and "absent") == value, f"{place}{key}"

    compare(config, written)
    assert written["architectures"] == config["architectures"]


# transformers' functions by name (ACT2FN): GELU by erf or by tanh, SiLU, and so on
FUNCTIONS = {"gelu": "erf", "gelu_python": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
FUNCTIONS |= {"silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2", "quick_gelu": "quick"}
ALL_OF = {
    "tiny_gpt2": {"gelu_new", "gelu_pytorch_tanh", "gelu"},
    "tiny_modernbert": {"gelu", "gelu_pytorch_tanh", "silu"},
}
GATED = {"erf": "geglu_exact", "tanh": "geglu", "silu": "swiglu"}
PLAIN = {"erf": "gelu_exact", "tanh": "gelu", "relu": "relu", "relu2": "relu2", "quick": "quick_gelu"}


@pytest.mark.parametrize("path", FOLDERS, ids=lambda path: path.stem)
def test_each_name_of_an_activation_is_read_as_transformers_function_or_refused(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))

    def read(changed) -> str | None:
        (tmp_path / "config.json").write_text(json.dumps(changed))
        try:
            return ModelConfig.model_validate(read_model(tmp_path)).activation
        except InputError:
            return None

    keys = config.keys() & {"hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act"}
    own = read(config)
    if own == "clamped_swiglu":  # GPT-OSS has one only
        keys = set()
    ours = GATED if own in GATED.values() else PLAIN
    for key in keys:
        assert own == ours[FUNCTIONS[config[key]]]
        for name, function in FUNCTIONS.items():
            assert read(config | {key: name}) in (None, ours.get(function)), (key, name)
        assert all(read(config | {key: name}) for name in ALL_OF.get(path.stem, ()))


@pytest.mark.parametrize("path", sorted(FILES.glob("images_*.zip")), ids=lambda path: path.stem)
def test_each_name_of_a_towers_activation_is_read_as_transformers_function_or_refused(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    is_gated = config["vision_config"]["hidden_act"] == "silu"  # in Qwen2.5-VL's tower
    for name, function in FUNCTIONS.items():
        config["vision_config"]["hidden_act"] = name
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            found = read_folder(tmp_path, with_images=True)[1]["vision"]["activation"]
        except InputError:
            found = None
        known = name in ("quick_gelu", "gelu_pytorch_tanh", "gelu", *(["silu"] if is_gated else []))
        assert found in (None, {**PLAIN, "silu": "swiglu"}[function]) and bool(found) >= known, name


def test_each_name_of_t5s_activation_is_that_of_transformers(tmp_path):
    """Whose gated-gelu is gelu_new."""
    with zipfile.ZipFile(FILES / "t5.zip") as archive:
        config = json.loads(archive.read("config.json"))
    names = {"gated-gelu": "geglu", "gated-gelu_new": "geglu", "gated-silu": "swiglu", "relu": "relu"}
    for name, ours in names.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {"feed_forward_proj": name}))
        assert read_model(tmp_path)["activation"] == ours


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in ABSENT.items() for key in keys])
def test_an_option_of_published_files_that_the_model_lacks_is_a_sentence(name, key, tmp_path):
    with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
        config = json.loads(archive.read("config.json"))
    (tmp_path / "config.json").write_text(json.dumps(config | {key: ABSENT[name][key]}))
    assert key not in config
    with pytest.raises(InputError, match=key):
        read_model(tmp_path)


@pytest.mark.parametrize("path", FOLDERS + sorted(FILES.glob("images_*.zip")), ids=lambda path: path.stem)
def test_a_wrong_value_in_rope_parameters_is_a_sentence_with_its_key(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    parts = [config, *(config[part] for part in ("text_config", "vision_config") if part in config)]
    ropes = [part.get("rope_parameters") or {} for part in parts]
    ropes += [of_kind for part in ropes for of_kind in part.values() if isinstance(of_kind, dict)]
    for rope in ropes:
        for key in rope.keys() & {"rope_theta", "partial_rotary_factor", "mrope_section"}:
            value = rope[key]
            for wrong in ("x", [2.5], ["x"], -3, 0, True):
                rope[key] = wrong
                (tmp_path / "config.json").write_text(json.dumps(config))
                with pytest.raises(InputError, match=rf"rope_parameters\..*{key}=.* is not .*: copy it again") as error:
                    read_model(tmp_path)
                assert " inf" not in str(error.value)
            rope[key] = value


NEWER = {"layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers"}  # they decide what older keys did
PUBLISHED = ("linear_attn_config", "rope_scaling")  # keys of published files that none of these has
OF_FAMILIES = [path for path in FOLDERS if path.stem != "tiny_llama_tied"]  # it has the keys of tiny_llama


@pytest.mark.parametrize("path", OF_FAMILIES, ids=lambda path: path.stem)
def test_a_value_of_another_type_is_a_sentence_under_every_key(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    refused, accepted = set(), set()
    older = {key: value for key, value in config.items() if key not in NEWER}
    known = {**DEFAULTS[config["model_type"]], **config, **dict.fromkeys(PUBLISHED)}
    for key in known:
        for wrong in ("x", [], {"a": "x"}, -3, *([3.5] if type(known[key]) is int else [])):
            (tmp_path / "config.json").write_text(json.dumps((config if key in NEWER else older) | {key: wrong}))
            try:
                read_model(tmp_path)
                accepted.add(key)
            except InputError as error:
                refused.add(key)
                sentence = str(error)
                assert str(tmp_path) in sentence and "damaged" not in sentence
                assert f": model.{key}" not in sentence and any(theirs in sentence for theirs in known), sentence
    assert len(refused) > 7
    numbers = {key for key, value in config.items() if type(value) in (int, float)}
    free = " ".join([*MAY_CHANGE.values(), OF_FAMILY.get(path.stem, "")]).split()
    assert accepted & numbers <= {*free}, "a number that decides the model must be one"


@pytest.mark.parametrize("path", sorted(FILES.glob("images_*.zip")), ids=lambda path: path.stem)
def test_a_value_of_another_type_is_a_sentence_under_every_key_of_a_model_that_reads_images(path, tmp_path):
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    tower = config["vision_config"]
    of_whole = {**DEFAULTS[config["model_type"]], **dict.fromkeys(("text_config", "vision_config"))}
    of_tower = {**DEFAULTS[tower["model_type"]], "rope_parameters": {}}
    for part, place, keys in ((config, "", of_whole), (tower, "vision_config.", of_tower)):
        for key in keys:
            value = part.get(key, keys[key])
            for wrong in ("x", [2.5], {"a": "x"}, 2.5, *([] if key == "vision_feature_layer" else [-8])):
                if type(wrong) is type(value) and type(value) in (dict, float):
                    continue
                part[key] = wrong
                (tmp_path / "config.json").write_text(json.dumps(config))
                with pytest.raises(InputError, match=rf"{place}{key}(\..*)?=") as error:
                    read_model(tmp_path)
                assert "damaged" not in str(error.value)
            part[key] = value
