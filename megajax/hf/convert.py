"""Weights from a Hugging Face folder onto the devices of a mesh, and from a run into a folder."""

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from megajax.checkpoint.description import compare_models, describe_model
from megajax.config import ModelConfig
from megajax.console import command
from megajax.errors import ConfigError, InputError, file_reader, shown
from megajax.files import is_number
from megajax.hf.beside import NOTHING, Beside
from megajax.hf.classifiers import SCORE, classifier_keys, with_own_head
from megajax.hf.deepseek import DeepseekV2, DeepseekV3, KimiK2
from megajax.hf.families import Gemma2, Gemma3Text, Nemotron, Olmo2, Phi3, SmolLm3
from megajax.hf.folder import HEADS, FolderTensors, check_tied, read_config, write_folder
from megajax.hf.gpt2 import Gpt2
from megajax.hf.gpt_oss import GptOss
from megajax.hf.kimi_linear import KimiLinear
from megajax.hf.llama import Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe
from megajax.hf.mamba_hybrids import Bamba, FalconH1, GraniteMoeHybrid, Mamba2Only
from megajax.hf.modernbert import ModernBert
from megajax.hf.nemotron_h import NemotronH
from megajax.hf.quantising import QuantisedWeights, StoredForm, quantised_weights
from megajax.hf.qwen3_5 import Qwen35MoeText, Qwen35Text
from megajax.hf.qwen3_next import Qwen3Next
from megajax.hf.qwen_vl import Qwen2Vl, Qwen3Vl, Qwen25Vl
from megajax.hf.reader import Reader, check_tensors, on_devices, unpadded, unread_head
from megajax.hf.t5 import T5
from megajax.hf.tensors import Family, Tensor, assembled, tensor_names, tensors_by_name
from megajax.hf.values import check_section, check_tower, check_values, complete
from megajax.hf.vision_language import Gemma3, Llava, VisionLanguage
from megajax.layout.kinds import EXTRA, extra_layers, without_extra
from megajax.model.block import layer_state, state_by_name
from megajax.schema.tree import show

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        *(Gpt2(), GptOss(), Llama(), Mistral(), Mixtral(), Qwen2(), Qwen3(), Qwen3Moe(), Qwen3Next()),
        *(Qwen35Text(), Qwen35MoeText()),
        *(Gemma2(), Gemma3Text(), Phi3(), Olmo2(), Nemotron(), SmolLm3()),
        *(DeepseekV2(), DeepseekV3(), KimiK2(), KimiLinear(), NemotronH()),
        *(GraniteMoeHybrid(), Bamba(), FalconH1(), Mamba2Only(), T5(), ModernBert()),
        *(Llava(), Gemma3(), Qwen2Vl(), Qwen25Vl(), Qwen3Vl()),
    )
}
WITH_IMAGES = tuple(name for name, family in FAMILIES.items() if isinstance(family, VisionLanguage))


@file_reader("folder")
def read_folder(folder: str | Path, with_images: bool = True) -> tuple[Family, dict[str, Any], dict[str, Any]]:
    """(family, section `model`, complete config.json) of a folder; without images of its language model alone.

    Raises InputError for a family that is not known, a value that no model has, and a model that megajax does not have.
    """
    config, path = read_config(folder, WITH_IMAGES if with_images else (), FAMILIES), Path(folder) / "config.json"
    name = config["model_type"]
    if name not in FAMILIES:
        if (whole := read_config(folder, WITH_IMAGES)["model_type"]) in FAMILIES:
            raise InputError(
                f"{path}: megajax reads model_type={whole} only with its images: set model.vision, or take the section "
                f"model from `{command('hf', 'config', folder)}`."
            )
        raise InputError(f"{path}: model_type={shown(name)} is not known: megajax reads {', '.join(sorted(FAMILIES))}.")
    family, config = FAMILIES[name], complete(config, path)
    check_values(config, family.names, path)
    if isinstance(family, VisionLanguage):
        config = _with_parts(family, config, path)
    try:
        section = family.read(config)
    except KeyError as key:
        raise InputError(f"{path} has no {key}: copy it again.") from None
    except (ArithmeticError, AttributeError, IndexError, TypeError) as problem:  # a value of a type that is not checked
        raise InputError(f"{path} is damaged ({shown(problem)}): copy it again.") from None
    except ValueError as problem:
        raise InputError(f"{path}: {shown(problem)}, and megajax cannot compute this: use another model.") from None
    check_section(section, family.names, config, path)
    return family, _as_stored(Path(folder), family, section, config), config


