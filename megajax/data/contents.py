"""What is in the files that the section `data` names, for checkpoints' descriptions and the names of stored chats."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.data.chat_template import ChatTemplate, find_chat_template
from megajax.data.images import open_images
from megajax.data.index_cache import cache_directory, file_digest, text_digest
from megajax.data.json_lines import matching_files
from megajax.data.remote import RemoteFile
from megajax.data.shards import is_shard
from megajax.data.tokenizers import deciding_files, tokenizer_files
from megajax.errors import file_reader
from megajax.schema.data import is_remote, sources_of

if TYPE_CHECKING:
    from megajax.config import Config, DataConfig


PIECES, PIECE_BYTES = 8, 2**12  # of a large file, evenly over it: to read it all at each start takes too long


def data_contents(config: "Config") -> dict[str, Any]:
    """What the files have at this start that the keys `data` name: they may have changed, or lie elsewhere.

    The sizes and hashes of token files, texts and chats, of pieces of all but the chats; `stages` has those of each
    stage. Hashes of the tokenizer, the chat template and what the tokenizer's folder says of pictures.
    """
    data, found = config.data, dict[str, Any]()
    if data.kind in ("indexed", "text", "chat"):
        found |= _files(data.train, config)
        found["stages"] = [_files(stage.train, config) for stage in data.stages or ()]
    if data.tokenizer is not None and (data.kind in ("text", "chat") or data.fim_rate):
        found["tokenizer_content"] = tokenizer_digest(data.tokenizer)
        if data.kind == "chat":
            template = template_of(data)
            found["chat_template_content"] = None if template is None else text_digest(template.sources)
            if (images := open_images(config)) is not None:
                found["pictures_content"] = text_digest(images.files_key)
    return found


def _files(blend: Any, config: "Config") -> dict[str, Any]:
    """The `files` of a blend, [path, size] each, and their `digests` by path; empty if one is missing."""
    sources, cache, kind = [source for source, _ in sources_of(blend)], cache_directory(config), config.data.kind
    if kind == "indexed":
        paths = [f"{source}.bin" for source in sources]
    else:
        paths = [path for source in sources for path in matching_files(source)]
    if not all(is_remote(path) or os.path.exists(path) for path in paths):
        return {}
    files, digests = list[Any](), dict[str, str]()
    for path in paths:
        found = hashlib.blake2b(digest_size=16)
        if kind == "indexed":
            _add_pieces(found, f"{path.removesuffix('.bin')}.idx", cache)
        files.append([path, _add_pieces(found, path, cache)])
        digests[path] = file_digest(path) if kind == "chat" and not is_shard(path) else found.hexdigest()
    return {"files": files, "digests": digests}


def _add_pieces(found: Any, path: str, cache: Path) -> int:
    """The size of a file, of which pieces are added to a hash."""
    remote = RemoteFile(path, cache) if is_remote(path) else None
    size = remote.size if remote else os.path.getsize(path)
    last = max(size - PIECE_BYTES, 0)
    for first in sorted({last * i // (PIECES - 1) for i in range(PIECES)}):
        end = first + PIECE_BYTES
        found.update(remote.read(first, min(end, size)) if remote else _read(path, first, end))
    return size


@file_reader("path")
def _read(path: str, first: int, end: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(first)
        return file.read(end - first)


def tokenizer_digest(spec: str) -> str:
    """A hash of all files that decide a tokenizer's tokens; its name if it has none."""
    return "_".join(map(file_digest, deciding_files(spec))) or spec


def template_of(data: "DataConfig") -> ChatTemplate | None:
    """The chat template of `data.chat_template`, or of the tokenizer's folder; None: there is none."""
    assert data.tokenizer is not None  # checked with the config
    files = tokenizer_files(data.tokenizer)
    given = None if data.chat_template is None else Path(data.chat_template)
    return find_chat_template(files[0].parent if files else None, given, data.template_arguments)
