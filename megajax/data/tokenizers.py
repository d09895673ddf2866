"""Tokenizers behind one small interface, by the name or the files that the user gives."""

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megajax.data.byte_pairs import add_missing, is_tiktoken, read_gpt2, read_tiktoken
from megajax.data.indexed import LARGEST_ID
from megajax.data.model_files import PROCESSOR_FILES, TOKEN_NAMES, TOKENIZER_CONFIG, inside
from megajax.data.sentence_pieces import SentencePieceTokenizer
from megajax.data.special_tokens import (
    ADDED,
    CURE,
    ID_FILES,
    KNOWN_ENDS,
    FolderTokens,
    read_folder_tokens,
)
from megajax.data.tokenizer_trial import try_tokenizer
from megajax.errors import ACCESS_CURE, InputError, file_reader, not_downloaded, reported, shown
from megajax.files import check_file, is_number, replace_copy, replaced

if TYPE_CHECKING:
    import tokenizers

FILES = ("tokenizer.json", "tokenizer.model")  # of a folder, the first one counts
GPT2_FILES = ("vocab.json", "merges.txt")
# Files that belong to a tokenizer's.
BESIDE = (TOKENIZER_CONFIG, TOKEN_NAMES, ADDED, "chat_template.jinja", *PROCESSOR_FILES)


class Tokenizer(Protocol):
    """Text to token ids and back."""

    vocab_size: int  # one more than the largest token id
    end_of_document: int | None  # the token that ends a text; None if nothing says which one does
    begin_of_text: int | None  # the token that begins a text; None if there is none
    adds_begin: bool  # whether `begin_of_text` belongs before every text
    special_tokens: list[str]  # names of the tokens that are not text
    added_tokens: list[str]  # of those at which a text is cut before its rest becomes tokens, special or not

    def token_id(self, name: str) -> int | None:
        """The token with this name; None if there is none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text such as a prompt, without the one that begins texts; names of tokens become these."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each document; the library `tokenizers` uses all cores."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """`encode` of each text, and each token's range of characters, white space included."""
        ...

    def decode(self, ids: list[int]) -> str: ...


