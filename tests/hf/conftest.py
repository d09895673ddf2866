"""Fixtures of the tests of Hugging Face folders."""

import zipfile
from pathlib import Path
from typing import Any

import jax
import pytest

from megajax.hf import reader

FILES = Path(__file__).parents[1] / "data_files"


@pytest.fixture
def unpack(tmp_path):
    """name of a folder that transformers wrote → its copy."""

    def unpack(name: str) -> Path:
        with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
            archive.extractall(tmp_path / name)
        return tmp_path / name

    return unpack


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    """Folders are read in several pieces for a matrix, one for a norm.

    One device converts the pieces of all: each would compile its own program.
    """
    monkeypatch.setattr(reader, "PIECE_BYTES", 1000)
    with_piece, put, first = reader._with_piece, jax.device_put, jax.devices()[0]

    def on_first(shard: jax.Array, block: jax.Array, *how: Any) -> jax.Array:
        home = shard.device
        return put(with_piece(put(shard, first), put(block, first), *how), home)

    monkeypatch.setattr(reader, "_with_piece", on_first)
