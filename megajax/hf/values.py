"""Checks of config.json's values: a wrong one is a sentence with the file and the key."""

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megajax.config import ModelConfig
from megajax.config.load import describe_problem
from megajax.errors import InputError, counted
from megajax.hf.defaults import ALIASES, DEFAULTS, NULLABLE
from megajax.schema.tree import show

# Keys that a family computes with before they become keys of the section `model`.
TYPES: dict[type, tuple[str, ...]] = {
    dict: ("linear_attn_config", "rope_parameters", "rope_scaling", "text_config", "vision_config"),
    list: (
        "attn_layer_indices",
        "layer_types",
        "layers_block_type",
        "mlp_layer_types",
        "mlp_only_layers",
        "no_rope_layers",
    ),
    int: (
        "decoder_sparse_step",
        "full_attention_interval",
        "global_attn_every_n_layers",
        "local_attention",
        "mamba_expand",
        "mamba_n_heads",
        "max_position_embeddings",
        "mm_tokens_per_image",
        "n_inner",
        "no_rope_layer_interval",
        "original_max_position_embeddings",
        "query_pre_attn_scalar",
        "sliding_window",
        "sliding_window_pattern",
    ),
    str: (
        "activation_function",
        "hidden_act",
        "hidden_activation",
        "hybrid_override_pattern",
        "mlp_hidden_act",
    ),
}
# Of `vision_config`
TOWER_TYPES: dict[type, tuple[str, ...]] = {
    dict: ("rope_parameters",),
    list: ("deepstack_visual_indexes", "fullatt_block_indexes"),
    int: (
        "depth",
        "embed_dim",
        "hidden_size",
        "image_size",
        "intermediate_size",
        "mlp_ratio",
        "num_attention_heads",
        "num_heads",
        "num_hidden_layers",
        "num_position_embeddings",
        "patch_size",
        "spatial_merge_size",
        "temporal_patch_size",
        "window_size",
    ),
    str: ("hidden_act",),
}
# Keys of the section `model` that have more than a type to check, and config.json's
TOWER_NAMES = {
    "vision.deepstack_layers": "vision_config.deepstack_visual_indexes",
    "vision.global_layers": "vision_config.fullatt_block_indexes",
    "vision.norm_epsilon": "vision_config.layer_norm_eps",
}
# 0 or null: none
COUNTS = ("n_group", "topk_group", "n_shared_experts", "num_nextn_predict_layers", "max_window_layers")
COUNTS += ("num_expert_group", "num_shared_experts", "num_local_experts", "first_k_dense_replace")
ROPE_MOST = {"rope_theta": inf, "partial_rotary_factor": 1}  # above 0
MOST_TOKENS = 2**27  # as in `schema.fields.Tokens`
WORDS = {dict: "a mapping", list: "a list", int: f"a whole number from 1 to {MOST_TOKENS:,}", str: "a name"}
SMALLEST = {"num_layers": 1, "hidden_size": 1, "num_heads": 1, "vocab_size": 1}


