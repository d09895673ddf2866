"""The files of a model's folder, which several parts of megajax read. The folder may come from anybody."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax.errors import InputError
from megajax.files import read_text


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
    try:
        return dict(json.loads(read_text(inside(path))))
    except InputError:
        raise
    except (ValueError, TypeError, OSError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({str(error)[:200]}): copy it again, or remove it.") from None


def token_texts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The texts of the special tokens `names`, as far as a tokenizer's configuration has them."""
    given = {name: config.get(name) for name in names}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if text and isinstance(text, str)}
