"""Text as a data set (`data.kind: text`): each file is tokenised once, and its tokens are stored in `data.index_cache`.

A file's tokens are a `.bin/.idx` pair, so text gives the samples of preprocessed files, in the same orders.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megajax import cluster, json_files
from megajax.data.encoding import Encoded, TextEncoder, encode_blocks, write_documents
from megajax.data.index_cache import (
    cache_directory,
    file_digest,
    file_identity,
    filling,
    folder_of,
    is_complete,
    storage_errors,
)
from megajax.data.indexed import IndexedDataset, IndexedWriter, Tokens, open_checked, token_dtype
from megajax.data.json_lines import LineBlock, check_inputs, matching_files, read_blocks
from megajax.data.progress import Progress, show_progress
from megajax.data.special_tokens import document_tokens
from megajax.data.tokenizers import deciding_files, load_tokenizer, shared_tokenizer
from megajax.errors import InputError, counted

if TYPE_CHECKING:
    from megajax.config import Config

VERSION = 1  # of the encoding, part of the key of the stored tokens
TOKENS, BAD = "tokens", "bad_lines.json"  # files of a folder of the cache


class JoinedTokens:
    """Arrays one after the other, read as one by slices and by arrays of positions."""

    def __init__(self, parts: Sequence[Tokens]):
        self.parts, self.dtype = parts, parts[0].dtype
        self.ends = np.cumsum([part.size for part in parts])
        self.starts = self.ends - [part.size for part in parts]
        self.size = int(self.ends[-1])

    def __getitem__(self, key: slice | np.ndarray) -> np.ndarray:
        if isinstance(key, np.ndarray):
            owner, out = np.searchsorted(self.ends, key, side="right"), np.empty(key.shape, self.dtype)
            for i in np.unique(owner):
                out[owner == i] = self.parts[i][key[owner == i] - self.starts[i]]
            return out
        start, stop, _ = key.indices(self.size)
        first, last = np.searchsorted(self.ends, [start, stop - 1], side="right")
        pieces = [self.parts[i][max(start - self.starts[i], 0) : stop - self.starts[i]] for i in range(first, last + 1)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([self.parts[0][:0], *pieces])


class TextDataset:
    """The documents of several token files as one data set, called `prefix`; `bad_lines` of the text were left out."""

    def __init__(self, prefix: str, parts: Sequence[IndexedDataset], bad_lines: int):
        self._arguments = (prefix, parts, bad_lines)
        self.prefix, self.bad_lines, self.token_file = prefix, bad_lines, prefix
        self.parts, self.dtype = parts, parts[0].dtype
        self.tokens = JoinedTokens([part.tokens for part in parts])
        self.num_documents = sum(part.num_documents for part in parts)

    def __reduce__(self) -> Any:
        return TextDataset, self._arguments  # each process maps the files itself

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def document_starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """As in `IndexedDataset`."""
        each = [part.document_starts()[:-1] + start for part, start in zip(self.parts, self.tokens.starts, strict=True)]
        last = self.num_documents if last is None else last
        return np.concatenate([*each, [self.tokens.size]])[first : last + 1]


def open_text(config: "Config", pattern: str) -> TextDataset:
    """The documents of the files of `pattern`, a path or a glob, by name; files without stored tokens are tokenised.

    Each document ends with the end-of-document token. `data.workers` processes tokenise, 0: threads of this one.
    Bad lines are left out, with a warning. Raises InputError for a file that is missing or cannot be read, or that has
    bad lines only; for files without text; and without an end-of-document token.
    """
    cache, data = cache_directory(config), config.data
    assert data.tokenizer is not None  # checked with the config
    spec = data.tokenizer

    def find() -> list[tuple[str, dict[str, Any] | str]]:
        """Each file with the folder of its tokens, or if it has none, the folder's key."""
        paths = matching_files(pattern)
        check_inputs(paths)
        digests = [*map(file_digest, deciding_files(spec))]
        same = {
            "kind": "text",
            "version": VERSION,
            "tokenizer": digests or spec,
            "around_documents": document_tokens(data, shared_tokenizer(spec)),
            "text_key": data.text_key,
        }
        keys = {path: same | file_identity(path) for path in paths}
        folders = {path: folder_of(cache, key) for path, key in keys.items()}
        return [(path, folders[path].name if is_complete(folders[path]) else keys[path]) for path in paths]

    found = cluster.current().first_decides(find)
    folders = [cache / key if isinstance(key, str) else folder_of(cache, key) for _, key in found]
    if missing := {path: key for path, key in found if isinstance(key, dict)}:
        _Tokenising(config, cache, missing).store(list(missing))
    bad = cluster.current().first_decides(lambda: sum(map(_bad_lines, folders)))
    dataset = TextDataset(pattern, open_checked([folder / TOKENS for folder in folders]), bad)
    if not dataset.tokens.size:
        found = f'only empty text under "{data.text_key}"' if dataset.num_documents else "no documents"
        raise InputError(f"{pattern} has {found}: give other files, or another data.text_key.")
    return dataset