def complete(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """config.json with the family's defaults, and each key under the name that megajax reads.

    Raises InputError for two names of a key with different values.
    """
    found, family = dict(config), config["model_type"]
    for alias, key in ALIASES.get(family, {}).items():
        if (value := config.get(alias)) is not None:
            if config.get(key, value) != value:
                raise InputError(f"{path}: {key}={show(config[key])}, but {alias}={show(value)}: remove the wrong one.")
            found[key] = value
    return DEFAULTS[family] | found


def check_values(config: Mapping[str, Any], names: Mapping[str, str], path: Path) -> None:
    """Raise InputError for a value of config.json that no model has; `names` are its keys for those of `model`.

    `config` is complete.
    """
    _check_types(config, config["model_type"], TYPES, f"{path}: ")
    for key in COUNTS:
        if (found := config.get(key)) is not None and (type(found) is not int or found < 0):
            raise InputError(f"{path}: {key}={show(found)} is not a whole number of 0 or more: copy it again.")
    for key in ("rope_parameters", "rope_scaling"):
        _check_rope(config.get(key) or {}, f"{path}: {key}")
    given = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
    check_section(SMALLEST | given, names, config, path)
    layers = given.get("num_layers")  # None: they are those of a list
    for key in ("layer_types", "mlp_layer_types", "no_rope_layers"):
        found = config.get(key)
        if found is not None and layers is not None and len(found) != layers:
            entries = counted(len(found), "entry")
            raise InputError(
                f"{path}: {key} has {entries}, but the model has {counted(layers, 'layer')}: copy it again."
            )


def check_tower(tower: Mapping[str, Any], default_type: str, path: Path) -> None:
    """Raise InputError for a value of a `vision_config` that no tower has."""
    place = f"{path}: vision_config."
    _check_types(tower, tower.get("model_type", default_type), TOWER_TYPES, place)
    _check_rope(tower.get("rope_parameters") or {}, f"{place}rope_parameters")


def _check_types(config: Mapping[str, Any], model_type: str, types: Mapping[type, tuple[str, ...]], place: str) -> None:
    for key, default in DEFAULTS[model_type].items():
        if config.get(key, default) is None and default is not None and key not in NULLABLE:
            raise InputError(f"{place}{key}=null, but a model of this model_type has a value: copy it again.")
    for kind, keys in types.items():
        for key in keys:
            found = config.get(key)
            if found is not None and (type(found) is not kind or (kind is int and not 1 <= found <= MOST_TOKENS)):
                raise InputError(f"{place}{key}={show(found)} is not {WORDS[kind]}: copy it again.")


def check_section(section: Mapping[str, Any], names: Mapping[str, str], config: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if the section `model` of a config.json is not valid, with config.json's key."""
    try:
        ModelConfig.model_validate(section)
    except ValidationError as error:
        mistakes = [item for item in error.errors(include_url=False) if item["type"] != "default_factory_not_called"]
        key = _their_key([str(part) for part in mistakes[0]["loc"]], mistakes[0]["input"], names, config)
        if mistakes[0]["type"] == "missing":
            raise InputError(f"{path} has no {key}: copy it again.") from None
        problem, cure = describe_problem(mistakes[0])
        raise InputError(f"{path}: {key}={show(mistakes[0]['input'])} {problem}: {cure}.") from None


def _their_key(parts: list[str], found: Any, names: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """config.json's key for a key of the section `model`, by its name, or else by the value that was `found` there."""
    if parts[0] == "multipliers":  # under their own keys
        return ".".join(parts[1:])
    if of_tower := TOWER_NAMES.get(".".join(parts[:2])):
        return ".".join([of_tower, *parts[2:]])
    theirs = {ours: key for key, ours in names.items()}
    if "rope_scaling" not in config:
        theirs["rope_scaling"] = "rope_parameters"
    if parts[0] in theirs or parts[0] in config:
        return ".".join([theirs.get(parts[0], parts[0]), *parts[1:]])
    equal = [key for key, value in config.items() if type(value) is type(found) and value == found]
    return equal[0] if len(equal) == 1 else f"model.{'.'.join(parts)}"


def _check_rope(rope: Mapping[str, Any], place: str) -> None:
    for key, value in rope.items():
        if isinstance(value, dict):  # the positions of one kind of layer
            _check_rope(value, f"{place}.{key}")
        elif (most := ROPE_MOST.get(key)) and not (
            value is None or (type(value) in (int, float) and 0 < value <= most)
        ):
            wanted = "a number above 0" + (f", at most {most}" if most < inf else "")
            raise InputError(f"{place}.{key}={show(value)} is not {wanted}: copy it again.")
        elif key == "mrope_section" and not (isinstance(value, list) and all(type(n) is int for n in value)):
            raise InputError(f"{place}.{key}={show(value)} is not a list of whole numbers: copy it again.")
        elif key not in ("rope_type", "type") and isinstance(value, str):
            raise InputError(f"{place}.{key}={show(value)} is not a number: copy it again.")
