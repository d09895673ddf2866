"""Chat templates: messages to text, with the parts that a template marks as the assistant's.

A template is a Jinja program from a model's folder. It gets what transformers' `apply_chat_template` gives it. It runs
in a sandbox and cannot reach Python or files. It can take time: loops in loops are not counted.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megajax.data.model_files import inside, read_json, token_texts
from megajax.errors import InputError, shown
from megajax.files import read_text, why_unreadable

Message = Mapping[str, Any]
Span = tuple[int, int]  # of characters

# Around what a template marks as generated: with random digits, because a message may contain any character.
START, END = (f"{letter}{secrets.randbits(64)}{letter}" for letter in "\ufdd0\ufdd1")
LARGEST = 10**6  # length of a text or a list that a template makes by `*`, and the largest number
REASONING = ("reasoning_content", "thinking", "reasoning")  # a message's keys for it; templates read one of the first 2
TOOL_USE = "tool_use"  # the name of a folder's template for chats with tools, beside "default"


class ChatTemplate:
    """A model's chat template, or several by name, with its special tokens and further arguments.

    Raises InputError, naming `location`, for a template that is damaged, and for messages that it does not accept.
    """

    def __init__(
        self,
        sources: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        location: str,
        arguments: Mapping[str, Any] | None = None,
    ):
        """`arguments`, such as enable_thinking, are for every chat; they replace special tokens of the same name."""
        self.sources = {"default": sources} if isinstance(sources, str) else dict(sources)
        self.location, self.arguments = location, dict(special_tokens) | dict(arguments or {})
        self._templates = {name: self._compiled(source) for name, source in self.sources.items()}

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

    def _marked(self, messages: Sequence[Message], add_generation_prompt: bool, more: dict[str, Any]) -> str:
        tools = more.get("tools")
        given = {"tools": None, "documents": None} | self.arguments | more
        given |= {"messages": list(map(_as_templates_read, messages)), "add_generation_prompt": add_generation_prompt}
        name = TOOL_USE if tools is not None and TOOL_USE in self.sources else "default"
        try:
            return self._templates[name].render(**given)
        except Exception as error:  # a template is a program, which can fail in any way
            raise InputError(
                f"the chat template {self.location} does not accept the messages ({shown(error)}): correct them."
            ) from None

    def _compiled(self, source: str) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols

        def fail(message: str) -> None:
            raise TemplateError(message)

        environment = _sandbox()(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = fail
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            return environment.from_string(source)
        except (TemplateError, ArithmeticError, RecursionError, SyntaxError, ValueError) as error:
            raise InputError(f"the chat template {self.location} is damaged ({shown(error)}): correct it.") from None


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


def load_chat_template(
    folder: Path | None, file: Path | None = None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate:
    """`find_chat_template`; raises InputError if there is none."""
    template = find_chat_template(folder, file, arguments)
    if template is None:
        raise InputError(f"{folder} has no chat template: add chat_template.jinja to the folder, or give plain text.")
    return template


def find_chat_template(
    folder: Path | None, file: Path | None = None, arguments: Mapping[str, Any] | None = None
) -> ChatTemplate | None:
    """The template `file`, else those of a model's folder: chat_template.jinja, or in tokenizer_config.json.

    The special tokens are those of the folder. None: there is no template.
    """
    own = file or (folder / "chat_template.jinja" if folder else None)
    config_path = folder / "tokenizer_config.json" if folder else None
    sources: Any = {} if config_path is None else read_json(config_path).get("chat_template")
    if isinstance(sources, list):  # several named ones
        sources = {entry.get("name"): entry.get("template") for entry in sources if isinstance(entry, dict)}
    elif not isinstance(sources, dict):
        sources = {"default": sources}
    files = {"default": own} if own is not None and (file or own.is_file()) else {}
    if folder is not None and file is None:
        files |= {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if files:
        sources = {name: _source(path if path == file else inside(path)) for name, path in files.items()}
    sources = {name: source for name, source in sources.items() if isinstance(source, str)}
    if "default" not in sources:
        return None
    return ChatTemplate(sources, _special_tokens(folder), str(files.get("default", config_path)), arguments)


def _source(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"the chat template {path} cannot be read ({why_unreadable(error)}): give a file of text."
        ) from None


def _special_tokens(folder: Path | None) -> dict[str, str]:
    """The special tokens that a template may name: bos_token and the like, and those of extra_special_tokens."""
    if folder is None:
        return {}
    config = read_json(folder / "tokenizer_config.json")
    older = {} if "added_tokens_decoder" in config else read_json(folder / "special_tokens_map.json")
    stored = config | older
    extra = [stored.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    named = {key: value for key, value in stored.items() if key.endswith("_token")}
    for each in extra:
        named |= each if isinstance(each, dict) else {}  # a list has no names
    return token_texts(named, named)
