"""Kinds of data: the values of `data.kind`, and those that modules of `run.extensions` read by functions of theirs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megajax.options.registry import Registry

# A path → (token ids `[T]`, integers; the end of each document, ascending). Tokens after the last end are one more.
ReadDocuments = Callable[[str], tuple[Any, Sequence[int] | Any]]


@dataclass(frozen=True)
class DataKind:
    """A kind of data, by its declarations."""

    name: str  # for `data.kind`
    read: ReadDocuments | None = None  # of a registered kind


KINDS = Registry("kind of data", *(DataKind(name) for name in ("indexed", "text", "chat", "synthetic")))


def is_registered(kind: str) -> bool:
    return KINDS[kind].read is not None


def register_data(name: str, read: ReadDocuments) -> None:
    """Register a kind of data for `data.kind`, before the config is loaded.

    `read` gets a path of `data.train` and the like. Processes call it once each, also those that read ahead. Raises
    ConfigError for a name that is taken.
    """
    KINDS.add(DataKind(name, read))
