"""Sets of texts and chats to be scored: files to windows of tokens."""

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megajax.data.chat import Rendering, encode, read_chats
from megajax.data.chat_template import load_chat_template
from megajax.data.conversation import is_chat, is_pair
from megajax.data.images import SizedPicture
from megajax.data.indexed import IndexedDataset
from megajax.data.json_lines import SUFFIXES, check_inputs, located_lines, matching_files, parse, read_blocks, texts
from megajax.data.model_files import TOKENIZER_CONFIG
from megajax.data.picture_checks import BadPictures, warn_of_pictures, with_pictures
from megajax.data.shards import is_shard
from megajax.data.special_tokens import end_of_document
from megajax.errors import InputError
from megajax.inference.language_model import LanguageModel
from megajax.inference.scoring import PictureTokens, ScoredWindow, answer_windows, windows


class Document(NamedTuple):
    """Windows that predict a document's tokens, or a chat's answers, and the bytes of that text (0: unknown)."""

    windows: list[ScoredWindow]
    size: int


class SetFormat(NamedTuple):
    """How sets are read: the key of a text (None: "text", unless lines are chats), and the template's arguments."""

    json_key: str | None = None
    template_arguments: Mapping[str, Any] = {}


class DataSet(NamedTuple):
    """The documents of a set, and what of them is scored: "all tokens" or "answers"."""

    documents: Iterator[Document]
    scored: str


def open_set(path: str, model: LanguageModel, reading: SetFormat) -> DataSet:
    """The chats or texts of JSON lines, of Parquet files or of a glob, or the documents of `PREFIX.bin` and `.idx`.

    Lines are chats if the first one has the keys of a chat and no key was given. Errors are those of preprocessing and
    of training.
    """
    files = _line_files(path)
    if not files and not path.endswith(SUFFIXES) and not has_magic(path):
        return DataSet(_token_documents(path, model), "all tokens")
    check_inputs(files := files or [path])
    first = None if reading.json_key or is_shard(files[0]) else _first_record(files)
    if reading.json_key is None and (is_shard(files[0]) or is_chat(first)):
        return DataSet(_chats(files, model, reading), "answers")
    if is_pair(first):
        problem = f"--data={path} has pairs (chosen, rejected), which only a run with data.packing=pairs evaluates"
        raise InputError(f"{problem}: give such a run, or the key of one of the texts, --json-key=chosen.")
    return DataSet(_texts(files, model, reading.json_key or "text"), "all tokens")


def holds_pairs(path: str) -> bool:
    """Whether the first line of a set has a chosen and a rejected answer."""
    return is_pair(_first_record([file for file in _line_files(path) if not is_shard(file)]))


def _line_files(path: str) -> list[str]:
    """The files of lines that a path or glob names; none for token files, and where there are none."""
    return [] if Path(f"{path}.idx").exists() else [file for file in matching_files(path) if os.path.exists(file)]


def _first_record(files: Sequence[str]) -> Any:
    """The first line's value; None for what is not JSON, of which the reader of the lines says so."""
    try:
        return next((parse(line.text, "") for line in located_lines(files)), None)
    except ValueError:
        return None


def _chats(files: Sequence[str], model: LanguageModel, reading: SetFormat) -> Iterator[Document]:
    """Chats with the tokens, and the answers, of training."""
    if model.tokenizer is None:
        raise InputError(f"{model.folder} has no tokenizer, so chats cannot become tokens: add tokenizer.json.")
    tokenizer, folder = model.tokenizer, model.folder
    arguments = {**model.template_arguments, **reading.template_arguments}
    template = lru_cache(1)(partial(load_chat_template, folder, arguments))

    def end() -> int:
        if model.end_token is not None:
            return model.end_token
        return end_of_document(tokenizer, str(folder), setting=f"eos_token in {TOKENIZER_CONFIG}")

    images, bad = None if model.config.vision is None else model.images, BadPictures()
    for chat, pictures in with_pictures(read_chats(files, Rendering(template, images=images)), images, bad):
        parts = [_answers(model, *each, pictures, chat.location) for each in encode(chat.texts, tokenizer, end)]
        size = sum(len(each.text[start:stop].encode()) for each in chat.texts for start, stop in each.spans)
        yield Document(list(chain.from_iterable(parts)), size)
    warn_of_pictures(files, bad.lines)


def _answers(
    model: LanguageModel, ids: list[int], counted: np.ndarray, pictures: Sequence[SizedPicture], location: str
) -> list[ScoredWindow]:
    """The windows of a text's answers, with its pictures."""
    if not pictures:
        return answer_windows(ids, counted, model.max_length)
    try:
        ids, counted, placed = model.images.expanded(ids, counted, pictures, 0)
    except ValueError as error:
        raise InputError(f"{location} {error}.") from None
    shown = [PictureTokens(first, first + model.images.tokens(sized), sized) for sized, first in placed]
    return answer_windows(ids, counted, model.max_length, shown)


def _texts(files: Sequence[str], model: LanguageModel, json_key: str) -> Iterator[Document]:
    for block in read_blocks(files, json_key):
        for _, text in texts(block, json_key):
            if text:
                yield _whole(model, model.encode(text, special_tokens=False), len(text.encode()))


def _token_documents(prefix: str, model: LanguageModel) -> Iterator[Document]:
    dataset = IndexedDataset(prefix)
    for i in range(dataset.num_documents):
        tokens = dataset.document(i).tolist()
        if tokens and tokens[-1] in model.stop_tokens:
            tokens = tokens[:-1]
        if tokens and tokens[0] == model.begin_token:  # every document gets it
            tokens = tokens[1:]
        if tokens:
            yield _whole(model, tokens, len(model.tokenizer.decode(tokens).encode()) if model.tokenizer else 0)


def _whole(model: LanguageModel, tokens: list[int], size: int) -> Document:
    """A document, scored from its first token if a token of the model begins or ends texts, else from its second."""
    prefix = model.prefix_token
    return Document(windows(tokens if prefix is None else [prefix, *tokens], model.max_length), size)
