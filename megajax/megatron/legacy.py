"""A checkpoint in Megatron-LM's older format (`torch`): a file for each rank, with its part of each tensor.

`mp_rank_TT/model_optim_rng.pt` is what torch.save wrote of tensor-parallel rank TT; with pipeline stages the folder is
`mp_rank_TT_PPP`, with expert parallelism `mp_rank_TT_PPP_EEE`, or `mp_rank_TT_EEE` with one stage. Layers and experts
count from 0 in each file. Here each tensor is whole, by the names of Megatron's modules.
"""

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from megajax.config import ModelConfig
from megajax.errors import InputError, file_reader, shown
from megajax.layout.kinds import is_gated
from megajax.megatron import RANK_FILE
from megajax.megatron.distributed import (
    VOCABULARY,
    Chunk,
    MegatronTensors,
    NamedPart,
    StoredTensor,
    arguments_in,
    newest,
    own_name,
    row_of,
)
from megajax.megatron.gpt import tensor_shapes
from megajax.megatron.pickled import TensorInfo, TorchZip

# Modules of objects in the arguments and the random state, which are held and never called
HELD = ("megatron.", "torch", "numpy", "transformer_engine", "signal", "_codecs")
SIZES = {"tensor": "tensor_model_parallel_size", "pipeline": "pipeline_model_parallel_size"}
SIZES |= {"expert": "expert_model_parallel_size"}
SAME = (*SIZES.values(), "num_layers", "hidden_size", "num_attention_heads", "padded_vocab_size", "num_experts")


class Rank(NamedTuple):
    """The place of a file among the ranks."""

    tensor: int
    pipeline: int = 0
    expert: int = 0


class LocalTensor(NamedTuple):
    """A tensor of one file: where its numbers are."""

    file: str  # in the checkpoint's folder
    info: TensorInfo
    at: int  # byte of the file


class RankFile(NamedTuple):
    """What a file has: Megatron's arguments, and the tensors of each of its virtual stages."""

    arguments: dict[str, Any]
    stages: list[dict[str, LocalTensor]]


class LegacyTensors(MegatronTensors):
    """The tensors of such a checkpoint. Only the lists in its files are read before a tensor is asked for."""

    @file_reader("folder")
    def __init__(self, folder: str | Path, model: ModelConfig):
        self.folder, self._vocabulary = newest(Path(folder)), model.vocab_size
        self._placed = lru_cache(maxsize=4096)(self._place)
        files = _rank_files(self.folder)
        pieces: dict[str, dict[int, LocalTensor]] = {}  # by name and tensor-parallel rank
        arguments = next(iter(files.values())).arguments
        for name, shard, tensor in _whole_names(files, arguments, model):
            pieces.setdefault(name, {}).setdefault(shard, tensor)
        shapes = tensor_shapes(model)
        parts = {}
        for name, own in pieces.items():
            stored = _assembled(self.folder, name, own, _shards(name, arguments), shapes.get(name), model)
            parts[name] = NamedPart(stored, row_of(name))
        self._by_state = {"": parts}
        self._choose("")

    def _place(self, chunk: Chunk, stored: StoredTensor) -> int:
        return chunk.start  # the numbers themselves


def _rank_files(folder: Path) -> dict[Rank, RankFile]:
    """The files by rank. Raises InputError for one that is missing, damaged or of another checkpoint."""
    paths = sorted(folder.glob(f"mp_rank_[0-9]*/{RANK_FILE}"))
    if not paths:
        raise InputError(f"{folder} has no {RANK_FILE} in its folders mp_rank_*: copy the whole checkpoint.")
    files: dict[Rank, RankFile] = {}
    first: dict[str, Any] = {}
    for path in paths:
        found = _read(path, folder)
        first = first or found.arguments
        for name in SAME:
            if found.arguments.get(name) != first.get(name):
                theirs, ours = shown(found.arguments.get(name)), shown(first.get(name))
                problem = f"{path} is of {name}={theirs}, but {paths[0]} of {name}={ours}"
                raise InputError(f"{problem}: copy the files of one checkpoint.")
        files[_rank(path, first)] = found
    for axis, argument in SIZES.items():
        present, size = {getattr(rank, axis) for rank in files}, _size(first, argument)
        if missing := [rank for rank in range(min(size, len(present) + 1)) if rank not in present]:
            problem = f"{folder} has no file of the {axis}-parallel rank {missing[0]}, of {size}"
            raise InputError(f"{problem}: copy the whole checkpoint.")
    return files


