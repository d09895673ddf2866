"""Tokenizers behind one small interface, by the name or the files that the user gives."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megajax.data.byte_pairs import damage_reported, is_tiktoken, read_gpt2, read_tiktoken
from megajax.data.model_files import inside
from megajax.errors import InputError
from megajax.files import replace_copy, replaced

if TYPE_CHECKING:
    import tokenizers

FILES = ("tokenizer.json", "tokenizer.model")  # of a folder, the first one counts
GPT2_FILES = ("vocab.json", "merges.txt")
END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
NAMES_SHOWN = 10


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token that separates documents; None if the vocabulary has none of a known name."""
        ...

    @property
    def special_tokens(self) -> list[str]:
        """Names of the tokens that are not text."""
        ...

    def token_id(self, name: str) -> int | None:
        """The token with this name; None if there is none."""
        ...

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts around it if `special_tokens`."""
        ...

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text; the library `tokenizers` uses all cores."""
        ...

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The tokens of each text, and each token's range of characters."""
        ...

    def decode(self, ids: list[int]) -> str: ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer of `data.tokenizer` or `--tokenizer`; InputError if there is none.

    `spec` is "byte"; "null:N", whose text is token ids; a tokenizer.json; a SentencePiece .model; a tiktoken file; or a
    folder with one of these or with GPT-2's vocab.json and merges.txt.
    """
    if spec == "byte":
        return ByteTokenizer()
    if spec.split(":")[0] == "null":
        return NullTokenizer(spec)
    path = tokenizer_files(spec)[0]
    if path.name == GPT2_FILES[0]:
        return HuggingFaceTokenizer(read_gpt2(path.parent, END_OF_DOCUMENT_NAMES))
    if path.suffix == ".json":
        return HuggingFaceTokenizer(_read_json(path))
    if path.suffix == ".tiktoken" or is_tiktoken(path):
        return HuggingFaceTokenizer(read_tiktoken(path))
    return SentencePieceTokenizer(str(path))


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
            "tokenizer.json, a SentencePiece .model or a .tiktoken file."
        )
    if not path.is_file():
        raise InputError(f'{spec} does not exist: correct the path of the tokenizer, or use "byte".')
    return [path, path.parent / GPT2_FILES[1]] if path.name == GPT2_FILES[0] else [path]


def has_no_file(spec: str) -> bool:
    """Whether the tokenizer is made from its name alone: "byte" and "null:N"."""
    return spec == "byte" or spec.split(":")[0] == "null"


def files_in(folder: Path) -> list[Path]:
    """The files of a folder's tokenizer; empty if it has none. tokenizer.json comes before the others.

    Raises InputError as `model_files.inside`.
    """
    own = [folder / name for name in FILES if (folder / name).is_file()]
    own += sorted(folder.glob("*.tiktoken"))
    pair = [folder / name for name in GPT2_FILES]
    return [inside(path) for path in own[:1] or (pair if all(path.is_file() for path in pair) else [])]


def kept_name(source: Path) -> str:
    """The name of a run's copy of a tokenizer whose first file is `source`."""
    return FILES[source.suffix == ".model" and not is_tiktoken(source)]


def keep_tokenizer(spec: str, folder: Path) -> None:
    """Copy a tokenizer into a folder, as its `kept_name`: GPT-2's files and tiktoken's become a tokenizer.json.

    Nothing is copied of a tokenizer without files.
    """
    for source in tokenizer_files(spec)[:1]:
        target = folder / kept_name(source)
        if source.suffix != target.suffix or source.name == GPT2_FILES[0]:
            tokenizer = load_tokenizer(spec)
            assert isinstance(tokenizer, HuggingFaceTokenizer)
            with replaced(target) as temporary:
                tokenizer.save(temporary)
        elif not target.exists() or not target.samefile(source):
            replace_copy(source, target)


def end_of_document(tokenizer: Tokenizer, spec: str, name: str | None = None, setting: str = "--eod-token") -> int:
    """The end-of-document token: the one called `name`, by default the tokenizer's own; InputError if there is none.

    `setting` is the key or option that gave the name.
    """
    token = tokenizer.end_of_document if name is None else tokenizer.token_id(name)
    if token is not None:
        return token
    special = ", ".join(tokenizer.special_tokens[:NAMES_SHOWN]) or "none"
    if name is not None:
        own = "" if tokenizer.end_of_document is None else f", or use its own, token {tokenizer.end_of_document}"
        raise InputError(f"{setting}: {spec} has no token {name}: name one that it has (special: {special}){own}.")
    raise InputError(
        f"{spec} has no end-of-document token of a known name ({', '.join(END_OF_DOCUMENT_NAMES)}): name its token "
        f"with {setting} (its special tokens: {special})."
    )


