"""Prompts: texts, files of them, and chats with a model's chat template."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megajax.errors import InputError

Message = Mapping[str, Any]


def read_prompts(path: str) -> list[str | list[Message]]:
    """The prompts of a file: one a line, or in a .jsonl file {"prompt": TEXT} or {"messages": [...]} a line.

    Raises InputError for a file that cannot be read, and for a line that is neither.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts={path} cannot be read ({error}): give a text file in UTF-8.") from None
    if not path.endswith(".jsonl"):
        prompts: list[str | list[Message]] = [line for line in lines if line]
    else:
        prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"--prompts={path} has no prompts: write one a line.")
    return prompts


def _prompt(line: str, location: str) -> str | list[Message]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InputError(f"{location} is not JSON ({error}): write one JSON object a line.") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return value["prompt"]
    messages = value.get("messages") if isinstance(value, dict) else value
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    raise InputError(f'{location} has neither a "prompt" nor "messages" with roles: write one of them.')


def render_chat(messages: Sequence[Message], folder: Path | None, add_generation_prompt: bool = True) -> str:
    """The text of a chat by the model's own template, up to where the assistant's answer begins.

    The template is `chat_template.jinja`, or the entry `chat_template` of tokenizer_config.json, in the model's folder;
    it runs in a sandbox. Raises InputError if there is none, or if it refuses the messages.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise InputError("a chat template needs jinja2: pip install jinja2.") from None
    template, special = _template(folder)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        arguments = {"messages": messages, "add_generation_prompt": add_generation_prompt} | special
        return environment.from_string(template).render(**arguments)
    except (TemplateError, TypeError) as error:
        raise InputError(
            f"the chat template of {folder} does not accept the messages ({error}): correct them."
        ) from None


def _template(folder: Path | None) -> tuple[str, dict[str, str]]:
    """(the chat template of a folder, its special tokens by name)."""
    path = folder / "tokenizer_config.json" if folder else None
    config: dict[str, Any] = {}
    if path is not None and path.is_file():
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}): copy it again.") from None
    own = folder / "chat_template.jinja" if folder else None
    template = own.read_text() if own is not None and own.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise InputError(
            f"{folder} has no chat template: give prompts as text, or add chat_template.jinja to the folder."
        )
    tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    names = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token}
    return template, names
