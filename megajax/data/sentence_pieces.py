"""SentencePiece models with the special tokens of the files beside them."""

import re
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from megajax.data.special_tokens import AddedToken, FolderTokens
from megajax.errors import reported

NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # after a model's bytes: normalizer_spec.add_dummy_prefix is false


class _Part(NamedTuple):
    """A part of a text: a special token, or what is between two of them."""

    start: int  # in characters
    text: str
    token: int | None


class SentencePieceTokenizer:
    """A SentencePiece `.model`, with the tokens that the files beside it add.

    As in transformers, names of special tokens in prompts and chats are these tokens, and the text behind one begins
    without the space that SentencePiece puts before a text, unless tokenizer_config.json says `legacy`. Documents are
    SentencePiece's alone, as for Megatron.
    """

    def __init__(self, path: str, found: FolderTokens):
        import sentencepiece

        self._model = model = sentencepiece.SentencePieceProcessor()
        with reported(f"{path} is not a SentencePiece model", "give the .model file of its trainer"):
            model.LoadFromFile(path)
            pieces = range(model.vocab_size())
            texts = model.IdToPiece([*pieces])  # of a damaged model they need not be UTF-8
        self._reported = partial(reported, f"{path} fails at a text", "give another tokenizer")
        without_prefix = model.serialized_model_proto() + NO_DUMMY_PREFIX
        self._behind = model if found.legacy else sentencepiece.SentencePieceProcessor(model_proto=without_prefix)
        self._added = {token: added for token, added in found.added.items() if token not in pieces}
        self.vocab_size = max([*pieces, *self._added]) + 1
        of_model = {i: AddedToken(texts[i]) for i in pieces if model.IsControl(i) or model.IsUnknown(i)}
        named = of_model | dict(found.added)
        self._ids = {token.content: i for i, token in named.items()}
        self.added_tokens = list(self._ids)
        controls = [texts[i] for i in pieces if model.IsControl(i)]
        self.special_tokens = controls + [token.content for token in self._added.values() if token.special]
        self._names = sorted(named.values(), key=lambda token: -len(token.content))  # the longest one that fits
        self._cut = re.compile("|".join(map(_pattern, self._names)))
        self.end_of_document = found.end(self.token_id, self.special_tokens, _known(model.eos_id()))
        self.begin_of_text, self.adds_begin = found.begin(self.token_id, _known(model.bos_id()))

    def token_id(self, name: str) -> int | None:
        if name in self._ids:
            return self._ids[name]
        token = self._model.PieceToId(name)  # the unknown token's id if there is none
        return token if self._model.IdToPiece(token) == name else None

    def encode(self, text: str) -> list[int]:
        with self._reported():
            return [token for part in self._parts(text) for token in self._tokens(part)]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        with self._reported():
            return self._model.EncodeAsIds(list(texts))

    def encode_with_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        out = []
        with self._reported():
            for text in texts:
                ids, spans = [], []
                for part in self._parts(text):
                    ids += self._tokens(part)
                    spans += self._offsets(part)
                out.append((ids, spans))
        return out

    def decode(self, ids: list[int]) -> str:
        """The text; a model with a padded vocabulary can give ids that no piece has, which are nothing."""
        texts = []
        with self._reported():
            for added, group in groupby(ids, self._added.get):
                if added is None:
                    texts.append(self._model.DecodeIds([i for i in group if i < self._model.vocab_size()]))
                elif not added.special:
                    texts += [added.content for _ in group]
        return "".join(texts)

    def _parts(self, text: str) -> Iterator[_Part]:
        start = 0
        for found in self._cut.finditer(text):
            if found.start() > start:
                yield _Part(start, text[start : found.start()], None)
            assert found.lastindex is not None  # each pattern has a group
            yield _Part(found.start(), found[0], self._ids[self._names[found.lastindex - 1].content])
            start = found.end()
        if start < len(text):
            yield _Part(start, text[start:], None)

    def _tokens(self, part: _Part) -> list[int]:
        if part.token is not None:
            return [part.token]
        return (self._behind if part.start else self._model).EncodeAsIds(part.text)

    def _offsets(self, part: _Part) -> list[tuple[int, int]]:
        if part.token is not None:
            return [(part.start, part.start + len(part.text))]
        letters = [part.start + i for i, letter in enumerate(part.text) for _ in letter.encode()]  # of each byte
        letters.append(part.start + len(part.text))
        pieces = (self._behind if part.start else self._model).encode(part.text, return_type="proto").pieces
        return [(letters[piece.begin], letters[piece.end]) for piece in pieces]


def _pattern(token: AddedToken) -> str:
    """The regular expression of a token in a text, with a group."""
    before, behind = (r"\s*" if strips else "" for strips in (token.lstrip, token.rstrip))
    return f"{before}({re.escape(token.content)}){behind}"


def _known(token: int) -> int | None:
    """SentencePiece's -1 is no token."""
    return None if token < 0 else token
