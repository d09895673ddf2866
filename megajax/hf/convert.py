"""Weights from a Hugging Face folder onto the devices of a mesh, and from a run into a folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from megajax.checkpoint.manager import describe_model
from megajax.config import ModelConfig
from megajax.config.tree import show
from megajax.errors import ConfigError, InputError
from megajax.hf.folder import Weights, read_config, write_folder
from megajax.hf.gpt2 import Gpt2
from megajax.hf.llama import Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe
from megajax.hf.reader import Reader, check_tensors, tensor_names, unpadded
from megajax.hf.tensors import Tensor


class Family(Protocol):
    """One family of models: how its config.json and its tensors correspond to megajax's."""

    model_type: str
    architecture: str

    def read(self, config: dict[str, Any]) -> dict[str, Any]: ...

    def write(self, model: ModelConfig) -> dict[str, Any]: ...

    def tensors(self, model: ModelConfig) -> list[Tensor]: ...


FAMILIES: dict[str, Family] = {
    f.model_type: f for f in (Gpt2(), Llama(), Mistral(), Mixtral(), Qwen2(), Qwen3(), Qwen3Moe())
}


def family_of(config: Mapping[str, Any], location: str) -> Family:
    """The family of a config.json at `location`. Raises InputError for one that is not known."""
    name = config["model_type"]
    if name not in FAMILIES:
        raise InputError(f"{location}: model_type={name} is not known: megajax reads {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]


def read_model(folder: str | Path) -> dict[str, Any]:
    """The section `model` of a folder's config.json. Raises InputError for a model that megajax does not have."""
    config, path = read_config(folder), Path(folder) / "config.json"
    try:
        return family_of(config, str(path)).read(config)
    except KeyError as key:
        raise InputError(f"{path} has no {key}: copy it again.") from None
    except ValueError as problem:
        raise InputError(f"{path}: {problem}, which megajax's model does not have: use another model.") from None


def compare_models(folder: str | Path, model: ModelConfig, shown: str) -> None:
    """Raise InputError if the model of a folder is not `model`; `shown` is the setting that gave the folder."""
    theirs = ModelConfig.model_validate({"vocab_multiple": model.vocab_multiple} | read_model(folder))
    found, mine = describe_model(theirs), describe_model(model)
    for name in {**found, **mine}:
        if found.get(name) != mine.get(name):
            value = show(found.get(name))
            raise InputError(
                f"{shown} is a model with model.{name}={value}, but this run has {show(mine.get(name))}: "
                f"set model.{name}={value}, or name another folder."
            )


def load(
    folder: str | Path, model: ModelConfig, abstract: Mapping[str, jax.ShapeDtypeStruct], setting: str, location: str
) -> dict[str, jax.Array]:
    """The parameters of a folder in the canonical shapes, FP32, and the shardings of `abstract`.

    Each process reads only the blocks of tensors that its devices hold, a shard of one parameter at a time. `setting`
    gave the folder, at `location`. Raises InputError if the folder is of another model than `model`, or damaged.
    """
    compare_models(folder, model, f"{setting}={folder}{location}")
    entries = {tensor.ours: tensor for tensor in family_of(read_config(folder), str(folder)).tensors(model)}
    assert entries.keys() == abstract.keys(), entries.keys() ^ abstract.keys()
    with Weights(folder) as weights:
        readers = {name: Reader(weights, entries[name], model, shape.shape) for name, shape in abstract.items()}
        check_tensors(weights, [*readers.values()])
        return {name: readers[name].on_devices(shape.sharding) for name, shape in abstract.items()}


def family_for(model: ModelConfig) -> Family:
    """The family whose config.json says all of `model`. Raises InputError if there is none."""
    mine = describe_model(model)
    problems = []
    for family in FAMILIES.values():
        try:
            read = family.read(family.write(model))
            theirs = describe_model(ModelConfig.model_validate({"vocab_multiple": model.vocab_multiple} | read))
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


def export(weights: Mapping[str, Any], model: ModelConfig, folder: Path, dtype: str, extra: Mapping[str, Any]) -> None:
    """Write the parameters `weights`, canonical arrays that are read layer by layer, as a folder.

    `extra` are further keys of config.json. Raises InputError if no family fits, or if the folder cannot be written.
    """
    family = family_for(model)
    config = {**family.write(model), "dtype": dtype, "torch_dtype": dtype, **extra}
    write_folder(folder, config, _exported(weights, family.tensors(model), model, np.dtype(dtype)))


def _exported(
    weights: Mapping[str, Any], entries: Sequence[Tensor], model: ModelConfig, dtype: np.dtype
) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor with its name, in the order of the layers."""
    parts: dict[str, list[tuple[Tensor, tuple[int, ...]]]] = {}
    for tensor in entries:
        for at, name in tensor_names(tensor, model).items():
            parts.setdefault(name, []).append((tensor, at))
    for name in sorted(parts, key=_in_order):
        arrays = []
        for tensor, at in parts[name]:
            array = np.asarray(weights[tensor.ours][at])
            array = array[tuple(map(slice, unpadded(tensor.ours, weights[tensor.ours].shape, model)[len(at) :]))]
            arrays.append(tensor.to_theirs(array).astype(dtype))
        dimension = parts[name][0][0].fused
        yield name, arrays[0] if dimension is None else np.concatenate(arrays, axis=dimension)


def _in_order(name: str) -> list[tuple[int, int | str]]:
    """A sort key that has layer 10 after layer 9."""
    return [(0, int(word)) if word.isdigit() else (1, word) for word in name.split(".")]
