"""A folder in Hugging Face's format: config.json, and weights in one or several safetensors files."""

import contextlib
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megajax.checkpoint.manager import reason
from megajax.data.model_files import inside, read_json
from megajax.errors import InputError, file_reader, shown
from megajax.files import is_free, sync, sync_directory
from megajax.hf import ADAPTERS, quantised
from megajax.hf.quantised import COMPRESSED_SCALE, FP8_SCALE, Slices
from megajax.json_files import Count, parse

HEADS = ("lm_head.weight", "decoder.weight", "language_model.lm_head.weight")  # of a family one of them
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Keys of a config.json beside its text_config that count for the language model
WHOLE_MODEL = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype", "transformers_weights")
OTHER_TOWERS = ("vision_config", "audio_config")
SHARD_BYTES = 5 * 10**9
LFS = b"version https://git-lfs"  # the first bytes of a pointer of Git LFS
HEADER_BYTES = 10**8  # at most, in safetensors too
BLOCK_BYTES = 2**24  # of tensors that are compared, in FP32
# The embedding of a model without its head, and what its tensors' names lack
BASES = {"embed_tokens.weight": "model.", "wte.weight": "transformer.", "embeddings.tok_embeddings.weight": "model."}
OF_HEAD = ("lm_head.", "decoder.", "head.")  # beginnings of the names of tensors that a base lacks
MLP_OF_EXPERTS = re.compile(r"\.block_sparse_moe\.(?=(gate|up|down)_proj\.)")
READABLE = ("F32", "F16", "BF16")
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}  # of a number
# Dtypes of quantised tensors; safetensors does not read FP8 as NumPy arrays.
FP8_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class Header(TypedDict, total=False):
    """A tensor in a file's header; the header's metadata have other entries."""

    data_offsets: tuple[Count, Count]


