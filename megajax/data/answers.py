"""The assistant's parts of a chat's text, and as many texts as a template needs to show each answer as it was given.

The text of an answer begins where the generation prompt ends, so the model learns to write all that follows the prompt
that `generate` gives it, with the end of the turn.
"""

from collections.abc import Callable, Iterator, Sequence
from os.path import commonprefix
from typing import NamedTuple

from megajax.data.rendering import Chat, Span, Template
from megajax.errors import InputError, counted

Sample = tuple[str, list[Span]]
WINDOW = 8  # answers; a longer chat is not rendered from its beginning for each answer


class AnswerSamples(NamedTuple):
    """The samples of a chat, and the number of answers without one, because they begin beyond a sequence."""

    samples: list[Sample]
    beyond: int = 0


def answer_samples(
    template: Template, chat: Chat, room: Callable[[str], int | None] = lambda text: None
) -> AnswerSamples:
    """(text, the spans of the answers that count) of each sample of a chat.

    A template with {% generation %} marks the answers, of some chats perhaps none. Otherwise a sample is a chat up to
    an answer, as the template writes it when this answer is the last one. Answers that do not change when the next one
    follows share a sample, so most templates give one. With more samples the answers beyond the first `room(text)`
    characters of the chat are left out, None: all fit; else a long chat would be rendered from its beginning for each
    of them. Raises InputError if it is not known where an answer begins.
    """
    found = _unless_long(template, chat)
    return _by_answer(template, chat, found, room(found)) if isinstance(found, str) else found


def samples_of_each(template: Template, chats: Sequence[Chat]) -> Iterator[AnswerSamples | str]:
    """`answer_samples` of each chat, or its text if they depend on the room: the work of a child process."""
    for chat in chats:
        yield _unless_long(template, chat)


def samples_within(template: Template, chat: Chat, text: str, room: int | None) -> Iterator[AnswerSamples]:
    """`answer_samples` of a chat whose `text` has this room: the work of a child process."""
    yield _by_answer(template, chat, text, room)


def _unless_long(template: Template, chat: Chat) -> AnswerSamples | str:
    """The samples of a chat, or its text if their number depends on the room."""
    text, spans = template.with_marks(chat.messages, **chat.arguments)
    if spans or template.has_marks(**chat.arguments):
        return AnswerSamples([(text, _counted(template, chat, spans))])
    if len(chat.answers) <= WINDOW:
        return _by_answer(template, chat, text, None)
    samples = _in_windows(template, chat)
    return text if samples is None else AnswerSamples(samples)


def _counted(template: Template, chat: Chat, spans: list[Span]) -> list[Span]:
    """The marked spans of answers that count."""
    answers = chat.answers
    if not spans or all(map(chat.counts, answers)):
        return spans
    if len(spans) != len(answers):
        raise InputError(
            f"the chat template {template.location} marks {counted(len(spans), 'part')} in a chat of "
            f"{counted(len(answers), 'answer')}, so "
            "it is not known which one has the weight 0: leave the weights out, or mark each answer once."
        )
    return [span for answer, span in zip(answers, spans, strict=True) if chat.counts(answer)]


def _by_answer(template: Template, chat: Chat, whole: str, room: int | None) -> AnswerSamples:
    """The samples of a chat, rendered from its beginning up to each answer.

    It ends at an answer that begins beyond `room`, after text that is the `whole` chat's too: a template that changes
    earlier turns has changed those already, so all later answers begin after that text.
    """
    samples, text, spans = [], "", []
    for number, answer in enumerate(chat.answers):
        start, after = _answer(template, chat, 0, answer, whole)
        if spans and not after.startswith(text):
            samples.append((text, spans))
            spans = []
        text = after
        if room is not None and start >= room and after.startswith(whole[:room]):
            beyond = sum(map(chat.counts, chat.answers[number:]))
            break
        if chat.counts(answer):
            spans.append((start, len(after)))
    else:
        beyond = 0
    return AnswerSamples([*samples, (text, spans)] if spans else samples, beyond)


def _answer(template: Template, chat: Chat, first: int, answer: int, whole: str | None = None) -> tuple[int, str]:
    """(where an answer begins in the text, the text of the head and the messages from `first` up to the answer).

    `whole` is the text of the chat, if it is known.
    """
    messages = _window(chat, first, answer + 1)
    before = template.render(messages[:-1], True, **chat.arguments)
    after = whole if len(messages) == len(chat.messages) else None
    if after is None:
        after = template.render(messages, **chat.arguments)
    if after.startswith(before):
        return len(before), after
    bare = template.render(messages[:-1], **chat.arguments)  # a generation prompt that the answer does not begin with
    if not (before.startswith(bare) and after.startswith(bare)):
        raise InputError(
            f"the chat template {template.location} changes earlier turns when the answer in message {answer} follows "
            "them, so the assistant's part is not known: mark it in the template with {% generation %} and "
            "{% endgeneration %}, or set data.chat_template to another one."
        )
    return len(bare) + len(commonprefix([before[len(bare) :], after[len(bare) :]])), after


def _window(chat: Chat, first: int, stop: int) -> Sequence:
    """The messages from `first` to `stop`, after the chat's instructions."""
    head = next((i for i, each in enumerate(chat.messages) if each["role"] not in ("system", "developer")), 0)
    return chat.messages[:stop] if first <= head else [*chat.messages[:head], *chat.messages[first:stop]]


def _in_windows(template: Template, chat: Chat) -> list[Sample] | None:
    """The one sample of a long chat, with each answer rendered after the last few turns only; None if that is wrong.

    It is right if the pieces that the turns add make the text of the whole chat.
    """
    answers, spans, length = chat.answers, [], 0
    firsts = [0] + [answer + 1 for answer in answers]  # the first message of each answer's turn
    whole = template.render(chat.messages[: answers[-1] + 1], **chat.arguments)
    for k, answer in enumerate(answers):
        starts = reversed(firsts[1 : max(1, k - WINDOW)])
        first = next((start for start in starts if chat.messages[start]["role"] == "user"), 0)
        try:
            earlier = template.render(_window(chat, first, firsts[k]), **chat.arguments) if k else ""
            start, text = _answer(template, chat, first, answer)
        except InputError:
            return None
        shift = length - len(earlier)
        if not (text.startswith(earlier) and start >= len(earlier) and whole.startswith(text[len(earlier) :], length)):
            return None
        length = len(text) + shift
        if chat.counts(answer):
            spans.append((start + shift, length))
    return [(whole, spans)] if length == len(whole) else None
