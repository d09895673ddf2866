"""Runs chat templates in this process; `chat_template` has this done by a child process with limits.

A template is a Jinja program from a model's folder. It gets what transformers' `apply_chat_template` gives it. It runs
in jinja's sandbox and cannot reach Python or files.
"""

import json
import pickle
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from megajax.data.sandbox import restart_clock
from megajax.errors import InputError, shown

Message = Mapping[str, Any]
Span = tuple[int, int]  # of characters

# Around what a template marks as generated: with random digits, because a message may contain any character.
START, END = (f"{letter}{secrets.randbits(64)}{letter}" for letter in "\ufdd0\ufdd1")
SHORT, GROWTH = 2**16, 100  # a text may have this many characters, or this many times those of template and messages
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's keys for it; templates read one of the first 2
PROBES = [f"probe{secrets.randbits(64)}" for _ in range(2)]  # texts that show what a template makes of content
CALL = {"type": "function", "id": "123456789", "function": {"name": "f", "arguments": {}}}
ASKED, CALLED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}
AROUND = {  # role of a message: those before and after it in a chat that templates accept
    "system": ([], [ASKED]),
    "developer": ([], [ASKED]),
    "user": ([], []),
    "assistant": ([ASKED], []),
    "tool": ([ASKED, CALLED], []),
}
END_OF_MARK = re.compile(r"{%[-+]?\s*endgeneration\s*[-+]?%}")
DIFFERENT = 1024  # of these many answers to "does the template read this form?" a template keeps the last
TOOL_USE = "tool_use"  # the name of a folder's template for chats with tools, beside "default"