def _rank(path: Path, arguments: Mapping[str, Any]) -> Rank:
    numbers = [int(text) for text in re.findall(r"_(\d{1,6})(?=_|$)", path.parent.name)]
    axes = ["tensor", *(axis for axis in ("pipeline", "expert") if _size(arguments, SIZES[axis]) > 1)]
    outside = any(number >= _size(arguments, SIZES[axis]) for axis, number in zip(axes, numbers, strict=False))
    if len(numbers) != len(axes) or outside:
        sizes = ", ".join(f"{name}={_size(arguments, name)}" for name in SIZES.values())
        raise InputError(f"{path.parent} is no folder of a rank with {sizes}: copy the files of one checkpoint.")
    return Rank(**dict(zip(axes, numbers, strict=True)))


def _size(arguments: Mapping[str, Any], name: str) -> int:
    size = arguments.get(name, 1)
    return size if isinstance(size, int) and size > 0 else 1


def _read(path: Path, folder: Path) -> RankFile:
    name = str(path.relative_to(folder))
    with path.open("rb") as file:
        archive = TorchZip(file, 0, path.stat().st_size, str(path), HELD)
        value = archive.value if isinstance(archive.value, dict) else {}
        arguments = arguments_in(value)
        if not arguments:
            raise InputError(f"{path} has no arguments (args), which say the parallel sizes: save it with Megatron-LM.")
        numbered = sorted(
            (key for key in value if re.fullmatch(r"model\d{1,3}", str(key))), key=lambda key: int(key[5:])
        )
        models = [value[key] for key in (["model"] if "model" in value else numbered)]
        if not models or not all(isinstance(model, dict) for model in models):
            raise InputError(f"{path} has no model: it is no checkpoint of Megatron-LM.")
        if any("language_model" in model for model in models):
            problem = f"{path} is of the model classes before Megatron-Core"
            raise InputError(f"{problem}: convert it with Megatron-LM's tools/checkpoint/convert.py --saver core.")
        stages = []
        for model in models:
            infos = {str(key): own for key, own in model.items() if isinstance(own, TensorInfo)}
            infos = {key: own for key, own in infos.items() if not key.endswith("_extra_state")}
            stages.append({key: LocalTensor(name, own, archive.place(own).at) for key, own in infos.items()})
    return RankFile(arguments, stages)


def _whole_names(
    files: Mapping[Rank, RankFile], arguments: Mapping[str, Any], model: ModelConfig
) -> Iterator[tuple[str, int, LocalTensor]]:
    """(name in the whole model, tensor-parallel rank, tensor); copies of a tensor too, the first stage's first."""
    experts = (model.num_experts or 0) // _size(arguments, SIZES["expert"])
    virtual = max(len(file.stages) for file in files.values())
    layers = {"decoder": 0, "mtp": model.num_layers}  # before the stage; modules count from the layers on
    for stage in range(virtual):
        for pipeline in range(_size(arguments, SIZES["pipeline"])):
            count = {"decoder": 0, "mtp": 0}
            for rank, file in files.items():
                if rank.pipeline != pipeline or stage >= len(file.stages):
                    continue
                for key, tensor in file.stages[stage].items():
                    name = own_name(key)
                    if found := re.match(r"(decoder|mtp)\.layers\.(\d{1,6})\.", name):
                        kind, layer = found[1], int(found[2])
                        count[kind] = max(count[kind], layer + 1)
                        name = f"{kind}.layers.{layers[kind] + layer}.{name[found.end() :]}"
                    if model.tie_embeddings and name == VOCABULARY[1]:
                        continue  # the last stage's copy of the embedding
                    yield _expert_name(name, rank.expert * experts, tensor.file), rank.tensor, tensor
            layers = {kind: first + count[kind] for kind, first in layers.items()}


