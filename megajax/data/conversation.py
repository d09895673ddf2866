"""Chats as users write them: a line of JSON to messages and the template's inputs, or to prompt and completion.

Pictures are named in the messages, as Hugging Face does it, or by `images` with <image> in the texts, as LLaVA does.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from megajax.data.rendering import Chat
from megajax.errors import counted, shown
from megajax.schema.data import TEMPLATE_INPUTS

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")
TOOL_ROLES = ("tool", "ipython", "function")
ASKING = tuple(role for role in ROLES if role != "assistant" and role not in TOOL_ROLES)
SPEAKERS = {  # ShareGPT's names of roles
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
# Alpaca's prompts, with and without an input.
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)


FORMS = ({"messages"}, {"conversations"}, {"prompt", "completion"}, {"instruction", "output"})  # keys of a line
FORMS_OF_PAIRS = {str: "text", list: "lists of messages"}


PICTURE_TYPES = ("image", "image_url")  # of a part of a message's content
PART_KEYS = ("image", "path", "url", "image_url")  # that name its picture
IMAGE = "<image>"  # in a text: a picture's position
IMAGE_PART = {"type": "image"}  # in a message's content: the same


class Completion(NamedTuple):
    """A prompt and its completion as text, without a template; IMAGE in them stands for each of the pictures."""

    prompt: str
    completion: str
    pictures: tuple[str, ...] = ()


def is_chat(record: Any) -> bool:
    """Whether a line has the keys of one of the forms that `read_record` reads."""
    return isinstance(record, dict) and any(form <= record.keys() for form in FORMS)


def is_pair(record: Any) -> bool:
    """Whether a line has the keys that `read_pair` reads."""
    return isinstance(record, dict) and record.keys() >= {"chosen", "rejected"}


def read_record(record: Any) -> Chat | Completion:
    """The training data of a line in one of the forms of docs/data.md; ValueError with the rest of a sentence."""
    record = record if isinstance(record, dict) else {}
    keys = record.keys()
    if {"prompt", "completion"} <= keys:
        prompt, completion = record["prompt"], record["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return Completion(prompt, completion, _pictures_in(record, prompt + completion))
        if isinstance(prompt, list) and isinstance(completion, list):
            return _completed(record)
        raise ValueError(
            'has a "prompt" or a "completion" that is not text: write both as text, or both as lists of messages'
        )
    if (chat := _written_chat(record)) is not None:
        return chat
    if {"instruction", "output"} <= keys:
        return _instructed(record)
    found = shown(", ".join(record)) or "none"
    cure = "write one of them"
    if is_pair(record):
        cure = "set data.packing=pairs for an objective of pairs such as DPO's (docs/data.md)"
    elif "text" in keys:
        cure = "set data.kind=text for texts, or write one of them"
    raise ValueError(
        'has neither "messages" nor "prompt" and "completion", "conversations", or "instruction" and "output" '
        f"(its keys: {found}): {cure}"
    )


def read_pair(record: Any) -> list[Chat | Completion]:
    """The chosen and the rejected answer of a line, each with its prompt, which the loss does not count.

    Both are text, or both lists of messages. Without a `prompt` of the same form it is what both begin with; lists may
    have text as theirs. Raises ValueError with the rest of a sentence for anything else.
    """
    record = record if isinstance(record, dict) else {}
    answers: list[Any] = [record.get("chosen"), record.get("rejected")]
    prompt: Any = record.get("prompt")
    form = next((form for form in (str, list) if all(isinstance(each, form) for each in answers)), None)
    if form is None:
        raise ValueError(
            f'has no "chosen" and "rejected" that are both text or both lists of messages (its keys: '
            f"{shown(', '.join(record)) or 'none'}): write them, or set data.packing to another value for single chats"
        )
    if not (prompt is None or isinstance(prompt, (str, form))):
        problem = f'has "chosen" and "rejected" that are {FORMS_OF_PAIRS[form]}, but "prompt" is {shown(repr(prompt))}'
        raise ValueError(f"{problem}: write all three in one form")
    is_given = isinstance(prompt, form) and prompt != []
    if isinstance(prompt, list) and all(answer[: len(prompt)] == prompt for answer in answers):
        answers = [answer[len(prompt) :] for answer in answers]
    if wrong := [name for name, answer in zip(("chosen", "rejected"), answers, strict=True) if not answer]:
        raise ValueError(f'has nothing in "{wrong[0]}" after the prompt: write an answer, or leave the line out')
    if not is_given:
        prompt = _common(*answers)
        answers = [answer[len(prompt) :] for answer in answers]
    return [read_record({**record, "prompt": prompt, "completion": answer}) for answer in answers]


def _common(chosen: Any, rejected: Any) -> Any:
    """The prompt that both begin with: messages before the last one of either, or text up to the last space in it.

    Raises ValueError, with the rest of a sentence, if they begin with different ones.
    """
    shorter = min(len(chosen), len(rejected))
    number = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), shorter)
    is_text = isinstance(chosen, str)
    stop = max(0, chosen.rfind(" ", 0, number)) if is_text else min(number, shorter - 1)
    asks = [isinstance(each[stop], dict) and each[stop].get("role") in ASKING for each in (chosen, rejected)]
    if not (number if is_text else stop) or any(asks):
        cure = f'write it under "prompt", as {"text" if is_text else "a list of messages"}, or leave the line out'
        raise ValueError(f'has "chosen" and "rejected" that do not begin with the same prompt: {cure}')
    return chosen[:stop]


def read_prompt(record: Any) -> str | Chat | Completion:
    """What a model is to answer: a line of `read_record`'s forms up to the last answer, which it need not have.

    A text with pictures is a Completion without its second part. Raises ValueError with the rest of a sentence for
    anything else.
    """
    record = record if isinstance(record, dict) else {}
    prompt = record.get("prompt")
    chat = None if {"prompt", "completion"} <= record.keys() else _written_chat(record)
    if chat is None and isinstance(prompt, list):
        chat = read_chat({**record, "messages": prompt})
    if chat is not None:
        return _unanswered(chat)
    if isinstance(prompt, str):
        pictures = _pictures_in(record, prompt)
        return Completion(prompt, "", pictures) if pictures else prompt
    if "instruction" in record:
        return _instructed(record).prompt
    raise ValueError('has neither "prompt" nor "messages", "conversations" or "instruction": write one of them')


def _written_chat(record: Mapping[str, Any]) -> Chat | None:
    """The chat of messages, or of ShareGPT's turns; None if the record has neither."""
    if record.get("messages"):
        return read_chat(record)
    if record.get("conversations"):
        return read_chat({**record, "messages": _spoken(record)})
    return None


