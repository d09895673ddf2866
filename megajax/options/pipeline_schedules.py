"""Pipeline schedules by name; `step/pipeline/schedules.py` has their tables."""

from typing import Literal

Kind = Literal["gpipe", "1f1b", "zero_bubble"]
KINDS: tuple[Kind, ...] = ("gpipe", "1f1b", "zero_bubble")


def defers(kind: Kind) -> bool:
    """Whether gradients of weight matrices are computed later than the others."""
    return kind == "zero_bubble"