class Chat(NamedTuple):
    """Messages, the template's arguments that belong to this chat (tools, documents and others by name), pictures."""

    messages: Sequence[Message]
    arguments: dict[str, Any]
    pictures: tuple[str, ...] = ()  # paths or URLs, in the order of the messages' parts of type "image"

    @property
    def answers(self) -> list[int]:
        """The positions of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def counts(self, answer: int) -> bool:
        """Whether the loss counts an answer: its weight is not 0."""
        return self.messages[answer].get("weight") != 0


@dataclass(frozen=True)
class Template:
    """A model's chat template, or several by name, with the arguments of every chat.

    Raises InputError, naming `location`, for a template that is damaged, and for messages that it does not accept.
    """

    sources: Mapping[str, str]
    arguments: Mapping[str, Any]
    location: str
    image: str = ""  # a picture, as the template writes it

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **more: Any) -> str:
        """The text of a chat; with `add_generation_prompt` up to where the assistant's answer begins.

        `more` are the chat's tools, documents and arguments.
        """
        return self._marked(messages, add_generation_prompt, more).replace(START, "").replace(END, "")

    def with_marks(self, messages: Sequence[Message], **more: Any) -> tuple[str, list[Span]]:
        """(the text of a whole chat, the spans that the template marks by {% generation %})."""
        parts = self._marked(messages, False, more).replace(END, START).split(START)
        ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
        return "".join(parts), list(zip(ends[:-1:2], ends[1::2], strict=False))

    def has_marks(self, **more: Any) -> bool:
        """Whether the template for these arguments marks answers by {% generation %}, though perhaps not each."""
        return END_OF_MARK.search(self._source(more)) is not None

    def _source(self, more: dict[str, Any]) -> str:
        return self.sources[TOOL_USE if more.get("tools") is not None and TOOL_USE in self.sources else "default"]

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool, more: dict[str, Any]) -> str:
        source = self._source(more)
        restart_clock()
        compiled = _compiled(source, self.location)
        read = [self._with_content(compiled, _as_templates_read(message), more) for message in messages]
        try:
            text = self._run(compiled, read, more | {"add_generation_prompt": add_generation_prompt})
            text.encode()  # half of a surrogate pair is no text
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which can fail in any way
            raise InputError(
                f"the chat template {self.location} does not accept the messages ({shown(error)}): correct them or it."
            ) from None
        if len(text) > SHORT and len(text) > GROWTH * (len(source) + len(pickle.dumps((messages, more)))):
            raise InputError(
                f"the chat template {self.location} makes a text of {len(text):,} characters, more than {GROWTH} times "
                "those of itself and the messages: correct it."
            )
        return text

    def _run(self, compiled: Any, messages: Sequence[Message], more: dict[str, Any]) -> str:
        return compiled.render({"tools": None, "documents": None, **self.arguments, **more, "messages": messages})

    def _with_content(self, compiled: Any, message: Message, more: dict[str, Any]) -> Message:
        """A message whose content is text, unless the template reads the parts or the object that it is."""
        content = message.get("content")
        if content is None or isinstance(content, str):
            return message
        pictured = isinstance(content, list) and any(part["type"] == "image" for part in content)
        if self._reads(compiled, message["role"], "image" if pictured else type(content), more):
            return message
        if isinstance(content, list):
            return {**message, "content": "\n".join(part.get("text", self.image) for part in content)}
        raise InputError(
            f"the chat template {self.location} does not write an object as the content of a message of role "
            f"{message['role']} ({shown(repr(content))}): write it as text."
        )

    def _reads(self, compiled: Any, role: str, form: type | str, more: dict[str, Any]) -> bool:
        """Whether the template writes the texts in a list of parts, or an object as JSON, in a message of a role.

        With the form "image" whether it writes both texts and `image` in their place.

        One that knows only text fails, drops the value, or prints it as Python does. A small chat shows which, with
        the arguments of the chat: some templates write messages otherwise beside tools or documents.
        """
        key = compiled, role, form, pickle.dumps(more)
        if (found := self._read_forms.get(key)) is None:
            texts = [{"type": "text", "text": each} for each in PROBES]
            content = (
                texts if form is list else [{"type": "image"}, *texts] if form == "image" else dict.fromkeys(PROBES, 1)
            )
            before, after = AROUND.get(role, AROUND["tool"])
            probed = {"role": role, "content": content, "name": "f", "tool_call_id": CALL["id"]}
            try:
                text = self._run(compiled, [*before, probed, *after], more | {"add_generation_prompt": False})
            except Exception:  # a template is a program, which can fail in any way
                text = ""
            quotes = ("'",) if form is dict else ("'", '"')
            printed = any(f"{quote}{PROBES[0]}{quote}" in text for quote in quotes)
            wanted = [*PROBES, self.image] if form == "image" else PROBES
            found = not printed and all(each in text for each in wanted)
            if len(self._read_forms) >= DIFFERENT:
                self._read_forms.clear()
            self._read_forms[key] = found
        return found

    @cached_property
    def _read_forms(self) -> dict[tuple[Any, str, type | str, bytes], bool]:
        return {}


def compiles(template: Template) -> Iterator[bool]:
    """True, or InputError, as the work of a child process."""
    yield bool(_compiled(template.sources["default"], template.location))


def render(template: Template, messages: Sequence[Message], prompt: bool, more: dict[str, Any]) -> Iterator[str]:
    """The text of a chat, as the work of a child process."""
    yield template.render(messages, prompt, **more)


@lru_cache(16)
def _compiled(source: str, location: str) -> Any:
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def fail(message: str) -> None:
        raise TemplateError(message)

    extensions = [loopcontrols, _generation_tag()]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except MemoryError:
        raise
    except Exception as error:  # also of what jinja computes while it compiles
        raise InputError(f"the chat template {location} is damaged ({shown(error)}): correct it.") from None


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys=False
) -> str:
    """A value as JSON; unlike Jinja's own filter it does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _as_templates_read(message: Message) -> Message:
    """A message without nulls, as templates ask whether a key is there, and with its reasoning under both names."""
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning} | given | {"reasoning_content": reasoning}


def _generation_tag() -> Any:
    """The extension for {% generation %} … {% endgeneration %}, transformers' mark of the assistant's text."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller) -> str:
            return START + caller() + END

    return Generation
