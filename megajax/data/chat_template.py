"""Chat templates: messages to text, and the parts of the text that the assistant wrote.

A template is a Jinja program from a model's folder. It runs in a sandbox and cannot reach Python or files. It can take
time: loops in loops are not counted.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megajax.data.model_files import inside, read_json, token_texts
from megajax.errors import InputError
from megajax.files import read_text, why_unreadable

Message = Mapping[str, Any]
Span = tuple[int, int]  # of characters

# Around what a template marks as generated: with random digits, because a message may contain any character.
START, END = (f"{letter}{secrets.randbits(64)}{letter}" for letter in "\ufdd0\ufdd1")
LARGEST = 10**6  # length of a text or a list that a template makes by `*`, and the largest number


class ChatTemplate:
    """A model's chat template with its special tokens.

    Raises InputError, naming `location`, for a template that is damaged, and for messages that it does not accept.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], location: str):
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols

        def fail(message: str) -> None:
            raise TemplateError(message)

        environment = _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = fail
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self.source, self.location, self.special_tokens = source, location, dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, ArithmeticError, RecursionError, SyntaxError, ValueError) as error:
            raise InputError(f"the chat template {location} is damaged ({error}): correct it.") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False, **more: Any) -> str:
        """The text of a chat; with `add_generation_prompt` up to where the assistant's answer begins."""
        return self._marked(messages, add_generation_prompt, **more).replace(START, "").replace(END, "")

    def with_answers(self, messages: Sequence[Message], **more: Any) -> tuple[str, list[Span]]:
        """(the text of a whole chat, the spans that the assistant wrote, with its ends of turns).

        The template marks them by {% generation %}; otherwise a span is what an assistant's message adds to the text of
        those before it and the generation prompt. Raises InputError if the template changes what came before.
        """
        marked = self._marked(messages, False, **more)
        if START in marked:
            parts = marked.replace(END, START).split(START)
            ends = [sum(map(len, parts[: i + 1])) for i in range(len(parts))]
            return "".join(parts), list(zip(ends[:-1:2], ends[1::2], strict=False))
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self.render(messages[:i], True, **more)
                after = self.render(messages[: i + 1], **more)
                if not (after.startswith(before) and marked.startswith(after)):
                    raise InputError(
                        f"the chat template {self.location} changes earlier turns when an answer follows, so the "
                        "assistant's part is not known: mark it in the template with {% generation %} and "
                        "{% endgeneration %}."
                    )
                spans.append((len(before), len(after)))
        return marked, spans

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool, **more: Any) -> str:
        arguments = {"messages": messages, "add_generation_prompt": add_generation_prompt} | self.special_tokens | more
        try:
            return self._template.render(**arguments)
        except Exception as error:  # a template is a program, which can fail in any way
            raise InputError(
                f"the chat template {self.location} does not accept the messages ({error}): correct them."
            ) from None


def _sandbox() -> Any:
    """jinja's sandbox, with a limit on what `*` and `**` make."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("*", "**"))

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            a, b = (abs(value) if isinstance(value, (int, float)) else len(value) for value in (left, right))
            if max(a, b) > LARGEST or (a ** min(b, 100) if operator == "**" else a * b) > LARGEST:
                raise OverflowError(f"{operator} makes more than {LARGEST:,}")
            return super().call_binop(context, operator, left, right)

    return Sandbox


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


def load_chat_template(folder: Path | None, file: Path | None = None) -> ChatTemplate:
    """`find_chat_template`; raises InputError if there is none."""
    template = find_chat_template(folder, file)
    if template is None:
        raise InputError(f"{folder} has no chat template: add chat_template.jinja to the folder, or give plain text.")
    return template


def find_chat_template(folder: Path | None, file: Path | None = None) -> ChatTemplate | None:
    """The template `file`, else that of a model's folder: chat_template.jinja, or in tokenizer_config.json.

    The special tokens are those of tokenizer_config.json. None: there is no template.
    """
    config_path = folder / "tokenizer_config.json" if folder else None
    config = {} if config_path is None else read_json(config_path)
    own = file or (folder / "chat_template.jinja" if folder else None)
    try:
        source: Any = config.get("chat_template")
        if own is not None and (file or own.is_file()):
            source = read_text(file or inside(own))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the chat template {own} cannot be read ({why_unreadable(error)}): give a file of text."
        ) from None
    location = str(own if own is not None and own.is_file() else config_path)
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        return None
    names = token_texts(config, ("bos_token", "eos_token", "pad_token", "unk_token"))
    return ChatTemplate(source, names, location)
