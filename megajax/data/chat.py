"""Chats and instructions: JSON lines to packed samples with the loss on the assistant's tokens (`data.kind: chat`)."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import batched, chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megajax import cluster
from megajax.data.answers import AnswerSamples
from megajax.data.chat_template import ChatTemplate
from megajax.data.contents import template_of, tokenizer_digest
from megajax.data.conversation import Completion, read_record
from megajax.data.index_cache import cache_directory, cached, file_digest, folder_of, storage_errors
from megajax.data.json_lines import LineBlock, check_encodable, check_inputs, matching_files, parse, read_blocks
from megajax.data.packing import RowPacking, pack
from megajax.data.rendering import Chat, Span
from megajax.data.samples import Samples
from megajax.data.sandbox import Stopped
from megajax.data.special_tokens import document_end, framed, usual_first_token
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer, load_tokenizer
from megajax.data.workers import one_ahead
from megajax.errors import InputError, UserError, file_reader

if TYPE_CHECKING:
    import tokenizers

    from megajax.config import Config
    from megajax.schema.data import DataConfig

VERSION = 6  # of the encoding, part of the key of the stored tokens
CHARACTERS = 1 << 20  # of texts that are tokenised together
MARGIN = 16  # tokens: two texts with the same beginning may be cut into other tokens just before they differ
AT_ONCE = 200  # conversations that are rendered together
NO_ANSWER = ValueError(
    "has no answer of the assistant that counts, or the chat template does not write it: remove the line, or correct "
    "data.chat_template"
)
ARRAYS = ("tokens", "counted", "starts", "order", "ends", "figures")


class Text(NamedTuple):
    """A conversation, or a part of it up to an answer, as text, and the parts of it that the loss counts."""

    text: str
    spans: list[Span]
    bare: bool  # a prompt and its completion: the tokens around a text are missing, and its end counts


class ConversationSamples(NamedTuple):
    """The samples of a conversation, and the number of its answers that are left out."""

    texts: list[Text]
    beyond: int = 0


class Rendering(NamedTuple):
    """How chats become text: `template` raises the error of a missing one; for `room` see `answer_samples`."""

    template: Callable[[], ChatTemplate]
    room: Callable[[str], int | None] = lambda text: None


def read_line(line: bytes) -> Chat | Completion:
    """The conversation of a line; ValueError with the rest of a sentence for anything else."""
    record = parse(line, 'write {"messages": [...]} on a line of its own')
    if b"\\u" in line:
        check_encodable(json.dumps(record, ensure_ascii=False))
    return read_record(record)


def conversations(lines: Sequence[bytes], rendering: Rendering) -> list[ConversationSamples]:
    """The samples of each line: of a chat those of `answer_samples`, of a prompt and its completion one.

    The loss counts the assistant's text with its ends of turns, or the completion and its end. Raises Stopped with the
    number of good lines before an error.
    """
    records, bad = [], None
    for line in lines:
        try:
            records.append(read_line(line))
        except ValueError as error:
            bad = error
            break
    rendered, found = _rendered(records, rendering), []
    for i, each in enumerate(records):
        if isinstance(each, Completion):
            prompt, completion = each
            text = Text(prompt + completion, [(len(prompt), len(prompt) + len(completion))], True)
            found.append(ConversationSamples([text]))
            continue
        samples, beyond = next(rendered)
        if not beyond and not any(start < end for _, spans in samples for start, end in spans):
            raise Stopped(i, NO_ANSWER)
        found.append(ConversationSamples([Text(text, spans, False) for text, spans in samples], beyond))
    if bad is not None:
        raise Stopped(len(found), bad)
    return found


def _rendered(records: Sequence[Chat | Completion], rendering: Rendering) -> Iterator[AnswerSamples]:
    """The samples of the chats."""
    places, chats = [], []
    for i, each in enumerate(records):
        if isinstance(each, Chat):
            places.append(i)
            chats.append(each)
    try:
        return iter(rendering.template().samples(chats, rendering.room) if chats else [])
    except Stopped as stopped:
        raise Stopped(places[stopped.made], stopped.error) from None
    except ValueError as missing:
        raise Stopped(places[0], missing) from None


def counted_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """Whether each token has a character of the spans, bool [tokens]; offsets are those of the tokens."""
    found = np.zeros(len(offsets), bool)
    flat = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets))  # np.array takes four times as long
    starts, ends = flat.reshape(-1, 2).T
    for start, end in spans:
        found |= (ends > start) & (starts < end)
    return found


def counted_in(encoding: "tokenizers.Encoding", spans: Sequence[Span]) -> np.ndarray:
    """`counted_tokens` of the library's own object: most of its tokens are not looked at."""
    found = np.zeros(len(encoding), bool)

    def overlaps(token: int, start: int, end: int) -> bool:
        first, last = encoding.token_to_chars(token) or (0, 0)
        return last > start and first < end

    for start, end in spans:
        characters = range(start, max(end, start + 1))  # an empty span may be inside of a token
        inside = (encoding.char_to_token(i) for i in characters)  # None: a character of no token
        first = next((token for token in inside if token is not None), None)
        if first is None or not overlaps(first, start, end):
            continue
        inside = (encoding.char_to_token(i) for i in reversed(characters))
        last = next(token for token in inside if token is not None)
        while first > 0 and overlaps(first - 1, start, end):  # a character may have several tokens
            first -= 1
        while last + 1 < len(found) and overlaps(last + 1, start, end):
            last += 1
        found[first : last + 1] = True
    return found


