"""Tokenizers behind one small interface: bytes, a Hugging Face `tokenizer.json`, a SentencePiece model."""

from pathlib import Path
from typing import Protocol

from megajax.errors import InputError

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """Text to token ids and back; no special tokens are added by `encode`."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        ...

    @property
    def end_of_document(self) -> int | None:
        """The token that separates documents, None where the vocabulary has none."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


def load_tokenizer(spec: str) -> Tokenizer:
    """Reads `spec`: "byte", the path of a tokenizer.json, or of a SentencePiece .model; InputError
    otherwise.
    """
    if spec == "byte":
        return ByteTokenizer()
    kinds = {".json": HuggingFaceTokenizer, ".model": SentencePieceTokenizer}
    path = Path(spec)
    if path.suffix not in kinds:
        raise InputError(f'{spec} is no tokenizer: use "byte", a tokenizer.json or a SentencePiece .model file.')
    if not path.is_file():
        raise InputError(f'{spec} does not exist: correct the path of the tokenizer, or use "byte".')
    return kinds[path.suffix](spec)


class ByteTokenizer:
    """UTF-8 bytes 0 to 255, and 256 as end of document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

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

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

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

    def encode(self, text: str) -> list[int]:
        return self._model.EncodeAsIds(text)

    def decode(self, ids: list[int]) -> str:
        return self._model.DecodeIds(ids)
