"""The files of a model's folder, which several parts of megajax read. The folder may come from anybody."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax import json_files
from megajax.errors import InputError

# What a model makes of pictures; the second has the first's content under `image_processor`.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
TOKENIZER_CONFIG, TOKEN_NAMES = "tokenizer_config.json", "special_tokens_map.json"


def inside(path: Path) -> Path:
    """`path`, a file of a model's folder; InputError for a link out of the folder.

    Through such a link a run would copy, and `hf export` publish, any file of this machine. The links of Hugging Face's
    cache are allowed: from snapshots/REVISION to blobs.
    """
    folder, target = path.parent.resolve(), path.resolve()
    cache = next((parent.parent for parent in folder.parents if parent.name == "snapshots"), None)
    if not target.is_relative_to(folder) and (cache is None or target.parent != cache / "blobs"):
        raise InputError(f"{path} is a link out of its folder, to {target}: copy the file itself into the folder.")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object; empty if there is none. Raises InputError for a damaged one, and as `inside`."""
    if not path.is_file():
        return {}
    return json_files.read(inside(path), dict[str, Any], "copy it again, or remove it")


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, and in folders of before its key added_tokens_decoder special_tokens_map.json, which wins.

    So transformers 5 decides; the named ones of extra_special_tokens are those of both files.
    """
    config = read_json(folder / TOKENIZER_CONFIG)
    if "added_tokens_decoder" in config:
        return config
    older, key = read_json(folder / TOKEN_NAMES), "extra_special_tokens"
    named = [found for found in (config.get(key), older.get(key)) if isinstance(found, dict)]
    return config | older | ({key: named[0] | named[-1]} if named else {})


def token_texts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The texts of the special tokens `names`, as far as a tokenizer's configuration has them."""
    given = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}