def _unanswered(chat: Chat) -> Chat:
    """A chat without the answers at its end."""
    stop = len(chat.messages)
    while stop and chat.messages[stop - 1]["role"] == "assistant":
        stop -= 1
    if not stop:
        raise ValueError("has messages of the assistant only: write the message that the model is to answer")
    return chat._replace(messages=chat.messages[:stop])


def _completed(record: Mapping[str, Any]) -> Chat:
    """The chat of a prompt and a completion that are lists of messages: the prompt's answers do not count."""
    chat = read_chat({**record, "messages": record["prompt"] + record["completion"]})
    asked = len(record["prompt"])
    prompt = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in chat.messages[:asked]]
    return chat._replace(messages=[*prompt, *chat.messages[asked:]])


def _spoken(record: Mapping[str, Any]) -> list[Any]:
    """ShareGPT's turns as messages, after its system prompt, without greetings before the first question."""
    turns = record["conversations"]
    if not (isinstance(turns, list) and all(isinstance(turn, dict) for turn in turns)):
        raise ValueError(
            'has "conversations" that are not a list of turns: write a list of {"from": ..., "value": ...}'
        )
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    for turn in turns:
        speaker = turn.get("from", turn.get("role"))
        message = {"role": SPEAKERS.get(str(speaker), speaker), "content": turn.get("value", turn.get("content"))}
        if message["role"] == "assistant" and all(each["role"] == "system" for each in messages):
            continue  # many templates refuse a chat that the assistant begins
        messages.append(message | ({"weight": turn["weight"]} if "weight" in turn else {}))
    return messages


def _instructed(record: Mapping[str, Any]) -> Completion:
    """Alpaca's instruction, input and output in its prompt."""
    parts = {key: record.get(key) or "" for key in ("instruction", "input", "output")}
    if wrong := [key for key, value in parts.items() if not isinstance(value, str)]:
        raise ValueError(f'has "{wrong[0]}" that is not text ({parts[wrong[0]]!r:.40}): write it as text')
    return Completion((WITH_INPUT if parts["input"] else WITHOUT_INPUT).format(**parts), parts["output"])


def read_chat(record: Mapping[str, Any]) -> Chat:
    """The chat of {"messages": [{"role", "content"}, ...]}, with its tools, documents and chat_template_kwargs.

    Raises ValueError with the rest of a sentence for anything else.
    """
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError('has no "messages": write a list of {"role": ..., "content": ...}')
    for i, message in enumerate(messages):
        _check_message(i, message)
    arguments = {key: found for key in ("tools", "documents") if (found := _objects(record, key)) is not None}
    more = record.get("chat_template_kwargs") or {}
    if not isinstance(more, dict) or more.keys() & TEMPLATE_INPUTS:
        raise ValueError(
            f'has "chat_template_kwargs" that are not arguments of a template ({shown(repr(more))}): write them like '
            '{"enable_thinking": false}'
        )
    messages, pictures = _with_pictures(messages, _named_pictures(record))
    return Chat(messages, arguments | more, pictures)


