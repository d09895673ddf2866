"""Which token ends a text, which one begins it, and at which ones generation stops.

Only this module decides; data, generation, evaluation and exports ask it. docs/data.md has the table of who uses what.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NotRequired, TypedDict

import numpy as np
from pydantic import Field

from megajax.data.chat_template import find_chat_template
from megajax.data.model_files import TOKENIZER_CONFIG, read_json, token_texts, tokenizer_config
from megajax.errors import InputError
from megajax.json_files import TokenId, check

if TYPE_CHECKING:
    from megajax.data.indexed import IndexedDataset
    from megajax.data.tokenizers import Tokenizer
    from megajax.schema.data import DataConfig

ADDED = "added_tokens.json"
ID_FILES = ("generation_config.json", "config.json", "hf_config.json")  # the last one in a run's directory
KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "</s>")
KNOWN_BEGINS = ("<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>", "<s>")
TOKENS = ("bos_token", "eos_token")
NAMES_SHOWN = 10
CHECKED_DOCUMENTS = 1000  # of a file
PROBE = "zebra"  # an answer, to see what a template writes behind it
CURE = "copy all of the tokenizer's files again"
Text = Annotated[str, Field(min_length=1)]
IdText = Annotated[str, Field(pattern="^[0-9]{1,9}$")]  # the key of a token


class AddedToken(NamedTuple):
    """A token beside those of a tokenizer's model."""

    content: str
    special: bool = True
    lstrip: bool = False  # it takes the white space before it
    rstrip: bool = False
    single_word: bool = False  # not within a word
    normalized: bool = False  # looked for in the normalised text
    has_flags: bool = False  # a file has those above


class StoredToken(TypedDict):
    """The same in tokenizer_config.json, which has more keys."""

    content: Text
    special: NotRequired[bool]
    lstrip: NotRequired[bool]
    rstrip: NotRequired[bool]
    single_word: NotRequired[bool]
    normalized: NotRequired[bool]


@dataclass(frozen=True)
class FolderTokens:
    """What the files beside a tokenizer say about its special tokens."""

    names: Mapping[str, str] = field(default_factory=dict)  # of bos_token and eos_token; "": null, there is none
    ids: Mapping[str, list[int]] = field(default_factory=dict)  # of the same
    adds_begin: bool | None = None  # whether it belongs before a text; None: the tokenizer's own file decides
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    legacy: bool = False  # SentencePiece: the text behind a special token begins like a text of its own

    def end(self, token_id: Callable[[str], int | None], special: Collection[str], of_model: int | None) -> int | None:
        """The token that ends a text: the folder's, else that of the tokenizer's file, else one of a known name."""
        found = self._named("eos_token", token_id)
        if found is not None or of_model is not None:
            return of_model if found is None else found
        known = sorted(
            (name for name in KNOWN_ENDS if token_id(name) is not None), key=lambda name: name not in special
        )
        return token_id(known[0]) if known else None  # special ones first: Gemma's </s> is a tag of HTML

    def begin(self, token_id: Callable[[str], int | None], of_model: int | None) -> tuple[int | None, bool]:
        """(the token that begins a text, whether the tokenizer puts it there); `of_model` is the one of its file."""
        found = self._named("bos_token", token_id)
        if self.adds_begin is None and of_model is not None:
            return of_model, True
        if found is None and "bos_token" not in self.names:
            known = next((name for name in KNOWN_BEGINS if token_id(name) is not None), None)
            found = of_model if of_model is not None or known is None else token_id(known)
        return found, bool(self.adds_begin) and found is not None

    def _named(self, name: str, token_id: Callable[[str], int | None]) -> int | None:
        text = self.names.get(name)
        found = None if text is None else token_id(text)
        return next(iter(self.ids.get(name, ())), None) if found is None else found


