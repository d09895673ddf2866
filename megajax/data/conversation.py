"""Chats as users write them: a line of JSON to messages and what the template gets beside them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megajax.config.data_schema import TEMPLATE_INPUTS
from megajax.data.chat_template import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "function")


class Chat(NamedTuple):
    """Messages, and the template's arguments that belong to this chat: tools, documents and others by name."""

    messages: Sequence[Message]
    arguments: dict[str, Any]

    @property
    def answers(self) -> list[int]:
        """The positions of the assistant's messages."""
        return [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]

    def counts(self, answer: int) -> bool:
        """Whether the loss counts an answer: its weight is not 0."""
        return self.messages[answer].get("weight") != 0


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
            f'has "chat_template_kwargs" that are not arguments of a template ({more!r}): write them like '
            '{"enable_thinking": false}'
        )
    return Chat(messages, arguments | more)


def _check_message(i: int, message: Any) -> None:
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ROLES:
        raise ValueError(f"has the role {role!r} in message {i}: use {', '.join(ROLES)}")
    if message.get("content") is None and not message.get("tool_calls"):
        raise ValueError(f"has a message without content (message {i}, {role}): give it some")
    weight = message.get("weight")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1) or role != "assistant"):
        raise ValueError(
            f"has the weight {weight!r} in message {i} ({role}): give only the assistant's messages one, 0 (the loss "
            "does not count it) or 1"
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
    raise ValueError(f'has "{key}" that are not a list of JSON objects ({str(given)[:40]!r}): write them as one')
