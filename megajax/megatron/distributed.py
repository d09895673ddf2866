"""A checkpoint in Megatron-Core's distributed format (`torch_dist`): its tensors, one layer and expert at a time.

The folder has `.metadata`, a pickle with the shape of each tensor and the place of each of its chunks, and files
`__RANK_NUMBER.distcp` with the chunks, each as torch.save writes a tensor. Layers that are alike are one tensor there,
`[L, ...]`, and so are experts, `[E, ...]`; here each is a tensor of its own, by the names of Megatron's modules.
"""

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megajax.config import ModelConfig
from megajax.errors import InputError, file_reader, shown
from megajax.megatron import METADATA, NEWEST, RANK_FILE, is_distributed, is_legacy
from megajax.megatron.pickled import Plain, TensorInfo, TorchZip, load_plain

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# Norms that are fused with the layer after them, as Transformer Engine's modules name them
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mtp_model_layer.": "transformer_layer.",
}
# An array of the optimizer's state in model space, which has the name, the shape and the layers of its parameter
OPTIMIZER_STATE = re.compile(r"(?:chained_\d{1,4}\.)?optimizer\.state\.(\w{1,64})\.")


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor, and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint.

    An optimizer's tensor may be cut into `fragments` along each dimension. Its chunks then have one more dimension,
    with the numbers of a fragment one after another.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[Chunk, ...]
    fragments: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NamedPart:
    """A tensor by the name of its module: a stored one, at an index of its leading dimensions."""

    stored: StoredTensor
    at: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape[len(self.at) :]


