"""Weights from a Hugging Face folder onto the devices of a mesh, and from a run into a folder."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

from megajax.checkpoint.manager import describe_model
from megajax.config import ModelConfig
from megajax.config.kinds import block_layers
from megajax.config.tree import show
from megajax.errors import ConfigError, InputError
from megajax.hf.folder import Weights, read_config, write_folder
from megajax.hf.gpt2 import Gpt2
from megajax.hf.llama import Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe
from megajax.hf.tensors import Tensor, names
from megajax.sharding import BLOCKS

# Buffers of older folders, which are no parameters.
UNUSED = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
VOCABULARY_DIM = {"embedding.tokens": 0, "head": -1}  # the padded dimension


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
        readers = {name: _Reader(weights, entries[name], model, shape.shape) for name, shape in abstract.items()}
        _check_tensors(weights, [*readers.values()])
        return {
            name: jax.make_array_from_callback(shape.shape, shape.sharding, readers[name].block)
            for name, shape in abstract.items()
        }


class _Reader:
    """Reads blocks of one parameter from the tensors that hold it."""

    def __init__(self, weights: Weights, tensor: Tensor, model: ModelConfig, padded: Sequence[int]):
        self.weights, self.tensor = weights, tensor
        self.padded, self.shape = tuple(padded), unpadded(tensor.ours, padded, model)
        self.names = tensor_names(tensor, model)
        self.rest = self.shape[tensor.stacked :]  # of the part in one tensor

    def block(self, index: tuple[slice, ...] | None) -> np.ndarray:
        """The slices `index` of the parameter, FP32; rows of the vocabulary's padding are zeros."""
        assert index is not None
        bounds = [s.indices(size)[:2] for s, size in zip(index, self.padded, strict=True)]
        out = np.zeros([stop - start for start, stop in bounds], np.float32)
        held = [slice(start, min(stop, size)) for (start, stop), size in zip(bounds, self.shape, strict=True)]
        stacked, wanted = held[: self.tensor.stacked], tuple(held[self.tensor.stacked :])
        if any(s.start >= s.stop for s in held):
            return out
        target, slices = tuple(slice(s.stop - s.start) for s in wanted), self.tensor.their_slices(self.rest, wanted)
        for at in np.ndindex(*(s.stop - s.start for s in stacked)):
            name = self.names[tuple(i + s.start for i, s in zip(at, stacked, strict=True))]
            out[(*at, *target)] = self.tensor.to_ours(self.weights.read(name, slices), self.rest, wanted)
        return out


def _check_tensors(weights: Weights, readers: Sequence[_Reader]) -> None:
    """Raise InputError for tensors that are missing, have another shape, or that no parameter needs."""
    expected: dict[str, list[int]] = {}
    for reader in readers:
        tensor, part = reader.tensor, reader.tensor.their_shape(reader.rest)
        for name in reader.names.values():
            shape = expected.setdefault(name, list(part))
            if tensor.fused is not None:
                shape[tensor.fused] = max(shape[tensor.fused], tensor.start + part[tensor.fused])
    for name, shape in expected.items():
        if name not in weights.files:
            raise InputError(f"{weights.folder} has no tensor {name}: copy the whole model.")
        if (found := weights.shape(name)) != tuple(shape):
            raise InputError(
                f"{weights.folder / weights.files[name]}: {name} has the shape {list(found)}, but by config.json "
                f"it has {shape}: copy both files of the same model."
            )
    extra = [n for n in weights.files if n not in expected and not n.endswith(UNUSED) and n != "lm_head.weight"]
    if extra:
        raise InputError(f"{weights.folder} has the tensor {extra[0]}, which its model_type does not have.")


def tensor_names(tensor: Tensor, model: ModelConfig) -> dict[tuple[int, ...], str]:
    """The tensors of a parameter, by the indices (row, expert) of the dimensions that are spread over tensors."""
    layers = block_layers(model)[tensor.ours.split(".")[1]] if tensor.ours.startswith(BLOCKS) else ()
    return names(tensor, layers, model.num_experts or 0)


def unpadded(name: str, shape: Sequence[int], model: ModelConfig) -> tuple[int, ...]:
    """The shape of a parameter without the padding of the vocabulary."""
    sizes = list(shape)
    if name in VOCABULARY_DIM:
        sizes[VOCABULARY_DIM[name]] = model.vocab_size
    return tuple(sizes)


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
