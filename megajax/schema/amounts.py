"""Numbers of tokens in words, and the text of `batch.schedule`."""

import re
from decimal import Decimal
from typing import Any

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS = rf"(\d+(?:\.\d+)?)([{''.join(UNITS)}]?)"
_ENTRY = re.compile(rf"\s*{_TOKENS}\s*:\s*(\d+)\s*")


NO_SCHEDULE = "is not a schedule: write the tokens from which each size applies, such as '0: 256, 50B: 512'"


def as_text(value: Any) -> str:
    """A schedule as text, also of a mapping from tokens to sequences. Raises ValueError for other values."""
    if isinstance(value, dict):
        return ", ".join(f"{tokens}: {size}" for tokens, size in value.items())
    if not isinstance(value, str):
        raise ValueError(NO_SCHEDULE)
    return value


def check_text(text: str) -> str:
    """`text` if it is a schedule. Raises ValueError with problem and cure."""
    entries = sizes_in(text)
    if not entries:
        raise ValueError(NO_SCHEDULE)
    if entries[0][0]:
        raise ValueError(f"has no size for the first steps: begin with 0, such as '0: {entries[0][1]}'")
    for rising in zip(*entries, strict=True):
        if any(one >= other for one, other in zip(rising, rising[1:], strict=False)):
            raise ValueError("does not rise: give each size more tokens and more sequences than the one before it")
    if not entries[0][1]:
        raise ValueError("has steps without sequences: use 1 or more")
    return text


def sizes_in(text: str) -> list[tuple[int, int]]:
    """The pairs (tokens, sequences) of a schedule; empty if it is not one."""
    found = [_ENTRY.fullmatch(entry) for entry in text.split(",")]
    values = [(_amount(match), int(match[3])) for match in found if match]
    whole = len(values) == len(found) and all(tokens == int(tokens) for tokens, _ in values)
    return [(int(tokens), size) for tokens, size in values] if whole else []


def tokens_of(text: str) -> float:
    """A number of tokens: 15T, 1.5B or 15e12. Raises ValueError if it is none."""
    match = re.fullmatch(_TOKENS, text)
    return float(_amount(match) if match else text)


def _amount(match: re.Match[str]) -> Decimal:
    return Decimal(match[1]) * UNITS[match[2]]