class _Tokenising:
    """Stores the tokens of files; `keys` are those of the cache, by path."""

    def __init__(self, config: "Config", cache: Path, keys: Mapping[str, Mapping[str, Any]]):
        self._cache, self._keys, self._workers = cache, keys, max(1, config.data.workers)
        spec = str(config.data.tokenizer)
        tokenizer = load_tokenizer(spec)
        begin, end = document_tokens(config.data, tokenizer)
        self._dtype = token_dtype(tokenizer.vocab_size)
        key, extensions = config.data.text_key, config.run.extensions
        self._encoder = TextEncoder(spec, begin, end, key, key_option="data.text_key", extensions=extensions)

    def store(self, paths: Sequence[str]) -> None:
        """Tokenise the files; each process takes those that no other one has taken, and then waits for the others."""
        self._pass(paths, wait=False)
        for path in paths:
            if not is_complete(folder_of(self._cache, self._keys[path])):
                self._pass([path], wait=True)  # nothing is left to do, unless the other process has stopped

    def _pass(self, paths: Sequence[str], wait: bool) -> None:
        taken: dict[str, tuple[ExitStack, Path]] = {}

        def blocks() -> Iterator[LineBlock]:
            for path in paths:
                claim = ExitStack()
                claims.push(claim)  # after an error its folder is removed
                folder = claim.enter_context(filling(self._cache, self._keys[path], wait=wait))
                if folder is not None:
                    taken[path] = claim, folder
                    yield from read_blocks([path], self._encoder.json_key, self._encoder.key_option)

        def finish(path: str, encoded: Iterable[Encoded]) -> None:
            claim, folder = taken[path]
            self._write(path, folder, encoded, progress)
            claim.close()
            del taken[path]

        with ExitStack() as claims, show_progress(sum(map(os.path.getsize, paths))) as progress:
            with closing(encode_blocks(self._encoder, blocks(), self._workers)) as stream:
                for path, encoded in groupby(stream, lambda each: each.path):
                    while (empty := next(iter(taken))) != path:  # files without lines
                        finish(empty, ())
                    finish(path, encoded)
            for empty in list(taken):
                finish(empty, ())

    def _write(self, path: str, folder: Path, blocks: Iterable[Encoded], progress: Progress) -> None:
        with IndexedWriter(folder / TOKENS, self._dtype) as writer:
            bad = write_documents(blocks, writer, progress)
        if bad.count:
            warnings.warn(f"{path}: {counted(bad.count, 'bad line')} left out.{bad.named()}", stacklevel=2)
        with storage_errors(folder):
            (folder / BAD).write_text(json.dumps(bad.count), encoding="utf-8")


def _bad_lines(folder: Path) -> int:
    with storage_errors(folder):
        return json_files.read(folder / BAD, int, "remove the folder")
