"""Files of prompts: texts and chats."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megajax.data.conversation import Chat, read_prompt
from megajax.data.json_lines import SUFFIXES, check_inputs, located_lines, matching_files, parse
from megajax.errors import InputError, file_reader, shown
from megajax.files import read_text, why_unreadable
from megajax.schema.data import template_arguments


@file_reader("path")
def read_prompts(path: str) -> list[str | Chat]:
    """The prompts of a file: texts, one a line, or in files of JSON lines, arrays and Parquet `read_prompt`'s forms.

    Raises InputError for a file that cannot be read, and for a line that is no prompt.
    """
    prompts = _records(matching_files(path)) if path.endswith(SUFFIXES) else _lines(path)
    if not prompts:
        raise InputError(f"--prompts={path} has no prompts: write one a line.")
    return prompts


def _lines(path: str) -> list[str | Chat]:
    try:
        lines = read_text(Path(path)).split("\n")  # other line ends, such as U+2028, are text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts={path} cannot be read ({why_unreadable(error)}): give a text file.") from None
    return [line for line in lines if line]


def _records(paths: Sequence[str]) -> list[str | Chat]:
    check_inputs(paths)
    found = []
    for line, location in located_lines(paths):
        try:
            found.append(read_prompt(parse(line, "write one JSON object a line")))
        except ValueError as error:
            raise InputError(f"{location} {error}.") from None
    return found


def as_chat(prompt: str | Chat, system: str | None) -> Chat:
    """A prompt as a chat: a text is the user's message; `system` begins a chat without a message of the system."""
    chat = Chat([{"role": "user", "content": prompt}], {}) if isinstance(prompt, str) else prompt
    if system is None or chat.messages[0]["role"] in ("system", "developer"):
        return chat
    return Chat([{"role": "system", "content": system}, *chat.messages], chat.arguments)


def chosen_arguments(options: Namespace) -> dict[str, Any]:
    """The chat template's arguments that a command got (`console.add_template_arguments`), besides the training's."""
    try:
        return template_arguments(options.chat_template_args)
    except ValueError as error:
        raise InputError(f"--chat-template-args={shown(options.chat_template_args)} {error}.") from None