def read_folder_tokens(folder: Path) -> FolderTokens:
    """What a folder's `tokenizer_config` says, else the ids of its generation_config.json and config.json.

    Raises InputError for a damaged file.
    """
    config = tokenizer_config(folder)
    texts = token_texts(config, TOKENS)
    names = {name: texts.get(name, "") for name in TOKENS if name in config}
    ids = {name: stored_ids(folder, name) for name in TOKENS if name not in config}
    adds = bool(config.get("add_bos_token")) if {"add_bos_token", "add_eos_token"} & config.keys() else None
    return FolderTokens(names, ids, adds, _added_tokens(folder, config), bool(config.get("legacy")))


def stored_ids(folder: Path, name: str) -> list[int]:
    """The ids of a special token such as `eos_token` in the first of ID_FILES that has any.

    Published models have -1 for none; for transformers it is a token that never comes.
    """
    for file in ID_FILES:
        stored = read_json(folder / file)
        nested = stored.get("text_config")
        for config in (stored, nested if isinstance(nested, dict) else {}):
            found = config.get(f"{name}_id")
            given = found if isinstance(found, list) else [-1 if found is None else found]
            if ids := [token for token in given if token != -1]:
                place = f"{folder / file}, key {name}_id,"
                return check(ids, place, list[TokenId], "give a token id, or a list of them")
    return []


def _added_tokens(folder: Path, config: Mapping[str, Any]) -> dict[int, AddedToken]:
    by_text = check(read_json(folder / ADDED), str(folder / ADDED), dict[Text, TokenId], CURE)
    place = f"{folder / TOKENIZER_CONFIG}, key added_tokens_decoder,"
    by_id = check(config.get("added_tokens_decoder") or {}, place, dict[IdText, StoredToken], CURE)
    found = {token: AddedToken(text) for text, token in by_text.items()}
    for token, stored in by_id.items():
        usual: StoredToken = {"content": "", "special": False, "normalized": not stored.get("special")}
        found[int(token)] = AddedToken(**{**usual, **stored}, has_flags=True)
    return found


def end_of_document(tokenizer: "Tokenizer", spec: str, name: str | None = None, setting: str = "--eod-token") -> int:
    """The token that ends a text: the one called `name`, by default the tokenizer's own; InputError if there is none.

    `setting` is the key or option that gave the name.
    """
    token = tokenizer.end_of_document if name is None else tokenizer.token_id(name)
    if token is not None:
        return token
    special = ", ".join(tokenizer.special_tokens[:NAMES_SHOWN]) or "none"
    if name is not None:
        hint = "" if tokenizer.end_of_document is None else f", or use its own, token {tokenizer.end_of_document}"
        raise InputError(f"{setting}: {spec} has no token {name}: name one that it has (special: {special}){hint}.")
    raise InputError(
        f"{spec} has no eos_token in a {TOKENIZER_CONFIG} beside it, and no end-of-document token of a known name "
        f"({', '.join(KNOWN_ENDS)}): name its token with {setting} (its special tokens: {special})."
    )


def begin_of_document(tokenizer: "Tokenizer", spec: str, setting: str = "--prepend-bos") -> int:
    """The token that begins a text; InputError if the tokenizer has none. `setting` asked for it."""
    if tokenizer.begin_of_text is None:
        raise InputError(
            f"{setting}: {spec} has no token that begins a text: leave it out, or name the tokenizer's bos_token in a "
            f"{TOKENIZER_CONFIG} beside it."
        )
    return tokenizer.begin_of_text


class DocumentTokens(NamedTuple):
    """The tokens at both ends of a run's documents."""

    begin: int | None
    end: int


def document_tokens(data: "DataConfig", tokenizer: "Tokenizer") -> DocumentTokens:
    """Those of `data.end_of_document` or the tokenizer, and, with `data.begin_of_document`, the one that begins a text.

    Raises InputError if the tokenizer does not have them.
    """
    return DocumentTokens(_begin(data, tokenizer) if data.begin_of_document else None, document_end(data, tokenizer))


