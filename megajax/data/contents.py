"""What is in the files that the section `data` names, for checkpoints' descriptions and the names of stored chats."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megajax.data.chat_template import ChatTemplate, find_chat_template
from megajax.data.images import open_images
from megajax.data.index_cache import cache_directory, file_digest, text_digest
from megajax.data.json_lines import matching_files
from megajax.data.remote import RemoteFile
from megajax.data.tokenizers import deciding_files, tokenizer_files
from megajax.schema.data import is_remote, sources_of

if TYPE_CHECKING:
    from megajax.config import Config, DataConfig


def data_contents(config: "Config") -> dict[str, Any]:
    """What the files have at this start that the keys `data` name: they may have changed, or lie elsewhere.

    The sizes of token files, texts and chats; hashes of the tokenizer, the chat template and the processor of pictures.
    """
    data, found = config.data, dict[str, Any]()
    if data.kind in ("indexed", "text", "chat"):
        sources, cache = [source for source, _ in sources_of(data.train)], cache_directory(config)
        if data.kind == "indexed":
            paths = [f"{source}.bin" for source in sources]
        else:
            paths = [path for source in sources for path in matching_files(source)]
        if all(is_remote(path) or os.path.exists(path) for path in paths):
            sizes = (RemoteFile(path, cache).size if is_remote(path) else os.path.getsize(path) for path in paths)
            found["files"] = [[path, size] for path, size in zip(paths, sizes, strict=True)]
    if data.tokenizer is not None and (data.kind in ("text", "chat") or data.fim_rate):
        found["tokenizer_content"] = tokenizer_digest(data.tokenizer)
        if data.kind == "chat":
            template = template_of(data)
            found["chat_template_content"] = None if template is None else text_digest(template.sources)
            if (images := open_images(config)) is not None:
                found["image_processor_content"] = text_digest(images.key)
    return found


def tokenizer_digest(spec: str) -> str:
    """A hash of all files that decide a tokenizer's tokens; its name if it has none."""
    return "_".join(map(file_digest, deciding_files(spec))) or spec


def template_of(data: "DataConfig") -> ChatTemplate | None:
    """The chat template of `data.chat_template`, or of the tokenizer's folder; None: there is none."""
    assert data.tokenizer is not None  # checked with the config
    files = tokenizer_files(data.tokenizer)
    given = None if data.chat_template is None else Path(data.chat_template)
    return find_chat_template(files[0].parent if files else None, given, data.template_arguments)
