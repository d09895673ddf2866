"""The files beside a model's weights: its tokenizer, its settings for generation, the ids of its special tokens.

A run that starts from a Hugging Face folder keeps them in its directory, and a folder that is written from a run gets
them.
"""

import filecmp
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from megajax.config import Config
from megajax.data.image_processing import default_file
from megajax.data.model_files import (
    PROCESSOR_FILES,
    inside,
    read_json,
    token_texts,
    tokenizer_config,
)
from megajax.data.special_tokens import known_end, stop_tokens, stored_ids
from megajax.data.tokenizers import BESIDE, FILES, Tokenizer, files_in, has_no_file, load_tokenizer, tokenizer_files
from megajax.errors import file_reader
from megajax.files import replace_copy
from megajax.hf.defaults import ALIASES

CONFIG, KEPT_CONFIG, GENERATION = "config.json", "hf_config.json", "generation_config.json"
TOKENIZER_FILES = (*FILES, *BESIDE)
TOKENS = ("bos_token", "eos_token", "pad_token")


class Beside(NamedTuple):
    """What a written folder gets from a run besides its weights.

    Contents of files by name; keys of config.json that depend on the run; the model_type of the language model, and the
    names of a classifier's classes (`id2label`), in the folder that the run started from.
    """

    files: Mapping[str, bytes] = MappingProxyType({})
    keys: Mapping[str, Any] = MappingProxyType({})
    origin: str | None = None
    labels: Any = None


NOTHING = Beside()


@file_reader("source")
def keep(source: Path, run_dir: Path) -> None:
    """Copy the files beside the weights in `source`, a Hugging Face folder or a run's directory, to a run's directory.

    A folder's config.json gets the name hf_config.json there. Raises OSError if a file cannot be copied, and
    as `model_files.inside`.
    """
    for name in (*TOKENIZER_FILES, GENERATION, KEPT_CONFIG):
        if (source / name).is_file():
            replace_copy(inside(source / name), run_dir / name)
    if (source / CONFIG).is_file() and not (source / KEPT_CONFIG).is_file():
        replace_copy(inside(source / CONFIG), run_dir / KEPT_CONFIG)


def origin(run_dir: Path) -> str | None:
    """The model_type of the language model that a run started from; None if it started from no folder."""
    config = read_json(run_dir / KEPT_CONFIG)
    return (config.get("text_config") or config).get("model_type")


def is_its_tokenizer(source: Path, spec: str | None) -> bool:
    """Whether `data.tokenizer=spec` is the tokenizer beside the weights in `source`; true for null (token ids only)."""
    if spec is None:
        return True
    if has_no_file(spec) or not Path(spec).exists():
        return False
    given = tokenizer_files(spec)[0]
    files = [source / name for name in FILES if (source / name).is_file()] + files_in(source)
    return any(filecmp.cmp(path, given, shallow=False) for path in files)


def collect(run_dir: Path, config: Config) -> Beside:
    """What a folder of a run's weights gets. Raises InputError for a file in the run's directory that is damaged."""
    files = {name: (run_dir / name).read_bytes() for name in TOKENIZER_FILES if (run_dir / name).is_file()}
    if config.model.vision is not None and not files.keys() & set(PROCESSOR_FILES):
        files[PROCESSOR_FILES[0]] = (json.dumps(default_file(config.model.vision), indent=2) + "\n").encode()
    ids = token_ids(run_dir, config)
    settings = read_json(run_dir / GENERATION)
    if settings and settings.get("eos_token_id") in (None, ids.get("eos_token_id")):
        files[GENERATION] = (run_dir / GENERATION).read_bytes()
    elif ids:
        files[GENERATION] = (json.dumps(settings | ids, indent=2, sort_keys=True) + "\n").encode()
    keys = {name: None for name in ("bos_token_id", "eos_token_id")} | ids  # absent: transformers' defaults
    if config.model.position != "learned":
        longest = _kept(run_dir).get("max_position_embeddings", 0)
        keys["max_position_embeddings"] = max(longest, config.batch.sequence_length)
    return Beside(files, keys, origin(run_dir), read_json(run_dir / KEPT_CONFIG).get("id2label"))


def token_ids(run_dir: Path, config: Config) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` of a run, as far as they are known.

    They are those of the folder that the run started from, else the tokenizer's, below `model.vocab_size`; texts end at
    all tokens at which generation stops.
    """
    tokenizer = _tokenizer(run_dir, config)
    ids = {name: stored_ids(run_dir, name) for name in TOKENS}
    if tokenizer is not None:
        pad = tokenizer.token_id(token_names(run_dir).get("pad_token", ""))
        for name, token_of_setting in (("bos_token", tokenizer.begin_of_text), ("pad_token", pad)):
            ids[name] = ids[name] or [token for token in [token_of_setting] if token is not None]
        arguments = config.data.template_arguments if config.data.kind == "chat" else None
        stops = stop_tokens(run_dir, tokenizer, known_end(config.data, tokenizer), arguments)
        if set(stops) != set(ids["eos_token"]):
            ids["eos_token"] = list(stops)
    known = {name: [token for token in found if token < config.model.vocab_size] for name, found in ids.items()}
    return {f"{name}_id": found[0] if len(found) == 1 else found for name, found in known.items() if found}


@file_reader("folder")
def token_names(folder: Path) -> dict[str, str]:
    """`bos_token`, `eos_token` and `pad_token` by the tokenizer's configuration files in a folder."""
    return token_texts(tokenizer_config(folder), TOKENS)


def _kept(run_dir: Path) -> dict[str, Any]:
    """The keys of the config.json that the run started from, without nulls; those of its language model too.

    Each has the name that megajax reads.
    """
    config, names = read_json(run_dir / KEPT_CONFIG), ALIASES.get(origin(run_dir) or "", {})
    everything = (config.get("text_config") or {}).items(), config.items()
    return {names.get(name, name): value for part in everything for name, value in part if value is not None}


def _tokenizer(run_dir: Path, config: Config) -> Tokenizer | None:
    spec = config.data.tokenizer
    if spec is not None and has_no_file(spec):
        return load_tokenizer(spec)
    return load_tokenizer(str(run_dir)) if files_in(run_dir) else None
