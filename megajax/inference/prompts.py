"""Files of prompts: texts and chats."""

import json
from pathlib import Path

from megajax.data.chat_template import Message
from megajax.errors import InputError
from megajax.files import read_text, why_unreadable


def read_prompts(path: str) -> list[str | list[Message]]:
    """The prompts of a file: one a line, or in a .jsonl file {"prompt": TEXT} or {"messages": [...]} a line.

    Raises InputError for a file that cannot be read, and for a line that is neither.
    """
    try:
        lines = read_text(Path(path)).split("\n")  # other line ends, such as U+2028, are text
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--prompts={path} cannot be read ({why_unreadable(error)}): give a text file.") from None
    if not path.endswith(".jsonl"):
        prompts: list[str | list[Message]] = [line for line in lines if line]
    else:
        prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InputError(f"--prompts={path} has no prompts: write one a line.")
    return prompts


def as_chat(prompt: str | list[Message], system: str | None) -> list[Message]:
    """A prompt as a chat: a text is the user's message; `system` begins a chat without a message of the system."""
    messages: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if system is None or messages[0]["role"] in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def _prompt(line: str, location: str) -> str | list[Message]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{location} is not JSON ({error}): write one JSON object a line.") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str):
        return value["prompt"]
    messages = value.get("messages") if isinstance(value, dict) else value
    if isinstance(messages, list) and messages and all(isinstance(m, dict) and "role" in m for m in messages):
        return messages
    raise InputError(f'{location} has neither a "prompt" nor "messages" with roles: write one of them.')
