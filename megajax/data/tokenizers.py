"""Tokenizers behind one small interface: bytes, a Hugging Face `tokenizer.json`, a SentencePiece model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megajax.errors import InputError

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

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """The tokens of each text, and each token's range of characters."""
        ...

    def decode(self, ids: list[int]) -> str: ...


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer `spec`: "byte", or the path of a tokenizer.json or of a SentencePiece .model; else InputError."""
    if spec == "byte":
        return ByteTokenizer()
    kinds = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    path = Path(spec)
    for name in ("tokenizer.json", "tokenizer.model"):
        if (path / name).is_file():
            raise InputError(f"{spec} is a directory: name the file in it, {path / name}.")
    if path.suffix not in kinds:
        raise InputError(
            f'{spec} is not a tokenizer: use "byte", or the path of a tokenizer.json or of a SentencePiece .model file.'
        )
    if not path.is_file():
        raise InputError(f'{spec} does not exist: correct the path of the tokenizer, or use "byte".')
    return kinds[path.suffix](spec)


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
        f"--append-eod: {spec} has no end-of-document token of a known name ({', '.join(END_OF_DOCUMENT_NAMES)}); "
        f"name its token with --eod-token NAME (its special tokens: {special}), or leave the option out."
    )


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

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        spans = [[(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()] for text in texts]
        return [(self.encode(text), own) for text, own in zip(texts, spans, strict=True)]

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class HuggingFaceTokenizer:
    """A `tokenizer.json`; its end of document is the first of END_OF_DOCUMENT_NAMES in the vocabulary."""

    def __init__(self, path: str):
        import tokenizers

        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path} is not a Hugging Face tokenizer ({error}): give a tokenizer.json.") from None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.end_of_document = next((vocabulary[name] for name in END_OF_DOCUMENT_NAMES if name in vocabulary), None)
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.special_tokens = [token.content for token in added if token.special]

    def token_id(self, name: str) -> int | None:
        return self._tokenizer.token_to_id(name)

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

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

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        out = []
        for text in texts:
            pieces = self._model.encode(text, return_type="proto").pieces
            letters = [i for i, letter in enumerate(text) for _ in letter.encode()] + [len(text)]  # of each byte
            out.append(([p.id for p in pieces], [(letters[p.begin], letters[p.end]) for p in pieces]))
        return out

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)
