"""Tiny models that transformers wrote, unpacked, and texts that it generated and scored with them."""

import json
import zipfile
from pathlib import Path

import pytest

FILES = Path(__file__).parents[1] / "data_files"


@pytest.fixture(scope="session")
def references() -> dict:
    """By model: prompts, the 50 likeliest tokens after each, and scores (make_generated_references.py)."""
    return json.loads((FILES / "generated.json").read_text())


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """The folder of a model by its name."""

    def folder_of(name: str) -> Path:
        directory = tmp_path_factory.getbasetemp() / f"hf-{name}"
        if not directory.exists():
            with zipfile.ZipFile(FILES / f"{name}.zip") as archive:
                archive.extractall(directory)
        return directory

    return folder_of
