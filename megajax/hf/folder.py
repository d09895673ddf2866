"""A folder in Hugging Face's format: config.json, and weights in one or several safetensors files."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from megajax.checkpoint.manager import reason
from megajax.data.model_files import inside, read_json
from megajax.errors import InputError
from megajax.files import sync, sync_directory
from megajax.hf import quantised
from megajax.hf.quantised import Slices

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 5 * 10**9
READABLE = ("F32", "F16", "BF16")
BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "U8": 1}  # of a number
# Dtypes of quantised tensors; safetensors does not read FP8 as NumPy arrays.
FP8_DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}


class Weights:
    """The tensors of a folder: their shapes, and slices of them. Nothing is read before it is asked for.

    Quantised tensors, by the `quantization_config` of config.json, are dequantised as they are read. Raises InputError,
    with a sentence, for files that are missing, damaged or of another format.
    """

    def __init__(self, folder: str | Path, quantization_config: Mapping[str, Any] | None = None):
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, int]] = {}  # of tensors by file
        files = self._find_files()
        self._names = text_names(files)  # of tensors as they are stored
        self._stored_in = {name: files[stored] for name, stored in self._names.items()}
        where = str(self.folder / "config.json")
        self._quantised = quantised.find(self._stored_in, quantization_config, where)
        parts = {part for tensor in self._quantised.values() for part in tensor.parts}
        self.files = {name: file for name, file in self._stored_in.items() if name not in parts}
        self.files |= {name: self._stored_in[min(tensor.parts)] for name, tensor in self._quantised.items()}

    def __enter__(self) -> "Weights":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def _find_files(self) -> dict[str, str]:
        """The file of each tensor."""
        index = self.folder / INDEX
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
                raise InputError(f"{index} is damaged (it has no weight_map of file names): copy it again.")
            found = {path.name for path in self.folder.iterdir() if path.is_file()}  # so a path elsewhere is not found
            if missing := sorted({*files.values()} - found):
                names = ", ".join(name[:100] for name in missing[:5])
                raise InputError(f"{self.folder} lacks {names}, which its index names: copy it again.")
            return files
        found = sorted(path for path in self.folder.glob("*.safetensors") if path.is_file())
        if not found:
            old = sorted([*self.folder.glob("*.bin"), *self.folder.glob("*.pt"), *self.folder.glob("*.pth")])
            if old:
                raise InputError(
                    f"{old[0]} is a pickle, which can run any program when it is read: save the model as safetensors "
                    "with transformers' save_pretrained and give that folder."
                )
            raise InputError(f"{self.folder} has no *.safetensors file: give the folder of a model with its weights.")
        return {name: path.name for path in found for name in self._handle(path.name).keys()}  # noqa: SIM118

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(inside(self.folder / file), framework="np")
            except (SafetensorError, OSError) as error:
                reason = str(error).splitlines()[0][:200]
                raise InputError(
                    f"{self.folder / file} is damaged or not a safetensors file ({reason}): copy it again."
                ) from None
        return self._open[file]

    def _slice(self, name: str) -> Any:
        try:
            return self._handle(self._stored_in[name]).get_slice(self._names[name])
        except SafetensorError:
            path = self.folder / self._stored_in[name]
            raise InputError(f"{path} has no tensor {name}, which {INDEX} says it has: copy both again.") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; InputError for a dtype that is not read."""
        found = self._quantised.get(name)
        for part, dtypes in (found.parts if found else {name: READABLE}).items():
            if (dtype := self._slice(part).get_dtype()) not in dtypes:
                where = self.folder / self._stored_in[part]
                raise InputError(f"{where}: {part} has dtype {dtype}: save the model in {', '.join(READABLE)}.")
        return found.shape(self) if found else self.stored_shape(name)

    def itemsize(self, name: str) -> float:
        """Bytes of a number of a tensor whose `shape` can be read, with its share of the scales if it is quantised."""
        parts = self._quantised[name].parts if name in self._quantised else (name,)
        total = sum(BYTES[self._slice(part).get_dtype()] * math.prod(self.stored_shape(part)) for part in parts)
        return total / math.prod(self.shape(name))

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

    def _offset(self, file: str, name: str) -> int:
        """The first byte of a tensor in a file, whose header counts bytes from its own end."""
        if file not in self._offsets:
            with (self.folder / file).open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            self._offsets[file] = {
                n: 8 + length + t["data_offsets"][0] for n, t in header.items() if "data_offsets" in t
            }
        return self._offsets[file][self._names[name]]


def text_names(names: Iterable[str]) -> dict[str, str]:
    """The name of each tensor of a language model → its name in the folder.

    In the folder of a model that also reads images the language model's names have a prefix, and there are others.
    """
    for prefix, own in (("language_model.", ""), ("model.language_model.", "model.")):
        found = {own + name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        if found:
            return found | {name: name for name in names if name.startswith("lm_head.")}
    return {name: name for name in names}


def stored_names(folder: Path) -> set[str]:
    """The names of the tensors in a folder's files; empty if there are none, or if they cannot be read."""
    try:
        with Weights(folder) as weights:
            return {*weights.files}
    except InputError:  # reading them reports it
        return set()


def folder_bytes(folder: Path) -> int:
    """Bytes of the files with weights."""
    with Weights(folder) as weights:
        return sum((folder / name).stat().st_size for name in set(weights.files.values()))


def read_config(folder: str | Path) -> dict[str, Any]:
    """The folder's config.json; of a model that also reads images, with the keys of its language model on top."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the folder of a model in Hugging Face's format.")
    config = read_json(path)
    text = config.get("text_config")
    if isinstance(text, dict) and "model_type" in text:
        config |= text
    if not isinstance(config.get("model_type"), str):
        raise InputError(f"{path} has no model_type: give the folder of a model in Hugging Face's format.")
    return config


def write_folder(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Iterator[tuple[str, np.ndarray]],
    files: Mapping[str, bytes] = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder: tensors in files of at most `shard_bytes` with their index, config.json, and further `files`.

    Errors as in `new_folder`.
    """
    with new_folder(folder) as partial:
        shards, total = _write_shards(partial, tensors, shard_bytes)
        index = {"metadata": {"total_size": total}, "weight_map": shards}
        for name, values in ((INDEX, index), ("config.json", config)):
            (partial / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        for name, content in files.items():
            (partial / name).write_bytes(content)


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write in; at the end of the block it gets its name, `folder`.

    Raises InputError if `folder` exists and is not empty, or if it cannot be written; nothing remains then.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
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


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int
) -> tuple[dict[str, str], int]:
    """(the file of each tensor, bytes in all); a file's number of files is known, and in its name, at the end."""
    shards: list[list[str]] = []
    total = 0

    def write(shard: dict[str, np.ndarray]) -> None:
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
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
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{i}.part").rename(folder / file)
        files |= dict.fromkeys(written, file)
    return files, total
