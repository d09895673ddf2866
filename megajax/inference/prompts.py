"""Files of prompts: texts and chats."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megajax.config.data_schema import template_arguments
from megajax.data.conversation import Chat, read_chat
from megajax.errors import InputError, shown
from megajax.files import read_text, why_unreadable
from megajax.json_files import parse


def read_prompts(path: str) -> list[str | Chat]:
    """The prompts of a file: one a line, or in a .jsonl file {"prompt": TEXT} or {"messages": [...]} a line.

    A chat may have its tools, documents and chat_template_kwargs, as in training data.

    Raises InputError for a file that cannot be read, and for a line that is neither.
    """
    try:
        lines = read_text(Path(path)).split("\n")  # other line ends, such as U+2028, are text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts={path} cannot be read ({why_unreadable(error)}): give a text file.") from None
    if not path.endswith(".jsonl"):
        prompts: list[str | Chat] = [line for line in lines if line]
    else:
        prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"--prompts={path} has no prompts: write one a line.")
    return prompts


def as_chat(prompt: str | Chat, system: str | None) -> Chat:
    """A prompt as a chat: a text is the user's message; `system` begins a chat without a message of the system."""
    chat = Chat([{"role": "user", "content": prompt}], {}) if isinstance(prompt, str) else prompt
    if system is None or chat.messages[0]["role"] in ("system", "developer"):
        return chat
    return Chat([{"role": "system", "content": system}, *chat.messages], chat.arguments)


def chosen_arguments(options: Namespace) -> dict[str, Any]:
    """The chat template's arguments that a command got (`console.add_sampling_arguments`), besides the training's."""
    try:
        return template_arguments(options.chat_template_args)
    except ValueError as error:
        raise InputError(f"--chat-template-args={shown(options.chat_template_args)} {error}.") from None


def _prompt(line: str, location: str) -> str | Chat:
    value = parse(line, location, object, "write one JSON object a line")
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return value["prompt"]
    record = {"messages": value} if isinstance(value, list) else value
    if not isinstance(record, dict) or "messages" not in record:
        raise InputError(f'{location} has neither a "prompt" nor "messages" with roles: write one of them.')
    try:
        return read_chat(record)
    except ValueError as error:
        raise InputError(f"{location} {error}.") from None
