"""The JSON files of a model's folder, which several parts of megajax read."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megajax.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object; empty if there is none. Raises InputError for a damaged one."""
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error}): copy it again, or remove it.") from None


def token_texts(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """The texts of the special tokens `names`, as far as a tokenizer's configuration has them."""
    given = {name: config[name] for name in names if config.get(name)}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in given.items()}
