"""Fixtures of the tests of Hugging Face folders."""

import zipfile
from pathlib import Path

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
    """Folders are read in several pieces for a matrix, one for a norm."""
    monkeypatch.setattr(reader, "PIECE_BYTES", 1000)