def read_chats(paths: Sequence[str], rendering: Rendering) -> Iterator[ConversationSamples]:
    """The conversations of files. Raises InputError, with file and line, for a line that is none."""
    for found in one_ahead(_batches(paths, rendering)):
        yield from found


def _batches(paths: Sequence[str], rendering: Rendering) -> Iterator[list[ConversationSamples]]:
    for block in read_blocks(paths):
        yield from _samples_in(block, rendering)


@file_reader("block.path")
def _samples_in(block: LineBlock, rendering: Rendering) -> Iterator[list[ConversationSamples]]:
    numbered = enumerate(block.text.split(b"\n"), start=block.first_line)
    for some in batched((each for each in numbered if each[1].strip()), AT_ONCE):
        numbers, lines = zip(*some, strict=True)
        try:
            yield conversations(lines, rendering)
        except Stopped as stopped:
            yield conversations(lines[: stopped.made], rendering)
            rest = f": {stopped.error}" if isinstance(stopped.error, UserError) else f" {stopped.error}."
            raise InputError(f"{block.path}, {block.unit} {numbers[stopped.made]}{rest}") from None


def encode(
    texts: Iterable[Text], tokenizer: Tokenizer, document_end: Callable[[], int]
) -> Iterator[tuple[list[int], np.ndarray]]:
    """(tokens, whether the loss counts each, bool [tokens]) of each text.

    Around a prompt and its completion are the token that the tokenizer puts before a text, and `document_end`, which
    is asked only then. The first token is never counted: nothing predicts it.
    """
    for some in _together(texts):
        for text, (ids, mask) in zip(some, _counted(some, tokenizer), strict=True):
            if text.bare:
                begun = framed(ids, usual_first_token(tokenizer))
                uncounted, ids = len(begun) - len(ids), framed(begun, None, document_end())
                mask = np.concatenate([[False] * uncounted, mask, [True] * (len(ids) - len(begun))]).astype(bool)
            mask[:1] = False
            yield ids, mask


def _counted(texts: Sequence[Text], tokenizer: Tokenizer) -> Iterator[tuple[list[int], np.ndarray]]:
    """(tokens, whether each has a character that counts) of each text."""
    whole = [text.text for text in texts]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        encodings = tokenizer.encodings(whole)
        return ((each.ids, counted_in(each, text.spans)) for text, each in zip(texts, encodings, strict=True))
    encoded = zip(texts, tokenizer.encode_with_offsets(whole), strict=True)
    return ((ids, counted_tokens(offsets, text.spans)) for text, (ids, offsets) in encoded)


