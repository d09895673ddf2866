"""Checkpoints that megatron-core 0.19.2 wrote, their weights, and its logits."""

import json
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np

FILES = Path(__file__).parents[1] / "data_files"


def pattern(name: str, shape) -> np.ndarray:
    """Numbers that depend on the parameter and the place: multiples of 1/256, around 1 for norms."""
    index = np.arange(np.prod(shape), dtype=np.int64) * 37 + zlib.crc32(name.encode()) % 9973
    values = ((index * index) % 67 % 64 - 32).astype(np.float32) / 64
    return (values / 4 + ("norm" in name and "bias" not in name)).reshape(shape)


def unpacked(name: str, folder: Path) -> Path:
    """The checkpoint `gqa` or `v3`, in a new folder there."""
    with zipfile.ZipFile(FILES / f"megatron_{name}.zip") as archive:
        archive.extractall(folder / name)
    return folder / name


def stored(name: str):
    """(section `model`, tokens, logits) of a checkpoint."""
    found = np.load(FILES / f"megatron_{name}.npz")
    return json.loads(str(found["model"])), found["tokens"], found["logits"]


def unpacked_legacy(name: str, folder: Path) -> Path:
    """The same weights in the older format: `gqa` of TP 2 × PP 2, `v3` of PP 3 × EP 2."""
    with tarfile.open(FILES / f"megatron_{name}_torch.tar.xz") as archive:
        archive.extractall(folder / f"{name}_torch", filter="data")
    return folder / f"{name}_torch"
