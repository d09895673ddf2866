"""Tiny models that transformers wrote, unpacked, and texts that it generated and scored with them."""

import json
import re
import zipfile
from pathlib import Path

import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

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


@pytest.fixture(scope="session")
def letters_folder(folder_of, tmp_path_factory):
    """The last layer of a model, with a tokenizer of letters, and of a beginning of text that it puts before each."""
    folder, whole = tmp_path_factory.mktemp("evaluate"), folder_of("tiny_llama")
    weights = load_file(whole / "model.safetensors")
    kept = {n.replace(".layers.2.", ".layers.0."): w for n, w in weights.items() if not re.search(r"\.layers\.[01]", n)}
    save_file(kept, folder / "model.safetensors")
    (folder / "generation_config.json").write_bytes((whole / "generation_config.json").read_bytes())
    names = {"<s>": 0} | {chr(97 + i): i + 1 for i in range(26)} | {" ": 27, "é": 28}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, " "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    changed = {"max_position_embeddings": 8, "num_hidden_layers": 1}
    config = json.loads((whole / "config.json").read_text()) | changed
    (folder / "config.json").write_text(json.dumps(config))
    return folder