def _together(texts: Iterable[Text]) -> Iterator[list[Text]]:
    """Consecutive texts that are tokenised together, in as many threads as there are cores."""
    found, size = [], 0
    for text in texts:
        found.append(text)
        size += len(text.text)
        if size >= CHARACTERS:
            yield found
            found, size = [], 0
    if found:
        yield found


def room_for(capacity: int, tokenizer: Tokenizer) -> Callable[[str], int | None]:
    """Text → the number of its characters in `capacity` tokens and a few more; None: all."""

    def room(text: str) -> int | None:
        [(ids, offsets)] = tokenizer.encode_with_offsets([text])
        return offsets[capacity + MARGIN][0] if len(ids) > capacity + MARGIN else None

    return room


def encode_files(
    paths: Sequence[str], data: "DataConfig", tokenizer: Tokenizer, template: ChatTemplate | None, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(all tokens int32, whether each counts, start of each sample and the end int64, figures int64).

    The figures are the numbers of conversations, of samples left out, with the answers beyond `capacity` that have
    none, of samples cut, and of all samples that the template wrote. A sample longer than `capacity` is cut or left
    out, as `data` says; one is left out if nothing that counts remains of it. Raises InputError, with file and line,
    for a line that is not a conversation, and for a completion if no token ends a text.
    """

    def given() -> ChatTemplate:
        if template is None:
            raise ValueError(
                "has messages, but the tokenizer has no chat template: set data.chat_template, or write prompt and "
                "completion"
            )
        return template

    def texts() -> Iterator[Text]:
        nonlocal conversations, dropped, rendered
        for chat in read_chats(paths, Rendering(given, room_for(capacity, tokenizer))):
            conversations += 1
            dropped += chat.beyond
            rendered += sum(not text.bare for text in chat.texts)
            yield from chat.texts

    tokens, counted, lengths, conversations, dropped, cut, rendered = [], [], [], 0, 0, 0, 0
    for ids, mask in encode(texts(), tokenizer, lambda: document_end(data, tokenizer)):
        if (data.too_long == "drop" and len(ids) > capacity) or not mask[:capacity].any():
            dropped += 1
            continue
        cut += len(ids) > capacity
        tokens.append(np.fromiter(ids, np.int32, min(capacity, len(ids))))
        counted.append(mask[:capacity])
        lengths.append(len(tokens[-1]))
    if not lengths:
        problem, cure = "has no conversations", "give other data"
        if conversations:
            problem = f"has no conversation of which the loss counts anything within {capacity - 1} tokens"
            cure = "raise batch.sequence_length, or give other data"
        raise InputError(f"{', '.join(paths)} {problem}: {cure}.")
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return np.concatenate(tokens), np.concatenate(counted), starts, np.array([conversations, dropped, cut, rendered])


class ChatSamples(Samples):
    """Conversations of files, packed into samples of `sequence_length` + 1 tokens, in a new order in each epoch.

    The rest of a sample is token 0, which the loss does not count.
    """

    def __init__(self, path: str, arrays: Sequence[np.ndarray], sequence_length: int, seed: int, shuffled: bool):
        self._arguments = (path, arrays, sequence_length, seed, shuffled)
        self.path, self.sequence_length, self.seed, self.shuffled = path, sequence_length, seed, shuffled
        self.tokens, self.counts, self.starts, self.order, self.ends, figures = arrays
        self.conversations, self.dropped, self.cut, self.rendered = map(int, figures)
        self._epoch = lru_cache(2)(self._make_epoch)

    def __reduce__(self) -> Any:
        return ChatSamples, self._arguments

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._filled(self.tokens, index, np.int32)

    def counted(self, index: int) -> np.ndarray:
        return self._filled(self.counts, index, bool)

    def document_lengths(self, index: int) -> np.ndarray:
        lengths = [stop - start for start, stop in self._pieces(index)]
        rest = self.sequence_length + 1 - sum(lengths)
        return np.array(lengths + [rest] * (rest > 0))

    def padding(self, index: int) -> int:
        return self.sequence_length + 1 - sum(stop - start for start, stop in self._pieces(index))

    def repacked(self, packing: RowPacking) -> Samples:
        tokens, counts, starts, _, _, figures = self._arguments[1]
        packed = pack(np.diff(starts), self.sequence_length + 1, packing)
        return ChatSamples(self.path, (tokens, counts, starts, *packed, figures), *self._arguments[2:])

    def _filled(self, values: np.ndarray, index: int, dtype: Any) -> np.ndarray:
        out, filled = np.zeros(self.sequence_length + 1, dtype), 0
        for start, stop in self._pieces(index):
            out[filled : filled + stop - start] = values[start:stop]
            filled += stop - start
        return out

    def _pieces(self, index: int) -> list[tuple[int, int]]:
        epoch, place = divmod(index, len(self))
        number = int(self._epoch(epoch)[place]) if self.shuffled else place
        items = self.order[int(self.ends[number - 1]) if number else 0 : int(self.ends[number])]
        return [(int(self.starts[item]), int(self.starts[item + 1])) for item in items]

    def _make_epoch(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64((self.seed, epoch))).permutation(len(self))


def open_chat(config: "Config", path: str) -> ChatSamples:
    """The samples of a file or of all files of a glob; tokens and packing are stored in `data.index_cache`."""
    data, length = config.data, config.batch.sequence_length
    assert data.tokenizer is not None  # checked with the config

    def find() -> list[Any]:
        check_inputs(paths := matching_files(path))
        return [paths, "_".join(map(file_digest, paths)), tokenizer_digest(str(data.tokenizer))]

    paths, content, of_tokenizer = cluster.current().first_decides(find)
    template, packing = template_of(data), RowPacking.of(config)
    key = {
        "kind": "chat",
        "version": VERSION,
        "file": content,
        "tokenizer": of_tokenizer,
        "end_of_document": data.end_of_document,
        "template": None if template is None else [template.sources, template.arguments],
        "sequence_length": length,
        "too_long": data.too_long,
        "packing": [packing.method, [packing.pairs.layers, packing.pairs.causal] if packing.balances else None],
    }

    def build() -> Sequence[np.ndarray]:
        tokenizer = load_tokenizer(str(data.tokenizer))
        tokens, counted, starts, figures = encode_files(paths, data, tokenizer, template, length + 1)
        return tokens, counted, starts, *pack(np.diff(starts), length + 1, packing), figures

    cache = cache_directory(config)
    arrays = cached(cache, key, ARRAYS, build)
    with storage_errors(folder_of(cache, key)):
        _check_fit(arrays, length + 1)
    return ChatSamples(path, arrays, length, config.run.seed, data.order == "shuffled")


def _check_fit(arrays: Sequence[np.ndarray], capacity: int) -> None:
    """Raise ValueError for stored arrays that are not those of one packing, as damage leaves them."""
    tokens, counted, starts, order, ends, figures = arrays
    fit = all(array.ndim == 1 and array.dtype.kind in "biu" and array.size for array in arrays)
    if fit and tokens.size == counted.size == starts[-1] and starts[0] == 0 and figures.size == 4:
        lengths, firsts = np.diff(starts), np.concatenate([[0], ends[:-1]])
        if lengths.min(initial=1) > 0 and 0 <= order.min() <= order.max() < lengths.size and ends[-1] == order.size:
            if (ends > firsts).all() and np.add.reduceat(lengths[order], firsts).max() <= capacity:
                return
    raise ValueError("its arrays do not fit each other")