class FolderTensors:
    """The tensors of a folder: their shapes, and slices of them. Nothing is read before it is asked for.

    Quantised tensors, by the `quantization_config` of config.json, are dequantised as they are read. Raises InputError,
    with a sentence, for files that are missing, damaged or of another format.
    """

    described_by = "config.json"  # the shapes that are expected

    @file_reader("folder")
    def __init__(
        self,
        folder: str | Path,
        quantization_config: Mapping[str, Any] | None = None,
        stored_names: Callable[[Iterable[str], Path], dict[str, str]] | None = None,
    ):
        """`stored_names` is that of a family, by default of language models."""
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, int]] = {}  # of tensors by file
        files = self._find_tensors(self._find_files())
        self._names = (stored_names or text_names)(files, self.folder)  # of tensors as they are stored
        self._stored_in = {name: files[stored] for name, stored in self._names.items()}
        where = str(self.folder / "config.json")
        self._quantised = quantised.find(self._stored_in, quantization_config, where)
        parts = {part for tensor in self._quantised.values() for part in tensor.parts}
        self.files = {name: file for name, file in self._stored_in.items() if name not in parts}
        self.files |= {name: self._stored_in[min(tensor.parts)] for name, tensor in self._quantised.items()}

    def __enter__(self) -> "FolderTensors":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def _find_files(self) -> list[str]:
        """The files with the model, those that transformers takes: model.safetensors alone, else the index's files."""
        found = {path.name for path in self.folder.iterdir() if path.is_file()}  # so a path elsewhere is not found
        if SINGLE in found:
            if INDEX in found:
                warnings.warn(
                    f"{self.folder}: {SINGLE} is read, and not the files of {INDEX}: remove one.", stacklevel=2
                )
            return [SINGLE]
        if INDEX in found:
            files = read_json(self.folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise InputError(
                    f"{self.folder / INDEX} is damaged (it has no weight_map of file names): copy it again."
                )
            if missing := sorted({*files.values()} - found):
                names = ", ".join(name[:100] for name in missing[:5])
                raise InputError(f"{self.folder} lacks {names}, which its index names: copy it again.")
            return sorted({*files.values()})
        if other := sorted(name for name in found if name.endswith(".safetensors")):
            raise InputError(
                f"{self.folder} has {other[0]}, but neither {SINGLE} nor {INDEX}, which names a model's files: copy "
                "the whole model, or rename its only file."
            )
        if old := sorted(name for name in found if name.endswith((".bin", ".pt", ".pth"))):
            raise InputError(
                f"{self.folder / old[0]} is a pickle, which can run any program when it is read: save the model as "
                "safetensors with transformers' save_pretrained and give that folder."
            )
        raise InputError(f"{self.folder} has no {SINGLE}: give the folder of a model with its weights.")

    def _find_tensors(self, files: Iterable[str]) -> dict[str, str]:
        """The file of each tensor, by the headers of `files`."""
        found: dict[str, str] = {}
        for file in files:
            for name in self._handle(file).keys():  # noqa: SIM118
                if name in found:
                    raise InputError(
                        f"{self.folder}: {name} is in {found[name]} and in {file}: copy the whole model again."
                    )
                found[name] = file
        return found

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(inside(self.folder / file), framework="np")
            except (SafetensorError, OSError) as error:
                if _is_lfs_pointer(self.folder / file):
                    raise InputError(
                        f"{self.folder / file} is a pointer of Git LFS, not the file: run git lfs pull in its clone."
                    ) from None
                reason = str(error).splitlines()[0][:200]
                raise InputError(
                    f"{self.folder / file} is damaged or not a safetensors file ({reason}): copy it again."
                ) from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        return self._handle(self._stored_in[name]).get_slice(self._names[name])

    @file_reader("self.folder")
    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; InputError for a dtype that is not read."""
        found = self._quantised.get(name)
        for part, dtypes in (found.parts if found else {name: READABLE}).items():
            if (dtype := self._slice(part).get_dtype()) not in dtypes:
                where = self.folder / self._stored_in[part]
                raise InputError(f"{where}: {part} has dtype {dtype}{_other_dtype(part, dtype, dtypes)}.")
        return found.shape(self) if found else self.stored_shape(name)

    def itemsize(self, name: str) -> float:
        """Bytes of a number of a tensor whose `shape` can be read, with its share of the scales if it is quantised."""
        parts = self._quantised[name].parts if name in self._quantised else (name,)
        total = sum(BYTES[self._slice(part).get_dtype()] * math.prod(self.stored_shape(part)) for part in parts)
        return total / math.prod(self.shape(name))

    @file_reader("self.folder")
    def read(self, name: str, slices: Slices) -> np.ndarray:
        """A block of a tensor, in its own dtype, or FP32 if it is quantised; only its bytes are read."""
        return self._quantised[name].read(self, slices) if name in self._quantised else self.read_stored(name, slices)

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored."""
        return tuple(self._slice(name).get_shape())

    def read_stored(self, name: str, slices: Slices) -> np.ndarray:
        """A block of a tensor as it is stored. Slices may have steps; the numbers between are read too."""
        found = self._slice(name)
        whole = tuple(slice(s.start, s.stop) for s in slices)
        if dtype := FP8_DTYPES.get(found.get_dtype()):
            file, shape = self._stored_in[name], self.stored_shape(name)
            block = np.memmap(self.folder / file, np.uint8, "r", self._offset(file, name), shape)[whole].view(dtype)
        else:
            block = found[whole] if slices else self._handle(self._stored_in[name]).get_tensor(self._names[name])
        return block[tuple(slice(None, None, s.step) for s in slices)]

    def equal(self, first: str, second: str) -> bool:
        """Whether two matrices have the same numbers; read in blocks of rows up to the first that differs."""
        if (shape := self.shape(first)) != self.shape(second):
            return False
        rows = max(1, BLOCK_BYTES // (4 * math.prod(shape[1:])))
        blocks = ((slice(start, min(start + rows, shape[0])), slice(0, shape[1])) for start in range(0, shape[0], rows))
        return all(np.array_equal(self.read(first, block), self.read(second, block)) for block in blocks)

    def _offset(self, file: str, name: str) -> int:
        """The first byte of a tensor in a file, whose header counts bytes from its own end."""
        if file not in self._offsets:
            with (self.folder / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = opened.read(min(length, HEADER_BYTES))
            found = parse(header, str(self.folder / file), dict[str, Header | None], "copy it again")
            offsets = {name: each["data_offsets"][0] for name, each in found.items() if each and "data_offsets" in each}
            self._offsets[file] = {name: 8 + length + offset for name, offset in offsets.items()}
        return self._offsets[file][self._names[name]]


def _other_dtype(name: str, dtype: str, expected: Sequence[str]) -> str:
    """The end of the sentence on a tensor of another dtype than `expected`."""
    if expected is READABLE and dtype in FP8_DTYPES:
        return (
            f" and no scales, which quantization_config in config.json describes and a tensor {name}{FP8_SCALE} or "
            f"{name}{COMPRESSED_SCALE} has: copy the whole folder"
        )
    quantised = "" if expected is READABLE else f" where a quantised tensor has {' or '.join(expected)}"
    return f"{quantised}: save the model in {', '.join(READABLE)}"


def text_names(names: Iterable[str], folder: Path) -> dict[str, str]:
    """The name of each tensor of a language model → its name in the folder.

    In the folder of a model that also reads images the language model's names have a prefix, and there are others. In
    that of a model without its head, as transformers' base classes save it, they lack one: also GPT-2 as published.
    transformers 5 writes Kimi Linear's MLPs under its experts' prefix.
    """
    found = {MLP_OF_EXPERTS.sub(".mlp.", name): name for name in names}
    for prefix, new_prefix in (("language_model.", ""), ("model.language_model.", "model.")):
        if text := {new_prefix + name.removeprefix(prefix): name for name in found if name.startswith(prefix)}:
            found = text | {name: name for name in found if name.startswith(("lm_head.", "mtp."))}
            break
    for embedding, prefix in BASES.items():
        if embedding in found:
            bare = [name for name in found if not name.startswith((*OF_HEAD, prefix))]
            if both := [name for name in bare if prefix + name in found]:
                raise InputError(
                    f"{folder} has the tensors {both[0]} and {prefix}{both[0]}: copy the whole model again."
                )
            found |= {prefix + name: found.pop(name) for name in bare}
    return found


def folder_bytes(folder: Path) -> int:
    """Bytes of the files with weights."""
    with FolderTensors(folder) as weights:
        return sum((folder / name).stat().st_size for name in set(weights.files.values()))


@file_reader("folder")
def read_config(folder: str | Path, whole: Collection[str] = (), families: Collection[str] = ()) -> dict[str, Any]:
    """The folder's config.json; of a model that also reads images, that of its language model.

    It is the whole one of the model_types `whole`. Warns of a part that is left out if the model's type is one of
    `families`.
    """
    path = Path(folder) / "config.json"
    if (adapters := path.with_name(ADAPTERS)).is_file():
        raise InputError(
            f"{adapters}: adapters are in this folder, which transformers adds to the model if PEFT is installed: give "
            f"a folder of the merged model (PEFT's merge_and_unload), or of the base model alone{_base_of(adapters)}."
        )
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the folder of a model in Hugging Face's format.")
    config = read_json(path)
    text = config.get("text_config")
    is_whole = config.get("model_type") in whole and config.get("vision_config")
    left_out: list[str] = []
    if not is_whole and isinstance(text, dict) and "model_type" in text:
        left_out = [key for key in OTHER_TOWERS if config.get(key)]
        check_tied(config, text, path)
        config = {key: config[key] for key in WHOLE_MODEL if key in config} | text
    if (named := config.get("transformers_weights")) not in (None, SINGLE, INDEX):
        raise InputError(f"{path}: transformers_weights={named} is not {SINGLE}: rename the file, and remove the key.")
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{path} has no model_type: give the folder of a model in Hugging Face's format.")
    if left_out and config["model_type"] in families:
        warnings.warn(
            f"{path}: the language model (text_config) is read, and the model of {' and '.join(left_out)} is not.",
            stacklevel=2,
        )
    return config


def _is_lfs_pointer(path: Path) -> bool:
    """Whether a clone without Git LFS has left a file's address in its place."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(LFS)) == LFS


def _base_of(adapters: Path) -> str:
    """The end of a sentence on adapters: the folder of their base model, by its name in adapter_config.json.

    As transformers and PEFT do, a relative name is looked up in the working directory; else in the adapters' folder.
    """
    name = read_json(adapters).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return ""
    for where, path in (("from the working directory", Path(name)), ("from this folder", adapters.parent / name)):
        if (path / "config.json").is_file():
            return f", {path}" + ("" if Path(name).is_absolute() else f" ({shown(name)} {where})")
    where = "" if Path(name).is_absolute() else ", neither from the working directory nor from this folder"
    return f"; base_model_name_or_path={shown(name)} is no folder of a model here{where}"


def check_tied(config: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if a config.json and its text_config differ in whether the head is tied."""
    whole, of_text = (part.get("tie_word_embeddings") for part in (config, text))
    if None not in (whole, of_text) and whole != of_text:
        raise InputError(
            f"{path}: tie_word_embeddings is true and false, one of them in text_config: remove the wrong."
        )


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterator[tuple[str, np.ndarray]],
    files: Mapping[str, bytes] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder: tensors in files of at most `shard_bytes`, config.json, and further `files`.

    As in transformers: one file is model.safetensors, several have an index.

    Errors as in `new_folder`.
    """
    with new_folder(folder) as partial:
        shards, total = _write_shards(partial, tensors, shard_bytes)
        written = {"config.json": config}
        if SINGLE not in shards.values():
            written[INDEX] = {"metadata": {"total_size": total}, "weight_map": shards}
        for name, values in written.items():
            (partial / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in files.items():
            (partial / name).write_bytes(content)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in; at the end of the block it gets its name, `folder`.

    Raises InputError if `folder` exists and is not empty, or if it cannot be written; nothing remains then.
    """
    if not is_free(folder):
        raise InputError(f"{folder} exists: give a new folder, or remove it.")
    partial = folder.absolute().with_name(f".{folder.absolute().name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        yield partial
        for path in partial.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    sync(file)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
        sync_directory(folder.absolute().parent)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{folder} could not be written ({reason(error)}): free disk space there, or give another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def save_tensors(tensors: Mapping[str, np.ndarray], path: Path) -> None:
    """Write a safetensors file for torch with the permissions of any new file; the library makes it private."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})
    path.chmod(mode)


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int
) -> tuple[dict[str, str], int]:
    """(the file of each tensor, bytes in all); a file's number of files is known, and in its name, at the end."""
    shards: list[list[str]] = []
    total = 0

    def write(shard: dict[str, np.ndarray]) -> None:
        save_tensors(shard, folder / f"{len(shards)}.part")
        shards.append([*shard])

    shard: dict[str, np.ndarray] = {}
    for name, array in tensors:
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > shard_bytes:
            write(shard)
            shard = {}
        shard[name] = np.ascontiguousarray(array)
        total += array.nbytes
    write(shard)
    files: dict[str, str] = {}
    for i, written in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else SINGLE
        (folder / f"{i}.part").rename(folder / file)
        files |= dict.fromkeys(written, file)
    return files, total