def _with_parts(family: VisionLanguage, config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """config.json with the complete one of the text model; errors of both parts as in `read_folder`."""
    check_tied(config, config.get("text_config") or {}, path)
    config = family.with_text_config(dict(config))
    for part, known in (("text_config", (family.text.model_type,)), ("vision_config", family.tower_types)):
        if (found := (config.get(part) or {}).get("model_type", known[0])) not in known:
            raise InputError(
                f"{path}: {part}.model_type={shown(found)} is not {' or '.join(known)}, and megajax cannot compute "
                "this: use another model."
            )
    check_tower(config.get("vision_config") or {}, family.tower_type, path)
    config["text_config"] = complete(config["text_config"], path)
    check_values(config["text_config"], family.text.names, path)
    return config


def _as_stored(folder: Path, family: Family, section: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """`section` with what the folder's tensors decide, as in transformers; unchanged if they cannot be read.

    A head that differs from the token embedding is used, whatever config.json says.
    """
    if not section["tie_embeddings"] and not any(section.get(each.layers) for each in EXTRA):
        return section
    model = ModelConfig.model_validate(section)
    tensors = {tensor.ours: tensor for tensor in family.tensors(model)}
    modules = [
        tensor for ours, tensor in tensors.items() if ours.startswith(tuple(f"blocks.{each.name}." for each in EXTRA))
    ]
    names = {name for tensor in modules for name in tensor_names(tensor, model).values()}
    changed = dict(section)
    names_of = config.get("quantization_config"), family.stored_names
    with contextlib.suppress(InputError), FolderTensors(folder, *names_of) as weights:
        if names and names.isdisjoint(weights.files):
            changed = {
                key: value for key, value in changed.items() if key not in without_extra()
            }  # transformers writes the number, but not the modules
        embedding, head = tensors["embedding.tokens"].theirs, _head_in(weights)
        tied = model.tie_embeddings and embedding in weights.files
        if tied and head is not None and not weights.equal(embedding, head):
            changed["tie_embeddings"] = False
            warnings.warn(
                f"{folder}: tie_word_embeddings=true in config.json, but {head} and {embedding} differ: both are read, "
                "as transformers 5 does; write false there.",
                stacklevel=2,
            )
    return changed


def _head_in(weights: FolderTensors) -> str | None:
    """The name of the head in a folder, None if it has none."""
    return next((name for name in HEADS if name in weights.files), None)


def read_model(folder: str | Path) -> dict[str, Any]:
    """The section `model` of a folder's config.json; errors as in `read_folder`."""
    return read_folder(folder)[1]


def longest(section: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """The longest sequence of a folder's model by its section and its config.json; Mamba-2's do not say it."""
    text = config.get("text_config") or config
    return section.get("max_positions") or text.get("max_position_embeddings") or 2048


def _describe(section: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The description of the network of a section `model`, with the vocabulary padded as that of `model`."""
    return describe_model(ModelConfig.model_validate({"vocab_multiple": model.vocab_multiple, **section}))


def describe_section(section: Mapping[str, Any], model: ModelConfig) -> dict[str, Any]:
    """The description of a folder's weights, to compare with `model`, which may leave out layers after its own."""
    return {"model": _describe({**section, **({} if extra_layers(model) else without_extra())}, model)}


def load(
    folder: str | Path,
    params: Mapping[str, jax.ShapeDtypeStruct],
    layer_state: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    model: ModelConfig,
    setting: str,
    location: str = "",
    allowed: Sequence[str] | None = None,
) -> tuple[dict[str, jax.Array], dict[str, dict[str, jax.Array]]]:
    """The parameters of a folder in the canonical shapes, and the layer state, as `checkpoint.restore_model`.

    They have the dtypes and the shardings of `params` and `layer_state`. Each process reads only the blocks of tensors
    that its devices hold, in pieces (`Reader`). Errors as in `open_readers`.
    """
    shapes = {name: array.shape for name, array in params.items()}
    with open_readers(folder, model, shapes, setting, location, allowed) as readers:
        return on_devices(readers, params, layer_state)


@contextlib.contextmanager
def open_readers(
    folder: str | Path,
    model: ModelConfig,
    shapes: Mapping[str, Sequence[int]],
    setting: str,
    location: str = "",
    allowed: Sequence[str] | None = None,
) -> Iterator[dict[str, Reader]]:
    """A reader of each parameter, by name, and of the layers' state, by names as in `state_by_name`.

    `shapes` are the parameters' canonical ones. `setting` gave the folder, at `location`; the settings `allowed` may
    differ (`compare_models`).

    `model` may have more tokens than the folder, and no layers after the model's. Raises InputError if the folder
    is of another model than `model`, or if a tensor is missing or misshaped.
    """
    family, section, config = read_folder(folder, model.vision is not None)
    new_tokens = range(section["vocab_size"], model.vocab_size)
    shown = section | ({"vocab_size": model.vocab_size} if new_tokens else {})
    cure = f"take the section model from `{command('hf', 'config', folder)}`"
    compare_models(describe_section(shown, model), model, f"{setting}={folder}{location}", cure, allowed)
    entries = {tensor.ours: tensor for tensor in family.tensors(model)}
    copies: dict[str, list[str]] = {}
    for tensor in family.copies(model):
        copies.setdefault(tensor.ours, []).append(tensor.theirs)
    shapes = {**shapes, **{name: array.shape for name, array in state_by_name(layer_state(model)).items()}}
    unread = unread_head([entries.pop(name) for name in entries.keys() - shapes.keys()], model)
    if SCORE.ours in shapes:
        entries[SCORE.ours] = SCORE
    elif unread:
        unread += (SCORE.theirs,)
    assert entries.keys() == shapes.keys(), entries.keys() ^ shapes.keys()
    theirs = model.model_copy(update={"vocab_size": section["vocab_size"]})
    with FolderTensors(folder, config.get("quantization_config"), family.stored_names) as weights:
        embedding = entries["embedding.tokens"]
        head = _head_in(weights)
        if model.tie_embeddings and embedding.theirs not in weights.files and head is not None:
            entries["embedding.tokens"] = replace(embedding, theirs=head)
        for tensor in family.alternatives(theirs):
            if weights.files.keys() >= {*tensor_names(tensor, model).values()}:
                entries[tensor.ours] = tensor
        readers = {
            name: Reader(weights, entries[name], theirs, shape, new_tokens, copies.get(name, ()))
            for name, shape in shapes.items()
        }
        check_tensors(weights, [*readers.values()], family.unused(config) + unread)
        yield readers


def own_parameters(folder: str | Path, with_images: bool) -> set[str]:
    """The parameters that an objective may have in place of the head, and the folder has: a classifier's."""
    family, _, config = read_folder(folder, with_images)
    with FolderTensors(Path(folder), config.get("quantization_config"), family.stored_names) as weights:
        return {SCORE.ours} if SCORE.theirs in weights.files else set()


def family_for(model: ModelConfig, origin: str | None = None) -> Family:
    """The family whose config.json says all of `model`; of several that of the model_type `origin`.

    Raises InputError if there is none.
    """
    mine = describe_model(model)
    problems = []
    for family in sorted(FAMILIES.values(), key=lambda family: family.model_type != origin):
        try:
            theirs = _describe(family.read(family.write(model)), model)
        except (ValueError, KeyError, ConfigError):
            continue
        differ = [name for name in mine if mine[name] != theirs.get(name)]
        if not differ:
            return family
        problems.append((len(differ), family.model_type, f"model.{differ[0]}={show(mine[differ[0]])}"))
    _, nearest, setting = min(problems)
    raise InputError(
        f"no model_type that megajax writes has {setting} with the run's other settings: the nearest is {nearest}."
    )


def export(
    weights: Mapping[str, Any],
    model: ModelConfig,
    folder: Path,
    form: StoredForm,
    beside: Beside = NOTHING,
) -> None:
    """Write the parameters and the layers' state `weights`, canonical arrays read layer by layer, as a folder.

    Raises InputError if no family fits, or if the folder cannot be written.
    """
    family, dtype = family_for(model, beside.origin), form.dtype
    config = {"pad_token_id": None, **beside.keys, **family.write(model)}
    if "text_config" in config:
        config["text_config"] = {"pad_token_id": None, **beside.keys, **config["text_config"]}
    config |= {"dtype": dtype, "torch_dtype": dtype}
    entries = with_own_head(_entries(family, model), weights, family.model_type)
    if SCORE in entries:
        config |= classifier_keys(family.model_type, weights[SCORE.ours].shape[-1], beside.labels)
    quantised = _quantised(form, family, model, entries)
    config |= quantised.settings
    tensors = quantised.stored(stream(weights, model, dtype, beside.origin, quantised.names))
    write_folder(folder, config, tensors, beside.files)


def check_export(model: ModelConfig, weights: Collection[str], quantisation: str) -> None:
    """Raise InputError if no folder has a model with parameters of these names, or if it cannot be quantised so."""
    family = family_for(model)
    entries = with_own_head(_entries(family, model), weights, family.model_type)
    _quantised(StoredForm("float32", quantisation), family, model, entries)


def _quantised(form: StoredForm, family: Family, model: ModelConfig, entries: Sequence[Tensor]) -> QuantisedWeights:
    """What a folder quantises. Engines have a linear layer for the head of a model with tied embeddings too."""
    untied = _entries(family, model.model_copy(update={"tie_embeddings": False}))
    heads = [tensor.theirs for tensor in untied if tensor.ours == "head"]
    return quantised_weights(form, tensors_by_name(entries, model), model, family.model_type, heads)


def _entries(family: Family, model: ModelConfig) -> list[Tensor]:
    return [*family.tensors(model), *family.copies(model)]


def stream(
    weights: Mapping[str, Any],
    model: ModelConfig,
    dtype: str,
    origin: str | None = None,
    in_fp32: Collection[str] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of `export` one by one with their names, in the order of the layers.

    The layers' state keeps its dtype, and the tensors `in_fp32` are FP32. Raises InputError if no family fits, or
    if the weights lack a tensor of it.
    """
    family, number, states = family_for(model, origin), np.dtype(dtype), state_by_name(layer_state(model))
    tensors = with_own_head(_entries(family, model), weights, family.model_type)
    if absent := next((tensor.ours for tensor in tensors if tensor.ours not in weights), None):
        raise InputError(
            f"the model has no {absent}, but model_type {family.model_type} does: train it with an objective that "
            "reads logits (objective.kind)."
        )
    return their_tensors(weights, tensors, model, number, states, in_fp32)


def their_tensors(
    weights: Mapping[str, Any],
    entries: Sequence[Tensor],
    model: ModelConfig,
    dtype: np.dtype,
    states: Mapping[str, jax.ShapeDtypeStruct],
    in_fp32: Collection[str] = (),
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of the `entries` one by one with their names, in the order of the layers, without padding.

    Those of the layers' state have the dtypes in `states`, the tensors `in_fp32` are FP32, the others have `dtype`.
    """
    parts = tensors_by_name(entries, model)
    for name in sorted(parts, key=in_order):
        arrays = []
        for tensor, at in parts[name]:
            array = np.asarray(weights[tensor.ours][at])
            array = array[tuple(map(slice, unpadded(tensor.ours, weights[tensor.ours].shape, model)[len(at) :]))]
            wanted = states[tensor.ours].dtype if tensor.ours in states else np.float32 if name in in_fp32 else dtype
            arrays.append((tensor, tensor.divided(array).astype(wanted, copy=False)))
        yield name, assembled(arrays)


def in_order(name: str) -> list[tuple[int, int | str]]:
    """A sort key that has layer 10 after layer 9."""
    return [(0, int(word)) if is_number(word) else (1, word) for word in name.split(".")]