def _named_pictures(record: Mapping[str, Any]) -> list[str]:
    """The pictures that a line names beside its messages, under `images` or `image`."""
    found = record.get("images")
    found = record.get("image") if found is None else found
    named = [] if found is None else found if isinstance(found, list) else [found]
    names = [each for each in map(_picture_name, named) if isinstance(each, str) and each]
    if len(names) == len(named):
        return names
    raise ValueError(f'has "images" that are not paths or URLs ({shown(repr(found))}): write a list of them')


def _picture_name(given: Any) -> Any:
    """A path or URL as messages and Hugging Face's datasets give it; {"bytes": ..., "path": ...} is the bytes."""
    if not isinstance(given, dict):
        return given
    return next((given[key] for key in ("bytes", "url", "path") if given.get(key)), None)


def _pictures_in(record: Mapping[str, Any], text: str) -> tuple[str, ...]:
    """The pictures of a text in which IMAGE stands for each."""
    names = _named_pictures(record)
    if names and text.count(IMAGE) != len(names):
        raise ValueError(
            f"has {counted(len(names), 'picture')} and {text.count(IMAGE)} times {IMAGE}: write it where each picture "
            "belongs"
        )
    return tuple(names)


def _with_pictures(messages: list[Any], named: list[str]) -> tuple[list[Any], tuple[str, ...]]:
    """(messages with IMAGE_PART for each picture, the pictures in order)."""
    contents = [message.get("content") for message in messages]
    if named and not any(_is_picture(part) for each in contents if isinstance(each, list) for part in each):
        contents = [_divided(each) for each in contents]
    rest, pictures = iter(named), list[str]()
    for i, content in enumerate(contents):
        for j, part in enumerate(content) if isinstance(content, list) else ():
            if not _is_picture(part):
                continue
            name = next((part[key] for key in PART_KEYS if part.get(key) is not None), None)
            name = next(rest, None) if name is None else _picture_name(name)
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"has no path or URL for the picture in part {j} of message {i}: write "
                    '{"type": "image", "path": "..."}'
                )
            pictures.append(name)
    if left := len(list(rest)):
        raise ValueError(
            f'has {len(named)} "images", but positions in the messages for {len(named) - left} of them: write {IMAGE} '
            "where each picture belongs"
        )
    if not pictures:
        return messages, ()
    found = []
    for message, content in zip(messages, contents, strict=True):
        if isinstance(content, list):
            content = [IMAGE_PART if _is_picture(part) else part for part in content]
        found.append({**message, "content": content})
    return found, tuple(pictures)


def _is_picture(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") in PICTURE_TYPES


def _divided(content: Any) -> Any:
    """A message's content with parts for IMAGE in its texts; the line's end beside one is the template's to write."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if IMAGE in content else content
    if not isinstance(content, list):
        return content
    found = list[Any]()
    for part in content:
        texts = part["text"].split(IMAGE)
        for i, text in enumerate(texts):
            text = text.removeprefix("\n") if i else text
            text = text.removesuffix("\n") if i + 1 < len(texts) else text
            found += [IMAGE_PART] * (i > 0) + [{"type": "text", "text": text}] * bool(text)
    return found


def _check_message(i: int, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ValueError(f"has the role {shown(repr(role))} in message {i}: use {', '.join(ROLES)}")
    if message.get("content") is None and not message.get("tool_calls"):
        raise ValueError(f"has a message without content (message {i}, {role}): give it some")
    _check_content(f"in message {i} ({role})", role, message.get("content"))
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1) or role != "assistant"):
        raise ValueError(
            f"has the weight {shown(repr(weight))} in message {i} ({role}): give only the assistant's messages one, 0 "
            "(the loss does not count it) or 1"
        )


def _check_content(place: str, role: str, content: Any) -> None:
    """Content is text or a list of texts and pictures; a tool's may be an object, which templates write as JSON."""
    if content is None or isinstance(content, str) or (isinstance(content, dict) and role in TOOL_ROLES):
        return
    if not isinstance(content, list):
        raise ValueError(f"has content that is not text ({shown(repr(content))}) {place}: write it as text")
    for part in content:
        if _is_picture(part):
            continue
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = part.get("type") if isinstance(part, dict) else None
            what = f"of type {shown(repr(kind))}" if kind not in (None, "text") else f"{shown(repr(part))}"
            raise ValueError(
                f'has a part of content {what} {place}: write {{"type": "text", "text": "..."}} or {{"type": "image", '
                '"path": "..."}, or leave the line out'
            )


def _objects(record: Mapping[str, Any], key: str) -> list[Any] | None:
    """A list of objects under `key`, which may be JSON text, as in Parquet files; None if there is none."""
    found = given = record.get(key)
    if isinstance(given, str):
        try:
            found = json.loads(given) if given.strip() else None
        except (ValueError, RecursionError):
            found = given
    if found is None or (isinstance(found, list) and all(isinstance(each, dict) for each in found)):
        return found
    raise ValueError(f'has "{key}" that are not a list of JSON objects ({shown(repr(given))}): write them as one')