def _expert_name(name: str, first: int, source: str) -> str:
    """The name of an expert's tensor, whose number in the file counts from `first` on."""
    if re.search(r"\.experts\.weight[12]$", name):
        cure = "load and save it with --moe-grouped-gemm of Transformer Engine"
        raise InputError(f"{source} has all experts in one tensor, {name}, which is not read: {cure}.")
    if found := re.search(r"\.experts\.local_experts\.(\d{1,6})\.", name):
        before, number, after = name[: found.start()], found[1], name[found.end() :]
    elif found := re.search(r"\.experts\.(linear_fc[12]\.(?:weight|bias))(\d{1,6})$", name):
        before, number, after = name[: found.start()], found[2], found[1]
    else:
        return name
    return f"{before}.experts.local_experts.{first + int(number)}.{after}"


def _shards(name: str, arguments: Mapping[str, Any]) -> int:
    """The number of ranks over which a tensor may be divided."""
    size = _size(arguments, SIZES["tensor"])
    own = arguments.get("expert_tensor_parallel_size")
    return own if ".local_experts." in name and isinstance(own, int) and 0 < own < size else size


def _assembled(
    folder: Path,
    name: str,
    pieces: Mapping[int, LocalTensor],
    shards: int,
    whole: tuple[int, ...] | None,
    model: ModelConfig,
) -> StoredTensor:
    """A tensor of the whole model, from the parts of the tensor-parallel ranks.

    It is divided along the dimension in which a part is `shards` times smaller than the model's tensor `whole`; a
    tensor of that shape, and one of another model, is the same on all ranks.
    """
    first = next(iter(pieces.values()))
    shape, dtype = first.info.shape, first.info.dtype
    if name in VOCABULARY:  # with padding
        whole = (shape[0] * shards, *shape[1:])
    differing = [i for i, (own, all_) in enumerate(zip(shape, whole or (), strict=False)) if own != all_]
    dimension = differing[0] if len(differing) == 1 and whole and len(shape) == len(whole) else None
    if shards == 1 or whole is None or dimension is None or shape[dimension] * shards != whole[dimension]:
        return StoredTensor(name, shape, dtype, (_chunk(first, (0,) * len(shape), shape, 0),))
    halves = 2 if "linear_fc1." in name and is_gated(model) else 1  # of each rank: its gate, its up-projection
    sizes = (*shape[:dimension], shape[dimension] // halves, *shape[dimension + 1 :])
    chunks = []
    for rank in range(shards):
        own = pieces.get(rank)
        if own is None:
            problem = f"{folder} has no part of {name} of the tensor-parallel rank {rank}"
            raise InputError(f"{problem}: copy the whole checkpoint.")
        if (own.info.shape, own.info.dtype) != (shape, dtype):
            problem = f"{folder / own.file} has another shape or dtype of {name} than {first.file}"
            raise InputError(f"{problem}: copy the files of one checkpoint.")
        for half in range(halves):
            start = (half * shards + rank) * sizes[dimension]
            offsets = tuple(start if i == dimension else 0 for i in range(len(shape)))
            chunks.append(_chunk(own, offsets, sizes, half))
    return StoredTensor(name, whole, dtype, tuple(chunks))


def _chunk(tensor: LocalTensor, offsets: tuple[int, ...], sizes: tuple[int, ...], half: int) -> Chunk:
    """A block of numbers that are side by side in the file."""
    length = tensor.info.dtype.itemsize * math.prod(sizes)
    return Chunk(offsets, sizes, tensor.file, tensor.at + half * length, length)