class MegatronTensors:
    """The tensors of a checkpoint: their shapes, and slices of them. Nothing is read before it is asked for.

    Raises InputError, with a sentence, for files that are missing or damaged, or that name anything but tensors.
    """

    described_by = "the section model"  # the shapes that are expected

    @file_reader("folder")
    def __init__(self, folder: str | Path, model: ModelConfig):
        """`model` is the run's: prediction modules count from its layers on, the vocabulary is without padding."""
        self.folder, self._vocabulary = newest(Path(folder)), model.vocab_size
        self._placed = lru_cache(maxsize=4096)(self._place)
        self._by_state: dict[str, dict[str, NamedPart]] = {"": {}}
        stored = in_model_space(_stored_tensors(self.folder), str(self.folder / METADATA))
        for state, name, part in named_parts(stored, model.num_layers):
            self._by_state.setdefault(state, {})[state_prefix(state) + name] = part
        self._choose("")

    def _choose(self, state: str) -> None:
        self.prefix, self._parts = state_prefix(state), self._by_state.get(state, {})
        self.files = {name: part.stored.chunks[0].file for name, part in self._parts.items()}

    @property
    def states(self) -> set[str]:
        """The arrays of the optimizer's state that the checkpoint has in model space, such as exp_avg."""
        return self._by_state.keys() - {""}

    def of_state(self, state: str) -> "MegatronTensors":
        """The tensors of such an array instead, by the names of the parameters after `state_prefix`."""
        chosen = copy.copy(self)
        chosen._choose(state)
        return chosen

    def __enter__(self) -> "MegatronTensors":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing stays open."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without the padding of the vocabulary."""
        shape = self._parts[name].shape
        return (min(shape[0], self._vocabulary), *shape[1:]) if name.removeprefix(self.prefix) in VOCABULARY else shape

    def itemsize(self, name: str) -> float:
        """Bytes of a number of a tensor."""
        return self._parts[name].stored.dtype.itemsize

    @file_reader("self.folder")
    def read(self, name: str, slices: Sequence[slice]) -> np.ndarray:
        """A block of a tensor, in its own dtype; only the rows that hold it are read."""
        part = self._parts[name]
        wanted = (*(slice(i, i + 1) for i in part.at), *slices)
        lengths = [len(range(*s.indices(size))) for s, size in zip(wanted, part.stored.shape, strict=True)]
        out, filled = np.empty(lengths, part.stored.dtype), 0
        if part.stored.fragments is not None:
            self._read_fragments(part.stored, part.stored.fragments, wanted, out)
            return out[(0,) * len(part.at)]
        for chunk in part.stored.chunks:
            here, there = [], []
            for s, offset, size in zip(wanted, chunk.offsets, chunk.sizes, strict=True):
                step = s.step or 1
                first = s.start + max(0, -(-(offset - s.start) // step)) * step
                last = min(s.stop, offset + size)
                here.append(slice(first - offset, max(last - offset, first - offset), step))
                there.append(
                    slice((first - s.start) // step, (first - s.start) // step + len(range(first, last, step)))
                )
            if all(s.stop > s.start for s in there):
                block = self._chunk(chunk, part.stored)[tuple(here)]
                out[tuple(there)] = block
                filled += block.size
        if filled != out.size:
            raise InputError(f"{self.folder}: chunks of {part.stored.key} are missing: copy all of its .distcp files.")
        return out[(0,) * len(part.at)]

    def _read_fragments(
        self, stored: StoredTensor, fragments: tuple[int, ...], wanted: Sequence[slice], out: np.ndarray
    ) -> None:
        """Fill `out` with the block `wanted` of a tensor whose fragments are stored as rows of numbers."""
        shape = [size // count for size, count in zip(stored.shape, fragments, strict=True)]
        first = next((dim for dim, size in enumerate(shape) if size > 1), 0)  # whose rows are read
        row = math.prod(shape[first + 1 :])
        indices = [np.arange(s.start, s.stop, s.step or 1) for s in wanted]
        held = [np.unique(index // size) for index, size in zip(indices, shape, strict=True)]
        for at in itertools.product(*held):
            there = [np.flatnonzero(i // size == f) for i, size, f in zip(indices, shape, at, strict=True)]
            here = [i[w] - f * size for i, w, size, f in zip(indices, there, shape, at, strict=True)]
            start, stop = int(here[first][0]), int(here[first][-1]) + 1
            rows = self._row_of_fragment(stored, tuple(map(int, at)), start * row, stop * row)
            rows = rows.reshape(*(1,) * first, stop - start, *shape[first + 1 :])
            here[first] = here[first] - start
            out[np.ix_(*there)] = rows[np.ix_(*here)]

    def _row_of_fragment(self, stored: StoredTensor, at: tuple[int, ...], start: int, stop: int) -> np.ndarray:
        """The numbers from `start` to `stop` of a fragment."""
        out, filled = np.empty(stop - start, stored.dtype), 0
        for chunk in stored.chunks:
            first, last = chunk.offsets[-1], chunk.offsets[-1] + chunk.sizes[-1]
            begin, end = max(first, start), min(last, stop)
            if chunk.offsets[:-1] == at and begin < end:
                out[begin - start : end - start] = self._chunk(chunk, stored).reshape(-1)[begin - first : end - first]
                filled += end - begin
        if filled != out.size:
            raise InputError(f"{self.folder}: chunks of {stored.key} are missing: copy all of its .distcp files.")
        return out

    def _chunk(self, chunk: Chunk, stored: StoredTensor) -> np.ndarray:
        path, at = self.folder / chunk.file, self._placed(chunk, stored)
        return (
            np.memmap(path, stored.dtype, "r", at, chunk.sizes)
            if chunk.sizes
            else np.fromfile(path, stored.dtype, 1, offset=at).reshape(())
        )

    def _place(self, chunk: Chunk, stored: StoredTensor) -> int:
        """The first byte of a chunk's numbers in its file."""
        path = self.folder / chunk.file
        source = f"{path} ({stored.key})"
        if chunk.start + chunk.length > path.stat().st_size:
            raise InputError(f"{path} is shorter than {METADATA} says: copy it again.")
        with path.open("rb") as file:  # of its own: several threads read at the same time
            archive = TorchZip(file, chunk.start, chunk.length, source)
            info = archive.value
            if not isinstance(info, TensorInfo) or (info.shape, info.dtype) != (chunk.sizes, stored.dtype):
                raise InputError(f"{source} has another tensor than {METADATA} says: copy the whole checkpoint again.")
            return archive.place(info).at


def newest(folder: Path) -> Path:
    """The folder of the checkpoint: that of the newest step, if the folder has several."""
    pointer = folder / NEWEST
    if is_distributed(folder) or not pointer.is_file():
        return folder
    text = pointer.read_bytes()[:32].decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,9}|release", text):
        raise InputError(f"{pointer} has no step: give the folder of one checkpoint, iter_0001000.")
    found = folder / ("release" if text == "release" else f"iter_{int(text):07d}")
    if not is_distributed(found) and not is_legacy(found):
        problem = f"{found} is no checkpoint of Megatron-Core (it has neither {METADATA} nor folders mp_rank_*)"
        raise InputError(f"{problem}: save it with --ckpt-format torch_dist.")
    return found


@file_reader("folder")
def saved_arguments(folder: str | Path) -> dict[str, Any]:
    """Megatron's arguments of the run that saved a checkpoint, by name: numbers, texts, lists of them and dtypes.

    Raises InputError if the checkpoint has none.
    """
    folder = newest(Path(folder))
    found = {
        name: f"torch.{own}" if isinstance(own, np.dtype) else own
        for name, own in arguments_in(common_state(folder)).items()
    }
    plain = {name: own for name, own in found.items() if _is_plain(own) and name not in ("made_of", "state")}
    if not plain:
        raise InputError(f"{folder} has no arguments (args): give the launch script of its run.")
    return plain


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def arguments_in(common: Mapping[Any, Any]) -> dict[str, Any]:
    """Megatron's arguments in the common state of a checkpoint, as they are there; empty without any."""
    return vars(common["args"]) if isinstance(common.get("args"), Plain) else {}


def common_state(folder: Path) -> dict[Any, Any]:
    """What all ranks have in common: a file of its own, an object among the tensors, or in any rank's file.

    Empty if there is none.
    """
    files = (folder / "common.pt", *sorted(folder.glob(f"mp_rank_[0-9]*/{RANK_FILE}")))
    path, start, length = next((file for file in files if file.is_file()), files[0]), 0, None
    if not path.is_file():
        metadata = load_plain((folder / METADATA).read_bytes, str(folder / METADATA))
        stored = getattr(metadata, "storage_data", {}).items()
        place = next((place for index, place in stored if str(index.fqn).startswith("common_state/")), None)
        if place is None:
            return {}
        path, start, length = folder / _file_name(place.relative_path, METADATA), int(place.offset), int(place.length)
    with path.open("rb") as file:
        size = path.stat().st_size
        found = TorchZip(file, start, min(size - start if length is None else length, size - start), str(path), True)

        def number(info: TensorInfo) -> Any:
            file.seek(found.place(info).at)
            return np.frombuffer(file.read(info.dtype.itemsize), info.dtype)[0].item()

        value = found.value[0] if isinstance(found.value, list) and found.value else found.value
        return _with_numbers(value, number) if isinstance(value, dict) else {}


def _with_numbers(value: Any, number: Callable[[TensorInfo], Any], depth: int = 8) -> Any:
    """A tree of containers, down to `depth`, with numbers in place of tensors of one."""
    if isinstance(value, TensorInfo):
        return number(value) if value.shape == () else value
    if isinstance(value, dict) and depth:
        return {key: _with_numbers(each, number, depth - 1) for key, each in value.items()}
    if isinstance(value, list) and depth:
        return [_with_numbers(each, number, depth - 1) for each in value]
    return value


def _file_name(text: Any, source: str) -> str:
    """The name of a file of the folder. Raises InputError for a path that leads out of it."""
    name = str(text)
    if "/" in name or "\\" in name or name.startswith("..") or "\0" in name:
        raise InputError(f"{source} names the file {shown(name)}, which is outside its folder: it was not read.")
    return name


def _stored_tensors(folder: Path) -> Iterator[StoredTensor]:
    source = str(folder / METADATA)
    metadata = load_plain((folder / METADATA).read_bytes, source)
    try:
        places: dict[tuple[str, tuple[int, ...] | None], Plain] = {}
        for index, place in metadata.storage_data.items():
            offset = getattr(index, "offset", None)
            places[index.fqn, None if offset is None else tuple(map(int, offset))] = place
        for key, described in metadata.state_dict_metadata.items():
            if hasattr(described, "chunks"):
                yield _stored(str(key), described, places, source)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{source} is damaged ({shown(error)}): copy it again.") from None


def _stored(key: str, described: Any, places: Mapping[Any, Any], source: str) -> StoredTensor:
    shape, dtype = tuple(map(int, described.size)), described.properties.state[0]
    if not isinstance(dtype, np.dtype):
        raise InputError(f"{source}: {shown(key)} has the dtype {shown(dtype)}, which is not read: save it in BF16.")
    if min(shape, default=1) < 1 or math.prod(shape) * dtype.itemsize > 2**50:
        raise InputError(f"{source} is damaged ({shown(key)} has the shape {shown(shape)}): copy it again.")
    chunks = []
    for each in described.chunks:
        offsets, sizes = tuple(map(int, each.offsets)), tuple(map(int, each.sizes))
        inside = all(0 <= o and s > 0 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
        place = places[key, offsets]
        file, start, length = _file_name(place.relative_path, source), int(place.offset), int(place.length)
        if not inside or start < 0 or length < 0:
            raise InputError(f"{source} is damaged (a chunk of {shown(key)} is outside it): copy it again.")
        chunks.append(Chunk(offsets, sizes, file, start, length))
    return StoredTensor(key, shape, dtype, tuple(chunks))


def in_model_space(tensors: Iterable[StoredTensor], source: str) -> Iterator[StoredTensor]:
    """The tensors, those of the optimizer in the shapes of their parameters.

    In the format fully_sharded_model_space the checkpoint has shapes of fragments instead.
    """
    found = {stored.key: stored for stored in tensors}
    for key, stored in found.items():
        state = OPTIMIZER_STATE.match(key)
        parameter = found.get(key[state.end() :]) if state else None
        if parameter is None or parameter.shape == stored.shape:
            yield stored
            continue
        shape, (*fragments, length) = parameter.shape, stored.shape
        divides = len(fragments) == len(shape) and not any(n % f for n, f in zip(shape, fragments, strict=True))
        if not divides or math.prod(shape) != math.prod(fragments) * length:
            problem = f"{shown(key)} has the shape {[*stored.shape]}, its parameter {[*shape]}"
            raise InputError(f"{source} is damaged ({problem}): copy it again.")
        if any(chunk.sizes[:-1] != (1,) * len(fragments) for chunk in stored.chunks):
            raise InputError(f"{source} is damaged (a chunk of {shown(key)} has several fragments): copy it again.")
        yield replace(stored, shape=shape, fragments=tuple(fragments))


def state_prefix(state: str) -> str:
    """The beginning of the names of the tensors of an array of the optimizer's state; "" is the weights."""
    return f"optimizer.state.{state}." if state else ""


def named_parts(tensors: Iterable[StoredTensor], layers: int) -> Iterator[tuple[str, str, NamedPart]]:
    """(array of the optimizer's state or "", name of the module's parameter, the tensor) of each layer and expert.

    The optimizer's tensors that are not in model space are left out. Prediction modules count from the number of
    `layers` on.
    """
    for stored in tensors:
        found = OPTIMIZER_STATE.match(stored.key)
        state, name = (found[1], stored.key[found.end() :]) if found else ("", stored.key)
        if not found and name.startswith(("optimizer.", "chained_")):
            continue
        for layered, at in _unstacked(own_name(name), stored):
            part = NamedPart(stored, (*at, *row_of(name)))
            if module := re.match(r"mtp\.layers\.(\d{1,6})\.", layered):
                layered = f"mtp.layers.{layers + int(module[1])}.{layered[module.end() :]}"
            if ".experts.experts." not in layered or len(part.shape) < 2 or part.shape[0] == 0:
                yield state, layered, part
                continue
            prefix, _, rest = layered.partition(".experts.experts.")
            for expert in range(part.shape[0]):
                yield state, f"{prefix}.experts.local_experts.{expert}.{rest}", NamedPart(stored, (*at, expert))


def own_name(name: str) -> str:
    """The name of a tensor by its own module: norms may be fused with the layer after them."""
    for theirs, ours in FUSED_NORMS.items():
        name = name.replace(theirs, ours)
    return name


def row_of(name: str) -> tuple[int, ...]:
    """The index in a stored tensor, without layer and expert, of the tensor here: a gate of one row is a vector."""
    return (0,) if name.endswith("shared_experts.gate_weight") else ()


def _unstacked(name: str, stored: StoredTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name of each layer's part, and its index in the tensor."""
    found = re.search(r"(^|\.)layers\.(?!\d)", name)
    if not found:
        yield name, ()
        return
    for layer in range(stored.shape[0]):
        yield f"{name[: found.end()]}{layer}.{name[found.end() :]}", (layer,)
