"""Chats and instructions: JSON lines to samples of tokens, with the loss on the assistant's (`data.kind: chat`)."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import batched, chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megajax.data.answers import AnswerSamples
from megajax.data.chat_template import ChatTemplate
from megajax.data.conversation import IMAGE, Completion, read_pair, read_record
from megajax.data.encoding import BadLines
from megajax.data.images import Images, ImageText, PictureTable, PlacedPicture, SizedPicture
from megajax.data.json_lines import (
    LineBlock,
    check_encodable,
    parse,
    read_blocks,
    record_blocks,
)
from megajax.data.picture_checks import BadPictures, warn_of_pictures, with_pictures
from megajax.data.rendering import Chat, Span
from megajax.data.sandbox import Stopped
from megajax.data.shards import is_shard
from megajax.data.special_tokens import document_end, framed, usual_first_token
from megajax.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from megajax.data.workers import one_ahead
from megajax.errors import InputError, UserError, file_reader

if TYPE_CHECKING:
    import tokenizers

    from megajax.schema.data import DataConfig

CHARACTERS = 1 << 20  # of texts that are tokenised together
MARGIN = 16  # tokens: two texts with the same beginning may be cut into other tokens just before they differ
AT_ONCE = 200  # conversations that are rendered together
NO_ANSWER = ValueError(
    "has no answer of the assistant that counts, or the chat template writes or marks no text of it: remove the line, "
    "or correct data.chat_template"
)
SEVERAL_ANSWERS = ValueError(
    "has several answers after the prompt, but the chat template changes earlier turns, so they are not in one text: "
    "put all but the last one into the prompt"
)
NO_TOWER = ValueError("has pictures, but the model reads text only (it has no model.vision): leave the line out")


class Text(NamedTuple):
    """A conversation, or a part of it up to an answer, as text, and the parts of it that the loss counts."""

    text: str
    spans: list[Span]
    bare: bool  # a prompt and its completion: the tokens around a text are missing, and its end counts


class ConversationSamples(NamedTuple):
    """The samples of a conversation, the number of its answers that are left out, its pictures, and where it is."""

    texts: list[Text]
    beyond: int = 0
    pictures: tuple[str, ...] = ()
    file: str = ""
    location: str = ""


class Rendering(NamedTuple):
    """How chats become text: `template` raises the error of a missing one; for `room` see `answer_samples`.

    `images` is None for a model that reads text only. With `pairs` a line has two conversations, chosen and rejected.
    """

    template: Callable[[], ChatTemplate]
    room: Callable[[str], int | None] = lambda text: None
    images: Images | None = None
    pairs: bool = False

    @property
    def per_line(self) -> int:
        """The conversations of a line."""
        return 1 + self.pairs

    @property
    def image(self) -> ImageText | None:
        """A picture in texts."""
        return self.images and self.images.text


def read_line(line: bytes, pairs: bool = False) -> list[Chat | Completion]:
    """The conversation of a line, or its pair; ValueError with the rest of a sentence for anything else."""
    wanted = '{"chosen": [...], "rejected": [...]}' if pairs else '{"messages": [...]}'
    record = parse(line, f"write {wanted} on a line of its own")
    if b"\\u" in line:
        check_encodable(json.dumps(record, ensure_ascii=False))
    return read_pair(record) if pairs else [read_record(record)]


def conversations(lines: Sequence[bytes], rendering: Rendering) -> list[ConversationSamples]:
    """The samples of each line: of a chat those of `answer_samples`, of a prompt and its completion one.

    Of a pair those of the chosen conversation, then those of the rejected one, one each. The loss counts the
    assistant's text with its ends of turns, or the completion and its end. Raises Stopped with the number of good
    conversations before an error.
    """
    records, bad = [], None
    for line in lines:
        try:
            read = read_line(line, rendering.pairs)
            if rendering.images is None and any(record.pictures for record in read):
                raise NO_TOWER
            records += read
        except ValueError as error:
            bad = error
            break
    rendered, found, image = _rendered(records, rendering), [], rendering.image
    for i, each in enumerate(records):
        if isinstance(each, Completion):
            prompt, completion = each.prompt, each.completion
            if image is not None:
                prompt, completion = (part.replace(IMAGE, image.template) for part in (prompt, completion))
            samples, beyond = [(prompt + completion, [(len(prompt), len(prompt) + len(completion))])], 0
        else:
            samples, beyond = next(rendered)
            if not beyond and not any(start < end for _, spans in samples for start, end in spans):
                raise Stopped(i, NO_ANSWER)
            if rendering.pairs and len(samples) > 1:
                raise Stopped(i, SEVERAL_ANSWERS)
        if image is not None:
            samples = [image.written(*sample) for sample in samples]
        texts = [Text(*sample, isinstance(each, Completion)) for sample in samples]
        found.append(ConversationSamples(texts, beyond, each.pictures))
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
        if not chats:
            return iter([])
        template = rendering.template()
        template = template if rendering.image is None else template.with_image(rendering.image.template)
        return iter(template.samples(chats, rendering.room))
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
    for block in _blocks(paths, rendering.images):
        yield from _samples_in(block, rendering)


def _blocks(paths: Sequence[str], images: Images | None) -> Iterator[LineBlock]:
    """The lines of files, and the samples of shards as lines."""
    for path in paths:
        if not is_shard(path):
            yield from read_blocks([path])
        elif images is None:
            raise InputError(f"{path} is a shard of pictures, but the model reads text only: set model.vision.")
        else:
            yield from record_blocks(path, images.files.shard(path).records(), "sample")


@file_reader("block.path")
def _samples_in(block: LineBlock, rendering: Rendering) -> Iterator[list[ConversationSamples]]:
    for some in batched(block.lines(), AT_ONCE):
        lines, locations = zip(*some, strict=True)
        error = None
        found, stopped = _before_error(lines, rendering)
        if stopped is not None:
            rest = f": {stopped.error}" if isinstance(stopped.error, UserError) else f" {stopped.error}."
            error = InputError(f"{locations[stopped.made // rendering.per_line]}{rest}")
        located = enumerate(found)
        yield [each._replace(file=block.path, location=locations[i // rendering.per_line]) for i, each in located]
        if error is not None:  # not before the good ones are used: `--limit` may need no more
            raise error


def _before_error(lines: Sequence[bytes], rendering: Rendering) -> tuple[list[ConversationSamples], Stopped | None]:
    """`conversations` of the lines before the first error, and the error."""
    try:
        return conversations(lines, rendering), None
    except Stopped as stopped:  # an earlier chat may have another error, which comes after all are rendered
        found, earlier = _before_error(lines[: stopped.made // rendering.per_line], rendering)
        return found, earlier or stopped


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


class EncodedChats(NamedTuple):
    """Files of conversations as samples.

    All tokens int32, whether the loss counts each, the start of each sample and the end int64. `figures` int64 are the
    numbers of conversations, of samples left out, with the answers beyond a sequence that have none, of samples cut,
    and of all samples that the template wrote. `pictures` is None without a vision tower.
    """

    tokens: np.ndarray
    counted: np.ndarray
    starts: np.ndarray
    figures: np.ndarray
    pictures: PictureTable | None


class _Fitting:
    """Samples cut to sequences; those of a line are kept or left out together."""

    def __init__(self, too_long: str, per_line: int):
        self.tokens, self.counted, self.placed = list[np.ndarray](), list[np.ndarray](), list[list[PlacedPicture]]()
        self.cut = self.dropped = 0
        self._drops, self._per_line = too_long == "drop", per_line
        self._line = list[tuple[list[int], np.ndarray, list[PlacedPicture], int] | None]()

    def add(self, ids: list[int], mask: np.ndarray, placed: list[PlacedPicture], room: int) -> None:
        """The next sample, of which a sequence holds `room` tokens."""
        is_used = mask[:room].any() and not (self._drops and len(ids) > room)
        self._line.append((ids, mask[:room], placed, room) if is_used else None)
        if len(self._line) < self._per_line:
            return
        used = [each for each in self._line if each is not None and None not in self._line]
        self.dropped += len(self._line) - len(used)
        for ids, mask, placed, room in used:
            self.cut += len(ids) > room
            self.tokens.append(np.fromiter(ids, np.int32, min(room, len(ids))))
            self.counted.append(mask)
            self.placed.append(placed)
        self._line = []


def encode_files(
    paths: Sequence[str],
    data: "DataConfig",
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    capacity: int,
    images: Images | None = None,
) -> EncodedChats:
    """The samples of files.

    A sample longer than `capacity` is cut or left out, as `data` says; one is left out if nothing that counts remains
    of it, and with it the other one of a pair. A conversation with a picture that cannot be used is left out, with a
    warning that names it. Raises InputError, with file and line, for a line that is not a conversation, and for a
    completion if no token ends a text.
    """

    def given() -> ChatTemplate:
        if template is None:
            raise ValueError(
                "has messages, but the tokenizer has no chat template: set data.chat_template, or write prompt and "
                "completion"
            )
        return template

    pairs = data.reads_pairs
    # A pair has one text each, so that none is left out for its length before it is tokenised.
    rendering = Rendering(given, (lambda text: None) if pairs else room_for(capacity, tokenizer), images, pairs)

    def texts() -> Iterator[Text]:
        nonlocal conversations, beyond, rendered
        for chat, pictures in with_pictures(read_chats(paths, rendering), images, bad):
            conversations += 1
            beyond += chat.beyond
            rendered += sum(not text.bare for text in chat.texts)
            # The last text has the whole conversation, if no answer is left out.
            missing = [0] * (len(chat.texts) - 1) + [len(pictures) * (not chat.beyond)] * bool(chat.texts)
            sources.extend((chat.location, pictures, least) for least in missing)
            yield from chat.texts

    conversations, beyond, rendered, fitting = 0, 0, 0, _Fitting(data.too_long, rendering.per_line)
    bad, sources = BadPictures(), deque[tuple[str, Sequence[SizedPicture], int]]()
    for ids, mask in encode(texts(), tokenizer, lambda: document_end(data, tokenizer)):
        (location, pictures, least), here, room = sources.popleft(), list[PlacedPicture](), capacity
        if images is not None:
            try:
                ids, mask, here = images.expanded(ids, mask, pictures, least)
            except ValueError as error:
                raise InputError(f"{location} {error}.") from None
            room, here = images.fitting(here, capacity)
        fitting.add(ids, mask, here, room)
    if not fitting.tokens:
        warn_of_pictures(paths, bad.lines)
        raise _no_samples(paths, conversations, bad.lines, capacity)
    starts = np.concatenate([[0], np.cumsum([each.size for each in fitting.tokens], dtype=np.int64)])
    figures = np.array([conversations, beyond + fitting.dropped, fitting.cut, rendered])
    table = None if images is None else PictureTable.of(fitting.placed, bad.lines)
    return EncodedChats(np.concatenate(fitting.tokens), np.concatenate(fitting.counted), starts, figures, table)


def _no_samples(paths: Sequence[str], conversations: int, bad: BadLines, capacity: int) -> InputError:
    problem, cure = "has no conversations", "give other data"
    if conversations:
        problem = f"has no conversation of which the loss counts anything within {capacity - 1} tokens"
        cure = "raise batch.sequence_length, or give other data"
    elif bad.count:
        problem, cure = "has no conversation whose pictures can be used", f"correct them; {bad.first[0]}"
    return InputError(f"{', '.join(paths)} {problem}: {cure}.")