def decode_after(tokenizer: Tokenizer, before: list[int], tokens: list[int]) -> str:
    """The text of `tokens` after the tokens `before`: alone, the first of many tokenizers loses its space."""
    start, whole = tokenizer.decode(before), tokenizer.decode([*before, *tokens])
    if not whole.startswith(start):  # a character begins in one part and ends in the other
        start = os.path.commonprefix([start, whole])
    return whole[len(start) :]


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 as end of document."""

    vocab_size = 257
    end_of_document = 256

    @property
    def special_tokens(self) -> list[str]:
        return []

    def token_id(self, name: str) -> int | None:
        del name  # bytes have no names
        return None

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return list(text.encode())

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        spans = [[(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()] for text in texts]
        return [(self.encode(text), own) for text, own in zip(texts, spans, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer:
    """Text that is token ids already: integers 0 to N-1 with white space between, and N as end of document.

    As Megatron's NullTokenizer of the vocabulary size N.
    """

    special_tokens: list[str] = []

    def __init__(self, spec: str):
        size = spec.removeprefix("null:")
        if not size.isdecimal() or not int(size):
            raise InputError(f"{spec} has no vocabulary size: write null:50257 for the token ids 0 to 50256.")
        self.end_of_document = int(size)
        self.vocab_size = int(size) + 1

    def token_id(self, name: str) -> int | None:
        del name  # ids have no names
        return None

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return [self._id(word) for word in text.split()]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(self.encode(text), [found.span() for found in re.finditer(r"\S+", text)]) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def _id(self, word: str) -> int:
        if not (word.isascii() and word.isdecimal() and int(word) < self.vocab_size):
            raise InputError(
                f"{word[:20]!r} is not a token id of null:{self.end_of_document}: write integers from 0 to "
                f"{self.end_of_document} with spaces between, or use another tokenizer."
            )
        return int(word)


def _read_json(path: Path) -> "tokenizers.Tokenizer":
    import tokenizers

    with damage_reported(f"{path} is not a Hugging Face tokenizer", "give a tokenizer.json"):
        return tokenizers.Tokenizer.from_file(str(path))


class HuggingFaceTokenizer:
    """A tokenizer of the library `tokenizers`; its end of document is the first of END_OF_DOCUMENT_NAMES in it."""

    def __init__(self, tokenizer: "tokenizers.Tokenizer"):
        self._tokenizer = tokenizer
        tokenizer.no_padding()  # a document is all of its tokens
        tokenizer.no_truncation()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end_of_document = next((vocabulary[name] for name in END_OF_DOCUMENT_NAMES if name in vocabulary), None)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = [token.content for token in added if token.special]

    def save(self, path: Path) -> None:
        """Write the tokenizer as a tokenizer.json."""
        self._tokenizer.save(str(path))

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [(each.ids, each.offsets) for each in encoded]

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


class SentencePieceTokenizer:
    """A SentencePiece `.model`; its end of document is the end-of-sentence piece."""

    def __init__(self, path: str):
        import sentencepiece

        self._model = sentencepiece.SentencePieceProcessor()
        try:
            self._model.LoadFromFile(path)
        except (OSError, RuntimeError):
            raise InputError(f"{path} is not a SentencePiece model: give the .model file of its trainer.") from None
        self.vocab_size = self._model.vocab_size()
        self.end_of_document = self._model.eos_id() if self._model.eos_id() >= 0 else None
        self.special_tokens = [self._model.IdToPiece(i) for i in range(self.vocab_size) if self._model.IsControl(i)]

    def token_id(self, name: str) -> int | None:
        token = self._model.PieceToId(name)  # the unknown token's id if there is none
        return token if self._model.IdToPiece(token) == name else None

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        first = [self._model.bos_id()] if special_tokens and self._model.bos_id() >= 0 else []
        return first + self._model.EncodeAsIds(text)

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        return self._model.EncodeAsIds(list(texts))

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        out = []
        for text in texts:
            pieces = self._model.encode(text, return_type="proto").pieces
            letters = [i for i, letter in enumerate(text) for _ in letter.encode()] + [len(text)]  # of each byte
            out.append(([p.id for p in pieces], [(letters[p.begin], letters[p.end]) for p in pieces]))
        return out

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)