@file_reader("spec", cure=CURE)
def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer` or `--tokenizer`; InputError if there is none.

    `spec` is "byte"; "null:N", whose text is token ids; a tokenizer.json; a SentencePiece .model; a tiktoken file; or a
    folder with one of these or with GPT-2's vocab.json and merges.txt.
    """
    tokenizer = _load(spec)
    if (largest := tokenizer.vocab_size - 1) > LARGEST_ID:
        cure = f"write null:{LARGEST_ID} or less" if spec.startswith("null:") else "copy it again"
        raise InputError(f"{spec} has the token id {largest}, but ids are from 0 to {LARGEST_ID}: {cure}.")
    return tokenizer


def _load(spec: str) -> Tokenizer:
    if spec == "byte":
        return ByteTokenizer()
    if spec.split(":")[0] == "null":
        return NullTokenizer(spec)
    path, *_ = files = tokenizer_files(spec)
    for file in files:
        try:
            check_file(file)
            with file.open("rb") as opened:
                opened.read(1)  # the libraries' errors are the same for what the system refuses
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror}): {ACCESS_CURE}.") from None
    found = read_folder_tokens(path.parent)
    if path.name == GPT2_FILES[0]:
        return HuggingFaceTokenizer(read_gpt2(path.parent, (*KNOWN_ENDS, *found.names.values())), found, path)
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        return HuggingFaceTokenizer(read_tiktoken(path), found, path)
    try_tokenizer(path)  # the two above are vocabularies; the others have programs
    if path.suffix == ".json":  # it says itself what it puts before a text
        return HuggingFaceTokenizer(_read_json(path), replace(found, adds_begin=None), path)
    return SentencePieceTokenizer(str(path), found)


@file_reader("spec")
def tokenizer_files(spec: str) -> list[Path]:
    """The files of a tokenizer, none for "byte" and "null:N"; InputError if they do not exist."""
    if has_no_file(spec):
        return []
    path = Path(spec)
    if path.is_dir():
        if found := files_in(path):
            return found
        raise InputError(
            f"{spec} is a directory without a tokenizer: add {', '.join(FILES)}, a .tiktoken file, or "
            f"{' and '.join(GPT2_FILES)}."
        )
    if path.suffix not in (".json", ".model", ".tiktoken"):
        raise InputError(
            f'{spec} is not a tokenizer: use "byte", "null:VOCABULARY_SIZE", a folder, or the path of a '
            f"tokenizer.json, a SentencePiece .model or a .tiktoken file{not_downloaded(spec)}."
        )
    if not path.is_file():
        raise InputError(f'{spec} does not exist: correct the path of the tokenizer, or use "byte".')
    return [path, path.parent / GPT2_FILES[1]] if path.name == GPT2_FILES[0] else [path]


@file_reader("spec")
def deciding_files(spec: str) -> list[Path]:
    """All files that decide a tokenizer's tokens: its own, and those beside it that name special ones."""
    files = tokenizer_files(spec)
    names = (TOKENIZER_CONFIG, TOKEN_NAMES, ADDED, *ID_FILES)
    return files + [path for name in names if files and (path := files[0].parent / name).is_file()]


@file_reader("spec", cure=CURE)
def shared_tokenizer(spec: str) -> Tokenizer:
    """`load_tokenizer`, once for many sources and evaluations, unless a file of the tokenizer has changed."""
    states = [(path, path.stat()) for path in deciding_files(spec)]
    return _shared(spec, tuple((path, state.st_ino, state.st_size, state.st_mtime_ns) for path, state in states))


@lru_cache(1)
def _shared(spec: str, files: tuple[object, ...]) -> Tokenizer:
    del files
    return load_tokenizer(spec)


def has_no_file(spec: str) -> bool:
    """Whether the tokenizer is made from its name alone: "byte" and "null:N"."""
    return spec == "byte" or spec.split(":")[0] == "null"


def files_in(folder: Path) -> list[Path]:
    """The files of a folder's tokenizer; empty if it has none. tokenizer.json comes before the others.

    Raises InputError as `model_files.inside`.
    """
    files = [folder / name for name in FILES if (folder / name).is_file()]
    files += sorted(folder.glob("*.tiktoken"))
    pair = [folder / name for name in GPT2_FILES]
    return [inside(path) for path in files[:1] or (pair if all(path.is_file() for path in pair) else [])]


def kept_name(source: Path) -> str:
    """The name of a run's copy of a tokenizer whose first file is `source`."""
    return FILES[source.suffix == ".model" and not is_tiktoken(source)]


@file_reader("spec")
def keep_tokenizer(spec: str, folder: Path) -> None:
    """Copy a tokenizer into a folder, as its `kept_name`: GPT-2's files and tiktoken's become a tokenizer.json.

    The files beside it that name its special tokens, and its chat template, are copied too. Nothing is copied of a
    tokenizer without files.
    """
    for source in tokenizer_files(spec)[:1]:
        target = folder / kept_name(source)
        if source.suffix != target.suffix or source.name == GPT2_FILES[0]:
            tokenizer = load_tokenizer(spec)
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            with replaced(target) as temporary:
                tokenizer.save(temporary)
        else:
            _copy(source, target)
        for name in BESIDE:
            if (source.parent / name).is_file():
                _copy(inside(source.parent / name), folder / name)


def _copy(source: Path, target: Path) -> None:
    if not target.exists() or not target.samefile(source):
        replace_copy(source, target)


def decode_after(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text of `tokens` after the tokens `before`: alone, the first of many tokenizers loses its space."""
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    if not whole.startswith(start):  # a character begins in one part and ends in the other
        start = os.path.commonprefix([start, whole])
    return whole[len(start) :]


class _PlainTokenizer(Tokenizer):
    """Tokens without names, of which none begins a text."""

    begin_of_text, adds_begin = None, False
    special_tokens, added_tokens = [], []

    def token_id(self, name: str) -> int | None:
        del name
        return None

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


class ByteTokenizer(_PlainTokenizer):
    """UTF-8 bytes 0 to 255, and 256 as end of document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        spans = [[(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()] for text in texts]
        return [(self.encode(text), spans_of_text) for text, spans_of_text in zip(texts, spans, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer(_PlainTokenizer):
    """Text that is token ids already: integers 0 to N-1 with white space between, and N as end of document.

    As Megatron's NullTokenizer of the vocabulary size N.
    """

    def __init__(self, spec: str):
        size = spec.removeprefix("null:")
        if not is_number(size) or not int(size):
            raise InputError(f"{shown(spec)} has no vocabulary size: write null:50257 for the token ids 0 to 50256.")
        self.end_of_document = int(size)
        self.vocab_size = int(size) + 1

    def encode(self, text: str) -> list[int]:
        words = text.split()
        with suppress(ValueError):  # of a number with thousands of digits
            if "".join(words).isascii() and all(map(str.isdecimal, words)):
                ids = list(map(int, words))
                if max(ids, default=0) < self.vocab_size:
                    return ids
        wrong = next(word for word in words if not (is_number(word) and int(word) < self.vocab_size))
        raise InputError(
            f"{wrong[:20]!r} is not a token id of null:{self.end_of_document}: write integers from 0 to "
            f"{self.end_of_document} with spaces between, or use another tokenizer."
        )

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(self.encode(text), [found.span() for found in re.finditer(r"\S+", text)]) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


def _read_json(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    with reported(f"{path} is not a Hugging Face tokenizer", "give a tokenizer.json"):
        return tokenizers.Tokenizer.from_file(str(path))


class HuggingFaceTokenizer:
    """A tokenizer of the library `tokenizers`."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer", found: FolderTokens, path: Path):
        self._tokenizer = tokenizer
        self._reported = partial(reported, f"{path} fails at a text", "give another tokenizer")
        tokenizer.no_padding()  # a document is all of its tokens
        tokenizer.no_truncation()
        add_missing(tokenizer, found)
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        added = tokenizer.get_added_tokens_decoder().values()
        self.added_tokens = [token.content for token in added]
        self.special_tokens = [token.content for token in added if token.special]
        self.end_of_document = found.end(self.token_id, self.special_tokens, None)
        self.begin_of_text, self.adds_begin = found.begin(self.token_id, self._first_token())
        self._post_processor = tokenizer.post_processor or self._begin_processor()
        tokenizer.post_processor = None  # it adds tokens, and may cut white space from offsets

    def _first_token(self) -> int | None:
        """The token that the tokenizer's file puts before a text."""
        with self._reported():
            encoded = self._tokenizer.encode("a")
        return encoded.ids[0] if encoded.ids and encoded.special_tokens_mask[0] else None

    def _begin_processor(self) -> "tokenizers.processors.PostProcessor | None":
        from tokenizers.processors import TemplateProcessing

        if not self.adds_begin or self.begin_of_text is None:
            return None
        begin = self._tokenizer.id_to_token(self.begin_of_text)
        return TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, self.begin_of_text)])

    def save(self, path: Path) -> None:
        """Write the tokenizer as a tokenizer.json."""
        self._tokenizer.post_processor = self._post_processor
        self._tokenizer.save(str(path))
        self._tokenizer.post_processor = None

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str) -> list[int]:
        with self._reported():
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        with self._reported():
            return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encodings(self, texts: Sequence[str]) -> "list[tokenizers.Encoding]":
        """Each text's tokens with their offsets, as objects of the library."""
        with self._reported():
            return self._tokenizer.encode_batch(list(texts), add_special_tokens=False)

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(each.ids, each.offsets) for each in self.encodings(texts)]

    def decode(self, ids: list[int]) -> str:
        with self._reported():
            return self._tokenizer.decode(ids)