def document_end(data: "DataConfig", tokenizer: "Tokenizer") -> int:
    """The token that ends a run's documents and completions. Raises InputError as `end_of_document`."""
    return end_of_document(tokenizer, str(data.tokenizer), data.end_of_document, "data.end_of_document")


def known_end(data: "DataConfig", tokenizer: "Tokenizer") -> int | None:
    """`document_end`, or None if nothing says which token it is."""
    return tokenizer.end_of_document if data.end_of_document is None else document_end(data, tokenizer)


def _begin(data: "DataConfig", tokenizer: "Tokenizer") -> int:
    return begin_of_document(tokenizer, str(data.tokenizer), "data.begin_of_document")


def check_ends(dataset: "IndexedDataset", tokenizer: "Tokenizer", end: int) -> None:
    """Raise InputError if the documents of a file end with another special token than `end`, at which they are cut."""
    ids = {tokenizer.token_id(name): name for name in tokenizer.special_tokens}
    count = min(dataset.num_documents, CHECKED_DOCUMENTS)
    last = dataset.tokens[dataset.document_starts(0, count)[1:] - 1] if count > 1 else np.zeros(0, int)
    if last.size and last[0] != end and (last == last[0]).all() and int(last[0]) in ids:
        raise InputError(
            f"the documents of {dataset.token_file} end with {ids[int(last[0])]} (token {last[0]}), but the run cuts "
            f"them at token {end}: set data.end_of_document={ids[int(last[0])]}."
        )


def first_token(data: "DataConfig", tokenizer: "Tokenizer", from_folder: bool) -> int | None:
    """The token that begins a run's texts in prompts and evaluation; None: they have none.

    It is that of the documents with `data.begin_of_document`, and what the tokenizer puts before a text if the run had
    chat data, or the model is `from_folder` of Hugging Face.
    """
    if data.begin_of_document:
        return _begin(data, tokenizer)
    return usual_first_token(tokenizer) if from_folder or data.kind == "chat" else None


def usual_first_token(tokenizer: "Tokenizer") -> int | None:
    """The token that the tokenizer puts before a text; None: it puts none."""
    return tokenizer.begin_of_text if tokenizer.adds_begin else None


def framed(ids: Sequence[int], begin: int | None, end: int | None = None) -> list[int]:
    """The tokens of a text between `begin` and `end`, unless it has them already; None: nothing."""
    first = [] if begin is None or list(ids[:1]) == [begin] else [begin]
    last = [] if end is None or list(ids[-1:]) == [end] else [end]
    return [*first, *ids, *last]


def stop_tokens(
    folder: Path, tokenizer: "Tokenizer | None", end: int | None, template_arguments: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """The tokens at which generation stops, without repeats, the end of a text first.

    They are `end`, the eos_token_id of the folder's files, and the token that the chat template writes behind an
    answer, with `template_arguments`; None: no chats.
    """
    found = [end, *stored_ids(folder, "eos_token")]
    if template_arguments is not None and tokenizer is not None:
        found.append(turn_end(folder, tokenizer, template_arguments))
    return tuple(dict.fromkeys(token for token in found if token is not None))


def turn_end(folder: Path, tokenizer: "Tokenizer", template_arguments: Mapping[str, Any]) -> int | None:
    """The token that the folder's chat template writes behind an answer, such as <|im_end|>; None: text, or nothing."""
    text = ""
    with suppress(InputError):  # a template that is damaged, or that does not accept this chat; a chat's prompt says so
        template = find_chat_template(folder, arguments=template_arguments)
        if template is not None:
            text = template.render([{"role": "user", "content": PROBE}, {"role": "assistant", "content": PROBE}])
    behind = text.rpartition(PROBE)[2].lstrip()
    names = [name for name in tokenizer.added_tokens if behind.startswith(name)]
    return tokenizer.token_id(max(names, key=len)) if names else None
